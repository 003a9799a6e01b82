"""Batches of one or several policies: mappings of columns with the length of their rows, plain or
compressed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from aiorl.data import sample_batch
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import MultiAgentBatch, PackedColumn, SampleBatch, concat_batches
from aiorl.errors import BatchError
from aiorl.process.log_once import summarize


def make_batch(rows: int, start: int = 0) -> SampleBatch:
    index = np.arange(start, start + rows)
    return SampleBatch(
        {"obs": np.stack([index, -index], axis=1).astype(np.float32), "eps_id": index // 3}
    )


def rows(*values: float) -> SampleBatch:
    return SampleBatch(obs=np.array(values))


def test_columns_that_disagree_or_have_no_rows_are_refused_with_their_name() -> None:
    with pytest.raises(BatchError, match=r"'rewards'.* 3 .* 2 "):
        SampleBatch({"obs": np.zeros((3, 2)), "rewards": np.zeros(2)})
    with pytest.raises(BatchError, match="obs"):
        SampleBatch({"obs": np.float32(1)})


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_concat_keeps_every_row_in_order(sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes])
    batches = [make_batch(size, int(start)) for size, start in zip(sizes, starts, strict=False)]
    for joined in (
        SampleBatch.concat(batches),
        SampleBatch.concat_samples(batches),
        concat_batches(batches),
    ):
        assert joined.count == sum(sizes)
        np.testing.assert_array_equal(joined["obs"][:, 0], np.arange(sum(sizes)))
    assert concat_batches(batches[:1]) is batches[0]


def test_concat_refuses_batches_with_other_columns_and_an_empty_list() -> None:
    with pytest.raises(BatchError, match="eps_id"):
        SampleBatch.concat([make_batch(2), rows(1)])
    with pytest.raises(ValueError):
        concat_batches([])


def test_split_by_episode_cuts_where_the_id_changes_and_keeps_all_rows() -> None:
    batch = make_batch(8)
    parts = batch.split_by_episode()
    assert [part.count for part in parts] == [3, 3, 2]
    np.testing.assert_array_equal(SampleBatch.concat(parts)["obs"], batch["obs"])
    assert [p.count for p in SampleBatch(eps_id=np.array([1, 1, 2, 1])).split_by_episode()] == [
        2,
        1,
        1,
    ]
    assert SampleBatch(eps_id=np.zeros(0)).split_by_episode() == []


def test_a_batch_is_a_mapping_of_columns_with_the_length_of_its_rows() -> None:
    batch = make_batch(4)
    assert batch.keys() == dict(batch).keys() == {"obs", "eps_id"}
    assert (len(batch), batch.count, batch.total(), len(batch.items())) == (4, 4, 4, 2)
    assert not SampleBatch(obs=np.zeros((0, 2)))
    assert [int(row["obs"][0]) for row in batch.rows()] == [0, 1, 2, 3]
    assert "2" in summarize(batch, depth=0)
    del batch["obs"], batch["eps_id"]
    assert batch.count == 0
    batch["x"] = np.zeros(5)
    batch["x"] = np.zeros(2)
    assert (batch.count, batch.nbytes) == (2, 16)


def test_methods_that_users_of_rllib_expect() -> None:
    batch = make_batch(5)
    obs, ids = batch.columns(["obs", "eps_id"])
    np.testing.assert_array_equal(obs, batch["obs"])
    np.testing.assert_array_equal(ids, [0, 0, 0, 1, 1])
    assert batch[-2:]["obs"][:, 0].tolist() == [3, 4]
    batch.copy()["obs"][0, 0] = 7
    batch[1:3]["obs"][0, 0] = 99
    assert batch["obs"][:, 0].tolist() == [0, 99, 2, 3, 4], "a slice is a view, a copy is not"
    mixed = batch.shuffled(np.random.default_rng(1))
    batch.shuffle(np.random.default_rng(1))
    assert mixed["obs"].tolist() == batch["obs"].tolist()
    assert batch["eps_id"].tolist() != [0, 0, 0, 1, 1]
    assert dict(zip(batch["obs"][:, 0].tolist(), batch["eps_id"].tolist(), strict=True)) == {
        0: 0,
        99: 0,
        2: 0,
        3: 1,
        4: 1,
    }


# Compressed columns
# --------------------------------------------------------------------------------------------------

ARRAYS = hnp.arrays(
    st.sampled_from([np.uint8, np.float32, np.int64, np.bool_]),
    hnp.array_shapes(min_dims=1, max_dims=4, min_side=0),
)


@given(array=ARRAYS, by_row=st.booleans(), data=st.data())
def test_r65_decompression_restores_equal_arrays_and_rows_are_picked_compressed(
    array, by_row, data
) -> None:
    column = PackedColumn.pack(array, by_row=by_row)
    assert len(column) == len(array)
    assert column.unpack().dtype == array.dtype
    np.testing.assert_array_equal(column.unpack(), array)
    mask = data.draw(hnp.arrays(np.bool_, len(array)))
    for index in (slice(1, 3), mask, np.flatnonzero(mask)[::-1]) if by_row else ():
        np.testing.assert_array_equal(column.take(index).unpack(), array[index])


def test_large_columns_are_packed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_batch, "_BLOCK_BYTES", 100)
    array = np.arange(99, dtype=np.int32).reshape(33, 3)
    column = PackedColumn.pack(array.swapaxes(0, 1), by_row=False)
    assert len(column.blobs) == 4
    np.testing.assert_array_equal(column.unpack(), array.T)


def make_images(count: int, start: int = 0) -> SampleBatch:
    index = np.arange(start, start + count)
    obs = np.repeat(index.astype(np.uint8), 64).reshape(count, 8, 8)
    return SampleBatch(obs=obs, new_obs=obs + 1, actions=index, eps_id=index // 3)


@pytest.mark.parametrize("mode", ["rows", "bulk"])
def test_r65_only_observations_are_compressed_and_every_operation_works_on_them(mode: str) -> None:
    batch, plain = make_images(9), make_images(9)
    batch.compress(mode)
    batch.compress(mode)
    assert batch.packed == {"obs", "new_obs"}
    assert batch.nbytes < plain.nbytes / 2
    shuffled = batch.shuffled(np.random.default_rng(3)), plain.shuffled(np.random.default_rng(3))
    pairs = [
        (batch, plain),
        shuffled,
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
            np.testing.assert_array_equal(dict(mine.items())[name], theirs[name])
    for selected in (batch.slice(0, 2), SampleBatch.concat([batch, batch])):
        assert selected.packed == ({"obs", "new_obs"} if mode == "rows" else set())
    batch.decompress()
    assert batch.packed == frozenset()


@pytest.mark.parametrize("other", [np.zeros((2, 3), np.uint8), np.zeros((2, 4), np.float32)])
def test_compressed_rows_of_another_kind_are_joined_like_arrays(other: np.ndarray) -> None:
    batches = SampleBatch(obs=np.zeros((2, 3), np.float32)), SampleBatch(obs=other)
    for batch in batches:
        batch.compress()
    if other.shape == (2, 3):
        joined = SampleBatch.concat(batches)
        assert (joined.packed, joined["obs"].tolist()) == (frozenset(), np.zeros((4, 3)).tolist())
    else:
        with pytest.raises(ValueError, match="4"):
            SampleBatch.concat(batches)


def test_r65_compression_skips_missing_columns_and_objects() -> None:
    batch = SampleBatch(obs=np.array([{}, {}], dtype=object), actions=np.zeros(2))
    batch.compress("rows", ["obs", "new_obs"])
    assert not batch.packed
    with pytest.raises(ValueError, match="True"):
        batch.compress(True)  # type: ignore[arg-type]


# Several policies
# --------------------------------------------------------------------------------------------------


def test_r131_r132_concat_adds_counts_of_env_steps_and_keeps_row_order_per_policy() -> None:
    parts = [
        MultiAgentBatch({"a": rows(1, 2)}, 1),
        MultiAgentBatch({"b": rows(7), "a": rows(3)}, 2),
    ]
    for joined in (
        MultiAgentBatch.concat(parts),
        MultiAgentBatch.concat_samples(parts),
        concat_batches(parts),
    ):
        assert (joined.count, joined.total()) == (3, 4)
        assert joined.policy_batches["a"]["obs"].tolist() == [1, 2, 3]
        assert joined.policy_batches["b"]["obs"].tolist() == [7]


def test_plain_batches_among_multi_agent_ones_are_the_default_policys() -> None:
    """R132, R67."""
    joined = concat_batches(
        [rows(1, 2), MultiAgentBatch({DEFAULT_POLICY_ID: rows(3), "b": rows(4)}, 1)]
    )
    assert joined.count == 3
    assert joined.policy_batches[DEFAULT_POLICY_ID]["obs"].tolist() == [1, 2, 3]
    assert joined.policy_batches["b"]["obs"].tolist() == [4]


def test_r2_only_the_default_policy_gives_a_plain_batch() -> None:
    plain = rows(1)
    assert MultiAgentBatch.wrap_as_needed({DEFAULT_POLICY_ID: plain}, 1) is plain
    assert isinstance(MultiAgentBatch.wrap_as_needed({"a": plain}, 1), MultiAgentBatch)
    assert DEFAULT_POLICY_ID == "default_policy"


def test_r65_compression_reaches_every_policys_observations() -> None:
    batch = MultiAgentBatch({name: make_images(4) for name in "ab"}, 4)
    batch.compress("bulk")
    assert all(rows.packed == {"obs", "new_obs"} for rows in batch.policy_batches.values())
    batch.decompress()
    assert not any(rows.packed for rows in batch.policy_batches.values())


def test_r131_a_plain_batch_of_several_agents_has_their_env_steps() -> None:
    first = MultiAgentBatch.wrap_as_needed({DEFAULT_POLICY_ID: rows(1, 2, 3, 4)}, 2)
    empty = MultiAgentBatch.wrap_as_needed({}, 3)  # steps that left no row
    assert isinstance(first, SampleBatch)
    assert isinstance(empty, SampleBatch)
    joined = concat_batches([first, empty, first.copy()])
    assert (joined.count, joined.env_steps) == (8, 7)
    assert concat_batches([empty, empty]).env_steps == 6
    assert first.slice(0, 3).env_steps == 3


def test_bulk_can_be_given_by_its_name_in_rllib() -> None:
    batches = MultiAgentBatch({"a": make_batch(4)}, 4)
    batches.compress(bulk=True)
    single = make_batch(4)
    single.compress(bulk=True)
    for compressed in (single, batches["a"]):
        assert compressed.packed == {"obs"}
        assert not compressed.slice(0, 2).packed, "rows of a block are picked by decompression"


def test_a_multi_agent_batch_is_read_by_policy() -> None:
    batch = MultiAgentBatch({"a": rows(1.0), "b": rows(2.0)}, 2)
    assert list(batch.keys()) == list(batch) == ["a", "b"]
    assert batch["b"] is batch.policy_batches["b"]
