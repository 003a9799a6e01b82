"""Sequences cut out of fragments, against a plain loop over the episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.errors import BatchError
from aiorl.learning.replay.sequences import FOLLOWING, TRAINED, Sequences, SequenceShape

STATE = c.state_in(0)
GAMMA = 0.9


def make_sequences(
    length: int, burn_in: int = 0, overlap: int | None = None, n: int = 1, **more: Any
) -> Sequences:
    columns = [
        *(ColumnSpec(name, (2,)) for name in (c.OBS, c.NEW_OBS)),
        ColumnSpec(c.ACTIONS, (), "int32"),
        *(ColumnSpec(name) for name in (c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS)),
        *more.get("columns", ()),
    ]
    shape = SequenceShape(length, burn_in, burn_in if overlap is None else overlap)
    return Sequences(shape, tuple(columns), (ColumnSpec(STATE, (1,)),), GAMMA, n)


class World:
    """Environments whose observations are [episode, step]; states and actions are the step, rewards
    are random.
    """

    def __init__(
        self, num_envs: int, seed: int, *, ends: float = 0.2, resets_in_next_step: bool = False
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.ends, self.resets = num_envs, ends, resets_in_next_step
        self.step = [0] * num_envs
        self.episode = list(range(num_envs))
        self.is_over = [False] * num_envs
        self.rows: dict[tuple[int, int], tuple[float, str]] = {}

    def fragment(self, length: int, stride: int) -> dict[str, Any]:
        shape = (length, self.num_envs)
        obs, following = np.zeros((*shape, 2), np.float32), np.zeros((*shape, 2), np.float32)
        flags = {name: np.zeros(shape, np.bool_) for name in (c.TERMINATEDS, c.TRUNCATEDS)}
        valid, rewards = np.ones(shape, np.bool_), np.zeros(shape, np.float32)
        actions = np.zeros(shape, np.int64)
        states = np.zeros((self.num_envs, -(-length // stride), 1), np.float32)
        for t in range(length):
            for n in range(self.num_envs):
                if t % stride == 0:
                    states[n, t // stride] = self.step[n] if not self.is_over[n] else 77.0
                if self.is_over[n]:
                    valid[t, n] = self.is_over[n] = False
                    self._restart(n)
                    continue
                obs[t, n] = self.episode[n], self.step[n]
                following[t, n] = self.episode[n], self.step[n] + 1
                actions[t, n], rewards[t, n] = self.step[n], self.rng.normal()
                ending = ""
                if self.rng.random() < self.ends:
                    ending = str(self.rng.choice([c.TERMINATEDS, c.TRUNCATEDS]))
                    flags[ending][t, n] = True
                self.rows[self.episode[n], self.step[n]] = float(rewards[t, n]), ending
                self.step[n] += 1
                if ending:
                    self.is_over[n] = self.resets
                    if not self.resets:
                        self._restart(n)
        arrays = {
            c.OBS: obs,
            c.NEW_OBS: following,
            c.ACTIONS: actions,
            c.REWARDS: rewards,
            **flags,
            STATE: states,
        }
        return arrays if valid.all() else arrays | {c.VALID: valid}

    def _restart(self, n: int) -> None:
        self.episode[n] += self.num_envs
        self.step[n] = 0


def check_step(world: World, sequence: dict[str, Any], row: int, stop: int, n: int) -> None:
    """Check what one step sums and bootstraps from, by a plain loop over the episode's rows."""
    episode, step = (int(number) for number in sequence[c.OBS][row])
    total, ahead = 0.0, 0
    while True:
        reward, ending = world.rows[episode, step + ahead]
        total += GAMMA**ahead * reward
        ahead += 1
        if ending or ahead == n or row + ahead == stop:
            break
    assert sequence[c.N_STEP_RETURNS][row] == pytest.approx(total, rel=1e-5, abs=1e-6)
    expected = 0.0 if ending == c.TERMINATEDS else GAMMA**ahead
    assert sequence[c.DISCOUNTS][row] == pytest.approx(expected)
    assert sequence[FOLLOWING][row] == row + ahead
    assert sequence[c.OBS][row + ahead].tolist() == [episode, step + ahead]


@pytest.mark.parametrize("resets_in_next_step", [False, True])
@pytest.mark.parametrize(
    ("length", "burn_in", "overlap", "n"),
    [(6, 2, 2, 3), (6, 0, 0, 1), (8, 2, 4, 5), (4, 3, 3, 2), (11, 0, 0, 11)],
)
def test_sequences_lie_in_one_episode_begin_in_its_state_and_train_on_all_but_a_burn_in(
    length: int, burn_in: int, overlap: int, n: int, resets_in_next_step: bool
) -> None:
    cut = make_sequences(length, burn_in, overlap, n)
    world = World(3, seed=length, ends=0.1, resets_in_next_step=resets_in_next_step)
    for _ in range(12):
        fragment = world.fragment(11, cut.shape.stride)
        cut.check(fragment)
        found = {name: array[:, 0] for name, array in cut.cut(fragment).items()}
        assert {column.name for column in cut.columns} == set(found)
        trained_on: list[tuple[int, int]] = []
        for number in range(len(found[c.OBS])):
            one = {name: array[number] for name, array in found.items()}
            episode, first = (int(entry) for entry in one[c.OBS][0])
            assert one[STATE].tolist() == [first]
            trained = np.flatnonzero(one[TRAINED])
            begins = 0 if first == 0 else burn_in
            stop = int(trained[-1]) + 1
            assert trained.tolist() == list(range(begins, stop))
            np.testing.assert_array_equal(one[c.OBS][: stop + 1, 0], episode)
            np.testing.assert_array_equal(one[c.OBS][: stop + 1, 1], first + np.arange(stop + 1))
            assert one[c.ACTIONS][:stop].tolist() == list(range(first, first + stop))
            for name in (c.OBS, c.ACTIONS, c.N_STEP_RETURNS, c.DISCOUNTS, TRAINED):
                assert not one[name][stop + (name == c.OBS) :].any(), "nothing comes after the end"
            for row in range(stop):
                check_step(world, one, row, stop, n)
            trained_on += [(episode, first + int(row)) for row in trained]
        valid = fragment.get(c.VALID, np.ones((11, 3), np.bool_))
        wanted = set()
        for env in range(3):
            first_episode, first_step = fragment[c.OBS][0, env]
            for episode, step in fragment[c.OBS][valid[:, env], env].tolist():
                goes_on = valid[0, env] and episode == first_episode and first_step > 0
                if not goes_on or step >= first_step + burn_in:
                    wanted.add((int(episode), int(step)))
        assert set(trained_on) == wanted


