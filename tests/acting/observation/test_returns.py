"""Rewards divided by the running deviation of the discounted return, compared with Gymnasium's
wrapper and a loop.
"""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from aiorl.acting.filters import MeanStdFilter, ReturnFilter, RewardScaler

GAMMA = 0.97


def played(num_steps: int) -> tuple[np.ndarray, np.ndarray, gymnasium.wrappers.NormalizeReward]:
    """Return the rewards of one long episode as scaled by Gymnasium's wrapper, and the wrapper."""
    raw = gymnasium.make("Pendulum-v1", max_episode_steps=num_steps + 1)
    env = gymnasium.wrappers.NormalizeReward(raw, gamma=GAMMA)
    env.reset(seed=3)
    env.action_space.seed(3)
    scaled = [float(env.step(env.action_space.sample())[1]) for _ in range(num_steps)]
    again = raw
    again.reset(seed=3)
    env.action_space.seed(3)
    rewards = [float(again.step(env.action_space.sample())[1]) for _ in range(num_steps)]
    return np.array(rewards, np.float32), np.array(scaled), env


def test_statistic_and_scaled_steps_agree_with_gymnasiums_wrapper() -> None:
    rewards, scaled, env = played(400)
    statistics = ReturnFilter(), ReturnFilter()
    by_step, by_fragment = (RewardScaler(statistic, GAMMA) for statistic in statistics)
    by_hand = [
        by_step.scale_envs(reward[None, None], np.zeros((1, 1), np.bool_))[0, 0]
        for reward in rewards
    ]
    # the wrapper begins with a deviation of 1 that weighs as much as a ten-thousandth of a step
    np.testing.assert_allclose(by_hand[100:], scaled[100:], rtol=1e-5)
    np.testing.assert_allclose(by_hand[10:], np.clip(scaled, -10, 10)[10:], rtol=1e-3)
    for part in np.split(rewards, [70, 160]):
        last = by_fragment.scale_envs(part[:, None], np.zeros((len(part), 1), np.bool_))
    np.testing.assert_allclose(
        last[:, 0], rewards[160:] / np.sqrt(env.return_rms.var + 1e-8), rtol=1e-5
    )
    for state in (statistic.state() for statistic in statistics):
        assert state["n"] == 400
        np.testing.assert_allclose(state["mean"], env.return_rms.mean, rtol=1e-6)
        np.testing.assert_allclose(state["m2"] / 400, env.return_rms.var, rtol=1e-5)


def reference(rewards: np.ndarray, dones: np.ndarray, valid: np.ndarray) -> list[float]:
    """Return the returns of all steps [T, N] that are transitions, environment by environment."""
    returns = []
    for env in range(rewards.shape[1]):
        running = 0.0
        for t in range(len(rewards)):
            if valid[t, env]:
                running = GAMMA * running + float(rewards[t, env])
                returns.append(running)
            if dones[t, env]:
                running = 0.0
    return returns


@pytest.mark.parametrize("has_resets", [False, True])
def test_returns_start_again_with_each_episode_and_continue_across_fragments(
    has_resets: bool,
) -> None:
    rng = np.random.default_rng(1)
    rewards = rng.normal(2, 3, (60, 4)).astype(np.float32)
    dones = rng.random((60, 4)) < 0.1
    valid = np.ones((60, 4), np.bool_)
    if has_resets:  # the call after the end of an episode resets, and is no transition
        dones[1:] &= ~dones[:-1]
        valid[1:] = ~dones[:-1]
    statistic = ReturnFilter()
    scaler = RewardScaler(statistic, GAMMA)
    for first in range(0, 60, 15):
        rows = slice(first, first + 15)
        scaler.scale_envs(rewards[rows], dones[rows], valid[rows] if has_resets else None)
    expected = reference(rewards, dones, valid)
    state = statistic.state()
    assert state["n"] == len(expected)
    np.testing.assert_allclose(
        [state["mean"], state["m2"] / state["n"]], [[np.mean(expected)], [np.var(expected)]]
    )


def test_trajectories_have_the_same_returns_as_environments_in_lockstep() -> None:
    rng = np.random.default_rng(2)
    rewards = rng.normal(1, 2, (40, 3)).astype(np.float32)
    dones = rng.random((40, 3)) < 0.1
    in_lockstep, one_by_one = ReturnFilter(), ReturnFilter()
    of_envs, of_trajectories = RewardScaler(in_lockstep, GAMMA), RewardScaler(one_by_one, GAMMA)
    for first in range(0, 40, 10):
        rows = slice(first, first + 10)
        expected = of_envs.scale_envs(rewards[rows], dones[rows])
        pieces, ends, is_over, keys = [], [], [], []
        for env in range(3):
            begins = [0, *np.flatnonzero(dones[rows, env]) + 1]
            for begin, end in zip(begins, [*begins[1:], 10], strict=True):
                if begin == end:
                    continue
                pieces.append(rewards[rows, env][begin:end])
                ends.append(end - begin)
                is_over.append(dones[rows, env][end - 1])
                keys.append((dones[: first + begin, env].sum(), env))
        result = of_trajectories.scale_trajectories(
            np.concatenate(pieces), np.cumsum(ends), np.array(is_over), keys
        )
        np.testing.assert_allclose(result.reshape(3, 10).T, expected, rtol=1e-6)
    np.testing.assert_allclose(in_lockstep.state()["m2"], one_by_one.state()["m2"])


def test_rewards_are_clipped_to_ten_and_unchanged_without_any_return() -> None:
    scaler = RewardScaler(ReturnFilter(), GAMMA)
    rewards = np.zeros((1000, 1), np.float32)
    rewards[-1] = 5.0
    assert scaler.scale_envs(rewards, np.zeros((1000, 1), np.bool_))[-1, 0] == 10.0
    frozen = ReturnFilter()
    frozen.is_frozen = True
    np.testing.assert_allclose(
        RewardScaler(frozen, GAMMA).scale_envs(rewards, rewards > 0)[-1, 0], 5.0
    )
    assert frozen.state()["n"] == 0


def test_the_statistic_is_exchanged_and_copied_like_those_of_filters() -> None:
    worker, learner = ReturnFilter(), ReturnFilter()
    RewardScaler(worker, GAMMA).scale_envs(
        np.arange(6, dtype=np.float32)[:, None], np.zeros((6, 1), np.bool_)
    )
    learner.merge_delta(worker.take_delta(1))
    np.testing.assert_allclose(learner.state()["m2"], worker.state()["m2"])
    worker.adopt(learner.state(), 1)
    assert worker.state()["n"] == learner.copy().state()["n"] == 6
    assert isinstance(worker.as_serializable(), MeanStdFilter)
