"""Exploration: departures of actions from the network's preferences.

A policy without an exploration object samples from its action distribution, which is the fast path.
An exploration object replaces that step. Like sampling, it is a pure function of the network's
outputs and of noise drawn in advance, so that equal seeds give equal actions regardless of how rows
are batched. Two kinds keep a state for each row: Ornstein-Uhlenbeck noise, which is a process in
time, and state-dependent noise, which lasts for several steps.

Actions that the network's outputs forbid (`MASKED_LOGIT`) are never taken, not even at random.

Recorded log-probabilities are those of the exploring behaviour, if it has any. Noise added to a
deterministic policy has no useful density once it is clipped; its log-probability is recorded as 0.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces

from aiorl.acting.distributions import (
    MASKED_LOGIT,
    ActionDistribution,
    DiagGaussian,
    Space,
)
from aiorl.config.code import import_object, is_import_path, named_failures
from aiorl.data.actions import ActionLayout, leaf_spaces
from aiorl.data.columns import F32, F64, Array, Bools
from aiorl.data.spaces import SIMPLE_KINDS
from aiorl.errors import ConfigError, UnsupportedSpaceError, nearest


class UniformActions:
    """Uniform distribution over an action space; unbounded components are standard normal.

    Attributes:
        noise_size: K, noise numbers for each action.
    """

    def __init__(self, space: Space) -> None:
        """Prepare the distribution for an action space.

        Raises:
            UnsupportedSpaceError: when the space, or one inside it, has no uniform distribution
                here.
        """
        leaves = ActionLayout(space).leaves
        ranges = [_ranges(leaf) for leaf in leaves]
        self._choices = list(_choices_of(leaves))
        self._low = np.concatenate([low for low, _ in ranges])
        self._end = np.concatenate([end for _, end in ranges])
        self._is_whole = np.concatenate(
            [
                np.full(len(low), leaf.dtype is not None and leaf.dtype.kind != "f")
                for leaf, (low, _) in zip(leaves, ranges, strict=True)
            ]
        )
        self._is_bounded = np.isfinite(self._low) & np.isfinite(self._end)
        self.noise_size = len(self._low)
        self._span = np.where(self._is_bounded, self._end - self._low, 1.0)
        self._start = np.where(self._is_bounded, self._low, 0.0)
        self._logp = -float(np.log(self._span[self._is_bounded]).sum())

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw noise for `leading` choices: float32 [*leading, K] in [0, 1), or normal for
        unbounded components.
        """
        noise = rng.random((*leading, self.noise_size), dtype=np.float32)
        if not self._is_bounded.all():
            free = ~self._is_bounded
            noise[..., free] = rng.standard_normal((*leading, int(free.sum())), dtype=np.float32)
        return noise

    def choose_into(self, noise: F32, actions: Array, logp: F32, inputs: F32 | None = None) -> None:
        """Write the actions that noise [N, K] selects, and their log-probabilities.

        Args:
            noise: a result of `draw_noise`.
            actions: [N, *action_shape] in column form, overwritten.
            logp: [N], overwritten.
            inputs: [N, P] inputs of the policy's distribution, which exclude the actions that they
                forbid; None allows all actions.
        """
        values = self._start + self._span * noise
        whole = self._is_whole
        if whole.any():
            # never the end itself, whatever the rounding
            last = self._end[whole] - 1
            values[:, whole] = np.minimum(np.floor(values[:, whole]), last)
        logp[...] = self._logp
        if inputs is not None:
            allowed = inputs > 0.5 * MASKED_LOGIT
            if not allowed.all():
                self._choose_allowed(allowed, noise, values, logp)
        actions[...] = values.reshape(actions.shape)
        if not self._is_bounded.all():
            normal = noise[:, ~self._is_bounded]
            logp += (-0.5 * normal * normal - 0.5 * math.log(2.0 * math.pi)).sum(axis=1)

    def _choose_allowed(self, allowed: Bools, noise: F32, values: Array, logp: F32) -> None:
        """Replace the choices by choices among the allowed ones."""
        for choice in self._choices:
            is_allowed = allowed[:, choice.inputs]
            if choice.is_bit:  # 0 is always allowed
                is_allowed = np.concatenate([np.ones_like(is_allowed), is_allowed], axis=1)
            counts = np.maximum(np.count_nonzero(is_allowed, axis=1), 1)
            # index of the choice among the allowed ones, from 0, whatever the rounding
            number = np.minimum((noise[:, choice.position] * counts).astype(np.int64), counts - 1)
            # the value with this index is the first up to which more values are allowed
            num_allowed = np.add.accumulate(is_allowed, axis=1)
            value = (num_allowed > number[:, None]).argmax(axis=1)
            values[:, choice.position] = self._low[choice.position] + value
            # the caller has added the log-probability of one of all values
            logp += np.log(is_allowed.shape[1] / counts).astype(np.float32)


