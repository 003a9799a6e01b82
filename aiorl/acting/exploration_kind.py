"""The interface of explorations, with what each kind may have: schedules, and uniform actions at first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.distributions import ActionDistribution
from aiorl.acting.schedules import Schedule
from aiorl.acting.uniform_actions import UniformActions

__all__ = ["Exploration", "Moment", "Points"]

F32 = NDArray[np.float32]
Points = float | Sequence[Sequence[float]]
"""A constant, or points [timestep, value] joined by straight lines."""


class Exploration(ABC):
    """Base class of explorations. N rows, P inputs of the distribution and K numbers of noise per row.

    A kind has noise of its own, and for a start of uniform actions, which each kind may have, theirs.

    Attributes:
        distribution: the policy's action distribution.
        noise_size: K.
        has_memory: what it does depends on what it did before, so it must be told which row is whose.
        holds_noise: but not where the rows stay the same: noise drawn for several steps of them has it all.
    """

    has_memory: ClassVar[bool] = False
    holds_noise: ClassVar[bool] = False

    def __init__(
        self,
        distribution: ActionDistribution,
        own_noise: int,
        *,
        random_timesteps: int = 0,
        schedules: Mapping[str, Points] | None = None,
    ) -> None:
        """Prepare noise, schedules and the uniform start.

        Args:
            distribution: the policy's action distribution.
            own_noise: numbers of noise a row that the kind takes itself.
            random_timesteps: timesteps during which actions are uniform.
            schedules: setting -> a constant, or points [timestep, value] joined by straight lines.

        Raises:
            ConfigError: invalid points of a schedule.
        """
        self.distribution = distribution
        self.uniform = UniformActions(distribution.action_space)
        self.noise_size = own_noise + self.uniform.noise_size
        self._own_noise = own_noise
        self._random_timesteps = random_timesteps
        self._schedules = {
            name: Schedule(points, key=f"exploration.{name}") for name, points in (schedules or {}).items()
        }

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Noise for `leading` choices, N of one step or T, N of several: float32 [*leading, K]."""
        return np.concatenate([self._draw(rng, *leading), self.uniform.draw_noise(rng, *leading)], axis=-1)

    def choose_into(
        self,
        inputs: F32,
        noise: F32,
        actions: NDArray[Any],
        logp: F32,
        *,
        timestep: int,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """Write actions and their log-probabilities.

        Args:
            inputs: [N, P] inputs of the distribution; where it has features, their shares behind them.
            noise: [N, K] of `draw_noise`.
            actions: [N, *action_shape], to be written.
            logp: [N], to be written.
            timestep: global timestep, for schedules.
            keys: what identifies each row from call to call, such as (episode id, agent id); None = its position, for
                which noise may have been drawn ahead.
        """
        own, uniform = noise[:, : self._own_noise], noise[:, self._own_noise :]
        if timestep < self._random_timesteps:
            self.uniform.choose_into(uniform, actions, logp, inputs)
        else:
            self._choose(inputs, Moment(own, uniform, timestep, keys), actions, logp)

    def figures(self, timestep: int) -> dict[str, float]:
        """Return the figures to report, such as the current epsilon."""
        return {name: schedule.value(timestep) for name, schedule in self._schedules.items()}

    def on_episode_start(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Called when an episode begins, before the callback `on_episode_start`."""
        return

    def on_episode_end(self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None) -> None:
        """Called when an episode has ended, before the callback `on_episode_end`."""
        return

    @abstractmethod
    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        """The kind's own noise: float32 [*leading, own_noise]."""

    @abstractmethod
    def _choose(self, inputs: F32, now: Moment, actions: NDArray[Any], logp: F32) -> None:
        """Write actions and their log-probabilities, once the uniform start is over."""


class Moment(NamedTuple):
    """Inputs of a choice other than the outputs of the network.

    Attributes:
        own: [N, own_noise] noise of the kind.
        uniform: noise of uniform actions.
        timestep: global timestep.
        keys: what identifies each row; None = its position, for which noise may have been drawn ahead.
    """

    own: F32
    uniform: F32
    timestep: int
    keys: Sequence[Hashable] | None
