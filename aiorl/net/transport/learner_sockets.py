"""The two listening sockets of a learner, and the addresses at which workers find them."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import zmq

from aiorl.config.addresses import is_loopback, reachable_from_here, split_address, url
from aiorl.errors import SecurityError
from aiorl.net.transport.connections import CAN_TELL_BYTES
from aiorl.net.transport.endpoint import EndpointLimits
from aiorl.net.transport.local import bind_local, clear_local, forget_local, urls_of
from aiorl.net.transport.security import LearnerKeys, serve, serve_local
from aiorl.net.transport.sockets import bind_pair, make_context, make_socket, reserve_pair, term

logger = logging.getLogger(__name__)

MAX_SUBSCRIBER_BYTES = 4096
"""Limit of one message and of all messages of a subscriber; handshake and subscription take some
hundred bytes."""


class LearnerSockets:
    """A ROUTER for addressed messages and an XPUB for broadcasts.

    Args:
        bind: "tcp://HOST:PORT"; the broadcast port is PORT + 1. PORT 0 takes a free pair.
        keys: the learner's keys.
        insecure: True to let everyone connect if there are no keys.
        limits: the bounds.

    Attributes:
        keys: the learner's keys, None without.
        port: the first port, 0 until a free pair was chosen.
        path: file of the first Unix socket; None if there is none.
        context: their context, from `open` on.
        router: the ROUTER, from `open` on.
        xpub: the XPUB, from `open` on.
    """

    def __init__(
        self, bind: str, keys: LearnerKeys | None, *, insecure: bool, limits: EndpointLimits
    ) -> None:
        self.keys = keys
        self._host, self.port = split_address(bind, key="bind")
        self.path: Path | None = None
        self._is_insecure = insecure and keys is None
        self._limits = limits
        self._reserved: list[socket.socket] = []
        if self._is_insecure and not is_loopback(self._host):
            logger.warning(
                "%s is open to everyone who can reach it: --insecure was given, without keys", bind
            )

    @property
    def address(self) -> str:
        """Address that workers connect to; valid after `bind`."""
        return url(self._host, self.port)

    @property
    def local_address(self) -> str:
        """Address for workers that the learner itself starts; valid after `bind`."""
        if self.path is None:
            return reachable_from_here(self.address)
        return urls_of(self.path)[0]

    @property
    def is_listening_on_ports(self) -> bool:
        """True if the ports are not just reserved; valid after `bind`."""
        return not self._reserved

    @property
    def needs_guard(self) -> bool:
        """True if only a `BacklogGuard` bounds the unread data of peers; valid after `bind`."""
        return CAN_TELL_BYTES and self.is_listening_on_ports

    def open(self) -> None:
        """Make the sockets, which listen nowhere yet."""
        limits = self._limits
        is_ipv6 = ":" in self._host
        self.context = make_context()
        self.router = make_socket(self.context, zmq.ROUTER, limits, ipv6=is_ipv6)
        self.router.router_mandatory = True
        self.xpub = make_socket(self.context, zmq.XPUB, limits, ipv6=is_ipv6)
        self.xpub.sndhwm = limits.broadcast_messages
        self.xpub.maxmsgsize = MAX_SUBSCRIBER_BYTES
        self.xpub.setsockopt(zmq.XPUB_VERBOSER, 1)

    def bind(self) -> None:
        """Bind both sockets: to ports if other users may join, and to files that only this user can
        reach.

        Each listener keeps the options that its socket has at the time of the bind.

        Raises:
            ConfigError: when a port is in use, or the address does not belong to this machine.
            SecurityError: when there is no place for sockets that only this user's workers can
                reach.
        """
        pair = self.router, self.xpub
        if self.keys is None and not self._is_insecure:
            # the IPv4 address stands for every loopback address
            self.port, self._reserved = reserve_pair("127.0.0.1", self.port)
        else:
            for listener in pair:
                serve(listener, self.keys)
                if CAN_TELL_BYTES:
                    listener.rcvhwm = 0  # see `BacklogGuard`
            self.port = bind_pair(*pair, self._host, self.port)
        clear_local(self.port)
        if self._is_insecure:
            return
        for listener in pair:
            serve_local(listener)
            listener.rcvhwm = self._limits.receive_messages
        self.path = bind_local(pair, self.port)
        logger.info("workers of this user on this host find the learner at %s", self.path)

    @property
    def is_deleted(self) -> bool:
        """True if the socket files were deleted, for example because their user has logged out."""
        return self.path is not None and not self.path.is_socket()

    def bind_deleted(self) -> None:
        """Bind to the socket files again."""
        try:
            self.path = bind_local((self.router, self.xpub), self.port)
        except SecurityError as error:
            logger.warning("%s; new workers cannot find the learner", error)
        else:
            logger.warning(
                "workers of this user on this host now find the learner at %s", self.path
            )

    def release(self) -> None:
        """Give up the addresses; the sockets stay open."""
        for reserved in self._reserved:
            reserved.close()
        if self.path is not None:
            forget_local(self.port)

    def discard(self) -> None:
        """Close the sockets at once; nothing was sent over them."""
        self.router.close(0)
        self.xpub.close(0)
        self.context.term()

    async def term(self, linger_s: float) -> None:
        """Close the sockets, give unsent messages ``linger_s`` seconds to leave, and free the
        context, which takes at most 2 s more.
        """
        await term(self.context, [self.router, self.xpub], linger_s)