class _Choice(NamedTuple):
    """A number of an action that is one of several values.

    Attributes:
        position: its position in an action.
        inputs: its inputs of the distribution.
        is_bit: True if it is a bit, which has one input for two values.
    """

    position: int
    inputs: slice
    is_bit: bool


def _choices_of(leaves: Sequence[Space]) -> Iterator[_Choice]:
    """Yield the choices of an action in the order of their inputs."""
    position = 0
    start = 0
    for leaf in leaves:
        low, end = _ranges(leaf)
        if isinstance(leaf, spaces.Box):
            position += len(low)
            start += 2 * len(low)  # means and deviations
            continue
        is_bit = isinstance(leaf, spaces.MultiBinary)
        sizes = np.ones_like(low) if is_bit else end - low
        for size in sizes.astype(int).tolist():
            yield _Choice(position, slice(start, start + size), is_bit)
            position += 1
            start += size


def _ranges(leaf: Space) -> tuple[F64, F64]:
    """Return lower bound and upper end (exclusive for whole numbers) of each number of an
    action.
    """
    match leaf:
        case spaces.Discrete():
            low = np.array([leaf.start])
            end = np.array([leaf.start + leaf.n])
        case spaces.MultiDiscrete():
            low = leaf.start.ravel()
            end = (leaf.start + leaf.nvec).ravel()
        case spaces.MultiBinary():
            low = np.zeros(math.prod(leaf.shape))
            end = np.full(math.prod(leaf.shape), 2)
        case spaces.Box():
            low = leaf.low.ravel()
            end = leaf.high.ravel().astype(np.float64) + (leaf.dtype.kind != "f")
        case _:
            raise UnsupportedSpaceError("uniform exploration over", leaf, SIMPLE_KINDS)
    return low.astype(np.float64), end.astype(np.float64)


Points = float | Sequence[Sequence[float]]
"""A constant, or points [timestep, value] joined by straight lines."""


class Schedule:
    """Value over env steps: straight lines between given points, constant before the first and
    after the last.

    A schedule has no state: the value depends only on the step, so a resumed run continues
    correctly.

    Attributes:
        constant: the value of a schedule that never changes, else None.
    """

    __slots__ = ("_points", "constant")

    def __init__(self, points: Points, *, key: str = "schedule") -> None:
        """Use a constant, or points [env step, value] in increasing order of steps.

        Args:
            points: the constant or the points.
            key: dotted name of the setting, for errors.

        Raises:
            ConfigError: when there are no points, one isn't a pair of finite numbers, or the steps
                don't increase.
        """
        pairs = _pairs(points, key)
        if not pairs:
            raise ConfigError(
                f"{key} has no points.",
                key=key,
                value=points,
                hint="Give [[env step, value], ...].",
            )
        steps = [step for step, _ in pairs]
        if any(step >= next_step for step, next_step in pairwise(steps)):
            raise ConfigError(
                f"The env steps of {key} must increase: {steps}.", key=key, value=points
            )
        self._points = pairs
        self.constant = pairs[0][1] if len(pairs) == 1 else None

    def value(self, env_steps: int) -> float:
        """Return the value after ``env_steps`` env steps."""
        first_step, first_value = self._points[0]
        if env_steps < first_step:
            return first_value
        for (step, value), (next_step, next_value) in pairwise(self._points):
            if env_steps < next_step:
                share = (env_steps - step) / (next_step - step)
                return value + share * (next_value - value)
        return self._points[-1][1]

    @property
    def end(self) -> float:
        """Env steps after which the value stays constant."""
        return self._points[-1][0]

    @classmethod
    def of(cls, constant: float, points: Sequence[Sequence[float]] | None, *, key: str) -> Schedule:
        """Return the schedule of a setting: its points if there are any, else its constant.

        Args:
            constant: value if there are no points.
            points: [[env step, value], ...], or None.
            key: name of the setting of the points, for errors.
        """
        return cls(constant if points is None else points, key=key)


