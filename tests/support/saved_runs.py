"""Checkpoints of untrained networks in the form that a learner writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from aiorl.config.parts import RunParts
from aiorl.learning.algorithms.registry import config_class
from aiorl.net.protocol.ledger import Ledger
from aiorl.run.build import Learning, build_learning
from aiorl.run.core import Publisher
from aiorl.run.counters import Counters
from aiorl.run.report.results import Results
from aiorl.run.saving import Saver


def save_run(directory: Path, seen: Any = None, **settings: Any) -> Learning:
    """Write ``checkpoint-000007`` of a new run below ``directory/checkpoints``.

    Args:
        directory: becomes similar to a run directory.
        seen: observations [N, ...] that the filters have seen, by policy id, preprocessed.
        **settings: keys of the config, by default PPO's, eager, because a state is read only once.
    """
    config = config_class(settings.get("algo", "ppo")).from_mapping(
        {"seed": 5, "eager": True, **settings}
    )
    learning = build_learning(config)
    rng = np.random.default_rng(0)
    for algorithm in learning.group.learners.values():
        for (
            variable
        ) in algorithm.model.variables.values():  # otherwise the actions are almost equal
            variable.assign(rng.normal(0.0, 0.5, variable.shape).astype(variable.dtype.name))
    for policy_id, observations in (seen or {}).items():
        learning.filters[policy_id](observations)
    training: Any = SimpleNamespace(
        directory=SimpleNamespace(checkpoints=directory / "checkpoints", run_id="ab"),
        fail=_raise,
        before_checkpoint=lambda: None,
        counters=Counters(),
        results=Results(100, 0.0),
    )
    core: Any = SimpleNamespace(
        publisher=Publisher(learning.filters),
        is_idle=True,
        session=SimpleNamespace(ledger=Ledger()),
    )

    async def save() -> None:
        saver = Saver(training, core, learning, lambda: None, save=RunParts.of(config).save)
        training.counters.updates, training.counters.env_steps_trained = 7, 1400
        saver.keep(learning.group.get_state)
        await saver.save_last()

    asyncio.run(save())
    return learning


def _raise(error: BaseException) -> None:
    raise error
