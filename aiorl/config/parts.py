"""Groups of keys that are configs of their own inside a config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator

from aiorl.config.check import plain_error
from aiorl.config.import_path import named, plain_code
from aiorl.config.key import key
from aiorl.errors import ConfigError

__all__ = [
    "Activation",
    "Code",
    "CodeWithSettings",
    "ModelConfig",
    "MultiAgentConfig",
    "SDESettings",
    "TransportConfig",
    "WorkerModelConfig",
    "WorkerMultiAgentConfig",
]

Code = Annotated[str, BeforeValidator(named)]
"""A text that names code; a config takes the object itself as well."""

CodeWithSettings = Annotated[str | dict[str, Any], BeforeValidator(plain_code)]
"""A text that names code, or a mapping that has this text and settings for it."""

Sizes = int | tuple[int, int]
"""Of both sides of an image, or of each."""

Activation = Literal["tanh", "relu", "swish", "silu", "gelu", "elu", "linear"]

_MAX_LAYERS, _MAX_POLICIES = 1000, 1000

_model = partial(key, group="Model")
_agents = partial(key, group="Multi-agent")
_transport = partial(key, group="Transport", where="both")


class WorkerModelConfig(BaseModel):
    """The keys of `model` that workers read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    dim: int = _model(84, "Height and width Atari frames are resized to.", where="workers", ge=1)
    framestack: bool = _model(True, "Stack the last four Atari frames.", where="workers")
    custom_preprocessor: Code | None = _model(
        None, "Preprocessor subclass (package.module:Name) that makes arrays of observations.", where="both"
    )


