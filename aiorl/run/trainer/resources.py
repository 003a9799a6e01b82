"""Resources that a run takes, for users; aiorl itself does not schedule machines."""

from __future__ import annotations

from dataclasses import dataclass

from aiorl.config.layers import dump_yaml
from aiorl.config.schema import CommonConfig


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
