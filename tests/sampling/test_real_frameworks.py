"""A RolloutWorker with policies that TensorFlow runs, TensorFlow itself, and environments of other packages."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import DEFAULT, RandomPolicy, spec

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.data import columns as c

tf = pytest.importorskip("tensorflow")

from aiorl.learning.models.tf_policy import TFPolicy  # noqa: E402

ACTIONS = spaces.Discrete(2)
MODEL = {"fcnet_hiddens": [8]}


class Cloning(TFPolicy):
    """Imitates the actions in the batch, and counts its inference calls."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rows_per_call = []

    def compute_actions(self, obs, *args, **kwargs):
        self.rows_per_call.append(len(obs))
        return super().compute_actions(obs, *args, **kwargs)

    def loss(self, batch):
        dist_inputs, _ = self.model.forward(batch[c.OBS])
        return -tf.reduce_mean(self.tf_distribution.logp(dist_inputs, batch[c.ACTIONS]))


def make_cartpole(make_worker, policy=Cloning, **more):
    settings = {"rollout_fragment_length": 20, "num_envs": 3, "seed": 4, "policy_config": {"model": MODEL, "lr": 0.05}}
    return make_worker("CartPole-v1", policy, **(settings | more))


def test_r110_a_tensorflow_policy_is_sampled_with_one_call_per_turn_and_its_outputs_are_in_the_rows(make_worker):
    worker = make_cartpole(make_worker)
    batch = worker.sample()
    assert batch.count == 60
    policy = worker.get_policy()
    assert set(policy.rows_per_call) == {3}
    dist_inputs, values = policy.model.forward(batch[c.OBS])
    np.testing.assert_allclose(batch[c.ACTION_DIST_INPUTS], dist_inputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch[c.VF_PREDS], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        batch[c.ACTION_LOGP], policy.distribution.logp(batch[c.ACTION_DIST_INPUTS], batch[c.ACTIONS]), atol=1e-5
    )


def test_r114_r116_a_recurrent_tensorflow_policys_state_chains_and_restarts(make_worker):
    model = MODEL | {"use_lstm": True, "lstm_cell_size": 4}
    worker = make_cartpole(
        make_worker, TFPolicy, policy_config={"model": model}, num_envs=1, rollout_fragment_length=80
    )
    batch = worker.sample()
    starts = np.flatnonzero(batch[c.T] == 0)
    assert len(starts) >= 2
    for index in (0, 1):
        state_in, state_out = batch[c.state_in(index)], batch[c.state_out(index)]
        assert not state_in[starts].any()
        goes_on = np.flatnonzero(batch[c.T][1:] > 0)
        np.testing.assert_array_equal(state_in[goes_on + 1], state_out[goes_on])
        assert state_out.any()


def test_r27_equal_seeds_give_equal_tensorflow_weights_and_batches(make_worker):
    found = []
    for seed in (4, 4, 5):
        worker = make_cartpole(make_worker, seed=seed)
        found.append((worker.get_weights()[DEFAULT], worker.sample()[c.OBS], tf.random.uniform(()).numpy()))
    one, same, other = found
    for name, weight in one[0].items():
        np.testing.assert_array_equal(weight, same[0][name])
    np.testing.assert_array_equal(one[1], same[1])
    assert one[2] == same[2], "TensorFlow's own generator is seeded, too"
    assert not np.array_equal(one[1], other[1])
    assert one[2] != other[2]


def run_python(code: str) -> str:
    """What a fresh interpreter prints: which packages there are is a thing of a whole process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_r33_where_tensorflow_is_not_installed_its_policies_are_an_import_error_and_plain_ones_work():
    code = """
import importlib.machinery, sys
real = importlib.machinery.PathFinder.find_spec
hidden = ("tensorflow", "keras")
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in hidden else real(name, *rest)
)
from aiorl import RolloutWorker
from aiorl.acting.policy import Policy
from aiorl.testing.envs import CountingEnv
import numpy as np

class Plain(Policy):
    def compute_actions(self, obs, *args, **kwargs):
        return np.zeros(len(obs), np.int64), [], {}

class OfTensorFlow(Plain):
    framework = "tf"

worker = RolloutWorker(lambda context: CountingEnv(), Plain, rollout_fragment_length=5)
print(worker.sample().count)
worker.stop()
for make in (
    lambda: RolloutWorker(lambda context: CountingEnv(), OfTensorFlow),
    lambda: __import__("aiorl.learning.models.tf_policy"),
):
    try:
        make()
    except ImportError as error:
        print(error)
