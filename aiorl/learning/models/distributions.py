"""Action distributions in TensorFlow, the counterparts of `aiorl.acting.distributions` for losses.

Names, parameters and formulas are those of the NumPy module, which acts and therefore has neither
entropy nor divergence. A test checks that both agree. All functions are differentiable in `inputs`
and can be traced into a compiled function.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from aiorl.acting import distributions as acting
from aiorl.acting.distributions import EDGE, LOG_STD_MAX, LOG_STD_MIN, MASKED_LOGIT
from aiorl.learning.lazy import tf

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOGISTIC_WEIGHTS = np.array([0.1494167, 0.50135265, 0.31260429, 0.03662636], np.float32)
"""[4]: weights of a mixture of four normal variables, close to the logistic variable Z with density
sech(z)^2 / 2."""
_LOGISTIC_DEVIATIONS = np.array([0.51077307, 0.75951436, 1.12349673, 1.64972240], np.float32)
"""[4]: standard deviations of the four.

log(2 cosh(u)) is the mean of |u + Z|. So its mean over a normal u is a sum of means of folded
normals, with an error below 5e-6 for any deviation of u. Source of such mixtures: Monahan,
Stefanski 1992. """


class Distribution(ABC):
    """Base class of distributions. B rows, P inputs per row.

    Attributes:
        acting: NumPy counterpart, which knows the action space.
        num_inputs: P.
        num_features: E, width of the result of `features`.
    """

    def __init__(self, twin: Any) -> None:
        """Take over the NumPy distribution `twin`."""
        self.acting: acting.ActionDistribution = twin
        self.num_inputs = self.num_features = twin.num_inputs

    @abstractmethod
    def logp(self, inputs: Any, actions: Any) -> Any:
        """Return the log-probability (or log-density) [B] of `actions` [B, *action_shape] for
        `inputs` [B, P].
        """

    @abstractmethod
    def entropy(self, inputs: Any) -> Any:
        """Return the entropy [B] in nats for `inputs` [B, P]."""

    @abstractmethod
    def kl(self, inputs: Any, other: Any) -> Any:
        """Return the Kullback-Leibler divergence KL(`inputs` || `other`) [B] in nats, both [B, P]."""

    @abstractmethod
    def features(self, actions: Any) -> Any:
        """Convert actions [B, *action_shape] to network inputs [B, E] float32: choices one-hot,
        numbers as they are.

        Numbers of a scaled Box are in its units, and clipped to its bounds as they are for an
        environment.
        """


class Choices(Distribution):
    """Counterpart of Categorical, Greedy and MultiCategorical:

    C choices, padded to the widest, W.
    """

    def __init__(self, twin: acting.Categorical | acting.Greedy | acting.MultiCategorical) -> None:
        super().__init__(twin)
        # NumPy arrays become constants of a traced graph; tensors created here would become its
        # inputs
        self._start = np.asarray(twin.start, np.int32).reshape(-1)
        self._components = 1
        self._widest = twin.num_inputs
        positions = np.arange(twin.num_inputs)
        if isinstance(twin, acting.MultiCategorical):
            self._components = len(twin.sizes)
            self._widest = int(twin.sizes.max())
            positions = twin.positions
        self._positions = positions.astype(np.int32)
        # logit at each place of the padded components; padding uses an extra last one
        self._sources = np.full(self._components * self._widest, self.num_inputs, np.int32)
        self._sources[self._positions] = np.arange(self.num_inputs)
        self._is_padded = self.num_inputs != len(self._sources)

    def logp(self, inputs: Any, actions: Any) -> Any:
        """See the base class."""
        log_p = self._log_probabilities(inputs)
        # with a mask: XLA on a CPU is slow at gathering and scattering
        mask = tf.one_hot(
            self._index(actions), self._widest, on_value=True, off_value=False, dtype=tf.bool
        )
        return _sums(_sums(tf.where(mask, log_p, 0.0)))

    def entropy(self, inputs: Any) -> Any:
        """See the base class."""
        log_p = self._log_probabilities(inputs)
        return _sums(-_sums(tf.exp(log_p) * log_p))

    def kl(self, inputs: Any, other: Any) -> Any:
        """See the base class."""
        log_p = self._log_probabilities(inputs)
        log_q = self._log_probabilities(other)
        return _sums(_sums(tf.exp(log_p) * (log_p - log_q)))

    def features(self, actions: Any) -> Any:
        """Return each choice one-hot; zeros for invalid numbers, such as 0 at an episode's start in
        a space from 1.
        """
        # ONNX's one-hot operator would wrap an invalid number around
        choices = np.arange(self._widest, dtype=np.int32)
        is_chosen = tf.equal(self._index(actions)[..., None], choices)
        padded = tf.reshape(tf.cast(is_chosen, tf.float32), [-1, len(self._sources)])
        if not self._is_padded:
            return padded
        return tf.gather(padded, self._positions, axis=1)

    def _index(self, actions: Any) -> Any:
        """Return the numbers of the choices [B, C], from 0."""
        numbers = tf.cast(tf.reshape(actions, [-1, self._components]), tf.int32)
        return numbers - self._start

    def _log_probabilities(self, inputs: Any) -> Any:
        """Return the log-probabilities of all choices, [B, C, W]."""
        if self._is_padded:
            padded = tf.pad(inputs, [[0, 0], [0, 1]], constant_values=MASKED_LOGIT)
            inputs = tf.gather(padded, self._sources, axis=1)
        logits = tf.reshape(inputs, [-1, self._components, self._widest])
        return tf.nn.log_softmax(logits)


class Bernoulli(Distribution):
    """Counterpart of the NumPy class."""

    def logp(self, inputs: Any, actions: Any) -> Any:
        """See the base class."""
        is_set = self.features(actions) > 0
        return -_sums(tf.nn.softplus(tf.where(is_set, -inputs, inputs)))

    def entropy(self, inputs: Any) -> Any:
        """See the base class."""
        return _sums(tf.nn.softplus(inputs) - inputs * tf.sigmoid(inputs))

    def kl(self, inputs: Any, other: Any) -> Any:
        """See the base class."""
        ones = tf.sigmoid(inputs) * (inputs - other)
        return _sums(ones + tf.nn.softplus(other) - tf.nn.softplus(inputs))

    def features(self, actions: Any) -> Any:
        """Return the bits as numbers."""
        return tf.cast(tf.reshape(actions, [-1, self.num_inputs]), tf.float32)


class DiagGaussian(Distribution):
    """Counterpart of the NumPy class."""

    def __init__(self, twin: acting.DiagGaussian) -> None:
        super().__init__(twin)
        self._size = twin.size
        self._shape = list(twin.action_shape)
        self._dtype = tf.as_dtype(twin.action_dtype)
        self.num_features = self._size

    def logp(self, inputs: Any, actions: Any) -> Any:
        """See the base class."""
        return self._normal_logp(inputs, self._flat(actions))

    def entropy(self, inputs: Any) -> Any:
        """See the base class."""
        _, log_std = self._parameters(inputs)
        return _sums(log_std + (_HALF_LOG_2PI + 0.5))

    def kl(self, inputs: Any, other: Any) -> Any:
        """See the base class."""
        mean, log_std = self._parameters(inputs)
        other_mean, other_log_std = self._parameters(other)
        shift = (mean - other_mean) * tf.exp(-other_log_std)
        spread = tf.exp(2.0 * (log_std - other_log_std))
        return _sums(other_log_std - log_std + 0.5 * (spread + shift * shift - 1.0))

    def sample_with_logp(self, inputs: Any, seed: Any) -> tuple[Any, Any]:
        """Sample actions [B, *action_shape] with their log-densities [B]; `seed` [2] int32
        determines them.

        Samples are reparametrised: gradients flow through them.
        """
        values, logp = self._draw_normal(inputs, seed)
        return self._to_actions(values), logp

    def features(self, actions: Any) -> Any:
        """Return the numbers themselves."""
        return self._flat(actions)

    def _draw_normal(self, inputs: Any, seed: Any) -> tuple[Any, Any]:
        mean, log_std = self._parameters(inputs)
        noise = tf.random.stateless_normal(tf.shape(mean), seed)
        logp = _log_density(noise, log_std)
        return mean + tf.exp(log_std) * noise, logp

    def _parameters(self, inputs: Any) -> tuple[Any, Any]:
        mean = inputs[:, : self._size]
        log_std = inputs[:, self._size : 2 * self._size]
        return mean, tf.clip_by_value(log_std, LOG_STD_MIN, LOG_STD_MAX)

    def _normal_logp(self, inputs: Any, values: Any) -> Any:
        mean, log_std = self._parameters(inputs)
        return _log_density((values - mean) * tf.exp(-log_std), log_std)

    def _flat(self, actions: Any) -> Any:
        return tf.cast(tf.reshape(actions, [-1, self._size]), tf.float32)

    def _to_actions(self, values: Any) -> Any:
        return tf.cast(tf.reshape(values, [-1, *self._shape]), self._dtype)


class ScaledGaussian(DiagGaussian):
    """Counterpart of the NumPy class."""

    def __init__(self, twin: acting.ScaledGaussian) -> None:
        super().__init__(twin)
        self._scale = twin.scale

    def logp(self, inputs: Any, actions: Any) -> Any:
        """See the base class."""
        return self._normal_logp(inputs, self._units(actions)) - self._scale.log_volume

    def entropy(self, inputs: Any) -> Any:
        """See the base class."""
        return super().entropy(inputs) + self._scale.log_volume

    def sample_with_logp(self, inputs: Any, seed: Any) -> tuple[Any, Any]:
        """See `DiagGaussian`."""
        values, logp = self._draw_normal(inputs, seed)
        units = tf.cast(values, self._scale.centre.dtype)
        numbers = units * self._scale.half_range + self._scale.centre
        return self._to_actions(numbers), logp - self._scale.log_volume

    def features(self, actions: Any) -> Any:
        """Return the numbers in units; zeros, which stand for no action at an episode's start, can
        be far outside.
        """
        units = self._units(actions)
        return tf.where(self._scale.is_finite, tf.clip_by_value(units, -1.0, 1.0), units)

    def _units(self, actions: Any) -> Any:
        dtype = self._scale.centre.dtype
        flat = tf.cast(tf.reshape(actions, [-1, self._size]), dtype)
        return tf.cast((flat - self._scale.centre) / self._scale.half_range, tf.float32)


class SquashedGaussian(DiagGaussian):
    """Counterpart of the NumPy class.

    The log-density of a sample is computed from the normal variable.
    """

    def __init__(self, twin: acting.SquashedGaussian) -> None:
        super().__init__(twin)
        self._low = tf.constant(twin.low)
        self._high = tf.constant(twin.high)
        self._span = tf.constant(twin.span)

    def logp(self, inputs: Any, actions: Any) -> Any:
        """See the base class; actions beyond the bounds are clipped."""
        squashed = self._flat(actions)
        log_p = tf.math.log(tf.maximum((squashed - self._low) / self._span, EDGE))
        log_q = tf.math.log(tf.maximum((self._high - squashed) / self._span, EDGE))
        slope = _sums(log_p + log_q + tf.math.log(2.0 * self._span))
        return self._normal_logp(inputs, 0.5 * (log_p - log_q)) - slope

    def entropy(self, inputs: Any) -> Any:
        """Return the entropy of the normal variable plus the mean of log |da/du|, see
        _LOGISTIC_DEVIATIONS.
        """
        mean, log_std = self._parameters(inputs)
        mean = mean[:, :, None]
        spread = tf.sqrt(tf.exp(2.0 * log_std)[:, :, None] + _LOGISTIC_DEVIATIONS**2)
        ratio = mean / (math.sqrt(2.0) * spread)
        folded = spread * math.sqrt(2.0 / math.pi) * tf.exp(-ratio * ratio)
        folded += mean * tf.math.erf(ratio)
        slope = 2.0 * math.log(2.0) - 2.0 * _sums(folded * _LOGISTIC_WEIGHTS)
        return super().entropy(inputs) + _sums(slope + tf.math.log(0.5 * self._span))

    def sample_with_logp(self, inputs: Any, seed: Any) -> tuple[Any, Any]:
        """See `DiagGaussian`."""
        values, logp = self._draw_normal(inputs, seed)
        slope = _sums(_log_tanh_slope(values) + tf.math.log(0.5 * self._span))
        return self._to_actions(self._squash(values)), logp - slope

    def _squash(self, values: Any) -> Any:
        share = 0.5 * (tf.tanh(values) + 1.0)
        return tf.minimum(self._low + self._span * share, self._high)


class Composite(Distribution):
    """Counterpart of the NumPy class."""

    def __init__(self, twin: acting.Composite) -> None:
        super().__init__(twin)
        self._parts = [(to_tf_distribution(part.distribution), part) for part in twin.parts]
        self.num_features = sum(kind.num_features for kind, _ in self._parts)

    def logp(self, inputs: Any, actions: Any) -> Any:
        """See the base class."""
        actions = tf.convert_to_tensor(actions)
        terms = [
            kind.logp(inputs[:, part.inputs], actions[:, part.actions])
            for kind, part in self._parts
        ]
        return tf.add_n(terms)

    def entropy(self, inputs: Any) -> Any:
        """See the base class."""
        return tf.add_n([kind.entropy(inputs[:, part.inputs]) for kind, part in self._parts])

    def kl(self, inputs: Any, other: Any) -> Any:
        """See the base class."""
        terms = [
            kind.kl(inputs[:, part.inputs], other[:, part.inputs]) for kind, part in self._parts
        ]
        return tf.add_n(terms)

    def features(self, actions: Any) -> Any:
        """Return the features of all components."""
        actions = tf.convert_to_tensor(actions)
        parts = [kind.features(actions[:, part.actions]) for kind, part in self._parts]
        return tf.concat(parts, axis=1)


_TWINS: dict[str, Callable[[Any], Distribution]] = {
    acting.Categorical.name: Choices,
    acting.Greedy.name: Choices,
    acting.MultiCategorical.name: Choices,
    acting.Bernoulli.name: Bernoulli,
    acting.DiagGaussian.name: DiagGaussian,
    acting.SquashedGaussian.name: SquashedGaussian,
    acting.ScaledGaussian.name: ScaledGaussian,
    acting.Composite.name: Composite,
    acting.ScaledComposite.name: Composite,
    acting.SquashedComposite.name: Composite,
}


def to_tf_distribution(distribution: acting.ActionDistribution) -> Distribution:
    """Return the TensorFlow counterpart of a NumPy distribution."""
    return _TWINS[distribution.name](distribution)


def _sums(values: Any) -> Any:
    """Return the sums over the last dimension."""
    return tf.reduce_sum(values, axis=-1)


def _log_density(distance: Any, log_std: Any) -> Any:
    """Return the log-density [B] of normal variables, at a distance [B, D] in deviations from their
    means.
    """
    return _sums(-0.5 * distance * distance - log_std - _HALF_LOG_2PI)


def _log_tanh_slope(values: Any) -> Any:
    """Return log(1 - tanh(u)^2), computed without cancellation."""
    size = tf.abs(values)
    return 2.0 * (math.log(2.0) - size - tf.math.log1p(tf.exp(-2.0 * size)))
