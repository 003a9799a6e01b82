"""Learning with a single policy: an algorithm's gradients, and steps with gradients, outside a
learner's run.

It uses the same code as the learner, but has no leases, train batches or schedules of a run.
`algorithm_policy` creates policies for users who drive a RolloutWorker themselves::

    policy = algorithm_policy(A2CConfig(lr=1e-3))
    worker = RolloutWorker("CartPole-v1", policy, rollout_fragment_length=64)
    info, count = worker.sample_and_learn(
        64, num_sgd_iter=1, sgd_minibatch_size=0, standardize_fields=[]
    )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.config import with_former_defaults
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import CULPRIT, METRICS, NUM_ROWS, Array, gradients_in
from aiorl.data.layout import to_training_arrays
from aiorl.data.obs_layout import layout_of
from aiorl.errors import BatchError, PolicyError
from aiorl.learning.algorithm import (
    Algorithm,
    Networks,
    Observations,
    acting_settings_of,
    experience_of,
    own_config,
)
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.experience import Fragments
from aiorl.learning.models.actor_critic import ActorCritic
from aiorl.learning.models.export import make_acting_spec
from aiorl.learning.models.tf_policy import TFPolicy


class PolicyLearning:
    """Computation of gradients at the weights of an acting policy, and optimiser steps that update
    that policy.
    """

    def __init__(
        self,
        kind: type[Algorithm[Any]],
        config: CommonConfig,
        model: ActorCritic,
        policy: GraphPolicy,
    ) -> None:
        """Take over a model, which can be the acting one.

        Args:
            kind: algorithm.
            config: its config.
            model: network to train.
            policy: acting policy.

        Raises:
            NotImplementedError: the algorithm's update doesn't consist of gradients of batches.
        """
        self._model = model
        self._policy = policy
        self._is_shared = getattr(policy.graph, "model", None) is model
        experience = _fragments_of(kind, config)
        self._plan = experience.sample_plan
        self._sequence_length = None
        if self._plan.of_sequences:
            self._sequence_length = config.sequence_length()
        update = kind.update(own_config(kind, config), Networks.of(model))
        self._gradients = experience.gradients(model, update, xla=config.update_mode)

    @property
    def optimizer(self) -> Any:  # Any: a Keras optimiser
        """The optimiser of the policy."""
        return self._gradients.optimizer

    @classmethod
    def of(cls, policy: GraphPolicy, settings: Mapping[str, Any]) -> PolicyLearning:
        """Return the learning of a learner's policy in a worker, with its own copy of the network.

        Args:
            policy: acting policy; its settings include the algorithm's.
            settings: "algo", the algorithm's registered name or import path, and the keys that
                determine how fragments are cut.

        Raises:
            ConfigError: the settings are invalid for this algorithm.
            PolicyError: the network built here differs from the acting one.
            NotImplementedError: the algorithm's update doesn't consist of gradients of batches.
        """
        kind = algorithm_class(settings["algo"])
        all_settings = {**with_former_defaults(policy.config), **settings}
        config = _config_for_fragments(kind.config_class, all_settings)
        _fragments_of(kind, config)
        spec = policy.spec
        observations = Observations(
            spec.obs_shape, spec.obs_dtype, layout_of(policy.observation_space)
        )
        model = kind.build_model(config, observations, policy.action_space, seed=None)
        if make_acting_spec(model) != spec:
            raise PolicyError(
                "the network differs from the learner's; install the same versions on both hosts"
            )
        return cls(kind, config, model, policy)

    def warm_up(self) -> None:
        """See `Learning`."""
        self._gradients.warm_up()

    def gradient_columns(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """See `Learning`; schedules use the env steps of the newest snapshot."""
        if not self._is_shared:
            self._model.set_weights(self._policy.get_weights())
        return self._gradients.compute(columns, self._policy.global_timestep)

    def compute_gradients(self, batch: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the gradients by weight name, and the loss with its metrics.

        Args:
            batch: SampleBatch.

        Raises:
            BatchError: a column that the loss needs is missing, or there are no rows.
            PolicyError: a number is not finite.
        """
        columns = self.gradient_columns(
            to_training_arrays(batch, self._plan, self._sequence_length)
        )
        if not columns:
            raise BatchError(NUM_ROWS, "at least one transition", 0)
        if CULPRIT in columns:
            culprit = int(columns[CULPRIT][0])
            place = "the loss or its gradient"
            if culprit:
                place = f"column {self._plan.columns[culprit - 1]!r} of the batch"
            raise PolicyError(f"there is no gradient: a number in {place} is not finite")
        metrics = dict(zip(self._gradients.metric_names, columns[METRICS].tolist(), strict=True))
        return gradients_in(columns), {**metrics, NUM_ROWS: int(columns[NUM_ROWS][0])}

    def apply_gradients(self, gradients: Mapping[str, Array]) -> dict[str, Any]:
        """Take one step of the optimiser and give the policy the new weights.

        Raises:
            PolicyError: the gradients don't match the weights or are not finite; nothing is changed
                then.
        """
        if not self._is_shared:
            self._model.set_weights(self._policy.get_weights())
        figures = self._gradients.apply(gradients, self._policy.global_timestep)
        if not self._is_shared:
            self._policy.set_weights(self._model.get_weights())
        return figures


