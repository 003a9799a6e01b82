from __future__ import annotations

import itertools

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from aiorl.testing.envs import RecallEnv


@pytest.mark.parametrize("make", [RecallEnv, lambda: RecallEnv(5, 4)])
def test_they_pass_gymnasiums_check(make):
    check_env(make(), skip_render_check=True)


def play(env, policy, seed):
    """Return the return of one episode; the policy sees all observations so far."""
    obs, _ = env.reset(seed=seed)
    observations, total, ended = [obs], 0.0, False
    while not ended:
        obs, reward, ended, _, _ = env.step(policy(observations))
        observations.append(obs)
        total += reward
    return total, len(observations) - 1


@pytest.mark.parametrize(("delay", "symbols"), [(1, 2), (3, 2), (4, 3)])
def test_a_policy_that_remembers_always_earns_one(delay, symbols):
    env = RecallEnv(delay, symbols)
    for seed in range(30):
        assert play(env, lambda observations: int(observations[0][:-1].argmax()), seed) == (
            1.0,
            delay + 1,
        )


def test_no_memoryless_policy_beats_the_bar():
    """All deterministic maps from observation to action, over both symbols: each earns exactly the
    bar on average.
    """
    env = RecallEnv(delay=2)
    kinds = [(1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1)]
    seeds = {}
    for seed in itertools.count():
        seeds.setdefault(tuple(env.reset(seed=seed)[0].tolist()), seed)
        if len(seeds) == 2:
            break
    for actions in itertools.product(range(2), repeat=len(kinds)):
        table = dict(zip(kinds, actions, strict=True))
        returns = [
            play(env, lambda observations, t=table: t[tuple(observations[-1].tolist())], seed)[0]
            for seed in seeds.values()
        ]
        assert np.mean(returns) == env.best_memoryless_return == 0.5
