from __future__ import annotations

import inspect
import sys
import types

import pytest

from aiorl.errors import ConfigError
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.sampling.callbacks import (
    DefaultCallbacks,
    callbacks_class,
    callbacks_from_dict,
    named_callbacks,
)


def test_functions_in_a_dict_get_one_dict_and_cause_a_warning():
    told = {}
    names = (
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_sample_end",
        "on_postprocess_traj",
    )
    functions = {
        name: lambda info, name=name: told.__setitem__(name, info)
        for name in (*names, "on_train_result")
    }
    with pytest.warns(DeprecationWarning, match="DefaultCallbacks"):
        kind = callbacks_from_dict(functions)
    assert issubclass(kind, DefaultCallbacks)
    hooks = kind()
    for name in (*names[:4], "on_postprocess_trajectory", "on_train_result"):
        parameters = inspect.signature(getattr(DefaultCallbacks, name)).parameters.values()
        arguments = {
            one.name: one.name.upper() for one in parameters if one.kind is one.KEYWORD_ONLY
        }
        if name == "on_postprocess_trajectory":
            arguments |= {"agent_id": "a", "original_batches": {"a": "raw", "b": "other"}}
        getattr(hooks, name)(**arguments)
    assert (
        told["on_episode_start"]
        == told["on_episode_end"]
        == {"env": "BASE_ENV", "episode": "EPISODE"}
    )
    assert told["on_sample_end"] == {"worker": "WORKER", "samples": "SAMPLES"}
    assert told["on_train_result"] == {"trainer": "TRAINER", "result": "RESULT"}
    assert told["on_postprocess_traj"] == {
        "episode": "EPISODE",
        "agent_id": "a",
        "pre_batch": "raw",
        "post_batch": "POSTPROCESSED_BATCH",
        "all_pre_batches": {"a": "raw", "b": "other"},
    }


@pytest.mark.parametrize(
    ("name", "function"),
    [("on_episode_stert", print), ("on_episode_start", 5), ("on_episode_end", lambda: 0)],
)
def test_unknown_names_and_unsuitable_functions_are_refused(name, function):
    with pytest.raises(ConfigError) as caught:
        callbacks_from_dict({name: function})
    assert caught.value.key == f"callbacks.{name}"


def test_the_setting_names_functions_or_a_class(monkeypatch):
    module = types.SimpleNamespace(
        Own=type("Own", (DefaultCallbacks,), {}), note=lambda info: info["result"].update(n=1)
    )
    monkeypatch.setitem(sys.modules, "users_callbacks", module)
    assert callbacks_class(None) is callbacks_class({}) is named_callbacks(None) is None
    assert callbacks_class("users_callbacks:Own") is module.Own
    for load in (callbacks_class, named_callbacks):
        with pytest.warns(DeprecationWarning, match="DefaultCallbacks"):
            older = load({"on_train_result": "users_callbacks:note"})
        result = {}
        older().on_train_result(trainer=None, result=result)
        assert result == {"n": 1}
    with pytest.raises(ConfigError) as caught:
        callbacks_class({"on_train_result": "users_callbacks:gone"})
    assert caught.value.key == "callbacks.on_train_result"


def test_none_for_a_hook_is_no_hook():
    functions = {"on_episode_start": None, "on_episode_end": None}
    config = PPOConfig(callbacks={**functions, "on_train_result": "math:sqrt"})
    assert config.callbacks == {**functions, "on_train_result": "math:sqrt"}
    assert (
        config.updated({"callbacks": {"on_train_result": None}}).callbacks["on_train_result"]
        is None
    )
    with pytest.warns(DeprecationWarning, match="DefaultCallbacks"):
        kind = callbacks_class(functions)
    assert vars(kind).keys().isdisjoint(functions)
