"""Policies of a worker: specs, learners' graphs, and the TensorFlow part with a stand-in."""

from __future__ import annotations

import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import VECTOR, PlainPolicy
from scripted_env import ScriptedEnv

from aiorl.acting.graph_policy import learned_policy_class
from aiorl.env.kinds import facts_of
from aiorl.errors import ConfigError, PolicyError
from aiorl.sampling import policies
from aiorl.sampling.policies import ENV_SPACE, policy_specs
from aiorl.testing.envs import CountingEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

ACTIONS = spaces.Discrete(2)
GOOD = (PlainPolicy, VECTOR, ACTIONS, {})


def test_a_class_becomes_the_default_policy_with_the_environments_spaces():
    """R13."""
    assert policy_specs(PlainPolicy, VECTOR, ACTIONS) == {"default_policy": GOOD}


@pytest.mark.parametrize("position", [0, 1])
def test_a_class_needs_an_environment_with_spaces(position):
    """R13, R14."""
    given = [VECTOR, ACTIONS]
    given[position] = None
    with pytest.raises(ConfigError) as caught:
        policy_specs(PlainPolicy, *given)
    assert caught.value.key == f"policy['default_policy'][{position + 1}]"


def test_a_dict_is_sorted_by_id_and_lists_are_accepted():
    """R14, R19."""
    found = policy_specs({"b": GOOD, "a": list(GOOD)}, None, None)
    assert list(found) == ["a", "b"]
    assert found["a"] == found["b"] == GOOD


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (object(), "policy"),
        (CountingEnv, "policy"),
        ({}, "policy"),
        ({1: GOOD}, "policy"),
        ({"a": GOOD[:3]}, "policy['a']"),
        ({"a": PlainPolicy}, "policy['a']"),
        ({"a": (CountingEnv, *GOOD[1:])}, "policy['a'][0]"),
        ({"a": (PlainPolicy, (3,), ACTIONS, {})}, "policy['a'][1]"),
        ({"a": (PlainPolicy, VECTOR, None, {})}, "policy['a'][2]"),
        ({"a": (PlainPolicy, VECTOR, ACTIONS, None)}, "policy['a'][3]"),
    ],
)
def test_each_violation_is_refused(policy, key):
    """R14."""
    with pytest.raises(ConfigError) as caught:
        policy_specs(policy, VECTOR, ACTIONS)
    assert caught.value.key == key


def test_a_tuple_can_request_the_environments_spaces():
    found = policy_specs({"a": (PlainPolicy, ENV_SPACE, ENV_SPACE, {})}, VECTOR, ACTIONS)
    assert found["a"] == (PlainPolicy, VECTOR, ACTIONS, {})
    with pytest.raises(ValueError, match=r"policy\['a'\]\[1\]"):
        policy_specs({"a": (PlainPolicy, ENV_SPACE, ENV_SPACE, {})}, None, None)


def test_policies_other_than_the_default_one_need_several_agents():
    """R34."""
    for several in ({"a": GOOD}, {"a": GOOD, "default_policy": GOOD}):
        with pytest.raises(ConfigError) as caught:
            facts_of(CountingEnv(), "env").check_policies(several, "policy")
        assert (caught.value.key, caught.value.value) == ("policy", [*several])
    facts_of(CountingEnv(), "env").check_policies({"default_policy": GOOD}, "policy")
    facts_of(CountingMultiAgentEnv(), "env").check_policies({"a": GOOD}, "policy")
    facts_of(ScriptedEnv({}), "env").check_policies({"a": GOOD}, "policy")


# --- learners' graphs ---

WEIGHTS = mlp_weights(4, 2)
CARTPOLE = spaces.Box(-1, 1, (4,), np.float32)


@pytest.fixture
def policy_class():
    graph, acting_spec = make_acting_graph(4, ACTIONS, 2, WEIGHTS)
    return learned_policy_class(graph, acting_spec.to_dict())


