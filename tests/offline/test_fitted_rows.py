"""Stored rows in the dtypes and shapes of a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stored_rows import write

from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError
from aiorl.offline.fitted_rows import RowFitter
from aiorl.offline.readers import FileReader, ReaderOptions

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
BYTES = spaces.Box(0, 255, (2, 2, 1), np.uint8)


def fitted(
    obs: Any, actions: Any, observation_space: Any = BOX, action_space: Any = BOX
) -> SampleBatch:
    rows = SampleBatch(obs=np.asarray(obs), new_obs=np.asarray(obs), actions=np.asarray(actions))
    rows["rewards"] = np.ones(rows.count, np.int64)
    rows["prev_actions"] = rows["actions"]
    RowFitter(observation_space, action_space).fit(rows)
    return rows


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8", "bool"])
def test_numbers_of_any_dtype_become_those_of_the_spaces(dtype: str) -> None:
    rows = fitted(np.ones((3, 2), dtype), np.zeros((3, 2), dtype))
    assert {str(rows[name].dtype) for name in rows} == {"float32"}
    np.testing.assert_array_equal(rows["obs"], np.ones((3, 2)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
def test_whole_numbers_become_discrete_actions_and_bytes(dtype: str) -> None:
    rows = fitted(
        np.full((3, 2, 2), 200, dtype), np.array([[0], [2], [1]], dtype), BYTES, spaces.Discrete(3)
    )
    assert (rows["obs"].dtype, rows["obs"].shape) == (np.uint8, (3, 2, 2, 1))
    assert (rows["actions"].dtype, rows["actions"].tolist()) == (np.int64, [0, 2, 1])


def test_a_number_for_each_row_becomes_a_row_of_one_number() -> None:
    space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    rows = fitted([0.5, 1.5], [0.25, 0.5], space, space)
    assert rows["obs"].shape == rows["actions"].shape == (2, 1)


@pytest.mark.parametrize(
    ("obs", "actions"),
    [
        (np.full((2, 2, 2, 1), 0.5), [0, 1]),
        (np.full((2, 2, 2, 1), 256), [0, 1]),
        (np.zeros((2, 2, 2, 1)), [0, 0.5]),
        (np.zeros((2, 2, 2, 1)), [0, 3]),
        (np.zeros((2, 2, 2, 1)), [-1, 0]),
    ],
)
def test_what_a_space_cannot_have_is_refused(obs: Any, actions: Any) -> None:
    with pytest.raises(DataError, match=r"row [12]"):
        fitted(obs, actions, BYTES, spaces.Discrete(3))


def test_other_spaces_are_left_alone() -> None:
    rows = fitted(np.zeros((2, 3)), np.zeros((2, 3)), spaces.Discrete(3), None)
    assert rows["obs"].dtype == rows["actions"].dtype == np.float64


LATE = spaces.Discrete(3, start=4)
AIMED = spaces.Tuple((LATE, spaces.Box(-1.0, 1.0, (1,), np.float32)))
NAMED = spaces.Dict({"keys": spaces.MultiBinary(2), "late": LATE})


@pytest.mark.parametrize(
    ("obs", "actions", "space", "reason"),
    [
        ([[0, 0], [0, 0]], [0, 7], spaces.Discrete(3), "the action 7 of row 2 is none of Discrete"),
        ([[0, 0], [0, 0]], [[4, 0.5], [9, 0.5]], AIMED, "[9.0, 0.5] of row 2 is none of Tuple"),
        ([[0, 0], [0, 0]], [[4, 0.5], [4.5, 0]], AIMED, "[4.5, 0.0] of row 2 is none of Tuple"),
        ([[0, 0], [0, 0]], [[0, 1, 6], [0, 1, -1]], NAMED, "[0, 1, -1] of row 2 is none of Dict"),
        ([[0, 0], [0, 0]], [[0, 1], [7, 1]], spaces.MultiBinary(2), "[7, 1] of row 2 is none of"),
        ([0, 1], [0, 1], spaces.Discrete(3), "obs has rows of shape (), but the policy takes (2,)"),
        ([[0, 0, 0]], [0], spaces.Discrete(3), "in the form of the environment must be prepro"),
        ([[0, 0]], [[0, 1]], BYTES, "actions has rows of shape (2,), but the policy takes (2, 2"),
    ],
)
def test_a_reader_names_the_place_of_rows_that_do_not_fit(
    tmp_path: Any, obs: Any, actions: Any, space: Any, reason: str
) -> None:
    rows = SampleBatch(obs=np.array(obs), actions=np.array(actions))
    path = str(write(tmp_path / "a.json", rows))
    fitter = RowFitter(BOX, space)
    with pytest.raises(DataError) as caught:
        FileReader(
            path, ReaderOptions(epochs=1), fit=lambda policy_id, rows: fitter.fit(rows)
        ).next()
    assert (caught.value.path, caught.value.place) == (path, "line 1")
    assert reason in caught.value.reason


def test_actions_that_a_space_of_several_parts_has_are_taken_without_clipping() -> None:
    rows = fitted([[0, 0], [0, 0]], [[4, 0.5], [6, -3]], BOX, AIMED)
    assert rows["actions"].tolist() == [[4.0, 0.5], [6.0, -3.0]]
