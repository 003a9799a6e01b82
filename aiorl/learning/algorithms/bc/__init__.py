"""Behaviour cloning."""
