"""Resources of a run and limits of a worker, for users and launchers; aiorl itself does not
schedule machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.config.layers import dump_yaml
from aiorl.config.schema import CommonConfig
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


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Total resources of a learner and its local workers; bytes are 0 if there is no limit.

    Attributes:
        cpu: number of CPU threads.
        gpu: number of GPUs.
        memory: heap, bytes.
        object_store_memory: waiting batches, bytes.
    """

    cpu: float
    gpu: float
    memory: int
    object_store_memory: int


def default_resource_request(config: CommonConfig) -> ResourceRequest:
    """Return the learner's resources plus those of a worker times `num_workers`."""
    workers = config.num_workers
    return ResourceRequest(
        cpu=config.num_cpus_for_driver + workers * config.num_cpus_per_worker,
        gpu=config.num_gpus,
        memory=config.memory + workers * config.memory_per_worker,
        object_store_memory=config.object_store_memory
        + workers * config.object_store_memory_per_worker,
    )


def resource_help(config: CommonConfig) -> str:
    """Return text that says which keys change the resources of a run, and shows the config."""
    request = default_resource_request(config)
    return (
        f"The run takes {request.cpu:g} CPU threads and {request.gpu:g} GPUs. Adjust num_workers,"
        " num_cpus_per_worker, memory_per_worker and object_store_memory_per_worker for the"
        " workers; num_cpus_for_driver, threads, num_gpus, memory and object_store_memory for the"
        f" learner.\n\n{dump_yaml(config)}"
    )