def _config_for_fragments(kind: type[CommonConfig], settings: Mapping[str, Any]) -> CommonConfig:
    """Return the config of an algorithm that treats each fragment of one worker as a train batch.

    Args:
        kind: class of the config.
        settings: settings that include the algorithm's, "rollout_fragment_length" and
            "num_envs_per_worker".

    Raises:
        ConfigError: they are invalid for the algorithm.
    """
    fragment = settings["rollout_fragment_length"] * settings["num_envs_per_worker"]
    is_eager = bool(settings.get("eager")) and not settings.get("no_eager_on_workers")
    values = {
        **settings,
        "train_batch_size": fragment,
        "sgd_minibatch_size": fragment,
        "gradients": "learner",
        "eager": is_eager,
    }
    return kind.from_mapping(
        {name: value for name, value in values.items() if name in kind.model_fields}
    )


def _fragments_of(kind: type[Algorithm[Any]], config: CommonConfig) -> Fragments:
    """Return the experience of an algorithm that updates by gradients of batches.

    Raises:
        NotImplementedError: it doesn't.
    """
    experience = experience_of(kind, config)
    if not isinstance(experience, Fragments):
        raise NotImplementedError(f"{kind.__name__} does not update by one gradient of a batch")
    return experience


def algorithm_policy(config: CommonConfig) -> type[TFPolicy]:
    """Return a class of policies that act with an algorithm's network and learn with its gradients.

    ``compute_gradients``, ``apply_gradients`` and ``learn_on_batch`` (both in turn) are the
    algorithm's, with its optimiser, ``grad_clip`` and schedules, and use all rows of their batch.
    Rows are postprocessed as by the algorithm's workers.

    Args:
        config: config of the algorithm. It doesn't affect sampling, which the RolloutWorker
            determines.

    Raises:
        NotImplementedError: the algorithm's update doesn't consist of gradients of batches, as with
            a replay.
    """
    kind = algorithm_class(config.algo)
    plan = dataclasses.replace(_fragments_of(kind, config).sample_plan, raw_obs=False)
    acting = acting_settings_of(kind, config) | plan.policy_settings()

    class AlgorithmPolicy(TFPolicy):
        """Policy that acts and learns as the config says."""

        def __init__(
            self,
            observation_space: spaces.Space[Any],
            action_space: spaces.Space[Any],
            settings: Mapping[str, Any],
        ) -> None:
            super().__init__(observation_space, action_space, {**acting, **settings})
            self.learning = PolicyLearning(kind, config, self.model, self)
            self._optimizer = self.learning.optimizer

        def _make_model(
            self,
            observation_space: spaces.Space[Any],
            action_space: spaces.Space[Any],
            settings: Mapping[str, Any],
        ) -> ActorCritic:
            observations = Observations(
                shape=tuple(observation_space.shape or ()),
                dtype="uint8" if observation_space.dtype == np.uint8 else "float32",
                layout=layout_of(observation_space),
            )
            return kind.build_model(config, observations, action_space, settings.get("seed"))

        compute_gradients = GraphPolicy.compute_gradients  # from `learning`
        apply_gradients = GraphPolicy.apply_gradients

        def _adam(self) -> Any:
            self._optimizer = self.learning.optimizer
            return self._optimizer

    return AlgorithmPolicy
