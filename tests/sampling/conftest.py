from __future__ import annotations

import pytest
from rollout_workers import fresh_logging, make_pair, make_worker
from sampler_settings import sampler_setup
from scripted_env import RecordingPolicy

from aiorl.sampling.async_sampler import DATA_TIMEOUT_S, AsyncSampler
from aiorl.sampling.sampler import SyncSampler

__all__ = ["fresh_logging", "make_pair", "make_worker"]


@pytest.fixture
def make_sampler():
    """Make a SyncSampler, by default with only the default policy and complete episodes that are
    not packed.
    """

    def make(env, policies=None, *, on_turn=None, **more):
        return SyncSampler(
            sampler_setup(env, policies or RecordingPolicy(), **more), on_turn=on_turn
        )

    return make


@pytest.fixture
def make_async():
    """Make an AsyncSampler in the same way without starting it; it is stopped after the test."""
    made = []

    def make(env, policies=None, *, blackhole_outputs=False, timeout_s=DATA_TIMEOUT_S, **more):
        setup = sampler_setup(env, policies or RecordingPolicy(), **more)
        made.append(AsyncSampler(setup, blackhole_outputs=blackhole_outputs, timeout_s=timeout_s))
        return made[-1]

    yield make
    assert all(sampler.stop() for sampler in made)
