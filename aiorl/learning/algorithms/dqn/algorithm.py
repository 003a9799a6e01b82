"""DQN: a replay, a network of action values with a target network, and greedy actions but for a random share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from aiorl.acting.distributions import Greedy
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.errors import InternalError
from aiorl.learning.algorithms.algorithm import Observations, SamplePlan
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.dqn.config import DQNConfig
from aiorl.learning.algorithms.dqn.update import dqn_spec
from aiorl.learning.algorithms.q_network import QNetwork
from aiorl.learning.algorithms.replay_algorithm import ReplayAlgorithm
from aiorl.learning.algorithms.target_network import TargetNetwork

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["DQN"]


class DQN(ReplayAlgorithm[DQNConfig]):
    """Deep Q-learning (Mnih et al. 2015): double, dueling, n-step, prioritised and over distributions, as set."""

    config_class = DQNConfig

    @classmethod
    def build_model(
        cls, config: CommonConfig, observations: Observations, action_space: spaces.Space[Any], seed: int | None
    ) -> ActorCritic:
        """Build the network of action values."""
        own = cls._own(config)
        return QNetwork(
            observations.layout,
            observations.dtype,
            Greedy(action_space),
            own.model,
            np.random.default_rng(seed),
            is_dueling=own.dueling,
            dueling_hiddens=own.dueling_hiddens,
            atoms=(own.v_min, own.v_max, own.num_atoms) if own.num_atoms > 1 else None,
        )

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """See the base class; with `worker_priorities` also the size of each row's TD error to the worker."""
        plan = super().sample_plan(config)
        if not cls._own(config).worker_priorities:
            return plan
        return dataclasses.replace(plan, postprocess="n_step_priorities", columns=(*plan.columns, c.PRIORITIES))

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Greedy actions but for a random share."""
        own = cls._own(config)
        if own.per_worker_epsilon:
            return {"exploration": {"type": "PerWorkerEpsilonGreedy"}}
        return {"exploration": {"type": "EpsilonGreedy", "epsilon": [list(point) for point in own.epsilon_schedule]}}

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Make room for the replay and a target network; nothing is compiled yet."""
        if not isinstance(model, QNetwork):
            raise InternalError(f"DQN was given a {type(model).__name__}")
        self._network = model
        self._target = TargetNetwork(model)
        self.targets = {"target": self._target}
        super().__init__(config, model)

    def _update_spec(self) -> UpdateSpec:
        return dqn_spec(self._config, self._network, self._target)
