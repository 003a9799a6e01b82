"""A run in one process, without TensorFlow: the same messages and leases as with workers, in an order
that the seed alone decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from in_process import LENGTH, NUM_ENVS, FakeAlgorithm, InProcess, fake_learning, with_settings

from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import EnvError, InternalError
from aiorl.net.wire.messages import Samples
from aiorl.run.local_source import LocalSource
from aiorl.run.threads import LoopThread
from aiorl.run.worker.sampler_unit import SamplerUnit

STEPS = LENGTH * NUM_ENVS


class Alone(InProcess):
    """One process that samples and learns, with a fake algorithm.

    Attributes:
        versions: policy versions of the fragments of each update, and the version at its end.
    """

    def __init__(self, algorithm: type[FakeAlgorithm], loop: LoopThread, **settings: Any) -> None:
        super().__init__(algorithm, num_workers=0, **settings)
        self.directory.save_address = lambda bind: None
        self.versions: list[tuple[list[int], int]] = []
        training: Any = self
        self.source: Any = LocalSource(
            training, self.core, sample=self.parts.sample, bind=self.config.bind, loop=loop
        )

    async def begin(self) -> None:
        await self.source.start()
        await self.source.begin(fake_learning(self.config, self.algorithm, self.num_envs))
        self.go_on()

    async def train(self, updates: int) -> None:
        goal = len(self.updates) + updates
        while len(self.updates) < goal:
            await self.source.advance()

    def update_ended(self, done: Any) -> None:
        first = [fragment.message.first_version for fragment in done.batch.fragments]
        self.versions.append((first, self.core.publisher.version))
        super().update_ended(done)


@pytest.fixture
def loop() -> Any:
    thread = LoopThread("test")
    yield thread
    thread.close()


@pytest.fixture
def run(loop: LoopThread) -> Callable[..., Alone]:
    """Return a function that trains for some updates, and then does something with the run."""

    def train(
        algorithm: type[FakeAlgorithm], updates: int = 6, then: Any = None, **settings: Any
    ) -> Alone:
        async def main() -> Alone:
            alone = Alone(algorithm, loop, **settings)
            await alone.begin()
            try:
                await alone.train(updates)
                if then is not None:
                    await then(alone)
            finally:
                alone.source.stop()
                await alone.source.close("the test is over", final=True)
            alone.ledger.check()
            return alone

        return loop.call(main())

    return train


def test_on_policy_batches_have_the_newest_version_and_nothing_is_left_over(
    run: Callable[..., Alone],
) -> None:
    alone = run(FakeAlgorithm)
    assert alone.versions == [([number] * 4, number + 1) for number in range(6)]
    ledger = alone.ledger.as_dict()
    assert ledger["sampled"] == ledger["trained"] == 6 * 4 * STEPS


@pytest.mark.parametrize(("max_lag", "lag"), [(0, 0), (1, 1), (5, 1)])
def test_streaming_samples_lag_by_the_update_that_would_run_beside_them(
    run: Callable[..., Alone], max_lag: int, lag: int
) -> None:
    alone = run(with_settings(mode="streaming", max_policy_lag=max_lag), 8)
    lags = [after - 1 - min(first) for first, after in alone.versions]
    assert lags == [0] + 7 * [lag]
    pacing = alone.core.session.leases.pacing
    assert pacing is not None
    assert pacing.outstanding <= pacing.budget <= pacing.largest == (max_lag + 1) * 4
    pacing.check_valid()


def test_experience_of_any_age_is_still_sampled_with_the_newest_policy(
    run: Callable[..., Alone],
) -> None:
    alone = run(with_settings(mode="streaming", fragments_per_batch=2))
    assert alone.versions == [([number] * 2, number + 1) for number in range(6)]


@pytest.mark.parametrize("mode", ["on_policy", "streaming"])
def test_the_same_seed_gives_the_same_fragments_however_long_updates_take(
    run: Callable[..., Alone], mode: str
) -> None:
    runs = [
        run(with_settings(mode=mode, max_policy_lag=2, update_s=update_s)).algorithm.batches
        for update_s in (0.0, 0.02)
    ]
    for one, other in zip(*runs, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left[c.OBS], right[c.OBS])
            np.testing.assert_array_equal(left[c.ACTIONS], right[c.ACTIONS])


def test_weights_that_are_set_apply_to_the_next_fragment(run: Callable[..., Alone]) -> None:
    async def set_weights(alone: Alone) -> None:
        alone.source.set_weights({DEFAULT_POLICY_ID: alone.algorithm.get_weights()})
        alone.go_on()
        await alone.train(1)

    alone = run(with_settings(mode="streaming", max_policy_lag=3), 3, set_weights)
    first, after = alone.versions[-1]
    assert min(first) == after - 1


def test_a_failed_update_is_accounted_for_and_the_next_one_has_new_fragments(
    run: Callable[..., Alone],
) -> None:
    async def fail(alone: Alone) -> None:
        alone.algorithm.fail_at = len(alone.algorithm.batches) + 1
        with pytest.raises(RuntimeError, match="on purpose"):
            await alone.train(1)
        assert alone.core.is_still
        alone.go_on()
        await alone.train(2)

    alone = run(FakeAlgorithm, 2, fail)
    assert alone.ledger.as_dict()["discarded"] == {"the update failed": 4 * STEPS}
    assert alone.ledger.trained == 4 * 4 * STEPS


def test_a_fragment_that_was_broken_off_leaves_its_lease_to_the_next_sampler(
    run: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_off(alone: Alone) -> None:
        before = await alone.source.sampler_here()
        with monkeypatch.context() as patch:
            patch.setattr(before, "sample", lambda: (_ for _ in ()).throw(EnvError("E", "boom")))
            with pytest.raises(EnvError, match="boom"):
                await alone.train(1)
        assert await alone.source.sampler_here() is not before
        await alone.train(2)

    alone = run(FakeAlgorithm, 2, break_off)
    ledger = alone.ledger.as_dict()
    assert ledger["sampled"] == ledger["trained"] == 4 * 4 * STEPS
    assert len({f.incarnation for done in alone.updates for f in done.batch.fragments}) == 2


def test_an_environment_may_fail_any_number_of_times_before_training_continues(
    run: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(alone: Alone) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                SamplerUnit, "sample", lambda unit: (_ for _ in ()).throw(EnvError("E", "boom"))
            )
            for _ in range(1100):
                with pytest.raises(EnvError, match="boom"):
                    await alone.train(1)
        await alone.train(2)

    alone = run(FakeAlgorithm, 1, fail)
    assert alone.ledger.trained == 3 * 4 * STEPS


def test_an_interrupt_between_two_steps_ends_the_turn_and_loses_nothing(
    run: Callable[..., Alone],
) -> None:
    async def interrupt(alone: Alone) -> None:
        turn = asyncio.ensure_future(alone.source.advance())
        await asyncio.sleep(0)
        alone.source.interrupt()
        with pytest.raises(Exception, match="Ctrl-C"):
            await turn
        assert alone.core.is_idle
        await alone.train(2)

    alone = run(FakeAlgorithm, 2, interrupt)
    ledger = alone.ledger.as_dict()
    assert ledger["sampled"] == ledger["trained"] == 4 * 4 * STEPS
    assert alone.versions == [([number] * 4, number + 1) for number in range(4)]


def test_a_malformed_fragment_ends_training_since_the_next_one_would_be_malformed_too(
    run: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = SamplerUnit.sample

    def spoilt(unit: SamplerUnit) -> Samples:
        return sample(unit)._replace(batches={DEFAULT_POLICY_ID: {}})

    async def spoil(alone: Alone) -> None:
        monkeypatch.setattr(SamplerUnit, "sample", spoilt)
        with pytest.raises(InternalError, match="the next one would do the same"):
            await alone.train(1)
        assert "worker 0 sent a malformed fragment" in alone.events[-1]

    alone = run(FakeAlgorithm, 1, spoil)
    assert alone.ledger.discarded["malformed"] == STEPS


def test_a_run_in_one_process_has_no_worker_processes(run: Callable[..., Alone]) -> None:
    async def look(alone: Alone) -> None:
        assert list(alone.source.workers()) == []
        assert alone.source.join_command == ""
        assert alone.source.traffic().bytes_in == 0

    run(FakeAlgorithm, 1, look)
