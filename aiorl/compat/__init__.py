"""Older interfaces of RLlib on top of aiorl's parts.

Only ``aiorl/__init__.py`` imports from here: for users, and to wrap workers for their callbacks.
"""
