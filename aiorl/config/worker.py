"""The part of the config that a worker gets in the handshake: plain data on the wire, validated on arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aiorl.config.check import plain_error
from aiorl.config.merge import to_plain
from aiorl.config.parts import TransportConfig
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_plan import SamplePlan

__all__ = ["PolicyPart", "WorkerPart"]


class PolicyPart(BaseModel):
    """What a worker needs to know of one policy.

    Attributes:
        policy_class: import path of a user's own Policy; None = the graph that the learner sends under the id.
        observation_space: of what environments show its agents, as `space_to_dict` gives it; None = the environment's.
        action_space: of its agents' actions, likewise.
        config: its own settings, whatever the policy reads.
        sample_plan: what is computed and sent of its rows.
        is_trained: its rows are sent to the learner; those of other policies stay on the worker.
        layout: of its rows in a fragment of the general path: one by one, [B, 1, ...], or as sequences [L, S, ...].
        sequence_length: L.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    policy_class: str | None = None
    observation_space: dict[str, Any] | None = None
    action_space: dict[str, Any] | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    sample_plan: SamplePlan = SamplePlan()
    is_trained: bool = True
    layout: Literal["rows", "sequences"] = "rows"
    sequence_length: int = Field(default=1, ge=1)


class WorkerPart(BaseModel):
    """All that a worker needs to know; meanings as in `CommonConfig`, whose names it keeps.

    Unknown keys are ignored, so that a worker of an older patch release can still join.

    Attributes:
        sampling: the path that all workers of the run take: "columnar" steps plain single-agent environments in
            lockstep, "general" does everything.
        policies: policy id -> what is to be known of it.
        log_dir: the run's directory on the learner's host; where that is not to be seen, files go elsewhere.
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
    sampling: Literal["columnar", "general"] = "columnar"
    policies: dict[str, PolicyPart] = Field(default_factory=lambda: {DEFAULT_POLICY_ID: PolicyPart()}, min_length=1)
    policy_mapping_fn: str | None = None
    observation_fn: str | None = None
    callbacks: str | dict[str, Any] | None = None
    preprocessor_pref: Literal["deepmind", "rllib"] = "deepmind"
    dim: int = Field(default=84, ge=1)
    framestack: bool = True
    custom_preprocessor: str | None = None
    soft_horizon: bool = False
    no_done_at_end: bool = False
    sample_async: bool = False
    remote_worker_envs: bool = False
    remote_env_batch_wait_ms: float = Field(default=0.0, ge=0)
    max_env_restarts_per_hour: int = Field(default=0, ge=0)
    monitor: bool = False
    log_dir: str | None = None
    log_level: Literal["DEBUG", "INFO", "WARN", "ERROR"] = "INFO"
    num_cpus_per_worker: int = Field(default=1, ge=1)
    extra_python_environs_for_worker: dict[str, str] = Field(default_factory=dict)
    transport: TransportConfig = TransportConfig()

    @classmethod
    def of(
        cls,
        config: CommonConfig,
        sample_plan: SamplePlan | None = None,
        *,
        policies: Mapping[str, PolicyPart] | None = None,
        sampling: Literal["columnar", "general"] = "columnar",
        log_dir: str | None = None,
    ) -> Self:
        """The workers' part of the learner's config.

        Args:
            config: the effective config.
            sample_plan: of the default policy, where that is the only one and ``policies`` is left out; None
                computes and sends nothing.
            policies: policy id -> its part.
            sampling: the path that workers take.
            log_dir: the run's directory.
        Raises: ConfigError when the config names no environment.
        """
        plain = config.to_dict()
        if policies is None:
            policies = {DEFAULT_POLICY_ID: PolicyPart(sample_plan=sample_plan or SamplePlan())}
        return cls.from_dict(
            {
                **{name: value for name, value in plain.items() if name in cls.model_fields},
                **{name: plain["model"][name] for name in ("dim", "framestack", "custom_preprocessor")},
                **{name: plain["multiagent"][name] for name in ("policy_mapping_fn", "observation_fn")},
                "policies": {policy_id: part.model_dump() for policy_id, part in policies.items()},
                "sampling": sampling,
                "log_dir": log_dir,
            }
        )

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
