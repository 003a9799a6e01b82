from __future__ import annotations

import inspect
import sys
import types

import pytest

from aiorl.config.import_path import named
from aiorl.errors import ConfigError
from aiorl.sampling.callbacks import (
    DefaultCallbacks,
    callbacks_class,
    callbacks_from_dict,
    named_callbacks,
    worker_hooks,
)

HOOKS = {
    "on_episode_start": {"worker", "base_env", "policies", "episode"},
    "on_episode_step": {"worker", "base_env", "episode"},
    "on_episode_end": {"worker", "base_env", "policies", "episode"},
    "on_postprocess_trajectory": {
        "worker",
        "episode",
        "agent_id",
        "policy_id",
        "policies",
        "postprocessed_batch",
        "original_batches",
    },
    "on_sample_end": {"worker", "samples"},
    "on_train_result": {"trainer", "result"},
}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_takes_its_keywords_and_does_nothing(name):
    """R38."""
    hook = getattr(DefaultCallbacks(), name)
    assert hook(**dict.fromkeys(HOOKS[name]), one_of_a_later_version=1) is None
    named = {p.name for p in inspect.signature(hook).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert named == HOOKS[name]


def test_functions_in_a_dict_get_one_dict_and_a_warning():
    told = {}
    names = ("on_episode_start", "on_episode_step", "on_episode_end", "on_sample_end", "on_postprocess_traj")
    functions = {name: lambda info, name=name: told.__setitem__(name, info) for name in (*names, "on_train_result")}
    with pytest.warns(DeprecationWarning, match="DefaultCallbacks"):
        kind = callbacks_from_dict(functions)
    assert issubclass(kind, DefaultCallbacks)
    hooks = kind()
    for name, keywords in HOOKS.items():
        arguments = {key: key.upper() for key in keywords}
        if name == "on_postprocess_trajectory":
            arguments |= {"agent_id": "a", "original_batches": {"a": "raw", "b": "other"}}
        getattr(hooks, name)(**arguments)
    assert told["on_episode_start"] == told["on_episode_end"] == {"env": "BASE_ENV", "episode": "EPISODE"}
    assert told["on_sample_end"] == {"worker": "WORKER", "samples": "SAMPLES"}
    assert told["on_train_result"] == {"trainer": "TRAINER", "result": "RESULT"}
    assert told["on_postprocess_traj"] == {
        "episode": "EPISODE",
        "agent_id": "a",
        "pre_batch": "raw",
        "post_batch": "POSTPROCESSED_BATCH",
        "all_pre_batches": {"a": "raw", "b": "other"},
    }


def test_hooks_not_in_the_dict_do_nothing():
    with pytest.warns(DeprecationWarning, match="dict"):
        hooks = callbacks_from_dict({"on_sample_end": lambda info: None})()
    hooks.on_episode_start(worker=None, base_env=None, policies=None, episode=None)


@pytest.mark.parametrize("functions", [{"on_episode_stert": print}, {"on_episode_start": 5}])
def test_unknown_names_and_things_that_cannot_be_called_are_refused(functions):
    with pytest.raises(ConfigError, match=r"on_episode_st[ae]rt"):
        callbacks_from_dict(functions)


def test_the_setting_names_a_class_or_in_the_older_form_functions(monkeypatch):
    module = types.SimpleNamespace(
        Own=type("Own", (DefaultCallbacks,), {}), note=lambda info: info["result"].update(n=1)
    )
    monkeypatch.setitem(sys.modules, "users_callbacks", module)
    assert callbacks_class(None) is callbacks_class({}) is None
    assert callbacks_class("users_callbacks:Own") is module.Own
    with pytest.warns(DeprecationWarning, match="deprecated"):
        older = callbacks_class({"on_train_result": "users_callbacks:note"})
    result = {}
    older().on_train_result(trainer=None, result=result)
    assert result == {"n": 1}
    with pytest.raises(ConfigError, match="expected a subclass"):
        callbacks_class("users_callbacks:note")
    with pytest.raises(ConfigError, match="has no 'gone'"):
        callbacks_class({"on_train_result": "users_callbacks:gone"})


class Hooks(DefaultCallbacks):
    def on_episode_end(self, *, episode, **kwargs):
        assert episode is not None
        raise KeyError("speed")

    def on_sample_end(self, *, worker, samples, **kwargs):
        samples.append(worker)


@pytest.mark.parametrize(
    "hook",
    [
        lambda self, *, episode: None,
        lambda self, episode, more, **kwargs: None,
        lambda: None,
        staticmethod(lambda self, **kwargs: None),
    ],
)
def test_a_hook_that_cannot_be_called_is_found_where_the_class_is_named(monkeypatch, hook):
    own = type("Own", (DefaultCallbacks,), {"on_episode_end": hook})
    monkeypatch.setitem(sys.modules, "users_callbacks", types.SimpleNamespace(Own=own, Hooks=Hooks))
    with pytest.raises(ConfigError, match="callbacks 'users_callbacks:Own': on_episode_end can't be called"):
        callbacks_class("users_callbacks:Own")
    assert callbacks_class("users_callbacks:Hooks") is Hooks


def test_a_function_of_the_older_form_that_takes_no_dict_is_refused():
    with pytest.raises(ConfigError, match=r"callbacks\.on_episode_end can't be called"):
        callbacks_from_dict({"on_episode_end": lambda: None})


def test_what_a_hook_raises_names_the_class_and_the_hook(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_callbacks", types.SimpleNamespace(Hooks=Hooks))
    kind = named_callbacks("users_callbacks:Hooks")
    hooks, seen = kind(), []
    assert isinstance(hooks, Hooks)
    assert named_callbacks(None) is None
    hooks.on_sample_end(worker=1, samples=seen)
    assert seen == [1]
    with pytest.raises(ConfigError, match=r"'users_callbacks:Hooks': on_episode_end failed: KeyError\('speed'\)"):
        hooks.on_episode_end(worker=None, base_env=None, policies=None, episode=1)


def test_an_object_that_was_made_before_is_shared_by_all_who_ask():
    class Counts(DefaultCallbacks):
        def __init__(self):
            self.ended = 0

        def on_episode_end(self, **kwargs):
            self.ended += 1

    own = Counts()
    for _ in range(2):
        kind = named_callbacks(named(own))
        kind().on_episode_end(worker=None, base_env=None, policies=None, episode=None)
    assert own.ended == 2
    assert worker_hooks(kind) == {"on_episode_end"}
