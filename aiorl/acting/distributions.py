"""Action distributions on NumPy: what a worker samples from.

A distribution is made once for an action space and holds no state. It reads its parameters from the rows of
``inputs`` [N, P], as the acting graph puts them out:

- Categorical: A logits.
- Greedy: the values of A actions.
- MultiCategorical: the logits of each component, one after the other.
- Bernoulli: the logit of each bit's being 1.
- DiagGaussian and SquashedGaussian: A means, then A logarithms of standard deviations, clamped to
  [LOG_STD_MIN, LOG_STD_MAX]. The squashed one is mapped by tanh into the bounds of the space.

An input of MASKED_LOGIT forbids its action (for a bit: being 1): it is never sampled, is not the mode, and adds exactly
nothing to entropy and divergence. Networks put it where an action mask says so.

Sampling is a pure function of inputs and noise. Noise is drawn ahead for many steps at once
(`draw_noise`), which is both cheaper and exactly reproducible; what its numbers mean is the distribution's
own business. `aiorl.learning.models.distributions` is the twin of this module on TensorFlow. Distributions over Tuple
and Dict spaces are put together from the others (`Composite`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.action_distribution import MASKED_LOGIT, ActionDistribution
from aiorl.acting.discrete_distributions import Bernoulli, Categorical, Greedy, MultiCategorical, TwoClassCategorical
from aiorl.acting.gaussian_distributions import (
    EDGE,
    LOG_STD_MAX,
    LOG_STD_MIN,
    LOGISTIC_DEVIATIONS,
    LOGISTIC_WEIGHTS,
    DiagGaussian,
    SquashedGaussian,
)
from aiorl.data.actions import ActionLayout
from aiorl.data.spaces import KINDS
from aiorl.errors import PolicyError, UnsupportedSpaceError

__all__ = [
    "DISTRIBUTIONS",
    "EDGE",
    "LOGISTIC_DEVIATIONS",
    "LOGISTIC_WEIGHTS",
    "LOG_STD_MAX",
    "LOG_STD_MIN",
    "MASKED_LOGIT",
    "ActionDistribution",
    "Bernoulli",
    "Categorical",
    "Composite",
    "CompositePart",
    "DiagGaussian",
    "Greedy",
    "MultiCategorical",
    "SquashedComposite",
    "SquashedGaussian",
    "TwoClassCategorical",
    "make_distribution",
    "make_named_distribution",
]

F32 = NDArray[np.float32]


class CompositePart(NamedTuple):
    """One component.

    Attributes:
        distribution: over the component.
        inputs: its columns among the inputs.
        noise: its columns among the noise.
        actions: its columns among the flat actions.
    """

    distribution: ActionDistribution
    inputs: slice
    noise: slice
    actions: slice


class Composite(ActionDistribution):
    """Independent components; inputs, noise and actions are those of the components one after the other.

    Actions are in column form (`aiorl.data.actions`): a flat row each.

    Attributes:
        layout: how components lie in a row.
        parts: the components, in order.
    """

    name = "composite"
    is_squashed = False

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.layout = ActionLayout(action_space)
        self.parts: list[CompositePart] = []
        num_inputs = noise_size = num_actions = 0
        for leaf in self.layout.leaves:
            kind = make_distribution(leaf, squash=self.is_squashed and isinstance(leaf, spaces.Box))
            size = math.prod(kind.action_shape)
            self.parts.append(
                CompositePart(
                    kind,
                    slice(num_inputs, num_inputs + kind.num_inputs),
                    slice(noise_size, noise_size + kind.noise_size),
                    slice(num_actions, num_actions + size),
                )
            )
            num_inputs, noise_size, num_actions = (
                num_inputs + kind.num_inputs, noise_size + kind.noise_size, num_actions + size
            )  # fmt: skip
        super().__init__(action_space, num_inputs, noise_size)
        self.action_shape = self.layout.shape
        self.action_dtype = self.layout.dtype

    @property
    def choice_inputs(self) -> NDArray[np.int64]:
        """See the base class."""
        return np.concatenate([part.distribution.choice_inputs + part.inputs.start for part in self.parts])

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Each component's own noise."""
        return np.concatenate([part.distribution.draw_noise(rng, *leading) for part in self.parts], axis=-1)

    def sample_into(self, inputs: F32, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """Each component's own sample; their log-probabilities are added."""
        rows = len(inputs)
        logp[...] = 0.0
        for part in self.parts:
            kind = part.distribution
            # a component may need its own dtype or shape on the way into the flat row
            chosen = np.empty((rows, *kind.action_shape), kind.action_dtype)
            chosen_logp = np.empty(rows, np.float32)
            kind.sample_into(inputs[:, part.inputs], noise[:, part.noise], chosen, chosen_logp)
            actions[:, part.actions] = chosen.reshape(rows, -1)
            logp += chosen_logp

    def deterministic(self, inputs: F32) -> NDArray[Any]:
        """The mode of each component."""
        actions = self.layout.zeros(len(inputs))
        for part in self.parts:
            mode = part.distribution.deterministic(inputs[:, part.inputs])
            actions[:, part.actions] = mode.reshape(len(inputs), -1)
        return actions

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """See the base class."""
        batches = self.layout.split(actions)
        return _added(
            [
                part.distribution.logp(inputs[:, part.inputs], batch)
                for part, batch in zip(self.parts, batches, strict=True)
            ]
        )

    def entropy(self, inputs: F32) -> F32:
        """See the base class."""
        return _added([part.distribution.entropy(inputs[:, part.inputs]) for part in self.parts])

    def kl(self, inputs: F32, other: F32) -> F32:
        """See the base class."""
        return _added([part.distribution.kl(inputs[:, part.inputs], other[:, part.inputs]) for part in self.parts])


class SquashedComposite(Composite):
    """Composite whose Boxes are squashed into their bounds."""

    name = "squashed_composite"
    is_squashed = True


DISTRIBUTIONS: dict[str, type[ActionDistribution]] = {
    kind.name: kind
    for kind in (
        Categorical,
        Greedy,
        MultiCategorical,
        Bernoulli,
        DiagGaussian,
        SquashedGaussian,
        Composite,
        SquashedComposite,
    )
}
"""Distributions by name."""


def make_distribution(action_space: spaces.Space[Any], *, squash: bool = False) -> ActionDistribution:
    """The distribution that goes with an action space.

    Args:
        action_space: Discrete, MultiDiscrete, MultiBinary, a Box of floats, or a Tuple or Dict of these, however
            nested.
        squash: for Boxes, squash actions into their bounds instead of leaving them unbounded.

    Raises: UnsupportedSpaceError for any other space, or a Box without bounds when `squash` is set.
    """
    match action_space:
        case spaces.Discrete():
            return make_named_distribution(Categorical.name, action_space)
        case spaces.MultiDiscrete():
            return MultiCategorical(action_space)
        case spaces.MultiBinary():
            return Bernoulli(action_space)
        case spaces.Box():
            return SquashedGaussian(action_space) if squash else DiagGaussian(action_space)
        case spaces.Tuple() | spaces.Dict():
            return SquashedComposite(action_space) if squash else Composite(action_space)
        case _:
            raise UnsupportedSpaceError("action space", action_space, KINDS)


def make_named_distribution(name: str, action_space: spaces.Space[Any], num_features: int = 0) -> ActionDistribution:
    """The distribution of that name over an action space.

    Args:
        name: key in DISTRIBUTIONS.
        action_space: single-environment action space.
        num_features: F of a Gaussian whose noise is a function of the state; 0 = there are none.
    Raises: PolicyError for an unknown name, or features of another distribution; UnsupportedSpaceError if name and
        space don't go together.
    """
    try:
        kind = DISTRIBUTIONS[name]
    except KeyError:
        raise PolicyError(f"unknown distribution {name!r}; known: {', '.join(sorted(DISTRIBUTIONS))}") from None
    if num_features:
        if not issubclass(kind, DiagGaussian):
            raise PolicyError(f"noise of {num_features} features is for Gaussian actions; these are {name}")
        return kind(action_space, num_features)
    if kind is Categorical and isinstance(action_space, spaces.Discrete) and action_space.n == 2:
        return TwoClassCategorical(action_space)
    return kind(action_space)  # type: ignore[call-arg]  # every concrete kind takes the space alone


def _added(terms: list[F32]) -> F32:
    total: F32 = np.add.reduce(terms)
    return total
