"""TargetNetwork: the weights of a network as they were a while ago, which values are estimated with."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from aiorl.learning.algorithms.compiled_update import STEPS_BEFORE, Tensors
from aiorl.learning.models.networks import Network

__all__ = ["TargetNetwork", "following"]


class TargetNetwork:
    """Weights that follow those of a network.

    Attributes:
        network: that learns; it takes `tensors` in place of its own weights.
        variables: by the names of the network's.
    """

    def __init__(self, network: Network) -> None:
        """Begin with the network's weights as they are now."""
        self.network = network
        self.variables: dict[str, Any] = {
            name: tf.Variable(variable, trainable=False) for name, variable in network.variables.items()
        }

    def tensors(self) -> Tensors:
        """The weights of this moment by name."""
        return {name: tf.convert_to_tensor(variable) for name, variable in self.variables.items()}

    def take_over(self, share: float = 1.0) -> None:
        """Become the network, or come nearer to it by a share."""
        for name, variable in self.variables.items():
            online = tf.convert_to_tensor(self.network.variables[name])
            is_whole = share == 1 or not online.dtype.is_floating  # counts of a user's layers have no part in between
            variable.assign(online if is_whole else variable + share * (online - variable))


def following(*targets: TargetNetwork, tau: float, every: int) -> dict[str, Any]:
    """Return what an `UpdateSpec` has to be told so that target networks follow within an update.

    Args:
        targets: all of the update.
        tau: how far, see `TargetNetwork.take_over`.
        every: after how many minibatches, counted on from the coefficient STEPS_BEFORE.
    """

    def move() -> tf.Tensor:
        for target in targets:
            target.take_over(tau)
        return tf.constant(0)

    def follow(step: tf.Tensor, coefficients: Tensors) -> None:
        if every == 1:
            move()
            return
        made = tf.cast(coefficients[STEPS_BEFORE], tf.int32) + step + 1
        tf.cond(tf.equal(made % every, 0), move, lambda: tf.constant(0))

    variables = tuple(variable for target in targets for variable in target.variables.values())
    return {"followers": variables, "follow": follow}
