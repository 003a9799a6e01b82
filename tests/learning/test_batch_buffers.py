"""Train batches against plain concatenation, and fragments that don't fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.errors import BatchError
from aiorl.learning.batch_buffers import PACKED, BatchBuffers, rounded_up

COLUMNS = (
    ColumnSpec(c.OBS, (3,)),
    ColumnSpec(c.ACTIONS, (), "int32"),
    ColumnSpec(c.REWARDS),
    ColumnSpec(c.TERMINATEDS),
    ColumnSpec("image", (2, 2, 1), "uint8"),
)
OF_SEQUENCES = (ColumnSpec(c.LAST_OBS, (3,)), ColumnSpec(c.state_in(0), (5,)))


def fragment(
    length: int, num_envs: int, seed: int = 0, *, valid: bool = False
) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    columns: dict[str, NDArray[Any]] = {
        c.OBS: rng.normal(size=(length, num_envs, 3)).astype(np.float32),
        c.ACTIONS: rng.integers(-5, 2**31 - 1, (length, num_envs)),
        c.REWARDS: rng.normal(size=(length, num_envs)).astype(np.float32),
        c.TERMINATEDS: rng.random((length, num_envs)) < 0.3,
        "image": rng.integers(0, 255, (length, num_envs, 2, 2, 1)).astype(np.uint8),
        c.LAST_OBS: rng.normal(size=(num_envs, 3)).astype(np.float32),
        c.state_in(0): rng.normal(size=(num_envs, 5)).astype(np.float32),
    }
    if valid:
        columns[c.VALID] = rng.random((length, num_envs)) < 0.5
        columns[c.VALID][-1] = True
    return columns


def test_buffers_are_reused_after_two_batches_without_stale_data() -> None:
    buffers = BatchBuffers(COLUMNS)
    first = buffers.rows([fragment(4, 4, 1)], 16)
    kept = first[PACKED].copy()
    second = buffers.rows([fragment(4, 4, 2)], 16)
    np.testing.assert_array_equal(first[PACKED], kept)
    third = buffers.rows([fragment(2, 2, 3)], 16)
    assert third[PACKED] is first[PACKED]
    assert second[PACKED] is not first[PACKED]
    assert (third[PACKED][4:] == 0).all()
    assert (third["image"][4:] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_column_with_a_non_finite_number_is_named(bad: float) -> None:
    buffers = BatchBuffers(COLUMNS + OF_SEQUENCES)
    batch = buffers.sequences([fragment(4, 2)], 2, 4)
    assert buffers.first_not_finite(batch) == ""
    batch[c.state_in(0)][1, 1] = bad
    assert buffers.first_not_finite(batch) == c.state_in(0)
    buffers.column(batch, c.REWARDS)[0, 0] = bad
    assert buffers.first_not_finite(batch) == c.REWARDS


@given(count=st.integers(1, 10_000), least=st.integers(1, 100))
def test_rounding_up_gives_few_sizes_and_wastes_at_most_half(count: int, least: int) -> None:
    size = rounded_up(count, least)
    assert size >= max(count, least)
    assert size % least == 0 or (2 * size) % (3 * least) == 0
    assert size == least or size < 2 * count


def test_the_observation_after_a_sequences_last_transition_is_in_the_next_row() -> None:
    buffers = BatchBuffers(COLUMNS + OF_SEQUENCES)
    cut = fragment(4, 3)
    cut[c.VALID] = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]], bool)
    for length in (4, 6):
        obs = buffers.column(buffers.sequences([fragment(4, 1, 9), cut], 5, length), c.OBS)
        np.testing.assert_array_equal(obs[2, 2], cut[c.LAST_OBS][1])
        np.testing.assert_array_equal(obs[3, 1], cut[c.LAST_OBS][2])
        np.testing.assert_array_equal(obs[3, 0], cut[c.OBS][0, 2])
        if length == 6:
            np.testing.assert_array_equal(obs[1, 4], cut[c.LAST_OBS][0])
            assert not obs[1, 5].any()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ({"junk": np.zeros((4, 2))}, "junk"),
        ({c.VALID: np.full((4, 2), np.nan, np.float32)}, "valid"),
        ({c.VALID: np.ones((4, 3), bool)}, "valid"),
        ({"\x1b[2J" * 1000: np.zeros(1)}, r"^.{0,400}\\x1b.{0,200}$"),
    ],
)
def test_fragments_that_do_not_fit_are_refused_with_the_column(
    damage: dict[str, Any], name: str
) -> None:
    buffers = BatchBuffers(COLUMNS + OF_SEQUENCES)
    buffers.check(fragment(4, 2), 4)
    with pytest.raises(BatchError, match=name):
        buffers.check(fragment(4, 2) | damage, 4)


@pytest.mark.parametrize("shape", [(0, 1), (3, 0)])
def test_fragments_without_a_row_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(BatchError, match="obs"):
        BatchBuffers(COLUMNS + OF_SEQUENCES).check(fragment(*shape))


def test_new_obs_is_a_column_in_any_layout() -> None:
    columns = (ColumnSpec(c.OBS, (3,)), ColumnSpec(c.NEW_OBS, (3,)))
    buffers = BatchBuffers(columns)
    made = {name: array for name, array in fragment(4, 2).items() if name in (c.OBS, c.LAST_OBS)}
    made |= {
        c.FINAL_INDEX: np.array([[1, 0], [3, 1]], np.int32),
        c.FINAL_OBS: np.full((2, 3), 9, np.float32),
    }
    expected = np.concatenate([made[c.OBS][1:], made[c.LAST_OBS][None]])
    expected[1, 0] = expected[3, 1] = 9
    for kept in (made, {c.OBS: made[c.OBS], c.NEW_OBS: expected}):
        buffers.check(kept)
        batch = buffers.rows([kept], 9)
        np.testing.assert_array_equal(buffers.column(batch, c.NEW_OBS)[:8], expected.reshape(8, 3))
        batch = buffers.sequences([kept], 2, 5)
        np.testing.assert_array_equal(
            buffers.column(batch, c.NEW_OBS)[:, :4], expected.swapaxes(0, 1)
        )
