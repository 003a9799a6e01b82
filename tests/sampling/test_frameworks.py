"""TensorFlow's part, with a stand-in for TensorFlow."""

from __future__ import annotations

import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from plain_policies import PlainPolicy

from aiorl.sampling import frameworks


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
    """What tests may look at: gpus, seeds, and whether functions run eagerly."""
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
    frameworks.check_tensorflow(PlainPolicy, 1)
    with pytest.raises(ImportError, match="needs TensorFlow"):
        frameworks.check_tensorflow(TfLike, 0)


def test_granted_gpus_that_tensorflow_does_not_see_are_a_runtime_error(tensorflow):
    """R33."""
    config = {"num_gpus": 1, "num_gpus_per_worker": 0.5}
    assert frameworks.granted_gpus(config, 0) == 1
    assert frameworks.granted_gpus(config, 3) == 0.5
    assert frameworks.granted_gpus({}, 3) == 0
    frameworks.check_tensorflow(TfLike, 0)
    with pytest.raises(RuntimeError, match=r"0\.5 GPUs are granted"):
        frameworks.check_tensorflow(TfLike, 0.5)
    tensorflow.gpus.append("gpu0")
    frameworks.check_tensorflow(TfLike, 0.5)


@pytest.mark.parametrize(
    ("config", "classes", "expected"),
    [
        ({"eager": True}, [PlainPolicy, TfLike], True),
        ({"eager": True}, [PlainPolicy], False),
        ({"eager": True, "no_eager_on_workers": True}, [TfLike], False),
        ({"eager": True, "eager_tracing": True}, [TfLike], False),
        ({}, [TfLike], False),
    ],
)
def test_eager_mode_is_switched_on_where_asked_for_and_needed(tensorflow, config, classes, expected):
    """R35."""
    frameworks.enable_eager(config, classes)
    assert tensorflow.eager is expected


def test_classes_of_tensorflows_are_converted_and_others_pass():
    """R35."""
    eager, traced = {"eager": True}, {"eager": True, "eager_tracing": True}
    assert frameworks.policy_class_for(WithEager, eager) is EagerForm
    assert frameworks.policy_class_for(WithEager, traced) is TracedForm
    assert frameworks.policy_class_for(WithEager, {}) is WithEager
    assert frameworks.policy_class_for(PlainPolicy, eager) is PlainPolicy
    with pytest.raises(ValueError, match="no method as_eager"):
        frameworks.policy_class_for(TfLike, eager)
    assert frameworks.policy_class_for(TfLike, {**eager, "no_eager_on_workers": True}) is TfLike


def test_aiorls_own_tf_policy_is_recognised_by_its_name():
    """R35: without an import of TensorFlow; it is its own eager variant."""
    own = type("TFPolicy", (PlainPolicy,), {"__module__": "aiorl.learning.models.tf_policy"})
    derived = type("Mine", (own,), {})
    assert frameworks.is_tf_policy(derived)
    assert not frameworks.is_tf_policy(PlainPolicy)
    assert frameworks.policy_class_for(derived, {"eager": True}) is derived


def test_generators_of_all_frameworks_in_use_are_seeded(tensorflow, monkeypatch):
    """R27."""
    torch_seeds = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(manual_seed=torch_seeds.append))
    drawn = []
    for _ in range(2):
        frameworks.seed_generators(42, [PlainPolicy])
        drawn.append((random.random(), np.random.random()))
    assert drawn[0] == drawn[1]
    assert tensorflow.seeds == torch_seeds == [42, 42]


def test_a_class_of_any_kind_that_offers_an_eager_variant_is_converted():
    """R35, SPEC 2.3."""
    traced = type("Traced", (PlainPolicy,), {})
    eager = type("Eager", (PlainPolicy,), {"with_tracing": classmethod(lambda cls: traced)})
    plain = type("Plain", (PlainPolicy,), {"as_eager": classmethod(lambda cls: eager)})
    assert frameworks.policy_class_for(plain, {"eager": True}) is eager
    assert frameworks.policy_class_for(plain, {"eager": True, "eager_tracing": True}) is traced
    assert frameworks.policy_class_for(plain, {"eager": True, "no_eager_on_workers": True}) is plain


def test_tensorflow_is_not_imported_for_plain_policies(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    frameworks.seed_generators(1, [PlainPolicy])
    assert "tensorflow" not in sys.modules
