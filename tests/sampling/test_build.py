"""Construction of a worker: its order, its parts, and the errors on the way."""

from __future__ import annotations

import gc
import logging
import os
import random

import gymnasium
import numpy as np
import pytest
from general_runs import Bytes
from gymnasium import spaces
from plain_policies import DEFAULT, VECTOR, PlainPolicy, spec

from aiorl.acting.filters import MeanStdFilter
from aiorl.acting.preprocessors import IdentityPreprocessor
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.env.external_env import ExternalEnv
from aiorl.errors import ConfigError, UnsupportedSpaceError
from aiorl.offline.io import NoopWriter, SamplerInput
from aiorl.process.log_once import log_once
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.worker import get_global_worker
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv

ACTIONS = spaces.Discrete(2)


def test_parts_are_built_in_order(make_worker, monkeypatch):
    """R19, R30 and SPEC 2.2: according to the recorded events."""
    tape = []
    monkeypatch.setenv("AIORL_TEST_NUMBER", "before")

    class Env(CountingEnv):
        def __init__(self, context):
            super().__init__()
            tape.append(
                (
                    "env",
                    context.vector_index,
                    os.environ["AIORL_TEST_NUMBER"],
                    get_global_worker() is not None,
                )
            )

    class Callbacks(DefaultCallbacks):
        def __init__(self):
            tape.append("callbacks")

    class Taped(PlainPolicy):
        def __init__(self, observation_space, action_space, config):
            super().__init__(observation_space, action_space, config)
            tape.append(("policy", random.getrandbits(32)))

    def make_input(context):
        tape.append("input")
        return context.default_sampler_input()

    def make_output(context):
        tape.append("output")
        return NoopWriter()

    worker = make_worker(
        lambda context: Env(context),
        Taped,
        num_envs=2,
        seed=9,
        callbacks=Callbacks,
        extra_python_environs={"AIORL_TEST_NUMBER": 7},
        input_creator=make_input,
        output_creator=make_output,
    )
    first_draw = random.Random(9).getrandbits(32)
    assert tape == [
        "callbacks",
        ("env", 0, "7", True),
        ("policy", first_draw),
        ("env", 1, "7", True),
        "input",
        "output",
    ]
    assert get_global_worker() is worker


def test_constructors_of_users_can_ask_for_the_attributes_of_the_worker(make_worker):
    seen = []

    def look():
        worker = get_global_worker()
        context = worker.io_context
        seen.append((worker.rollout_fragment_length, worker.last_batch, context.worker is worker))
        assert isinstance(worker.callbacks, DefaultCallbacks)
        assert list(worker.reward_estimators) == []

    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            look()

    class Asking(PlainPolicy):
        def __init__(self, observation_space, action_space, config):
            super().__init__(observation_space, action_space, config)
            look()

    make_worker(lambda context: Env(), Asking, rollout_fragment_length=7, num_envs=2)
    assert seen == 3 * [(14, None, True)]


def test_the_global_worker_is_the_last_one_made_and_is_not_kept_alive():
    """R37: readers and writers of another type also fail the assertion."""
    RolloutWorker(lambda context: CountingEnv(), PlainPolicy).stop()
    worker = RolloutWorker(lambda context: CountingEnv(), PlainPolicy)
    assert get_global_worker() is worker
    with pytest.raises(AssertionError, match=r"output_creator.*OutputWriter") as caught:
        RolloutWorker(
            lambda context: CountingEnv(), PlainPolicy, output_creator=lambda context: object()
        )
    assert get_global_worker() is worker, (
        "SPEC 2.2 step 1: a worker that could not be built is not the current one"
    )
    worker.stop()
    del worker, caught
    gc.collect()
    assert get_global_worker() is None


# --- policies ---


def test_a_policys_own_config_wins_in_a_deep_merge(make_worker):
    """R18, R55."""
    base = {"model": {"layers": [1], "act": "tanh"}, "lr": 1.0, "gamma": 0.9}
    own = {"model": {"act": "relu"}, "lr": 2.0}
    worker = make_worker(
        policy={DEFAULT: (PlainPolicy, VECTOR, ACTIONS, own)},
        policy_config=base,
        worker_index=3,
        num_workers=5,
    )
    assert worker.policy_map[DEFAULT].config == {
        "model": {"layers": [1], "act": "relu"},
        "lr": 2.0,
        "gamma": 0.9,
        "num_workers": 5,
        "worker_index": 3,
    }
    assert base == {"model": {"layers": [1], "act": "tanh"}, "lr": 1.0, "gamma": 0.9}
    assert own == {"model": {"act": "relu"}, "lr": 2.0}


# --- environments ---


