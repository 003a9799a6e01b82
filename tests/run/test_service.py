"""RemoteSource with real workers in one process: leases, order, lag, accounting, malformed
peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from in_process import LENGTH, NUM_ENVS, InProcess, learner_over_tcp, running, until, with_settings
from memory_endpoint import Direction, MemoryNetwork
from zmtp import RawPeer, frame

from aiorl.acting.filters import MeanStdFilter
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import ConfigError
from aiorl.net.protocol.events import SamplesAccepted
from aiorl.net.transport.endpoint import Event, EventKind
from aiorl.net.wire import decoding, messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.process.log_once import EventRates
from aiorl.run import peer_news
from aiorl.run.core import BeginUpdate, Effect, Report

PER_BATCH = 4 * LENGTH * NUM_ENVS
STREAMING = with_settings(mode="streaming")


async def train(updates: int, num_workers: int = 2, **options: Any) -> InProcess:
    async with running(num_workers, **options) as both:
        await both.updates_done(updates)
    return both


async def test_on_policy_batches_are_exact_have_one_version_and_follow_worker_order() -> None:
    both = await train(5)
    for number, done in enumerate(both.updates[:5]):
        assert done.batch.env_steps == PER_BATCH
        assert {fragment.message.first_version for fragment in done.batch.fragments} == {number}
        places = [(fragment.slot, fragment.message.seq) for fragment in done.batch.fragments]
        assert places == sorted(places)
        assert {slot for slot, _ in places} == {1, 2}
    ledger = both.ledger.as_dict()
    assert ledger["trained"] == len(both.updates) * PER_BATCH == both.counters.env_steps_trained
    assert ledger["discarded"] == {}


async def test_the_same_seed_gives_the_same_batches_with_two_workers_whatever_the_order_of_arrival() -> (
    None
):
    rng = np.random.default_rng(0)

    def jitter(direction: Direction, number: int) -> tuple[float, ...]:
        return (float(rng.random() * 0.01),)

    first = await train(6, observation_filter="MeanStdFilter")
    second = await train(6, network=MemoryNetwork(jitter), observation_filter="MeanStdFilter")
    for one, other in zip(first.algorithm.batches[:6], second.algorithm.batches[:6], strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left[c.OBS], right[c.OBS])
            np.testing.assert_array_equal(left[c.ACTIONS], right[c.ACTIONS])


async def test_r7_streaming_keeps_queues_bounded_with_a_slow_learner_and_loses_nothing() -> None:
    both = await train(8, algorithm=with_settings(mode="streaming", update_s=0.05))
    ledger = both.ledger.as_dict()
    assert ledger["discarded"] == {}
    per_worker: dict[int, list[int]] = {}
    for done in both.updates:
        for fragment in done.batch.fragments:
            per_worker.setdefault(fragment.slot, []).append(fragment.message.seq)
    assert all(seqs == list(range(1, len(seqs) + 1)) for seqs in per_worker.values())
    # fragments that can wait: the assembler's queue, the leases, one batch queued and one in the
    # thread
    assert ledger["sampled"] - ledger["trained"] <= (2 + 1 + 1 + 1) * PER_BATCH


async def test_fragments_that_arrive_while_a_run_ends_are_not_in_its_last_result() -> None:
    async with running(algorithm=with_settings(mode="streaming", update_s=0.02)) as both:
        await both.updates_done(5)
        both.source.stop()
        episodes, sampled = both.results.episodes_total, both.counters.env_steps_sampled
        assert episodes > 0
        await until(lambda: both.counters.env_steps_sampled > sampled, 2)
        assert both.results.episodes_total == episodes


async def test_the_bound_on_policy_lag_holds_for_every_fragment_trained_on() -> None:
    algorithm = with_settings(
        mode="streaming", fragments_per_batch=1, max_policy_lag=2, update_s=0.01
    )
    for number, done in enumerate((await train(30, algorithm=algorithm)).updates):
        assert all(
            number - fragment.message.first_version <= 2 for fragment in done.batch.fragments
        )


class Tape:
    """Tape of the filter deltas of fragments, in the order of acceptance and of updates."""

    def __init__(self, both: InProcess) -> None:
        self.both = both
        self.accepted: list[dict[str, Any]] = []
        self.used: list[dict[str, Any]] = []
        self.published: list[m.Snapshot] = []
        publish, effects = both.source.session.publish, both.core.effects

        def publish_noted(snapshot: m.Snapshot, now: float) -> None:
            self.published.append(snapshot)
            publish(snapshot, now)

        def effects_noted(now: float) -> list[Effect]:
            found = effects(now)
            for effect in found:
                match effect:
                    case Report(SamplesAccepted(message=message)):
                        self.accepted.append(message.filter_deltas[DEFAULT_POLICY_ID])
                    case BeginUpdate(batch):
                        self.used += [
                            fragment.message.filter_deltas[DEFAULT_POLICY_ID]
                            for fragment in batch.fragments
                        ]
            return found

        both.source.session.publish = publish_noted  # type: ignore[method-assign]
        both.core.effects = effects_noted  # type: ignore[method-assign]

    @property
    def state(self) -> dict[str, Any]:
        """Statistics of the learner's filter."""
        return self.both.core.publisher.filters[DEFAULT_POLICY_ID].state()

    async def drain(self) -> None:
        """Stop leasing, use or discard all fragments, and wait until the workers have the final
        statistics.
        """
        source, core = self.both.source, self.both.core
        core.is_granting = False
        async with asyncio.timeout(30):
            while source.session.leases.outstanding() or not core.is_idle:
                await asyncio.sleep(0.01)
            # first waiting fragments become stale, then merged ones are acknowledged
            for _ in range(2):
                weights = {DEFAULT_POLICY_ID: self.both.algorithm.get_weights()}
                core._publish(weights, time.monotonic())
                source.pump()
            assert core.queued_fragments == 0
            while any(session.version < core.publisher.version for session in self.both.sessions):
                await asyncio.sleep(0.01)

    def check_workers(self) -> None:
        """Check that each worker has the learner's statistics after `drain`."""
        for worker in self.both.workers:
            for sampler in worker._running:
                unit: Any = sampler.unit
                unit._slot.between_steps()
                (found,) = unit.worker.filters.values()
                assert_same(found.state(), self.state)
                assert found.buffer_count == 0


