"""Admission of connections by their keys, and their end when a key is withdrawn."""

from __future__ import annotations

from collections.abc import Mapping

import zmq

from aiorl.net.transport.connections import LOCAL, Connection, ListeningPort
from aiorl.net.transport.security import AdmittedKeys, Authenticator, LearnerKeys


class Admission:
    """Admits connections to a learner's ports, and cuts off those whose key is withdrawn.

    Args:
        context: the context of the listening sockets.
        keys: the learner's keys; without keys, everyone is admitted who can reach the sockets.
        ports: the ports; the first one reports refusals.

    Attributes:
        pump: reads the requests of the handshakes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: LearnerKeys | None,
        ports: tuple[ListeningPort, ...],
    ) -> None:
        self._admitted = None if keys is None else AdmittedKeys(keys.admitted)
        # the keys by which connections were last judged
        self._acted_on: Mapping[bytes, str] = {}
        if self._admitted is not None:
            self._acted_on = self._admitted.refresh()
        self._ports = ports
        self._authenticator = Authenticator(context, self._admitted, ports[0].refuse)
        self.pump = self._authenticator.pump

    def close(self) -> None:
        """End the answers to handshakes."""
        self._authenticator.close()

    def check(self, port: ListeningPort, connection: Connection) -> None:
        """Cut off a connection if its key was withdrawn since the handshake."""
        if self._admitted is None or connection.address == LOCAL:
            return
        if self._admitted.name_of(connection.user_id.encode()) is None:
            port.cut(connection, "its key is no longer admitted")

    def cut_withdrawn(self) -> None:
        """Cut off connections with a key that is no longer admitted.

        The key of a connection is known from its first message on. When a key is withdrawn, all
        connections without a message are therefore cut, too; those with another key connect again.
        """
        if self._admitted is None:
            return
        before = self._acted_on
        self._acted_on = self._admitted.refresh()
        if before.keys() <= self._acted_on.keys():
            return
        for port in self._ports:
            port.monitor.pump.drain()
        for port in self._ports:
            for connection in port.table:
                public_key = connection.user_id.encode()
                if connection.address == LOCAL:
                    continue
                if not public_key:
                    port.cut(
                        connection,
                        "a key was withdrawn, and this connection had not shown its own yet",
                    )
                elif public_key not in self._acted_on:
                    name = before.get(public_key, connection.user_id)
                    port.cut(connection, f"its key {name!r} is no longer admitted")
