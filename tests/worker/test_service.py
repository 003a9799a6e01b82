"""The worker service against a real learner service in one process: life, failures, bad links."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from in_process import FakeAlgorithm, InProcess, with_settings

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.report.results import Progress
from aiorl.transport.memory_endpoint import Direction, MemoryNetwork


def test_workers_end_when_the_run_is_over() -> None:
    async def main() -> list[Any]:
        both = InProcess()
        both.start(2)
        await both.service.wait_for_workers(2, 10)
        both.service.grant_leases()
        await both.updates_done(2)
        return await both.close()

    outcomes = asyncio.run(main())
    assert [outcome.ok for outcome in outcomes] == [True, True]
    assert outcomes[0].reason == "the test is over"


def test_a_stopped_worker_leaves_at_once_and_its_share_goes_to_the_others() -> None:
    async def main() -> InProcess:
        both = InProcess()
        both.start(2)
        await both.service.wait_for_workers(2, 10)
        both.service.grant_leases()
        await both.updates_done(2)
        both.workers[0].stop("leaving on purpose")
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


def test_lost_doubled_and_late_messages_lose_and_double_nothing() -> None:
    def fault(direction: Direction, number: int) -> tuple[float, ...]:
        if number % 7 == 3:
            return ()
        return (0.0, 0.02) if number % 5 == 0 else (0.001 * (number % 3),)

    async def main() -> InProcess:
        both = InProcess(with_settings(mode="streaming"), MemoryNetwork(fault))
        both.start(2)
        await both.service.wait_for_workers(2, 20)
        both.service.grant_leases()
        await both.updates_done(12, 40)
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
        both.service.grant_leases()
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


def test_several_samplers_of_one_worker_all_produce() -> None:
    async def main() -> InProcess:
        both = InProcess(with_settings(mode="streaming"), samplers_per_worker=3)
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.grant_leases()
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
        good = session.call(1, "stacks", {}, asyncio.get_running_loop().time())
        bad = session.call(1, "nonsense", {}, asyncio.get_running_loop().time())
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


@pytest.mark.parametrize("sampling", ["columnar", "general"])
def test_r9_a_blocked_environment_does_not_stop_heartbeats(sampling: str) -> None:
    async def main() -> InProcess:
        both = InProcess(env="in_process:BlockingEnv", env_config={"step_s": 0.4}, sampling=sampling, seed=None)
        both.start(1)
        await both.service.wait_for_workers(1, 10)
        both.service.grant_leases()
        loop = asyncio.get_running_loop()
        until = loop.time() + 2.5  # two and a half times the heartbeat timeout, within the first fragment
        while loop.time() < until:
            await asyncio.sleep(0.05)
            assert both.service.session.slots == [1]
        assert both.service.counters.env_steps_sampled == 0
        await both.close()
        return both

    both = asyncio.run(main())
    assert not any("lost" in text for text in both.events)


def test_general_sampling_sends_rows_episodes_and_what_callbacks_note() -> None:
    async def main() -> InProcess:
        both = InProcess(AnyShape, sampling="general", callbacks="general_parts:Noting")
        both.start(2)
        await both.service.wait_for_workers(2, 20)
        both.service.grant_leases()
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
        both = InProcess(AnyShape, sampling="general", seed=None, **waits)
        both.num_envs = 1
        both.start(1)
        await both.service.wait_for_workers(1, 20)
        both.service.grant_leases()
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
        both = InProcess(AnyShape, sampling="general", seed=None, env="general_parts:Broken", env_config={"size": 4})
        both.num_envs = 1
        both.start(1)
        await both.service.wait_for_workers(1, 20)
        both.service.grant_leases()
        outcome = await asyncio.wait_for(both.outcomes[0], 10)
        await both.close()
        return both, outcome

    both, outcome = asyncio.run(main())
    assert not outcome.ok
    failed = next(text for text in both.events if "failed" in text)
    assert "this client fails on purpose" in failed
    assert "Traceback" in failed