def _pairs(points: Points, key: str) -> list[tuple[float, float]]:
    if isinstance(points, int | float):
        return [(0.0, float(points))]
    for point in points:
        if len(point) != 2 or point[0] < 0 or not all(map(math.isfinite, point)):
            raise ConfigError(
                f"A point of {key} is [env step, value], not {list(point)!r}.", key=key, value=point
            )
    return [(float(step), float(value)) for step, value in points]


class Exploration(ABC):
    """Base class of explorations. N rows, P inputs of the distribution and K noise numbers per row.

    The noise consists of the kind's own numbers and those of `UniformActions`, because every kind
    can begin with uniform actions.

    Attributes:
        distribution: the policy's action distribution.
        uniform: uniform distribution over the same actions.
        noise_size: K.
        has_memory: True if a choice depends on earlier ones, so that rows need keys.
        holds_noise: True if rows that stay the same need no keys, because noise drawn for several
            steps covers the memory.
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
            own_noise: noise numbers per row for the kind itself.
            random_timesteps: timesteps during which actions are uniform.
            schedules: setting -> a constant, or points [timestep, value] joined by straight lines.

        Raises:
            ConfigError: when the points of a schedule are invalid.
        """
        self.distribution = distribution
        self.uniform = UniformActions(distribution.action_space)
        self.noise_size = own_noise + self.uniform.noise_size
        self._own_noise = own_noise
        self._random_timesteps = random_timesteps
        self._schedules = {
            name: Schedule(points, key=f"exploration.{name}")
            for name, points in (schedules or {}).items()
        }

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw noise in advance.

        Args:
            rng: generator of the noise.
            *leading: leading dimensions: N rows for one step, or T steps and N rows.

        Returns:
            Noise [*leading, K], float32.
        """
        return np.concatenate(
            [self._draw(rng, *leading), self.uniform.draw_noise(rng, *leading)], axis=-1
        )

    def choose_into(
        self,
        inputs: F32,
        noise: F32,
        actions: Array,
        logp: F32,
        *,
        timestep: int,
        keys: Sequence[Hashable] | None = None,
    ) -> None:
        """Write actions and their log-probabilities.

        Args:
            inputs: [N, P] float32 inputs of the distribution, followed by the features' shares if
                it has features.
            noise: [N, K] float32, a result of `draw_noise`.
            actions: [N, *action_shape], overwritten.
            logp: [N] float32, overwritten.
            timestep: global timestep, in env steps, for schedules.
            keys: identities of the rows across calls, for example (episode id, agent id); None
                identifies a row by its position, for which noise can be drawn in advance.
        """
        uniform_noise = noise[:, self._own_noise :]
        if timestep < self._random_timesteps:
            self.uniform.choose_into(uniform_noise, actions, logp, inputs)
            return
        now = Moment(noise[:, : self._own_noise], uniform_noise, timestep, keys)
        self._choose(inputs, now, actions, logp)

    def figures(self, timestep: int) -> dict[str, float]:
        """Return the figures to report at a global `timestep` in env steps, such as the current
        epsilon.
        """
        return {name: schedule.value(timestep) for name, schedule in self._schedules.items()}

    def on_episode_start(
        self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None
    ) -> None:
        """Run when an episode begins, before the callback `on_episode_start`.

        Args:
            policy: the policy that explores.
            environment: the BaseEnv.
            episode: the MultiAgentEpisode.
            tf_sess: always None; the name is RLlib's.
        """
        return

    def on_agent_end(self, episode: Any, agent_id: Hashable) -> None:
        """Run when an agent has left an episode that continues, after its last rows were taken.

        Args:
            episode: the MultiAgentEpisode.
            agent_id: the agent.
        """
        return

    def on_episode_end(
        self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None
    ) -> None:
        """Run when an episode has ended, before the callback `on_episode_end`.

        Args:
            policy: the policy that explores.
            environment: the BaseEnv.
            episode: the MultiAgentEpisode.
            tf_sess: always None; the name is RLlib's.
        """
        return

    @abstractmethod
    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw the kind's own noise: float32 [*leading, own_noise]."""

    @abstractmethod
    def _choose(self, inputs: F32, now: Moment, actions: Array, logp: F32) -> None:
        """Write actions and their log-probabilities after the uniform start."""


