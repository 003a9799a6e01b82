"""Config of a run: the type, unit, default and meaning of every key.

`CommonConfig` holds the keys that all algorithms share; an algorithm subclasses it, changes
defaults and adds its own keys with `key(...)`. A config is frozen: change it with `updated`, which
checks it again. Wrong, unknown and unsupported values raise `ConfigError` before any process is
started.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TextIO, cast

from pydantic import (
    ConfigDict,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    field_serializer,
    field_validator,
)

from aiorl.config import (
    copied,
    deep_update,
    is_group,
    registry,
    to_plain,
    with_base_config,
    without_emptied,
)
from aiorl.config.addresses import dialable, is_open_bind
from aiorl.config.code import (
    code_named_in,
    import_object,
    is_local,
    named,
    not_importable,
    plain_code,
    plain_wrapper,
    refuse_objects,
    with_objects,
    with_values_of_members,
    without_objects,
)
from aiorl.config.key import (
    all_keys,
    check_extras,
    check_known,
    check_values,
    fact_of,
    key,
    plain_error,
    unchanging,
)
from aiorl.config.layers import (
    AUTO,
    DERIVED,
    Layer,
    Origins,
    located,
    merged,
    own_file_layer,
    render_effective,
    restore_withheld,
    with_preset,
    without_overruled,
)
from aiorl.config.rllib_file import no_attribute
from aiorl.config.worker import (
    MAX_ROWS,
    Code,
    CodeWithSettings,
    FragmentKeys,
    OfflineKeys,
    ProcessKeys,
    RunKeys,
    SamplingKeys,
    WorkerModelConfig,
    WorkerMultiAgentConfig,
    agents_as_text,
    check_evaluation_keys,
)
from aiorl.errors import ConfigError

if TYPE_CHECKING:
    from aiorl.config.built_trainer import BuiltTrainer

_log = logging.getLogger(__name__)

_MOST_DERIVED = 2**20
"""Largest size that is derived from others; a user who wants a larger one has to set it."""
_MAX_PROCESSES = 10_000
"""Worker processes of one host: more of them are a mistake that would stop the host."""
_SIZE_UNITS = ("env steps", "steps", "environments", "processes")
_KEYS_OF_OBJECTS = ("env_config", "wrappers", "evaluation_config")
"""Keys whose values can be any objects of this process."""

Sizes = PositiveInt | tuple[PositiveInt, PositiveInt]
"""Size of both sides of an image, or of each side."""

Activation = Literal["tanh", "relu", "swish", "silu", "gelu", "elu", "linear"]

_model = partial(key, group="Model")
_agents = partial(key, group="Multi-agent")
_run = partial(key, group="Run")
_learning = partial(key, group="Learning")
_sampling = partial(key, group="Sampling")
_hosts = partial(key, group="Workers and hosts")
_resources = partial(key, group="Resources", place=False)
_reports = partial(key, group="Reports")


class ModelConfig(WorkerModelConfig):
    """Shape of the networks; other keys are passed on to custom models."""

    model_config = ConfigDict(frozen=True, extra="allow")

    fcnet_hiddens: tuple[PositiveInt, ...] = _model((64, 64), max_length=1000)
    """Width of each hidden layer; for images only with conv_filters."""
    fcnet_activation: Activation = _model("tanh")
    """Activation of the hidden layers; for images only with conv_filters."""
    conv_filters: tuple[tuple[PositiveInt, Sizes, Sizes], ...] | None = _model(
        None, max_length=1000
    )
    """Convolutions as [channels, kernel, stride] each; null uses the Nature CNN for images of about
    84x84 and similar ones for other sizes, with their own hidden layer. Byte images [C, H, W] are
    transposed."""
    conv_parts: bool = _model(True)
    """Give each image in a Dict or Tuple convolutions of its own, like those of a lone image;
    fcnet_hiddens follow, over the features of all images and the other parts. False flattens
    images. Without effect on custom models."""
    vf_hiddens: tuple[PositiveInt, ...] | None = _model(None, max_length=1000)
    """Widths of the value function's hidden layers; null uses fcnet_hiddens."""
    vf_share_layers: bool = _model(False)
    """Share the hidden layers between policy and value function."""
    use_lstm: bool = _model(False)
    """Put an LSTM cell after the hidden layers."""
    use_gru: bool = _model(False)
    """Put a GRU cell after the hidden layers."""
    lstm_cell_size: int = _model(64, ge=1)
    """Width of the recurrent cell."""
    lstm_use_prev_action_reward: bool = _model(False)
    """Feed the previous action and reward to the recurrent cell as well."""
    free_log_std: bool = _model(False)
    """Make the standard deviations of continuous actions free weights instead of outputs of the
    network."""
    initial_log_std: float = _model(0.0, ge=-20.0, le=2.0)
    """Initial logarithm of the free standard deviations; a lower one, such as -2, explores in
    smaller steps."""
    custom_model: Code | None = _model(None)
    """Function or class (package.module:Name) of (obs_shape, num_outputs, model_config) that
    returns a Keras model. Its outputs are the inputs of the action distribution, alone or with
    values; with custom_features and for replay algorithms, features of any width that replace the
    hidden layers."""
    custom_state: tuple[tuple[PositiveInt, ...], ...] = _model((), max_length=64)
    """Shape of each component of the recurrent state of custom_model, such as [[64]]. The model then
    takes [observations, *state] and returns its outputs followed by the next state. Empty: it has
    no memory."""
    custom_features: bool = _model(False)
    """The custom model returns features, on which a recurrent cell, the heads, free_log_std and
    use_sde are built. Policy and value function have a model each, unless vf_share_layers is
    set. Replay algorithms always do so."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the `settings` of one network, after checking them.

        Settings without conv_parts are of earlier versions, which flattened images in a Dict.

        Raises:
            ConfigError: a value is wrong; the error names the first key at fault.
        """
        try:
            config = cls.model_validate({"conv_parts": False, **settings})
        except ValidationError as error:
            raise plain_error(cls, error, "model.") from None
        config.check()
        return config

    @property
    def is_recurrent(self) -> bool:
        """True if the networks have memory."""
        return self.has_cell or bool(self.custom_state)

    @property
    def has_cell(self) -> bool:
        """True if a built-in network has a recurrent cell."""
        return self.use_lstm or self.use_gru

    def check(self) -> None:
        """Refuse values that contradict each other.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        if self.use_lstm and self.use_gru:
            raise ConfigError(
                "model.use_lstm and model.use_gru can't both be true.",
                key="model.use_gru",
                value=self.use_gru,
            )
        if self.custom_state and (self.has_cell or self.custom_model is None):
            raise ConfigError(
                "model.custom_state is the memory of a custom_model without a built-in cell.",
                key="model.custom_state",
                value=self.custom_state,
                hint="Set model.custom_model, and neither model.use_lstm nor model.use_gru.",
            )
        if self.lstm_use_prev_action_reward and not self.has_cell:
            raise ConfigError(
                "model.lstm_use_prev_action_reward needs a recurrent cell.",
                key="model.lstm_use_prev_action_reward",
                value=self.lstm_use_prev_action_reward,
                hint="Set model.use_lstm or model.use_gru.",
            )
        if self.vf_hiddens is not None and self.vf_share_layers:
            raise ConfigError(
                "model.vf_hiddens are layers of the value function alone, but model.vf_share_layers"
                " gives it those of the policy.",
                key="model.vf_hiddens",
                value=self.vf_hiddens,
                hint="Leave out one of the two.",
            )
        if self.custom_features and not self.custom_model:
            raise ConfigError(
                "model.custom_features says what a custom model returns, and there is none.",
                key="model.custom_features",
                value=True,
                hint="Set model.custom_model, or leave it out.",
            )
        if self.initial_log_std and not self.free_log_std:
            raise ConfigError(
                "model.initial_log_std is for deviations that are free weights.",
                key="model.initial_log_std",
                value=self.initial_log_std,
                hint="Set model.free_log_std.",
            )

    def check_outputs(self, *, use_sde: bool) -> None:
        """Refuse settings that need features if a custom model returns outputs.

        Args:
            use_sde: True if exploration depends on the state.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        if self.custom_model is None or self.custom_features:
            return
        built = {
            "use_sde": use_sde,
            "model.use_lstm": self.use_lstm,
            "model.use_gru": self.use_gru,
            "model.free_log_std": self.free_log_std,
        }
        for name, is_set in built.items():
            if is_set:
                raise ConfigError(
                    f"{name} is built on features, but the model of model.custom_model computes the"
                    " outputs itself.",
                    key=name,
                    value=True,
                    hint=(
                        "Let the custom model return its last hidden layer and set"
                        f" model.custom_features: true, or leave out {name} or model.custom_model."
                    ),
                )


