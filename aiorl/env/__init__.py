"""Environments by name, stepped in lockstep: the source of all experience."""
