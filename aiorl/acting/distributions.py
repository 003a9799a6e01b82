"""Action distributions on NumPy, for sampling at workers.

A distribution is made once for an action space and holds no state. It reads its parameters from the
rows of ``inputs`` [N, P], the acting graph's output:

- Categorical: A logits.
- Greedy: the values of A actions.
- MultiCategorical: the logits of each component, one component after the other.
- Bernoulli: for each bit, the logit of being 1.
- DiagGaussian, ScaledGaussian and SquashedGaussian: A means, then A logarithms of standard
  deviations, clamped to [LOG_STD_MIN, LOG_STD_MAX]. ScaledGaussian scales its samples to the range
  of the space, and SquashedGaussian maps them by tanh into its bounds.

An input of MASKED_LOGIT forbids its action (for a bit: being 1). A forbidden action is never
sampled, is not the mode, and adds exactly nothing to entropy and divergence. Networks output it for
actions that an action mask forbids.

Sampling is a pure function of inputs and noise. Noise is drawn in advance for many steps together
(`draw_noise`), which is both cheaper and exactly reproducible; each distribution defines the
meaning of its noise numbers. The TensorFlow counterpart of this module is
`aiorl.learning.models.distributions`. Distributions over Tuple and Dict spaces consist of the other
ones (`Composite`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from gymnasium import spaces

from aiorl.data.actions import ActionLayout, leaf_spaces
from aiorl.data.columns import F32, F64, I64, Array, Bools
from aiorl.data.spaces import KINDS
from aiorl.errors import ConfigError, PolicyError, UnsupportedSpaceError

Space = spaces.Space[Any]

MASKED_LOGIT = -1e30
"""Logit of forbidden actions and of padding; gives probability 0, and 0 * logit is still 0."""


class ActionDistribution(ABC):
    """Base class of action distributions. N rows, P inputs and K noise numbers per row.

    Attributes:
        name: key in DISTRIBUTIONS.
        over: kinds of action spaces that it supports.
        action_space: single-environment action space.
        num_inputs: P.
        noise_size: K.
        action_shape: shape of one action.
        action_dtype: dtype of actions, that of the space.
        num_features: F, features that a network outputs along with the inputs (see `DiagGaussian`);
            0 for none.
        logp_is_apart: True if `choose_into` is cheaper than `sample_into`, and `logp` of its
            actions is equal to the bit.
    """

    name: ClassVar[str]
    over: ClassVar[tuple[type[Space], ...]]
    logp_is_apart: ClassVar[bool] = False
    num_features: int = 0

    def __init__(self, action_space: Space, num_inputs: int, noise_size: int) -> None:
        """Describe the distribution.

        Args:
            action_space: single-environment action space.
            num_inputs: P.
            noise_size: K, random numbers in a row.
        """
        self.action_space = action_space
        self.num_inputs = num_inputs
        self.noise_size = noise_size
        self.action_shape: tuple[int, ...] = tuple(action_space.shape or ())
        self.action_dtype: np.dtype[Any] = np.dtype(action_space.dtype)

    @property
    def num_outputs(self) -> int:
        """Numbers that a network outputs for acting per row, the inputs first."""
        return self.num_inputs

    @property
    def choice_inputs(self) -> I64:
        """[M]: inputs that have an entry in an action mask, in the order of the entries; by default
        all.
        """
        return np.arange(self.num_inputs)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Return noise for `leading` (for example T, N) samples, drawn from an `rng`: float32
        [*leading, K], by default uniform in [0, 1).
        """
        return rng.random((*leading, self.noise_size), dtype=np.float32)

    @abstractmethod
    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Write actions and their log-probabilities.

        Args:
            inputs: [N, P].
            noise: [N, K].
            actions: [N, *action_shape], written.
            logp: [N], written.
        """

    def choose_into(self, inputs: F32, noise: F32, actions: Array) -> None:
        """Write the same actions as `sample_into`; see `ActionDistribution.sample_into`."""
        self.sample_into(inputs, noise, actions, np.empty(len(inputs), np.float32))

    @abstractmethod
    def deterministic(self, inputs: F32) -> Array:
        """Return the mode for `inputs` [N, P] (for the squashed Gaussian, the squashed mean), [N,
        *action_shape].
        """

    @abstractmethod
    def logp(self, inputs: F32, actions: Array) -> F32:
        """Return the log-probability (or log-density) of `actions` [N, *action_shape] for `inputs`
        [N, P]: float32 [N].
        """

    def action_values(self, inputs: F32, actions: Array) -> F32:
        """Return the values of actions, if the inputs are values of actions.

        Args:
            inputs: [..., P].
            actions: [..., *action_shape].

        Returns:
            float32 [...].

        Raises:
            PolicyError: when the inputs are not values, as for most distributions.
        """
        raise PolicyError(
            f"a {self.name} distribution has no values of actions; use a network of Q values"
        )

    def sample_with_logp(self, inputs: F32, noise: F32) -> tuple[Array, F32]:
        """Return actions [N, *action_shape] and their log-probabilities [N];
        see `ActionDistribution.sample_into`.
        """
        rows = len(inputs)
        actions = np.empty((rows, *self.action_shape), self.action_dtype)
        logp = np.empty(rows, np.float32)
        self.sample_into(inputs, noise, actions, logp)
        return actions, logp

    def sample(self, inputs: F32, rng: np.random.Generator) -> Array:
        """Return actions [N, *action_shape] for `inputs` [N, P], with noise drawn now from an
        `rng`.
        """
        return self.sample_with_logp(inputs, self.draw_noise(rng, len(inputs)))[0]

    def _as_actions(self, numbers: Array) -> Array:
        """Return N actions of one space, given as numbers [N, A], in their shape and dtype."""
        return numbers.astype(self.action_dtype).reshape(-1, *self.action_shape)


LOG_STD_MIN = -20.0
LOG_STD_MAX = 2.0
EDGE = 2.0**-24
"""Smallest distance of a squashed action from its bounds for logp, as a share of their range."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def _has_bounds(space: spaces.Box) -> bool:
    """Return whether actions can be squashed into the bounds; some spaces use float32's limits for
    no bounds.
    """
    with np.errstate(over="ignore"):
        double_range = 2.0 * (space.high - space.low).astype(np.float32)
    return space.is_bounded("both") and bool(np.isfinite(double_range).all())