class ModelConfig(WorkerModelConfig):
    """Shape of the networks; keys not listed here are passed on to custom models."""

    model_config = ConfigDict(frozen=True, extra="allow")

    fcnet_hiddens: tuple[int, ...] = _model((64, 64), "Width of each hidden layer; of images only with conv_filters.")
    fcnet_activation: Activation = _model("tanh", "Activation of the hidden layers; of images only with conv_filters.")
    conv_filters: tuple[tuple[int, Sizes, Sizes], ...] | None = _model(
        None, "Convolutions as [channels, kernel, stride] each; null takes the Nature CNN for images of about 84x84 "
        "and fitting ones for other sizes, with the hidden layer that goes with them. Byte images [C, H, W] are "
        "transposed.",
    )  # fmt: skip
    vf_share_layers: bool = _model(False, "Policy and value function share their hidden layers.")
    use_lstm: bool = _model(False, "Put an LSTM cell behind the hidden layers.")
    use_gru: bool = _model(False, "Put a GRU cell behind the hidden layers.")
    lstm_cell_size: int = _model(64, "Width of the recurrent cell.", ge=1)
    lstm_use_prev_action_reward: bool = _model(
        False, "The recurrent cell also sees the previous action and the previous reward."
    )
    free_log_std: bool = _model(
        False, "Standard deviations of continuous actions are free weights, not outputs of the net."
    )
    initial_log_std: float = _model(
        0.0, "Logarithm that these begin with: less, for example -2, explores by smaller steps.", ge=-20.0, le=2.0
    )
    custom_model: Code | None = _model(
        None, "Function or class (package.module:Name) of (obs_shape, num_outputs, model_config) that makes a Keras "
        "model. The model returns the inputs of the action distribution, alone or with values; for algorithms "
        "with a replay it returns features of any width, in place of the hidden layers.",
    )  # fmt: skip

    @field_validator("fcnet_hiddens")
    @classmethod
    def _check_widths(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if len(widths) > _MAX_LAYERS:
            raise ValueError(f"must be at most {_MAX_LAYERS} widths")
        if any(width < 1 for width in widths):
            raise ValueError("every width must be at least 1")
        return widths

    @field_validator("conv_filters", mode="before")
    @classmethod
    def _check_filters(cls, filters: object) -> object:
        if isinstance(filters, list | tuple) and len(filters) > _MAX_LAYERS:
            raise ValueError(f"must be at most {_MAX_LAYERS} filters")
        for entry in filters if isinstance(filters, list | tuple) else ():
            if not (isinstance(entry, list | tuple) and len(entry) == 3 and all(map(_are_sizes, entry))):
                raise ValueError("a filter is [channels, kernel, stride], in positive whole numbers or pairs of these")
        return filters

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The settings of one network, checked.

        Raises: ConfigError naming the first key at fault.
        """
        try:
            config = cls.model_validate(dict(settings))
        except ValidationError as error:
            raise plain_error(cls, error, "model.") from None
        config.check()
        return config

    @property
    def is_recurrent(self) -> bool:
        """Return whether a built-in network has a recurrent cell."""
        return self.use_lstm or self.use_gru

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        if self.use_lstm and self.use_gru:
            raise ConfigError("model.use_lstm and model.use_gru can't both be true.", key="model.use_gru", value=True)
        if self.lstm_use_prev_action_reward and not self.is_recurrent:
            raise ConfigError(
                "model.lstm_use_prev_action_reward needs a recurrent cell.",
                key="model.lstm_use_prev_action_reward", value=True,
                hint="Set model.use_lstm or model.use_gru.",
            )  # fmt: skip
        if self.initial_log_std and not self.free_log_std:
            raise ConfigError(
                "model.initial_log_std is for deviations that are free weights.",
                key="model.initial_log_std", value=self.initial_log_std, hint="Set model.free_log_std.",
            )  # fmt: skip


class SDESettings(NamedTuple):
    """Deviations of actions that a network's features make up, for exploration by noise of the state (gSDE).

    Attributes:
        initial_log_std: logarithm of the standard deviation that each feature's weights begin with.
        learns_features: the features learn from the deviations, too.
    """

    initial_log_std: float
    learns_features: bool


class WorkerMultiAgentConfig(BaseModel):
    """The keys of `multiagent` that workers read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    policy_mapping_fn: Code | dict[str, str] | None = _agents(
        None, "Function (package.module:Name): agent id -> policy id; it may take episode and worker, too. Or a "
        "mapping of agent ids to policy ids.", where="workers",
    )  # fmt: skip
    observation_fn: Code | None = _agents(
        None, "Function (package.module:Name) that rewrites the agents' observations.", where="workers"
    )


class MultiAgentConfig(WorkerMultiAgentConfig):
    """The policies and the agents that act with each."""

    model_config = ConfigDict(frozen=True, extra="allow")

    policies: dict[str, Any] | Literal["per_agent", "per_space"] = _agents(
        {}, "per_agent: a policy for each agent that the environment names; per_space: one for all agents with the "
        "same spaces, by the id of the first of them. Or policy id -> null, or a mapping of class, "
        "observation_space, action_space and config, all of which may be left out, or a list of the four; empty "
        "means a single policy. Without a class it is a network that the learner trains by the run's algorithm. "
        "class: the name or import path of another algorithm that wants the same leases, which has the run's "
        "sampling, the values set of keys that both have, and otherwise its own defaults; or the import path of a "
        "Policy class of your own, which only acts. Spaces are the environment's unless given, and config holds "
        "learning keys that differ. The config.yaml of a run says all others of a policy with another algorithm "
        "as its defaults; values set on top of that file win.",
    )  # fmt: skip
    policies_to_train: list[str] | None = _agents(None, "Policies that learn; null or empty means all of them.")

    @field_validator("policies", mode="before")
    @classmethod
    def _without_objects(cls, policies: object) -> object:
        if isinstance(policies, Mapping) and len(policies) > _MAX_POLICIES:
            raise ValueError(f"must be at most {_MAX_POLICIES} policies")
        return plain_code(policies)


class TransportConfig(BaseModel):
    """Sockets, queues and time limits between learner and workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heartbeat_interval_s: float = _transport(1.0, "How often each side says that it lives.", unit="s", gt=0)
    heartbeat_timeout_s: float = _transport(10.0, "Silence after which the other side counts as lost.", unit="s", gt=0)
    build_timeout_s: float = _transport(
        120.0, "The same for a worker that is building its environment, which may keep it from saying that it lives.",
        unit="s", gt=0, where="learner",
    )  # fmt: skip
    lease_timeout_s: float = _transport(
        5.0, "A worker that brings no fragment for so long, and for several times as long as the others need, is "
        "named and what it owes is leased to the others.", unit="s", gt=0, where="learner",
    )  # fmt: skip
    max_message_bytes: int = _transport(
        256 * 2**20, "Largest message taken, after decompression; larger ones are refused before memory is taken.",
        unit="bytes", ge=2**16,
    )  # fmt: skip
    max_header_bytes: int = _transport(2**20, "Largest message header taken.", unit="bytes", ge=2**17)
    send_queue_length: int = _transport(64, "Messages that may wait to be sent to one peer.", unit="messages", ge=1)
    compression: Literal["auto", "off"] = _transport(
        "auto", "auto compresses a column with LZ4 where that pays; off never does."
    )
    resend_after_s: float = _transport(
        5.0, "A fragment not acknowledged for so long is sent again.", where="workers", unit="s", gt=0
    )
    reconnect_max_s: float = _transport(
        5.0, "Longest pause between two tries to reach the learner.", where="workers", unit="s", gt=0
    )


def _are_sizes(given: object) -> bool:
    sizes = given if isinstance(given, list | tuple) and len(given) == 2 else [given]
    return all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
