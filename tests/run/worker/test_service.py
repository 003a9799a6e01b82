"""Worker service with a real RemoteSource in one process: life, failures, bad links."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from in_process import QUICK, FakeAlgorithm, InProcess, running, until, with_settings
from memory_endpoint import Direction, MemoryNetwork, MemoryWorkerEndpoint

from aiorl.errors import EnvError
from aiorl.net.protocol.events import CallReplied, LearnerEvent
from aiorl.net.wire.messages import RefusalCode, Refused, Samples
from aiorl.process.children import FAILED, HOPELESS, RUN_IS_OVER, STOPPED
from aiorl.run.worker import service
from aiorl.run.worker.sampler_unit import SamplerUnit
from aiorl.run.worker.service import WorkerOutcome

STREAMING = with_settings(mode="streaming")


async def ended(both: InProcess) -> WorkerOutcome:
    """Return the outcome of the only worker."""
    return await asyncio.wait_for(both.outcomes[0], 10)


async def test_workers_end_when_the_run_is_over() -> None:
    async with running() as both:
        await both.updates_done(2)
    outcomes = [task.result() for task in both.outcomes]
    assert [(outcome.ok, outcome.status) for outcome in outcomes] == [(True, RUN_IS_OVER)] * 2
    assert outcomes[0].reason == "the test is over"


async def test_a_stopped_worker_leaves_immediately_and_its_share_goes_to_the_others() -> None:
    async with running() as both:
        await both.updates_done(2)
        both.workers[0].stop("leaving on purpose")
        assert (await ended(both)).status == STOPPED
        await both.updates_done(len(both.updates) + 4)
    assert any("leaving on purpose" in text for text in both.events)
    assert {fragment.slot for fragment in both.updates[-1].batch.fragments} == {2}


FAULTY = {"env": "aiorl.testing.envs:FaultyEnv", "env_config": {"fault": "constructor"}}
CLIENT = {"env": "general_parts:Broken", "env_config": {"size": 4}, "seed": None}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (FAULTY, ["this environment cannot be made", "Traceback"]),
        (CLIENT, ["this client fails on purpose", "Traceback"]),
        ({"env": "in_process:ExitingEnv", "seed": None}, ["SystemExit: 0"]),
        ({"memory_per_worker": 2**20}, ["memory_per_worker", "1,048,576"]),
    ],
    ids=["constructor", "client", "exit", "memory"],
)
async def test_r184_any_failure_in_a_worker_is_reported_with_its_traceback_and_ends_it(
    settings: dict[str, Any], says: list[str]
) -> None:
    both = InProcess(AnyShape, **settings)
    both.num_envs = 1
    both.start(1)
    both.go_on()
    outcome = await ended(both)
    await both.close()
    assert (outcome.ok, outcome.status) == (False, FAILED)
    assert any(all(value in text for value in says) for text in both.events)


async def test_r184_fragments_held_by_a_worker_are_bounded_in_bytes() -> None:
    """A fragment has some 600 bytes: one can wait for its acknowledgement, and no other is begun
    until then.
    """
    held = []
    async with running(1, STREAMING, object_store_memory_per_worker=700) as both:
        (session,) = both.sessions
        done = session.fragment_done

        def count(*arguments: Any) -> bool:
            is_taken = done(*arguments)
            held.append(session.num_unacked)
            return is_taken

        session.fragment_done = count  # type: ignore[method-assign]
        await both.updates_done(4)
    assert max(held) == 1


@pytest.mark.parametrize(
    ("setting", "is_local"), [(False, False), (True, False), ("bulk", False), (True, True)]
)
async def test_workers_compress_fragments_if_compress_observations_is_set_and_they_do_not_use_unix_sockets(
    monkeypatch: pytest.MonkeyPatch, setting: bool | str, is_local: bool
) -> None:
    encode, compressed = service.encode, set()

    def noting(message: Any, *, compress: bool, **options: Any) -> Any:
        if isinstance(message, Samples):
            compressed.add(compress)
        return encode(message, compress=compress, **options)

    monkeypatch.setattr(service, "encode", noting)
    monkeypatch.setattr(MemoryWorkerEndpoint, "is_local", is_local)
    off = {**QUICK.model_dump(), "compression": "off"}
    async with running(1, transport=off, compress_observations=setting) as both:
        await both.updates_done(1)
    assert compressed == {bool(setting) and not is_local}


async def test_lost_broadcasts_and_connections_neither_lose_nor_duplicate_fragments() -> None:
    def fault(direction: Direction, number: int) -> tuple[float, ...]:
        return () if direction is Direction.BROADCAST and number % 3 else (0.002,)

    async with running(2, STREAMING, network=MemoryNetwork(fault)) as both:
        for count in range(3, 13, 3):
            await both.updates_done(count, 40)
            both.network.cut()
            both.network.mend()
    seen = [(f.incarnation, f.message.seq) for done in both.updates for f in done.batch.fragments]
    assert len(seen) == len(set(seen))
    by_worker: dict[str, list[int]] = {}
    for incarnation, seq in seen:
        by_worker.setdefault(incarnation, []).append(seq)
    assert all(seqs == sorted(seqs) for seqs in by_worker.values())


async def test_after_a_cut_that_outlasts_the_timeout_the_worker_comes_back_as_a_new_incarnation() -> (
    None
):
    async with running(1, STREAMING) as both:
        await both.updates_done(2)
        both.network.cut()
        await until(lambda: not both.source.session.slots)
        both.network.mend()
        await both.source.wait_for_workers(1, 10)
        await both.updates_done(len(both.updates) + 3)
    assert len({f.incarnation for done in both.updates for f in done.batch.fragments}) == 2


async def test_a_task_that_dies_ends_its_worker_and_is_reported_to_the_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down(now: float) -> None:
        raise ZeroDivisionError("the clock is broken")

    async with running(1) as both:
        monkeypatch.setattr(both.sessions[0], "tick", break_down)
        outcome = await ended(both)
        await until(lambda: any("in break_down" in text for text in both.events))
    assert (outcome.ok, outcome.status) == (False, FAILED)
    assert "ZeroDivisionError: the clock is broken" in outcome.reason


def build_slowly(monkeypatch: pytest.MonkeyPatch, number: int) -> tuple[list[Any], threading.Event]:
    """Make one of the next units, by its number, wait while it is built; return all places and a
    release event.
    """
    build, may_go_on = service.SamplerUnit, threading.Event()
    places: list[Any] = []

    def make_slowly(part: Any, graphs: Any, snapshot: Any, place: Any) -> Any:
        places.append(place)
        is_slow, unit = len(places) == number, build(part, graphs, snapshot, place)
        assert not is_slow or may_go_on.wait(10)
        return unit

    monkeypatch.setattr(service, "SamplerUnit", make_slowly)
    return places, may_go_on


def lose(both: InProcess) -> None:
    """Lose worker 1 at the learner; it comes back with another incarnation."""
    both.source.session.mark_lost(1, "lost for a test", time.monotonic())
    both.source.pump()


@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
@pytest.mark.parametrize(
    ("num_samplers", "slow"), [(1, 0), (2, 1)], ids=["the only sampler", "the second sampler"]
)
async def test_r143_a_registration_that_ends_while_samplers_are_built_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, mode: str, num_samplers: int, slow: int
) -> None:
    """A sampler built too late neither begins fragments under the next registration's leases nor
    sends its deltas.
    """
    places, may_go_on = build_slowly(monkeypatch, 1 + slow)
    algorithm = with_settings(mode=mode)
    async with running(
        1, algorithm, samplers_per_worker=num_samplers, observation_filter="MeanStdFilter"
    ) as both:
        (session,) = both.sessions
        if slow:
            await both.updates_done(2)
        await until(lambda: len(places) == 1 + slow)
        before = session.incarnation
        lose(both)
        await until(lambda: session.incarnation != before and session.slot)
        if mode == "on_policy":
            await until(lambda: session.may_sample(session.version))
        with monkeypatch.context() as patch:
            patch.setattr(
                session, "start_fragment", lambda version: pytest.fail("an ended sampler works on")
            )
            await asyncio.sleep(0.1)  # time for a fragment that must not begin
        may_go_on.set()
        await both.updates_done(len(both.updates) + 4)
        assert not both.outcomes[0].done()
        assert places[-1].incarnation == session.incarnation
    assert len({place.incarnation for place in places}) == 2
    assert both.worst_level < logging.ERROR


async def test_a_sampler_built_after_its_worker_was_stopped_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = threading.Event()
    monkeypatch.setattr(SamplerUnit, "close", lambda unit: closed.set())
    places, may_go_on = build_slowly(monkeypatch, 1)
    async with running(1) as both:
        await until(lambda: places)
        both.workers[0].stop("enough")
        assert (await ended(both)).ok
        may_go_on.set()
        await until(closed.is_set)


@pytest.mark.parametrize(
    ("mode", "fails"), [("on_policy", False), ("streaming", False), ("streaming", True)]
)
async def test_a_fragment_in_hand_when_its_registration_ends_is_dropped(
    monkeypatch: pytest.MonkeyPatch, mode: str, fails: bool
) -> None:
    sample, numbers = SamplerUnit.sample, itertools.count(1)
    in_hand, may_go_on = threading.Event(), threading.Event()

    def held(unit: SamplerUnit) -> Any:
        fragment = sample(unit)
        if next(numbers) == 3:
            in_hand.set()
            assert may_go_on.wait(10)
            if fails:
                raise EnvError("env", "too late to matter", traceback_text="")
        return fragment

    monkeypatch.setattr(SamplerUnit, "sample", held)
    async with running(1, with_settings(mode=mode, fragments_per_batch=1)) as both:
        await until(in_hand.is_set)
        (session,) = both.sessions
        before = session.incarnation
        lose(both)
        # the registration ends and the fragment is ready in the same turn of the event loop
        may_go_on.set()
        time.sleep(0.1)  # noqa: ASYNC251 - the loop must stand still meanwhile
        both.deliver(Refused("lost for a test", retry=True, code=RefusalCode.ENDED))
        await both.updates_done(len(both.updates) + 4)
        assert not both.outcomes[0].done()
    seqs: dict[str, list[int]] = {}
    for done in both.updates:
        for fragment in done.batch.fragments:
            seqs.setdefault(fragment.incarnation, []).append(fragment.message.seq)
    assert seqs.pop(before) == [1, 2]
    ((incarnation, after),) = seqs.items()
    assert (incarnation, after) == (session.incarnation, list(range(1, len(after) + 1)))
    assert both.worst_level < logging.ERROR


async def test_the_learner_can_ask_a_worker_for_its_stacks() -> None:
    async with running(1) as both:
        session, events = both.source.session, both.source.session.events
        good, bad = (
            session.call(1, what, {"sampler": 0}, num_bytes=0) for what in ("stacks", "nonsense")
        )
        replies: dict[int, CallReplied] = {}

        def noting() -> list[LearnerEvent]:
            found = events()
            replies.update(
                {event.call_id: event for event in found if isinstance(event, CallReplied)}
            )
            return found

        session.events = noting  # type: ignore[method-assign]
        await until(lambda: len(replies) == 2)
    assert replies[good].ok
    assert Path(service.__file__).name in str(replies[good].result)
    assert not replies[bad].ok
    assert "nonsense" in str(replies[bad].result)


class AnyShape(FakeAlgorithm):
    """Algorithm that takes fragments of the general path, too."""

    mode = "streaming"

    def check_fragment(self, fragment: Any) -> None:
        assert fragment["obs"].shape[1:] == (1, 4)


async def test_r9_a_blocked_environment_does_not_stop_heartbeats() -> None:
    async with running(
        1, env="in_process:BlockingEnv", env_config={"step_s": 0.4}, seed=None
    ) as both:
        # more than 1.5 times the heartbeat timeout, within the first fragment
        end = time.monotonic() + 1.6
        while time.monotonic() < end:
            await asyncio.sleep(0.05)
            assert both.source.session.slots == [1]
        assert both.counters.env_steps_sampled == 0
    assert both.worst_level < logging.WARNING


@pytest.mark.parametrize(
    "waits",
    [
        {"env": "general_parts:Silent", "env_config": {"size": 4}, "num_envs_per_worker": 1},
        {
            "env": "in_process:BlockingEnv",
            "env_config": {"step_s": 30.0},
            "remote_worker_envs": True,
        },
    ],
    ids=["for clients", "for other processes"],
)
async def test_a_waiting_worker_leaves_immediately_when_stopped(waits: dict[str, Any]) -> None:
    both = InProcess(AnyShape, seed=None, **waits)
    both.num_envs = 1
    both.start(1)
    await both.source.wait_for_workers(1, 20)
    both.go_on()
    await until(
        lambda: any(
            worker.waits_for_others or worker.in_env_s > 0.2
            for worker in both.source.session.workers
        )
    )
    both.workers[0].stop("leaving on purpose")
    async with asyncio.timeout(15):
        assert (await ended(both)).ok
    await both.close()


async def test_a_worker_of_a_run_does_not_leave_it_for_a_hub_of_actors() -> None:
    both = InProcess(FakeAlgorithm)
    both.start()
    both.workers[0].may_join_hub = True
    assert await both.source.wait_for_workers(2, 20)
    both.go_on()
    await both.updates_done(1)
    both.deliver(Refused("a hub", retry=True, code=RefusalCode.ACTORS))
    await both.updates_done(len(both.updates) + 2)
    await both.close()
    assert both.outcomes[0].result().status == RUN_IS_OVER


@pytest.mark.parametrize(
    ("code", "status"), [(RefusalCode.VIOLATION, FAILED), (RefusalCode.VERSION, HOPELESS)]
)
async def test_a_worker_is_restarted_after_a_protocol_violation_but_not_if_it_never_fits(
    code: str, status: int
) -> None:
    """Bytes damaged in transit can cause a violation."""
    async with running(1) as both:
        both.deliver(Refused("refused for a test", retry=False, code=code))
        assert (await ended(both)).status == status
