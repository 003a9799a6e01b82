"""Assembly of train batches: order, bounds, staleness, and an account of every env step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

from aiorl.errors import BatchError
from aiorl.learning.algorithm import LeasePlan
from aiorl.net.protocol.events import SamplesAccepted
from aiorl.net.wire.messages import Samples
from aiorl.run.ingest import BatchAssembler, check_samples


def fragment(
    slot: int, seq: int, version: int = 0, env_steps: int = 10, size: int = 8
) -> SamplesAccepted:
    batches = {"default_policy": {"obs": np.zeros((size, 1), np.uint8)}}
    message = Samples(
        seq, 1, env_steps, env_steps, version, version, 1, env_steps, batches, {}, {}, {}
    )
    return SamplesAccepted(slot, "ab", message)


def on_policy(count: int) -> BatchAssembler:
    return BatchAssembler(LeasePlan("on_policy", count, max_policy_lag=0))


def streaming(count: int, *, lag: int | None = None) -> BatchAssembler:
    return BatchAssembler(LeasePlan("streaming", count, 3, lag))


def test_an_on_policy_batch_is_ready_once_all_its_fragments_are_there() -> None:
    assembler = on_policy(2)
    assembler.add(fragment(0, 0))
    assert not assembler.is_ready
    assembler.add(fragment(1, 0))
    assert assembler.is_ready
    assert assembler.take().env_steps == 20
    assert assembler.queued_env_steps == 0


@pytest.mark.parametrize("shuffle_seed", range(3))
def test_an_on_policy_batch_is_in_worker_order_whatever_the_order_of_arrival(
    shuffle_seed: int,
) -> None:
    """A6: two runs with the same seeds train on the same batches."""
    arrivals = [fragment(slot, seq) for slot in range(3) for seq in (4, 5)]
    random.Random(shuffle_seed).shuffle(arrivals)
    assembler = on_policy(6)
    for arrival in arrivals:
        assembler.add(arrival)
    taken = [(item.slot, item.message.seq) for item in assembler.take().fragments]
    assert taken == [(0, 4), (0, 5), (1, 4), (1, 5), (2, 4), (2, 5)]


def test_stale_and_surplus_on_policy_fragments_are_discarded_with_a_reason() -> None:
    assembler = on_policy(1)
    assembler.set_version(3)
    assembler.add(fragment(0, 0, version=2, env_steps=7))
    assembler.add(fragment(0, 1, version=3))
    assembler.add(fragment(1, 0, version=3, env_steps=9))
    assert assembler.queued_fragments == 1
    discarded = [(reason, item.message.env_steps) for reason, item in assembler.take_discarded()]
    assert discarded == [("stale", 7), ("surplus", 9)]
    assert assembler.take_discarded() == []


def test_streaming_batches_come_in_the_order_of_arrival() -> None:
    assembler = streaming(2)
    for slot, seq in [(1, 0), (0, 0), (1, 1), (0, 1)]:
        assembler.add(fragment(slot, seq))
    assert [(f.slot, f.message.seq) for f in assembler.take().fragments] == [(1, 0), (0, 0)]
    assert assembler.queued_fragments == 2
    assert [(f.slot, f.message.seq) for f in assembler.take().fragments] == [(1, 1), (0, 1)]


def test_waiting_bytes_are_the_sum_over_fragments_of_different_sizes() -> None:
    assembler = streaming(2, lag=0)
    for seq, size in enumerate((1000, 500, 10)):
        assembler.add(fragment(0, seq, size=size))
    assert assembler.bytes_with(0) == 1510
    assert assembler.bytes_with(4) == 1550
    assembler.take()
    assert assembler.bytes_with(1) == 20
    assembler.set_version(1)
    assert assembler.bytes_with(0) == 0


def whole_episodes(most: int, env_steps: int) -> BatchAssembler:
    return BatchAssembler(
        LeasePlan("on_policy", most, max_policy_lag=0, env_steps_per_batch=env_steps)
    )


def filled(assembler: BatchAssembler, lengths: Iterator[int], version: int = 0) -> list[int]:
    """Return the number of fragments requested in each round, until there is a batch."""
    turns = [assembler.begin_batch()]
    for seq in itertools.count():
        assert not assembler.is_ready
        assembler.add(fragment(0, seq, version, next(lengths)))
        if more := assembler.more_wanted():
            assert seq + 1 == sum(turns), "all requested fragments are there"
            turns.append(more)
        if seq + 1 == sum(turns):
            assert assembler.is_ready
            return turns
    raise AssertionError


@pytest.mark.parametrize(
    ("most", "length", "turns"),
    [
        (16, 128, [4, 12]),  # as short as requested: all fragments
        (16, 500, [4, 1]),  # 2,048 env steps are more than four fragments
        (16, 5000, [4]),
        (4, 512, [2, 2]),
        (4, 700, [2, 1]),
        (1, 2048, [1]),
    ],
)
def test_a_batch_of_whole_episodes_has_no_more_fragments_than_needed(
    most: int, length: int, turns: list[int]
) -> None:
    """G7: otherwise the number of env steps would depend on the number of workers."""
    assembler = whole_episodes(most, 2048)
    for version in range(2):
        assembler.set_version(version)
        assert filled(assembler, itertools.repeat(length), version) == turns
        assert len(assembler.take().fragments) == sum(turns)


@given(
    st.integers(1, 9), st.integers(1, 50), st.lists(st.integers(0, 200), max_size=20), st.booleans()
)
def test_whole_episodes_make_a_batch_whatever_their_lengths(
    most: int, nominal: int, lengths: list[int], is_lying: bool
) -> None:
    """Even if a worker sends less than was requested."""
    assembler = whole_episodes(most, most * nominal)
    found = [length if is_lying else length + nominal for length in (*lengths, *[0] * most)]
    turns = filled(assembler, iter(found))
    assert sum(turns) <= most
    batch = assembler.take()
    assert batch.env_steps >= most * nominal or len(batch.fragments) == most
    assert (
        len(turns) == 1
        or batch.env_steps - sum(found[sum(turns[:-1]) : sum(turns)]) < most * nominal
    )
    assert not assembler.is_ready
    assert not assembler.more_wanted()


@given(
    mode=st.sampled_from(["on_policy", "streaming"]),
    lag=st.sampled_from([0, 1, 3, None]),
    count=st.integers(1, 4),
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "take", "version"]), st.integers(0, 4), st.integers(1, 9))
    ),
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
            assert lag is None or all(
                version - f.message.first_version <= lag for f in batch.fragments
            )
            taken += batch.env_steps
        discarded += sum(item.message.env_steps for _, item in assembler.take_discarded())
        assert added == taken + discarded + assembler.queued_env_steps


def samples(
    *, env_steps: int = 6, agent_steps: int = 6, episodes: dict | None = None, **batches: dict
) -> Samples:
    plain = {"lengths": np.array([3], np.int32), "rewards": np.array([1.5])}
    return Samples(
        1,
        1,
        env_steps,
        agent_steps,
        0,
        0,
        2,
        3,
        batches,
        {**plain, **(episodes or {})},
        {},
        {"iters": 1.0},
    )


TIMES, HALF = {"obs": np.zeros((3, 2, 4))}, {"obs": np.zeros((3, 1, 4))}


def test_counts_must_be_those_of_the_rows() -> None:
    check_samples(samples(a=TIMES))
    check_samples(samples(env_steps=2, a=HALF, b=HALF))
    check_samples(samples(env_steps=9, agent_steps=20))  # rows of policies that do not learn
    padded = {"obs": np.zeros((4, 2)), "valid": np.array([[1, 1], [1, 1], [1, 1], [0, 0]], bool)}
    check_samples(samples(a=padded))
    for wrong in (samples(a={}), samples(a={"obs": np.zeros(6)})):
        with pytest.raises(BatchError):
            check_samples(wrong)
    with pytest.raises(BatchError, match="agent_steps"):
        check_samples(samples(agent_steps=5, a=HALF, b=HALF))


def test_rows_are_counted_by_the_observations() -> None:
    check_samples(samples(a={"junk": np.zeros((10, 10)), **TIMES}))
    with pytest.raises(BatchError, match="agent_steps"):
        check_samples(samples(agent_steps=5, a={"junk": np.zeros((1, 1)), **TIMES}))
    for steps in ({"env_steps": 2**53}, {"agent_steps": 2**53}):
        with pytest.raises(BatchError) as caught:
            check_samples(samples(a=TIMES, **steps))
        assert [caught.value.column] == [*steps]


def test_episodes_are_given_by_kind() -> None:
    found = check_samples(
        samples(
            a=TIMES,
            episodes={
                "policy_reward/a": np.ones(2),
                "custom/x/y": np.ones(1),
                "hist/h": np.zeros(5),
            },
        )
    )
    estimates = {"estimate/is/V_prev": np.array([2.0])}
    assert check_samples(samples(a=TIMES, episodes=estimates)).estimates == {
        "is/V_prev": np.array([2.0])
    }
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
        {"lengths": np.array([-3], np.int32)},
        {"custom/" + "x" * 300: np.zeros(1)},
        {"estimate/is": np.zeros(1)},
        {"estimate/is/V_prev": np.array([np.nan])},
    ],
)
def test_episodes_with_non_finite_numbers_or_too_many_names_are_refused(episodes: dict) -> None:
    with pytest.raises(BatchError, match="episodes"):
        check_samples(samples(a=TIMES, episodes=episodes))


def test_an_error_does_not_repeat_long_text_from_a_peer() -> None:
    many = {f"{number}" + "x" * 200: np.nan for number in range(4000)}
    flooding = samples(a=TIMES)._replace(perf=many)
    with pytest.raises(BatchError, match="0xxx") as one:
        check_samples(flooding)
    with pytest.raises(BatchError, match="episodes") as other:
        check_samples(
            samples(
                a=TIMES, episodes={"rewards": np.zeros(2), **{name: np.zeros(1) for name in many}}
            )
        )
    assert max(len(str(one.value)), len(str(other.value))) < 300


def test_histories_longer_than_workers_send_are_refused() -> None:
    check_samples(samples(a=TIMES, episodes={"hist/x": np.zeros(1000), "custom/x": np.zeros(1)}))
    with pytest.raises(BatchError, match="episodes"):
        check_samples(samples(a=TIMES, episodes={"hist/x": np.zeros(1001, np.float16)}))


def test_a_filter_delta_that_would_freeze_the_statistic_for_good_is_refused() -> None:
    def seen(count: float) -> Samples:
        delta = {"n": np.array(count), "mean": np.zeros(4), "m2": np.zeros(4)}
        return samples(a=TIMES)._replace(filter_deltas={"default_policy": delta})

    check_samples(seen(1_000_000))  # including observations of fragments that were abandoned
    for count in (2**53 - 9, 1e300):
        with pytest.raises(BatchError, match="default_policy"):
            check_samples(seen(count))