class Moment(NamedTuple):
    """Inputs of a choice apart from the outputs of the network.

    Attributes:
        own: [N, own_noise] noise of the kind itself.
        uniform: [N, ...] noise of uniform actions.
        timestep: global timestep.
        keys: identities of the rows; None identifies a row by its position, for which noise can be
            drawn in advance.
    """

    own: F32
    uniform: F32
    timestep: int
    keys: Sequence[Hashable] | None


_SEED_SIZE = 2
_SEED_BITS = 24


class GaussianNoise(Exploration):
    """The deterministic action plus normal noise, clipped to the bounds, optionally after a start
    of uniform actions.

    Source: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477.
    """

    def __init__(
        self,
        distribution: ActionDistribution,
        *,
        stddev: float = 0.1,
        scale: Points = 1.0,
        random_timesteps: int = 0,
    ) -> None:
        """Set the size of the noise.

        Args:
            distribution: a distribution over a Box.
            stddev: standard deviation; for bounded components as a share of half the range.
            scale: factor on it: a constant, or points [timestep, value].
            random_timesteps: timesteps during which actions are uniform.

        Raises:
            UnsupportedSpaceError: when actions are not numbers.
            ConfigError: when the points of a schedule are invalid.
        """
        space = distribution.action_space
        if not isinstance(space, spaces.Box):
            raise UnsupportedSpaceError(f"{type(self).__name__} exploration over", space, ["Box"])
        size = math.prod(space.shape)
        super().__init__(
            distribution, size, random_timesteps=random_timesteps, schedules={"scale": scale}
        )
        self._low = space.low
        self._high = space.high
        is_bounded = np.isfinite(space.low) & np.isfinite(space.high)
        # zeros in place of bounds that are infinite, because their difference is not a number
        high = np.where(is_bounded, space.high, 0)
        low = np.where(is_bounded, space.low, 0)
        half_range = np.where(is_bounded, 0.5 * (high - low), 1.0)
        self._stddev: F32 = (stddev * half_range).astype(np.float32)

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return rng.standard_normal((*leading, self._own_noise), dtype=np.float32)

    def _choose(self, inputs: F32, now: Moment, actions: Array, logp: F32) -> None:
        unit = self._unit_noise(now).reshape(actions.shape)
        shift = self._schedules["scale"].value(now.timestep) * self._stddev * unit
        shifted = self.distribution.deterministic(inputs) + shift
        actions[...] = np.clip(shifted, self._low, self._high)
        logp[...] = 0.0

    def _unit_noise(self, now: Moment) -> F32:
        """Return the noise [N, A] of this step, of unit size."""
        return now.own


