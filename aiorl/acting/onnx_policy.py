"""The policy a worker acts with: an exported acting graph, run by ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from aiorl.acting.acting_graph import ActingGraph, ActingSpec
from aiorl.acting.graph_policy import ActResult, GraphPolicy

__all__ = ["ActResult", "OnnxPolicy"]


class OnnxPolicy(GraphPolicy):
    """Acts with an exported network and samples on NumPy; needs no deep-learning framework.

    Not to be called by several threads at once, except that `set_weights` may come from another one.
    """

    def __init__(
        self,
        graph: bytes,
        spec: ActingSpec,
        *,
        observation_space: spaces.Space[Any] | None = None,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        threads: int = 1,
        runs_per_weights: float = math.inf,
    ) -> None:
        """Make a policy from what the learner exported; it can act once it has weights.

        Args:
            graph: serialised ONNX model.
            spec: its description.
            observation_space: space of the observations it takes; by default an unbounded Box of the
                spec's shape and dtype.
            config: the policy's own settings; see GraphPolicy.
            seed: seed of the noise that `compute_actions` draws; `act` gets its noise from the caller.
            threads: threads an evaluation may use.
            runs_per_weights: about how many evaluations there are before weights are new.

        Raises:
            PolicyError: graph and spec don't fit each other or the action space.
            ConfigError: settings that can't be honoured.
        """
        super().__init__(
            ActingGraph(graph, spec, threads=threads, runs_per_weights=runs_per_weights),
            spec,
            observation_space=observation_space,
            config=config,
            seed=seed,
        )
