r"""A network of your own in Keras: dense layers with residual connections.

    python -m aiorl.learner --env CartPole-v1 --stop-return 475 \
        --model.custom-model examples.custom_model:residual --model.width 64 --model.blocks 2

`--model.custom-model` names a function (or class) that is called with the shape of an observation, the number of
outputs that the action distribution needs, and all settings below `model`, those of your own included. The Keras
model it gives returns these outputs, or these and one value per observation as here; without values of yours, a
network of the built-in kind estimates them. For algorithms with a replay (dqn, sac, td3, cql, iql) the model gives
features of any width instead, as `features` below does (`--algo dqn --model.custom-model
examples.custom_model:features`): heads and critics are built behind them.

Only the learner imports this file. Workers get the network as an ONNX graph, so they need neither TensorFlow nor
your module. To look at the network:

    python -m examples.custom_model
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
from keras import layers


def residual(obs_shape: tuple[int, ...], num_outputs: int, settings: Mapping[str, Any]) -> keras.Model:
    """Policy and value on one trunk of residual blocks."""
    width = int(settings.get("width", 64))
    blocks = int(settings.get("blocks", 2))
    obs = keras.Input(obs_shape)
    hidden = layers.Dense(width)(layers.Flatten()(obs))
    for _ in range(blocks):
        change = layers.Dense(width, activation="swish")(layers.LayerNormalization()(hidden))
        hidden = layers.Add()([hidden, layers.Dense(width)(change)])
    # Nearly zero at first: all actions are about equally likely before anything has been learned.
    small = keras.initializers.Orthogonal(gain=0.01)
    outputs = layers.Dense(num_outputs, kernel_initializer=small, name="policy")(hidden)
    values = layers.Dense(1, name="value")(hidden)
    return keras.Model(obs, [outputs, values])


def features(obs_shape: tuple[int, ...], num_outputs: int, settings: Mapping[str, Any]) -> keras.Model:
    """The same trunk for algorithms with a replay, which build the rest behind it."""
    trunk = residual(obs_shape, num_outputs, settings)
    return keras.Model(trunk.input, trunk.get_layer("policy").input)


if __name__ == "__main__":
    residual((4,), 2, {}).summary()