def test_creators_may_change_the_settings_they_are_given(make_worker):
    """R20, R55: neither the next copy nor creation_args() sees the change."""
    config = {"length": 3, "nested": {"sizes": [1]}}
    worker = make_worker(pop_settings, env_config=config, num_envs=2, rollout_fragment_length=3)
    assert worker.sample()["dones"].tolist() == [False, False, True] * 2
    assert worker.creation_args()["env_config"] == {"length": 3, "nested": {"sizes": [1]}}


def pop_settings(context):
    context["nested"]["sizes"].append(2)
    context["nested"]["new"] = 1
    assert context.pop("nested")["sizes"] == [1, 2]
    return CountingEnv(context.pop("length"))


class Frames(gymnasium.Env):
    """Environment that shows images but is not an Atari game."""

    observation_space = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    action_space = ACTIONS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((4, 4, 3), np.uint8), {}

    def step(self, action):
        return np.zeros((4, 4, 3), np.uint8), 5.0, True, False, {}


PONG = "ALE/Pong-v5"


@pytest.mark.parametrize(("clip", "expected"), [(None, 1.0), (False, 0.0), (True, 1.0)])
def test_deepmind_wrapping_switches_preprocessing_off_and_clipping_on(make_worker, clip, expected):
    """R23, R24, R25."""
    pytest.importorskip("ale_py")
    worker = make_worker(PONG, clip_rewards=clip, model_config={"dim": 42, "framestack": True})
    assert not worker.preprocessing_enabled
    assert isinstance(worker.preprocessors[DEFAULT], IdentityPreprocessor)
    assert worker.policy_map[DEFAULT].observation_space.shape == (42, 42, 4)
    assert worker.reward_limit == expected


@pytest.mark.parametrize(
    "changes", [{"preprocessor_pref": "rllib"}, {"env_creator": lambda context: Frames()}]
)
def test_without_deepmind_wrapping_none_clips_no_rewards(make_worker, changes):
    """R23, R24."""
    pytest.importorskip("ale_py")
    worker = make_worker(**{"env_creator": PONG, **changes})
    assert worker.preprocessing_enabled
    assert not isinstance(worker.preprocessors[DEFAULT], IdentityPreprocessor)
    assert worker.reward_limit == 0.0


def test_deepmind_wrapping_disables_a_policys_own_preprocessor(make_worker, caplog):
    """R24: the log says so."""
    pytest.importorskip("ale_py")
    path = "aiorl.acting.preprocessors:BoxPreprocessor"
    worker = make_worker(PONG, policy_config={"model": {"custom_preprocessor": path}})
    assert not worker.preprocessing_enabled
    assert type(worker.preprocessors[DEFAULT]) is IdentityPreprocessor
    assert worker.policy_map[DEFAULT].observation_space.shape == (84, 84, 4)
    assert "custom_preprocessor" in caplog.text


# --- seeds ---


def test_equal_seeds_give_equal_batches(make_worker):
    """R27: also for policies that sample from their action spaces."""

    class Drawing(PlainPolicy):
        def compute_actions(self, obs, state_batches=(), *args, **kwargs):
            return np.array([self.action_space.sample() for _ in obs]), [], {}

    def batch(seed):
        worker = make_worker(
            "CartPole-v1", Drawing, seed=seed, num_envs=2, rollout_fragment_length=30
        )
        return worker.sample()

    first, second, third = batch(5), batch(np.int64(5)), batch(6)
    for name in first:
        if name != "infos":
            np.testing.assert_array_equal(first[name], second[name])
    assert not np.array_equal(first["actions"], third["actions"])


def test_several_policies_get_their_own_seeds(make_worker):
    """R27."""
    policies = {name: spec(VECTOR, ACTIONS) for name in "ab"} | {
        "c": spec(VECTOR, ACTIONS, seed=77)
    }
    worker = make_worker(
        lambda context: CountingMultiAgentEnv(),
        policies,
        policy_mapping_fn=lambda agent: "a",
        seed=4,
    )
    seeds = [worker.policy_map[name].config["seed"] for name in "abc"]
    assert (seeds[0], seeds[2]) == (4, 77)
    assert seeds[1] not in (4, 77)


# --- logs ---


@pytest.mark.parametrize(("index", "reports"), [(0, True), (1, True), (2, False)])
def test_only_workers_0_and_1_report_data_flow(make_worker, caplog, index, reports):
    """R31."""
    caplog.set_level(logging.INFO, "aiorl")
    make_worker(worker_index=index, log_level="DEBUG", rollout_fragment_length=3).sample()
    assert any(record.name == type(log_once).__module__ for record in caplog.records) is reports
    assert (log_once.is_disabled, log_once.is_periodic) == (not reports, reports)


