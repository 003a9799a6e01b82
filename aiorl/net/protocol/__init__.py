"""Protocol rules: which messages are allowed when, and their effects.

No sockets, no asyncio, no clock.
"""
