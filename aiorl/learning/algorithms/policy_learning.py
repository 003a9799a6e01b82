"""An algorithm at work for one policy that acts: its gradients, and steps by gradients, wherever the policy is.

It is the same code by which a learner learns; here without leases, train batches and schedules of a run of its own.
`algorithm_policy` makes such policies for whoever drives a RolloutWorker::

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

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import CULPRIT, METRICS, NUM_ROWS, gradients_in
from aiorl.data.layout import laid_out
from aiorl.data.obs_layout import layout_of
from aiorl.errors import BatchError, PolicyError
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.models.actor_critic import ActorCritic
from aiorl.learning.models.export import make_acting_spec
from aiorl.learning.models.tf_policy import TFPolicy

Array = NDArray[Any]


class PolicyLearning:
    """Computes gradients at the weights that a policy acts with, and gives it those that a step leads to."""

    def __init__(
        self, algorithm: CompiledAlgorithm[Any], config: CommonConfig, model: ActorCritic, policy: GraphPolicy
    ) -> None:
        """Take over an algorithm, its config and its model; the model may be the one that acts."""
        self._algorithm = algorithm
        self._model = model
        self._policy = policy
        self._is_shared = getattr(policy.graph, "model", None) is model
        kind = type(algorithm)
        self._plan = dataclasses.replace(kind.sample_plan(config), return_discount=kind.return_discount(config))
        self._sequence_length = config.sequence_length() if kind.trains_on_sequences(config) else None

    @classmethod
    def of(cls, policy: GraphPolicy, said: Mapping[str, Any]) -> PolicyLearning:
        """The algorithm that a policy of a learner's is told of, with a network of its own.

        Args:
            policy: that acts; the algorithm's settings are among its own.
            said: "algo", its registered name or import path; and the keys that say how fragments are cut.

        Raises:
            ConfigError: the settings make no such algorithm here.
            PolicyError: the network built here is not the one that acts.
            NotImplementedError: there are no gradients of batches in its update.
        """
        kind = _kind_with_gradients(said["algo"])
        config = _config_for_fragments(kind.config_class, {**policy.config, **said})
        spec = policy.spec
        observations = Observations(spec.obs_shape, spec.obs_dtype, layout_of(policy.observation_space))
        model = kind.build_model(config, observations, policy.action_space, seed=None)
        if make_acting_spec(model) != spec:
            raise PolicyError("the network built here is not the learner's; install the same versions on both")
        return cls(kind(config, model), config, model, policy)

    def warm_up(self) -> None:
        """See `Learning`."""
        self._algorithm.warm_up_gradients()

    def gradient_columns(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """See `Learning`; schedules go by the env steps of the newest snapshot."""
        if not self._is_shared:
            self._model.set_weights(self._policy.get_weights())
        return self._algorithm.compute_gradients(columns, self._policy.global_timestep)

    def compute_gradients(self, batch: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """Gradients by weight name, and the loss with its metrics.

        Args:
            batch: a SampleBatch.

        Raises:
            BatchError: a column that the loss is made of is missing, or there are no rows.
            PolicyError: a number is not finite.
        """
        found = self.gradient_columns(laid_out(batch, self._plan, self._sequence_length))
        if not found:
            raise BatchError(NUM_ROWS, "at least one transition", 0)
        if CULPRIT in found:
            culprit = int(found[CULPRIT][0])
            named = f"column {self._plan.columns[culprit - 1]!r} of the batch"
            raise PolicyError(
                f"there is no gradient: a number in {named if culprit else 'the loss or its gradient'} is not finite"
            )
        metrics = dict(zip(self._algorithm.gradient_metrics, found[METRICS].tolist(), strict=True))
        return gradients_in(found), {**metrics, NUM_ROWS: int(found[NUM_ROWS][0])}

    def apply_gradients(self, gradients: Mapping[str, Array]) -> dict[str, Any]:
        """Take one step of the optimiser; the policy has the weights then.

        Raises: PolicyError if they are not those of the weights, or not finite; nothing is changed then.
        """
        if not self._is_shared:
            self._model.set_weights(self._policy.get_weights())
        figures = self._algorithm.apply_gradients(gradients, self._policy.global_timestep)
        if not self._is_shared:
            self._policy.set_weights(self._algorithm.get_weights())
        return figures


def _config_for_fragments(kind: type[CommonConfig], settings: Mapping[str, Any]) -> CommonConfig:
    """The config of an algorithm that takes each fragment of one worker as a train batch.

    Args:
        kind: its class.
        settings: of the algorithm, among others, with "rollout_fragment_length" and "num_envs_per_worker".

    Raises: ConfigError if they make no such config.
    """
    known = {name: value for name, value in settings.items() if name in kind.model_fields}
    fragment = settings["rollout_fragment_length"] * settings["num_envs_per_worker"]
    own: dict[str, Any] = {"train_batch_size": fragment, "sgd_minibatch_size": fragment, "gradients": "learner"}
    own["eager"] = bool(settings.get("eager")) and not settings.get("no_eager_on_workers")
    return kind.from_mapping(known | {name: value for name, value in own.items() if name in kind.model_fields})


def _kind_with_gradients(name: str) -> type[CompiledAlgorithm[Any]]:
    kind = algorithm_class(name)
    if not issubclass(kind, CompiledAlgorithm):
        raise NotImplementedError(f"an update of {kind.__name__} is no step by one gradient of a batch")
    return kind


def algorithm_policy(config: CommonConfig) -> type[TFPolicy]:
    """The class of policies that act with an algorithm's network and learn by its gradients.

    ``compute_gradients``, ``apply_gradients`` and ``learn_on_batch`` (one after the other) are those of the algorithm,
    over all rows that they are given, with its optimiser, ``grad_clip`` and schedules. Rows are postprocessed as its
    workers would.

    Args:
        config: the algorithm's; of what is sampled it says nothing, that is the RolloutWorker's affair.

    Raises: NotImplementedError if there are no gradients of batches in its update, as in those that replay.
    """
    kind = _kind_with_gradients(config.algo)
    plan = dataclasses.replace(kind.sample_plan(config), raw_obs=False, return_discount=kind.return_discount(config))
    told = kind.all_acting_settings(config) | plan.policy_settings()

    class AlgorithmPolicy(TFPolicy):
        """Acts and learns as the config says."""

        def __init__(
            self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], settings: Mapping[str, Any]
        ) -> None:
            super().__init__(observation_space, action_space, {**told, **settings})
            self._algorithm = kind(config, self.model)
            self.learning = PolicyLearning(self._algorithm, config, self.model, self)
            self._optimizer = self._algorithm.compiled.optimizer

        def _make_model(
            self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], settings: Mapping[str, Any]
        ) -> ActorCritic:
            dtype = "uint8" if observation_space.dtype == np.uint8 else "float32"
            seen = Observations(tuple(observation_space.shape or ()), dtype, layout_of(observation_space))
            return kind.build_model(config, seen, action_space, settings.get("seed"))

        compute_gradients = GraphPolicy.compute_gradients  # those of `learning`
        apply_gradients = GraphPolicy.apply_gradients

        def _adam(self) -> Any:
            self._optimizer = self._algorithm.compiled.optimizer
            return self._optimizer

    return AlgorithmPolicy
