"""Arguments of the constructor: names, defaults, and values refused before anything is built."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
from plain_policies import PlainPolicy

from aiorl.compat.arguments import worker_settings
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.worker import WorkerConfig
from aiorl.errors import ConfigError
from aiorl.offline.io import noop_output, sampler_input
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.testing.envs import CountingEnv

REQUIRED = inspect.Parameter.empty
DEFAULTS = {
    "env_creator": REQUIRED,
    "policy": REQUIRED,
    "policy_mapping_fn": None,
    "policies_to_train": None,
    "tf_session_creator": None,
    "rollout_fragment_length": 100,
    "batch_mode": "truncate_episodes",
    "episode_horizon": None,
    "preprocessor_pref": "deepmind",
    "sample_async": False,
    "compress_observations": False,
    "num_envs": 1,
    "observation_fn": None,
    "observation_filter": "NoFilter",
    "clip_rewards": None,
    "clip_actions": True,
    "env_config": None,
    "model_config": None,
    "policy_config": None,
    "worker_index": 0,
    "num_workers": 0,
    "monitor_path": None,
    "log_dir": None,
    "log_level": None,
    "callbacks": None,
    "input_creator": sampler_input,
    "input_evaluation": frozenset(),
    "output_creator": noop_output,
    "remote_worker_envs": False,
    "remote_env_batch_wait_ms": 0,
    "soft_horizon": False,
    "no_done_at_end": False,
    "seed": None,
    "extra_python_environs": None,
    "fake_sampler": False,
}


def test_all_35_arguments_exist_with_their_defaults():
    """R11, plus one argument that only aiorl has."""
    parameters = inspect.signature(RolloutWorker).parameters
    own = {"max_env_restarts_per_hour": 0}
    assert {name: parameter.default for name, parameter in parameters.items()} == DEFAULTS | own
    assert len(DEFAULTS) == 35


def arguments(**changes):
    given = {
        **DEFAULTS,
        "max_env_restarts_per_hour": 0,
        "env_creator": "CartPole-v1",
        "policy": PlainPolicy,
        **changes,
    }
    return worker_settings(given)


def test_the_target_is_the_fragment_length_times_the_number_of_environments():
    """R12."""
    with RolloutWorker(
        lambda context: CountingEnv(), PlainPolicy, rollout_fragment_length=20, num_envs=3
    ) as worker:
        assert worker.rollout_fragment_length == 60


REFUSED = {
    "batch_mode": ["pack_episodes", ""],
    "policy_mapping_fn": ["default_policy"],
    "observation_fn": [3],
    "input_creator": ["sampler"],
    "output_creator": [None],
    "preprocessor_pref": ["none", None],
    "rollout_fragment_length": [0, "200", None, 2.5],
    "num_envs": [0, "2", True],
    "soft_horizon": ["no"],
    "max_env_restarts_per_hour": [-1],
    "worker_index": [-1],
    "num_workers": [None],
    "episode_horizon": ["long", 2.5, -1],
    "clip_rewards": ["yes", -1.0],
    "remote_env_batch_wait_ms": [-1, None],
    "seed": [-1, 2**32, "7"],
    "policy_config": [[1], {"model": [1]}],
    "env_config": ["fast", [("size", 3)]],
    "model_config": [84],
    "extra_python_environs": [["A=1"]],
    "monitor_path": [True],
    "log_dir": [3],
    "policies_to_train": ["10", 1],
    "log_level": ["LOUD"],
    "callbacks": [DefaultCallbacks(), dict],
    "tf_session_creator": [lambda: None],
    "input_evaluation": [["is", "counterfactual"], "is", None, 1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_wrong_arguments_are_refused_by_name(name, value):
    """R10, R15, R16, R36, R38."""
    with pytest.raises(ConfigError) as caught:
        arguments(**{name: value})
    assert caught.value.key == name
    assert str(caught.value).startswith(name)


def test_numpy_numbers_and_paths_are_accepted(tmp_path):
    given = arguments(
        rollout_fragment_length=np.int64(20),
        num_envs=np.int32(3),
        clip_rewards=np.float32(0.5),
        episode_horizon=np.int64(9),
        seed=np.int64(4),
        monitor_path=tmp_path,
    )
    config = given.config
    assert (config.rollout_fragment_length, config.num_envs_per_worker, config.horizon) == (
        20,
        3,
        9,
    )
    assert type(config.seed) is type(config.num_envs_per_worker) is int
    assert given.wrapping.monitor_path == str(tmp_path)


@pytest.mark.parametrize("horizon", [None, 0, math.inf])
def test_without_a_horizon_the_environments_own_holds(horizon):
    """R81."""
    assert arguments(episode_horizon=horizon).config.horizon is None


def test_settings_are_declared_only_in_the_config():
    """The constructor's defaults are the config's, except the fragment length, which is the
    reference's.
    """
    given = arguments(num_envs=3, episode_horizon=9, extra_python_environs={"A": 1})
    assert given.config.extra_python_environs_for_worker == {"A": "1"}
    assert arguments().config == WorkerConfig(rollout_fragment_length=100)
    changed = {
        "num_envs_per_worker",
        "horizon",
        "extra_python_environs_for_worker",
        "rollout_fragment_length",
    }
    assert {
        name for name, value in given.config if value != getattr(WorkerConfig(), name)
    } == changed


def test_wrappers_follow_the_preference_and_the_model_config():
    """R23."""
    wrapping = arguments(
        model_config={"dim": 42, "framestack": False}, monitor_path="/tmp/m"
    ).wrapping
    assert (wrapping.deepmind, wrapping.dim, wrapping.framestack, wrapping.monitor_path) == (
        True,
        42,
        False,
        "/tmp/m",
    )
    assert (arguments().wrapping.dim, arguments().wrapping.framestack) == (84, True)
    assert not arguments(preprocessor_pref="rllib").wrapping.deepmind
    assert not arguments(model_config={"custom_preprocessor": "a:B"}).wrapping.deepmind
