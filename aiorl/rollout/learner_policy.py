"""What a learner sends of a policy, as a class that a RolloutWorker makes its policy of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.spaces import space_from_dict
from aiorl.errors import PolicyError
from aiorl.policy.acting_graph import ActingSpec
from aiorl.policy.graph_policy import GraphPolicy
from aiorl.policy.loading import load_policy
from aiorl.policy.policy import Policy

__all__ = ["learner_policy_class"]


def learner_policy_class(
    graph: bytes, description: Mapping[str, Any], *, weights: Mapping[str, NDArray[Any]] | None = None, threads: int = 1
) -> type[Policy]:
    """A class for RolloutWorker's ``policy``; made with spaces and config, it gives what ``load_policy`` makes.

    Args:
        graph: the acting graph; empty for a network that is run in TensorFlow.
        description: see ``load_policy``.
        weights: set as soon as the policy is made, which sampling in the background needs; None = none yet.
        threads: threads an evaluation may use.

    Raises:
        PolicyError: a damaged description; and, when the policy is made, spaces that are not the learner's.
    """
    spec = ActingSpec.from_dict(description)

    class LearnerPolicy(Policy):
        """Stands for the learner's policy until it is made."""

        def __new__(  # type: ignore[misc]  # which kind it is, a graph or TensorFlow's, shows when it is made
            cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: Mapping[str, Any]
        ) -> GraphPolicy:
            check_spaces(spec, observation_space, action_space)
            policy = load_policy(
                graph,
                description,
                observation_space=observation_space,
                config=config,
                seed=config.get("seed"),
                threads=threads,
            )
            if weights is not None:
                policy.set_weights(weights)
            return policy

    return LearnerPolicy


def check_spaces(spec: ActingSpec, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
    """Nothing, where the learner's network fits the environment of this host.

    Raises:
        PolicyError: it does not, as with another version of the environment.
    """
    learners = space_from_dict(spec.action_space)
    if learners != action_space:
        raise PolicyError(
            f"this host's environment has the action space {action_space}, the learner's has {learners}; install the "
            "same version of the environment on both"
        )
    if tuple(observation_space.shape or ()) != tuple(spec.obs_shape):
        raise PolicyError(
            f"this host's environment has observations of shape {observation_space.shape}, the learner's "
            f"{tuple(spec.obs_shape)}; install the same version of the environment on both"
        )