class SDESettings(NamedTuple):
    """Settings of state-dependent exploration (gSDE), whose noise is computed from a network's
    features.

    Attributes:
        initial_log_std: initial logarithm of the standard deviation of each feature's weights.
        learns_features: True if the deviations train the features, too.
    """

    initial_log_std: float
    learns_features: bool


class MultiAgentConfig(WorkerMultiAgentConfig):
    """Policies, and the assignment of agents to them."""

    model_config = ConfigDict(frozen=True, extra="allow")

    policies: dict[str, Any] | Literal["per_agent", "per_space"] = _agents({})
    """per_agent: one policy for each agent that the environment names; per_space: one for all
    agents with the same spaces, with the id of the first of them. Or a mapping of policy ids to
    null, to a mapping of class, observation_space, action_space and config (all optional), or to a
    list of these four. Empty means one policy. Without a class, the run's algorithm trains a
    network. class is another algorithm with the same kind of leases, by name or import path, which
    shares the run's sampling and the common keys that are set; or the import path of your own
    Policy class, which only acts. config holds learning keys that differ. In the config.yaml of a
    run, defaults holds the other settings of a policy with another algorithm; values set on top of
    the file take precedence."""
    policies_to_train: list[str] | None = _agents(None)
    """Policies that learn; null or an empty list means all."""

    @field_validator("policies", mode="before")
    @classmethod
    def _without_objects(cls, policies: object) -> object:
        return plain_code(policies)


