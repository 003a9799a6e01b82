"""Optimizers of Keras, from an algorithm's own keys and the options in `optimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from aiorl.errors import ConfigError

__all__ = ["make_optimizer"]


def make_optimizer(name: str, options: Mapping[str, Any], **own: Any) -> Any:  # Any: Keras ships no types
    """An optimizer of Keras.

    Args:
        name: of its class, such as Adam.
        options: further arguments of it, as users set them.
        **own: arguments that the algorithm has keys for.
    Raises: ConfigError if one of the options is among those, or Keras takes it not.
    """
    for option in options:
        if option in own:
            raise ConfigError(
                f"optimizer.{option} can't be set: the algorithm has a key of its own for it.",
                key=f"optimizer.{option}",
                value=options[option],
            )
    try:
        return getattr(keras.optimizers, name)(**own, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras makes no {name} with these options: {error}.", key="optimizer", value=dict(options),
            hint=f"See https://keras.io/api/optimizers/{name.lower()}.",
        ) from error  # fmt: skip
