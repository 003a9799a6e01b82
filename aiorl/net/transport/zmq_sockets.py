"""Making ZeroMQ sockets with every option set before bind or connect, and taking a context down in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Iterable

import zmq

from aiorl.config.address import is_loopback
from aiorl.errors import ConfigError
from aiorl.net.transport.endpoint import EndpointLimits
from aiorl.net.transport.security import LearnerKeys, WorkerKeys
from aiorl.net.transport.zap import ZAP_DOMAIN

__all__ = ["bind_pair", "fd_of", "make_socket", "present", "serve", "term", "url", "user_id_of"]

logger = logging.getLogger(__name__)

_TERM_S = 2.0
_FREE_PAIR_TRIES = 50


def url(host: str, port: int) -> str:
    """The address as ZeroMQ wants it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, limits: EndpointLimits, *, ipv6: bool = False
) -> zmq.Socket[bytes]:
    """A socket with the options all of ours share: sizes bounded, dead connections found, nothing kept at close.

    ZeroMQ's own heartbeats stay off: libzmq 4.3.5 aborts the process when one is due on a connection that broke while
    its queue was full. A host that has vanished is found by the kernel, since whatever is sent to it or asked of it
    (keepalive) is not confirmed within ``dead_after_s``; a process that stands still, by the endpoints, since nothing
    is heard from it.
    """
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = limits.max_frame_bytes
    socket.rcvhwm = limits.receive_messages
    socket.sndhwm = limits.send_messages
    socket.handshake_ivl = int(limits.handshake_s * 1000)
    socket.heartbeat_ivl = 0
    socket.setsockopt(zmq.TCP_MAXRT, int(limits.dead_after_s * 1000))
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = max(1, round(limits.dead_after_s / 2))
    socket.tcp_keepalive_intvl = max(1, round(limits.dead_after_s / 6))
    socket.tcp_keepalive_cnt = 3
    socket.reconnect_ivl = 200
    socket.reconnect_ivl_max = 2000
    socket.connect_timeout = 5000
    if ipv6:
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def serve(socket: zmq.Socket[bytes], keys: LearnerKeys | None) -> None:
    """Make a listening socket ask the authenticator, and speak CURVE if there are keys."""
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    if keys is not None:
        socket.curve_publickey = keys.public_key
        socket.curve_secretkey = keys.secret_key
        socket.curve_server = True


def present(socket: zmq.Socket[bytes], keys: WorkerKeys | None) -> None:
    """Make a connecting socket prove its key, and the learner's."""
    if keys is not None:
        socket.curve_publickey = keys.public_key
        socket.curve_secretkey = keys.secret_key
        socket.curve_serverkey = keys.learner_key


def bind_pair(first: zmq.Socket[bytes], second: zmq.Socket[bytes], host: str, port: int) -> int:
    """Bind two sockets to two consecutive ports; port 0 takes a free pair. Returns the first port.

    Raises:
        ConfigError: a port is in use, or the address is not one of this machine.
    """
    if port:
        _bind(first, host, port)
        _bind(second, host, port + 1)
        return port
    for _ in range(_FREE_PAIR_TRIES):
        _bind(first, host, 0)
        bound = first.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        endpoint = bound.rstrip(b"\0").decode()
        free = int(endpoint.rpartition(":")[2])
        try:
            _bind(second, host, free + 1)
        except ConfigError:
            first.unbind(endpoint)
            continue
        return free
    raise ConfigError(f"no two consecutive free ports on {host}:", key="bind", value=host, hint="name a port.")


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> None:
    address = url(host, port) if port else url(host, 0).removesuffix("0") + "*"
    try:
        socket.bind(address)
    except (zmq.ZMQError, OverflowError) as error:
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            why, hint = "the port is in use", "is another learner running? Choose another port with --bind."
        elif number in (errno.EADDRNOTAVAIL, errno.ENODEV) or not is_loopback(host):
            why, hint = f"{error}", "name an address of this machine, or tcp://0.0.0.0:PORT for all of them."
        else:
            why, hint = f"{error}", "choose another address or port with --bind."
        raise ConfigError(f"cannot bind {address}: {why};", key="bind", value=address, hint=hint) from error


async def term(context: zmq.Context[zmq.Socket[bytes]], sockets: Iterable[zmq.Socket[bytes]], linger_s: float) -> None:
    """Close the sockets, give what is still on its way ``linger_s`` to leave, and free the context.

    Takes at most ``linger_s`` + 2 s. When cancelled, the context is freed in the background.
    """
    for socket in sockets:
        if not socket.closed:
            socket.close(int(linger_s * 1000))
    loop = asyncio.get_running_loop()
    freed = asyncio.Event()

    def free() -> None:
        context.term()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits any more
            loop.call_soon_threadsafe(freed.set)

    threading.Thread(target=free, name="aiorl-zmq-term", daemon=True).start()
    try:
        async with asyncio.timeout(linger_s + _TERM_S):
            await freed.wait()
    except TimeoutError:
        logger.warning("ZeroMQ did not let go of its sockets within %.1f s; leaving it behind", linger_s + _TERM_S)


def fd_of(frame: zmq.Frame) -> int:
    """Descriptor of the connection a frame came over, -1 if it came over none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def user_id_of(frame: zmq.Frame) -> str:
    """The public key (Z85) that the connection a frame came over has proved, "" without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
