"""Parts of the measurements of many workers: a run without environments, model or updates, and its
fragments.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.data.metrics import EpisodeColumns
from aiorl.learning.algorithm import (
    AlgorithmState,
    Batch,
    LeasePlan,
    UpdateResult,
)
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.wire.messages import Samples
from aiorl.run.build import Learning
from aiorl.run.core import LearnerCore
from aiorl.run.counters import Counters
from aiorl.run.policy_group import PolicyGroup, UpdateDone
from aiorl.run.report.results import Results

__all__ = ["LENGTH", "NUM_ENVS", "Idle", "NoTraining", "idle_learning", "make_samples"]

LENGTH, NUM_ENVS = 50, 4
_PER_WORKER = 3
"""Fragments that a worker may owe, as with IMPALA."""


class Idle:
    """Learner with updates that do nothing and publish nothing."""

    stores_experience = False

    def __init__(self, config: CommonConfig, model: Any = None) -> None:
        """Begin with a single weight."""
        self.weights: dict[str, NDArray[Any]] = {"w": np.zeros(1, np.float32)}

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Return a plan that streams, with the number of fragments in ``train_batch_size``."""
        return LeasePlan("streaming", config.train_batch_size, _PER_WORKER, publish_every=1 << 30)

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan without further columns."""
        return SamplePlan()

    def check_fragment(self, fragment: Mapping[str, Any]) -> None:
        """Accept everything."""

    def make_batch(self, fragments: Sequence[Mapping[str, Any]]) -> Batch:
        """Return an empty batch."""
        return {}

    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Do nothing."""
        return UpdateResult({})

    def warm_up(self) -> None:
        """Compile nothing."""

    def get_weights(self) -> dict[str, Any]:
        """Return the weights."""
        return dict(self.weights)

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """Return a function that returns no state."""
        return lambda: AlgorithmState({})

    def set_state(self, state: AlgorithmState) -> None:
        """Do nothing."""

    def hurry(self) -> None:
        """Do nothing."""

    def weights_replaced(self) -> None:
        """Do nothing."""

    def hold_experience(self) -> None:
        """Hold none."""


class NoTraining:
    """The attributes of a `Training` that a source needs, for a run that trains on nothing.

    Attributes:
        core: a learner's core for this run.
        said: warnings and errors for users.
    """

    def __init__(self, config: CommonConfig) -> None:
        """Begin a run with this configuration."""
        self.config = config
        self.parts = RunParts.of(config)
        self.counters = Counters()
        self.results = Results(100, time.monotonic())
        self.core = LearnerCore.of(
            "run",
            self.parts.transport.limits,
            self.parts.sample,
            counters=self.counters,
            results=self.results,
            ledger=Ledger(),
        )
        self.directory = SimpleNamespace(
            run_id="run", last_port=0, worker_log=lambda slot: Path(os.devnull)
        )
        self.end = SimpleNamespace(has_come=False)
        self.said: list[str] = []

    def tell(self, text: str, level: int) -> None:
        """Keep what the user would have to know."""
        if level >= logging.WARNING:
            self.said.append(text)

    def fail(self, error: BaseException) -> None:
        """Raise the error of a task."""
        raise error

    def begin_saving(self, learning: Learning) -> None:
        """Save nothing."""

    def compiled_in(self, took_s: float) -> None:
        """Compile nothing."""

    def update_ended(self, done: UpdateDone) -> None:
        """Keep nothing."""


def idle_learning(config: CommonConfig) -> Learning:
    """Return what a run without a model would have built."""
    learner: Any = Idle(config)
    group = PolicyGroup({DEFAULT_POLICY_ID: learner})
    return Learning(group, Idle.lease_plan(config), WorkerPart.of(config), {}, {}, {})


def make_samples(version: int, lease_id: int = 0, seq: int = 0, sampled_total: int = 0) -> Samples:
    """Return a fragment of 200 env steps of CartPole as an actor-critic sends it, about 7 kB."""
    shape, steps = (LENGTH, NUM_ENVS), LENGTH * NUM_ENVS
    floats = {name: np.ones(shape, np.float32) for name in (c.REWARDS, c.ACTION_LOGP, c.VF_PREDS)}
    columns: dict[str, NDArray[Any]] = {
        c.OBS: np.ones((*shape, 4), np.float32),
        c.ACTIONS: np.ones(shape, np.int64),
        **floats,
    }
    episodes = EpisodeColumns.empty().to_arrays()
    perf = {"iters": float(LENGTH)}
    return Samples(
        seq,
        lease_id,
        steps,
        steps,
        version,
        version,
        NUM_ENVS,
        LENGTH,
        {DEFAULT_POLICY_ID: columns},
        episodes,
        {},
        perf,
        sampled_total,
    )
