"""Policies at work: loaded, asked in batches, with sessions, over HTTP and WebSocket."""
