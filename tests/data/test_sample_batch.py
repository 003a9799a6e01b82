from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import BatchError
from aiorl.process.log_once import summarize


def make_batch(rows: int, start: int = 0) -> SampleBatch:
    index = np.arange(start, start + rows)
    return SampleBatch({"obs": np.stack([index, -index], axis=1).astype(np.float32), "eps_id": index // 3})


def test_columns_of_different_length_are_refused_with_their_name() -> None:
    with pytest.raises(BatchError, match=r"'rewards'.*3 rows.*2 rows"):
        SampleBatch({"obs": np.zeros((3, 2)), "rewards": np.zeros(2)})


def test_a_scalar_column_is_refused() -> None:
    with pytest.raises(BatchError, match="scalar"):
        SampleBatch({"obs": np.float32(1)})


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_concat_keeps_every_row_in_order(sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes])
    batches = [make_batch(size, int(start)) for size, start in zip(sizes, starts, strict=False)]
    joined = SampleBatch.concat(batches)
    assert joined.count == sum(sizes)
    np.testing.assert_array_equal(joined["obs"][:, 0], np.arange(sum(sizes)))


def test_concat_refuses_batches_with_other_columns() -> None:
    with pytest.raises(BatchError, match="eps_id"):
        SampleBatch.concat([make_batch(2), SampleBatch({"obs": np.zeros((1, 2))})])


def test_split_by_episode_cuts_where_the_id_changes_and_loses_nothing() -> None:
    batch = make_batch(8)
    parts = batch.split_by_episode()
    assert [part.count for part in parts] == [3, 3, 2]
    assert all(len(set(part["eps_id"].tolist())) == 1 for part in parts)
    np.testing.assert_array_equal(SampleBatch.concat(parts)["obs"], batch["obs"])


def test_split_of_a_returning_id_gives_two_parts_and_of_no_rows_none() -> None:
    assert [p.count for p in SampleBatch(eps_id=np.array([1, 1, 2, 1])).split_by_episode()] == [2, 1, 1]
    assert SampleBatch(eps_id=np.zeros(0)).split_by_episode() == []


def test_shuffled_is_a_permutation_and_rows_stay_whole() -> None:
    batch = make_batch(50)
    mixed = batch.shuffled(np.random.default_rng(1))
    assert not np.array_equal(mixed["obs"], batch["obs"])
    np.testing.assert_array_equal(mixed["obs"][:, 0], -mixed["obs"][:, 1])
    assert sorted(mixed["obs"][:, 0].tolist()) == list(range(50))


def test_slice_is_a_view_and_copy_is_not() -> None:
    batch = make_batch(4)
    batch.slice(1, 3)["obs"][0, 0] = 99
    assert batch["obs"][1, 0] == 99
    batch.copy()["obs"][0, 0] = 7
    assert batch["obs"][0, 0] == 0


def test_rows_and_mapping_protocol() -> None:
    batch = make_batch(2)
    assert [int(row["obs"][0]) for row in batch.rows()] == [0, 1]
    assert set(batch) == {"obs", "eps_id"}
    assert batch.total() == 2
    del batch["obs"], batch["eps_id"]
    assert batch.count == 0
    batch["x"] = np.zeros(5)
    assert batch.count == 5
    batch["x"] = np.zeros(2)
    assert (batch.count, batch.nbytes) == (2, 16)


def make_images(rows: int, start: int = 0) -> SampleBatch:
    index = np.arange(start, start + rows)
    obs = np.repeat(index.astype(np.uint8), 64).reshape(rows, 8, 8)
    return SampleBatch(obs=obs, new_obs=obs + 1, actions=index, eps_id=index // 3)


@pytest.mark.parametrize("mode", ["rows", "bulk"])
def test_r65_only_observations_are_compressed_and_access_decompresses_them(mode: str) -> None:
    batch, plain = make_images(20), make_images(20)
    batch.compress(mode)
    assert batch.packed == {"obs", "new_obs"}
    assert batch.nbytes < plain.nbytes / 2
    assert batch.count == 20
    for name in plain:
        np.testing.assert_array_equal(batch[name], plain[name])
        np.testing.assert_array_equal(dict(batch.items())[name], plain[name])
    batch.compress(mode)
    batch.decompress()
    assert batch.packed == frozenset()
    np.testing.assert_array_equal(batch["obs"], plain["obs"])


@pytest.mark.parametrize("mode", ["rows", "bulk"])
def test_r65_every_operation_works_on_compressed_columns(mode: str) -> None:
    batch, plain = make_images(9), make_images(9)
    batch.compress(mode)
    pairs = [
        (batch.slice(2, 7), plain.slice(2, 7)),
        (batch.take(np.array([3, 0])), plain.take(np.array([3, 0]))),
        (batch.copy(), plain),
        (SampleBatch.concat([batch, make_images(2, 9)]), make_images(11)),
        (SampleBatch.concat([batch, batch]), SampleBatch.concat([plain, plain])),
        *zip(batch.split_by_episode(), plain.split_by_episode(), strict=True),
    ]
    for mine, theirs in pairs:
        assert mine.count == theirs.count
        for name in theirs:
            np.testing.assert_array_equal(mine[name], theirs[name])
    np.testing.assert_array_equal(list(batch.rows())[4]["obs"], plain["obs"][4])
    assert batch.slice(0, 2).packed == ({"obs", "new_obs"} if mode == "rows" else set())


def test_r65_compression_of_what_is_not_there_or_no_array_of_numbers_does_nothing() -> None:
    batch = SampleBatch(obs=np.array([{}, {}], dtype=object), actions=np.zeros(2))
    batch.compress("rows", ["obs", "new_obs"])
    assert not batch.packed
    with pytest.raises(ValueError, match="'rows' or 'bulk'"):
        batch.compress(True)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="2 rows"):
        batch["more"] = np.zeros(3)


def test_what_users_of_rllib_reach_for() -> None:
    batch = SampleBatch.concat_samples([make_batch(3), make_batch(2, 3)])
    assert len(batch) == batch.count == 5
    obs, ids = batch.columns(["obs", "eps_id"])
    np.testing.assert_array_equal(obs, batch["obs"])
    np.testing.assert_array_equal(ids, [0, 0, 0, 1, 1])
    assert batch[1:3]["obs"][:, 0].tolist() == [1, 2]
    assert batch[-2:]["obs"][:, 0].tolist() == [3, 4]
    assert batch[::2].count == 3
    batch[1:3]["obs"][0, 0] = 99
    assert batch["obs"][1, 0] == 99, "a slice is a view"
    batch.shuffle(np.random.default_rng(1))
    assert sorted(batch["obs"][:, 0].tolist()) == [0, 2, 3, 4, 99]
    assert batch["eps_id"].tolist() != [0, 0, 0, 1, 1]
    batch.shuffle()
    assert batch.count == 5


@pytest.mark.parametrize("mode", ["rows", "bulk"])
def test_slices_and_shuffles_of_compressed_columns_are_those_of_plain_ones(mode: str) -> None:
    batch, plain = make_images(9), make_images(9)
    batch.compress(mode)
    np.testing.assert_array_equal(batch[2:7]["obs"], plain["obs"][2:7])
    batch.shuffle(np.random.default_rng(3))
    plain.shuffle(np.random.default_rng(3))
    np.testing.assert_array_equal(batch["obs"], plain["obs"])


def test_a_batch_is_a_mapping_of_columns_though_its_length_is_that_of_its_rows() -> None:
    batch = make_batch(4)
    assert batch.keys() == {"obs", "eps_id"}
    assert len(batch.keys()) == len(batch.items()) == 2
    assert dict(batch).keys() == batch.keys()
    assert "obs" in batch
    assert not SampleBatch(obs=np.zeros((0, 2)))
    joined = SampleBatch.concat([SampleBatch(obs=np.zeros((0, 2))), SampleBatch(obs=np.ones((1, 2)))])
    assert joined["obs"].tolist() == [[1, 1]]
    assert "2 entries" in summarize(batch, depth=0)


def test_batches_of_several_policies_are_joined_by_the_same_name() -> None:
    parts = [MultiAgentBatch({"a": make_batch(2)}, 2), MultiAgentBatch({"a": make_batch(1), "b": make_batch(3)}, 3)]
    joined = MultiAgentBatch.concat_samples(parts)
    assert (joined.count, len(joined.policy_batches["a"]), len(joined.policy_batches["b"])) == (5, 3, 3)
