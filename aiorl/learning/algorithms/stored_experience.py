"""What algorithms share that learn from stored experience; loads no TensorFlow."""

from __future__ import annotations

from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError

__all__ = ["want_stored_experience"]


def want_stored_experience(config: CommonConfig) -> None:
    """Raise ConfigError if a config names no stored experience."""
    if config.input == "sampler":
        raise ConfigError(
            f"{config.algo} learns from stored experience, and none is named.", key="input", value=config.input,
            hint='Give files, such as --input "data/*.json"; --output DIR of another run writes some.',
        )  # fmt: skip
