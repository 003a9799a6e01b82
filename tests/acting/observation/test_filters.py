from __future__ import annotations

import dataclasses
import functools
import threading

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, strategies as st

from aiorl.acting.filters import (
    ConcurrentMeanStdFilter,
    MeanStdFilter,
    NoFilter,
    RunningStat,
    make_filter,
)
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.obs_layout import LaidOutBox, ObsLayout, layout_of
from aiorl.errors import BatchError
from aiorl.run.core import Publisher
from aiorl.run.worker.sampler_unit import SnapshotSlot

batches = st.lists(st.integers(1, 7), min_size=1, max_size=12)
seeds = st.integers(0, 2**31)


def assert_saw(state, samples) -> None:
    """Check that the state is that of a filter that saw exactly these samples."""
    assert state["n"] == len(samples)
    if len(samples):
        data = np.asarray(samples, np.float64)
        np.testing.assert_allclose(state["mean"], data.mean(axis=0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(
            state["m2"], ((data - data.mean(axis=0)) ** 2).sum(axis=0), rtol=1e-9, atol=1e-7
        )


@given(
    seed=seeds,
    sizes=batches,
    shape=st.sampled_from([(), (3,), (2, 2)]),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_statistics_are_numpys_mean_and_ddof_1_deviation_of_all_samples(seed, sizes, shape, offset):
    """R136."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(offset, 3.0, (size, *shape)).astype(np.float32) for size in sizes]
    stat = RunningStat(shape)
    for part in parts:
        stat.push(part)
    data = np.concatenate(parts).astype(np.float64)
    assert stat.n == len(data)
    np.testing.assert_allclose(stat.mean, data.mean(axis=0), rtol=1e-9, atol=1e-12)
    expected = data.std(axis=0, ddof=1) if len(data) > 1 else np.ones(shape)
    np.testing.assert_allclose(stat.std, expected, rtol=1e-9)


def test_output_is_the_sample_minus_mean_divided_by_deviation():
    observation_filter = MeanStdFilter((2,))
    data = np.array([[1.0, 10.0], [3.0, 10.0], [5.0, 40.0]], np.float32)
    out = observation_filter(data)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, (data - [3, 20]) / [2, np.sqrt(300)], rtol=1e-6)
    np.testing.assert_allclose(observation_filter(data[0], update=False), out[0])
    young = MeanStdFilter((1,), clip=1.5)  # below two samples, the deviation is 1
    np.testing.assert_allclose(young(np.array([5.0])), [0.0])
    np.testing.assert_allclose(
        young(np.array([[6.0], [7.0], [-9.0]]), update=False), [[1.0], [1.5], [-1.5]]
    )


@given(
    seed=seeds,
    rows=st.integers(1, 6),
    before=st.sampled_from([0, 1, 2, 50]),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_rows_filtered_one_by_one_are_those_of_one_call_each(seed, rows, before, shape, offset):
    """R136: outputs, statistics and delta."""
    rng = np.random.default_rng(seed)
    earlier = rng.normal(offset, 2.0, (before, *shape)).astype(np.float32)
    batch = rng.normal(offset + 1.0, 3.0, (rows, *shape)).astype(np.float32)
    at_once, in_turn = MeanStdFilter(shape, clip=2.0), MeanStdFilter(shape, clip=2.0)
    for observation_filter in (at_once, in_turn):
        if before:
            observation_filter(earlier)
    out = at_once.filter_in_order(batch)
    assert (out.dtype, out.shape) == (np.float32, batch.shape)
    np.testing.assert_allclose(out, [in_turn(row[None])[0] for row in batch], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        at_once(batch, update=False), in_turn(batch, update=False), rtol=1e-5, atol=1e-5
    )
    assert_saw(at_once.state(), [*earlier, *batch])
    assert_saw(at_once.take_delta(), [*earlier, *batch])
    assert NoFilter().filter_in_order(batch) is batch


def test_reading_changes_nothing_and_a_new_filter_returns_its_input():
    """R137."""
    for kind in (MeanStdFilter, ConcurrentMeanStdFilter):
        observation_filter = kind((2,))
        data = np.array([[3.0, -4.0]])
        np.testing.assert_allclose(observation_filter(data, update=False), data, atol=1e-6)
        assert (observation_filter.count, observation_filter.buffer_count) == (0, 0)
        observation_filter(np.zeros((0, 2)))
        assert observation_filter.count == 0
        samples = [[1.0, 10.0], [3.0, 30.0], [5.0, 20.0]]
        observation_filter(np.array(samples))
        obs = np.array([[3.0, 40.0], [1e6, -1e6]])
        filtered = observation_filter(obs, update=False)
        np.testing.assert_allclose(filtered, (obs - [3.0, 20.0]) / [2.0, 10.0], rtol=1e-6)
        assert_saw(observation_filter.state(), samples)
        assert_saw(observation_filter.delta(), samples)


@given(seed=seeds, sizes=batches, workers=st.integers(1, 4))
def test_deltas_of_any_number_of_workers_in_any_order_equal_one_filter(seed, sizes, workers):
    """R139, R145."""
    rng = np.random.default_rng(seed)
    filters = [MeanStdFilter((2,)) for _ in range(workers)]
    samples, deltas = [], []
    for size in sizes:
        part = rng.normal(100.0, 1.0, (size, 2))
        samples.append(part)
        worker = filters[rng.integers(workers)]
        worker(part)
        if rng.random() < 0.5:
            deltas.append(worker.take_delta())
    deltas += [worker.take_delta() for worker in filters]
    learner = MeanStdFilter((2,))
    for index in rng.permutation(len(deltas)):
        learner.merge_delta(deltas[index])
    assert_saw(learner.state(), np.concatenate(samples))
    assert learner.buffer_count == 0, "R145"


def test_a_delta_is_taken_once_under_increasing_numbers_and_stays_in_the_statistics():
    """R138."""
    observation_filter = MeanStdFilter((1,))
    observation_filter(np.array([[1.0], [2.0]]))
    assert observation_filter.take_delta(5)["n"] == 2
    assert (observation_filter.count, observation_filter.buffer_count) == (2, 0)
    with pytest.raises(ValueError, match=r"5 .*5"):
        observation_filter.take_delta(5)
    assert observation_filter.take_delta(9)["n"] == 0


def test_states_are_synchronised_merged_and_restored():
    """R140."""
    mine, published = MeanStdFilter((1,)), MeanStdFilter((1,))
    mine(np.array([[1.0], [3.0]]))
    published(np.array([[10.0], [20.0], [30.0]]))
    mine.sync(published)
    assert_saw(mine.state(), [[10.0], [20.0], [30.0], [1.0], [3.0]])
    assert_saw(mine.delta(), [[1.0], [3.0]])
    with pytest.raises(ValueError, match="MeanStdFilter"):
        mine.sync(MeanStdFilter((2,)))
    other = MeanStdFilter((1,))
    other(np.array([[5.0]]))
    other.clear_buffer()
    other(np.array([[7.0]]))
    mine.apply_changes(other)
    assert_saw(mine.state(), [[10.0], [20.0], [30.0], [1.0], [3.0], [7.0]])
    assert_saw(mine.delta(), [[1.0], [3.0]])
    mine.apply_changes(other, with_buffer=True)
    assert_saw(mine.delta(), [[7.0]])
    mine.take_delta()
    mine.restore(published.state())  # deltas in flight are forgotten, too
    mine.adopt(published.state(), 0)
    assert_saw(mine.state(), [[10.0], [20.0], [30.0]])


def test_copies_are_independent_and_serialise_to_the_plain_filter():
    concurrent = ConcurrentMeanStdFilter((1,))
    concurrent(np.array([[1.0], [2.0]]))
    plain, copy = concurrent.as_serializable(), concurrent.copy()
    assert type(plain) is MeanStdFilter
    assert type(copy) is ConcurrentMeanStdFilter
    concurrent(np.array([[50.0]]))
    assert_saw(plain.state(), [[1.0], [2.0]])
    assert_saw(copy.delta(), [[1.0], [2.0]])


def test_the_concurrent_filter_counts_exactly_under_parallel_pushes():
    """R146."""
    observation_filter = ConcurrentMeanStdFilter((3,))
    counts = []

    def push(number):
        for _ in range(200):
            observation_filter(np.full((2, 3), number, np.float32))
        counts.append(observation_filter.take_delta()["n"])

    threads = [threading.Thread(target=push, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observation_filter.count == 1600
    assert sum(counts) + observation_filter.buffer_count == 1600
    np.testing.assert_allclose(observation_filter.state()["mean"], 1.5, rtol=1e-9)
    assert observation_filter.is_concurrent


@pytest.mark.parametrize(
    "obs", [[1.0, 2.0], None, *map(np.zeros, [(3,), (4, 3), (2, 2, 1), ()])], ids=repr
)
def test_a_value_that_is_neither_sample_nor_batch_is_refused(obs):
    observation_filter = MeanStdFilter((2,))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        observation_filter(obs)
    assert observation_filter.count == 0


@pytest.mark.parametrize("name", ["NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_a_filter_knows_dtype_and_space_of_its_output(name, dtype):
    observation_filter = make_filter(name, (2,))
    space = spaces.Box(0, 100, (2,), dtype)
    batch = np.array([[0, 100], [100, 0], [3, 4]], dtype)
    out = observation_filter(batch)
    assert out.dtype == observation_filter.output_dtype(dtype)
    output_space = observation_filter.output_space(space)
    assert output_space.dtype == out.dtype
    assert all(output_space.contains(row) for row in out)
    assert output_space is space or name != "NoFilter"


def test_statistics_are_not_dropped_silently_by_a_filter_without_any():
    """R135."""
    with pytest.raises(BatchError):
        NoFilter().restore(MeanStdFilter((2,)).state())


def test_no_filter_is_identity_and_its_synchronisation_does_nothing():
    """R135."""
    observation_filter = make_filter("NoFilter", (2,))
    data = np.ones((3, 2), np.uint8)
    assert observation_filter(data) is data
    assert observation_filter.is_concurrent
    assert observation_filter.take_delta() == observation_filter.state() == {}
    observation_filter.adopt({}, 3)
    observation_filter.restore({})
    observation_filter.merge_delta({})
    observation_filter.sync(NoFilter())
    observation_filter.apply_changes(NoFilter(), with_buffer=True)
    observation_filter.clear_buffer()
    assert observation_filter.copy() is observation_filter.as_serializable() is observation_filter


@pytest.mark.parametrize(
    "damage",
    [
        {"mean": np.zeros(3)},
        {"m2": np.array([np.nan, 0.0])},
        {"m2": np.array([-1.0, 0.0])},
        {"n": np.array(-1)},
        {"n": np.array(np.inf)},
        {"n": np.zeros(2)},
        {"n": np.array(2**60)},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage):
    observation_filter = MeanStdFilter((2,))
    observation_filter(np.ones((1, 2)))
    good = {"n": np.array(2), "mean": np.zeros(2), "m2": np.ones(2)}
    adopt = functools.partial(observation_filter.adopt, acked_sequence=0)
    for take_up in (observation_filter.restore, observation_filter.merge_delta, adopt):
        with pytest.raises(BatchError):
            take_up(good | damage)
    with pytest.raises(BatchError):
        observation_filter.restore({"n": np.array(2), "mean": np.zeros(2)})
    assert observation_filter.count == 1


@pytest.mark.parametrize("name", ["MeanStdFilter", "ConcurrentMeanStdFilter"])
@pytest.mark.parametrize(
    "delta",
    [
        {"n": np.array(1), "mean": np.full(2, 1e200), "m2": np.zeros(2)},
        {"n": np.array(2**53), "mean": np.zeros(2), "m2": np.zeros(2)},
    ],
)
def test_a_delta_that_would_overflow_the_statistics_is_refused_and_changes_nothing(name, delta):
    observation_filter = make_filter(name, (2,))
    observation_filter(np.ones((3, 2)))
    before = observation_filter.state()
    with pytest.raises(BatchError):
        observation_filter.merge_delta(delta)
    for key, value in observation_filter.state().items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("name", ["MeanStdFilter", "ConcurrentMeanStdFilter"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_numbers_kept_at_the_start_stay_unchanged_and_enter_no_statistic(name, dtype):
    """Action masks are kept like this; see data.obs_layout."""
    rng = np.random.default_rng(0)
    batches = [(rng.random((rows, 5)) * 9).astype(dtype) for rows in (1, 4, 3)]
    masked, plain = make_filter(name, (5,), 2), make_filter(name, (3,))
    for batch in batches:
        out = masked(batch)
        np.testing.assert_array_equal(out[:, 2:], plain(batch[:, 2:]))
        np.testing.assert_array_equal(out[:, :2], batch[:, :2])
        assert out.dtype == np.float32
    np.testing.assert_array_equal(
        masked.filter_in_order(batches[1])[:, 2:], plain.filter_in_order(batches[1][:, 2:])
    )
    np.testing.assert_array_equal(masked.filter_in_order(batches[1])[:, :2], batches[1][:, :2])
    plain.filter_in_order(batches[1][:, 2:])
    assert masked(batches[0][0]).shape == (5,)
    plain(batches[0][0, 2:])
    copies = (masked.copy(), masked.as_serializable())
    for observation_filter in (masked, *copies):
        for mine, theirs in zip(
            observation_filter.state().values(), plain.state().values(), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
    learner = make_filter(name, (5,), 2)
    learner.merge_delta(masked.take_delta())
    masked.adopt(learner.state(), 1)
    np.testing.assert_allclose(
        masked(batches[2], update=False)[:, 2:], plain(batches[2][:, 2:], update=False), rtol=1e-5
    )
    copies[0].sync(learner)
    copies[0].apply_changes(copies[1])
    with pytest.raises(ValueError, match="MeanStdFilter"):
        masked.sync(make_filter(name, (5,)))
    layout = ObsLayout((3,), num_mask=2)
    filtered = dataclasses.replace(layout, is_filtered=True)
    assert layout_of(masked.output_space(LaidOutBox(0, 9, layout, dtype))) == filtered


# With publisher and snapshot slots; over a bad network: tests/net/protocol/test_faulty_network.py
# --------

SHAPE = (2,)


def test_r144_without_synchronisation_the_learner_learns_and_the_worker_keeps_its_own():
    publisher = Publisher({DEFAULT_POLICY_ID: MeanStdFilter(SHAPE)})
    publisher.join("a")
    publisher.join("b")
    publisher.filters[DEFAULT_POLICY_ID].restore(
        {"n": np.array(2), "mean": np.zeros(2), "m2": np.ones(2)}
    )
    observation_filter = MeanStdFilter(SHAPE)
    slot = SnapshotSlot({}, {DEFAULT_POLICY_ID: observation_filter}, "a", synchronize_filters=False)
    slot.offer(publisher.next_snapshot({}, {}))
    slot.between_steps()
    assert observation_filter.count == 2, "it starts from the known statistics"
    for number in (1, 2, 3):
        observation_filter(np.full((4, 2), float(number)))
        publisher.merge_deltas(
            "a", number, {DEFAULT_POLICY_ID: observation_filter.take_delta(number)}
        )
        publisher.merge_deltas(
            "b", number, {DEFAULT_POLICY_ID: observation_filter.as_serializable().state()}
        )
        slot.offer(publisher.next_snapshot({}, {}))
        slot.between_steps()
        assert observation_filter.count == 2 + 4 * number
    assert publisher.filters[DEFAULT_POLICY_ID].count > observation_filter.count


def test_r147_saving_loses_no_pending_delta():
    observation_filter, learner = MeanStdFilter(SHAPE), MeanStdFilter(SHAPE)
    data = np.arange(12.0).reshape(6, 2)
    observation_filter(data[:2])
    sent = observation_filter.take_delta(1)
    observation_filter(data[2:])
    saved = observation_filter.as_serializable()
    saved.clear_buffer()
    assert saved.count == 6
    learner.merge_delta(sent)
    learner.merge_delta(observation_filter.take_delta(2))
    assert_saw(learner.state(), data)


@pytest.mark.parametrize("name", ["NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"])
def test_deltas_that_are_acknowledged_are_forgotten_without_a_new_state(name):
    observation_filter = make_filter(name, SHAPE)
    for number in (1, 2, 3):
        observation_filter(np.full((1, 2), float(number)))
        observation_filter.take_delta(number)
    observation_filter.acknowledge(2)
    if name == "NoFilter":
        assert observation_filter.state() == {}
        return
    assert observation_filter.count == 3
    # a state without any of the deltas shows which ones are still in flight
    observation_filter.adopt({"n": np.array(0), "mean": np.zeros(2), "m2": np.zeros(2)}, 0)
    assert_saw(observation_filter.state(), [[3.0, 3.0]])


def test_r142_an_old_published_version_is_ignored():
    publisher = Publisher({DEFAULT_POLICY_ID: MeanStdFilter(SHAPE)})
    publisher.join("a")
    observation_filter = MeanStdFilter(SHAPE)
    slot = SnapshotSlot({}, {DEFAULT_POLICY_ID: observation_filter}, "a", synchronize_filters=True)
    samples, snapshots = np.arange(8.0).reshape(4, 2), []
    for number, part in enumerate((samples[:2], samples[2:]), 1):
        observation_filter(part)
        publisher.merge_deltas(
            "a", number, {DEFAULT_POLICY_ID: observation_filter.take_delta(number)}
        )
        snapshots.append(publisher.next_snapshot({}, {}))
    for snapshot in (snapshots[1], snapshots[1], snapshots[0]):
        slot.offer(snapshot)
        slot.between_steps()
        assert slot.version == snapshots[1].version
        assert_saw(observation_filter.state(), samples)
