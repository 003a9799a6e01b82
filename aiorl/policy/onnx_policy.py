"""The policy a worker acts with: an acting graph, an action distribution, and noise drawn ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.columns import ACTION_DIST_INPUTS, ACTION_LOGP, ACTIONS, VF_PREDS
from aiorl.data.spaces import space_from_dict
from aiorl.errors import PolicyError
from aiorl.policy.acting_graph import ActingGraph, ActingSpec
from aiorl.policy.distributions import make_named_distribution
from aiorl.policy.policy import Policy

__all__ = ["ActResult", "OnnxPolicy"]

F32 = NDArray[np.float32]


class ActResult(NamedTuple):
    """What one evaluation gives.

    Attributes:
        actions: [N, *action_shape] in the action space's dtype.
        columns: ACTION_LOGP [N], ACTION_DIST_INPUTS [N, P] and VF_PREDS [N], all float32.
        state_out: recurrent state after the step, [N, ...] for each component.
    """

    actions: NDArray[Any]
    columns: dict[str, F32]
    state_out: list[F32]


class OnnxPolicy(Policy):
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
    ) -> None:
        """Make a policy from what the learner exported; it can act once it has weights.

        Args:
            graph: serialised ONNX model.
            spec: its description.
            observation_space: space of the observations it takes; by default an unbounded Box of the
                spec's shape and dtype.
            config: the policy's own settings.
            seed: seed of the noise that `compute_actions` draws; `act` gets its noise from the caller.
            threads: threads an evaluation may use.

        Raises: PolicyError if graph and spec don't fit each other or the action space.
        """
        action_space = space_from_dict(spec.action_space)
        if observation_space is None:
            low, high = (0, 255) if spec.obs_dtype == "uint8" else (-np.inf, np.inf)
            observation_space = spaces.Box(low, high, spec.obs_shape, np.dtype(spec.obs_dtype).type)
        super().__init__(observation_space, action_space, config or {})
        self.distribution = make_named_distribution(spec.distribution, action_space)
        if self.distribution.num_inputs != spec.num_dist_inputs:
            raise PolicyError(
                f"the acting graph has {spec.num_dist_inputs} outputs for a {spec.distribution} distribution over "
                f"{action_space}, which takes {self.distribution.num_inputs}"
            )
        self.graph = ActingGraph(graph, spec, threads=threads)
        self.spec = spec
        self._rng = np.random.default_rng(seed)

    @property
    def is_recurrent(self) -> bool:
        """Whether the network has state."""
        return bool(self.spec.state_shapes)

    def initial_state(self, num_rows: int) -> list[F32]:
        """State of N rows at the start of their episodes: zeros [N, ...] for each component."""
        return [np.zeros((num_rows, *shape), np.float32) for shape in self.spec.state_shapes]

    def get_initial_state(self) -> list[F32]:
        """State of one row at the start of an episode."""
        return [np.zeros(shape, np.float32) for shape in self.spec.state_shapes]

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Noise for [*leading] rows, for instance T, N: float32 [*leading, K]; see `ActionDistribution`."""
        return self.distribution.draw_noise(rng, *leading)

    def act(
        self, obs: NDArray[Any], state: Sequence[F32] = (), noise: F32 | None = None, *, explore: bool = True
    ) -> ActResult:
        """Actions for N observations.

        Args:
            obs: [N, *obs_shape] in the spec's dtype.
            state: recurrent state, [N, ...] for each component.
            noise: [N, K] of `draw_noise`; None = drawn now. Not read when `explore` is False.
            explore: False takes the distribution's mode.
        Raises: PolicyError if the arrays don't fit or there are no weights yet.
        """
        dist_inputs, values, state_out = self.graph.run(obs, state)
        if explore:
            if noise is None:
                noise = self.distribution.draw_noise(self._rng, len(obs))
            actions, logp = self.distribution.sample_with_logp(dist_inputs, noise)
        else:
            actions = self.distribution.deterministic(dist_inputs)
            logp = self.distribution.logp(dist_inputs, actions)
        columns = {ACTION_LOGP: logp, ACTION_DIST_INPUTS: dist_inputs, VF_PREDS: values}
        return ActResult(actions, columns, state_out)

    def act_into(
        self, obs: NDArray[Any], state: Sequence[F32], noise: F32, rows: Mapping[str, NDArray[Any]]
    ) -> list[F32]:
        """Sample actions for N observations and write the results straight into columns.

        Args:
            obs: [N, *obs_shape] in the spec's dtype.
            state: recurrent state, [N, ...] for each component.
            noise: [N, K] of `draw_noise`.
            rows: where to write: ACTIONS [N, *action_shape] in the action space's dtype, ACTION_LOGP [N],
                ACTION_DIST_INPUTS [N, P] and VF_PREDS [N] in float32.
        Returns: recurrent state after the step.
        Raises: PolicyError if the arrays don't fit or there are no weights yet.
        """
        dist_inputs, values, state_out = self.graph.run(obs, state)
        rows[ACTION_DIST_INPUTS][...] = dist_inputs
        rows[VF_PREDS][...] = values
        self.distribution.sample_into(dist_inputs, noise, rows[ACTIONS], rows[ACTION_LOGP])
        return state_out

    def values(self, obs: NDArray[Any], state: Sequence[F32] = ()) -> F32:
        """Values [N] of N observations, for bootstrapping."""
        return self.graph.run(obs, state)[1]

    def compute_actions(
        self,
        obs: NDArray[Any],
        state_batches: Sequence[NDArray[Any]] = (),
        prev_action_batch: NDArray[Any] | None = None,
        prev_reward_batch: NDArray[Any] | None = None,
        info_batch: Sequence[Mapping[str, Any]] | None = None,
        episodes: Sequence[Any] | None = None,
        timestep: int | None = None,
        *,
        explore: bool = True,
    ) -> tuple[NDArray[Any], list[NDArray[Any]], dict[str, NDArray[Any]]]:
        """See `Policy`; noise is drawn from the policy's own generator."""
        actions, columns, state_out = self.act(obs, state_batches, explore=explore)
        return actions, list(state_out), dict(columns)

    def get_weights(self) -> dict[str, NDArray[Any]]:
        """The weights in force, by name."""
        return self.graph.get_weights()

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Take up new weights, all at once; see `ActingGraph.set_weights`."""
        self.graph.set_weights(weights)
