"""Action distributions of Tuple and Dict spaces: independent distributions of their components, side by side."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import ActionLayout
from aiorl.policy.distributions import ActionDistribution, make_distribution

__all__ = ["Composite", "CompositePart", "SquashedComposite"]

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


def _added(terms: list[F32]) -> F32:
    total: F32 = np.add.reduce(terms)
    return total
