from __future__ import annotations

import itertools

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from aiorl.testing.envs import CountingEnv, RecallEnv


@pytest.mark.parametrize("make", [RecallEnv, lambda: RecallEnv(5, 4)])
def test_they_pass_gymnasiums_own_check(make):
    check_env(make(), skip_render_check=True)


def play(env, policy, seed):
    """Return of one episode; the policy sees all observations so far."""
    obs, _ = env.reset(seed=seed)
    seen, total, ended = [obs], 0.0, False
    while not ended:
        obs, reward, ended, _, _ = env.step(policy(seen))
        seen.append(obs)
        total += reward
    return total, len(seen) - 1


@pytest.mark.parametrize(("delay", "symbols"), [(1, 2), (3, 2), (4, 3)])
def test_a_policy_that_remembers_always_earns_one(delay, symbols):
    env = RecallEnv(delay, symbols)
    for seed in range(30):
        assert play(env, lambda seen: int(seen[0][:-1].argmax()), seed) == (1.0, delay + 1)


def test_no_memoryless_policy_beats_the_bar():
    """All deterministic maps from observation to action, over both symbols: each earns exactly the bar on average."""
    env = RecallEnv(delay=2)
    kinds = [(1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1)]
    seeds = {}
    for seed in itertools.count():
        seeds.setdefault(tuple(env.reset(seed=seed)[0].tolist()), seed)
        if len(seeds) == 2:
            break
    for actions in itertools.product(range(2), repeat=len(kinds)):
        table = dict(zip(kinds, actions, strict=True))
        returns = [play(env, lambda seen, t=table: t[tuple(seen[-1].tolist())], seed)[0] for seed in seeds.values()]
        assert np.mean(returns) == env.best_memoryless_return == 0.5


@pytest.mark.parametrize(("delay", "symbols"), [(0, 2), (1, 1)])
def test_a_recall_env_without_a_task_is_refused(delay, symbols):
    with pytest.raises(ValueError, match="at least"):
        RecallEnv(delay, symbols)


@pytest.mark.parametrize("end", ["terminate", "truncate", "both", "never"])
def test_counting_env_ends_as_told(end):
    env = CountingEnv(2, end, index=4, reward_scale=10.0)
    assert env.reset(seed=3)[0].tolist() == [0, 0, 4]
    assert env.step(1)[:4][1:] == (10.0, False, False)
    obs, reward, terminated, truncated, _ = env.step(0)
    assert (obs.tolist(), reward) == ([0, 2, 4], 20.0)
    assert (terminated, truncated) == (end in ("terminate", "both"), end in ("truncate", "both"))
    assert env.reset()[0].tolist() == [1, 0, 4]
    assert (env.last_actions, env.seeds) == ([1, 0], [3, None])
