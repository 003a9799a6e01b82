"""A peer that speaks ZMTP 3.1 (without keys) over a plain socket, so that it can do things that
libraries refuse.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from types import TracebackType

from aiorl.net.transport.sockets import reserve_pair

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


def ready(kind: str) -> bytes:
    """Return the command that ends a handshake from a socket of this kind."""
    properties = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", kind.encode()), (b"Identity", b""))
    )
    body = b"\x05READY" + properties
    return bytes([4, len(body)]) + body


def frame(payload: bytes, *, more: bool = False) -> bytes:
    """Return one frame of a message, as bytes."""
    if len(payload) < 256:
        return bytes([int(more), len(payload)]) + payload
    return bytes([2 | int(more)]) + struct.pack(">Q", len(payload)) + payload


class RawPeer:
    """Connected peer after its handshake."""

    def __init__(
        self, port: int, kind: str = "DEALER", *, receive_buffer: int | None = None
    ) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(10)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            self.socket.connect(("127.0.0.1", port))
            self.shake_hands(kind)
        except OSError:
            self.socket.close()
            raise

    @classmethod
    def accepted(cls, connection: socket.socket, kind: str) -> RawPeer:
        """Return a peer of this kind for a connection that was accepted."""
        peer = cls.__new__(cls)
        peer.socket = connection
        peer.shake_hands(kind)
        return peer

    def shake_hands(self, kind: str) -> None:
        self._got = b""
        self.socket.sendall(GREETING + ready(kind))
        self._take(64)
        self.receive()

    def send(self, *payloads: bytes) -> None:
        """Send one message."""
        last = len(payloads) - 1
        self.socket.sendall(
            b"".join(frame(each, more=index < last) for index, each in enumerate(payloads))
        )

    def receive(self) -> list[bytes]:
        """Return the next message or command; [] at the end of the connection."""
        frames: list[bytes] = []
        more = True
        while more:
            try:
                flags, *_ = self._take(1)
                size = struct.unpack(">Q", self._take(8))[0] if flags & 2 else self._take(1)[0]
                frames.append(self._take(size))
            except ConnectionError:
                return []
            more = bool(flags & 1)
        return frames

    def reset(self) -> None:
        """End the connection with a reset."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, count: int) -> bytes:
        while len(self._got) < count:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            self._got += data
        taken, self._got = self._got[:count], self._got[count:]
        return taken


class RawListener:
    """Two consecutive ports at which a false learner takes one connection each."""

    def __init__(self) -> None:
        self.port, self._listeners = reserve_pair("127.0.0.1", 0)
        for listener in self._listeners:
            listener.listen()
            listener.settimeout(10)

    def accept(self) -> tuple[RawPeer, RawPeer]:
        """Return the connections of a worker's endpoint to both ports, after their handshakes."""
        first, second = (listener.accept()[0] for listener in self._listeners)
        for connection in (first, second):
            connection.settimeout(10)
        return RawPeer.accepted(first, "ROUTER"), RawPeer.accepted(second, "XPUB")

    def __enter__(self) -> RawListener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for listener in self._listeners:
            listener.close()
