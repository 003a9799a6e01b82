"""The worker service against a real learner service in one process: life, failures, bad links."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import in_process
import pytest
from in_process import FakeAlgorithm, InProcess, with_settings
from memory_endpoint import Direction, MemoryNetwork

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import EnvError
from aiorl.net.transport.endpoint import Event, EventKind
from aiorl.net.wire.messages import Ack, RefusalCode, Refused
from aiorl.process.children import FAILED, HOPELESS, RUN_IS_OVER, STOPPED
from aiorl.run.report.results import Progress
from aiorl.run.worker.service import WorkerOutcome


def test_workers_end_when_the_run_is_over() -> None:
    async def main() -> list[Any]:
        both = InProcess()
        both.start(2)
        await both.service.wait_for_workers(2, 10)
        both.service.go_on()
        await both.updates_done(2)
        return await both.close()

    outcomes = asyncio.run(main())
    assert [(outcome.ok, outcome.status) for outcome in outcomes] == [(True, RUN_IS_OVER)] * 2
    assert outcomes[0].reason == "the test is over"


def test_a_stopped_worker_leaves_at_once_and_its_share_goes_to_the_others() -> None:
    async def main() -> InProcess:
        both = InProcess()
        both.start(2)
        await both.service.wait_for_workers(2, 10)
        both.service.go_on()
        await both.updates_done(2)
        both.workers[0].stop("leaving on purpose")
        assert (await both.outcomes[0]).status == STOPPED
        await both.updates_done(len(both.updates) + 4)
        await both.close()
        return both

    both = asyncio.run(main())
    assert any("worker 1 lost" in text and "leaving on purpose" in text for text in both.events)
    assert {fragment.slot for fragment in both.updates[-1].batch.fragments} == {2}


def test_a_failing_environment_is_reported_with_its_traceback_and_ends_the_worker() -> None:
    async def main() -> tuple[InProcess, Any]:
        both = InProcess(
            env="aiorl.testing.envs:FaultyEnv", env_config={"fault": "constructor"}, observation_filter="NoFilter"
        )
        both.start(1)
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        await both.close()
        return both, outcome

    both, outcome = asyncio.run(main())
    assert not outcome.ok
    failed = next(text for text in both.events if "failed" in text)
    assert "this environment cannot be made" in failed
    assert "Traceback" in failed


def test_r184_a_worker_beyond_its_quota_of_memory_fails_and_says_so() -> None:
    async def main() -> tuple[InProcess, WorkerOutcome]:
        both = InProcess(memory_per_worker=2**20)
        both.start(1)
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        await both.close()
        return both, outcome

    both, outcome = asyncio.run(main())
    assert outcome.reason.startswith("memory_per_worker is 1,048,576 bytes, but the process has taken ")
    assert outcome.status == FAILED
    assert any("memory_per_worker is 1,048,576 bytes" in text for text in both.events)


def test_r184_what_a_worker_holds_for_the_learner_is_bounded_in_bytes() -> None:
    """A fragment has some 600 bytes: one may wait for its acknowledgement, and no other is begun until then."""
    held = []

    async def main(bound: int) -> int:
        both = InProcess(with_settings(mode="streaming"), object_store_memory_per_worker=bound)
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        fragments = both.workers[0]._session._fragments
        add = fragments.add

        def count(*arguments: Any) -> Any:
            message = add(*arguments)
            held.append(len(fragments))
            return message

        fragments.add = count  # type: ignore[method-assign]
        both.service.go_on()
        await both.updates_done(4)
        await both.close()
        return both.workers[0]._session.settings.max_unacked_bytes

    assert asyncio.run(main(700)) == 700
    assert max(held) == 1
    assert asyncio.run(main(0)) == 2**28


@pytest.mark.parametrize("compress_observations", [False, True, "bulk"])
def test_what_workers_send_is_compressed_if_observations_are_to_be(
    monkeypatch: pytest.MonkeyPatch, compress_observations: bool | str
) -> None:
    monkeypatch.setattr(in_process, "QUICK", in_process.QUICK.model_copy(update={"compression": "off"}))

    async def main() -> bool:
        both = InProcess(compress_observations=compress_observations)
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        await both.updates_done(1)
        await both.close()
        return both.workers[0]._compress

    assert asyncio.run(main()) == bool(compress_observations)


def test_lost_broadcasts_and_connections_lose_and_double_nothing() -> None:
    def fault(direction: Direction, number: int) -> tuple[float, ...]:
        return () if direction is Direction.BROADCAST and number % 3 else (0.002,)

    async def main() -> InProcess:
        both = InProcess(with_settings(mode="streaming"), MemoryNetwork(fault))
        both.start(2)
        await both.service.wait_for_workers(2, 20)
        both.service.go_on()
        for count in range(3, 13, 3):
            await both.updates_done(count, 40)
            both.network.cut()
            both.network.mend()
        both.network.fault = lambda direction, number: (0.0,)
        await both.close()
        return both

    both = asyncio.run(main())
    seen = [(f.incarnation, f.seq) for done in both.updates for f in done.batch.fragments]
    assert len(seen) == len(set(seen))
    by_worker: dict[str, list[int]] = {}
    for incarnation, seq in seen:
        by_worker.setdefault(incarnation, []).append(seq)
    assert all(seqs == sorted(seqs) for seqs in by_worker.values())


def test_after_a_cut_that_outlasts_the_timeout_the_worker_comes_back_as_a_new_incarnation() -> None:
    async def main() -> InProcess:
        both = InProcess(with_settings(mode="streaming"))
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        await both.updates_done(2)
        both.network.cut()
        async with asyncio.timeout(10):
            while both.service.session.slots:
                await asyncio.sleep(0.05)
        both.network.mend()
        await both.service.wait_for_workers(1, 10)
        await both.updates_done(len(both.updates) + 3)
        await both.close()
        return both

    both = asyncio.run(main())
    incarnations = {f.incarnation for done in both.updates for f in done.batch.fragments}
    assert len(incarnations) == 2
    assert any("worker 1 lost" in text for text in both.events)


def test_a_task_that_dies_ends_its_worker_and_the_learner_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[InProcess, Any]:
        both = InProcess()
        both.start(1)
        await both.service.wait_for_workers(1, 10)

        def break_down(now: float) -> None:
            raise ZeroDivisionError("the clock is broken")

        monkeypatch.setattr(both.workers[0], "_tell_status", break_down)
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        await until(lambda: any("failed" in text for text in both.events))
        await both.close()
        return both, outcome

    both, outcome = asyncio.run(main())
    assert (outcome.ok, outcome.status) == (False, 1)
    assert outcome.reason == "unexpected ZeroDivisionError: the clock is broken"
    failed = next(text for text in both.events if "failed" in text)
    assert "the clock is broken" in failed
    assert "in break_down" in failed


def test_a_worker_whose_voice_has_failed_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Any:
        both = InProcess()
        both.start(1)
        await both.service.wait_for_workers(1, 10)

        def break_down(*arguments: Any) -> None:
            raise ZeroDivisionError("nothing can be said")

        monkeypatch.setattr(both.workers[0]._session, "messages_to_send", break_down)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        monkeypatch.undo()
        await both.close()
        return outcome

    assert asyncio.run(main()).status == 1


def test_what_comes_after_a_workers_end_does_nothing() -> None:
    async def main() -> None:
        both = InProcess()
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        worker = both.workers[0]
        await both.close()
        worker._on_event(Event(EventKind.CONNECTED))
        worker._session.receive(Ack(0), time.monotonic())
        worker._pump()
        worker.stop("once more")

    asyncio.run(main())


def test_an_environment_that_calls_exit_is_a_failure_like_any_other() -> None:
    async def main() -> tuple[InProcess, Any]:
        both = InProcess(env="in_process:ExitingEnv", seed=None)
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        await both.close()
        return both, outcome

    both, outcome = asyncio.run(main())
    assert outcome.status == 1
    assert any("SystemExit: 0" in text for text in both.events)


def lose(both: InProcess) -> None:
    """The learner counts worker 1 lost; it comes back as another incarnation."""
    both.service.session.lose(1, "lost for a test", time.monotonic())
    both.service.pump()


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
@pytest.mark.parametrize(("num_samplers", "slow"), [(1, 0), (2, 1)], ids=["the only sampler", "the second sampler"])
def test_r143_a_registration_that_ends_while_samplers_are_built_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, mode: str, num_samplers: int, slow: int
) -> None:
    """What is built too late neither begins fragments under the next registration's leases nor sends its deltas."""
    import aiorl.run.worker.service as module

    build, may_go_on, places = module.SamplerUnit, threading.Event(), []

    def make_slowly(part: Any, graphs: Any, snapshot: Any, place: Any) -> Any:
        places.append(place)
        unit = build(part, graphs, snapshot, place)
        if len(places) == 1 + slow:
            assert may_go_on.wait(10)
        return unit

    monkeypatch.setattr(module, "SamplerUnit", make_slowly)

    async def main() -> InProcess:
        both = InProcess(with_settings(mode=mode), samplers_per_worker=num_samplers, observation_filter="MeanStdFilter")
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        if slow:
            await both.updates_done(2)
        await until(lambda: len(places) == 1 + slow)
        before = both.workers[0]._session.incarnation
        lose(both)
        await until(lambda: both.workers[0]._session.incarnation != before and both.workers[0]._session.slot)
        if mode == "on_policy":
            await until(lambda: both.workers[0]._session.may_sample(both.workers[0]._session.version))
        await asyncio.sleep(0.1)  # time to begin what must not begin
        assert not both.workers[0]._session._leases.begun, "an ended registration's sampler works on"
        may_go_on.set()
        await both.updates_done(len(both.updates) + 4)
        assert not both.outcomes[0].done()
        assert {running.incarnation for running in both.workers[0]._running} == {both.workers[0]._session.incarnation}
        await both.close()
        return both

    both = asyncio.run(main())
    assert len({place.incarnation for place in places}) == 2
    assert not any("failed" in text for text in both.events)


