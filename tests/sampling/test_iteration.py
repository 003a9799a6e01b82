"""The order of events within a turn; hooks, episodes and the methods for callbacks."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from sampler_settings import sampler_setup
from scripted_env import RecordingPolicy, Scene, ScriptedEnv, scenes

from aiorl.env.base_env import ALL_AGENTS, BaseEnv, as_poll
from aiorl.errors import BadObservationError, BadRewardError, EnvContractError
from aiorl.process.log_once import log_once
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.iteration import Iteration


def make(env, policies, callbacks, **more):
    return Iteration(sampler_setup(env, policies, callbacks=callbacks, **more))


def test_an_episode_can_be_read_before_it_begins_and_long_after_it_ends():
    """R96, R100, R114: zeros, initial states and None before the first step."""
    episodes, told = [], []

    class Ask(DefaultCallbacks):
        def on_episode_start(self, *, episode, **kwargs):
            episodes.append(episode)
            told.append(asked(episode))

        def on_episode_end(self, *, episode, **kwargs):
            told.append(asked(episode))

    def asked(episode):
        names = (
            "last_raw_obs last_info prev_reward last_observation last_action prev_action rnn_state"
            " last_pi_info"
        )
        return [getattr(episode, f"{name}_for")() for name in names.split()]

    env = ScriptedEnv({0: [scenes(3)]})
    iteration = make(env, {"default_policy": RecordingPolicy(recurrent=True)}, Ask())
    for _ in range(300):
        iteration.observe(env.poll())
        env.send_actions(iteration.act())
    np.testing.assert_equal(told[0], [None, None, 0.0, None, 0, 0, [np.float32([-1.0])], {}])
    extras = {"state_in_0": [1.0], "state_out_0": [2.0], "score": 2.0}
    np.testing.assert_equal(told[1], [[0, 3, 0], {}, 2.0, [0, 3, 0], 2, 1, [[2.0]], extras])
    np.testing.assert_equal(asked(episodes[0]), told[1])
    assert (episodes[0].get_agents(), episodes[0].policy_for()) == (["agent0"], "default_policy")


def test_postprocessing_gets_raw_batches_of_other_agents_even_if_they_changed_theirs():
    """R109."""
    seen = {}

    class Spoils(RecordingPolicy):
        def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
            agent = int(batch["agent_index"][0])
            seen[agent] = {
                other: pair[1]["rewards"].tolist() for other, pair in other_agent_batches.items()
            }
            assert all(pair[0] is self for pair in other_agent_batches.values())
            batch["rewards"] *= -1
            batch["mine"] = np.full(batch.count, agent)
            return batch

    class Alters(DefaultCallbacks):
        def on_postprocess_trajectory(
            self, *, agent_id, postprocessed_batch, original_batches, **kwargs
        ):
            assert "mine" not in original_batches[agent_id][1]
            postprocessed_batch["mine"] = postprocessed_batch["mine"] + 10

    env = ScriptedEnv({0: [scenes(2, agents=("a", "b"))]})
    iteration = make(env, {"default_policy": Spoils()}, Alters())
    for _ in range(2):
        iteration.observe(env.poll())
        env.send_actions(iteration.act())
    batch = iteration.observe(env.poll())[-1]
    assert seen == {0: {"b": [101.0, 102.0]}, 1: {"a": [1.0, 2.0]}}
    assert batch["mine"].tolist() == [10, 10, 11, 11]
    assert batch["rewards"].tolist() == [-1, -2, -101, -102]


@pytest.mark.parametrize(("length", "threshold"), [(5, 1000), (200, 2000), (math.inf, 5000)])
def test_a_warning_is_logged_once_when_very_many_rows_wait(length, threshold, caplog):
    """R94."""
    log_once.reset()
    env = ScriptedEnv({0: [scenes(threshold // 50 + 50, ends=False, agents=tuple(range(50)))]})
    callbacks = DefaultCallbacks()
    callbacks.on_episode_step = lambda *, episode, **kwargs: setattr(
        episode.batch_builder, "count", 0
    )
    iteration = make(env, {"default_policy": RecordingPolicy()}, callbacks, length=length)
    with caplog.at_level(logging.WARNING):
        for _ in range(threshold // 50 + 1):
            iteration.observe(env.poll())
            env.send_actions(iteration.act())
        assert not caplog.messages
        for _ in range(40):
            iteration.observe(env.poll())
            env.send_actions(iteration.act())
    assert len(caplog.messages) == 1
    assert str(threshold) in caplog.messages[0]
    log_once.reset()


def test_data_flow_is_logged_once(caplog):
    """R31: raw, preprocessed and filtered observations, inputs and outputs of inference."""
    log_once.reset()
    env = ScriptedEnv({0: [scenes(9)]})
    iteration = make(env, {"default_policy": RecordingPolicy()}, DefaultCallbacks())
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            iteration.observe(env.poll())
            env.send_actions(iteration.act())
    said = [record.msg for record in caplog.records if record.name == type(log_once).__module__]
    assert len(said) == len(set(said)) == 6
    log_once.reset()


def test_seats_are_reused_so_memory_stays_bounded():
    policies = {"default_policy": RecordingPolicy()}
    env = ScriptedEnv({n: [scenes(7, episode=n)] for n in range(8)})
    iteration = make(env, policies, DefaultCallbacks(), length=20)
    table = iteration._lanes["default_policy"].table
    for _ in range(800):
        iteration.observe(env.poll())
        env.send_actions(iteration.act())
    assert table.num_seats == 8
    assert table.length <= 32
    assert len(iteration._free_builders) <= 8


def test_agents_that_come_and_go_in_an_endless_episode_release_their_seats():
    """R126."""
    script = [Scene({0: np.zeros(3, np.float32)})]
    for step in range(1, 300):
        obs = {agent: np.full(3, step, np.float32) for agent in range(step // 3, step // 3 + 3)}
        script.append(Scene(obs, {}, {step // 3: step % 3 == 2}))
    env = ScriptedEnv({0: [script]})
    iteration = make(env, {"default_policy": RecordingPolicy()}, DefaultCallbacks(), length=10)
    for _ in range(290):
        iteration.observe(env.poll())
        env.send_actions(iteration.act())
    assert iteration._lanes["default_policy"].table.num_seats < 10


class OneScene(BaseEnv):
    """BaseEnv of a user whose poll can be replaced."""

    def __init__(self, **parts):
        obs, flags = {3: {"agent0": np.zeros(3, np.float32)}}, {3: {ALL_AGENTS: False}}
        self.parts = {
            "obs": obs,
            "rewards": {3: {}},
            "dones": flags,
            "infos": {3: {}},
            "taken": {},
            **parts,
        }

    def poll(self):
        return as_poll(tuple(self.parts.values()))

    def send_actions(self, action_dict):
        pass


@pytest.mark.parametrize(
    ("part", "value", "error", "text"),
    [
        ("dones", {3: {"agent0": False}}, EnvContractError, "'__all__'"),
        ("dones", {}, EnvContractError, "None"),
        ("infos", {3: {"agent0": "text"}}, EnvContractError, "'agent0'.*'text'"),
        ("rewards", {3: {"agent0": "much"}}, BadRewardError, "'much'"),
        ("rewards", {3: [1.0]}, BadRewardError, r"\[1\.0\]"),
        ("rewards", {3: {"agent0": np.nan}}, BadRewardError, "nan"),
        ("obs", {3: {"agent0": np.zeros(4)}}, BadObservationError, "'agent0'"),
    ],
)
def test_r128_a_rule_that_a_users_base_env_breaks_is_named_with_its_environment_and_step(
    part, value, error, text
):
    env = OneScene()
    iteration = make(env, {"default_policy": RecordingPolicy()}, DefaultCallbacks())
    iteration.observe(env.poll())
    iteration.act()
    env.parts[part] = value
    with pytest.raises(error, match=text) as caught:
        iteration.observe(env.poll())
    assert (caught.value.env_id, caught.value.vector_index, caught.value.step) == ("OneScene", 3, 1)


def test_r150_an_action_taken_elsewhere_that_does_not_fit_is_named_with_its_environment_and_agent():
    env = OneScene(taken={3: {"agent0": [0, 1]}})
    iteration = make(env, {"default_policy": RecordingPolicy()}, DefaultCallbacks())
    iteration.observe(env.poll())
    with pytest.raises(EnvContractError, match=r"'OneScene'.*'agent0'.*\(2,\)"):
        iteration.act()


def test_an_error_in_the_policy_mapping_is_not_reported_as_a_bad_reward():
    def mapping(agent_id):
        if agent_id == "stranger":
            raise ValueError("no policy for strangers")
        return "default_policy"

    env = OneScene()
    iteration = make(
        env, {"default_policy": RecordingPolicy()}, DefaultCallbacks(), mapping=mapping
    )
    iteration.observe(env.poll())
    iteration.act()
    env.parts["rewards"] = {3: {"stranger": 1.0}}
    with pytest.raises(ValueError, match="no policy for strangers") as caught:
        iteration.observe(env.poll())
    assert not isinstance(caught.value, BadRewardError)
