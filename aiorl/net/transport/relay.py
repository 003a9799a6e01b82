"""One download of weights for each host: a process that subscribes once and hands broadcasts on,
unread.

The parent of several workers starts a relay, too (see `aiorl.worker`). Its Unix socket, which only
this user can reach, takes subscriptions to an address of a learner. The relay then subscribes
there, as one more peer with the workers' keys, and publishes what arrives. The first frame is the
address, a space, and a head (see `sockets.BROADCAST_HEAD`). All other messages pass through the
worker's own connection.

No worker depends on the relay: each subscribes to the learner itself, and changes over when the
relay has announced a subscription, which it does only while its own is in force. What passes a
worker by in that moment, or while the relay connects again, shows in the learner's heartbeats, and
the worker asks for it. A worker whose relay has ended, or stands still, connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from functools import partial

import zmq

from aiorl.config.addresses import split_address
from aiorl.errors import AiorlError, ConfigError, SecurityError
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, Event, WorkerEndpoint
from aiorl.net.transport.local import bind_local, forget_local, urls_of
from aiorl.net.transport.security import WorkerKeys, load_worker_keys
from aiorl.net.transport.sockets import (
    BROADCAST_HEAD,
    SubscriptionPump,
    make_context,
    make_socket,
    send_frames,
    term,
)
from aiorl.net.transport.zmq_worker import Channel, ZmqWorkerEndpoint
from aiorl.process.children import FAILED, HOPELESS, RELAY, STOPPED, watch_parent
from aiorl.process.program import log_to_stderr
from aiorl.process.tasks import new_event_loop, report_stray_errors

logger = logging.getLogger(__name__)

_MAX_SUBSCRIPTION_BYTES = 512
_MAX_SOURCES = 8
"""Learners at a time; while an address changes, there may be more than one."""


class Relay:
    """Publishes on this host what learners broadcast; one subscription for each learner that
    workers ask for.

    Args:
        name: name of its socket, see `aiorl.net.transport.local`.
        keys: the workers' keys.
        limits: the bounds; those of a worker's broadcasts hold for it and for each of its
            subscribers.
    """

    def __init__(
        self, name: str, *, keys: WorkerKeys | None = None, limits: EndpointLimits | None = None
    ) -> None:
        self._name = name
        self._keys = keys
        self._limits = limits or EndpointLimits()
        self._sources: dict[bytes, _Source] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._epoch = secrets.token_bytes(8)
        self._count = 0

    def start(self) -> None:
        """Bind the socket; call this on the running loop.

        Raises:
            SecurityError: when there is no place for a socket that only this user can reach.
        """
        self._context = make_context()
        self._xpub = make_socket(self._context, zmq.XPUB, self._limits)
        self._xpub.sndhwm = self._limits.broadcast_messages
        self._xpub.maxmsgsize = _MAX_SUBSCRIPTION_BYTES
        self._xpub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pump = SubscriptionPump(self._xpub, self._receive)
        bind_local((self._xpub,), self._name)

    async def close(self) -> None:
        """End all subscriptions and delete the socket's file, which takes at most 4 s."""
        self._pump.close()
        forget_local(self._name)
        for topic in list(self._sources):
            self._unsubscribe(topic)
        await asyncio.gather(*self._closing)
        await term(self._context, [self._xpub], 0.0)

    def _receive(self) -> None:
        message = self._xpub.recv(zmq.DONTWAIT)
        kind = message[:1]
        topic = message[1:]
        if kind == b"\x00":  # no one is subscribed to it any more
            self._unsubscribe(topic)
        elif topic in self._sources:
            self._sources[topic].hurry()
            self._announce(topic)
        elif kind == b"\x01" and len(self._sources) < _MAX_SOURCES:
            self._subscribe(topic)

    def _subscribe(self, topic: bytes) -> None:
        address = topic.decode("utf-8", errors="replace").removesuffix(" ")
        try:
            split_address(address, key="the topic of a subscription")
        except ConfigError as error:
            logger.warning("%s", error)
            return
        source = self._sources[topic] = _Source(address, keys=self._keys, limits=self._limits)
        source.on_broadcast = partial(self._publish, topic)
        source.on_event = partial(self._announce, topic)
        source.start()

    def _unsubscribe(self, topic: bytes) -> None:
        source = self._sources.pop(topic, None)
        if source is not None:
            task = asyncio.create_task(source.close(flush_s=0.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _announce(self, topic: bytes, event: Event | None = None) -> None:
        """Let subscribers of a learner know that they are subscribed, if it is so."""
        if topic in self._sources and self._sources[topic].connected:
            self._publish(topic)

    def _publish(self, topic: bytes, frames: Sequence[Buffer] = ()) -> None:
        self._count += bool(frames)
        send_frames(self._xpub, [topic + BROADCAST_HEAD.pack(self._epoch, self._count), *frames])
        self._pump.settle()


class _Source(ZmqWorkerEndpoint):
    """A learner's broadcasts, without a connection for other messages."""

    def _find(self) -> tuple[str, str]:
        return "", super()._find()[1]

    def hurry(self) -> None:
        """Connect now if the next try is due later, because a worker is trying as well."""
        if not self._link.channels:
            self._again(0.0)


class RelayedEndpoint(ZmqWorkerEndpoint):
    """Endpoint of a worker that gets the learner's broadcasts through the relay of its host while
    that has them.

    While it changes over, broadcasts can come twice. Without keys, a learner with Unix sockets on
    this host needs no relay.

    Args:
        connect: places of the learner, as for `ZmqWorkerEndpoint`.
        relay: name of the relay's socket.
        keys: the worker's keys.
        limits: the bounds.
    """

    def __init__(
        self,
        connect: str | Sequence[str],
        relay: str,
        *,
        keys: WorkerKeys | None = None,
        limits: EndpointLimits | None = None,
    ) -> None:
        super().__init__(connect, keys=keys, limits=limits)
        self._relay = relay
        # a subscription to the relay that has not taken the place of our own
        self._relayed: Channel | None = None

    @property
    def is_relayed(self) -> bool:
        """True if broadcasts come through the relay alone."""
        channels = self._link.channels
        return len(channels) == 2 and bool(channels[-1].topic)

    def _open_channels(self, undo: contextlib.ExitStack) -> tuple[Channel, ...]:
        channels = super()._open_channels(undo)
        if not self.is_local:
            try:
                url, _ = urls_of(bind_local((), self._relay))
            except SecurityError as error:
                self._reasons.log_once(str(error))
            else:
                topic = f"{self._link.urls[0]} ".encode()
                self._relayed = self._open(undo, url, zmq.SUB, self._receive_broadcast, topic=topic)
        return channels

    def _receive_broadcast(self, channel: Channel) -> None:
        if channel is self._relayed:
            # for now, everything comes over our own subscription
            channel.ready |= bool(channel.receive())
        else:
            super()._receive_broadcast(channel)

    def _tick(self) -> None:
        super()._tick()
        link = self._link
        relayed = self._relayed
        if relayed is not None:
            relayed.pump.poll()
            if relayed.ready and link.is_usable:
                relayed.shook_hands = True
                link.channels = (*link.channels, relayed)
                self._relayed = None
                logger.info("weights come through the relay of this host")
        elif len(link.channels) > 2 and not link.is_ending:
            # by now, nothing is on its way over our own subscription any more
            messages, subscription, relayed = link.channels
            link.channels = (messages, relayed)
            self._give_up(subscription)
            subscription.socket.close(0)

    def _give_up_channels(self) -> list[zmq.Socket[bytes]]:
        sockets = super()._give_up_channels()
        if self._relayed is not None:
            self._relayed.close()
            sockets.append(self._relayed.socket)
            self._relayed = None
        return sockets


def worker_endpoint(
    connect: Sequence[str], keys: WorkerKeys | None, limits: EndpointLimits | None = None
) -> WorkerEndpoint:
    """Make the endpoint of a worker, which uses a relay if its parent has started one."""
    relay = os.environ.get(RELAY)
    if relay:
        return RelayedEndpoint(connect, relay, keys=keys, limits=limits)
    return ZmqWorkerEndpoint(connect, keys=keys, limits=limits)


async def run_relay(relay: Relay) -> None:
    """Run a relay until this process's parent is gone.

    It ignores requests to stop, because workers need it for their goodbyes; the parent outlives
    them.

    Raises:
        SecurityError: there is no place for its socket.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def end(error: BaseException | None = None) -> None:
        if not ended.done():
            ended.set_result(error)

    report_stray_errors(end)
    watch_parent(lambda: loop.call_soon_threadsafe(end))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    relay.start()
    try:
        error = await ended
        if error is not None:
            raise error
    finally:
        await relay.close()


def main() -> int:
    """Run the relay of the workers that this process's parent starts.

    The arguments are the directory of keys or "", and the level of the log or "".

    Returns:
        The exit status, one of `aiorl.process.children`.
    """
    keys, level = sys.argv[1:]
    log_to_stderr(level)
    try:
        relay = Relay(os.environ[RELAY], keys=load_worker_keys(keys) if keys else None)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run_relay(relay))
    except AiorlError as error:
        logger.error("%s", error)
        return HOPELESS if isinstance(error, ConfigError) else FAILED
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
