"""What a training is made from, whoever samples for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.run.build import LearningPlan
from aiorl.run.restoring import Restored

__all__ = ["TrainingSetup"]


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """What a training is made from.

    Attributes:
        config: the effective configuration.
        directory: the run's.
        tell: told (text, logging level) what users want to know.
        plan: what was made of the config before, if that was done.
        restored: to go on from; None begins anew.
        before_saving: called before each checkpoint, such as to make a directory again that is gone.
    """

    config: CommonConfig
    directory: RunDirectory
    tell: Callable[[str, int], None]
    plan: LearningPlan | None = None
    restored: Restored | None = None
    before_saving: Callable[[], None] = lambda: None