class DiagGaussian(ActionDistribution):
    """Independent normal components of a Box, unbounded; the code that steps the environment clips
    them.

    Attributes:
        size: A, numbers in an action.
        num_features: F, if noise is a function of the state (see `noise_of_state`); 0 if each step
            has independent noise.
    """

    name = "diag_gaussian"
    over = (spaces.Box,)

    def __init__(self, action_space: Any, num_features: int = 0) -> None:
        if action_space.dtype.kind != "f":
            raise UnsupportedSpaceError(
                "a Gaussian distribution over", action_space, ["Box of floats"]
            )
        self.size: int = math.prod(action_space.shape)
        self.num_features = num_features
        super().__init__(action_space, num_inputs=2 * self.size, noise_size=self.size)

    def with_features(self, num_features: int) -> Self:
        """Return the same distribution with features."""
        return type(self)(self.action_space, num_features)

    @property
    def num_outputs(self) -> int:
        """See the base class; the features' shares in the deviations, F by A, follow the inputs."""
        return self.num_inputs + self.num_features * self.size

    @property
    def choice_inputs(self) -> I64:
        """Empty, because actions are numbers, not choices."""
        return np.zeros(0, np.int64)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw standard normal numbers, one per component."""
        return rng.standard_normal((*leading, self.noise_size), dtype=np.float32)

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Write mean plus standard deviation times noise."""
        mean, log_std = self._parameters(inputs)
        actions[...] = (mean + np.exp(log_std) * noise).reshape(actions.shape)
        density = noise * noise
        density *= -0.5
        density -= log_std
        np.add.reduce(density, axis=1, out=logp)
        logp -= self.size * _HALF_LOG_2PI

    def noise_of_state(self, outputs: F32, matrices: F32) -> F32:
        """Return noise [N, A] for `sample_into` that is linear in the features, and so equal at
        equal states.

        Args:
            outputs: [N, P + F * A] outputs of the network; the features' shares in the deviations
                follow the inputs.
            matrices: [N, F * A] standard normal numbers. The noise is then standard normal, too,
                because the squares of the shares sum to 1.

        Returns:
            float32 [N, A].

        Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719, eq. 7 to 9, over the
            deviation.
        """
        shape = (-1, self.num_features, self.size)
        shares = outputs[:, self.num_inputs :].reshape(shape)
        noise: F32 = np.einsum("nfa,nfa->na", shares, matrices.reshape(shape))
        return noise

    def deterministic(self, inputs: F32) -> Array:
        """Return the mean."""
        return self._as_actions(inputs[:, : self.size])

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class."""
        values = actions.reshape(len(inputs), -1).astype(np.float32)
        return self._normal_logp(inputs, values)

    def _parameters(self, inputs: F32) -> tuple[F32, F32]:
        """Return means and logarithms of standard deviations, both [N, A]."""
        log_std: F32 = np.maximum(inputs[:, self.size : 2 * self.size], LOG_STD_MIN)
        np.minimum(log_std, LOG_STD_MAX, out=log_std)
        return inputs[:, : self.size], log_std

    def _normal_logp(self, inputs: F32, values: F32) -> F32:
        mean, log_std = self._parameters(inputs)
        distance = (values - mean) * np.exp(-log_std)
        density = -0.5 * distance * distance - log_std - _HALF_LOG_2PI
        total: F32 = density.sum(axis=1)
        return total


class BoxScale:
    """Units of the numbers of a Box: the middle of the range is 0, and half the range is 1.

    A number without a finite range keeps its own unit, and so does the unit of one whose bounds are
    equal.

    Attributes:
        size: A, numbers of an action.
        centre: [A], action at 0, in the dtype of computations with actions.
        half_range: [A], length of a unit, likewise.
        log_volume: sum of the logarithms of the units: the log-density over units minus that over
            actions.
        is_finite: [A], True for numbers with a finite range.
        is_identity: True if actions are in these units already.
    """

    def __init__(self, space: spaces.Box) -> None:
        """Derive the units from the bounds; float32 must be able to hold twice the range of a
        scaled number.
        """
        low = space.low.astype(np.float64).ravel()
        high = space.high.astype(np.float64).ravel()
        with np.errstate(over="ignore", invalid="ignore"):
            self.is_finite = np.isfinite((2.0 * (high - low)).astype(np.float32))
            # halves first, because the sum and the range of large bounds would overflow
            middle = 0.5 * low + 0.5 * high
            half = 0.5 * high - 0.5 * low
        centre = np.where(self.is_finite, middle, 0.0)
        half_range = np.where(self.is_finite & (high > low), half, 1.0)
        dtype = np.result_type(space.dtype, np.float32)  # float16 would round twice
        self.size = len(low)
        self.centre: Array = centre.astype(dtype)
        self.half_range: Array = half_range.astype(dtype)
        self.log_volume = float(np.log(half_range).sum())
        self.is_identity = bool((self.centre == 0.0).all() and (self.half_range == 1.0).all())

    def to_actions(self, units: Array) -> Array:
        """Return the actions [N, A] at numbers [N, A] in units."""
        return units * self.half_range + self.centre

    def to_units(self, actions: Array) -> F32:
        """Return actions [N, ...] in units, [N, A]."""
        flat = actions.reshape(len(actions), self.size)
        return ((flat - self.centre) / self.half_range).astype(np.float32)


class ScaledGaussian(DiagGaussian):
    """Independent normal components in the units of `BoxScale`, not clipped.

    A mean of 0 is the middle of a component's range, and a standard deviation of 1 is half the
    range. Actions and their densities are in the units of the space.

    Attributes:
        scale: units of the components.
    """

    name = "scaled_gaussian"

    def __init__(self, action_space: Any, num_features: int = 0) -> None:
        super().__init__(action_space, num_features)
        self.scale = BoxScale(action_space)

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Write the scaled sample, and its log-density over the space."""
        units = np.empty((len(inputs), self.size), np.float32)
        super().sample_into(inputs, noise, units, logp)
        actions[...] = self.scale.to_actions(units).reshape(actions.shape)
        logp -= self.scale.log_volume

    def deterministic(self, inputs: F32) -> Array:
        """Return the scaled mean."""
        return self._as_actions(self.scale.to_actions(inputs[:, : self.size]))

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class."""
        density = self._normal_logp(inputs, self.scale.to_units(actions))
        return density - self.scale.log_volume


class SquashedGaussian(DiagGaussian):
    """A normal variable u mapped into the bounds of a Box: low + (high - low) * (tanh(u) + 1) / 2.

    The log-density is computed from the stored action by inverting the map, not from u, so that a
    learner that sees only the action computes the same number. Let p and q be the distances from
    the lower and the upper bound as shares of the range, each exact near its own bound, and at
    least EDGE. Then u = (log p - log q) / 2 and log |da/du| = log(2 (high - low)) + log p + log q.
    """

    name = "squashed_gaussian"

    def __init__(self, action_space: Any, num_features: int = 0) -> None:
        super().__init__(action_space, num_features)
        if not _has_bounds(action_space):
            raise UnsupportedSpaceError(
                "a squashed Gaussian over",
                action_space,
                ["Box of floats bounded on both sides, within less than float32's range"],
                "Bound the space or use the unsquashed distribution.",
            )
        self.low: F32 = action_space.low.astype(np.float32).ravel()
        self.high: F32 = action_space.high.astype(np.float32).ravel()
        self.span: F32 = self.high - self.low
        if not (self.span > 0).all():
            raise ConfigError(
                f"the action space {action_space} has a component without range.",
                value=action_space,
            )
        self._log_2span: F32 = np.log(2.0 * self.span)

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Write the squashed sample, and its log-density as computed by `logp`."""
        mean, log_std = self._parameters(inputs)
        squashed = self._squash(mean + np.exp(log_std) * noise)
        actions[...] = squashed.reshape(actions.shape)
        logp[...] = self._squashed_logp(inputs, squashed)

    def deterministic(self, inputs: F32) -> Array:
        """Return the squashed mean."""
        return self._as_actions(self._squash(inputs[:, : self.size]))

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class; actions beyond the bounds count as on the bounds."""
        squashed = actions.reshape(len(inputs), -1).astype(np.float32)
        return self._squashed_logp(inputs, squashed)

    def _squash(self, values: Array) -> F32:
        share = 0.5 * (np.tanh(values) + 1.0)
        # rounding can exceed the upper bound
        return np.minimum(self.low + self.span * share, self.high)

    def _squashed_logp(self, inputs: F32, squashed: F32) -> F32:
        share_below = (squashed - self.low) / self.span
        share_above = (self.high - squashed) / self.span
        log_p = np.log(np.maximum(share_below, EDGE))
        log_q = np.log(np.maximum(share_above, EDGE))
        log_slope: F32 = (log_p + log_q + self._log_2span).sum(axis=1)
        return self._normal_logp(inputs, 0.5 * (log_p - log_q)) - log_slope


_ZERO = np.float32(0.0)


class Categorical(ActionDistribution):
    """One of A actions, numbered from the start of a Discrete space; inputs are A logits.

    Attributes:
        start: number of the first action.
    """

    name = "categorical"
    over = (spaces.Discrete,)

    def __init__(self, action_space: Any) -> None:
        """Choose among the actions of a Discrete `action_space`."""
        super().__init__(action_space, num_inputs=int(action_space.n), noise_size=1)
        self.start = int(action_space.start)

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Sample by inversion: the first action with a cumulative probability above the uniform
        number; see `ActionDistribution.sample_into`.
        """
        choice, log_probability = _choose(inputs, noise)
        if self.start:
            choice += self.start
        actions[...] = choice
        logp[...] = log_probability

    def deterministic(self, inputs: F32) -> Array:
        """Return the likeliest action; see `ActionDistribution.deterministic`."""
        actions: Array = inputs.argmax(axis=1)
        if self.start:
            actions += self.start
        return actions.astype(self.action_dtype, copy=False)

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class; see `ActionDistribution.logp`."""
        index = actions.astype(np.int64) - self.start
        return _entry_of_each(_log_softmax(inputs), index)

    def probabilities(self, inputs: F32) -> F64:
        """Return the probability of each action, [N, A]; see `ActionDistribution.deterministic`."""
        shifted = inputs.astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        np.exp(shifted, out=shifted)
        shifted /= shifted.sum(axis=1, keepdims=True)
        return shifted


class TwoClassCategorical(Categorical):
    """Categorical with A = 2, computed in fewer steps: only the difference of the logits
    matters.
    """

    logp_is_apart = True

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw standard logistic numbers: log(u / (1 - u)) of a uniform u."""
        return rng.logistic(size=(*leading, 1)).astype(np.float32)

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Choose the second action if the difference of the logits exceeds the logistic number."""
        logp[...] = _two_class_logp(*self._choose_into(inputs, noise, actions))

    def choose_into(self, inputs: F32, noise: F32, actions: Array) -> None:
        """See the base class."""
        self._choose_into(inputs, noise, actions)

    def _choose_into(self, inputs: F32, noise: F32, actions: Array) -> tuple[F32, Bools]:
        """Choose actions; return the differences of the logits [N], and True for each second action
        [N].
        """
        difference: F32 = inputs[:, 1] - inputs[:, 0]
        is_second: Bools = difference > noise[:, 0]
        actions[...] = is_second
        if self.start:
            actions += self.start
        return difference, is_second

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class."""
        return _two_class_logp(inputs[:, 1] - inputs[:, 0], actions != self.start)