class OrnsteinUhlenbeckNoise(GaussianNoise):
    """The deterministic action plus noise that is correlated in time, with a separate process for
    each row.

    ``x <- x - theta x + sigma N(0, 1)``, from 0; actions are shifted by ``scale * stddev * half
    range * x``. If rows are keyed by episode, each episode starts a new process.

    Attributes:
        processes: key of a row -> x [A] of its process.

    Source: Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971.
    """

    has_memory: ClassVar[bool] = True

    def __init__(
        self,
        distribution: ActionDistribution,
        *,
        theta: float = 0.15,
        sigma: float = 0.2,
        stddev: float = 1.0,
        scale: Points = 1.0,
        random_timesteps: int = 0,
    ) -> None:
        """Set the process's pull to 0 and its noise; other arguments as for GaussianNoise."""
        super().__init__(
            distribution, stddev=stddev, scale=scale, random_timesteps=random_timesteps
        )
        self._theta = theta
        self._sigma = sigma
        self.processes: dict[Hashable, F32] = {}

    def _unit_noise(self, now: Moment) -> F32:
        normal = now.own
        keys = now.keys or range(len(normal))
        zeros = np.zeros(normal.shape[1], np.float32)
        processes = [self.processes.get(key, zeros) for key in keys]
        # the shape is that of the noise even without rows
        current = np.array(processes, np.float32).reshape(normal.shape)
        following: F32 = (
            current * np.float32(1.0 - self._theta) + np.float32(self._sigma) * normal
        ).astype(np.float32)
        self.processes.update(zip(keys, following, strict=True))
        return following

    def on_agent_end(self, episode: Any, agent_id: Hashable) -> None:
        """Forget the agent's process."""
        self.processes.pop((episode.episode_id, agent_id), None)

    def on_episode_end(
        self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None
    ) -> None:
        """Forget the processes of the episode's rows."""
        _forget(self.processes, episode)


