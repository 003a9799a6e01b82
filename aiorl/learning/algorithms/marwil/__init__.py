"""Monotonic advantage re-weighted imitation learning."""