class CommonConfig(OfflineKeys, ProcessKeys, SamplingKeys, FragmentKeys, RunKeys):
    """Keys of every algorithm, with their defaults: those that workers read, and the learner's own.

    The config of an algorithm sets `algo`, changes defaults, and adds keys. Tables of keys that it
    is also derived from stand before it, so that their `check` calls this one's.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=False, defer_build=False
    )
    __setattr__ = unchanging()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse an order of bases in which the rules of a table of keys would be skipped.

        Raises:
            TypeError: a table of keys stands after a config.
        """
        super().__pydantic_init_subclass__(**kwargs)
        behind = cls.__mro__[cls.__mro__.index(CommonConfig) + 1 :]
        for base in behind:
            if "check" in vars(base):
                raise TypeError(
                    f"bases of {cls.__name__}: {base.__name__} stands after a config, whose check"
                    f" would skip its rules. Name tables of keys first:"
                    f" class {cls.__name__}({base.__name__}, ...)."
                )

    # Run
    preset: str | None = _run(None, place=False)
    """Settings for an algorithm and an environment, by name; auto finds them. Values set elsewhere
    take precedence."""
    stop_return: float | None = _run(None, place=False)
    """End the run once the mean return of the last 100 finished episodes reaches this."""
    stop_evaluation_return: float | None = _run(None, place=False)
    """End the run once the mean return of an evaluation reaches this; see evaluation_interval."""
    stop_timesteps: int | None = _run(None, unit="env steps", ge=1, place=False)
    """End the run after training on this many steps."""
    stop_time_s: float | None = _run(None, unit="s", gt=0, place=False)
    """End the run after this time."""
    run_dir: str | None = _run(None, place=True)
    """Directory for all files of the run; null creates ./runs/<algo>_<env>_<time>."""
    resume: str | None = _run(None, place=True)
    """Run directory to continue from its newest valid checkpoint."""
    init_from: str | None = _run(None, place=True)
    """Checkpoint or run directory to start from: the new run takes the weights, critics (if they
    fit) and filter statistics of its policies, but begins with new counters, optimizer and
    schedules. Policies that the checkpoint lacks are new."""
    checkpoint_interval_s: float = _run(60.0, unit="s", ge=0, place=False)
    """Time between two checkpoints; 0 writes only one, at the end."""
    checkpoint_keep: int = _run(3, unit="checkpoints", ge=1, place=False)
    """Newest checkpoints to keep."""
    log_max_bytes: int = _run(64 * 2**20, unit="bytes", ge=2**16, place=False)
    """Size at which log.txt and each logs/worker-N.txt start again; the previous part is kept in
    NAME.1."""

    env_config_fn: Code | None = _run(None, place=False)
    """Function (package.module:Name) of each iteration's result that returns keys of env_config to
    change, or None: a curriculum. Environments take them before their next episodes."""

    # Learning
    gamma: float = _learning(0.99, ge=0, le=1)
    """Discount of future rewards."""
    lr: float = _learning(1e-4, gt=0, allow_inf_nan=False)
    """Learning rate."""
    train_batch_size: int = _learning(200, unit="env steps", ge=1, le=MAX_ROWS)
    """Env steps per train batch. On-policy algorithms round up to whole fragments, or to whole
    episodes if those are sampled."""
    model: ModelConfig = _learning(ModelConfig(), where="both")
    """Shape of the networks."""
    exploration: CodeWithSettings | None = _learning(None)
    """Exploration that replaces the algorithm's own: an Exploration class (package.module:Name) or
    a name such as EpsilonGreedy; with settings, a mapping {type: NAME, ...}."""
    normalize_actions: bool = _learning(True)
    """Sample the actions of a Box in units of its range: a mean of 0 is the middle, and a standard
    deviation of 1 is half the range, for each number with two finite bounds. False: in the units of
    the environment. SAC, TD3 and CQL squash actions into the bounds in either case."""
    optimizer: dict[str, Any] = _learning({})
    """Further options of the algorithm's Keras optimizer, such as beta_1 or weight_decay."""
    xla: Literal["auto", "on", "off"] = _learning("auto")
    """Compile the update with XLA; auto decides by the kind of network and reports its choice."""
    min_iter_time_s: float = _learning(0.0, unit="s", ge=0)
    """Minimum duration of a training iteration; does not affect learning. With 0, the command line
    reports once a second, more often at first, and after an hour less often: each result then takes
    1/3600 of the run's age, so that a week has 22,000 of them."""
    timesteps_per_iteration: int = _learning(0, unit="env steps", ge=0)
    """Minimum length of a training iteration, the unit of results and evaluation_interval; does not
    affect learning."""

    # Sampling
    num_workers: int = _sampling(2, unit="processes", ge=0, le=_MAX_PROCESSES)
    """Worker processes that the learner starts; others can join at any time. With 0 and no bind,
    this process samples, where a debugger sees it; with 0 and bind, only workers that join
    sample."""
    multiagent: MultiAgentConfig = _sampling(MultiAgentConfig(), where="both")
    """Policies, and the assignment of agents to them."""

    # Workers and hosts
    bind: str = _hosts("tcp://127.0.0.1:0", place=True)
    """Address that the learner listens on; port 0 picks a free port. Any address other than
    loopback requires keys or insecure."""
    advertise: str | None = _hosts(None, place=True)
    """Addresses by which other hosts reach the learner, HOST or tcp://HOST:PORT, separated by
    commas; null takes the address of bind, or all of this host if it binds all."""
    keys: str | None = _hosts(None, place=True)
    """Directory of CURVE keys, created by aiorl keys."""
    insecure: bool = _hosts(False, place=True)
    """Run without keys: anyone who reaches the port can join; on loopback, any user of this
    host."""
    web: int | str | None = _hosts(None, place=True)
    """Port of a page that shows this run in the browser, or HOST:PORT; 0 picks a free port. On
    loopback, it answers to this user's processes. Others need the token in web.token in the run
    directory."""
    client_port: int | str | None = _hosts(None, place=True)
    """Port, or HOST:PORT, at which clients play the episodes of an external environment (env:
    external), over HTTP and WebSocket; 0 picks a free port. On loopback, it answers to this user's
    processes. Others need the token in client.token in the run directory."""
    allow_origin: list[str] = _hosts([], place=True)
    """Origins of web pages that may be clients at client_port, such as https://game.example; "*"
    lets all pages that send the token."""
    max_worker_restarts: int = _hosts(3, ge=0, place=False)
    """Restarts of a local worker before the learner gives up on it; a healthy period resets the
    count."""
    ignore_worker_failures: bool = _hosts(False, place=False)
    """Continue with the other workers after giving up on one, instead of ending the run."""
    extra_python_environs_for_driver: dict[str, str] = _hosts({}, place=True)
    """Environment variables set in the learner."""

    # Resources
    threads: int = _resources(0, unit="threads", ge=0)
    """TensorFlow threads of the learner; 0 uses local_tf_session_args, at most the number of
    cores."""
    tf_session_args: dict[str, Any] = _resources(
        {
            "intra_op_parallelism_threads": 2,
            "inter_op_parallelism_threads": 2,
            "gpu_options": {"allow_growth": True},
            "log_device_placement": False,
            "device_count": {"CPU": 1},
            "allow_soft_placement": True,
        }
    )
    """Options of the TensorFlow runtime in all processes."""
    local_tf_session_args: dict[str, int] = _resources(
        {"intra_op_parallelism_threads": 8, "inter_op_parallelism_threads": 8}
    )
    """Options of the learner's TensorFlow runtime, which take precedence over tf_session_args."""
    compilation_cache: str = _resources("auto", place=True)
    """Directory for code compiled by XLA, so that later runs of the same networks start seconds
    sooner. auto is aiorl/xla in $XDG_CACHE_HOME or ~/.cache, readable only by this user; off keeps
    no code."""
    num_gpus: float = _resources(0, ge=0, allow_inf_nan=False)
    """GPUs that the learner can use: 0 hides them all; a fraction limits the share of one GPU's
    memory."""
    num_cpus_for_driver: int = _resources(1, unit="threads", ge=1)
    """CPU threads that a launcher should grant the learner outside TensorFlow."""
    memory: int = _resources(0, unit="bytes", ge=0)
    """Heap limit of the learner's process; above it the run is saved and ends with an error. 0
    means no limit."""
    object_store_memory: int = _resources(0, unit="bytes", ge=0)
    """Limit of received batches that wait for training, at which workers wait and no data is
    dropped; 0 means 1 GiB."""

    # Reports
    metrics_smoothing_episodes: int = _reports(100, unit="episodes", ge=1, place=False)
    """Number of the latest episodes in reported averages."""
    log_sys_usage: bool = _reports(True, place=False)
    """Add CPU and memory use to results."""
    loggers: list[Code] = _reports([], place=True)
    """Additional loggers: wandb, mlflow, or import paths (package.module:Name). Each is called with
    the run directory and the config and returns an object with write(result) and close(). An error
    of a logger does not end the run."""
    evaluation_interval: int | None = _reports(None, unit="iterations", ge=0, place=False)
    """Evaluate at the start, every time this many iterations have passed, and at the end, with
    whole episodes and the most likely actions; null or 0 never evaluates. best/ keeps the best
    checkpoint."""
    evaluation_num_episodes: int = _reports(10, unit="episodes", ge=1, place=False)
    """Episodes of one evaluation."""
    evaluation_num_workers: int | None = _reports(None, unit="processes", ge=0, place=False)
    """Processes that evaluate during training; with 0, training waits for each evaluation. null
    means 1 if a core is free, else 0."""
    evaluation_config: dict[str, Any] = _reports({}, place=False)
    """Worker keys to override during evaluation, such as env_config; seed and the way of stepping
    environments are fixed. explore: true samples actions."""

    action_spaces: ClassVar[tuple[str, ...] | None] = None
    """Kinds of Gymnasium action spaces that the algorithm supports; None = all that a network
    supports."""

    is_offline: ClassVar[bool] = False
    """True if the algorithm learns from stored experience, not from its own samples."""

    trains_on_what_comes: ClassVar[bool] = True
    """True if train batches are made of fresh samples (one size for all policies); false if a
    replay draws them."""

    needs_whole_episodes: ClassVar[bool] = False
    """True if the algorithm can't learn from truncated episodes because it has no estimate of the
    rewards to follow."""

    _origins: Origins = PrivateAttr(default_factory=Origins)
    _local_objects: list[object] = PrivateAttr(default_factory=list)
    """Objects of this program that the config names. They have names only as long as something holds
    them."""

    def __init__(self, *values: Any, **settings: Any) -> None:
        """Deep-update the algorithm's defaults by `settings` (a sub-dict merges), and check the
        result.

        Args:
            *values: refused; all settings are keywords.
            **settings: keys of the config.

        Raises:
            ConfigError: as in `from_mapping`.
            TypeError: there are positional arguments.
        """
        if values:
            name = type(self).__name__
            raise TypeError(f"{name} takes keywords only, such as {name}(env={values[0]!r:.100}).")
        if settings:
            _check_algo(settings.get("algo"), type(self))
            self._put_together([Layer(settings)])
        else:
            super().__init__()

    if not TYPE_CHECKING:  # type checkers must report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown attribute, with a hint if configs of other libraries have it."""
            if name.startswith("_"):
                return super().__getattr__(name)
            raise no_attribute("config", self, name)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, allow_unknown: bool = False) -> Self:
        """Return the algorithm's defaults, deep-updated by `values` and checked.

        Args:
            values: settings of the user, nested like the config. Not modified.
            allow_unknown: drop unknown top-level keys instead of refusing them.

        Returns:
            A config whose `model_fields_set` are the keys of `values`.

        Raises:
            ConfigError: a key is unknown or gone, a value is wrong, or values contradict each
                other.
        """
        return cls.from_layers([Layer(values)], allow_unknown=allow_unknown)

    @classmethod
    def from_file(cls, path: str | Path, **settings: Any) -> Self:
        """Return the config that a YAML file describes, with `settings` on top.

        Args:
            path: file of `key: value` lines, such as the config.yaml of a run.
            settings: keys that take precedence over the file.

        Raises:
            ConfigError: a setting is wrong; the error names file and line.
        """
        layers = [own_file_layer(Path(path), cls), Layer(settings)]
        with located(layers):
            _check_algo(merged(layers).get("algo"), cls)
        return cls.from_layers(layers)

    @classmethod
    def from_layers(cls, layers: Sequence[Layer], *, allow_unknown: bool = False) -> Self:
        """Return the algorithm's defaults, then the preset that the layers name, then the layers,
        later ones on top.

        Args:
            layers: settings.
            allow_unknown: drop unknown top-level keys instead of refusing them.

        Raises:
            ConfigError: as in `from_mapping`; the error names file and line if a file is at fault.
        """
        config = cls.__new__(cls)
        config._put_together(layers, allow_unknown=allow_unknown)
        return config

    def updated(self, *changes: Mapping[str, Any]) -> Self:
        """Return this config with `changes` deep-merged into it, later ones on top, checked again.

        A group is replaced as a whole by two changes, of which the first is null:
        ``updated({"env_config": None}, {"env_config": {"size": 3}})``. A preset in `changes`
        replaces the previous one; values that were set elsewhere still take precedence.

        Args:
            *changes: settings, nested like the config.

        Raises:
            ConfigError: as in `from_mapping`.
        """
        objects = {name: copied(getattr(self, name)) for name in _KEYS_OF_OBJECTS}
        this_config = self._origins.as_layer({**self.to_dict(), **objects})
        layers = list(map(Layer, changes))
        if self.preset == AUTO or "preset" in merged(layers):
            this_config = replace(this_config, values=self.users_values(), is_record=False)
        return type(self).from_layers([this_config, *layers])

    def _put_together(self, layers: Sequence[Layer], *, allow_unknown: bool = False) -> None:
        """Set the values of the layers, on top of the defaults."""
        config_class = type(self)
        keys = set(config_class.model_fields)
        layers = [_in_new_names(config_class, layer, allow_unknown) for layer in layers]
        with located(layers):
            algo = named(merged(layers).get("algo")) or config_class.model_fields["algo"].default
            layers = without_overruled(with_preset(layers, str(algo), keys), keys)
            defaults = config_class().to_dict()
            values = deep_update(defaults, without_emptied(merged(layers), defaults))
            if any(layer.is_file for layer in layers):
                restore_withheld(values)
            self._set_all(values)
            users_keys = Origins.of(layers).users_keys()
            sizes = self.derived_sizes(users_keys)
            self._check_derived(sizes, users_keys)
            if sizes:
                changes = [
                    f"{name} is {size:,} instead of {getattr(self, name):,}"
                    for name, size in sizes.items()
                ]
                _log.warning("to fit the settings, %s", ", ".join(changes))
                layers = [*layers, Layer(sizes, DERIVED)]
                self._set_all({**values, **sizes})
            self._keep_local_objects()
            self._origins = Origins.of(layers)
            self.model_fields_set.intersection_update(self._origins.users_keys())
            check_extras(self)
            self.check()

    def _keep_local_objects(self) -> None:
        """Keep the objects that only this process knows.

        Raises:
            ConfigError: another process needs one of them.
        """
        has_env_processes = self.remote_worker_envs or self.vectorize == "remote"
        is_one_process = self.is_alone and not self.evaluation_num_workers
        if has_env_processes or not is_one_process:
            for name in _KEYS_OF_OBJECTS:
                vars(self)[name] = with_values_of_members(getattr(self, name))  # a config is frozen
        local_code = {
            name: text for name, text in code_named_in(self.to_dict()).items() if is_local(text)
        }
        self._local_objects = [import_object(text, key=name) for name, text in local_code.items()]
        if has_env_processes:
            refuse_objects(self.env_config, "env_config")
            refuse_objects(self.wrappers, "wrappers")
        if not is_one_process:
            self._refuse_needed_elsewhere(local_code)

    def _refuse_needed_elsewhere(self, local_code: Mapping[str, str]) -> None:
        """Refuse code that other processes need: all but that of loggers, of networks if workers
        compute no gradients, and of the environments of the trainer's own `evaluate`.
        """
        values = self.model_dump(include={"gradients"})  # replay algorithms have no such key
        learner_alone_has_networks = values.get("gradients", "learner") == "learner"
        for name, text in local_code.items():
            is_logger = name.startswith("loggers[")
            is_network = name.endswith(".custom_model")
            is_of_evaluations = name.startswith("evaluation_config.env_config.")
            stays_here = (
                is_logger
                or (is_network and learner_alone_has_networks)
                or (is_of_evaluations and not self.evaluation_interval)
            )
            if not stays_here:
                raise not_importable(name, text)

    def _set_all(self, values: Mapping[str, Any]) -> None:
        """Set the values of all keys, without checking them against each other."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise plain_error(type(self), error) from None

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """Return new values for sizes that no one set and that contradict the values set.

        Args:
            fixed: keys that a user set, which must not change.
        """
        return {}

    def _check_derived(self, sizes: Mapping[str, int], users_keys: Set[str]) -> None:
        """Refuse values that would make a derived size larger than anyone would take without
        knowing.

        Raises:
            ConfigError: a derived size is too large; the error names the user's largest size.
        """
        for name, size in sizes.items():
            if size <= max(_MOST_DERIVED, getattr(self, name)):
                continue
            counts = {
                key: getattr(self, key) or 0
                for key, field in type(self).model_fields.items()
                if key in users_keys
                and fact_of(field, "unit") in _SIZE_UNITS
                and fact_of(field, "group") != "Run"
            }
            largest = max(counts, key=counts.__getitem__, default=name)
            value = counts.get(largest, size)
            raise ConfigError(
                f"{largest} {value:,} needs a {name} of {size:,} instead of"
                f" {getattr(self, name):,}.",
                key=largest,
                value=value,
                hint=f"Set a smaller {largest}, or {name} as well.",
            )

    def users_values(self) -> dict[str, Any]:
        """Return the values that a user set, nested like the config: no defaults, no values of a
        preset.
        """
        return self._origins.users_values(self.to_dict(), type(self)().to_dict())

    @classmethod
    def learns_actions_of(cls, space: object) -> bool:
        """Return whether the algorithm learns actions of a `space`, judged by the space's class and
        its bases.
        """
        kinds = {base.__name__ for base in type(space).__mro__}
        if "Box" in kinds and cast(Any, space).is_bounded():
            kinds.add("bounded Box")
        return cls.action_spaces is None or not kinds.isdisjoint(cls.action_spaces)

    def worker_overrides(self) -> dict[str, Any]:
        """Return values of worker keys that follow from other keys; workers get them instead of the
        keys' own.
        """
        return {}

    def is_default(self, name: str) -> bool:
        """Return whether the key `name` has its default value."""
        return bool(
            getattr(self, name)
            == type(self).model_fields[name].get_default(call_default_factory=True)
        )

    def refuse_unless(self, applies: bool, names: Iterable[str], needed: str, *, hint: str) -> None:
        """Refuse values of keys that have no effect unless a condition holds.

        Args:
            applies: the condition.
            names: names of the keys.
            needed: purpose of the keys.
            hint: how to repair the config.

        Raises:
            ConfigError: a key differs from its default.
        """
        if applies:
            return
        for name in names:
            if not self.is_default(name):
                raise ConfigError(
                    f"{name} is for {needed}.", key=name, value=getattr(self, name), hint=hint
                )

    def origin_of(self, key: str) -> str:
        """Return the origin of a value: a default, a preset, a line of a file, an argument.

        Args:
            key: name of the key, dotted inside groups, such as model.use_lstm.
        """
        field = all_keys(type(self)).get(key)
        default = None if field is None else field.get_default(call_default_factory=True)
        return self._origins.origin_of(key, has_default=isinstance(default, dict) and bool(default))

    def describe(self, file: TextIO | None = None) -> None:
        """Print each effective value and its origin; secrets are withheld.

        Args:
            file: stream to print to; None is standard output.
        """
        print(render_effective(self), end="", file=file)

    def build(self) -> BuiltTrainer:
        """Return a trainer with this config, which takes some seconds.

        Raises:
            AiorlError: the trainer can't be made; see `Trainer`.
        """
        return registry.build_trainer(self)

    @property
    def is_alone(self) -> bool:
        """True if the learner's process samples by itself: it starts no workers and expects
        none.
        """
        return not self.num_workers and self.is_default("bind")

    def to_dict(self) -> dict[str, Any]:
        """Return all keys as plain data: dicts, lists, strings, numbers, None."""
        plain: dict[str, Any] = to_plain(self.model_dump())
        return plain

    def check(self) -> None:
        """Refuse values that contradict each other; subclasses add their checks and call this one.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        self._check_combinations()
        self.model.check()
        self.refuse_unless(
            self.is_offline or self.input != "sampler",
            (
                "input_evaluation",
                "postprocess_inputs",
                "shuffle_buffer_size",
                "input_hold_out",
                "input_max_corrupt",
                "actions_in_input_normalized",
            ),
            "stored experience",
            hint="Leave it out, or let input name files.",
        )
        for name, field in type(self).model_fields.items():
            needed = fact_of(field, "needs")
            if needed:
                hint = f"Set {needed}, or leave it out."
                self.refuse_unless(bool(getattr(self, needed)), (name,), needed, hint=hint)
        self._check_evaluation_config()
        is_open_bind(self.bind, has_keys=self.keys is not None, insecure=self.insecure)
        dialable(self.bind, self.advertise)

    def _check_combinations(self) -> None:
        if self.trains_on_what_comes:  # replay algorithms always build on features
            model = self.model
            model.check_outputs(use_sde=self.state_dependent_noise is not None)
            if model.custom_state and model.custom_features and not model.vf_share_layers:
                raise ConfigError(
                    "model.custom_state is one memory, but with model.custom_features policy and"
                    " value function have a model each.",
                    key="model.custom_state",
                    value=model.custom_state,
                    hint="Set model.vf_share_layers, or leave out model.custom_features.",
                )
        if self.exploration is not None and self.state_dependent_noise is not None:
            raise ConfigError(
                "exploration replaces use_sde, which is another way to explore.",
                key="exploration",
                value=self.exploration,
                hint="Leave out one of the two.",
            )
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise ConfigError(
                f"num_gpus is {self.num_gpus:g}, expected a whole number of GPUs, or a fraction of"
                " one.",
                key="num_gpus",
                value=self.num_gpus,
            )
        if self.sample_async and self.observation_filter == "MeanStdFilter":
            raise ConfigError(
                "sample_async needs a filter that several threads can use, not MeanStdFilter.",
                key="observation_filter",
                value=self.observation_filter,
                hint="Set observation_filter: ConcurrentMeanStdFilter.",
            )
        timeout_s = self.transport.heartbeat_timeout_s
        interval_s = self.transport.heartbeat_interval_s
        if timeout_s <= 2 * interval_s:
            raise ConfigError(
                f"transport.heartbeat_timeout_s is {timeout_s:g}, so one late beat would exceed"
                " it.",
                key="transport.heartbeat_timeout_s",
                value=timeout_s,
                hint=f"Set more than twice heartbeat_interval_s, which is {interval_s:g}.",
            )
        if self.input_epochs is not None:
            self._check_epochs()
        if self.stop_evaluation_return is not None and not self.evaluation_interval:
            raise ConfigError(
                "stop_evaluation_return needs evaluations.",
                key="stop_evaluation_return",
                value=self.stop_evaluation_return,
                hint="Set evaluation_interval: 10, say.",
            )

    def _check_epochs(self) -> None:
        if self.input == "sampler" or isinstance(self.input, dict):
            raise ConfigError(
                "input_epochs is for stored experience alone: samples and mixtures have no end.",
                key="input_epochs",
                value=self.input_epochs,
                hint="Leave it out, or let input name files.",
            )
        if not self.num_workers and not self.is_alone:
            raise ConfigError(
                "input_epochs needs a number of workers, which share the stored experience.",
                key="num_workers",
                value=self.num_workers,
                hint="Set num_workers, or leave bind out to read it in this process.",
            )

    def _check_evaluation_config(self) -> None:
        worker_keys = {
            name: value for name, value in self.evaluation_config.items() if name != "explore"
        }
        try:
            check_evaluation_keys(worker_keys)
        except ConfigError as error:
            raise ConfigError(
                f"evaluation_config: {error.message}",
                key="evaluation_config",
                value=self.evaluation_config,
                hint=error.hint or "It takes keys of workers, and explore.",
            ) from error

    @property
    def state_dependent_noise(self) -> SDESettings | None:
        """Settings of state-dependent exploration noise (gSDE); None = it is off."""
        return None

    @property
    def update_mode(self) -> Literal["auto", "on", "off", "eager"]:
        """Mode of updates: the value of `xla`, or eager; traced eager updates are plain graphs
        without XLA.
        """
        if not self.eager:
            return self.xla
        return "off" if self.eager_tracing else "eager"

    def session_args(self) -> dict[str, Any]:
        """Return the options of the learner's TensorFlow runtime."""
        return deep_update(self.tf_session_args, self.local_tf_session_args)

    def sequence_length(self) -> int:
        """Return the steps of a training sequence; with complete episodes, the least possible
        number.
        """
        if self.is_truncating:
            return self.rollout_fragment_length
        # a fragment of complete episodes holds one long row of them
        return self.rollout_fragment_length * self.num_envs_per_worker

    @field_validator("env", mode="before")
    @classmethod
    def _check_env(cls, env: object) -> object:
        if env is None or isinstance(env, str) or callable(env):
            return env
        raise ValueError("must be a name, or a class or function that makes the environment")

    @field_validator("extra_python_environs_for_driver", "extra_python_environs_for_worker")
    @classmethod
    def _check_variables(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    "names must have a character and no '=', and neither names nor values a NUL"
                )
        return variables

    @field_validator("compilation_cache")
    @classmethod
    def _check_compilation_cache(cls, place: str) -> str:
        if place.lower() in ("on", "true", "yes"):  # a value of `xla`, and no name of a directory
            raise ValueError("must be auto, off or a directory (auto switches it on)")
        return place

    @field_validator("evaluation_config", mode="before")
    @classmethod
    def _with_names_of_code(cls, changes: object) -> object:
        if not is_group(changes):
            return changes
        values: dict[str, Any] = {}
        for name, value in changes.items():
            if name == "env_config":
                values[name] = with_objects(value)
            elif name == "wrappers" and isinstance(value, list | tuple):
                values[name] = list(map(plain_wrapper, value))
            elif name == "wrappers":
                values[name] = value
            else:
                values[name] = plain_code(value)
        return values

    @field_serializer("evaluation_config")
    def _without_objects_of_evaluations(self, changes: dict[str, Any]) -> Any:
        groups = ("env_config", "wrappers")
        return {
            name: without_objects(value, has_members=name in groups)
            for name, value in changes.items()
        }