class Greedy(Categorical):
    """The action of A with the largest value, without randomness; inputs are the values of A
    actions.

    Exploration departs from it (`aiorl.acting.exploration`). Of several equally good actions, the
    first one is chosen.
    """

    name = "greedy"

    def __init__(self, action_space: Any) -> None:
        """Choose among the actions of a Discrete `action_space`."""
        super().__init__(action_space)
        self.noise_size = 0

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Write the best action, with probability 1; see `ActionDistribution.sample_into`."""
        actions[...] = self.deterministic(inputs)
        logp[...] = 0.0

    def logp(self, inputs: F32, actions: Array) -> F32:
        """Return 0 for the best action; for all others a number so low that their probability is 0;
        see `ActionDistribution.logp`.
        """
        is_best = self.deterministic(inputs) == actions
        return np.where(is_best, _ZERO, np.float32(MASKED_LOGIT))

    def action_values(self, inputs: F32, actions: Array) -> F32:
        """Return the inputs of the actions; see `ActionDistribution.action_values`."""
        return _entry_of_each(inputs, actions.astype(np.int64) - self.start)

    def probabilities(self, inputs: F32) -> F64:
        """Return 1 for the best action, and 0 for the others, [N, A];
        see `ActionDistribution.deterministic`.
        """
        one_hot: F64 = np.eye(self.num_inputs)[inputs.argmax(axis=1)]
        return one_hot


class MultiCategorical(ActionDistribution):
    """Independent choices, one per component of a MultiDiscrete space.

    Attributes:
        sizes: number of actions of each component.
        start: number of each component's first action.
        positions: [P], position of each logit among components padded to the widest one.
    """

    name = "multi_categorical"
    over = (spaces.MultiDiscrete,)

    def __init__(self, action_space: Any) -> None:
        self.sizes: I64 = action_space.nvec.astype(np.int64).ravel()
        super().__init__(action_space, num_inputs=int(self.sizes.sum()), noise_size=len(self.sizes))
        self.start: I64 = action_space.start.astype(np.int64).ravel()
        self._widest = int(self.sizes.max())
        self.positions: I64 = np.concatenate(
            [
                component * self._widest + np.arange(size)
                for component, size in enumerate(self.sizes)
            ]
        )

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Sample each component by inversion, as in `Categorical`."""
        logits = self._padded(inputs).reshape(-1, self._widest)
        choice, log_probability = _choose(logits, noise.reshape(-1, 1))
        components = choice.reshape(len(inputs), -1) + self.start
        actions[...] = components.reshape(actions.shape)
        np.add.reduce(log_probability.reshape(len(inputs), -1), axis=1, out=logp)

    def deterministic(self, inputs: F32) -> Array:
        """Return the likeliest action of each component."""
        return self._as_actions(self._padded(inputs).argmax(axis=2) + self.start)

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class."""
        index = actions.reshape(len(inputs), -1).astype(np.int64) - self.start
        total: F32 = _entry_of_each(_log_softmax(self._padded(inputs)), index).sum(axis=1)
        return total

    def _padded(self, inputs: F32) -> F32:
        """Return logits as [N, components, widest]."""
        rows = len(inputs)
        components = len(self.sizes)
        if self.num_inputs == components * self._widest:
            return inputs.reshape(rows, components, self._widest)
        padded: F32 = np.full((rows, components * self._widest), MASKED_LOGIT, np.float32)
        padded[:, self.positions] = inputs
        return padded.reshape(rows, components, self._widest)


class Bernoulli(ActionDistribution):
    """Independent bits of a MultiBinary space; inputs are the logits of being 1."""

    name = "bernoulli"
    over = (spaces.MultiBinary,)

    def __init__(self, action_space: Any) -> None:
        size = math.prod(action_space.shape)
        super().__init__(action_space, num_inputs=size, noise_size=size)

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Set each bit to 1 if its probability exceeds the uniform number."""
        bits = noise < _sigmoid(inputs)
        actions[...] = bits.reshape(actions.shape)
        logp[...] = _bernoulli_logp(inputs, bits)

    def deterministic(self, inputs: F32) -> Array:
        """Return the likelier value of each bit."""
        return self._as_actions(inputs > 0)

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class."""
        return _bernoulli_logp(inputs, actions.reshape(len(inputs), -1) != 0)


def _entry_of_each(values: F32, index: I64) -> F32:
    """Return the entry [...] of each row of values [..., A] at an index [...]."""
    entries: F32 = np.take_along_axis(values, index[..., None], axis=-1)[..., 0]
    return entries


def _two_class_logp(difference: F32, is_second: Array) -> F32:
    """Return -log(1 + exp(-d)) for the second action and -log(1 + exp(d)) for the first."""
    logp = np.where(is_second, -difference, difference)
    np.logaddexp(logp, _ZERO, out=logp)
    return np.negative(logp, out=logp)


def _choose(logits: F32, uniform: F32) -> tuple[I64, F32]:
    """Return choices [R] and their log-probabilities [R], for logits [R, A] and uniform numbers [R,
    1] below 1.

    The product of a uniform float32 below 1 and the total stays below the total. A choice is
    therefore always found, and never one of probability 0.
    """
    shifted = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
    cumulative = np.add.accumulate(np.exp(shifted), axis=1)
    total = cumulative[:, -1:]
    choice = (cumulative <= uniform * total).argmin(axis=1)
    chosen = shifted[np.arange(len(choice)), choice]
    chosen -= np.log(total[:, 0])
    return choice, chosen


def _sigmoid(logits: F32) -> F32:
    result: F32 = 0.5 * (np.tanh(0.5 * logits) + 1.0)
    return result


def _bernoulli_logp(logits: F32, bits: Bools) -> F32:
    total: F32 = -np.logaddexp(_ZERO, np.where(bits, -logits, logits)).sum(axis=1)
    return total


def _log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: F32 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


class CompositePart(NamedTuple):
    """One component.

    Attributes:
        distribution: distribution over the component.
        inputs: its columns among the inputs.
        noise: its columns among the noise.
        actions: its columns among the flat actions.
    """

    distribution: ActionDistribution
    inputs: slice
    noise: slice
    actions: slice


class Composite(ActionDistribution):
    """Independent components; inputs, noise and actions are concatenated in the order of the
    components.

    Actions are in column form (`aiorl.data.actions`), a flat row for each.

    Attributes:
        layout: layout of the components in a row.
        parts: the components, in order.
    """

    name = "composite"
    over = (spaces.Tuple, spaces.Dict)
    is_squashed: ClassVar[bool] = False
    """True if Boxes are squashed into their bounds."""
    is_scaled: ClassVar[bool] = False
    """True if Boxes are scaled to their ranges."""

    def __init__(self, action_space: Space) -> None:
        self.layout = ActionLayout(action_space)
        self.parts: list[CompositePart] = []
        num_inputs = 0
        noise_size = 0
        num_actions = 0
        for leaf in self.layout.leaves:
            kind = make_distribution(leaf, squash=self.is_squashed, scale=self.is_scaled)
            part = CompositePart(
                kind,
                inputs=slice(num_inputs, num_inputs + kind.num_inputs),
                noise=slice(noise_size, noise_size + kind.noise_size),
                actions=slice(num_actions, num_actions + math.prod(kind.action_shape)),
            )
            num_inputs = part.inputs.stop
            noise_size = part.noise.stop
            num_actions = part.actions.stop
            self.parts.append(part)
        super().__init__(action_space, num_inputs, noise_size)
        self.action_shape = self.layout.shape
        self.action_dtype = self.layout.dtype

    @property
    def choice_inputs(self) -> I64:
        """See the base class."""
        return np.concatenate(
            [part.distribution.choice_inputs + part.inputs.start for part in self.parts]
        )

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw each component's own noise."""
        return np.concatenate(
            [part.distribution.draw_noise(rng, *leading) for part in self.parts], axis=-1
        )

    def sample_into(self, inputs: F32, noise: F32, actions: Array, logp: F32) -> None:
        """Sample each component, and add up their log-probabilities."""
        rows = len(inputs)
        logp[...] = 0.0
        for part in self.parts:
            kind = part.distribution
            # a component may need its own dtype or shape before it goes into the flat row
            chosen = np.empty((rows, *kind.action_shape), kind.action_dtype)
            chosen_logp = np.empty(rows, np.float32)
            kind.sample_into(inputs[:, part.inputs], noise[:, part.noise], chosen, chosen_logp)
            actions[:, part.actions] = chosen.reshape(rows, -1)
            logp += chosen_logp

    def deterministic(self, inputs: F32) -> Array:
        """Return the mode of each component."""
        actions = self.layout.zeros(len(inputs))
        for part in self.parts:
            mode = part.distribution.deterministic(inputs[:, part.inputs])
            actions[:, part.actions] = mode.reshape(len(inputs), -1)
        return actions

    def logp(self, inputs: F32, actions: Array) -> F32:
        """See the base class."""
        batches = zip(self.parts, self.layout.split(actions), strict=True)
        total: F32 = np.add.reduce(
            [part.distribution.logp(inputs[:, part.inputs], batch) for part, batch in batches]
        )
        return total


