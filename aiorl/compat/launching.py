"""Answers to launchers of worker processes: limits, addresses and ports, data-parallel learning."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiorl.acting.policy import Policy
from aiorl.errors import ConfigError

_ELSEWHERE = ("192.0.2.1", 9)  # TEST-NET-1 of RFC 5737; nothing is sent there


@dataclass(frozen=True, slots=True)
class LauncherSpec:
    """Limits of a worker that is to run in a process of its own.

    Attributes:
        worker_class: which kind of worker.
        num_cpus: threads it may use; None = as many as there are.
        num_gpus: GPUs it may use.
        memory: heap quota, bytes; None = none.
        object_store_memory: bound of produced, unsent batches, bytes; None = the default one.
        resources: always empty, since nothing here schedules machines.
    """

    worker_class: type[Any]
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    object_store_memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ConfigError: a negative limit, or custom resources.
        """
        for name in ("num_cpus", "num_gpus", "memory", "object_store_memory"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value!r}, expected at least 0.", key=name, value=value)
        if self.resources:
            raise ConfigError(
                f"resources is {dict(self.resources)!r}, but aiorl schedules no machines.",
                key="resources",
                hint="Start workers where those resources are.",
            )


def node_ip() -> str:
    """Return the address under which other hosts reach this one, as far as its routes tell; else loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:  # no route to anywhere
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def find_free_port() -> int:
    """Return a TCP port that can be bound now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def join_data_parallel(
    policies: Mapping[str, Policy], url: str, world_rank: int, world_size: int, backend: str
) -> None:
    """Let every policy take part in data-parallel learning.

    A policy that can do so has a method ``join_data_parallel(url, world_rank, world_size, backend)``; it is then
    told the number of processes as ``distributed_world_size``.

    Args:
        policies: policies by id.
        url: where the processes meet.
        world_rank: which of them this is, from 0.
        world_size: number of processes.
        backend: how they talk to each other.

    Raises:
        ConfigError: a rank beyond the size, or a policy that cannot take part; none has joined then (a ValueError).
    """
    if not 0 <= world_rank < world_size:
        raise ConfigError(f"world_rank is {world_rank}, expected 0 to {world_size - 1}.", key="world_rank")
    joins = {}
    for policy_id, policy in policies.items():
        join = getattr(policy, "join_data_parallel", None)
        if not callable(join):
            raise ConfigError(
                f"policy {policy_id!r} is a {type(policy).__name__}, which cannot learn data-parallel: it has no "
                "method join_data_parallel.",
                key="policy",
            )
        joins[policy_id] = join
    for policy_id, policy in policies.items():
        joins[policy_id](url, world_rank, world_size, backend)
        policy.distributed_world_size = world_size  # type: ignore[attr-defined]  # of those that take part only
