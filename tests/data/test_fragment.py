from __future__ import annotations

import numpy as np
import pytest

from aiorl.data import columns as c
from aiorl.data.fragment import Fragment, check_new_obs
from aiorl.errors import BatchError


def make_fragment(valid: np.ndarray | None = None) -> Fragment:
    """T=3, N=2; obs value = 10 * t + n; environment 1 ended at t=1 and was reset inside that
    step.
    """
    t, n = np.meshgrid(np.arange(3), np.arange(2), indexing="ij")
    columns = {
        c.OBS: (10 * t + n)[..., None].astype(np.float32),
        c.TERMINATEDS: (t == 1) & (n == 1),
        c.TRUNCATEDS: np.zeros((3, 2), bool),
    }
    if valid is not None:
        columns[c.VALID] = valid
    extras = {
        c.LAST_OBS: np.array([[30.0], [31.0]], np.float32),
        c.FINAL_INDEX: np.array([[1, 1]], np.int32),
        c.FINAL_OBS: np.array([[-1.0]], np.float32),
    }
    return Fragment(columns, extras)


def test_new_obs_is_the_next_row_or_the_true_final_observation() -> None:
    np.testing.assert_array_equal(make_fragment().new_obs()[..., 0], [[10, 11], [20, -1], [30, 31]])


def test_sample_batch_rows_are_env_major_with_new_obs_and_dones() -> None:
    batch = make_fragment().to_sample_batch()
    np.testing.assert_array_equal(batch[c.OBS][:, 0], [0, 10, 20, 1, 11, 21])
    np.testing.assert_array_equal(batch[c.NEW_OBS][:, 0], [10, 20, 30, 11, -1, 31])
    np.testing.assert_array_equal(batch[c.DONES], [0, 0, 0, 0, 1, 0])


def test_rows_that_are_not_transitions_are_left_out_and_not_counted() -> None:
    fragment = make_fragment(valid=np.array([[True, True], [True, True], [True, False]]))
    assert (fragment.length, fragment.num_envs, fragment.env_steps) == (3, 2, 5)
    batch = fragment.to_sample_batch()
    assert batch.count == 5
    assert 21 not in batch[c.OBS]
    assert c.VALID not in batch


def test_columns_that_disagree_are_named() -> None:
    with pytest.raises(BatchError, match="'rewards'"):
        Fragment({c.OBS: np.zeros((3, 2, 4)), c.REWARDS: np.zeros((2, 3))})
    with pytest.raises(BatchError):
        Fragment({})
    with pytest.raises(BatchError, match="new_obs"):
        Fragment({c.OBS: np.zeros((3, 2, 4))}).new_obs()


@pytest.mark.parametrize("index", [np.int32(0), np.array([1], np.int32), np.array([[1]], np.int32)])
def test_an_index_of_final_observations_without_rows_of_two_is_refused(index: np.ndarray) -> None:
    arrays = {
        c.OBS: np.zeros((3, 2, 1)),
        c.LAST_OBS: np.zeros((2, 1)),
        c.FINAL_OBS: np.zeros((1, 1)),
    }
    with pytest.raises(BatchError, match="final_index"):
        check_new_obs(arrays | {c.FINAL_INDEX: np.asarray(index)})


def test_final_observations_that_name_a_row_twice_are_refused() -> None:
    """A fragment has at most one for each row, so its rows limit the memory of a replay."""
    arrays = {c.OBS: np.zeros((3, 2, 1)), c.LAST_OBS: np.zeros((2, 1))}
    rows = np.array([[0, 1], [1, 0], [2, 1]], np.int32)
    check_new_obs(arrays | {c.FINAL_INDEX: rows, c.FINAL_OBS: np.zeros((3, 1))})
    with pytest.raises(BatchError, match="final_index"):
        check_new_obs(arrays | {c.FINAL_INDEX: rows[[0, 1, 0]], c.FINAL_OBS: np.zeros((3, 1))})
