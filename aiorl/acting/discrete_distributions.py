"""Distributions over choices: Discrete, MultiDiscrete and MultiBinary spaces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.action_distribution import MASKED_LOGIT, ActionDistribution
from aiorl.errors import UnsupportedSpaceError

__all__ = ["Bernoulli", "Categorical", "Greedy", "MultiCategorical", "TwoClassCategorical"]

F32 = NDArray[np.float32]

_ZERO = np.float32(0.0)


class Categorical(ActionDistribution):
    """One of A actions, numbered from the start of a Discrete space; inputs are A logits.

    Attributes:
        start: number of the first action.
    """

    name = "categorical"

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise UnsupportedSpaceError("a categorical distribution over", action_space, ["Discrete"])
        super().__init__(action_space, num_inputs=int(action_space.n), noise_size=1)
        self.start = int(action_space.start)

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """By inversion: the first action whose cumulative probability exceeds the uniform number."""
        choice, log_probability = _choose(inputs, noise)
        if self.start:
            choice += self.start
        actions[...] = choice
        logp[...] = log_probability

    def deterministic(self, inputs: F32) -> NDArray[Any]:
        """The likeliest action."""
        actions: NDArray[Any] = (inputs.argmax(axis=1) + self.start).astype(self.action_dtype)
        return actions

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """See the base class."""
        index = actions.astype(np.int64) - self.start
        chosen: F32 = np.take_along_axis(_log_softmax(inputs), index[:, None], axis=1)[:, 0]
        return chosen

    def entropy(self, inputs: F32) -> F32:
        """See the base class."""
        return _categorical_entropy(inputs)

    def kl(self, inputs: F32, other: F32) -> F32:
        """See the base class."""
        return _categorical_kl(inputs, other)

    def probabilities(self, inputs: F32) -> NDArray[np.float64]:
        """[N, A]: of each action."""
        shifted = inputs.astype(np.float64)
        shifted -= shifted.max(axis=1, keepdims=True)
        np.exp(shifted, out=shifted)
        shifted /= shifted.sum(axis=1, keepdims=True)
        return shifted


class TwoClassCategorical(Categorical):
    """Categorical with A = 2, in fewer steps: only the difference of the logits counts."""

    logp_is_apart = True

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        super().__init__(action_space)
        if self.num_inputs != 2:
            raise UnsupportedSpaceError("a two-class distribution over", action_space, ["Discrete(2)"])

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Standard logistic numbers: log(u / (1 - u)) of a uniform u."""
        return rng.logistic(size=(*leading, 1)).astype(np.float32)

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """The second action where the difference of logits exceeds the logistic number."""
        logp[...] = _two_class_logp(*self._choose_into(inputs, noise, actions))

    def choose_into(self, inputs: F32, noise: F32, actions: NDArray[Any]) -> None:
        """See the base class."""
        self._choose_into(inputs, noise, actions)

    def _choose_into(self, inputs: F32, noise: F32, actions: NDArray[Any]) -> tuple[F32, NDArray[np.bool_]]:
        """Choose actions; return the differences of the logits [N], and where the second action is chosen [N]."""
        difference: F32 = inputs[:, 1] - inputs[:, 0]
        is_second: NDArray[np.bool_] = difference > noise[:, 0]
        actions[...] = is_second
        if self.start:
            actions += self.start
        return difference, is_second

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """See the base class."""
        return _two_class_logp(inputs[:, 1] - inputs[:, 0], actions != self.start)


