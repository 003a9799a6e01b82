"""The thin shell that moves frames: endpoints over ZeroMQ or in memory, and who may connect."""

from __future__ import annotations

__all__: list[str] = []