class StateDependentNoise(Exploration):
    """Actions of a Gaussian with noise that is a function of the state, the same function for
    several steps (gSDE).

    Each row has a matrix [F, A] of standard normal numbers for `sample_freq` steps. A step's noise
    is the product of this matrix and the features' shares in the deviations, which the network
    outputs. At any single state, the noise is standard normal, so log-probabilities are those of
    the distribution.

    The noise drawn is the seed of each row's matrix. A matrix is made when its seed first occurs,
    and kept until another seed follows. For rows that stay the same, seeds are drawn in advance:
    each step's noise names the current matrix. A row with a key uses the seed of its first step, so
    a row keyed by its episode has a new matrix in each episode.

    Attributes:
        matrix_by_key: key of a row -> its matrix [F * A], and the steps for which it is still valid.

    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719, section 3.
    """

    has_memory: ClassVar[bool] = True
    holds_noise: ClassVar[bool] = True

    distribution: DiagGaussian

    def __init__(
        self, distribution: ActionDistribution, *, sample_freq: int, random_timesteps: int = 0
    ) -> None:
        """Set the lifetime of matrices.

        Args:
            distribution: a Gaussian with features.
            sample_freq: steps of a row after which its matrix is drawn again, 1 or more.
            random_timesteps: timesteps during which actions are uniform.

        Raises:
            ConfigError: when the policy has no such distribution, or `sample_freq` is below 1.
        """
        if sample_freq < 1:
            raise ConfigError(
                f"exploration.sample_freq is {sample_freq}, expected 1 or more steps.",
                key="exploration.sample_freq",
                value=sample_freq,
            )
        if not isinstance(distribution, DiagGaussian) or not distribution.num_features:
            raise ConfigError(
                "exploration StateDependentNoise needs deviations that depend on the policy's"
                " features, which this policy does not have.",
                key="exploration.type",
                value="StateDependentNoise",
                hint=(
                    "Set use_sde: true, which works with built-in networks, or use another"
                    " exploration."
                ),
            )
        super().__init__(distribution, _SEED_SIZE, random_timesteps=random_timesteps)
        self._sample_freq = sample_freq
        self._matrix_size = distribution.num_features * distribution.size
        self._rng: np.random.Generator | None = None  # for seeds drawn in advance
        self._ahead = _no_seeds(0)  # seeds of rows that stay the same
        self._steps_ahead = 0  # steps for which these seeds are still valid
        self._seeds = _no_seeds(0)  # seeds of `_matrices`
        # matrices of rows that stay the same
        self._matrices: F32 = np.empty((0, self._matrix_size), np.float32)
        self.matrix_by_key: dict[Hashable, tuple[F32, int]] = {}

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        if len(leading) == 1:
            return _draw_seeds(rng, *leading)
        steps, rows = leading
        if self._rng is None or len(self._ahead) != rows:
            # a separate generator, so that the number of steps drawn at a time makes no difference
            self._rng = np.random.default_rng(rng.integers(np.iinfo(np.int64).max))
            self._ahead = _no_seeds(rows)
            self._steps_ahead = 0
        noise = np.empty((steps, rows, _SEED_SIZE), np.float32)
        step = 0
        while step < steps:
            if not self._steps_ahead:
                self._ahead = _draw_seeds(self._rng, rows)
                self._steps_ahead = self._sample_freq
            following = min(step + self._steps_ahead, steps)
            noise[step:following] = self._ahead
            self._steps_ahead -= following - step
            step = following
        return noise

    def _choose(self, inputs: F32, now: Moment, actions: Array, logp: F32) -> None:
        gaussian = self.distribution
        if now.keys is None:
            noise = gaussian.noise_of_state(inputs, self._matrices_of(now.own))
        else:
            noise = np.empty((len(inputs), gaussian.size), np.float32)
            for row, (key, seed) in enumerate(zip(now.keys, now.own, strict=True)):
                matrix = self._matrix_of(key, seed)
                noise[row] = gaussian.noise_of_state(inputs[row : row + 1], matrix)[0]
        gaussian.sample_into(inputs, noise, actions, logp)

    def _matrices_of(self, seeds: F32) -> F32:
        """Return the matrices [N, F * A] of seeds [N, 2]; a matrix is made only if its row has a
        new seed.
        """
        if len(seeds) != len(self._seeds):
            self._seeds = _no_seeds(len(seeds))
            self._matrices = np.empty((len(seeds), self._matrix_size), np.float32)
        for row in np.flatnonzero((seeds != self._seeds).any(axis=1)):
            _make_matrix(seeds[row], self._matrices[row])
        self._seeds[...] = seeds
        return self._matrices

    def _matrix_of(self, key: Hashable, seed: F32) -> F32:
        """Return the matrix [F * A] of a row: its current one or, if that has expired, a new one
        from ``seed``.
        """
        matrix, steps = self.matrix_by_key.get(key, (None, 0))
        if matrix is None or not steps:
            matrix = np.empty(self._matrix_size, np.float32)
            steps = self._sample_freq
            _make_matrix(seed, matrix)
        self.matrix_by_key[key] = matrix, steps - 1
        return matrix

    def on_agent_end(self, episode: Any, agent_id: Hashable) -> None:
        """Forget the agent's matrix."""
        self.matrix_by_key.pop((episode.episode_id, agent_id), None)

    def on_episode_end(
        self, policy: Any, environment: Any = None, episode: Any = None, tf_sess: Any = None
    ) -> None:
        """Forget the matrices of the episode's rows."""
        _forget(self.matrix_by_key, episode)


def _draw_seeds(rng: np.random.Generator, rows: int) -> F32:
    """Draw seeds [N, 2] of matrices: whole numbers that float32 represents exactly."""
    return rng.integers(1 << _SEED_BITS, size=(rows, _SEED_SIZE)).astype(np.float32)


def _no_seeds(rows: int) -> F32:
    """Return seeds [N, 2] that are equal to no seed."""
    return np.full((rows, _SEED_SIZE), np.nan, np.float32)


def _make_matrix(seed: F32, matrix: F32) -> None:
    """Fill a matrix with the standard normal numbers of its seed."""
    np.random.default_rng(seed.astype(np.int64)).standard_normal(out=matrix, dtype=np.float32)


def _forget(memory: dict[Hashable, Any], episode: Any) -> None:
    """Delete the entries of an episode's rows."""
    episode_id = getattr(episode, "episode_id", None)
    if episode_id is not None:
        for key in [*memory]:
            if isinstance(key, tuple) and key[0] == episode_id:
                del memory[key]


