from __future__ import annotations

from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.run.trainer.resources import (
    ResourceRequest,
    default_resource_request,
    resource_help,
)

MIB = 2**20


def test_r184_a_run_requests_the_drivers_resources_plus_those_of_each_worker() -> None:
    config = PPOConfig(
        num_workers=3,
        num_cpus_for_driver=2,
        num_cpus_per_worker=4,
        memory=1000 * MIB,
        memory_per_worker=100 * MIB,
        object_store_memory=50 * MIB,
        object_store_memory_per_worker=10 * MIB,
    )
    assert default_resource_request(config) == ResourceRequest(14, 0, 1300 * MIB, 80 * MIB)
    assert default_resource_request(PPOConfig(num_workers=0)) == ResourceRequest(1, 0, 0, 0)


def test_resource_help_names_the_keys_to_adjust_and_shows_the_config() -> None:
    text = resource_help(
        PPOConfig(
            env="CartPole-v1", num_workers=7, extra_python_environs_for_driver={"TOKEN": "x1x"}
        )
    )
    for name in (
        "num_workers",
        "num_cpus_per_worker",
        "num_gpus",
        "memory_per_worker",
        "object_store_memory",
    ):
        assert name in text.partition("\n\n")[0]
    assert "\nnum_workers: 7\n" in text
    assert "8 CPU" in text
    assert "x1x" not in text
