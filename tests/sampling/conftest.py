from __future__ import annotations

import math

import pytest
from rollout_workers import fresh_logging, make_pair, make_worker
from sampler_settings import sampler_settings
from scripted_env import RecordingPolicy

from aiorl.acting.filters import NoFilter
from aiorl.acting.policy_map import PolicyMap
from aiorl.acting.preprocessors import preprocessor_for
from aiorl.sampling.async_sampler import AsyncSampler
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import SamplerSetup

__all__ = ["fresh_logging", "make_pair", "make_worker"]

_SETTINGS = ("horizon", "soft_horizon", "no_done_at_end", "clip_actions", "clip_rewards")


def arguments(env, policies=None, *, mapping=None, length=math.inf, callbacks=None, filters=None, **more):
    policies = policies or {"default_policy": RecordingPolicy()}
    if not isinstance(policies, dict):
        policies = {"default_policy": policies}
    return {
        "worker": "the worker",
        "base_env": env,
        "policy_map": PolicyMap(policies, mapping),
        "preprocessors": {name: preprocessor_for(policy.observation_space) for name, policy in policies.items()},
        "filters": filters or {name: NoFilter() for name in policies},
        "settings": sampler_settings(length, **{name: more.pop(name) for name in _SETTINGS if name in more}),
        "callbacks": callbacks or DefaultCallbacks(),
        **more,
    }


def split(given, *own):
    """The setup, and the sampler's own arguments."""
    rest = {name: given.pop(name) for name in own if name in given}
    return SamplerSetup(**given), rest


@pytest.fixture
def make_sampler():
    """A SyncSampler with the one default policy, unless told otherwise; complete episodes, not packed."""

    def make(*args, **more):
        setup, rest = split(arguments(*args, **more), "on_turn")
        return SyncSampler(setup, **rest)

    return make


@pytest.fixture
def make_async():
    """An AsyncSampler likewise, not yet started; stopped after the test."""
    made = []

    def make(*args, **more):
        setup, rest = split(arguments(*args, **more), "on_turn", "blackhole_outputs", "timeout_s")
        made.append(AsyncSampler(setup, **rest))
        return made[-1]

    yield make
    assert all(sampler.stop() for sampler in made)
