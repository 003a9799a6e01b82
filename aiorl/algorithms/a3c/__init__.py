"""Asynchronous advantage actor-critic."""
