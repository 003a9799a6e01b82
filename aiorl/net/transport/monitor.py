"""What happens to a socket's connections, read from its monitor and put in plain words."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable

import zmq

from aiorl.net.transport.pump import SocketPump
from aiorl.net.transport.security import LearnerKeys, WorkerKeys

__all__ = ["SocketMonitor", "reason_seen_by_learner", "reason_seen_by_worker"]

# What is acted on. A listener that is out of descriptors fails to accept as fast as it can try, so that is not told.
_EVENTS = int(
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=HI")
_MAX_DRAINED = 100_000
_names = itertools.count()

_MECHANISM_MISMATCH = 0x11000002
_CRYPTOGRAPHIC = 0x11000001


class SocketMonitor:
    """Tells ``handler(event, value)`` of each connection event of a socket, in order.

    ``value`` is the descriptor for ACCEPTED, CONNECTED, DISCONNECTED and CLOSED, the error or protocol code for
    failed handshakes. Close it before its socket. ``pump`` reads what has been reported up to now.

    Events wait in a bounded queue. While it is full, ZeroMQ's own thread waits with the next one, and with it all
    that its sockets do: whoever makes connections faster than they are looked at is held back.
    """

    def __init__(self, socket: zmq.Socket[bytes], handler: Callable[[int, int], None]) -> None:
        address = f"inproc://aiorl.monitor.{next(_names)}"
        self._socket = socket
        self._handler = handler
        socket.monitor(address, _EVENTS)
        self._pair: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._pair.connect(address)
        self.pump = SocketPump(self._pair, self._receive)

    def close(self) -> None:
        """Stop monitoring."""
        self.pump.close()
        if not self._socket.closed:
            # ZeroMQ's thread holds a lock while it waits for room in a full queue, and what stops the monitor waits for
            # that lock. Once the queue has been emptied there is room for more than can happen in between.
            with contextlib.suppress(zmq.Again):
                for _ in range(_MAX_DRAINED):
                    self._pair.recv_multipart(zmq.DONTWAIT)
            self._socket.disable_monitor()
        self._pair.close(0)

    def _receive(self) -> None:
        head, *_ = self._pair.recv_multipart(zmq.DONTWAIT)
        event, value = _EVENT.unpack(head)
        self._handler(event, value)


_OTHER_USERS = (
    "only workers of the same user on the same host find the key of this run by themselves; for others, start "
    "learner and workers with --keys DIR"
)
_SILENT = "it left or fell silent in the middle of the handshake"
_LEARNER = {
    ("run", "silent"): f"{_SILENT}: a stranger, or no worker ({_OTHER_USERS})",
    (
        "run",
        "crypto",
    ): f"its message could not be decrypted: it has the keys of another learner or run ({_OTHER_USERS})",
    ("run", "mismatch"): f"it came without keys: {_OTHER_USERS}",
    ("keys", "silent"): f"{_SILENT}: it may have no keys (--keys DIR), or be no worker at all",
    ("keys", "mismatch"): "it came without keys, and this learner asks for them: start it with --keys DIR",
    ("none", "silent"): f"{_SILENT}: it may use keys while this learner has none, or be no worker at all",
    ("none", "mismatch"): "it came with keys, and this learner has none: start this learner with --keys DIR",
    ("keys", "crypto"): (
        "its message could not be decrypted: it holds another learner's public key; give it this learner's learner.key"
    ),
}
_STRANGERS_LEARNER = (
    "the learner may want a key, and this user's processes on this host have none for that port: start the worker as "
    "the learner's user on its host, or both with --keys DIR"
)
_OTHERS_RUN = (
    "the key of the run that listened on that port is not that of who listens there now: is it another user's learner, "
    "or one with --keys DIR?"
)
_WORKER = {
    **{("run", fault): _OTHERS_RUN for fault in ("auth", "mismatch", "crypto", "silent")},
    **{("stranger", fault): _STRANGERS_LEARNER for fault in ("auth", "mismatch", "crypto", "silent")},
    ("keys", "auth"): (
        "the learner refused our key: add {file} to its 'admitted' directory (it takes effect without a restart)"
    ),
    ("keys", "mismatch"): "we have keys but the learner uses no keys: start it with --keys DIR, or us without",
    ("keys", "crypto"): "the learner's answer could not be decrypted: is our learner.key that of this learner?",
    ("keys", "silent"): (
        "the other side ended the handshake: server key mismatch? our learner.key must be that of this learner (or it "
        "uses no keys, or is no learner)"
    ),
    ("none", "auth"): "the learner refused us: it may want keys (--keys DIR)",
    ("none", "mismatch"): "the learner asks for keys: start the worker with --keys DIR",
    ("none", "silent"): "the other side ended the handshake: it may want keys (--keys DIR), or be no learner at all",
}
"""Keys of the side that says it, what was wrong with the handshake -> what its user is told."""


def reason_seen_by_learner(event: int, code: int, keys: LearnerKeys | None) -> str:
    """Why a handshake failed, in words for the learner's user."""
    side = "none" if keys is None else "run" if keys.admitted is None else "keys"
    broken = f"it broke the ZeroMQ handshake (protocol error {code:#x}): is it something other than a worker?"
    return _LEARNER.get((side, _fault(event, code)), broken)


def reason_seen_by_worker(event: int, code: int, keys: WorkerKeys | None, *, on_loopback: bool) -> str:
    """Why a handshake failed, in words for the worker's user."""
    if keys is None:
        side, file = "stranger" if on_loopback else "none", ""
    else:
        side, file = "keys" if keys.public_key_file or not on_loopback else "run", keys.public_key_file
    broken = f"the other side broke the ZeroMQ handshake (protocol error {code:#x}): is it a learner?"
    return _WORKER.get((side, _fault(event, code)), broken).replace("{file}", file)


def _fault(event: int, code: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "auth"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "silent"
    return {_CRYPTOGRAPHIC: "crypto", _MECHANISM_MISMATCH: "mismatch"}.get(code, "broken")
