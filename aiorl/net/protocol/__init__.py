"""What may be said when on the wire, and what follows: no sockets, no asyncio, no clock."""
