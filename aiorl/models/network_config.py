"""The settings that shape a built-in network, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.errors import ConfigError
from aiorl.models.networks import ConvFilter
from aiorl.models.recurrent import GRUCell, LSTMCell, RecurrentCell

__all__ = ["NetworkConfig"]


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The settings that shape a built-in network.

    Attributes:
        fcnet_hiddens: units of each dense layer; for images, of those after the convolutions when
            `conv_filters` is given.
        fcnet_activation: activation of dense layers, a name Keras knows.
        conv_filters: convolutions over [H, W, C] observations; None = chosen by the image's size (the
            Nature network from 36x36 on), and none for observations that are no images.
        vf_share_layers: True = policy and value share all but their last layers.
        use_lstm: put an LSTM cell before the last layers.
        use_gru: put a GRU cell there instead.
        lstm_cell_size: units of the cell.
        free_log_std: for Gaussians, learn the logarithms of the standard deviations as weights of their
            own instead of outputs of the network.
        lstm_use_prev_action_reward: the cell also sees the previous action, choices one-hot, and the previous
            reward.
        custom_model: import path of what makes a Keras model instead; see `aiorl.models.custom`.
    """

    fcnet_hiddens: tuple[int, ...] = (64, 64)
    fcnet_activation: str = "tanh"
    conv_filters: tuple[ConvFilter, ...] | None = None
    vf_share_layers: bool = False
    use_lstm: bool = False
    use_gru: bool = False
    lstm_cell_size: int = 64
    free_log_std: bool = False
    lstm_use_prev_action_reward: bool = False
    custom_model: str | None = None

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> NetworkConfig:
        """Read the keys of a model config that shape a network; others are ignored.

        Args:
            settings: the keys named above; a filter of `conv_filters` is [channels, kernel, stride], kernel
                and stride a number or a pair.

        Raises: ConfigError for an invalid value.
        """
        chosen = {name: settings[name] for name in cls.__dataclass_fields__ if name in settings}
        if "fcnet_hiddens" in chosen:
            chosen["fcnet_hiddens"] = tuple(chosen["fcnet_hiddens"])
        if chosen.get("conv_filters") is not None:
            chosen["conv_filters"] = tuple(_to_filter(entry) for entry in chosen["conv_filters"])
        config = cls(**chosen)
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError for an invalid value."""
        for size in self.fcnet_hiddens:
            _check_positive("fcnet_hiddens", size, self.fcnet_hiddens)
        _check_positive("lstm_cell_size", self.lstm_cell_size, self.lstm_cell_size)
        if self.use_lstm and self.use_gru:
            raise ConfigError("use_lstm and use_gru exclude each other.", key="model.use_gru", value=True)
        if self.lstm_use_prev_action_reward and self.cell is None:
            raise ConfigError(
                "lstm_use_prev_action_reward needs a recurrent cell.",
                key="model.lstm_use_prev_action_reward",
                value=True,
                hint="Set use_lstm or use_gru.",
            )

    @property
    def cell(self) -> type[RecurrentCell] | None:
        """The kind of recurrent cell, if any."""
        if self.use_lstm:
            return LSTMCell
        return GRUCell if self.use_gru else None


def _to_filter(entry: Any) -> ConvFilter:
    try:
        channels, kernel, stride = entry
        sizes = (channels, *_to_pair(kernel), *_to_pair(stride))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a filter of conv_filters must be [channels, kernel, stride], not {entry!r}.",
            key="model.conv_filters",
            value=entry,
        ) from error
    for size in sizes:
        _check_positive("conv_filters", size, entry)
    return sizes[0], (sizes[1], sizes[2]), (sizes[3], sizes[4])


def _to_pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second


def _check_positive(key: str, size: object, value: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"model.{key} needs positive whole numbers, not {value!r}.", key=f"model.{key}", value=value)
