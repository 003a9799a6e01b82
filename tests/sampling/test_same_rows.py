"""Lockstep and turn-by-turn sampling give the same rows for the same seeds and policy."""

from __future__ import annotations

import functools
import math

import gymnasium
import numpy as np
import pytest
from fake_policy import FakePolicy
from gymnasium import spaces
from hypothesis import given, settings, strategies as st
from sampler_settings import sampler_settings, sampler_setup

from aiorl.acting.filters import MeanStdFilter, NoFilter
from aiorl.acting.graph_policy import ActRows
from aiorl.acting.policy import Policy
from aiorl.acting.postprocess import gae
from aiorl.acting.preprocessors import preprocessor_for
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.env_maker import to_base_env
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.vector_env import Copies, SerialEnv, VectorBaseEnv
from aiorl.sampling.fragments import FRAGMENT_COLUMNS
from aiorl.sampling.lockstep import Lockstep
from aiorl.sampling.sampler import SyncSampler
from benchmarks.acting_mlp import make_onnx_policy, mlp_weights

GAMMA, LAM = 0.9, 0.7
PLAN = SamplePlan("gae", {"gamma": GAMMA, "lam": LAM}, tuple(FRAGMENT_COLUMNS))


class RandomEnv(gymnasium.Env):
    """Random observations and rewards, episodes of random length with either end; actions have an
    effect, too.
    """

    def __init__(self, kind: str, mean_length: int):
        self.observation_space = {
            "box": spaces.Box(-10, 10, (2, 3), np.float32),
            "bytes": spaces.Box(0, 255, (4,), np.uint8),
            "discrete": spaces.Discrete(5, start=-1),
        }[kind]
        self.action_space = (
            spaces.Discrete(3) if kind != "bytes" else spaces.Box(-0.5, 0.5, (2,), np.float32)
        )
        self._odds = 1.0 / mean_length

    def _obs(self):
        space = self.observation_space
        if isinstance(space, spaces.Discrete):
            return int(self.np_random.integers(space.n)) + int(space.start)
        if space.dtype == np.uint8:
            return self.np_random.integers(0, 256, space.shape).astype(np.uint8)
        return self.np_random.normal(size=space.shape).astype(np.float32).clip(-10, 10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        reward = float(self.np_random.integers(-3, 4)) + float(np.sum(action))
        terminated = bool(self.np_random.random() < self._odds)
        truncated = bool(self.np_random.random() < self._odds / 2)
        return self._obs(), reward, terminated, truncated, {}


class AsPolicy(Policy):
    """The lockstep policy behind the general interface: same noise, same numbers."""

    def __init__(self, env, seed, recurrent):
        super().__init__(env.observation_space, env.action_space, {})
        self.inner = FakePolicy(env.action_space, recurrent=recurrent)
        self._rng = np.random.default_rng(np.random.SeedSequence(seed))

    def get_initial_state(self):
        return [component[0] for component in self.inner.initial_state(1)]

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        distribution, rows = self.inner.distribution, len(obs)
        made = ActRows(
            actions=np.empty((rows, *distribution.action_shape), distribution.action_dtype),
            dist_inputs=np.empty((rows, distribution.num_inputs), np.float32),
            values=np.empty(rows, np.float32),
            logp=np.empty(rows, np.float32),
        )
        state_out = self.inner.act_into(
            obs, state_batches, self.inner.draw_noise(self._rng, rows), made
        )
        columns = {
            c.ACTION_LOGP: made.logp,
            c.ACTION_DIST_INPUTS: made.dist_inputs,
            c.VF_PREDS: made.values,
        }
        return made.actions, state_out, columns

    def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
        last = np.zeros(1, np.float32)
        if not batch[c.TERMINATEDS][-1]:
            last = self.inner.values(
                batch[c.NEW_OBS][-1:],
                [batch[c.state_out(0)][-1:]] if c.state_out(0) in batch else [],
            )
        cut = batch[c.TRUNCATEDS] & ~batch[c.TERMINATEDS]
        at_truncation = np.where(cut, last, np.float32(0))[:, None]
        column = {
            name: batch[name][:, None]
            for name in (c.REWARDS, c.VF_PREDS, c.TERMINATEDS, c.TRUNCATEDS)
        }
        advantages, targets = gae(
            column[c.REWARDS],
            column[c.VF_PREDS],
            last,
            column[c.TERMINATEDS],
            column[c.TRUNCATEDS],
            at_truncation,
            gamma=GAMMA,
            lam=LAM,
        )
        batch[c.ADVANTAGES], batch[c.VALUE_TARGETS] = advantages[:, 0], targets[:, 0]
        return batch


def both(
    kind,
    mean_length,
    num_envs,
    steps,
    fragments,
    seed,
    recurrent=False,
    clip=False,
    filtered=False,
    complete=False,
    vector=False,
):
    """Return rows of the two samplers, one batch per environment, and their metrics and filters."""

    def envs():
        return [RandomEnv(kind, mean_length) for _ in range(num_envs)]

    def native():
        copies = [functools.partial(RandomEnv, kind, mean_length)] * num_envs
        return gymnasium.vector.SyncVectorEnv(
            copies, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
        )

    shape = preprocessor_for(envs()[0].observation_space).shape
    filters = [MeanStdFilter(shape) if filtered else NoFilter() for _ in range(2)]
    lockstep = Lockstep(
        (
            NativeVectorEnv(native(), env_id="random")
            if vector
            else SerialEnv(envs(), env_id="random")
        ),
        FakePolicy(envs()[0].action_space, recurrent=recurrent),
        PLAN,
        sampler_settings(
            steps,
            clip_rewards=clip,
            seed=seed,
            batch_mode="complete_episodes" if complete else "truncate_episodes",
        ),
        filter=filters[0],
    )
    base_env = (
        to_base_env(native(), seed=seed)
        if vector
        else VectorBaseEnv(Copies(envs(), env_id="random", seed=seed))
    )
    policy = AsPolicy(envs()[0], seed, recurrent)
    length = math.inf if complete else steps
    setup = sampler_setup(
        base_env, policy, length=length, filters={"default_policy": filters[1]}, clip_rewards=clip
    )
    polling = SyncSampler(setup)
    one = [lockstep.sample().to_sample_batch() for _ in range(fragments)]
    if complete:
        return one, polling, lockstep, filters
    other = [[polling.get_data() for _ in range(num_envs)] for _ in range(fragments)]
    return one, [SampleBatch.concat(batches) for batches in other], (lockstep, polling), filters


EXACT = (
    c.OBS,
    c.NEW_OBS,
    c.ACTIONS,
    c.REWARDS,
    c.DONES,
    c.TERMINATEDS,
    c.TRUNCATEDS,
    c.ACTION_LOGP,
    c.ACTION_DIST_INPUTS,
    c.VF_PREDS,
)


@settings(max_examples=15)
@given(
    kind=st.sampled_from(["box", "bytes", "discrete"]),
    mean_length=st.integers(1, 12),
    num_envs=st.integers(1, 4),
    steps=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    recurrent=st.booleans(),
)
def test_packed_fragments_are_equal_row_by_row(kind, mean_length, num_envs, steps, seed, recurrent):
    """R58, R98, R104, R118: obs, actions, rewards, flags, and more."""
    ones, others, samplers, _ = both(kind, mean_length, num_envs, steps, 5, seed, recurrent)
    for one, other in zip(ones, others, strict=True):
        assert one.count == other.count == num_envs * steps
        for name in EXACT:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
            assert one[name].dtype == other[name].dtype, name
        for name in (c.ADVANTAGES, c.VALUE_TARGETS):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name)
    lockstep, polling = samplers
    episodes, metrics = lockstep.take_episodes(), polling.get_metrics()
    assert sorted(episodes.lengths.tolist()) == sorted(m.episode_length for m in metrics)
    np.testing.assert_allclose(
        sorted(episodes.rewards), sorted(m.episode_reward for m in metrics), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("num_envs", [1, 5])
def test_the_policy_of_a_worker_gives_the_same_rows_in_lockstep_and_polled(num_envs):
    """R58, R118: with ONNX Runtime."""

    def policy():
        made = make_onnx_policy(4, spaces.Discrete(2), 2, mlp_weights(4, 2))
        made._rng = np.random.default_rng(np.random.SeedSequence(5))
        return made

    def copies():
        return [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(num_envs)]

    lockstep = Lockstep(
        SerialEnv(copies(), env_id="CartPole"), policy(), PLAN, sampler_settings(40, seed=5)
    )
    polling = SyncSampler(
        sampler_setup(VectorBaseEnv(Copies(copies(), seed=5)), policy(), length=40)
    )
    for _ in range(3):
        one = lockstep.sample().to_sample_batch()
        other = SampleBatch.concat([polling.get_data() for _ in range(num_envs)])
        for name in EXACT:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    mean_length=st.integers(1, 6),
    steps=st.integers(1, 9),
    num_envs=st.integers(1, 5),
    vector=st.booleans(),
)
def test_filtered_rows_are_equal_and_rewards_are_clipped_alike(
    seed, mean_length, steps, num_envs, vector
):
    """R101, R103, R136: whatever ends in a turn, each observation sees the same statistics in
    both.
    """
    ones, others, _, filters = both(
        "box", mean_length, num_envs, steps, 4, seed, clip=True, filtered=True, vector=vector
    )
    for one, other in zip(ones, others, strict=True):
        for name in ("actions", "dones", "rewards"):
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        for name in ("obs", "new_obs"):
            assert one[name].dtype == other[name].dtype == np.float32
            np.testing.assert_allclose(one[name], other[name], rtol=1e-6, atol=1e-6, err_msg=name)
        for name in ("vf_preds", c.VALUE_TARGETS):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert np.abs(one["rewards"]).max() <= 1.0
    assert filters[0].count == filters[1].count
    for name in ("mean", "m2"):
        np.testing.assert_allclose(
            filters[0].state()[name], filters[1].state()[name], rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("recurrent", [False, True])
def test_complete_episodes_are_equal_episode_by_episode(recurrent):
    """R60, R105."""
    ones, polling, _, _ = both("box", 6, 3, 10, 4, 11, recurrent, complete=True)
    by_start = {}
    for batch in ones:
        ends = np.flatnonzero(batch["dones"]) + 1
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            by_start[batch["obs"][start].tobytes()] = batch.slice(start, end)
    found = 0
    for _ in range(30):
        other = polling.get_data()
        assert other["dones"].tolist() == [False] * (other.count - 1) + [True]
        one = by_start.get(other["obs"][0].tobytes())
        if one is None:
            continue
        found += 1
        for name in EXACT:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert found > 10
