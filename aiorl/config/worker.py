"""The part of the config that a worker gets in the handshake: plain data on the wire, validated on arrival."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aiorl.config.check import plain_error
from aiorl.config.merge import to_plain
from aiorl.config.parts import TransportConfig
from aiorl.config.schema import CommonConfig
from aiorl.data.sample_plan import SamplePlan

__all__ = ["WorkerPart"]


class WorkerPart(BaseModel):
    """All that a worker needs to know; meanings as in `CommonConfig`, whose names it keeps.

    Unknown keys are ignored, so that a worker of an older patch release can still join.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    env: str
    env_config: dict[str, Any] = Field(default_factory=dict)
    algo: str = ""
    seed: int | None = None
    num_envs_per_worker: int = Field(default=1, ge=1)
    samplers_per_worker: int = Field(default=1, ge=1)
    vectorize: Literal["auto", "native", "serial", "remote"] = "auto"
    rollout_fragment_length: int = Field(default=200, ge=1)
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    horizon: int | None = Field(default=None, ge=1)
    observation_filter: Literal["NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"] = "NoFilter"
    synchronize_filters: bool = True
    clip_actions: bool = True
    clip_rewards: bool | None = None
    sample_plan: SamplePlan = SamplePlan()
    log_level: Literal["DEBUG", "INFO", "WARN", "ERROR"] = "INFO"
    num_cpus_per_worker: int = Field(default=1, ge=1)
    extra_python_environs_for_worker: dict[str, str] = Field(default_factory=dict)
    transport: TransportConfig = TransportConfig()

    @classmethod
    def of(cls, config: CommonConfig, sample_plan: SamplePlan | None = None) -> Self:
        """The workers' part of the learner's config.

        Args:
            config: the effective config.
            sample_plan: what the algorithm wants of each fragment; None computes and sends nothing.
        Raises: ConfigError when the config names no environment.
        """
        values = {name: value for name, value in config.to_dict().items() if name in cls.model_fields}
        return cls.from_dict({**values, "sample_plan": dataclasses.asdict(sample_plan or SamplePlan())})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What came in a handshake, checked.

        Raises: ConfigError naming the first key at fault.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise plain_error(cls, error) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the wire: dicts, lists, strings, numbers, None."""
        plain: dict[str, Any] = to_plain(self.model_dump())
        return plain
