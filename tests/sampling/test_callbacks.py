from __future__ import annotations

import inspect
import sys
import types

import pytest

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.code import named
from aiorl.errors import ConfigError
from aiorl.sampling.callbacks import (
    DefaultCallbacks,
    callbacks_class,
    with_named_failures,
    worker_hooks,
)
from tests.support.plain_policies import PlainPolicy


@pytest.mark.parametrize(
    "name", [name for name in vars(DefaultCallbacks) if name.startswith("on_")]
)
def test_every_hook_takes_its_keywords_and_does_nothing(name):
    """R38."""
    hook = getattr(DefaultCallbacks(), name)
    named = [
        p.name for p in inspect.signature(hook).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    assert named
    assert hook(**dict.fromkeys(named), one_of_a_later_version=1) is None


def test_the_setting_names_a_class(monkeypatch):
    module = types.SimpleNamespace(Own=type("Own", (DefaultCallbacks,), {}), note=print)
    monkeypatch.setitem(sys.modules, "users_callbacks", module)
    assert callbacks_class(None) is None
    assert callbacks_class("users_callbacks:Own") is module.Own
    with pytest.raises(ConfigError, match="users_callbacks:note"):
        callbacks_class("users_callbacks:note")


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
def test_a_hook_with_a_wrong_signature_is_refused_with_the_class(monkeypatch, hook):
    own = type("Own", (DefaultCallbacks,), {"on_episode_end": hook})
    monkeypatch.setitem(sys.modules, "users_callbacks", types.SimpleNamespace(Own=own, Hooks=Hooks))
    with pytest.raises(ConfigError, match="'users_callbacks:Own': on_episode_end"):
        callbacks_class("users_callbacks:Own")
    assert callbacks_class("users_callbacks:Hooks") is Hooks


def test_a_hooks_error_names_the_class_and_the_hook():
    kind = with_named_failures(Hooks, "users_callbacks:Hooks")
    hooks, seen = kind(), []
    assert isinstance(hooks, Hooks)
    hooks.on_sample_end(worker=1, samples=seen)
    assert seen == [1]
    with pytest.raises(
        ConfigError, match=r"'users_callbacks:Hooks': on_episode_end.*KeyError\('speed'\)"
    ):
        hooks.on_episode_end(worker=None, base_env=None, policies=None, episode=1)


def test_an_existing_object_is_shared_by_all_callers():
    class Counts(DefaultCallbacks):
        def __init__(self):
            self.ended = 0

        def on_episode_end(self, **kwargs):
            self.ended += 1

    own = Counts()
    for _ in range(2):
        kind = callbacks_class(named(own))
        kind().on_episode_end(worker=None, base_env=None, policies=None, episode=None)
    assert own.ended == 2
    assert worker_hooks(kind) == {"on_episode_end"}


class Counting(DefaultCallbacks):
    """Keeps a history with a value for each step."""

    def on_episode_step(self, *, episode, **kwargs):
        episode.hist_data.setdefault("step", []).append(episode.length)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_step_is_told_as_often_in_the_first_episode_as_in_later_ones(is_remote):
    worker = RolloutWorker(
        env_creator="aiorl.testing.envs:CountingEnv",
        policy=PlainPolicy,
        env_config={"length": 3},
        num_envs=2,
        rollout_fragment_length=9,
        callbacks=Counting,
        remote_worker_envs=is_remote,
    )
    metrics = []
    while len(metrics) < 6:
        worker.sample()
        metrics += worker.get_metrics()
    worker.stop()
    assert [episode.hist_data for episode in metrics[:6]] == [{"step": [1, 2, 3]}] * 6
