"""Construction of the acting policy from a graph and its description."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from aiorl.errors import PolicyError
from aiorl.extras import install_command
from aiorl.policy.acting_graph import ActingSpec
from aiorl.policy.graph_policy import GraphPolicy
from aiorl.policy.onnx_policy import OnnxPolicy

__all__ = ["load_policy"]

logger = logging.getLogger(__name__)

_TF_POLICY = "aiorl.models.tf_policy"


def load_policy(
    graph: bytes,
    description: Mapping[str, Any],
    *,
    observation_space: spaces.Space[Any] | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
    threads: int = 1,
) -> GraphPolicy:
    """Return the acting policy, still without weights.

    Args:
        graph: the acting graph; empty for a network that has none and is run in TensorFlow.
        description: `ActingSpec.to_dict`; beside an empty graph with the model's settings under "tf_model".
        observation_space: space of the observations it takes; by default an unbounded Box.
        config: the policy's own settings.
        seed: seed of the noise that `compute_actions` draws.
        threads: threads an evaluation may use.

    Raises:
        PolicyError: graph and description don't fit, or are damaged.
        ImportError: the network needs TensorFlow, which is not installed here.
    """
    spec = ActingSpec.from_dict(description)
    if graph:
        return OnnxPolicy(graph, spec, observation_space=observation_space, config=config, seed=seed, threads=threads)
    model_config = description.get("tf_model")
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
    policy: GraphPolicy = module.TFPolicy.from_description(
        spec, model_config, observation_space=observation_space, config=config, seed=seed
    )
    return policy