_APEX_BASE = 0.4
_APEX_EXPONENT = 7.0
_SHARES_OF_ANY = 8
_PLAIN = "StochasticSampling"


class StochasticSampling(Exploration):
    """Samples from the distribution; without a uniform start it is the same as having no
    exploration object.
    """

    def __init__(self, distribution: ActionDistribution, *, random_timesteps: int = 0) -> None:
        """Set the number of timesteps during which actions are uniform."""
        super().__init__(distribution, distribution.noise_size, random_timesteps=random_timesteps)

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return self.distribution.draw_noise(rng, *leading)

    def _choose(self, inputs: F32, now: Moment, actions: Array, logp: F32) -> None:
        self.distribution.sample_into(inputs, now.own, actions, logp)


class RandomExploration(Exploration):
    """Uniform actions; unbounded components are standard normal."""

    def __init__(self, distribution: ActionDistribution) -> None:
        """Use a policy's distribution; there are no settings."""
        super().__init__(distribution, 0)

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return np.empty((*leading, 0), np.float32)

    def _choose(self, inputs: F32, now: Moment, actions: Array, logp: F32) -> None:
        self.uniform.choose_into(now.uniform, actions, logp, inputs)


class EpsilonGreedy(Exploration):
    """The best action or, with probability epsilon, a uniform one.

    The inputs of the distribution are logits or action values.
    """

    def __init__(
        self, distribution: ActionDistribution, *, epsilon: Points = ((0, 1.0), (10_000, 0.02))
    ) -> None:
        """Set epsilon: a constant, or points [timestep, value] joined by straight lines.

        Raises:
            UnsupportedSpaceError: when actions are not choices.
            ConfigError: when the points of a schedule are invalid, or a value is outside of [0, 1].
        """
        space = distribution.action_space
        kinds = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        if not all(isinstance(leaf, kinds) for leaf in leaf_spaces(space)):
            raise UnsupportedSpaceError(
                "epsilon-greedy exploration over", space, [kind.__name__ for kind in kinds]
            )
        super().__init__(distribution, 1, schedules={"epsilon": epsilon})
        values = [epsilon] if isinstance(epsilon, int | float) else [value for _, value in epsilon]
        if not all(0 <= value <= 1 for value in values):
            raise ConfigError(
                f"exploration.epsilon must be probabilities, not {epsilon!r}.",
                key="exploration.epsilon",
                value=epsilon,
            )

    def _draw(self, rng: np.random.Generator, *leading: int) -> F32:
        return rng.random((*leading, 1), dtype=np.float32)

    def _choose(self, inputs: F32, now: Moment, actions: Array, logp: F32) -> None:
        epsilon = self._schedules["epsilon"].value(now.timestep)
        greedy = self.distribution.deterministic(inputs)
        uniform = np.empty_like(greedy)
        self.uniform.choose_into(now.uniform, uniform, logp, inputs)
        # the uniform choice can be the best action, too
        probability = epsilon * np.exp(logp.astype(np.float64))
        explores = now.own[:, 0] < epsilon
        chosen = greedy.copy()
        chosen[explores] = uniform[explores]
        actions[...] = chosen
        is_greedy = (chosen == greedy).reshape(len(chosen), -1).all(axis=1)
        logp[...] = np.log(probability + (1.0 - epsilon) * is_greedy)


class PerWorkerEpsilonGreedy(EpsilonGreedy):
    """Epsilon-greedy with a different constant epsilon for each worker.

    Source: Horgan et al. 2018, https://arxiv.org/abs/1803.00933, section 4.1.
    """

    def __init__(
        self, distribution: ActionDistribution, *, worker_index: int = 0, num_workers: int = 0
    ) -> None:
        """Set epsilon from the worker's index; see `worker_epsilon`."""
        super().__init__(distribution, epsilon=worker_epsilon(worker_index, num_workers))


