from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.env.base_env import VectorStep
from aiorl.env.native_vector_env import NativeVectorEnv, split_infos, step_infos, training_disabled
from aiorl.testing.envs import CountingEnv

# Gymnasium takes a key's values for one kind: that of the first copy that has it
KINDS = {
    "i": st.integers(-5, 5),
    "f": st.floats(-1, 1),
    "b": st.booleans(),
    "o": st.one_of(st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=3)),
    "_u": st.text(max_size=2),
    "d": st.dictionaries(st.sampled_from("pqr"), st.integers(-5, 5), max_size=3),
}
own_infos = st.fixed_dictionaries({}, optional=KINDS)


class VectorInfos(gymnasium.vector.VectorEnv):
    """Gymnasium's own way of putting infos together."""

    def __init__(self, rows):
        self.num_envs = len(rows)
        self.infos = {}
        for index, info in enumerate(rows):
            self.infos = self._add_info(self.infos, info, index)


@settings(deadline=None)
@given(st.lists(own_infos, min_size=1, max_size=4))
def test_split_infos_gives_back_what_gymnasium_put_together(rows):
    assert split_infos(VectorInfos(rows).infos, len(rows)) == rows


def test_entries_without_a_mask_are_one_for_each_copy_or_one_for_all():
    infos = {"r": np.array([1.5, 2.5]), "pair": ("a", "b"), "m": np.ones((2, 3)), "x": 7, "three": [1, 2, 3], 4: "n"}
    one, other = split_infos(infos, 2)
    assert (one["r"], one["pair"], one["x"], one["three"], one[4]) == (1.5, "a", 7, [1, 2, 3], "n")
    assert (other["r"], other["pair"], other["x"], other["three"], other[4]) == (2.5, "b", 7, [1, 2, 3], "n")
    infos["m"][:] = 0.0
    assert one["m"].tolist() == [1.0, 1.0, 1.0], "the environment may write into its arrays again"
    episode = {"episode": {"l": np.array([3, 4])}, "_episode": np.array([False, True])}
    assert split_infos(episode, 2) == [{}, {"episode": {"l": 4}}]


class Telling(CountingEnv):
    """Says much with each step, and something else with each reset."""

    def __init__(self, length, index, off=()):
        super().__init__(length, index=index)
        self.off = off

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {"training_enabled": False, "reset": self._episode}

    def step(self, action):
        step = (self._episode, self._step + 1)
        info = {"step": step[1], "name": f"{self._index}/{step}", "deep": {"twice": 2 * step[1]}}
        if step[1] % 2:
            info["odd"] = np.array([step[1], self._index])
        if (self._index, *step) in self.off:
            info["training_enabled"] = False
        return (*super().step(action)[:4], info)


def told(index, episode, step) -> dict:
    info = {"step": step, "name": f"{index}/{(episode, step)}", "deep": {"twice": 2 * step}}
    return info | ({"odd": [step, index]} if step % 2 else {})


def plain(info) -> dict:
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in info.items()}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_each_step_of_each_copy_has_what_it_said_and_not_what_the_reset_said(mode):
    """4.6 infos."""
    copies = [lambda: Telling(2, 0), lambda: Telling(3, 1)]
    env = NativeVectorEnv(SyncVectorEnv(copies, autoreset_mode=mode), env_id="telling")
    obs = env.reset().copy()
    seen = 0
    for _ in range(15):
        step = env.step(np.zeros(2, np.int64))
        infos = step_infos(step, 2)
        for index in range(2):
            if step.valid is None or step.valid[index]:
                episode, at, _ = obs[index].astype(int).tolist()
                assert plain(infos[index]) == told(index, episode, at + 1)
                seen += 1
        obs = step.obs.copy()
    assert seen > 20


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("place", [(0, 1, 1), (0, 1, 2), (1, 2, 2), (1, 2, 3)])
def test_the_copy_whose_step_is_not_to_be_trained_on_is_found_and_no_reset_is_taken_for_one(mode, place):
    """R102: in the middle and at the end of an episode."""
    copies = [lambda: Telling(2, 0, [place]), lambda: Telling(3, 1, [place])]
    env = NativeVectorEnv(SyncVectorEnv(copies, autoreset_mode=mode), env_id="telling")
    obs = env.reset().copy()
    found = []
    for _ in range(16):
        step = env.step(np.zeros(2, np.int64))
        for index in training_disabled(step, 2):
            episode, at, _ = obs[index].astype(int).tolist()
            found.append((index, episode, at + 1))
        obs = step.obs.copy()
    assert found == [place]


def test_final_infos_may_be_an_array_of_dicts():
    """As before Gymnasium 1.0."""
    none, one = np.zeros(2, np.bool_), np.array([False, True])
    infos = {
        "n": np.array([4, 0]),
        "training_enabled": np.array([True, True]),
        "final_info": np.array([None, {"n": 9, "training_enabled": False}], object),
        "_final_info": one,
    }
    step = VectorStep(np.zeros((2, 3)), np.zeros(2), one, none, np.array([1]), np.zeros((1, 3)), infos=infos)
    assert step_infos(step, 2) == [{"n": 4, "training_enabled": True}, {"n": 9, "training_enabled": False}]
    assert training_disabled(step, 2) == [1]