def with_common_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common defaults, updated by `extra` one level deep: a sub-dict replaces the whole
    sub-dict.
    """
    return with_base_config(CommonConfig().to_dict(), extra)


def _in_new_names(kind: type[CommonConfig], layer: Layer, allow_unknown: bool) -> Layer:
    """Return a layer with new names instead of old ones.

    Raises:
        ConfigError: a key is gone or unknown, or no key can have a value.
    """
    with located([layer]):
        check_values(layer.values)
        values = registry.translate_old_keys(layer.values)
        if allow_unknown:
            values = {name: value for name, value in values.items() if name in kind.model_fields}
        check_known(kind, values)
        multiagent = values.get("multiagent")
        if is_group(multiagent) and is_group(multiagent.get("policy_mapping_fn")):
            # layers merge by the names of agents
            mapping = _agents_as_text(multiagent["policy_mapping_fn"])
            values["multiagent"] = {**multiagent, "policy_mapping_fn": mapping}
    return replace(layer, values=values)


def _agents_as_text(mapping: Mapping[Any, Any]) -> Any:
    """Return a mapping of agents to policies with the ids of agents as text.

    Raises:
        ConfigError: a policy id is not text, or two agents have the same text.
    """
    try:
        return agents_as_text(mapping)
    except ValueError as error:
        key = "multiagent.policy_mapping_fn"
        raise ConfigError(f"{key}: {error}.", key=key, value=mapping) from None


def _check_algo(algo: object, kind: type[CommonConfig]) -> None:
    """Raise ConfigError if settings for one algorithm name another."""
    if kind is CommonConfig or algo is None:
        return
    expected = kind.model_fields["algo"].default
    if str(named(algo)).lower() != expected.lower():
        raise ConfigError(
            f"algo can't be {algo} in {kind.__name__}, which is for {expected}.",
            key="algo",
            value=algo,
            hint="Use the config class of that algorithm, or leave algo out.",
        )
