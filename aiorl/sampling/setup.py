"""SamplerSetup: what SyncSampler and AsyncSampler are told, checked where it can be."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.acting.observation.filters import ObservationFilter
from aiorl.acting.observation.preprocessors import Preprocessor
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMap, PolicyMappingFn
from aiorl.config.worker import WorkerConfig
from aiorl.env.base_env import BaseEnv
from aiorl.env.env_maker import to_base_env
from aiorl.env.lockstep import checked_horizon
from aiorl.env.serial_env import episode_limit
from aiorl.errors import ConfigError, SamplerDied
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.settings import ObservationFn


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSetup:
    """What SyncSampler and AsyncSampler sample, and how.

    Attributes:
        worker: handed to callbacks and to ``observation_fn``; nothing else is done with it. A ``weakref.ref`` stands
            for what it refers to: a sampler in a thread of its own does not keep that alive.
        base_env: the environments; one of any other kind that ``to_base_env`` knows is converted. Its owner closes it.
        policy_map: policy id -> policy.
        policy_mapping_fn: agent id -> policy id; None = that of a PolicyMap, else the default policy.
        preprocessors: policy id -> preprocessor.
        filters: policy id -> observation filter.
        settings: those of the config that samplers obey. Rewards of rows are clipped before they are postprocessed,
            metrics never are; batches of complete episodes hold one each.
        callbacks: hooks.
        observation_fn: rewrites each environment's observations before they are preprocessed.
    """

    worker: Any
    base_env: Any
    policy_map: Mapping[str, Policy]
    policy_mapping_fn: PolicyMappingFn | None
    preprocessors: Mapping[str, Preprocessor]
    filters: Mapping[str, ObservationFilter]
    settings: WorkerConfig
    callbacks: DefaultCallbacks
    observation_fn: ObservationFn | None = None

    def __post_init__(self) -> None:
        """Convert the environment.

        Raises:
            UnsupportedEnvError: it is none (also a ValueError).
            ConfigError: a horizon, and an environment that can't be reset.
        """
        object.__setattr__(self, "base_env", to_base_env(self.base_env))
        horizon = self.settings.horizon
        if horizon and not self.base_env.can_reset:  # 0 counts as none
            raise ConfigError(
                f"horizon is {horizon}, but {type(self.base_env).__name__} cannot be reset where it cuts.",
                key="horizon",
                value=horizon,
                hint="Leave horizon out.",
            )

    def get_worker(self) -> Any:
        """What callbacks are told is the worker.

        Raises:
            SamplerDied: nobody keeps the worker any more.
        """
        if not isinstance(self.worker, weakref.ref):
            return self.worker
        worker = self.worker()
        if worker is None:
            raise SamplerDied("nobody keeps its worker any more")
        return worker

    @property
    def is_abandoned(self) -> bool:
        """Nobody keeps the worker any more."""
        return isinstance(self.worker, weakref.ref) and self.worker() is None

    @property
    def policies(self) -> PolicyMap:
        """The policies with the rule that binds agents to them."""
        if isinstance(self.policy_map, PolicyMap) and self.policy_mapping_fn is None:
            return self.policy_map
        return PolicyMap(self.policy_map, self.policy_mapping_fn)


def effective_horizon(base_env: BaseEnv, horizon: int | float | None) -> float:
    """Steps after which episodes end: the horizon given, else the environment's limit, else infinite.

    Raises:
        ConfigError: the horizon is above the environment's limit (also a ValueError).
    """
    try:
        limit = episode_limit(base_env.get_unwrapped()[0])
    except Exception:
        # whatever kind of object it is: a limit that cannot be read is not known
        limit = None
    if horizon is not None and math.isinf(horizon):
        horizon = None
    known = checked_horizon(None if horizon is None else int(horizon), limit)
    return math.inf if known is None else known
