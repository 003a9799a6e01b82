"""Ape-X: deep Q-learning with many workers and a prioritised replay."""
