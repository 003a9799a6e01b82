"""Limits of a worker in its own process, for launchers; aiorl itself does not schedule machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LauncherSpec:
    """Limits of a worker in its own process.

    Attributes:
        worker_class: class of the worker.
        num_cpus: number of threads it can use; None is all.
        num_gpus: number of GPUs it can use.
        memory: heap quota, bytes; None is no quota.
        object_store_memory: limit on batches produced but not sent, bytes; None is the default.
        resources: always empty or None, since aiorl does not schedule machines.
    """

    worker_class: type[Any]
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    object_store_memory: int | None = None
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ConfigError: a limit is negative, or there are custom resources.
        """
        for name in ("num_cpus", "num_gpus", "memory", "object_store_memory"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(
                    f"{name} is {value!r}, expected at least 0.", key=name, value=value
                )
        if self.resources:
            raise ConfigError(
                f"resources is {dict(self.resources)!r}, but aiorl schedules no machines.",
                key="resources",
                hint="Start workers on hosts with these resources.",
            )
