"""What a policy may give back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.testing.scripted_env import RecordingPolicy, Scene, ScriptedEnv, scenes


def test_a_policy_may_give_plain_lists_and_write_into_the_arrays_it_was_given(make_sampler):
    """R98, R100, R114: states that come back in the same memory are still recorded as in and out."""

    class Lazy(RecordingPolicy):
        def compute_actions(self, obs, state_batches=(), **kwargs):
            obs[:] = kwargs["prev_action_batch"][:] = kwargs["prev_reward_batch"][:] = 77
            for state in state_batches:
                state += 1
            return [1] * len(obs), state_batches, {"note": [2.5] * len(obs)}

    batch = make_sampler(ScriptedEnv({0: [scenes(3)]}), Lazy(recurrent=True)).get_data()
    assert batch["actions"].tolist() == [1, 1, 1]
    assert batch["obs"][:, 1].tolist() == [0, 1, 2]
    assert batch["prev_actions"].tolist() == [0, 1, 1]
    assert batch["prev_rewards"].tolist() == [0, 1, 2]
    assert batch["note"].tolist() == [2.5, 2.5, 2.5]
    assert batch["state_out_0"][:, 0].tolist() == [0, 1, 2]
    assert batch["state_in_0"][:, 0].tolist() == [-1, 0, 1]


def test_another_number_of_actions_is_refused(make_sampler):
    sampler = make_sampler(ScriptedEnv({0: [scenes(3)]}), RecordingPolicy(act=lambda obs: np.zeros(len(obs) + 1)))
    with pytest.raises(ValueError, match="1 actions of policy 'default_policy'"):
        sampler.get_data()


def test_columns_of_another_shape_than_before_are_refused(make_sampler):
    class Moody(RecordingPolicy):
        def compute_actions(self, obs, *args, **kwargs):
            actions, states, _ = super().compute_actions(obs, *args, **kwargs)
            return actions, states, {"mood": np.zeros((len(obs), len(self.calls)))}

    with pytest.raises(ValueError, match="'mood'"):
        make_sampler(ScriptedEnv({0: [scenes(3)]}), Moody()).get_data()


def test_an_off_policy_action_of_a_continuous_space_is_recorded_as_it_was_taken(make_sampler):
    """R118, R119."""
    script = scenes(2)
    script[0] = Scene(script[0].obs, off_policy_actions={"agent0": np.array([7.0, 8.0])})
    policy = RecordingPolicy(spaces.Box(-1, 1, (2,), np.float32), act=lambda obs: np.full((len(obs), 2), 3.0))
    batch = make_sampler(ScriptedEnv({0: [script]}), policy).get_data()
    assert batch["actions"].tolist() == [[7, 8], [3, 3]]
    assert batch["actions"].dtype == np.float32


def test_a_policy_whose_exploration_has_a_memory_is_told_whose_row_is_which(make_sampler):
    """Also when an agent is absent; other policies are called as ever."""
    told = []

    class Noted(RecordingPolicy):
        def compute_actions(self, *args, agent_ids=None, **kwargs):
            told.append((agent_ids, [episode.env_id for episode in kwargs["episodes"]]))
            return super().compute_actions(*args, **kwargs)

    class Remembering:
        has_memory = True

        def on_episode_start(self, **kwargs):
            pass

        on_episode_end = on_episode_start

    script = scenes(3, agents=("a", "b"))
    script[1] = Scene({"b": script[1].obs["b"]}, script[1].rewards)
    policy = Noted()
    for exploration, expected in ((Remembering(), [["a", "b"], ["b"], ["a", "b"]]), (None, [None] * 3)):
        policy.exploration = exploration
        told.clear()
        make_sampler(ScriptedEnv({0: [script]}), policy).get_data()
        assert [agents for agents, _ in told] == expected
        assert [envs for _, envs in told] == [[0, 0], [0], [0, 0]]