def merged(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    oracle = MeanStdFilter((4,))
    for delta in deltas:
        oracle.merge_delta(delta)
    return oracle.state()


def assert_same(state: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    assert state["n"] == expected["n"] > 0
    for name in ("mean", "m2"):
        np.testing.assert_allclose(state[name], expected[name], rtol=rtol, err_msg=name)


@asynccontextmanager
async def taped(algorithm: Any, **options: Any) -> AsyncIterator[Tape]:
    """Start a run with two workers and the tape of its filter deltas."""
    both = InProcess(algorithm, observation_filter="MeanStdFilter", **options)
    both.start(2)
    tape = Tape(both)
    assert await both.source.wait_for_workers(2, 10)
    both.go_on()
    yield tape
    await both.close()


@pytest.mark.parametrize(
    ("mode", "num_samplers"), [("on_policy", 1), ("streaming", 1), ("streaming", 2)]
)
async def test_r139_the_learners_filter_equals_one_filter_that_saw_every_accepted_observation(
    mode: str, num_samplers: int
) -> None:
    """They agree bit by bit, since deltas are merged in the order of train batches or of
    arrival.
    """
    async with taped(with_settings(mode=mode), samplers_per_worker=num_samplers) as tape:
        await tape.both.updates_done(5)
    deltas = tape.accepted if mode == "streaming" else tape.used
    assert len(deltas) >= 5 * 4
    assert_same(tape.state, merged(deltas), rtol=0)
    if mode == "on_policy":
        assert tape.state["n"] >= 5 * PER_BATCH


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
async def test_r143_unused_on_policy_fragments_still_count_for_the_filter(delay_s: float) -> None:
    """The worker gets them acknowledged with later ones, so they would be lost otherwise."""
    network = MemoryNetwork(lambda direction, number: (delay_s,))
    async with taped(with_settings(max_policy_lag=0), network=network) as tape:
        for number in range(1, 4):  # some more than a batch needs
            tape.both.source.session.deal_again(3)
            tape.both.source.pump()
            await tape.both.updates_done(4 * number)
        await tape.drain()
        assert len(tape.accepted) > len(tape.used)
        assert_same(tape.state, merged(tape.accepted))
        tape.check_workers()
    assert sum(tape.both.ledger.as_dict()["discarded"].values()) > 0


@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
async def test_r139_a_worker_that_dies_with_fragments_in_the_queue_counts_once_and_leaves_no_acknowledgement(
    mode: str,
) -> None:
    async with taped(with_settings(mode=mode)) as tape:
        both, take_in, num_deaths = tape.both, tape.both.core._take_in, 0

        def take_in_and_kill(event: Any, now: float) -> None:
            nonlocal num_deaths
            take_in(event, now)
            if event.slot == 1 and event.message.seq == 3 and num_deaths < 3:
                num_deaths += 1
                both.source.session.mark_lost(1, "died with a fragment in the queue", now)

        both.core._take_in = take_in_and_kill  # type: ignore[method-assign]
        while num_deaths < 3:
            await both.updates_done(len(both.updates) + 1)
        assert await both.source.wait_for_workers(2, 10)
        await both.updates_done(len(both.updates) + 4)
        acked = set(tape.published[-1].filter_acks)
        assert acked
        assert acked <= {worker.incarnation for worker in both.source.session.workers}
        if mode == "on_policy":
            await tape.drain()
            tape.check_workers()
        assert_same(tape.state, merged(tape.accepted))


async def test_a_malformed_fragment_ends_only_its_workers_session() -> None:
    async with running(1) as both:
        bad = both.add_worker()
        send = both.sessions[-1].fragment_done

        def send_spoiled(samples: m.Samples, now: float) -> bool:
            spoilt = {
                **samples.batches[DEFAULT_POLICY_ID],
                c.OBS: np.zeros((LENGTH, NUM_ENVS, 3), np.float32),
            }
            return send(samples._replace(batches={DEFAULT_POLICY_ID: spoilt}), now)

        both.sessions[-1].fragment_done = send_spoiled  # type: ignore[method-assign]
        await both.source.wait_for_workers(2, 10)
        await until(lambda: "malformed" in both.ledger.discarded)
        bad.stop("enough")
        await both.updates_done(len(both.updates) + 5)
    assert both.failure is None
    assert both.ledger.as_dict()["discarded"]["malformed"] >= LENGTH * NUM_ENVS
    assert all(
        batch.shape == (LENGTH, NUM_ENVS, 4)
        for f in both.algorithm.batches
        for batch in [f[0][c.OBS]]
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sent: sent._replace(
            episodes={**sent.episodes, "hist/x": np.zeros(1 << 20, np.float16)}
        ),
        lambda sent: sent._replace(
            filter_deltas={
                DEFAULT_POLICY_ID: {"n": np.array(2.0**52), "mean": np.zeros(4), "m2": np.zeros(4)}
            },
        ),
    ],
    ids=["histories", "samples of a filter"],
)
async def test_a_fragment_larger_than_its_lease_ends_its_workers_session_uncounted(
    spoil: Any,
) -> None:
    async with among("v1", observation_filter="MeanStdFilter") as (both, peer):
        peer.say(peer.hello)
        version = (await peer.hears(m.Welcome)).snapshot.version
        lease = await peer.hears(m.Lease)
        peer.say(spoil(fragment_under(lease, max(lease.min_version, version))))
        assert (await peer.hears(m.Refused)).code
    assert both.ledger.as_dict()["discarded"]["malformed"] > 0
    assert both.counters.env_steps_sampled < 1 << 20
    assert both.core.publisher.filters[DEFAULT_POLICY_ID].state()["n"] < 1 << 20


async def test_a_failing_update_is_reported_and_its_env_steps_are_accounted_for() -> None:
    async with running() as both:
        both.algorithm.fail_at = len(both.algorithm.batches) + 2
        await both.updates_done(99)
    assert isinstance(both.failure, RuntimeError)
    assert [*both.ledger.as_dict()["discarded"].values()] == [PER_BATCH]


async def test_a_task_that_dies_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down(now: float) -> None:
        raise ZeroDivisionError("the clock is broken")

    async with running(1) as both:
        monkeypatch.setattr(both.source.session, "tick", break_down)
        await both.updates_done(999)
    assert isinstance(both.failure, ZeroDivisionError)


# Hostile peers
# --------------------------------------------------------------------------------------------------

CLEAR_SCREEN = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"
FORGED = "\n2026-01-01 00:00:00,000 ERROR aiorl.learner: forged"


class Peer:
    """Peer with its own connection, which sends given messages and keeps the received ones."""

    def __init__(self, both: InProcess, name: str, incarnation: str = "") -> None:
        self.hello = m.Hello(
            m.PROTOCOL_VERSION,
            "",
            name,
            incarnation or f"i-{name}",
            0,
            f"host {CLEAR_SCREEN}{FORGED}",
        )
        self.heard: list[m.Message] = []
        self.num_connections = 0
        self._told = asyncio.Event()
        self.endpoint = both.network.worker(queue_messages=10_000)
        self.endpoint.on_message = self._on_message
        self.endpoint.on_event = self._on_event
        self.endpoint.start()

    def say(self, *messages: m.Message) -> None:
        for message in messages:
            self.endpoint.send(encode(message))

    async def hears(self, kind: type[m.Message]) -> Any:
        """Return the next message of a kind."""
        async with asyncio.timeout(10):
            while True:
                while self.heard:
                    message = self.heard.pop(0)
                    if isinstance(message, kind):
                        return message
                self._told.clear()
                await self._told.wait()

    async def is_cut(self) -> None:
        """Wait until the learner has closed the connection and the next one is there."""
        async with asyncio.timeout(10):
            while self.num_connections < 2:
                self._told.clear()
                await self._told.wait()

    def _on_message(self, frames: list[memoryview]) -> None:
        self.heard.append(decode(frames))
        self._told.set()

    def _on_event(self, event: Event) -> None:
        self.num_connections += event.kind is EventKind.CONNECTED
        self._told.set()


@asynccontextmanager
async def among(*names: str, **options: Any) -> AsyncIterator[tuple[Any, ...]]:
    """Start peers of these names and a run with two honest workers, which must continue to train
    afterwards.
    """
    async with running(algorithm=STREAMING, **options) as both:
        await both.updates_done(1)
        peers = [Peer(both, name) for name in names]
        yield both, *peers
        await both.updates_done(len(both.updates) + 3)
        for peer in peers:
            await peer.endpoint.close()
    assert both.failure is None


def fragment_under(lease: m.Lease, version: int) -> m.Samples:
    shape = (LENGTH, NUM_ENVS)
    batch = {
        c.OBS: np.zeros((*shape, 4), np.float32),
        c.ACTIONS: np.zeros(shape, np.int64),
        c.REWARDS: np.zeros(shape, np.float32),
        c.LAST_OBS: np.zeros((NUM_ENVS, 4), np.float32),
    }
    steps = LENGTH * NUM_ENVS
    episodes = {"lengths": np.zeros(0, np.int32), "rewards": np.zeros(0)}
    return m.Samples(
        1,
        lease.lease_id,
        steps,
        steps,
        version,
        version,
        NUM_ENVS,
        LENGTH,
        {DEFAULT_POLICY_ID: batch},
        episodes,
        {DEFAULT_POLICY_ID: {}},
        {},
        steps,
    )


async def test_messages_of_unregistered_peers_are_not_decoded_and_their_connection_ends() -> None:
    """200 messages of 64 MB each when decompressed."""
    huge = {"p": {"obs": np.zeros((64, 1 << 20), np.uint8)}}
    bomb = encode(fragment_under(m.Lease(1, 1, 0), 0)._replace(batches=huge))
    assert 1 << 17 < sum(len(frame) for frame in bomb) < 1 << 20
    inflated, inflate = [], decoding.decompress

    def noted(data: memoryview, raw_bytes: int) -> memoryview:
        inflated.append(raw_bytes)
        return inflate(data, raw_bytes)

    async with among("a", "b", "c", "d") as (_, *peers):
        with patch.object(decoding, "decompress", noted):
            for peer in peers:
                for _ in range(50):
                    peer.endpoint.send(bomb)
            for peer in peers:
                await peer.is_cut()
    assert not [size for size in inflated if size > 1 << 20]


async def test_a_flood_of_failures_ends_its_senders_session_and_fills_only_a_few_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_news, "EventRates", partial(EventRates, window_s=0.3))
    async with among("villain") as (both, villain):
        villain.say(villain.hello)
        await villain.hears(m.Welcome)
        villain.say(*[m.Failure("env", "boom", "Traceback" + "x" * 50_000)] * 2000)
        await villain.is_cut()
        num_left_out = len(both.events)
        await until(lambda: len(both.events) > num_left_out, 5)
    assert sum(map(len, both.events)) < 300_000
    assert sum("boom" in text for text in both.events) == 1


