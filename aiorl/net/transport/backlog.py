"""Bounds what peers have sent and the learner has not read, which libzmq itself is not let bound.

A receive high-water mark makes libzmq stop reading a connection and start again later. libzmq 4.3.5 aborts the process
when it does so on a connection that was reset meanwhile and finds a heartbeat of the peer to answer. So the learner's
sockets have no mark. The kernel knows what a connection brings, the endpoint what was taken of it; the
difference lies in libzmq, and who exceeds a bound is cut off. A thread looks at that, since a flood on
loopback brings gigabytes in a second, and the loop may be busy for some of it.

A connection that the learner has not answered yet has nothing to send but a ``hello``, so it may have little unread.
Its bytes count 32 times, since it may send a message of empty frames without end: each takes 64 bytes in libzmq for 2
on the wire.

What a connection that has ended has left behind nobody can tell exactly: it may have brought much since the last look.
So each counts with the most that it can have been, and new ones are not taken while too much of that is unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiorl.net.transport.connections import Connection, ConnectionTable
from aiorl.net.transport.endpoint import EndpointLimits
from aiorl.process.machine import heap_bytes

__all__ = ["BacklogGuard", "wire_overhead"]

_LOOK_S = 0.05
_UNSEEN_BYTES = 64 << 20
"""Bytes that a connection can bring between two looks."""
_STRANGER_BYTES = 1 << 20
_FRAME_COST = 32
"""An empty frame has 2 bytes on the wire, and takes 64 in libzmq."""
_GROWTH_BYTES, _GROWTH_FACTOR = 1 << 30, 4
"""This process may grow by so much, and by so many times all that comes, while one message is on its way."""
_LOOKS_WHILE_CALM = 5
_SHARE = 0.02
_SAMPLE_MESSAGES = 256
_SAMPLE_WITHIN_S = 1.0


def wire_overhead(*, curve: bool) -> tuple[int, int, int]:
    """Largest frame with a short head, and how many bytes more than its payload a short and a long frame take."""
    box = 33 if curve else 0  # name of the command, nonce, authentication and flags
    return 255 - box, 2 + box, 9 + box


@dataclass(slots=True)
class _Account:
    """The account of one connection.

    Attributes:
        since, taken_bytes, taken_messages: the beginning of a sample of its messages.
        num_excesses: samples in a row that showed too many.
        brought_bytes, unread_bytes: at the last look.
        delivered, heap_bytes, arrived_bytes: messages taken from it, and memory of this process and bytes of all
            connections, when the message on its way began.
    """

    since: float
    taken_bytes: int = 0
    taken_messages: int = 0
    num_excesses: int = 0
    brought_bytes: int = 0
    unread_bytes: int = 0
    delivered: int = 0
    heap_bytes: int = 0
    arrived_bytes: int = 0


class BacklogGuard:
    """Cuts connections off that have sent more than may wait, in a thread of its own.

    Args:
        table: the connections; `Connection.taken_bytes` and ``delivered`` are kept by their user.
        limits: the bounds.
        on_cut: called on the loop with each connection that was cut, and why.
        max_bytes: bound of a connection that was answered, if it isn't twice the largest message.
        is_open: anybody may register, also who then sends a message of empty frames without end. So the largest message
            on its way is cut off, too, if this process has grown since it began by far more than all that came, and
            unfinished messages can be the reason.

    Should its thread die, that is raised on the loop, to be handled like the error of a callback.
    """

    def __init__(
        self,
        table: ConnectionTable,
        limits: EndpointLimits,
        on_cut: Callable[[Connection, str], None],
        *,
        max_bytes: int | None = None,
        is_open: bool = False,
    ) -> None:
        self._is_open = is_open
        self._arrived_bytes = 0
        self._emptied = False
        self._left_behind = 0
        self._table = table
        self._max_bytes = 2 * limits.max_message_bytes if max_bytes is None else max_bytes
        self._max_of_stranger = min(self._max_bytes, _STRANGER_BYTES)
        self._max_total_bytes = max(limits.max_unread_bytes, self._max_bytes)
        self._max_messages = limits.max_unread_messages
        self._on_cut = on_cut
        self._loop = asyncio.get_running_loop()
        self._accounts: dict[Connection, _Account] = {}
        self._cut: set[Connection] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiorl-backlog", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Return whether ended connections may have left too much unread for a new one to be taken."""
        return self._left_behind > self._max_total_bytes

    def emptied(self) -> None:
        """All that had come was taken."""
        self._emptied = True
        self._left_behind = 0

    def ended(self, connection: Connection) -> None:
        """A connection has ended, and what it has brought may not be taken yet."""
        account = self._accounts.get(connection)
        self._left_behind += _UNSEEN_BYTES + (account.unread_bytes if account is not None else 0)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            failure = error  # the name of the clause is gone when the loop comes to it

            def fail() -> None:
                raise failure

            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(fail)

    def _watch(self) -> None:
        pause_s = _LOOK_S
        num_calm = 0
        while not self._stop.wait(pause_s):
            # what waited was all taken since the last time: no hurry
            num_calm = num_calm + 1 if self._emptied else _LOOKS_WHILE_CALM
            self._emptied = False
            if num_calm < _LOOKS_WHILE_CALM:
                continue
            num_calm = 0
            before = time.thread_time()  # others may keep this thread waiting, on a busy machine for seconds
            self._look(time.monotonic())
            pause_s = max(_LOOK_S, (time.thread_time() - before) / _SHARE)

    def _look(self, now: float) -> None:
        connections = list(self._table)
        self._cut.intersection_update(connections)
        accounts: dict[Connection, _Account] = {}
        unread: list[tuple[int, int, Connection]] = []
        unfinished: list[tuple[int, Connection]] = []
        heap = heap_bytes() if self._is_open else 0
        for connection in connections:
            if connection in self._cut:
                continue
            taken = connection.taken_bytes  # before what was received, which only grows
            brought = self._table.look(connection)
            num_bytes = brought - taken
            accounts[connection] = account = self._accounts.get(connection) or _Account(now)
            self._arrived_bytes += brought - account.brought_bytes
            account.brought_bytes, account.unread_bytes = brought, num_bytes
            is_one = account.heap_bytes and account.delivered == connection.delivered and num_bytes > _STRANGER_BYTES
            if not is_one:
                account.delivered, account.heap_bytes = connection.delivered, heap
                account.arrived_bytes = self._arrived_bytes
            most, cost = (self._max_bytes, 1) if connection.is_served else (self._max_of_stranger, _FRAME_COST)
            if num_bytes > most:
                self._end(connection, f"{num_bytes} bytes")
            elif self._is_flood_of_small(connection, account, num_bytes, now):
                self._end(connection, f"more than {self._max_messages} messages")
            else:
                unread.append((num_bytes * cost, num_bytes, connection))
                if is_one:
                    unfinished.append((num_bytes, connection))
        self._accounts = accounts
        if unfinished:
            num_bytes, connection = max(unfinished, key=lambda each: each[0])
            account = accounts[connection]
            growth = min(heap - account.heap_bytes, _FRAME_COST * sum(num_bytes for num_bytes, _ in unfinished))
            if growth > _GROWTH_BYTES + _GROWTH_FACTOR * (self._arrived_bytes - account.arrived_bytes):
                self._end(connection, f"{num_bytes} bytes of one message, in frames that take far more memory")
                for account in accounts.values():
                    account.heap_bytes = 0  # what was taken is not given back at once: all begin from here
                return
        total = sum(costs for costs, _, _ in unread)
        if total <= self._max_total_bytes:
            return
        for costs, num_bytes, connection in sorted(unread, key=lambda each: each[0], reverse=True):
            self._end(connection, f"{num_bytes} bytes, the most of all connections")
            total -= costs
            if total <= self._max_total_bytes:
                return

    def _is_flood_of_small(self, connection: Connection, account: _Account, num_bytes: int, now: float) -> bool:
        """Return whether too many messages wait, judged by the size of those just taken, twice in a row.

        Each costs far more memory than its bytes, however small it is. Once is not enough: a large message may wait
        behind small ones.
        """
        num_messages = connection.delivered - account.taken_messages
        if num_messages < _SAMPLE_MESSAGES and now - account.since < _SAMPLE_WITHIN_S:
            return False
        mean_bytes = (connection.taken_bytes - account.taken_bytes) / max(1, num_messages)
        is_excess = num_messages >= _SAMPLE_MESSAGES and num_bytes > self._max_messages * mean_bytes
        account.num_excesses = account.num_excesses + 1 if is_excess else 0
        account.since = now
        account.taken_bytes, account.taken_messages = connection.taken_bytes, connection.delivered
        return account.num_excesses > 1

    def _end(self, connection: Connection, what: str) -> None:
        if self._table.cut(connection, reset=True):
            self._cut.add(connection)
            reason = f"too much of what it sent is unread, a flood or a message without end: {what}"
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._on_cut, connection, reason)