class SquashedComposite(Composite):
    """Composite that squashes Boxes into their bounds."""

    name = "squashed_composite"
    is_squashed = True


class ScaledComposite(Composite):
    """Composite that scales the samples of Boxes to their ranges."""

    name = "scaled_composite"
    is_scaled = True


_KINDS: tuple[type[ActionDistribution], ...] = (
    Categorical,
    Greedy,
    MultiCategorical,
    Bernoulli,
    DiagGaussian,
    SquashedGaussian,
    ScaledGaussian,
    Composite,
    SquashedComposite,
    ScaledComposite,
)
# Any: unlike the base class, each is made from a space alone
DISTRIBUTIONS: dict[str, Any] = {kind.name: kind for kind in _KINDS}
"""Distributions by name; the first one that supports a kind of space is its default."""


_MAX_CHOICES = 1 << 24
"""Limit of the outputs of a network for one discrete action."""

_SQUASHED: dict[type[ActionDistribution], type[ActionDistribution]] = {
    DiagGaussian: SquashedGaussian,
    Composite: SquashedComposite,
}
_SCALED: dict[type[ActionDistribution], type[ActionDistribution]] = {
    DiagGaussian: ScaledGaussian,
    Composite: ScaledComposite,
}


def make_distribution(
    action_space: Space, *, squash: bool = False, scale: bool = False
) -> ActionDistribution:
    """Make the default distribution for an action space.

    Args:
        action_space: Discrete, MultiDiscrete, MultiBinary, a Box of floats, or a Tuple or Dict of
            these, at any depth.
        squash: True to squash the actions of Boxes into their bounds instead of leaving them
            unbounded.
        scale: True for the units of `BoxScale`, unless all Boxes are in these units anyway. Without
            effect on squashed actions.

    Raises:
        UnsupportedSpaceError: for any other space, and for a Box without bounds if `squash` is set.
    """
    kind = next((kind for kind in _KINDS if isinstance(action_space, kind.over)), None)
    if kind is None:
        raise UnsupportedSpaceError("action space", action_space, KINDS)
    if squash:
        kind = _SQUASHED.get(kind, kind)
    elif scale and any(
        isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f" and not BoxScale(leaf).is_identity
        for leaf in leaf_spaces(action_space)
    ):
        kind = _SCALED.get(kind, kind)
    return make_named_distribution(kind.name, action_space)


