"""Layout of observations, and masks in all forms that an environment can return."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from masked_env import ACTION_SPACES, ForbiddingEnv

from aiorl.data.obs_layout import LaidOutBox, MaskLayout, ObsLayout, is_masked, layout_of
from aiorl.errors import BatchError, UnsupportedSpaceError


def array(*numbers):
    return np.array(numbers, np.int8)


@pytest.mark.parametrize(
    ("space", "mask", "row"),
    [
        (spaces.Discrete(3), array(0, 1, 1), [0, 1, 1]),
        (spaces.Discrete(3), [False, True, True], [0, 1, 1]),
        (spaces.MultiDiscrete([2, 3]), array(1, 0, 0, 1, 1), [1, 0, 0, 1, 1]),
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 1, 1], [1, 0, 0, 1, 1]),
        (spaces.MultiDiscrete([2, 3]), (array(1, 0), array(0, 1, 1)), [1, 0, 0, 1, 1]),
        (spaces.MultiDiscrete([2, 2]), array([1, 0], [0, 1]), [1, 0, 0, 1]),
        (spaces.MultiBinary((2, 2)), array([1, 0], [0, 1]), [1, 0, 0, 1]),
        (
            spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1), spaces.Discrete(2)]),
            (array(0, 1), array(1, 1)),
            [0, 1, 1, 1],
        ),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)]), (array(0, 1), None), [0, 1]),
        (
            spaces.Dict({"b": spaces.Discrete(2), "a": spaces.MultiBinary(1)}),
            {"b": array(0, 1), "a": array(0)},
            [0, 0, 1],
        ),
        (
            spaces.Dict({"b": spaces.Discrete(2), "a": spaces.MultiBinary(1)}),
            array(0, 0, 1),
            [0, 0, 1],
        ),
    ],
)
def test_a_mask_in_any_form_is_one_row_of_all_choices(space, mask, row):
    layout = MaskLayout(space)
    assert layout.size == len(row)
    assert layout.from_rows([mask, mask]).tolist() == [row, row]
    assert layout.from_rows([]).shape == (0, len(row))


@pytest.mark.parametrize("actions", ACTION_SPACES)
def test_parts_equal_the_joined_form_and_a_batch_equals_its_rows(actions):
    layout = MaskLayout(ACTION_SPACES[actions])
    rows = {}
    for joined in (False, True):
        env = ForbiddingEnv(actions, joined=joined)
        layout.check_space(env.observation_space["action_mask"])
        masks = [env.reset(seed=seed)[0]["action_mask"] for seed in range(5)]
        rows[joined] = layout.from_rows(masks)
    np.testing.assert_array_equal(rows[False], rows[True])
    np.testing.assert_array_equal(layout.from_batch(np.array(masks)), rows[True])


@pytest.mark.parametrize(
    ("space", "mask"),
    [
        (spaces.Discrete(3), array(0, 1)),
        (spaces.Discrete(3), array(0, 1, 2)),
        (spaces.Discrete(3), np.array([0.5, 1, 1])),
        (spaces.Discrete(3), np.array([np.nan, 1, 1])),
        (spaces.Discrete(3), "no mask"),
        (spaces.MultiDiscrete([2, 3]), (array(0, 1, 1), array(0, 1))),
        (spaces.MultiDiscrete([2, 3]), (array(0, 1),)),
        (spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Discrete(2)}), {"b": array(0, 1)}),
        (spaces.Tuple([spaces.Discrete(2)]), (array(0, 1), array(1, 1))),
    ],
)
def test_a_mask_of_another_shape_or_with_other_entries_is_refused(space, mask):
    with pytest.raises(BatchError, match="action_mask"):
        MaskLayout(space).from_rows([mask])


def test_a_space_that_does_not_fit_masks_of_the_actions_is_refused_with_advice():
    for actions, wrong in (
        (spaces.Discrete(3), spaces.MultiBinary(2)),
        (spaces.Box(0, 1), spaces.MultiBinary(1)),
    ):
        with pytest.raises(UnsupportedSpaceError, match="action_mask"):
            MaskLayout(actions).check_space(wrong)


def test_rows_without_a_legal_choice_are_found_and_bits_always_have_one():
    layout = MaskLayout(
        spaces.Tuple([spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2), spaces.Discrete(2)])
    )
    masks = array(
        [1, 0, 0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0], [1] * 8
    )
    assert layout.rows_without_action(masks).tolist() == [1, 2]
    assert MaskLayout(spaces.MultiBinary(2)).rows_without_action(array([0, 0])).tolist() == []


def test_only_a_dict_with_the_key_is_masked():
    assert is_masked(spaces.Dict({"action_mask": spaces.MultiBinary(2), "x": spaces.Discrete(2)}))
    assert not is_masked(spaces.Dict({"mask": spaces.MultiBinary(2)}))
    assert not is_masked(spaces.Discrete(2))


def test_an_observation_and_its_mask_share_a_row_and_can_be_split():
    layout = ObsLayout((2, 3), num_mask=2)
    assert layout.array_shape == (8,)
    obs, mask = layout.split(np.arange(16).reshape(2, 8))
    assert mask.tolist() == [[0, 1], [8, 9]]
    assert obs.tolist() == [[[2, 3, 4], [5, 6, 7]], [[10, 11, 12], [13, 14, 15]]]
    plain = np.zeros((4, 2, 3))
    obs, mask = ObsLayout((2, 3)).split(plain)
    assert obs is plain
    assert mask is None


def test_parts_follow_each_other():
    assert ObsLayout((7,), {"a.0": (2, 3), "b": ()}).slices() == {
        "a.0": slice(0, 6),
        "b": slice(6, 7),
    }


def test_spaces_know_their_layout():
    layout = ObsLayout((3,), num_mask=2)
    space = LaidOutBox(0, 1, layout, np.float32)
    assert (layout_of(space), space.shape) == (layout, (5,))
    assert layout_of(spaces.Box(0, 1, (2, 2))) == ObsLayout((2, 2))
    assert layout_of(spaces.Discrete(2)) == ObsLayout(())