async def test_a_peer_that_joins_and_leaves_endlessly_does_not_fill_the_log() -> None:
    async with among("villain") as (both, villain):
        for number in range(40):
            villain.say(
                villain.hello._replace(incarnation=f"i{number}"),
                m.Beat(0, "stuck", 1e9),
            )
            await villain.hears(m.Welcome)
            if number < 5:
                await villain.hears(m.Call)
            villain.say(m.Leaving("for a moment"))
    assert len(both.events) <= 40


async def test_text_of_a_peer_cannot_control_the_terminal() -> None:
    hostile = f"text {CLEAR_SCREEN}{FORGED}"
    async with among("one", "other") as (both, one, other):
        for villain in (one, other):
            villain.say(villain.hello)
            await villain.hears(m.Welcome)
        one.say(m.Beat(0, hostile, 1e9))
        call = await one.hears(m.Call)
        assert CLEAR_SCREEN not in both.source.waiting_for()
        assert "\n" not in both.source.waiting_for()
        one.say(
            m.Reply(call.call_id, True, hostile),
            m.Failure(hostile, hostile, hostile),
            m.Leaving(hostile),
        )
        other.say(m.Failure("env", hostile, hostile, fatal=True))
        await until(lambda: len(both.source.session.slots) == 2)
    for text in both.events:
        assert all(line.isprintable() for line in text.split("\n"))
    assert sum("\n" in text for text in both.events) == 2, (
        "stacks, and a failure that is reported once"
    )