def _num_choices(space: Space) -> int:
    """Return the number of values of a discrete action's numbers, all together, in Python's
    numbers; 0 for others.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        # logits are padded to the widest component
        return space.nvec.size * max(map(int, space.nvec.flat), default=0)
    return 0


def make_named_distribution(
    name: str, action_space: Space, num_features: int = 0
) -> ActionDistribution:
    """Make the distribution of a name for an action space.

    Args:
        name: key in DISTRIBUTIONS.
        action_space: single-environment action space.
        num_features: F of a Gaussian with state-dependent noise, 0 for none.

    Raises:
        PolicyError: when the name is unknown, or the distribution does not support features.
        UnsupportedSpaceError: when the distribution does not support the space.
    """
    if name not in DISTRIBUTIONS:
        raise PolicyError(
            f"unknown distribution {name!r}; known: {', '.join(sorted(DISTRIBUTIONS))}"
        )
    choices = _num_choices(action_space)
    if choices > _MAX_CHOICES:
        raise UnsupportedSpaceError(
            "the action space",
            action_space,
            [f"up to {_MAX_CHOICES:,} choices"],
            f"A network would have {choices:,} outputs. Let the environment take several numbers"
            " with few values each, or a Box.",
        )
    kind = DISTRIBUTIONS[name]
    if not isinstance(action_space, kind.over):
        raise UnsupportedSpaceError(
            f"a {name} distribution over",
            action_space,
            [supported.__name__ for supported in kind.over],
        )
    if num_features and not issubclass(kind, DiagGaussian):
        raise PolicyError(
            f"noise of {num_features} features requires Gaussian actions; these are {name}"
        )
    if kind is Categorical and getattr(action_space, "n", 0) == 2:
        kind = TwoClassCategorical
    arguments = [num_features] if num_features else []
    distribution: ActionDistribution = kind(action_space, *arguments)
    return distribution
