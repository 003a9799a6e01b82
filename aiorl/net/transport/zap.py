"""ZeroMQ's authentication protocol (ZAP, RFC 27) on the running asyncio loop.

Each handshake with one of our listening sockets asks here first. With keys, only clients whose public key lies
in the admitted directory, or was made for the run, pass, and they get that key, in Z85, as user id. Without keys
(--insecure) everyone who speaks ZeroMQ 4 passes; asking all the same makes libzmq refuse what is no ZeroMQ 4 peer.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq
import zmq.utils.z85

from aiorl.net.transport.pump import SocketPump
from aiorl.net.transport.security import AdmittedKeys

__all__ = ["ZAP_DOMAIN", "Authenticator"]

ZAP_DOMAIN = b"aiorl"
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Authenticator:
    """Answers the handshakes of one context's listening sockets.

    Args:
        context: whose sockets to answer for; they must set ``zap_domain`` to `ZAP_DOMAIN`.
        admitted: the admitted keys, None if no keys are in use.
        on_refused: called with (ip address, reason) of each client that is turned away.

    Attributes:
        pump: reads the questions.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admitted: AdmittedKeys | None,
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._admitted = admitted
        self._on_refused = on_refused
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.bind(_ADDRESS)
        self.pump = SocketPump(self._socket, self._receive)

    def close(self) -> None:
        """Stop answering."""
        self.pump.close()
        self._socket.close(0)

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        if len(frames) < 8 or frames[2] != _VERSION:
            return  # only libzmq itself can reach an inproc address of our context
        asker, _, _, request_id, _domain, address, _identity, mechanism, *credentials = frames
        user_id, reason = self._judge(mechanism, credentials)
        status = b"400" if reason else b"200"
        reply = [asker, b"", _VERSION, request_id, status, reason.encode(), user_id.encode(), b""]
        self._socket.send_multipart(reply, zmq.DONTWAIT)
        self.pump.schedule()
        if reason:
            self._on_refused(address.decode("ascii", errors="replace"), reason)

    def _judge(self, mechanism: bytes, credentials: list[bytes]) -> tuple[str, str]:
        if self._admitted is None:
            return "", "" if mechanism == b"NULL" else "this learner uses no keys"
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return "", "it came without a key"
        public_key = zmq.utils.z85.encode(credentials[0])
        if self._admitted.name_of(public_key) is None:
            return "", f"its public key {public_key.decode()} is not admitted: copy its .key file to 'admitted'"
        return public_key.decode(), ""
