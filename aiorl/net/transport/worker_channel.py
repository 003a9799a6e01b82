"""One of the two connections of a worker's endpoint: its socket, and how far it has come."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import zmq

from aiorl.net.transport.connections import bytes_received
from aiorl.net.transport.endpoint import EndpointLimits
from aiorl.net.transport.monitor import SocketMonitor
from aiorl.net.transport.pump import SocketPump, keep

__all__ = ["Channel"]


@dataclass(slots=True, eq=False)
class Channel:
    """A socket that connects to one port of the learner; given up when its connection ends.

    Attributes:
        port: the learner's.
        socket: a DEALER or a SUB.
        limits: bounds of a message.
        fd: descriptor of its connection, -1 before there is one.
        tcp_since: since when there is a connection without a handshake, None if there is none.
        shook_hands: the handshake was made.
        ready: all is done that must be before it is of use.
        heard: a message has come since the last look.
        received: bytes received at the last look.
        silent_s: for how long nothing was heard.
        pump: reads the socket.
        monitor: watches its connection.
    """

    port: int
    socket: zmq.Socket[bytes]
    limits: EndpointLimits
    fd: int = -1
    tcp_since: float | None = None
    shook_hands: bool = False
    ready: bool = False
    heard: bool = True
    received: int = 0
    silent_s: float = 0.0
    pump: SocketPump = field(init=False)
    monitor: SocketMonitor = field(init=False)

    def close(self) -> None:
        """Stop reading and watching; the socket is left open."""
        self.pump.close()
        self.monitor.close()

    def introduce(self) -> None:
        """Send the empty message by which the learner's endpoint learns of our routing id and tells of our end."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(b"", zmq.DONTWAIT)
        self.pump.schedule()

    def receive(self) -> list[memoryview]:
        """One whole message; [] if it was beyond the limits. Raises zmq.Again if there is none."""
        frames: list[memoryview] = []
        num_bytes = 0
        more = True
        limits = self.limits
        while more:
            frame = self.socket.recv(zmq.DONTWAIT, copy=False)
            more = frame.more
            num_bytes += len(frame)
            if len(frames) <= limits.max_frames and num_bytes <= limits.max_message_bytes:
                frames.append(keep(frame))
        self.heard = True
        return [] if len(frames) > limits.max_frames or num_bytes > limits.max_message_bytes else frames

    def listen(self, elapsed_s: float) -> None:
        """Note whether anything was heard since the look before, also if it was a part of a message."""
        received = self.received if self.heard else bytes_received(self.fd) or 0
        self.silent_s = 0.0 if self.heard or received != self.received else self.silent_s + elapsed_s
        self.heard, self.received = False, received
