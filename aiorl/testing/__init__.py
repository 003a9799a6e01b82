"""Environments for tests, aiorl's own and users'."""