assert not set(hidden) & set(sys.modules)
"""
    count, ours, pythons = run_python(code).splitlines()
    assert count == "5"
    assert "OfTensorFlow needs TensorFlow, which is not installed" in ours
    assert "No module named" in pythons


def test_r35_tensorflow_itself_is_switched_to_eager_mode_unless_workers_are_exempt_or_traced():
    seen = set()

    class Notes(TFPolicy):
        def compute_actions(self, *args, **kwargs):
            actions = super().compute_actions(*args, **kwargs)
            seen.add(tf.config.functions_run_eagerly())
            return actions

    eager, runs = {"eager": True}, []
    try:
        for settings in ({}, eager | {"no_eager_on_workers": True}, eager | {"eager_tracing": True}, eager):
            seen.clear()
            config = {"model": {"fcnet_hiddens": [4]}, **settings}
            with RolloutWorker("CartPole-v1", Notes, policy_config=config, rollout_fragment_length=8, seed=1) as worker:
                runs.append((worker.sample()["obs"], set(seen)))
    finally:
        tf.config.run_functions_eagerly(False)
    assert [modes for _, modes in runs] == [{False}, {False}, {False}, {True}]
    for obs, _ in runs:
        np.testing.assert_allclose(obs, runs[0][0], rtol=1e-4, atol=1e-5)


# --- environments of other packages ---


def test_r161_r165_an_environment_of_the_old_gym_is_sampled_by_name(make_worker):
    pytest.importorskip("gym")
    pytest.importorskip("shimmy")
    old = make_worker("gym:CartPole-v1", RandomPolicy, num_envs=2, rollout_fragment_length=40, seed=3)
    batch = old.sample()
    assert batch.count == 80
    assert batch[c.OBS].dtype == np.float32
    assert old.get_policy().action_space == ACTIONS
    assert (batch[c.REWARDS] == 1).all()
    for part in batch.split_by_episode():
        np.testing.assert_array_equal(part[c.OBS][1:], part[c.NEW_OBS][:-1])
        assert not part[c.DONES][:-1].any()
    again = make_worker("gym:CartPole-v1", RandomPolicy, num_envs=2, rollout_fragment_length=40, seed=3)
    np.testing.assert_array_equal(batch[c.OBS], again.sample()[c.OBS])


def test_r161_r127_a_turn_based_pettingzoo_game_is_sampled_by_name(make_worker):
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")

    class Legal(RandomPolicy):
        """Takes a move that the mask allows, which comes first in the flattened observation."""

        def compute_actions(self, obs, state_batches=(), *args, **kwargs):
            moves = [self.rng.choice(np.flatnonzero(mask)) for mask in obs[:, :9]]
            return np.array(moves, np.int64), [], {}

    from aiorl.env.registry import EnvContext, resolve_env

    env = resolve_env("pettingzoo:classic.tictactoe_v3")(EnvContext())
    player = env.env.possible_agents[0]
    observation_space, action_space = env.env.observation_space(player), env.env.action_space(player)
    env.close()
    worker = make_worker(
        "pettingzoo:classic.tictactoe_v3",
        {name: spec(observation_space, action_space, Legal) for name in ("player_1", "player_2")},
        policy_mapping_fn=lambda agent: agent,
        batch_mode="complete_episodes",
        rollout_fragment_length=40,
        seed=2,
    )
    batch = worker.sample()
    metrics = worker.get_metrics()
    assert len(metrics) >= 4
    for found in metrics:
        assert 5 <= found.episode_length <= 10
        assert {policy for _, policy in found.agent_rewards} <= {"player_1", "player_2"}
        assert found.episode_reward == 0, "a game of two is won and lost, or drawn"
    for rows in batch.policy_batches.values():
        for part in rows.split_by_episode():
            assert part[c.DONES].tolist() == [False] * (part.count - 1) + [True]


def test_r124_r24_lives_end_episodes_but_metrics_are_of_whole_games(make_worker):
    pytest.importorskip("ale_py")
    worker = make_worker("ALE/Breakout-v5", RandomPolicy, rollout_fragment_length=100, model_config={"dim": 42}, seed=1)
    lost, games = 0, []
    for _ in range(12):
        batch = worker.sample()
        assert set(np.unique(batch[c.REWARDS])) <= {0.0, 1.0}
        lost += int(batch[c.DONES].sum())
        games += worker.get_metrics()
        if len(games) >= 2:
            break
    assert 1 <= len(games) < lost
    assert lost >= 5 * len(games) - 4, "five lives in a game"
    assert all(game.episode_length > 50 for game in games)
