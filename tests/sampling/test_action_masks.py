"""Sampling from environments with action masks."""

from __future__ import annotations

import numpy as np
import pytest
from masked_env import ACTION_SPACES, ForbiddingEnv

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.distributions import MASKED_LOGIT, make_distribution
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.data import columns as c
from aiorl.data.obs_layout import MaskLayout, layout_of
from aiorl.data.spaces import space_to_dict
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.multi_agent_env import MultiAgentEnv
from aiorl.errors import BadObservationError


def test_a_forbidden_action_raises():
    env = ForbiddingEnv("multi_binary", length=100)
    obs, _ = env.reset(seed=0)
    while obs["action_mask"].all():
        obs, *_ = env.step(np.zeros(4))
    with pytest.raises(RuntimeError):
        env.step(np.ones(4))


class Masking(GraphPolicy):
    """Policy with a random network and a state; masked like the learner's networks."""

    def __init__(self, observation_space, action_space, config):
        distribution = make_distribution(action_space)
        spec = ActingSpec(
            observation_space.shape,
            "float32",
            ((1,),),
            distribution.num_inputs,
            distribution.name,
            space_to_dict(action_space),
            (),
        )
        self.draws = np.random.default_rng(0)
        super().__init__(self, spec, observation_space=observation_space, config=config, seed=0)

    def run(self, obs, state=(), prev=None, out=None, noise=None):
        logits = self.draws.standard_normal((len(obs), self.distribution.num_inputs)).astype(
            np.float32
        )
        _, masks = layout_of(self.observation_space).split(obs)
        positions = self.distribution.choice_inputs
        logits[:, positions] = np.where(masks > 0, logits[:, positions], MASKED_LOGIT)
        if out is not None:
            out[0][...], out[1][...] = logits, 0.0
        return logits, np.zeros(len(obs), np.float32), [state[0] + 1]


@pytest.mark.parametrize("observation_filter", ["NoFilter", "MeanStdFilter"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("actions", ACTION_SPACES)
def test_no_forbidden_action_is_taken_and_the_rows_contain_the_masks(
    make_worker, actions, joined, observation_filter
):
    worker = make_worker(
        lambda context: ForbiddingEnv(actions, joined=joined),
        Masking,
        num_envs=3,
        rollout_fragment_length=20,
        observation_filter=observation_filter,
        seed=1,
    )
    batch = worker.sample()
    layout = layout_of(worker.get_policy().observation_space)
    assert layout.num_mask == MaskLayout(ACTION_SPACES[actions]).size
    obs, masks = layout.split(batch[c.OBS])
    assert set(np.unique(masks)) == {0, 1}
    assert (batch[c.ACTION_LOGP] > -100).all()
    forbidden = batch[c.ACTION_DIST_INPUTS] == np.float32(MASKED_LOGIT)
    assert forbidden.sum() == (masks == 0).sum()
    _, following = layout.split(batch[c.NEW_OBS])
    assert not following[batch[c.TERMINATEDS]].any(), "a final observation needs no mask"
    if observation_filter == "NoFilter":
        assert set(obs[:, 0].tolist()) == set(range(8))
    else:
        assert worker.filters["default_policy"].state()["mean"].shape == (3,)


def test_a_mask_that_forbids_everything_is_an_error_that_names_environment_and_agent(make_worker):
    worker = make_worker(lambda context: ForbiddingEnv(stuck_at=3), Masking, num_envs=2)
    with pytest.raises(BadObservationError, match="'agent0'") as caught:
        worker.sample()
    assert caught.value.vector_index == 0
    assert caught.value.step == 3


class Duel(MultiAgentEnv):
    """Two agents with a mask each; from step 2 on, the mask of "right" is wrong."""

    observation_space = ForbiddingEnv().observation_space
    action_space = ACTION_SPACES["discrete"]

    def __init__(self, wrong):
        self.wrong = wrong
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.shown(), {}

    def step(self, action_dict):
        self.steps += 1
        over = {agent: False for agent in ("left", "right", ALL_AGENTS)}
        return self.shown(), {"left": 0.0, "right": 0.0}, over, over, {}

    def shown(self):
        masks = {
            "left": np.ones(5, np.int8),
            "right": self.wrong if self.steps == 2 else np.ones(5, np.int8),
        }
        return {
            agent: {"observation": np.zeros(3, np.float32), "action_mask": mask}
            for agent, mask in masks.items()
        }


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(5, np.int8), np.ones(4, np.int8), np.full(5, 2, np.int8)],
    ids=["zeros", "short", "twos"],
)
def test_the_agent_whose_mask_is_wrong_is_named(make_worker, wrong):
    worker = make_worker(lambda context: Duel(wrong), Masking)
    with pytest.raises(BadObservationError, match="'right'"):
        worker.sample()


def test_an_observation_outside_its_space_is_reported_as_usual(make_worker):
    class Bare(ForbiddingEnv):
        def step(self, action):
            obs, *rest = super().step(action)
            return obs["observation"], *rest

    with pytest.raises(BadObservationError, match="action_mask"):
        make_worker(lambda context: Bare(), Masking).sample()


def test_a_plain_policy_finds_the_mask_after_the_observation(make_worker):
    class FirstLegal(Masking):
        def compute_actions(self, obs, state_batches=(), *args, **kwargs):
            own, masks = layout_of(self.observation_space).split(obs)
            assert own.shape[1:] == (3,)
            return masks.argmax(axis=1) + 2, list(state_batches), {}

    assert make_worker(lambda context: ForbiddingEnv(), FirstLegal).sample().count == 100