async def test_workers_whose_clients_are_idle_are_not_at_fault() -> None:
    both = InProcess()
    both.start(0)
    assert not both.source.waits_for_others()
    for name in ("one", "other"):
        peer = Peer(both, name)
        peer.say(peer.hello)
        await peer.hears(m.Welcome)
        peer.say(m.Beat(0, f"{m.WAITING_FOR}clients: 0 sessions are open"))
    await until(both.source.waits_for_others)
    assert "clients: 0 sessions are open" in both.source.waiting_for()
    peer.say(m.Beat(0, "sampling", 4.0))
    await until(lambda: not both.source.waits_for_others())
    await both.close()


async def test_a_model_too_large_to_send_ends_the_run_at_the_start_with_a_reason() -> None:
    both = InProcess()
    weights = {f"weight{number:0250}": np.zeros(1, np.float32) for number in range(4000)}
    both.algorithm.get_weights = lambda: weights  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="max_header_bytes"):
        both.start(0)
    await both.close()


async def test_a_wait_for_many_workers_names_only_a_few() -> None:
    both = InProcess()
    both.start(0)
    for number in range(12):
        peer = Peer(both, f"p{number}")
        peer.say(peer.hello)
        await peer.hears(m.Welcome)
    assert re.findall(r"\d+", both.source.waiting_for()) == [*"12345678", "4"]
    await both.close()