def test_the_local_worker_logs_its_parts_and_the_level_is_set(make_worker, caplog):
    with caplog.at_level(logging.INFO, "aiorl"):
        make_worker(worker_index=1)
        assert "NoFilter" not in caplog.text
        make_worker(log_level="INFO")
    for part in ("PlainPolicy", "Preprocessor", "NoFilter"):
        assert part in caplog.text
    make_worker(log_level="ERROR")
    assert logging.getLogger("aiorl").level == logging.ERROR


# --- spaces, filters ---


class NestedEnv(CountingEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"a": spaces.Discrete(3), "b": VECTOR})


def test_nested_observations_are_preprocessed_for_the_policy(make_worker):
    """R32, R39."""
    worker = make_worker(lambda context: NestedEnv(), observation_filter="MeanStdFilter")
    assert worker.policy_map[DEFAULT].observation_space.shape == (6,)
    assert worker.filters[DEFAULT].shape == (6,)


def test_a_policy_with_a_raw_nested_space_is_refused(make_worker):
    """R32."""

    class Raw(IdentityPreprocessor):
        def __init__(self, space):
            self.space, self.shape, self.dtype = space, (6,), np.dtype(np.float32)

    with pytest.raises(UnsupportedSpaceError, match="Dict"):
        make_worker(lambda context: NestedEnv(), model_config={"custom_preprocessor": Raw})


def test_a_policy_that_does_not_call_its_base_class_is_refused(make_worker):
    class Bare(PlainPolicy):
        def __init__(self, observation_space, action_space, config):
            self.observation_space = observation_space

    with pytest.raises(
        ConfigError, match=r"Bare.*action_space, global_timestep.*super\(\)\.__init__"
    ):
        make_worker(policy=Bare)


def test_every_policy_has_a_filter_with_the_shape_of_its_observations(make_worker):
    """R39, R135."""
    policies = {"a": spec(VECTOR, ACTIONS), "b": spec(spaces.Discrete(4), ACTIONS)}
    worker = make_worker(
        lambda context: CountingMultiAgentEnv(),
        policies,
        policy_mapping_fn=lambda agent: "a",
        observation_filter="MeanStdFilter",
    )
    assert {name: found.shape for name, found in worker.filters.items()} == {"a": (3,), "b": (4,)}
    assert all(isinstance(found, MeanStdFilter) for found in worker.filters.values())
    with pytest.raises(ValueError, match="observation_filter"):
        make_worker(observation_filter="MedianFilter")


@pytest.mark.parametrize(("name", "dtype"), [("NoFilter", np.uint8), ("MeanStdFilter", np.float32)])
def test_policies_get_the_space_of_the_filters_output(make_worker, name, dtype):
    """R39: bytes are floats after a filter that changes them."""

    worker = make_worker(lambda context: Bytes(), observation_filter=name)
    space = worker.get_policy().observation_space
    obs = worker.sample()["obs"]
    assert obs.dtype == space.dtype == dtype
    assert all(space.contains(row) for row in obs)


# --- callbacks, readers, writers, samplers ---


def test_creators_get_the_io_context(make_worker):
    seen = []

    def make_input(context):
        seen.append(context)
        return context.default_sampler_input()

    worker = make_worker(
        input_creator=make_input,
        log_dir="/tmp/run",
        worker_index=4,
        policy_config={"gamma": 0.5, "eager": False},
    )
    (context,) = seen
    assert context is worker.io_context
    assert (context.log_dir, context.worker_index, context.worker) == ("/tmp/run", 4, worker)
    assert context.config == {"gamma": 0.5, "eager": False}
    assert isinstance(worker.input_reader, SamplerInput)


def test_simulation_with_sampled_input_is_refused(make_worker):
    """R36."""
    with pytest.raises(ConfigError) as caught:
        make_worker(input_evaluation=["simulation"])
    assert caught.value.key == "input_evaluation"


class Idle(ExternalEnv):
    """External environment without a client."""

    def run(self):
        pass


def test_the_policy_mapping_can_use_the_episode_and_its_worker(make_worker):
    asked = []

    def by_episode(agent_id, episode, worker, **kwargs):
        asked.append((episode, worker))
        return "a" if episode.episode_id % 2 else "b"

    policies = {name: spec(VECTOR, ACTIONS) for name in "ab"}
    worker = make_worker(
        lambda context: CountingMultiAgentEnv(), policies, policy_mapping_fn=by_episode
    )
    worker.sample()
    assert asked
    assert all(hasattr(episode, "user_data") and sampler is worker for episode, sampler in asked)


@pytest.mark.parametrize("settings", [{"num_envs": 2}, {"episode_horizon": 9}])
def test_r56_r158_external_environments_with_invalid_settings_are_refused_and_closed(
    make_worker, settings
):
    closed = []

    class Closing(Idle):
        def close(self):
            closed.append(True)

    with pytest.raises(ConfigError):
        make_worker(lambda context: Closing(ACTIONS, VECTOR), **settings)
    assert closed == [True]
