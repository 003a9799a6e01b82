"""Groups of keys that are configs of their own inside a config."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from aiorl.config.key import key

__all__ = ["ModelConfig", "MultiAgentConfig", "TransportConfig"]


class ModelConfig(BaseModel):
    """Shape of the networks; keys not listed here are passed on to custom models."""

    model_config = ConfigDict(frozen=True, extra="allow")

    fcnet_hiddens: tuple[int, ...] = key((64, 64), "Width of each hidden layer.", group="Model")
    fcnet_activation: Literal["tanh", "relu", "swish", "silu", "gelu", "elu", "linear"] = key(
        "tanh", "Activation of the hidden layers.", group="Model"
    )
    conv_filters: tuple[tuple[int, int, int], ...] | None = key(
        None,
        "Convolutions as [channels, kernel, stride] each; null takes the Nature CNN for images of about 84x84 and "
        "fitting ones for other sizes.",
        group="Model",
    )
    vf_share_layers: bool = key(False, "Policy and value function share their hidden layers.", group="Model")
    use_lstm: bool = key(False, "Put an LSTM cell behind the hidden layers.", group="Model")
    use_gru: bool = key(False, "Put a GRU cell behind the hidden layers.", group="Model")
    lstm_cell_size: int = key(64, "Width of the recurrent cell.", group="Model", ge=1)
    lstm_use_prev_action_reward: bool = key(
        False, "The recurrent cell also sees the previous action and the previous reward.", group="Model"
    )
    max_seq_len: int = key(
        20, "Longest sequence the recurrent state is trained through.", group="Model", unit="steps", ge=1
    )
    free_log_std: bool = key(
        False, "Standard deviations of continuous actions are free weights, not outputs of the net.", group="Model"
    )
    dim: int = key(84, "Height and width Atari frames are resized to.", group="Model", where="workers", ge=1)
    framestack: bool = key(True, "Stack the last four Atari frames.", group="Model", where="workers")
    custom_preprocessor: str | None = key(
        None, "Import path (package.module:Name) of an observation preprocessor.", group="Model", where="both"
    )
    custom_model: str | None = key(None, "Import path (package.module:Name) of a network.", group="Model")

    @field_validator("fcnet_hiddens")
    @classmethod
    def _check_widths(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if any(width < 1 for width in widths):
            raise ValueError("every width must be at least 1")
        return widths


class MultiAgentConfig(BaseModel):
    """Which policies there are and who acts with which."""

    model_config = ConfigDict(frozen=True, extra="allow")

    policies: dict[str, Any] = key(
        {},
        "Policy id -> null, or a mapping of class, observation_space, action_space and config, all of which may be "
        "left out, or a list of the four; empty means a single policy. Without a class, or with the algorithm's name "
        "for one, it is a network that the learner trains; an import path names a Policy class of your own, which "
        "only acts. Spaces are the environment's unless given, and config holds learning keys that differ.",
        group="Multi-agent", where="both",
    )  # fmt: skip
    policy_mapping_fn: str | None = key(
        None, "Import path of a function: agent id -> policy id.", group="Multi-agent", where="workers"
    )
    policies_to_train: list[str] | None = key(
        None, "Policies that learn; null or empty means all of them.", group="Multi-agent", where="both"
    )
    observation_fn: str | None = key(
        None, "Import path of a function that rewrites the agents' observations.", group="Multi-agent",
        where="workers",
    )  # fmt: skip


class TransportConfig(BaseModel):
    """Sockets, queues and time limits between learner and workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heartbeat_interval_s: float = key(
        1.0, "How often each side says that it lives.", group="Transport", where="both", unit="s", gt=0
    )
    heartbeat_timeout_s: float = key(
        10.0, "Silence after which the other side counts as lost.", group="Transport", where="both", unit="s", gt=0
    )
    build_timeout_s: float = key(
        120.0, "The same for a worker that is building its environment, which may keep it from saying that it lives.",
        group="Transport", unit="s", gt=0,
    )  # fmt: skip
    lease_timeout_s: float = key(
        30.0, "A worker that brings no fragment for so long, and for several times as long as the others need, is "
        "named and what it owes is leased to the others.", group="Transport", unit="s", gt=0,
    )  # fmt: skip
    max_message_bytes: int = key(
        256 * 2**20, "Largest message taken, after decompression; larger ones are refused before memory is taken.",
        group="Transport", where="both", unit="bytes", ge=2**16,
    )  # fmt: skip
    max_header_bytes: int = key(
        2**20, "Largest message header taken.", group="Transport", where="both", unit="bytes", ge=2**17
    )
    send_queue_length: int = key(
        64, "Messages that may wait to be sent to one peer.", group="Transport", where="both", unit="messages", ge=1
    )
    receive_queue_length: int = key(
        64, "Messages that may wait to be read in a worker; what workers send is bounded by leases and in bytes.",
        group="Transport", where="both", unit="messages", ge=1,
    )  # fmt: skip
    compression: Literal["auto", "off"] = key(
        "auto", "auto compresses a column with LZ4 where that pays; off never does.", group="Transport", where="both"
    )
    resend_after_s: float = key(
        5.0, "A fragment not acknowledged for so long is sent again.", group="Transport", where="workers", unit="s",
        gt=0,
    )  # fmt: skip
    reconnect_max_s: float = key(
        5.0, "Longest pause between two tries to reach the learner.", group="Transport", where="workers", unit="s",
        gt=0,
    )  # fmt: skip