def test_what_is_built_after_its_worker_was_stopped_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    import aiorl.run.worker.service as module

    build, is_building, may_go_on, closed = module.SamplerUnit, threading.Event(), threading.Event(), threading.Event()

    def make_slowly(*arguments: Any) -> Any:
        is_building.set()
        assert may_go_on.wait(10)
        unit = build(*arguments)
        monkeypatch.setattr(unit, "close", closed.set)
        return unit

    monkeypatch.setattr(module, "SamplerUnit", make_slowly)

    async def main() -> None:
        both = InProcess()
        both.start(1)
        await until(is_building.is_set)
        both.workers[0].stop("enough")
        assert (await asyncio.wait_for(both.outcomes[0], 10)).ok
        may_go_on.set()
        await until(closed.is_set)
        await both.close()

    asyncio.run(main())


class Held:
    """Holds one of the first unit's fragments, the third by default, when it is sampled, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = 3) -> None:
        from aiorl.run.worker.sampler_unit import SamplerUnit

        self.in_hand, self.may_go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.num_sampled = 0
        self.taken: list[tuple[str, int]] = []
        sample, take_deltas, init = SamplerUnit.sample, SamplerUnit.take_deltas, SamplerUnit.__init__
        of_unit: dict[int, str] = {}

        def noted(unit: Any, part: Any, graphs: Any, snapshot: Any, place: Any) -> None:
            init(unit, part, graphs, snapshot, place)
            of_unit[id(unit)] = place.incarnation

        def held(unit: Any) -> Any:
            produced = sample(unit)
            self.num_sampled += 1
            if self.num_sampled == number:
                self.in_hand.set()
                assert self.may_go_on.wait(10)
                if self.error is not None:
                    raise self.error
            return produced

        def taken(unit: Any, sequence: int) -> Any:
            self.taken.append((of_unit[id(unit)], sequence))
            return take_deltas(unit, sequence)

        monkeypatch.setattr(SamplerUnit, "__init__", noted)
        monkeypatch.setattr(SamplerUnit, "sample", held)
        monkeypatch.setattr(SamplerUnit, "take_deltas", taken)


@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
@pytest.mark.parametrize("fails", [False, True], ids=["finished", "failed"])
def test_a_fragment_in_hand_when_its_registration_ends_is_dropped_with_its_deltas(
    monkeypatch: pytest.MonkeyPatch, mode: str, fails: bool
) -> None:
    held = Held(monkeypatch)
    held.error = EnvError("env", "too late to matter", traceback_text="") if fails else None

    async def main() -> InProcess:
        both = InProcess(with_settings(mode=mode), observation_filter="MeanStdFilter")
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        await until(held.in_hand.is_set)
        worker = both.workers[0]
        before = worker._session.incarnation
        lose(both)
        # the registration ends and the fragment is ready in one and the same turn of the event loop
        worker._session.receive(Refused("lost for a test", retry=True, code=RefusalCode.ENDED), time.monotonic())
        held.may_go_on.set()
        worker._running[0].executor.submit(int).result(10)
        worker._pump()
        await both.updates_done(len(both.updates) + 4)
        assert not both.outcomes[0].done()
        by_incarnation: dict[str, list[int]] = {}
        for incarnation, sequence in held.taken:
            by_incarnation.setdefault(incarnation, []).append(sequence)
        assert by_incarnation.pop(before) == [1, 2]
        ((incarnation, sequences),) = by_incarnation.items()
        assert incarnation == worker._session.incarnation
        assert sequences == list(range(1, len(sequences) + 1))
        await both.close()
        return both

    both = asyncio.run(main())
    assert not any("failed" in text for text in both.events)


def test_a_fragment_that_is_cancelled_gives_its_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def main() -> None:
        both = InProcess(with_settings(mode="on_policy"))
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        await until(held.in_hand.is_set)
        worker = both.workers[0]
        assert worker._session._leases.begun == 1
        both.outcomes[0].cancel()
        await asyncio.sleep(0)
        held.may_go_on.set()
        await asyncio.wait([both.outcomes[0]])
        assert not worker._session._leases.begun
        assert worker._session.may_sample(worker._session.version)
        both.outcomes.clear()
        await both.close()

    asyncio.run(main())


def test_several_samplers_of_one_worker_all_produce() -> None:
    async def main() -> InProcess:
        both = InProcess(with_settings(mode="streaming"), samplers_per_worker=3)
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        await both.updates_done(6)
        await both.close()
        return both

    both = asyncio.run(main())
    first_obs = {
        f.batches[DEFAULT_POLICY_ID]["obs"][0].tobytes() for done in both.updates for f in done.batch.fragments
    }
    assert len(first_obs) == sum(len(done.batch.fragments) for done in both.updates)


def test_the_learner_can_ask_what_a_worker_is_doing() -> None:
    async def main() -> Any:
        both = InProcess()
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        session = both.service.session
        good = session.call(1, "stacks", {})
        bad = session.call(1, "nonsense", {})
        replies: dict[int, Any] = {}
        handle = both.service._handle

        def listen(event: Any) -> None:
            if hasattr(event, "call_id"):
                replies[event.call_id] = event
            handle(event)

        both.service._handle = listen  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            while len(replies) < 2:
                await asyncio.sleep(0.02)
        await both.close()
        return replies[good], replies[bad]

    good, bad = asyncio.run(main())
    assert good.ok
    assert "thread" in good.result
    assert not bad.ok
    assert "nonsense" in bad.result


class AnyShape(FakeAlgorithm):
    """Takes fragments of the general path too."""

    mode = "streaming"

    def check_fragment(self, fragment: Any) -> None:
        assert fragment["obs"].shape[1:] == (1, 4)


@pytest.mark.parametrize("callbacks", [None, "general_parts:Watching"], ids=["in lockstep", "polled"])
def test_r9_a_blocked_environment_does_not_stop_heartbeats(callbacks: str | None) -> None:
    async def main() -> InProcess:
        both = InProcess(env="in_process:BlockingEnv", env_config={"step_s": 0.4}, callbacks=callbacks, seed=None)
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.go_on()
        loop = asyncio.get_running_loop()
        until = loop.time() + 1.6  # more than one and a half times the heartbeat timeout, within the first fragment
        while loop.time() < until:
            await asyncio.sleep(0.05)
            assert both.service.session.slots == [1]
        assert both.service.counters.env_steps_sampled == 0
        await both.close()
        return both

    both = asyncio.run(main())
    assert not any("lost" in text for text in both.events)


def test_polled_environments_give_rows_episodes_and_what_callbacks_note() -> None:
    async def main() -> InProcess:
        both = InProcess(AnyShape, callbacks="general_parts:Noting")
        both.start(2)
        await both.service.wait_for_workers(2, 20)
        both.service.go_on()
        await both.updates_done(6)
        await both.close()
        return both

    both = asyncio.run(main())
    assert both.failure is None
    assert both.service.counters.env_steps_trained == 6 * 4 * 16
    result = both.service.results.finish_iteration(1e9, Progress(1, 1))
    assert result["custom_metrics"]["height_mean"] == 7.0
    assert result["hist_stats"]["steps"]


@pytest.mark.parametrize(
    "waits",
    [
        {"env": "general_parts:Silent", "env_config": {"size": 4}},
        {"env": "in_process:BlockingEnv", "env_config": {"step_s": 30.0}, "remote_worker_envs": True},
    ],
    ids=["for clients", "for other processes"],
)
def test_a_worker_that_waits_leaves_at_once_when_it_is_stopped(waits: dict[str, Any]) -> None:
    async def main() -> float:
        both = InProcess(AnyShape, seed=None, **waits)
        both.num_envs = 1
        both.start(1)
        await both.service.wait_for_workers(1, 20)
        both.service.go_on()
        async with asyncio.timeout(20):
            while not any(r.unit is not None and r.unit.in_env_s > 0.2 for r in both.workers[0]._running):
                await asyncio.sleep(0.02)
        loop = asyncio.get_running_loop()
        began = loop.time()
        both.workers[0].stop("leaving on purpose")
        outcome = await both.outcomes[0]
        assert outcome.ok
        took = loop.time() - began
        await both.close()
        return took

    assert asyncio.run(main()) < 2


def test_a_client_that_fails_is_reported_with_its_traceback() -> None:
    async def main() -> tuple[InProcess, Any]:
        both = InProcess(AnyShape, seed=None, env="general_parts:Broken", env_config={"size": 4})
        both.num_envs = 1
        both.start(1)
        await both.service.wait_for_workers(1, 20)
        both.service.go_on()
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        await both.close()
        return both, outcome

    both, outcome = asyncio.run(main())
    assert not outcome.ok
    failed = next(text for text in both.events if "failed" in text)
    assert "this client fails on purpose" in failed
    assert "Traceback" in failed


@pytest.mark.parametrize(("code", "status"), [(RefusalCode.VIOLATION, FAILED), (RefusalCode.VERSION, HOPELESS)])
def test_who_broke_the_protocol_once_may_be_started_again_and_who_never_fits_may_not(code: str, status: int) -> None:
    """A violation may come of bytes that were damaged on the way."""

    async def main() -> WorkerOutcome:
        both = InProcess()
        both.start(1)
        assert await both.service.wait_for_workers(1, 10)
        (worker,) = both.workers
        worker._session.receive(Refused("refused for a test", retry=False, code=code), time.monotonic())
        worker._pump()
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        await both.close()
        return outcome

    assert asyncio.run(main()).status == status
