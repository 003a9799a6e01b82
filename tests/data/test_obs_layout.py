from __future__ import annotations

import numpy as np
from gymnasium import spaces

from aiorl.data.obs_layout import LaidOutBox, ObsLayout, layout_of


def test_an_observation_and_its_mask_lie_in_one_row_and_come_apart_again():
    layout = ObsLayout((2, 3), num_mask=2)
    assert layout.array_shape == (8,)
    obs, mask = layout.split(np.arange(16).reshape(2, 8))
    assert mask.tolist() == [[0, 1], [8, 9]]
    assert obs.tolist() == [[[2, 3, 4], [5, 6, 7]], [[10, 11, 12], [13, 14, 15]]]


def test_without_a_mask_the_array_is_the_observation():
    layout = ObsLayout((2, 3))
    array = np.zeros((4, 2, 3))
    assert layout.array_shape == (2, 3)
    assert layout.split(array)[0] is array
    assert layout.split(array)[1] is None


def test_parts_lie_one_after_the_other():
    assert ObsLayout((7,), {"a.0": (2, 3), "b": ()}).slices() == {"a.0": slice(0, 6), "b": slice(6, 7)}


def test_spaces_know_their_layout():
    layout = ObsLayout((3,), num_mask=2)
    space = LaidOutBox(0, 1, layout, np.float32)
    assert (layout_of(space), space.shape) == (layout, (5,))
    assert layout_of(spaces.Box(0, 1, (2, 2))) == ObsLayout((2, 2))
    assert layout_of(spaces.Discrete(2)) == ObsLayout(())
