"""Policies of a learner, made of an acting graph and its description: ONNX Runtime runs them."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from aiorl.acting.acting_graph import ActingGraph, ActingSpec
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.errors import PolicyError
from aiorl.process.imports import install_command

logger = logging.getLogger(__name__)


class OnnxPolicy(GraphPolicy):
    """Acts with an exported network and samples on NumPy; needs no deep-learning framework.

    Not to be called by several threads at once, except that `set_weights` may come from another one.
    """

    def __init__(
        self, graph: bytes, spec: ActingSpec, *, threads: int = 1, runs_per_weights: float = math.inf, **own: Any
    ) -> None:
        """Make a policy from what the learner exported; it can act once it has weights.

        Args:
            graph: serialised ONNX model.
            spec: its description.
            threads: threads an evaluation may use.
            runs_per_weights: about how many evaluations there are before weights are new.
            **own: "observation_space", "config" and "seed" of GraphPolicy.

        Raises:
            PolicyError: graph and spec don't fit each other or the action space.
            ConfigError: settings that can't be honoured.
        """
        super().__init__(ActingGraph(graph, spec, threads=threads, runs_per_weights=runs_per_weights), spec, **own)


_TF_POLICY = "aiorl.learning.models.tf_policy"


def learned_policy_class(
    graph: bytes, description: Mapping[str, Any], *, threads: int = 1, runs_per_weights: float = math.inf
) -> type[GraphPolicy]:
    """The class of a learner's policy, made like any Policy; objects act once they have weights.

    Args:
        graph: the acting graph; empty for a network that has none and is run in TensorFlow.
        description: `ActingSpec.to_dict`; beside an empty graph with the model's settings under "tf_model".
        threads: threads an evaluation may use.
        runs_per_weights: about how many evaluations there are before weights are new.

    Raises:
        PolicyError: a damaged description; and, when an object is made, a graph that doesn't fit it, or spaces that are
            not the learner's.
        ImportError: the network needs TensorFlow, which is not installed here.
    """
    spec = ActingSpec.from_dict(description)
    if not graph:
        return _tensorflow_class(spec, description.get("tf_model"))

    class LearnedPolicy(OnnxPolicy):
        """Acts with the learner's graph."""

        acting_spec = spec

        def __init__(
            self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], config: Mapping[str, Any]
        ) -> None:
            spec.check_spaces(observation_space, action_space)
            super().__init__(
                graph,
                spec,
                observation_space=observation_space,
                config=config,
                seed=config.get("seed"),
                threads=threads,
                runs_per_weights=runs_per_weights,
            )

    return LearnedPolicy


def _tensorflow_class(spec: ActingSpec, model_config: Any) -> type[GraphPolicy]:
    if not isinstance(model_config, Mapping):
        raise PolicyError("the learner sent neither an acting graph nor the settings of a model")
    logger.warning(
        "The learner's model has no acting graph, so this process runs it in TensorFlow: it takes more memory and acts "
        "more slowly. The learner's log says why."
    )
    try:
        # a worker loads no TensorFlow unless it must, so this name is not in its import graph
        module = importlib.import_module(_TF_POLICY)
    except ImportError as error:
        raise ImportError(
            f"the learner's model can only be run in TensorFlow, which can't be imported here ({error}); install it "
            f"with: {install_command('learner')}"
        ) from error
    kind: type[GraphPolicy] = module.learned_tf_policy_class(spec, model_config)
    return kind