def test_a_fragment_is_cut_at_its_episodes_end_and_at_its_states() -> None:
    """Ten rows: an episode continues from step 4 and ends in row 2; the next one has seven rows and
    doesn't end.
    """
    cut = make_sequences(4, burn_in=1, overlap=2, n=2)
    obs = np.array([[0, 4], [0, 5], [0, 6], *([1, t] for t in range(7))], np.float32)[:, None]
    ended = np.arange(10)[:, None] == 2
    fragment = {
        c.OBS: obs,
        c.NEW_OBS: obs + np.array([0, 1], np.float32),
        c.ACTIONS: np.arange(10)[:, None],
        c.REWARDS: np.arange(10, dtype=np.float32)[:, None],
        c.TERMINATEDS: ended,
        c.TRUNCATEDS: np.zeros_like(ended),
        STATE: np.array([[[4.0], [6.0], [1.0], [3.0], [5.0]]], np.float32),
    }
    found = {name: array[:, 0] for name, array in cut.cut(fragment).items()}
    assert found[c.ACTIONS].tolist() == [[0, 1, 2, 0], [3, 4, 5, 6], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert found[STATE].tolist() == [[4.0], [0.0], [1.0], [3.0]]
    assert found[TRAINED].tolist() == [[0, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    np.testing.assert_allclose(found[c.N_STEP_RETURNS][0], [0.9, 2.8, 2.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(found[c.DISCOUNTS][0], [0.81, 0.0, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(found[c.DISCOUNTS][1], [0.81, 0.81, 0.81, 0.9], rtol=1e-6)
    assert found[FOLLOWING][1].tolist() == [2, 3, 4, 4]
    assert found[c.OBS][0].tolist() == [[0, 4], [0, 5], [0, 6], [0, 7], [0, 0]]
    assert found[c.OBS][3].tolist() == [[1, t] for t in (3, 4, 5, 6, 7)]


def test_a_network_that_looks_back_gets_the_previous_steps_even_after_the_last_one() -> None:
    before = (ColumnSpec(c.PREV_ACTIONS, (), "int32"), ColumnSpec(c.PREV_REWARDS))
    cut = make_sequences(3, columns=before)
    world = World(1, seed=0, ends=0.0)
    fragment = world.fragment(5, 3)
    fragment[c.PREV_ACTIONS] = fragment[c.ACTIONS] - 1
    fragment[c.PREV_REWARDS] = np.concatenate(
        [np.zeros((1, 1), np.float32), fragment[c.REWARDS][:-1]]
    )
    found = {name: array[:, 0] for name, array in cut.cut(fragment).items()}
    rewards = fragment[c.REWARDS][:, 0]
    assert found[c.PREV_ACTIONS].tolist() == [[-1, 0, 1, 2], [2, 3, 4, 0]]
    np.testing.assert_array_equal(found[c.PREV_REWARDS], [[0, *rewards[:3]], [*rewards[2:], 0]])


def test_a_fragment_of_rows_that_only_reset_has_no_sequences() -> None:
    cut = make_sequences(3)
    fragment = World(2, seed=0).fragment(4, 3) | {c.VALID: np.zeros((4, 2), np.bool_)}
    assert {len(array) for array in cut.cut(fragment).values()} == {0}


def damaged(name: str, array: Any) -> dict[str, Any]:
    fragment = World(2, seed=0).fragment(4, 3)
    if array is None:
        del fragment[name]
        return fragment
    return fragment | {name: array}


@pytest.mark.parametrize(
    ("fragment", "column"),
    [
        (damaged(STATE, None), "state_in_0"),
        (damaged(STATE, np.zeros((2, 3, 1), np.float32)), "state_in_0"),
        (damaged(STATE, np.full((2, 2, 1), np.nan, np.float32)), "state_in_0"),
        (damaged(STATE, np.full((2, 2, 1), 1e300)), "state_in_0"),
        (damaged(c.REWARDS, np.full((4, 2), np.inf, np.float32)), "rewards"),
        (damaged(c.REWARDS, np.full((4, 2), 3e38, np.float32)), "rewards"),
        (damaged(c.NEW_OBS, None), "new_obs"),
        (damaged(c.TRUNCATEDS, np.zeros((4, 2), np.float32)), "truncateds"),
    ],
)
def test_a_fragment_that_cannot_be_cut_is_refused_with_the_column(
    fragment: dict[str, Any], column: str
) -> None:
    with pytest.raises(BatchError, match=column):
        make_sequences(3, n=2).check(fragment)