def test_spaces_of_another_environment_are_refused(policy_class):
    with pytest.raises(PolicyError, match=r"Discrete\(3\)"):
        policy_class(CARTPOLE, spaces.Discrete(3), {})
    with pytest.raises(PolicyError, match=r"\(5,\)"):
        policy_class(spaces.Box(-1, 1, (5,), np.float32), ACTIONS, {})


# --- TensorFlow ---


class TfLike(PlainPolicy):
    framework = "tf"


class WithEager(TfLike):
    @classmethod
    def as_eager(cls):
        return EagerForm


class EagerForm(TfLike):
    @classmethod
    def with_tracing(cls):
        return TracedForm


class TracedForm(TfLike):
    pass


@pytest.fixture
def tensorflow(monkeypatch):
    """Return a record for tests: gpus, seeds, and whether functions run eagerly."""
    state = SimpleNamespace(gpus=[], seeds=[], eager=False)
    module = ModuleType("tensorflow")
    module.__spec__ = ModuleSpec("tensorflow", None)
    module.config = SimpleNamespace(
        list_physical_devices=lambda kind: state.gpus,
        functions_run_eagerly=lambda: state.eager,
        run_functions_eagerly=lambda on: setattr(state, "eager", on),
    )
    module.random = SimpleNamespace(set_seed=state.seeds.append)
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    return state


def test_a_tensorflow_policy_without_tensorflow_is_an_import_error(monkeypatch):
    """R33."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    policies.check_tensorflow(PlainPolicy, 1)
    with pytest.raises(ImportError, match="TensorFlow"):
        policies.check_tensorflow(TfLike, 0)


def test_granted_gpus_that_tensorflow_does_not_see_are_a_runtime_error(tensorflow):
    """R33."""
    config = {"num_gpus": 1, "num_gpus_per_worker": 0.5}
    assert policies.granted_gpus(config, 0) == 1
    assert policies.granted_gpus(config, 3) == 0.5
    assert policies.granted_gpus({}, 3) == 0
    policies.check_tensorflow(TfLike, 0)
    with pytest.raises(RuntimeError, match=r"0\.5"):
        policies.check_tensorflow(TfLike, 0.5)
    tensorflow.gpus.append("gpu0")
    policies.check_tensorflow(TfLike, 0.5)


def test_tensorflow_classes_are_converted_and_others_are_unchanged():
    """R35."""
    eager, traced = {"eager": True}, {"eager": True, "eager_tracing": True}
    assert policies.policy_class_for(WithEager, eager) is EagerForm
    assert policies.policy_class_for(WithEager, traced) is TracedForm
    assert policies.policy_class_for(WithEager, {}) is WithEager
    assert policies.policy_class_for(PlainPolicy, eager) is PlainPolicy
    with pytest.raises(ValueError, match="as_eager"):
        policies.policy_class_for(TfLike, eager)
    assert policies.policy_class_for(TfLike, {**eager, "no_eager_on_workers": True}) is TfLike


def test_aiorls_own_tf_policy_is_recognised_by_its_name():
    """R35: without an import of TensorFlow; it is its own eager variant."""
    own = type("TFPolicy", (PlainPolicy,), {"__module__": "aiorl.learning.models.tf_policy"})
    derived = type("Mine", (own,), {})
    assert policies.is_tf_policy(derived)
    assert not policies.is_tf_policy(PlainPolicy)
    assert policies.policy_class_for(derived, {"eager": True}) is derived


def test_generators_of_all_frameworks_in_use_are_seeded(tensorflow, monkeypatch):
    """R27."""
    torch_seeds = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(manual_seed=torch_seeds.append))
    drawn = []
    for _ in range(2):
        policies.seed_generators(42, [PlainPolicy])
        drawn.append((random.random(), np.random.random()))
    assert drawn[0] == drawn[1]
    assert tensorflow.seeds == torch_seeds == [42, 42]


def test_tensorflow_is_not_imported_for_plain_policies(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    policies.seed_generators(1, [PlainPolicy])
    assert "tensorflow" not in sys.modules
