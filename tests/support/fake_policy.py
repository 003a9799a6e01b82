"""FakePolicy: a policy with known numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import ActionDistribution, make_distribution
from aiorl.acting.graph_policy import ActRows

F32 = NDArray[np.float32]


def linear_value(obs: NDArray[Any]) -> F32:
    """Return 1 + the sum of an observation's entries weighted by 1/4, 1/8, 1/16, ...; exact for
    small integers.
    """
    flat = obs.reshape(len(obs), -1).astype(np.float64)
    weights = 0.25 * 0.5 ** np.arange(flat.shape[1])
    return (1.0 + flat @ weights).astype(np.float32)


class FakePolicy:
    """Policy that acts uniformly at random; its value is a function of the observation, and of its
    state if it has one.

    The state of a recurrent FakePolicy counts the steps since it was last zero.

    Attributes:
        distribution: distribution over the action space.
        seen: number of observations acted on, per call.
        value_calls: number of rows of each ``values`` call.
    """

    reward_scaler = None

    def __init__(
        self,
        action_space: spaces.Space[Any],
        value_of: Callable[[NDArray[Any]], F32] = linear_value,
        *,
        recurrent: bool = False,
    ) -> None:
        """Make a policy for an action space."""
        self.distribution: ActionDistribution = make_distribution(action_space)
        self.seen: list[int] = []
        self.value_calls: list[int] = []
        self._value_of = value_of
        self._recurrent = recurrent

    @property
    def logp_is_apart(self) -> bool:
        """See the distribution."""
        return self.distribution.logp_is_apart

    def initial_state(self, num_rows: int) -> list[F32]:
        """Return zeros [N, 1], or nothing."""
        return [np.zeros((num_rows, 1), np.float32)] if self._recurrent else []

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw noise of the distribution."""
        return self.distribution.draw_noise(rng, *leading)

    def act_into(
        self, obs: NDArray[Any], state: Sequence[F32], noise: F32, rows: ActRows
    ) -> list[F32]:
        """Write a sample, with its columns."""
        self.seen.append(len(obs))
        inputs = np.zeros((len(obs), self.distribution.num_inputs), np.float32)
        rows.dist_inputs[...] = inputs
        rows.values[...] = self._values(obs, state)
        if rows.logp is None:
            self.distribution.choose_into(inputs, noise, rows.actions)
        else:
            self.distribution.sample_into(inputs, noise, rows.actions, rows.logp)
        return [component + np.float32(1.0) for component in state]

    def values(self, obs: NDArray[Any], state: Sequence[F32] = ()) -> F32:
        """Return values of observations."""
        self.value_calls.append(len(obs))
        return self._values(obs, state)

    def _values(self, obs: NDArray[Any], state: Sequence[F32]) -> F32:
        values = self._value_of(obs)
        return values + state[0][:, 0] if state else values


class RecordedWeights:
    """Policy that remembers its weights, which are numbers."""

    def __init__(self) -> None:
        self.weights: dict[str, int] = {}

    def set_weights(self, weights: Any) -> None:
        self.weights = {name: int(array[0]) for name, array in weights.items()}

    def on_global_var_update(self, global_vars: Any) -> None:
        pass
