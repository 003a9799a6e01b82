"""Assembling train batches: order, bounds, staleness, and that no env step goes uncounted."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorl.algorithms.algorithm import LeasePlan
from aiorl.errors import BatchError, InternalError
from aiorl.learner.ingest import BatchAssembler, QueuedFragment, check_samples
from aiorl.wire.messages import Samples


def fragment(slot: int, seq: int, version: int = 0, env_steps: int = 10) -> QueuedFragment:
    return QueuedFragment(slot, seq, version, {"default_policy": {"obs": np.zeros((1, 1))}}, env_steps)


def on_policy(count: int) -> BatchAssembler:
    return BatchAssembler(LeasePlan("on_policy", count, max_policy_lag=0))


def streaming(count: int, *, lag: int | None = None) -> BatchAssembler:
    return BatchAssembler(LeasePlan("streaming", count, 3, lag))


def test_an_on_policy_batch_is_ready_once_all_its_fragments_are_there() -> None:
    assembler = on_policy(2)
    assert assembler.add(fragment(0, 0))
    assert not assembler.is_ready
    with pytest.raises(InternalError, match="1 of 2"):
        assembler.take()
    assert assembler.add(fragment(1, 0))
    assert assembler.is_ready
    assert assembler.take().env_steps == 20
    assert assembler.queued_env_steps == 0


@pytest.mark.parametrize("shuffle_seed", range(5))
def test_an_on_policy_batch_is_in_worker_order_whatever_the_order_of_arrival(shuffle_seed: int) -> None:
    """A6: two runs with the same seeds train on the same batches."""
    arrivals = [fragment(slot, seq) for slot in range(3) for seq in (4, 5)]
    random.Random(shuffle_seed).shuffle(arrivals)
    assembler = on_policy(6)
    for arrival in arrivals:
        assembler.add(arrival)
    taken = [(item.slot, item.seq) for item in assembler.take().fragments]
    assert taken == [(0, 4), (0, 5), (1, 4), (1, 5), (2, 4), (2, 5)]


def test_on_policy_fragments_of_an_older_version_and_more_than_a_batch_wants_are_discarded_with_the_reason() -> None:
    assembler = on_policy(1)
    assembler.set_version(3)
    assert not assembler.add(fragment(0, 0, version=2, env_steps=7))
    assert assembler.add(fragment(0, 1, version=3))
    assert not assembler.add(fragment(1, 0, version=3, env_steps=9))
    assert [(item.reason, item.env_steps) for item in assembler.take_discarded()] == [("stale", 7), ("surplus", 9)]
    assert assembler.take_discarded() == []


def test_a_new_version_discards_on_policy_fragments_that_were_still_waiting() -> None:
    assembler = on_policy(2)
    assembler.add(fragment(0, 0, version=0, env_steps=7))
    assembler.set_version(1)
    assert assembler.queued_env_steps == 0
    assert [(item.reason, item.env_steps) for item in assembler.take_discarded()] == [("stale", 7)]


def test_streaming_batches_come_in_the_order_of_arrival() -> None:
    assembler = streaming(2)
    for slot, seq in [(1, 0), (0, 0), (1, 1), (0, 1)]:
        assembler.add(fragment(slot, seq))
    assert [(f.slot, f.seq) for f in assembler.take().fragments] == [(1, 0), (0, 0)]
    assert assembler.queued_fragments == 2
    assert [(f.slot, f.seq) for f in assembler.take().fragments] == [(1, 1), (0, 1)]


def test_streaming_batches_say_how_old_their_policies_are() -> None:
    assembler = streaming(2)
    assembler.set_version(5)
    assembler.add(fragment(0, 0, version=2))
    assembler.add(fragment(1, 0, version=5))
    batch = assembler.take()
    assert batch.lags == (3, 0)
    assert len(batch.batches) == 2


def test_no_fragment_older_than_the_bound_is_ever_handed_out() -> None:
    assembler = streaming(1, lag=2)
    assembler.set_version(3)
    assert not assembler.add(fragment(0, 0, version=0))
    assert assembler.add(fragment(0, 1, version=1))
    assert assembler.add(fragment(0, 2, version=2))
    assembler.set_version(4)
    assert assembler.take().fragments[0].seq == 2
    assert [item.reason for item in assembler.take_discarded()] == ["stale", "stale"]


def test_streaming_takes_whatever_was_leased() -> None:
    assembler = streaming(2)
    assert all(assembler.add(fragment(0, seq)) for seq in range(50))
    assert assembler.take_discarded() == []
    assert assembler.queued_fragments == 50


def test_versions_from_the_future_and_versions_that_go_back_are_bugs() -> None:
    assembler = on_policy(1)
    with pytest.raises(InternalError, match="version 1 at version 0"):
        assembler.add(fragment(0, 0, version=1))
    assembler.set_version(2)
    with pytest.raises(InternalError, match="1 after 2"):
        assembler.set_version(1)


@given(
    mode=st.sampled_from(["on_policy", "streaming"]),
    lag=st.sampled_from([0, 1, 3, None]),
    count=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from(["add", "take", "version"]), st.integers(0, 4), st.integers(1, 9))),
)
def test_every_env_step_is_queued_taken_or_discarded(
    mode: str, lag: int | None, count: int, actions: list[tuple[str, int, int]]
) -> None:
    assembler = BatchAssembler(LeasePlan(mode, count, 3, lag))  # type: ignore[arg-type]
    added = taken = discarded = version = 0
    for seq, (action, number, env_steps) in enumerate(actions):
        if action == "add":
            assembler.add(fragment(number, seq, max(0, version - number), env_steps))
            added += env_steps
        elif action == "version":
            version += number
            assembler.set_version(version)
        elif assembler.is_ready:
            batch = assembler.take()
            assert len(batch.fragments) == count
            assert lag is None or max(batch.lags) <= lag
            taken += batch.env_steps
        discarded += sum(item.env_steps for item in assembler.take_discarded())
        assembler.check_valid()
        assert added == taken + discarded + assembler.queued_env_steps


def samples(*, env_steps: int = 6, agent_steps: int = 6, episodes: dict | None = None, **batches: dict) -> Samples:
    plain = {"lengths": np.array([3], np.int32), "rewards": np.array([1.5])}
    return Samples(1, 1, env_steps, agent_steps, 0, 0, 2, 3, batches, {**plain, **(episodes or {})}, {}, {"iters": 1.0})


TIMES, HALF = {"obs": np.zeros((3, 2, 4))}, {"obs": np.zeros((3, 1, 4))}


def test_counts_must_be_those_of_the_rows() -> None:
    check_samples(samples(a=TIMES))
    check_samples(samples(env_steps=2, a=HALF, b=HALF))
    check_samples(samples(env_steps=9, agent_steps=20))  # of policies that don't learn
    padded = {"obs": np.zeros((4, 2)), "valid": np.array([[1, 1], [1, 1], [1, 1], [0, 0]], bool)}
    check_samples(samples(a=padded))
    for wrong in (samples(a={}), samples(a={"obs": np.zeros(6)})):
        with pytest.raises(BatchError):
            check_samples(wrong)
    with pytest.raises(BatchError, match="agent_steps"):
        check_samples(samples(agent_steps=5, a=HALF, b=HALF))


def test_rows_are_those_of_the_observations_whatever_else_comes_first() -> None:
    check_samples(samples(a={"junk": np.zeros((10, 10)), **TIMES}))
    with pytest.raises(BatchError, match="agent_steps"):
        check_samples(samples(agent_steps=5, a={"junk": np.zeros((1, 1)), **TIMES}))
    for steps in ({"env_steps": 2**53}, {"agent_steps": 2**53}):
        with pytest.raises(BatchError, match="at most"):
            check_samples(samples(a=TIMES, **steps))


def test_episodes_are_given_by_kind() -> None:
    found = check_samples(
        samples(a=TIMES, episodes={"policy_reward/a": np.ones(2), "custom/x/y": np.ones(1), "hist/h": np.zeros(5)})
    )
    estimates = {"estimate/is/V_prev": np.array([2.0])}
    assert check_samples(samples(a=TIMES, episodes=estimates)).estimates == {"is/V_prev": np.array([2.0])}
    assert found.policy_rewards["a"].tolist() == [1.0, 1.0]
    assert list(found.custom) == ["x/y"]
    assert len(found.hist["h"]) == 5


@pytest.mark.parametrize(
    "episodes",
    [
        {"rewards": np.array([np.nan])},
        {"rewards": np.zeros(2)},
        {"lengths": np.ones(1)},
        {"custom/x": np.array([np.inf])},
        {"hist/x": np.zeros((2, 2))},
        {"policy_reward/a": np.zeros(2, np.int32)},
        {f"custom/{number}": np.zeros(1) for number in range(1001)},
        {"lengths": np.array([-3], np.int32)},
        {"lengths": np.array([2**62])},
        {"custom/" + "x" * 300: np.zeros(1)},
        {"estimate/is": np.zeros(1)},
        {"estimate//V_prev": np.zeros(1)},
        {"estimate/is/V_prev": np.array([np.nan])},
    ],
)
def test_episodes_that_are_no_finite_numbers_or_too_many_are_refused(episodes: dict) -> None:
    with pytest.raises(BatchError, match="episodes"):
        check_samples(samples(a=TIMES, episodes=episodes))


def test_a_refusal_does_not_repeat_all_that_a_peer_sent() -> None:
    many = {f"{number}" + "x" * 200: np.nan for number in range(4000)}
    flooding = samples(a=TIMES)
    object.__setattr__(flooding, "perf", many)
    with pytest.raises(BatchError, match="perf 0xxx") as one:
        check_samples(flooding)
    with pytest.raises(BatchError, match="lengths and rewards") as other:
        check_samples(samples(a=TIMES, episodes={"rewards": np.zeros(2), **{name: np.zeros(1) for name in many}}))
    assert max(len(str(one.value)), len(str(other.value))) < 300
