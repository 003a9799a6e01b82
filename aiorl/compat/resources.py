"""Resources that a run asks of its hosts, for people and launchers: aiorl itself schedules no machines."""

from __future__ import annotations

from dataclasses import dataclass

from aiorl.config.layers import dump_yaml
from aiorl.config.schema import CommonConfig


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Totals of a learner and the workers that are started with it; bytes are 0 where nothing bounds them.

    Attributes:
        cpu: CPU threads.
        gpu: GPUs.
        memory: bytes of heap.
        object_store_memory: bytes of batches that wait.
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
        object_store_memory=config.object_store_memory + workers * config.object_store_memory_per_worker,
    )


def resource_help(config: CommonConfig) -> str:
    """Return the keys to adjust if a run takes too much or too little, and the config."""
    request = default_resource_request(config)
    return (
        f"The run takes {request.cpu:g} CPU threads and {request.gpu:g} GPUs. Adjust num_workers, "
        "num_cpus_per_worker, memory_per_worker and object_store_memory_per_worker for the workers; "
        "num_cpus_for_driver, threads, num_gpus, memory and object_store_memory for the learner.\n\n"
        f"{dump_yaml(config)}"
    )
