"""The constructor's arguments: names, defaults, and what is refused before anything is built."""

from __future__ import annotations

import inspect

import pytest
from plain_policies import PlainPolicy

from aiorl.callbacks import DefaultCallbacks
from aiorl.offline.io import noop_output, sampler_input
from aiorl.rollout.arguments import WorkerArguments
from aiorl.rollout.rollout_worker import RolloutWorker

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
    """R11."""
    parameters = inspect.signature(RolloutWorker).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == DEFAULTS
    assert len(DEFAULTS) == 35
    assert list(WorkerArguments.__dataclass_fields__) == list(DEFAULTS)


def arguments(**changes):
    given = {**DEFAULTS, "env_creator": "CartPole-v1", "policy": PlainPolicy, **changes}
    return WorkerArguments(**given)


@pytest.mark.parametrize("mode", ["pack_episodes", "truncate", ""])
def test_unknown_batch_modes_are_refused(mode):
    """R10."""
    with pytest.raises(ValueError, match=r"batch_mode is .*truncate_episodes, complete_episodes"):
        arguments(batch_mode=mode)


def test_the_target_is_the_fragment_length_times_the_environments():
    """R12."""
    assert arguments(rollout_fragment_length=20, num_envs=3).target_env_steps == 60


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy_mapping_fn", "default_policy"),
        ("observation_fn", 3),
        ("input_creator", "sampler"),
        ("output_creator", None),
        ("preprocessor_pref", "none"),
        ("compress_observations", "rows"),
        ("rollout_fragment_length", 0),
        ("num_envs", 0),
        ("log_level", "LOUD"),
        ("callbacks", DefaultCallbacks()),
        ("callbacks", dict),
        ("tf_session_creator", lambda: None),
        ("input_evaluation", ["is", "counterfactual"]),
        ("input_evaluation", "is"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value):
    """R16, R36, R38."""
    with pytest.raises(ValueError, match=f"{name} is "):
        arguments(**{name: value})


def test_wrappers_follow_the_preference_and_the_model_config():
    """R23."""
    wrapping = arguments(model_config={"dim": 42, "framestack": False}, monitor_path="/tmp/m").wrapping
    assert (wrapping.deepmind, wrapping.dim, wrapping.framestack, wrapping.monitor_path) == (True, 42, False, "/tmp/m")
    assert (arguments().wrapping.dim, arguments().wrapping.framestack) == (84, True)
    assert not arguments(preprocessor_pref="rllib").wrapping.deepmind
    assert not arguments(model_config={"custom_preprocessor": "a:B"}).wrapping.deepmind
