"""Valid and invalid results of a policy."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from scripted_env import RecordingPolicy, Scene, ScriptedEnv, scenes

from aiorl.acting.actor import Actor
from aiorl.acting.filters import NoFilter
from aiorl.acting.preprocessors import preprocessor_for
from aiorl.errors import BatchError, PolicyError, UnsupportedSpaceError


def test_a_policy_can_return_plain_lists_and_overwrite_its_arguments(make_sampler):
    """R98, R100, R114: states that come back in the same memory are still recorded as in and
    out.
    """

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
    sampler = make_sampler(
        ScriptedEnv({0: [scenes(3)]}), RecordingPolicy(act=lambda obs: np.zeros(len(obs) + 1))
    )
    with pytest.raises(ValueError, match="'default_policy'"):
        sampler.get_data()


def test_columns_of_another_shape_than_before_are_refused(make_sampler):
    class Moody(RecordingPolicy):
        def compute_actions(self, obs, *args, **kwargs):
            actions, states, _ = super().compute_actions(obs, *args, **kwargs)
            return actions, states, {"mood": np.zeros((len(obs), len(self.calls)))}

    with pytest.raises(ValueError, match="'mood'"):
        make_sampler(ScriptedEnv({0: [scenes(3)]}), Moody()).get_data()


def test_a_policy_whose_exploration_has_a_memory_gets_the_agent_of_each_row(make_sampler):
    """It works for an absent agent, too; other policies are called as usual."""
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
    for exploration, expected in (
        (Remembering(), [["a", "b"], ["b"], ["a", "b"]]),
        (None, [None] * 3),
    ):
        policy.exploration = exploration
        told.clear()
        make_sampler(ScriptedEnv({0: [script]}), policy).get_data()
        assert [agents for agents, _ in told] == expected
        assert [envs for _, envs in told] == [[0, 0], [0], [0, 0]]


class Giving(RecordingPolicy):
    """Policy that returns zero actions, and columns from a function of the call's number (from 0)
    and the rows.
    """

    def __init__(self, columns=lambda call, rows: {}, states=None, **more):
        super().__init__(**more)
        self.columns, self.states = columns, states

    def compute_actions(self, obs, state_batches=(), **kwargs):
        call, rows = len(self.calls), len(obs)
        super().compute_actions(obs, state_batches, **kwargs)
        states = [] if self.states is None else self.states(state_batches)
        return np.zeros(rows, np.int64), states, self.columns(call, rows)


@pytest.mark.parametrize(
    ("policy", "column"),
    [
        (Giving(lambda call, rows: {"value": np.array([7.0])}), "value"),
        (Giving(lambda call, rows: {"value": 7.0}), "value"),
        (Giving(lambda call, rows: {"value": np.zeros(3)}), "value"),
        (Giving(states=lambda given: [given[0][:1]], recurrent=True), "state_out_0"),
    ],
    ids=["one for all", "scalar", "too many", "state"],
)
def test_r96_r114_outputs_without_one_entry_per_row_are_refused(make_sampler, policy, column):
    """R96, R114: entries are never broadcast to other rows."""
    with pytest.raises(BatchError, match="'default_policy'") as raised:
        make_sampler(ScriptedEnv({0: [scenes(3, agents=("a", "b"))]}), policy).get_data()
    assert raised.value.column == column


@pytest.mark.parametrize("is_first", [True, False], ids=["goes", "comes"])
def test_r96_a_column_that_is_sometimes_missing_is_refused(make_sampler, is_first):
    """R96: otherwise rows without the column would contain old entries of other rows."""
    policy = Giving(lambda call, rows: {"score": np.ones(rows)} if (call < 2) == is_first else {})
    with pytest.raises(BatchError, match="'score'"):
        make_sampler(ScriptedEnv({0: [scenes(5)]}), policy).get_data()


@pytest.mark.parametrize("name", ["rewards", "obs", "eps_id", "infos", "state_in_0", "state_out_0"])
def test_r96_a_column_cannot_replace_a_column_of_rows(make_sampler, name):
    """R96."""
    policy = Giving(
        lambda call, rows: {name: np.ones(rows)}, lambda given: list(given), recurrent=True
    )
    with pytest.raises(BatchError, match=f"'{name}'"):
        make_sampler(ScriptedEnv({0: [scenes(5)]}), policy).get_data()


@pytest.mark.parametrize(
    "result",
    [None, (np.zeros(1), []), (np.zeros(1), None, {}), (np.zeros(1), [], None), np.zeros(3)],
    ids=repr,
)
def test_an_invalid_answer_of_a_policy_is_named(make_sampler, result):
    class Wrong(RecordingPolicy):
        def compute_actions(self, *args, **kwargs):
            return result

    with pytest.raises(PolicyError, match=r"compute_actions.*'default_policy' \(Wrong\)"):
        make_sampler(ScriptedEnv({0: [scenes(3)]}), Wrong()).get_data()


@pytest.mark.parametrize("action", [0.7, np.nan, "1"])
def test_an_action_that_its_space_cannot_hold_reaches_neither_environment_nor_rows(
    make_sampler, action
):
    env = ScriptedEnv({0: [scenes(3)]})
    with pytest.raises(BatchError):
        make_sampler(env, RecordingPolicy(act=lambda obs: np.full(len(obs), action))).get_data()
    assert not env.sent


def test_r32_a_policy_that_skips_its_base_class_gets_no_nested_observations_either():
    """R32."""

    class Raw(RecordingPolicy):
        def __init__(self):
            self.observation_space = spaces.Dict({"a": spaces.Discrete(2)})
            self.action_space = spaces.Discrete(2)

    policy = Raw()
    with pytest.raises(UnsupportedSpaceError):
        Actor("p", policy, preprocessor_for(policy.observation_space), NoFilter())
