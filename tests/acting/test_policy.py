"""The policy interface, with a policy in plain Python; and the modules that importing it loads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.policy import Policy
from aiorl.errors import PolicyError, UnsupportedSpaceError


class Constant(Policy):
    """Policy with a constant action that counts its calls in its state."""

    def compute_actions(self, obs, state_batches=(), *args, explore=True, **kw):
        return np.full(len(obs), 7), [part + 1 for part in state_batches], {"seen": obs.sum(axis=1)}


@pytest.fixture
def policy():
    return Constant(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(9), {"lr": 1})


def test_a_policy_is_abstract_without_compute_actions():
    with pytest.raises(TypeError, match="compute_actions"):
        Policy(spaces.Discrete(2), spaces.Discrete(2), {})


def test_a_plain_policy_has_no_weights_and_no_state(policy):
    assert policy.get_weights() == {}
    assert policy.get_initial_state() == []
    policy.set_weights({})
    with pytest.raises(PolicyError, match="Constant"):
        policy.set_weights({"w": np.zeros(1)})
    batch = object()
    assert policy.postprocess_trajectory(batch) is batch


def test_r52_the_global_timestep_is_taken_up_and_kept(policy):
    policy.on_global_var_update({"timestep": 5})
    policy.on_global_var_update({"other": 1})
    assert policy.global_timestep == 5
    other = Constant(policy.observation_space, policy.action_space, policy.config)
    other.set_state(policy.get_state())
    assert other.global_timestep == 5


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("compute_gradients", [None]),
        ("apply_gradients", [None]),
        ("learn_on_batch", [None]),
        ("export_model", ["d"]),
        ("export_checkpoint", ["d"]),
        ("import_model_from_h5", ["f"]),
    ],
)
def test_errors_of_unsupported_methods_name_the_policy(policy, method, arguments):
    with pytest.raises(NotImplementedError, match="Constant"):
        getattr(policy, method)(*arguments)


def test_importing_what_workers_act_and_read_with_loads_no_heavy_package():
    """Arrow and Minari are only imported for their files."""
    code = (
        "import sys, pkgutil, importlib, aiorl.acting, aiorl.data, aiorl.offline.sources\n"
        "for package in (aiorl.acting, aiorl.data):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "heavy = {'tensorflow', 'keras', 'onnx', 'tf2onnx', 'torch', 'jax'}\n"
        "heavy = (heavy | {'pyarrow', 'minari', 'fsspec'}) & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    "space", [spaces.Dict({"a": spaces.Discrete(2)}), spaces.Tuple([spaces.Discrete(2)])]
)
def test_r32_a_raw_nested_observation_space_is_refused(space):
    class Idle(Policy):
        def compute_actions(self, obs, *_, explore=True, **__):
            return np.zeros(len(obs)), [], {}

    with pytest.raises(UnsupportedSpaceError):
        Idle(space, spaces.Discrete(2), {})


def test_a_single_action_gets_all_data_of_its_step():
    calls = []

    class Recording(Policy):
        def compute_actions(self, obs, states, **rest):
            calls.append((obs, states, rest))
            return np.ones(1, np.int64), [states[0] + 1], {"extra": np.zeros((1, 2))}

        def get_initial_state(self):
            return [np.zeros(3, np.float32)]

    policy = Recording(spaces.Box(-1, 1, (1,)), spaces.Discrete(2), {})
    action, state, columns = policy.compute_single_action(
        np.zeros(1), (), 1, 0.5, {"a": 1}, "episode", 7
    )
    assert (action, state[0].tolist(), columns["extra"].shape) == (1, [1, 1, 1], (2,))
    obs, states, rest = calls[0]
    assert (obs.shape, states[0].shape) == ((1, 1), (1, 3))
    assert rest == {
        "prev_action_batch": [1],
        "prev_reward_batch": [0.5],
        "info_batch": [{"a": 1}],
        "episodes": ["episode"],
        "timestep": 7,
        "explore": True,
    }
    policy.compute_single_action(np.zeros(1), [np.ones(3, np.float32)], explore=False)
    _, _, rest = calls[1]
    assert rest.pop("explore") is False
    assert set(rest.values()) == {None}
