"""Policies that learn as an algorithm does, in one process and without a learner, for whoever drives a RolloutWorker.

from aiorl.learning.algorithms.algorithm_policy import algorithm_policy

worker = RolloutWorker("CartPole-v1", algorithm_policy(A2CConfig(lr=1e-3)), rollout_fragment_length=64)
info, count = worker.sample_and_learn(64, num_sgd_iter=1, sgd_minibatch_size=0, standardize_fields=[])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.config.schema import CommonConfig
from aiorl.data.obs_layout import layout_of
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.learning.algorithms.policy_learning import PolicyLearning
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.models.catalog import ActorCritic
from aiorl.learning.models.tf_policy import TFPolicy

__all__ = ["algorithm_policy"]


def algorithm_policy(config: CommonConfig) -> type[TFPolicy]:
    """The class of policies that act with an algorithm's network and learn by its gradients.

    ``compute_gradients``, ``apply_gradients`` and ``learn_on_batch`` (one after the other) are those of the algorithm,
    over all rows that they are given, with its optimiser, ``grad_clip`` and schedules. Rows are postprocessed as its
    workers would.

    Args:
        config: the algorithm's; of what is sampled it says nothing, that is the RolloutWorker's affair.

    Raises: NotImplementedError if there are no gradients of batches in its update, as in those that replay.
    """
    kind = _kind_of(config)
    plan = dataclasses.replace(kind.sample_plan(config), raw_obs=False, return_discount=kind.return_discount(config))
    told = kind.all_acting_settings(config) | plan.policy_settings()

    class AlgorithmPolicy(_AlgorithmPolicy):
        """Acts and learns as the config says."""

        algorithm_config = config

        def __init__(
            self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: Mapping[str, Any]
        ) -> None:
            super().__init__(observation_space, action_space, {**told, **config})

    return AlgorithmPolicy


class _AlgorithmPolicy(TFPolicy):
    """Hosts an algorithm of `algorithm_config`."""

    algorithm_config: CommonConfig

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: Mapping[str, Any]
    ) -> None:
        super().__init__(observation_space, action_space, config)
        self._algorithm = _kind_of(self.algorithm_config)(self.algorithm_config, self.model)
        self.learning = PolicyLearning(self._algorithm, self.algorithm_config, self.model, self)
        self._optimizer = self._algorithm.compiled.optimizer

    def _make_model(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: Mapping[str, Any]
    ) -> ActorCritic:
        observations = Observations(
            tuple(observation_space.shape or ()),
            "uint8" if observation_space.dtype == np.uint8 else "float32",
            layout_of(observation_space),
        )
        return _kind_of(self.algorithm_config).build_model(
            self.algorithm_config, observations, action_space, config.get("seed")
        )

    def compute_gradients(self, batch: Any) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        return self.learning.compute_gradients(batch)

    def apply_gradients(self, gradients: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        return self.learning.apply_gradients(gradients)

    def _adam(self) -> Any:
        self._optimizer = self._algorithm.compiled.optimizer
        return self._optimizer


def _kind_of(config: CommonConfig) -> type[CompiledAlgorithm[Any]]:
    kind = algorithm_class(config.algo)
    if not issubclass(kind, CompiledAlgorithm):
        raise NotImplementedError(f"an update of {kind.__name__} is no step by one gradient of a batch")
    return kind
