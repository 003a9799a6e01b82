"""Nested spaces, memory and users' models, from the environment through the sampler to training
rows.
"""

from __future__ import annotations

import types

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from plain_graph import load_policy
from sampler_settings import sampler_settings

from aiorl.acting.distributions import make_distribution
from aiorl.acting.filters import NoFilter
from aiorl.acting.policy_map import PolicyMap
from aiorl.acting.postprocess import gae
from aiorl.acting.preprocessors import make_preprocessor
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.env_maker import to_base_env
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.export import describe_policy
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import SamplerSetup

OBS = spaces.Dict(
    {"place": spaces.Discrete(5), "speed": spaces.Tuple([spaces.Box(-9.0, 9.0, (2,))])}
)
ACTIONS = spaces.Tuple(
    [spaces.Discrete(3, start=1), spaces.Dict({"push": spaces.Box(-0.1, 0.1, (2,))})]
)
ENVS = 3


class Nested(gymnasium.Env):
    """Walk on 5 places, where every 4th episode is truncated; records the actions."""

    observation_space = OBS
    action_space = ACTIONS

    def __init__(self):
        self.received = []
        self.episode = 0

    def _obs(self):
        return {"place": self.place, "speed": (self.speed,)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed, self.steps = 0, np.zeros(2, np.float32), 0
        self.episode += 1
        return self._obs(), {}

    def step(self, action):
        self.received.append(action)
        self.steps += 1
        choice, push = action[0], action[1]["push"]
        self.place = (self.place + choice) % 5
        self.speed = np.clip(self.speed + push, -9, 9).astype(np.float32)
        over = self.steps >= 3 + self.episode % 3
        return (
            self._obs(),
            float(choice) - 2.0 + float(push[0]),
            over and self.episode % 4 > 0,
            over,
            {},
        )


def sampler_of(make_env, model_settings, *, config=None):
    envs = [make_env() for _ in range(ENVS)]
    preprocessor = make_preprocessor(envs[0].observation_space)
    distribution = make_distribution(envs[0].action_space)
    model = build_model(
        preprocessor.shape, preprocessor.dtype.name, distribution, model_settings, seed=0
    )
    policy = load_policy(*describe_policy(model, model_settings), config=config, seed=0)
    policy.set_weights(model.get_weights())
    base_env = to_base_env(envs[0], lambda index: envs[index], ENVS, seed=0)
    sampler = SyncSampler(
        SamplerSetup(
            worker=types.SimpleNamespace(worker_index=0),
            base_env=base_env,
            policy_map=PolicyMap({"default_policy": policy}),
            preprocessors={"default_policy": preprocessor},
            filters={"default_policy": NoFilter()},
            settings=sampler_settings(10),
            callbacks=DefaultCallbacks(),
        )
    )
    return sampler, model, policy, envs


def episodes_of(sampler, batches):
    rows = SampleBatch.concat([sampler.get_data() for _ in range(batches)])
    return [
        rows.take(rows[c.EPS_ID] == episode) for episode in dict.fromkeys(rows[c.EPS_ID].tolist())
    ]


RECURRENT = {
    "fcnet_hiddens": [8],
    "use_lstm": True,
    "lstm_cell_size": 4,
    "lstm_use_prev_action_reward": True,
}


@pytest.mark.slow
def test_r114_r117_the_learner_reproduces_the_policys_outputs_from_the_rows():
    """R98, R100, R111, R114, R117: nested spaces, recurrent state, previous actions and rewards."""
    sampler, model, _, _ = sampler_of(Nested, RECURRENT)
    episodes = episodes_of(sampler, 12)
    assert len(episodes) > 10
    for rows in episodes:
        assert rows[c.OBS].shape[1:] == (5 + 2,)
        assert rows[c.ACTIONS].shape[1:] == (1 + 2,)
        assert rows[c.T].tolist() == list(range(rows.count))
        state = model.initial_state(1)
        prev_action, prev_reward = np.zeros((1, 3), np.float32), np.zeros(1, np.float32)
        for t in range(rows.count):
            np.testing.assert_array_equal(rows[c.PREV_ACTIONS][t], prev_action[0])
            np.testing.assert_allclose(rows[c.PREV_REWARDS][t], prev_reward[0], rtol=1e-6)
            for index, component in enumerate(state):
                np.testing.assert_allclose(
                    rows[c.state_in(index)][t], component[0], rtol=1e-4, atol=1e-5
                )
            inputs, values, state = model.forward_step(
                rows[c.OBS][t : t + 1], state, prev_action, prev_reward
            )
            np.testing.assert_allclose(
                rows[c.ACTION_DIST_INPUTS][t], inputs[0], rtol=1e-4, atol=1e-5
            )
            np.testing.assert_allclose(rows[c.VF_PREDS][t], values[0], rtol=1e-4, atol=1e-5)
            if t + 1 < rows.count:
                np.testing.assert_array_equal(rows[c.NEW_OBS][t], rows[c.OBS][t + 1])
            prev_action, prev_reward = rows[c.ACTIONS][t : t + 1], rows[c.REWARDS][t : t + 1]
        logp = model.distribution.logp(rows[c.ACTION_DIST_INPUTS], rows[c.ACTIONS])
        np.testing.assert_allclose(rows[c.ACTION_LOGP], logp, rtol=1e-3, atol=1e-4)


def test_r117_r118_environments_get_clipped_actions_and_rows_keep_the_chosen_ones():
    sampler, _, policy, envs = sampler_of(Nested, {"fcnet_hiddens": [8]})
    episodes = episodes_of(sampler, 6)
    received = [action for env in envs for action in env.received]
    assert all(type(action) is tuple and ACTIONS.contains(action) for action in received)
    sizes = np.concatenate([np.abs(rows[c.ACTIONS][:, 1:]).ravel() for rows in episodes])
    assert sizes.max() > 0.1, "a standard normal is not within the bounds"
    chosen = np.concatenate([rows[c.ACTIONS] for rows in episodes])
    as_sent = policy.layout.to_env(policy.layout.clip(chosen))
    flat = {tuple(np.round([action[0], *action[1]["push"]], 5)) for action in received}
    assert all(tuple(np.round([action[0], *action[1]["push"]], 5)) in flat for action in as_sent)


def test_trajectories_get_advantages_from_the_policys_settings():
    """R106: one trajectory of one episode at a time, bootstrapped where it was cut or truncated."""
    settings = {"gamma": 0.9, "lam": 0.8}
    sampler, model, _, _ = sampler_of(
        Nested,
        {"fcnet_hiddens": [8]},
        config={"postprocess": "gae", "postprocess_params": settings},
    )
    rows = sampler.get_data()
    for part in rows.split_by_episode():
        bootstrap = np.asarray(model.forward(part[c.NEW_OBS][-1:])[1])
        wanted = gae(
            part[c.REWARDS][:, None],
            part[c.VF_PREDS][:, None],
            bootstrap,
            part[c.TERMINATEDS][:, None],
            part[c.TRUNCATEDS][:, None],
            np.tile(bootstrap, (part.count, 1)),
            **settings,
        )
        np.testing.assert_allclose(part[c.ADVANTAGES], wanted[0][:, 0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(part[c.VALUE_TARGETS], wanted[1][:, 0], rtol=1e-4, atol=1e-5)