def worker_epsilon(worker_index: int, num_workers: int) -> float:
    """Return Ape-X's epsilon of a worker: 0.4 for the first, 0.4^8 for the last, 0 for the
    learner's own worker.

    Args:
        worker_index: 0 for the learner's own worker, else from 1.
        num_workers: number of remote workers; the index of a late joiner beyond it wraps around to
            1. With 0, the number is unknown, and the shares of eight workers are used.
    """
    if worker_index < 1:
        return 0.0
    num_shares = num_workers or _SHARES_OF_ANY
    position = (worker_index - 1) % num_shares
    return float(_APEX_BASE ** (1.0 + _APEX_EXPONENT * position / max(num_shares - 1, 1)))


EXPLORATIONS: dict[str, type[Exploration]] = {
    "StochasticSampling": StochasticSampling,
    "EpsilonGreedy": EpsilonGreedy,
    "PerWorkerEpsilonGreedy": PerWorkerEpsilonGreedy,
    "GaussianNoise": GaussianNoise,
    "OrnsteinUhlenbeckNoise": OrnsteinUhlenbeckNoise,
    "StateDependentNoise": StateDependentNoise,
    "Random": RandomExploration,
}
"""Kinds of exploration by name."""


def exploration_has_memory(settings: str | Mapping[str, Any] | None) -> bool:
    """Return whether the configured exploration needs keys of rows, even for the same rows in
    succession.

    False without exploration, and for kinds that keep their memory in noise drawn for all steps in
    advance.
    """
    if settings is None:
        return False
    name = settings if isinstance(settings, str) else settings.get("type", _PLAIN)
    kind = _kind_of(name)
    return kind.has_memory and not kind.holds_noise


def _kind_of(name: Any) -> type[Exploration]:
    """Return the exploration class of a name in EXPLORATIONS, or of an import path.

    Raises:
        ConfigError: when there is none.
    """
    if isinstance(name, str) and name in EXPLORATIONS:
        return EXPLORATIONS[name]
    if not isinstance(name, str) or not is_import_path(name):
        raise ConfigError(
            f"exploration is {name!r}, expected one of {', '.join(EXPLORATIONS)}, or the import"
            " path of an Exploration class, 'package.module:Name'.",
            key="exploration.type",
            value=name,
            hint=nearest(str(name), EXPLORATIONS).strip(),
        )
    kind = import_object(name, key="exploration.type")
    if not (isinstance(kind, type) and issubclass(kind, Exploration)):
        raise ConfigError(
            f"exploration is {name!r}, expected a subclass of aiorl.Exploration.",
            key="exploration.type",
            value=name,
        )
    return kind


def make_exploration(
    settings: str | Mapping[str, Any] | None,
    distribution: ActionDistribution,
    *,
    worker_index: int = 0,
    num_workers: int = 0,
) -> Exploration | None:
    """Make the configured exploration object.

    Args:
        settings: a name in EXPLORATIONS, the import path of a class, or a mapping with either of
            these under "type" and the kind's own settings. None and plain stochastic sampling need
            no object.
        distribution: the policy's action distribution.
        worker_index: the worker's index, for kinds that differ between workers.
        num_workers: number of remote workers.

    Raises:
        ConfigError: when a kind or setting is unknown.
        UnsupportedSpaceError: when the kind does not support the action space.
    """
    if settings is None:
        return None
    arguments = {"type": settings} if isinstance(settings, str) else dict(settings)
    name = arguments.pop("type", _PLAIN)
    kind = _kind_of(name)
    if name == _PLAIN and not arguments.get("random_timesteps"):
        arguments.pop("random_timesteps", None)
        if not arguments:
            return None
    parameters = inspect.signature(kind).parameters
    of_worker = {"worker_index": worker_index, "num_workers": num_workers}
    arguments = {key: value for key, value in of_worker.items() if key in parameters} | arguments
    what = f"exploration {name!r}"
    exploration: Exploration = named_failures(kind, what, "exploration")(distribution, **arguments)
    if name not in EXPLORATIONS:
        # failures in a user's class name the setting, too, not only those of its constructor
        for method_name in ("draw_noise", "choose_into"):
            method = getattr(exploration, method_name)
            method = named_failures(method, f"{what}: {method_name}", "exploration")
            setattr(exploration, method_name, method)
    return exploration
