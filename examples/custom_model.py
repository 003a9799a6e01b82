r"""A custom network in Keras: dense layers with residual connections.

    aiorl train --env CartPole-v1 --stop-return 475 \
        --model.custom-model examples.custom_model:residual --model.width 64 --model.blocks 2

`--model.custom-model` names a function or class. It is called with the shape of an observation, the
number of outputs that the action distribution needs, and all settings below `model`, including your
own. The Keras model it returns computes these outputs or, as here, these outputs and one value per
observation. If it has no values, a built-in network estimates them. For algorithms with a replay
(dqn, sac, td3, cql, iql) the model instead returns features of any width, as `features` below does
(`--algo dqn --model.custom-model examples.custom_model:features`). Heads and critics are built on
top of them.

Only the learner imports this file. Workers get the network as an ONNX graph, so they need neither
TensorFlow nor your module. To look at the network:

    python -m examples.custom_model
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
from keras import layers


def residual(
    obs_shape: tuple[int, ...], num_outputs: int, settings: Mapping[str, Any]
) -> keras.Model:
    """Return a policy and a value on one trunk of residual blocks."""
    width = int(settings.get("width", 64))
    blocks = int(settings.get("blocks", 2))
    obs = keras.Input(obs_shape)
    hidden = layers.Dense(width)(layers.Flatten()(obs))
    for _ in range(blocks):
        change = layers.Dense(width, activation="swish")(layers.LayerNormalization()(hidden))
        hidden = layers.Add()([hidden, layers.Dense(width)(change)])
    # Nearly zero at first: all actions are about equally likely before training.
    small = keras.initializers.Orthogonal(gain=0.01)
    outputs = layers.Dense(num_outputs, kernel_initializer=small, name="policy")(hidden)
    values = layers.Dense(1, name="value")(hidden)
    return keras.Model(obs, [outputs, values])


def features(
    obs_shape: tuple[int, ...], num_outputs: int, settings: Mapping[str, Any]
) -> keras.Model:
    """Return the same trunk for algorithms with a replay, which build heads and critics on top of
    it.
    """
    trunk = residual(obs_shape, num_outputs, settings)
    return keras.Model(trunk.input, trunk.get_layer("policy").input)


if __name__ == "__main__":
    residual((4,), 2, {}).summary()