async def test_equal_failures_of_many_workers_are_reported_once() -> None:
    async with among("a", "b", "c", "d") as (both, *villains):
        for number, villain in enumerate(villains):
            villain.say(villain.hello)
            await villain.hears(m.Welcome)
            message = f"environment {number} of pid {number + 100}: " + (
                "no key" if number == 3 else "no licence"
            )
            villain.say(m.Failure("env", message, f"Traceback of {number}", fatal=True))
        await until(lambda: len(both.source.session.slots) == 2)
    for cause in ("no licence", "no key"):
        assert sum(cause in text for text in both.events) == 2, "a failure and a loss"


async def test_refused_connections_are_reported_in_one_line_per_host_with_the_address() -> None:
    both = learner_over_tcp(insecure=True)
    port = int(both.source.address.rpartition(":")[2])
    addresses = []
    for number in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        addresses.append("{}:{}".format(*writer.get_extra_info("sockname")))
        # ZeroMQ has greeted it, so the learner notices it before the connection is gone
        if number == 2:
            await reader.readexactly(1)
            await asyncio.sleep(0.05)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await until(lambda: both.source.traffic().refused > number)  # noqa: B023
        writer.close()  # not before: a closed connection has no address
    await both.close()
    assert sum(any(address in text for address in addresses) for text in both.events) == 1, (
        both.events
    )
    # a connection may be closed before its address is known: these share one line, too
    assert len(both.events) <= 2, both.events


def _say_too_much(port: int, message: Any, *, is_whole: bool) -> None:
    """Send a message, read the answer, send a large message of nonsense, and wait for the end of
    the connection.
    """
    with RawPeer(port) as peer, contextlib.suppress(OSError):
        peer.send(*map(bytes, encode(message)))
        assert peer.receive()
        peer.socket.sendall(frame(bytes(1 << 16), more=True) * 40)
        if is_whole:
            peer.send(b"end")
        while peer.receive():
            pass


@pytest.mark.parametrize(
    ("message", "is_registered"),
    [
        (m.SnapshotRequest(0), False),
        (m.Hello(m.PROTOCOL_VERSION, "", "worker", "incarnation"), True),
    ],
    ids=["must say hello first", "joins"],
)
async def test_only_registered_workers_can_send_large_messages(
    message: Any, is_registered: bool
) -> None:
    both = learner_over_tcp(insecure=True)
    port = int(both.source.address.rpartition(":")[2])
    await asyncio.to_thread(_say_too_much, port, message, is_whole=is_registered)
    await until(lambda: both.source.traffic().dropped)
    await both.close()
    assert any("unread" in text for text in both.events) != is_registered, both.events
