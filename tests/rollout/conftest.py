from __future__ import annotations

import contextlib

import pytest
from plain_policies import PlainPolicy

from aiorl.log_once import log_once
from aiorl.rollout.rollout_worker import RolloutWorker
from aiorl.testing.envs import CountingEnv


@pytest.fixture(autouse=True)
def _fresh_logging():
    log_once.reset()
    yield
    log_once.reset()


@pytest.fixture
def make_worker():
    """RolloutWorkers over a CountingEnv and a PlainPolicy, unless told otherwise; stopped after the test."""
    with contextlib.ExitStack() as stack:

        def make(env_creator=lambda context: CountingEnv(), policy=PlainPolicy, **more):
            return stack.enter_context(RolloutWorker(env_creator=env_creator, policy=policy, **more))

        yield make
