"""EnvPool's environments, compared with Gymnasium's of the same name."""

from __future__ import annotations

import importlib.util

import gymnasium
import numpy as np
import pytest

from aiorl.acting.policy import Policy
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN, SEED_STRIDE
from aiorl.env.env_maker import EnvMaker, to_base_env
from aiorl.env.envpool import AsyncEnvPoolEnv, EnvPoolEnv
from aiorl.env.native_vector_env import LockstepBaseEnv
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.env.wrapping import EnvPlan
from aiorl.errors import ConfigError, UnknownEnvError
from benchmarks.sampler import make_lockstep_env

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed"
)


class ConstantPolicy(Policy):
    """Policy that pushes to the left."""

    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, config)

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        return np.zeros(len(obs), np.int64), [], {}


def asynchronous(num_envs=4, seed=3, **config):
    env = resolve_env("envpool:CartPole-v1")(
        EnvContext({"async": True, **config}, num_envs=num_envs)
    )
    assert isinstance(env, AsyncEnvPoolEnv)
    return to_base_env(env, num_envs=num_envs, seed=seed)


def test_r161_rows_equal_those_of_the_plain_environment_from_the_same_states():
    """EnvPool chooses the initial states; from there its CartPole and Gymnasium's behave the
    same.
    """
    pool = make_lockstep_env("envpool:CartPole-v1", {"num_threads": 1}, 3)
    assert isinstance(pool, EnvPoolEnv)
    plain = [gymnasium.make("CartPole-v1") for _ in range(3)]
    assert pool.observation_space.shape == plain[0].observation_space.shape
    assert pool.action_space == plain[0].action_space
    obs = np.array(pool.reset([7, 8, 9]))

    def follow(index):
        plain[index].reset()
        plain[index].unwrapped.state = tuple(map(float, obs[index]))

    for index in range(3):
        follow(index)
    rng = np.random.default_rng(0)
    resets = 0
    for _ in range(150):
        actions = rng.integers(0, 2, 3)
        step = pool.step(actions)
        obs = np.array(step.obs)
        for index in range(3):
            if step.valid is not None and not step.valid[index]:
                follow(index)
                resets += 1
                continue
            expected, reward, terminated, truncated, _ = plain[index].step(int(actions[index]))
            np.testing.assert_allclose(obs[index], expected, atol=1e-5)
            assert (step.rewards[index], step.terminateds[index]) == (reward, terminated)
            assert step.truncateds[index] == truncated
    assert resets > 5
    pool.close()


def test_the_pool_enforces_the_horizon():
    env = make_lockstep_env("envpool:CartPole-v1", {}, 2, horizon=3)
    env.reset([0, 1])
    steps = [env.step(np.array([0, 1])) for _ in range(3)]
    assert env.max_episode_steps == 3
    assert [step.truncateds.tolist() for step in steps] == [[False] * 2, [False] * 2, [True] * 2]
    env.close()
    with pytest.raises(ConfigError, match="501"):
        make_lockstep_env("envpool:CartPole-v1", {}, 2, horizon=501)


def test_r161_the_general_sampler_uses_it_too_and_no_seed_is_lost():
    created = resolve_env("envpool:CartPole-v1")(EnvContext(num_envs=2))
    base = to_base_env(created, num_envs=2, seed=4)
    assert isinstance(base, LockstepBaseEnv)
    first = base.poll().obs
    again = make_lockstep_env("envpool:CartPole-v1", {}, 2)
    np.testing.assert_array_equal(
        [first[0][AGENT], first[1][AGENT]], again.reset([4, 4 + SEED_STRIDE])
    )
    base.stop(), again.close()


def test_r27_a_worker_with_a_seed_can_use_either_mode():
    for config in ({}, {"async": True}):
        maker = EnvMaker(EnvPlan(env="envpool:CartPole-v1", env_config=config, num_envs=2, seed=4))
        env = maker.make_first()
        base = maker.to_base_env(env)
        assert base.poll().obs
        base.stop()
    with pytest.raises(ConfigError) as caught:
        make_lockstep_env("envpool:CartPole-v1", {}, 2, "remote")
    assert caught.value.key == "remote_worker_envs"


@pytest.mark.parametrize("config", [{}, {"async": True, "batch_size": 2}])
def test_r82_a_horizon_cuts_episodes_in_either_mode(config):
    worker = RolloutWorker(
        "envpool:CartPole-v1",
        ConstantPolicy,
        num_envs=4,
        env_config=config,
        episode_horizon=5,
        rollout_fragment_length=10,
    )
    batch = worker.sample()
    assert batch.count == 40
    assert batch["truncateds"].tolist() == (batch["t"] == 4).tolist()
    assert {metrics.episode_length for metrics in worker.get_metrics()} == {5}
    worker.stop()


def test_r164_in_asynchronous_mode_a_poll_returns_the_copies_that_are_ready():
    """R163, R164: each episode opens once, its rows follow each other, and its end is reported."""
    base = asynchronous(4, batch_size=2)
    lengths, finished, polls = {}, [], 0
    while len(finished) < 12:
        poll = base.poll()
        polls += 1
        assert len(poll.obs) == 2
        actions = {}
        for index in poll.obs:
            ended = poll.terminateds[index][ALL_AGENTS] or poll.truncateds[index][ALL_AGENTS]
            if poll.rewards[index][AGENT] is None:
                assert index not in lengths
                assert not ended
                assert np.abs(poll.obs[index][AGENT]).max() <= 0.05
                lengths[index] = 0
            else:
                lengths[index] += 1
                assert poll.rewards[index][AGENT] == 1.0
                assert poll.infos[index][AGENT]["elapsed_step"] == lengths[index]
            if ended:
                assert base.try_reset(index) == ASYNC_RESET_RETURN
                finished.append(lengths.pop(index))
            else:
                actions[index] = {AGENT: 0}
        base.send_actions(actions)
    assert all(8 <= length <= 11 for length in finished)  # the pole is always pushed to one side
    base.stop()


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"batch_size": 2}, "async: true"),
        ({"batch_size": 5, "async": True}, ""),
        ({"nun_threads": 1}, "'num_threads'"),
        ({"seed": 3}, "seed"),
    ],
)
def test_impossible_settings_are_refused(config, hint):
    with pytest.raises(ConfigError) as caught:
        resolve_env("envpool:CartPole-v1")(EnvContext(config, num_envs=4))
    assert caught.value.key == f"env_config.{next(iter(config))}"
    assert hint in caught.value.hint


def test_an_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownEnvError, match="CartPole-v1"):
        resolve_env("envpool:CartPol-v1")
