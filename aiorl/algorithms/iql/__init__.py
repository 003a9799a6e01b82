"""Implicit Q-learning."""