class Greedy(Categorical):
    """The action of A with the largest value, without chance; inputs are the values of A actions.

    What explores departs from it (`aiorl.acting.exploration`). Of several as good as each other it is the first.
    """

    name = "greedy"

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        super().__init__(action_space)
        self.noise_size = 0

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """The best action, with probability 1."""
        actions[...] = self.deterministic(inputs)
        logp[...] = 0.0

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """0 for the best action, and so low for the others that they have no probability at all."""
        found: F32 = np.where(self.deterministic(inputs) == actions, _ZERO, np.float32(MASKED_LOGIT))
        return found

    def action_values(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """The inputs of the actions."""
        index = actions.astype(np.int64) - self.start
        found: F32 = np.take_along_axis(inputs, index[..., None], axis=-1)[..., 0]
        return found

    def probabilities(self, inputs: F32) -> NDArray[np.float64]:
        """1 for the best action."""
        chosen: NDArray[np.float64] = np.eye(self.num_inputs)[inputs.argmax(axis=1)]
        return chosen

    def entropy(self, inputs: F32) -> F32:
        """0: there is no chance."""
        return np.zeros(len(inputs), np.float32)

    def kl(self, inputs: F32, other: F32) -> F32:
        """0 where both take the same action, and beyond all bounds elsewhere."""
        same = inputs.argmax(axis=1) == other.argmax(axis=1)
        found: F32 = np.where(same, _ZERO, np.float32(-MASKED_LOGIT))
        return found


class MultiCategorical(ActionDistribution):
    """Independent choices, one per component of a MultiDiscrete space.

    Attributes:
        sizes: actions of each component.
        start: number of each component's first action.
        positions: [P], where each logit stands among components padded to the widest one.
    """

    name = "multi_categorical"

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        if not isinstance(action_space, spaces.MultiDiscrete):
            raise UnsupportedSpaceError("a multi-categorical distribution over", action_space, ["MultiDiscrete"])
        self.sizes: NDArray[np.int64] = action_space.nvec.astype(np.int64).ravel()
        super().__init__(action_space, num_inputs=int(self.sizes.sum()), noise_size=len(self.sizes))
        self.start: NDArray[np.int64] = action_space.start.astype(np.int64).ravel()
        self._widest = int(self.sizes.max())
        self.positions: NDArray[np.int64] = np.concatenate(
            [component * self._widest + np.arange(size) for component, size in enumerate(self.sizes)]
        )

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """Each component by inversion, as in `Categorical`."""
        logits = self._padded(inputs).reshape(-1, self._widest)
        choice, log_probability = _choose(logits, noise.reshape(-1, 1))
        components = choice.reshape(len(inputs), -1) + self.start
        actions[...] = components.reshape(actions.shape)
        np.add.reduce(log_probability.reshape(len(inputs), -1), axis=1, out=logp)

    def deterministic(self, inputs: F32) -> NDArray[Any]:
        """The likeliest action of each component."""
        best = self._padded(inputs).argmax(axis=2) + self.start
        actions: NDArray[Any] = best.astype(self.action_dtype).reshape(-1, *self.action_shape)
        return actions

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """See the base class."""
        index = actions.reshape(len(inputs), -1).astype(np.int64) - self.start
        chosen = np.take_along_axis(_log_softmax(self._padded(inputs)), index[:, :, None], axis=2)
        total: F32 = chosen.sum(axis=(1, 2))
        return total

    def entropy(self, inputs: F32) -> F32:
        """See the base class."""
        total: F32 = _categorical_entropy(self._padded(inputs)).sum(axis=1)
        return total

    def kl(self, inputs: F32, other: F32) -> F32:
        """See the base class."""
        total: F32 = _categorical_kl(self._padded(inputs), self._padded(other)).sum(axis=1)
        return total

    def _padded(self, inputs: F32) -> F32:
        """Logits as [N, components, widest]."""
        rows, components = len(inputs), len(self.sizes)
        if self.num_inputs == components * self._widest:
            return inputs.reshape(rows, components, self._widest)
        padded: F32 = np.full((rows, components * self._widest), MASKED_LOGIT, np.float32)
        padded[:, self.positions] = inputs
        return padded.reshape(rows, components, self._widest)


class Bernoulli(ActionDistribution):
    """Independent bits of a MultiBinary space; inputs are the logits of their being 1."""

    name = "bernoulli"

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        if not isinstance(action_space, spaces.MultiBinary):
            raise UnsupportedSpaceError("a Bernoulli distribution over", action_space, ["MultiBinary"])
        size = math.prod(action_space.shape)
        super().__init__(action_space, num_inputs=size, noise_size=size)

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """Each bit is 1 where its probability exceeds the uniform number."""
        bits = noise < _sigmoid(inputs)
        actions[...] = bits.reshape(actions.shape)
        logp[...] = _bernoulli_logp(inputs, bits)

    def deterministic(self, inputs: F32) -> NDArray[Any]:
        """The bits that are likelier 1 than 0."""
        return (inputs > 0).astype(self.action_dtype).reshape(-1, *self.action_shape)

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """See the base class."""
        return _bernoulli_logp(inputs, actions.reshape(len(inputs), -1) != 0)

    def entropy(self, inputs: F32) -> F32:
        """See the base class."""
        total: F32 = (np.logaddexp(_ZERO, inputs) - inputs * _sigmoid(inputs)).sum(axis=1)
        return total

    def kl(self, inputs: F32, other: F32) -> F32:
        """See the base class."""
        ones = _sigmoid(inputs) * (inputs - other)
        total: F32 = (ones + np.logaddexp(_ZERO, other) - np.logaddexp(_ZERO, inputs)).sum(axis=1)
        return total


def _two_class_logp(difference: F32, is_second: NDArray[Any]) -> F32:
    """Return -log(1 + exp(-d)) for the second action and -log(1 + exp(d)) for the first, in the memory of d."""
    np.negative(difference, out=difference, where=is_second)
    np.logaddexp(difference, _ZERO, out=difference)
    found: F32 = np.negative(difference, out=difference)
    return found


def _choose(logits: F32, uniform: F32) -> tuple[NDArray[np.int64], F32]:
    """Choices [R] and their log-probabilities [R], for logits [R, A] and uniform numbers [R, 1] below 1.

    A uniform float32 below 1 times the total stays below the total, so a choice is always found, and none
    of probability 0 can be.
    """
    shifted = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
    cumulative = np.add.accumulate(np.exp(shifted), axis=1)
    total = cumulative[:, -1:]
    choice = (cumulative <= uniform * total).argmin(axis=1)
    chosen = shifted[np.arange(len(choice)), choice]
    chosen -= np.log(total[:, 0])
    return choice, chosen


def _sigmoid(logits: F32) -> F32:
    result: F32 = np.float32(0.5) * (np.tanh(np.float32(0.5) * logits) + np.float32(1.0))
    return result


def _bernoulli_logp(logits: F32, bits: NDArray[np.bool_]) -> F32:
    total: F32 = -np.logaddexp(_ZERO, np.where(bits, -logits, logits)).sum(axis=1)
    return total


def _log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: F32 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _categorical_entropy(logits: F32) -> F32:
    log_probabilities = _log_softmax(logits)
    total: F32 = -(np.exp(log_probabilities) * log_probabilities).sum(axis=-1)
    return total


def _categorical_kl(logits: F32, other: F32) -> F32:
    log_probabilities, other_log_probabilities = _log_softmax(logits), _log_softmax(other)
    total: F32 = (np.exp(log_probabilities) * (log_probabilities - other_log_probabilities)).sum(axis=-1)
    return total
