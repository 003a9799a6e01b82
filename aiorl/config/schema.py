"""Every key that may be set: its type, unit, default and meaning.

`CommonConfig` holds the keys that all algorithms share; an algorithm subclasses it, changes defaults and adds its
own keys with `key(...)`. A config is frozen: change it with `updated`, which validates again. Values that are
wrong, unknown or not supported yet raise `ConfigError`, before any process is started.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TextIO, cast

from pydantic import PrivateAttr, ValidationError, field_validator

import aiorl.config
from aiorl.config.address import is_open_bind
from aiorl.config.check import (
    check_known,
    check_model,
    check_no_search,
    check_numbers,
    check_supported,
    plain_error,
    warn_unheeded,
)
from aiorl.config.effective import render_effective
from aiorl.config.import_path import import_object, is_local, named, not_importable, plain_code
from aiorl.config.key import all_keys, key
from aiorl.config.layers import DERIVED, Layer, Origins, file_layer, located, merged, without_overruled
from aiorl.config.merge import deep_update, to_plain, with_base_config
from aiorl.config.named_code import code_named_in
from aiorl.config.other_names import no_attribute
from aiorl.config.parts import Code, CodeWithSettings, ModelConfig, MultiAgentConfig, SDESettings, TransportConfig
from aiorl.config.presets import AUTO, with_preset
from aiorl.config.renamed import check_removed, rename_legacy
from aiorl.config.withheld import restore_withheld
from aiorl.config.worker import WorkerConfig, check_evaluation_keys
from aiorl.errors import ConfigError

if TYPE_CHECKING:
    from aiorl.run.trainer import AlgorithmTrainer

__all__ = [
    "CommonConfig",
    "ModelConfig",
    "MultiAgentConfig",
    "TransportConfig",
    "key",
    "samples_alone",
    "with_common_config",
]

_log = logging.getLogger(__name__)

_run = partial(key, group="Run")
_learning = partial(key, group="Learning")
_sampling = partial(key, group="Sampling")
_hosts = partial(key, group="Workers and hosts")
_resources = partial(key, group="Resources")
_reports = partial(key, group="Reports")


class CommonConfig(WorkerConfig):
    """The keys that every algorithm has, with their defaults: those of workers, and here the learner's own.

    Algorithms' own configs set `algo` and other defaults, and add keys.
    """

    # Run
    preset: str | None = _run(
        None, "Settings made for an algorithm and an environment, by name; auto takes those for this one, if there are "
        "any. What is set otherwise wins over them.",
    )  # fmt: skip
    stop_return: float | None = _run(
        None, "End once the mean return of the last 100 finished episodes is at least this."
    )
    stop_evaluation_return: float | None = _run(
        None, "End once the mean return of an evaluation is at least this; see evaluation_interval."
    )
    stop_timesteps: int | None = _run(None, "End after so many env steps were trained on.", unit="env steps", ge=1)
    stop_time_s: float | None = _run(None, "End after this time.", unit="s", gt=0)
    run_dir: str | None = _run(None, "Directory for all files of the run; null makes ./runs/<algo>_<env>_<time>.")
    resume: str | None = _run(None, "Run directory to go on from, at its newest valid checkpoint.")
    init_from: str | None = _run(
        None, "Checkpoint, or run directory, whose weights, critics (where they fit) and filter statistics a new run "
        "begins with; its counters, optimizer and schedules begin anew.",
    )  # fmt: skip
    checkpoint_interval_s: float = _run(
        60.0, "Time between two checkpoints; 0 writes one at the end only.", unit="s", ge=0
    )
    checkpoint_keep: int = _run(3, "Newest checkpoints that are kept.", unit="checkpoints", ge=1)
    log_max_bytes: int = _run(
        64 * 2**20, "Size at which log.txt and each logs/worker-N.txt is begun anew; what it held is kept in one file "
        "beside it, NAME.1, so each log takes twice that at most.", unit="bytes", ge=2**16,
    )  # fmt: skip

    # Learning
    gamma: float = _learning(0.99, "Discount of future rewards.", ge=0, le=1)
    lr: float = _learning(1e-4, "Learning rate.", gt=0, allow_inf_nan=False)
    train_batch_size: int = _learning(
        200, "Env steps in one train batch. On-policy: a whole number of fragments, of whole episodes as many as have "
        "so many.", unit="env steps", ge=1,
    )  # fmt: skip
    model: ModelConfig = _learning(ModelConfig(), "Shape of the networks.", where="both")
    exploration: CodeWithSettings | None = _learning(
        None, "How actions depart from those of the network, in place of the algorithm's own way: an Exploration class "
        "(package.module:Name), or a name such as EpsilonGreedy; with settings a mapping, {type: NAME, ...}.",
    )  # fmt: skip
    optimizer: dict[str, Any] = _learning(
        {},
        "Options of the algorithm's Keras optimizer beyond the algorithm's own keys, such as beta_1 or weight_decay.",
    )
    xla: Literal["auto", "on", "off"] = _learning(
        "auto", "Compile the update with XLA; auto picks by what the network holds and says which it took."
    )
    min_iter_time_s: float = _learning(
        0.0, "Least duration of one training iteration, no effect on learning itself; 0 lets the command line report "
        "often at first and once a second later.", unit="s", ge=0,
    )  # fmt: skip
    timesteps_per_iteration: int = _learning(
        0, "Least env steps in one training iteration, which is what results and evaluation_interval go by; no effect "
        "on learning itself.", unit="env steps", ge=0,
    )  # fmt: skip

    # Sampling
    num_workers: int = _sampling(
        2, "Worker processes started with the learner; others may join at any time. 0: without bind this process "
        "samples by itself, where a debugger sees it; with bind, only workers that join do.", unit="processes", ge=0,
    )  # fmt: skip
    multiagent: MultiAgentConfig = _sampling(
        MultiAgentConfig(), "Which policies there are and who acts with which.", where="both"
    )

    # Workers and hosts
    bind: str = _hosts(
        "tcp://127.0.0.1:0", "Address the learner listens on; port 0 takes a free one. Others than loopback need keys "
        "or insecure.",
    )  # fmt: skip
    keys: str | None = _hosts(None, "Directory of CURVE keys, as python -m aiorl.keys makes it.")
    insecure: bool = _hosts(
        False, "Do without keys: anybody who reaches the port can join, on loopback any user of this host."
    )
    max_worker_restarts: int = _hosts(
        3, "Restarts of one local worker before it is given up; a healthy period sets the count back.", ge=0
    )
    ignore_worker_failures: bool = _hosts(
        False, "Go on with the others when a worker is given up; else the run ends with its error."
    )
    extra_python_environs_for_driver: dict[str, str] = _hosts({}, "Environment variables set in the learner.")

    # Resources
    threads: int = _resources(
        0, "Threads of the learner's TensorFlow; 0 takes local_tf_session_args, but no more than there are cores.",
        unit="threads", ge=0,
    )  # fmt: skip
    tf_session_args: dict[str, Any] = _resources(
        {
            "intra_op_parallelism_threads": 2, "inter_op_parallelism_threads": 2, "gpu_options": {"allow_growth": True},
            "log_device_placement": False, "device_count": {"CPU": 1}, "allow_soft_placement": True,
        },
        "Options of the TensorFlow runtime, wherever it runs.",
    )  # fmt: skip
    local_tf_session_args: dict[str, int] = _resources(
        {"intra_op_parallelism_threads": 8, "inter_op_parallelism_threads": 8}, "The same for the learner, which wins "
        "there.",
    )  # fmt: skip
    compilation_cache: str = _resources(
        "auto", "Directory that keeps what XLA compiled, so that later runs of the same networks start seconds sooner; "
        "auto is aiorl/xla in $XDG_CACHE_HOME or ~/.cache, off keeps nothing. Closed to others: it holds machine code.",
    )  # fmt: skip
    num_gpus: float = _resources(
        0, "GPUs that the learner may use: 0 hides them, a fraction bounds the share of the memory of one.", ge=0,
        allow_inf_nan=False,
    )  # fmt: skip
    num_gpus_per_worker: float = _resources(
        0, "The same for workers.", ge=0, unsupported="networks act with ONNX Runtime on CPUs there",
    )  # fmt: skip
    num_cpus_for_driver: int = _resources(
        1, "CPU threads of the learner outside TensorFlow: what a launcher is to grant it. Within the learner, threads "
        "bounds those of TensorFlow.", unit="threads", ge=1,
    )  # fmt: skip
    custom_resources_per_worker: dict[str, Any] = _resources({}, "Always empty: aiorl schedules no machines.")
    memory: int = _resources(
        0, "Most heap that the learner's process may take: beyond it the run ends with an error that says so, and is "
        "saved. 0 is no quota.", unit="bytes", ge=0,
    )  # fmt: skip
    object_store_memory: int = _resources(
        0, "Most bytes of received batches that wait to be trained on; 0 takes 1 GiB. Nothing is dropped: workers "
        "wait.", unit="bytes", ge=0,
    )  # fmt: skip

    # Reports
    metrics_smoothing_episodes: int = _reports(
        100, "Least episodes that reported averages are taken over, if that many have ended.", unit="episodes", ge=1
    )
    log_sys_usage: bool = _reports(True, "Add CPU and memory use to results.")
    loggers: list[Code] = _reports(
        [], "More that takes each result: wandb, mlflow, or import paths (package.module:Name), called with the run "
        "directory and the config; what they give has write(result) and close(). None of them can fail a run.",
    )  # fmt: skip
    collect_metrics_timeout: float = _reports(
        180.0, "Longest wait for metrics of workers. They come with the fragments, so it is never as long; what comes "
        "late counts in the next iteration.", unit="s", gt=0,
    )  # fmt: skip
    evaluation_interval: int | None = _reports(
        None, "Evaluate at the beginning and every so many iterations, by whole episodes and the most likely actions; "
        "null or 0 never does. The checkpoint that did best is kept in best/.", unit="iterations", ge=0,
    )  # fmt: skip
    evaluation_num_episodes: int = _reports(10, "Episodes of one evaluation.", unit="episodes", ge=1)
    evaluation_num_workers: int | None = _reports(
        None, "Processes that evaluate beside training; 0: training waits for each evaluation. null takes one where "
        "a core is free, else 0.", unit="processes", ge=0,
    )  # fmt: skip
    evaluation_config: dict[str, Any] = _reports(
        {}, "Keys of workers that are otherwise in an evaluation, such as env_config; not seed, nor how environments "
        "are stepped. explore: true draws actions.",
    )  # fmt: skip

    action_spaces: ClassVar[tuple[str, ...] | None] = None
    """Kinds of Gymnasium spaces that the algorithm chooses actions of; None = all that a network can."""

    is_offline: ClassVar[bool] = False
    """What it learns from is no samples of its own, but what others stored."""

    trains_on_what_comes: ClassVar[bool] = True
    """What is sampled makes up the train batches, whose size so is all policies' of a run; else they are drawn."""

    needs_whole_episodes: ClassVar[bool] = False
    """What it learns from is wrong where a fragment cuts an episode: nothing stands for the rewards that follow."""

    _origins: Origins = PrivateAttr(default_factory=Origins)
    _held: list[object] = PrivateAttr(default_factory=list)  # the objects that only this process knows

    def __init__(self, *values: Any, **settings: Any) -> None:
        """The algorithm's defaults, deep-updated by `settings` (a sub-dict merges), checked as a whole.

        Raises: ConfigError, as `from_mapping`; TypeError if there are positional arguments.
        """
        if values:
            name = type(self).__name__
            raise TypeError(f"{name} takes keywords only, such as {name}(env={values[0]!r:.100}).")
        if settings:
            _check_algo(settings.get("algo"), type(self))
            self._put_together([Layer(settings)])
        else:
            super().__init__()

    if not TYPE_CHECKING:  # which should know the attributes that there are

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown attribute, with a hint where configs of other libraries have it."""
            if name.startswith("_"):
                return super().__getattr__(name)
            raise no_attribute("config", self, name)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, allow_unknown: bool = False) -> Self:
        """The algorithm's defaults, deep-updated by `values`, checked as a whole.

        Args:
            values: what the user sets; nested as the config is. Not modified.
            allow_unknown: drop unknown top-level keys instead of refusing them.
        Returns: a config whose `model_fields_set` are the keys of `values`.
        Raises: ConfigError on legacy keys that are gone, unknown keys, bad values, values not supported yet, and
            values that don't go together.
        """
        return cls.from_layers([Layer(values)], allow_unknown=allow_unknown)

    @classmethod
    def from_file(cls, path: str | Path, **settings: Any) -> Self:
        """The config that a YAML file describes, with `settings` on top.

        Args:
            path: file of `key: value` lines, such as the config.yaml of a run.
            settings: keys that win over the file's.
        Raises: ConfigError naming file and line.
        """
        layers = [file_layer(Path(path)), Layer(settings)]
        try:
            _check_algo(merged(layers).get("algo"), cls)
        except ConfigError as error:
            error.message = located(error.message, error.key, layers)
            raise
        return cls.from_layers(layers)

    @classmethod
    def from_layers(
        cls, layers: Sequence[Layer], *, allow_unknown: bool = False, environ: Mapping[str, str] | None = None
    ) -> Self:
        """The algorithm's defaults, the preset that the layers name, and the layers, later ones on top.

        Args:
            layers: of settings.
            allow_unknown: drop unknown top-level keys instead of refusing them.
            environ: the process's environment, which values that a saved config withholds are taken from.
        Raises: ConfigError, as `from_mapping`, naming file and line where a file is at fault.
        """
        config = cls.__new__(cls)
        config._put_together(layers, allow_unknown=allow_unknown, environ=environ)
        return config

    def updated(self, *changes: Mapping[str, Any]) -> Self:
        """This config with `changes` deep-merged into it, later ones on top, checked again.

        A preset among them takes the place of the one there was; what was set otherwise wins over it as ever.

        Raises: ConfigError, as `from_mapping`.
        """
        own, layers = self._origins.as_layer(self.to_dict()), list(map(Layer, changes))
        given = merged(layers)
        if "preset" in given or self.preset == AUTO:
            own = replace(own, values=self.users_values(), is_record=False)
        return type(self).from_layers([own, *layers])

    def _put_together(
        self, layers: Sequence[Layer], *, allow_unknown: bool = False, environ: Mapping[str, str] | None = None
    ) -> None:
        """Become what the layers say, over the defaults."""
        kind = type(self)
        for layer in layers:
            check_numbers(layer.values)
        layers = [_in_new_names(kind, layer, allow_unknown) for layer in layers]
        algo = kind.model_fields["algo"].default
        try:
            keys = set(kind.model_fields)
            layers = without_overruled(with_preset(layers, str(named(merged(layers).get("algo")) or algo), keys), keys)
            values = deep_update(kind().to_dict(), merged(layers))
            if any(layer.is_file for layer in layers):
                restore_withheld(values, os.environ if environ is None else environ)
            self._take(values)
            sizes = self.derived_sizes(Origins.of(layers).users_keys())
            if sizes:
                changes = [f"{name} is {size:,} instead of {getattr(self, name):,}" for name, size in sizes.items()]
                _log.warning("to fit what is set, %s", ", ".join(changes))
                layers = [*layers, Layer(sizes, DERIVED)]
                self._take({**values, **sizes})
            self._hold_objects()
            self._origins = Origins.of(layers)
            self.model_fields_set.intersection_update(self._origins.users_keys())
            check_supported(self)
            if self.model.custom_model is None:
                check_model(self, self.model)
            warn_unheeded(self, "multiagent", self.multiagent)
            self.check()
        except ConfigError as error:
            error.message = located(error.message, error.key, layers)
            raise

    def _hold_objects(self) -> None:
        """Keep the objects that only this process knows, if nobody else needs them."""
        found = {name: text for name, text in code_named_in(self.to_dict()).items() if is_local(text)}
        self._held = [import_object(text, key=name) for name, text in found.items()]
        if self.is_alone and not self.evaluation_num_workers:
            return
        values = self.model_dump(include={"gradients"})  # replay algorithms have no such key
        stays_here = values.get("gradients", "learner") == "learner"
        for name, text in found.items():
            if not name.startswith("loggers[") and not (stays_here and name.endswith(".custom_model")):
                raise not_importable(name, text)

    def _take(self, values: Mapping[str, Any]) -> None:
        """Become what the values of all keys say, whether or not these go together."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise plain_error(type(self), error) from None

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """Return other values for sizes that nobody set, where what is set would not go together with theirs.

        Args:
            fixed: the keys that a user set, which stay as they are.
        """
        return {}

    def users_values(self) -> dict[str, Any]:
        """What a user set, nested as the config is: neither defaults nor what a preset says."""
        return self._origins.users_values(self.to_dict(), type(self)().to_dict())

    @classmethod
    def learns_actions_of(cls, space: object) -> bool:
        """Whether the algorithm learns actions of a space, by what the space is or is derived from."""
        kinds = {base.__name__ for base in type(space).__mro__}
        if "Box" in kinds and cast(Any, space).is_bounded():
            kinds.add("bounded Box")
        return cls.action_spaces is None or not kinds.isdisjoint(cls.action_spaces)

    def is_default(self, name: str) -> bool:
        """Whether a key has the value that it has unless somebody says otherwise."""
        return bool(getattr(self, name) == type(self).model_fields[name].get_default(call_default_factory=True))

    def refuse_unless(self, applies: bool, names: Iterable[str], needed: str, *, hint: str) -> None:
        """Refuse values of keys that would do nothing as the others are.

        Args:
            applies: whether they do something.
            names: of the keys.
            needed: what they are for.
            hint: how to mend it.

        Raises:
            ConfigError: one has another value than its default.
        """
        for name in () if applies else names:
            if not self.is_default(name):
                raise ConfigError(f"{name} is for {needed}.", key=name, value=getattr(self, name), hint=hint)

    def origin_of(self, key: str) -> str:
        """Where a value comes from: a default, a preset, a line of a file, an argument.

        Args:
            key: dotted inside groups, such as model.use_lstm.
        """
        field = dict(all_keys(type(self))).get(key)
        default = None if field is None else field.get_default(call_default_factory=True)
        return self._origins.origin_of(key, has_default=isinstance(default, dict) and bool(default))

    def describe(self, file: TextIO | None = None) -> None:
        """Print each effective value and where it comes from; secrets are withheld.

        Args:
            file: where to; None is standard output.
        """
        (sys.stdout if file is None else file).write(render_effective(self))

    def build(self) -> AlgorithmTrainer:
        """Return a trainer with this config; takes some seconds.

        Raises: what the trainer raises.
        """
        trainer: AlgorithmTrainer = aiorl.config.build_trainer(self)
        return trainer

    @property
    def is_alone(self) -> bool:
        """Whether nobody but the learner's process is to sample: no workers are started, and none expected."""
        return samples_alone({"num_workers": self.num_workers, "bind": self.bind})

    def to_dict(self) -> dict[str, Any]:
        """All keys as plain data: dicts, lists, strings, numbers, None."""
        plain: dict[str, Any] = to_plain(self.model_dump())
        return plain

    def check(self) -> None:
        """Refuses values that don't go together; subclasses add theirs and call this one.

        Raises: ConfigError naming the key that should change.
        """
        if self.custom_resources_per_worker:
            raise ConfigError(
                "custom_resources_per_worker must be empty: aiorl schedules no machines.",
                key="custom_resources_per_worker", value=self.custom_resources_per_worker,
                hint="Start workers where the resources are: python -m aiorl.worker --connect tcp://HOST:PORT",
            )  # fmt: skip
        self._check_files()
        if self.exploration is not None and self.state_dependent_noise is not None:
            raise ConfigError(
                "exploration takes the place of use_sde, which is another way to explore.",
                key="exploration", value=self.exploration, hint="Leave out one of the two.",
            )  # fmt: skip
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise ConfigError(
                f"num_gpus is {self.num_gpus:g}, expected a whole number of GPUs, or a fraction of one.",
                key="num_gpus", value=self.num_gpus,
            )  # fmt: skip
        self.model.check()
        self._check_evaluation()
        if self.sample_async and self.observation_filter == "MeanStdFilter":
            raise ConfigError(
                "sample_async needs a filter that several threads may use, not MeanStdFilter.",
                key="observation_filter", value=self.observation_filter,
                hint="Set observation_filter: ConcurrentMeanStdFilter.",
            )  # fmt: skip
        if self.transport.heartbeat_timeout_s <= 2 * self.transport.heartbeat_interval_s:
            raise ConfigError(
                f"transport.heartbeat_timeout_s is {self.transport.heartbeat_timeout_s:g}, which one late beat "
                "would pass.",
                key="transport.heartbeat_timeout_s", value=self.transport.heartbeat_timeout_s,
                hint=f"Set more than {2 * self.transport.heartbeat_interval_s:g}, twice heartbeat_interval_s.",
            )  # fmt: skip
        is_open_bind(self.bind, has_keys=self.keys is not None, insecure=self.insecure)

    def _check_files(self) -> None:
        """Of experience that is read and written."""
        if self.input_epochs is not None and (self.input == "sampler" or isinstance(self.input, dict)):
            raise ConfigError(
                "input_epochs is for stored experience alone: what is sampled, or mixed, has no end.",
                key="input_epochs", value=self.input_epochs, hint="Leave it out, or let input name files.",
            )  # fmt: skip
        if self.input_epochs is not None and not self.num_workers and not self.is_alone:
            raise ConfigError(
                "input_epochs needs a number of workers, who share the stored experience between them.",
                key="num_workers", value=0, hint="Set num_workers, or leave bind out to read it in this process.",
            )  # fmt: skip
        self.refuse_unless(
            self.is_offline or self.input != "sampler",
            (
                "input_evaluation", "postprocess_inputs", "shuffle_buffer_size", "input_hold_out", "input_max_corrupt",
                "actions_in_input_normalized",
            ),
            "stored experience", hint="Leave it out, or let input name files.",
        )  # fmt: skip
        self.refuse_unless(
            self.output is not None, ("output_compress_columns", "output_max_file_size"), "what output writes",
            hint="Leave it out, or set output.",
        )  # fmt: skip

    def _check_evaluation(self) -> None:
        changes = {name: value for name, value in self.evaluation_config.items() if name != "explore"}
        try:
            check_evaluation_keys(changes)
        except ConfigError as error:
            raise ConfigError(
                f"evaluation_config: {error.message}", key="evaluation_config", value=self.evaluation_config,
                hint=error.hint or "It takes keys of workers, and explore.",
            ) from error  # fmt: skip
        if self.evaluation_interval and not changes and self.evaluation_config.get("explore"):
            raise ConfigError(
                "An evaluation that draws actions, and has no settings of its own, tells what training tells.",
                key="evaluation_config", value=self.evaluation_config,
                hint="Leave out explore, or give it settings of its own, such as env_config.",
            )  # fmt: skip
        if self.stop_evaluation_return is not None and not self.evaluation_interval:
            raise ConfigError(
                "stop_evaluation_return needs evaluations.", key="stop_evaluation_return",
                value=self.stop_evaluation_return, hint="Set evaluation_interval: 10, say.",
            )  # fmt: skip

    @property
    def state_dependent_noise(self) -> SDESettings | None:
        """How networks make noise of the state (gSDE); None = they don't."""
        return None

    @property
    def update_mode(self) -> Literal["auto", "on", "off", "eager"]:
        """How updates run: compiled by XLA or not, as `xla` says, or eagerly; traced eager ones are plain graphs."""
        if not self.eager:
            return self.xla
        return "off" if self.eager_tracing else "eager"

    def session_args(self, worker_index: int) -> dict[str, Any]:
        """Options of TensorFlow's runtime in a process; those of index 0, the learner, have its own on top."""
        own = self.local_tf_session_args if worker_index == 0 else {}
        return deep_update(self.tf_session_args, own)

    def sequence_length(self) -> int:
        """Steps of one sequence that is trained through; of complete episodes, the least there are."""
        whole = self.batch_mode == "complete_episodes"  # their fragments are one long row of episodes
        return self.rollout_fragment_length * (self.num_envs_per_worker if whole else 1)

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
                raise ValueError("names must have a character and no '=', and neither names nor values a NUL")
        return variables

    @field_validator("evaluation_config", mode="before")
    @classmethod
    def _without_objects(cls, changes: object) -> object:
        if not isinstance(changes, Mapping):
            return changes
        return {name: value if name == "env_config" else plain_code(value) for name, value in changes.items()}

    @field_validator("input_evaluation", mode="before")
    @classmethod
    def _want_list(cls, value: object) -> object:
        if not isinstance(value, list):
            raise ValueError("must be a list, such as [is, wis]")
        return value


def samples_alone(settings: Mapping[str, Any]) -> bool:
    """Whether settings, checked or not, have the learner's process sample by itself; see `CommonConfig.is_alone`."""
    fields = CommonConfig.model_fields
    found = {name: settings.get(name, fields[name].default) for name in ("num_workers", "bind")}
    return found == {"num_workers": 0, "bind": fields["bind"].default}


def with_common_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The common defaults, updated by `extra` one level deep: a sub-dict in `extra` replaces the whole one."""
    return with_base_config(CommonConfig().to_dict(), extra)


def _in_new_names(kind: type[CommonConfig], layer: Layer, allow_unknown: bool) -> Layer:
    """A layer with legacy names replaced, and no key in it that there is not.

    Raises: ConfigError on keys that are gone or unknown.
    """
    try:
        check_no_search(layer.values)
        check_removed(layer.values)
        values = rename_legacy(layer.values)
        if allow_unknown:
            values = {name: value for name, value in values.items() if name in kind.model_fields}
        check_known(kind, values)
    except ConfigError as error:
        error.message = located(error.message, error.key, [layer])
        raise
    return replace(layer, values=values)


def _check_algo(algo: object, kind: type[CommonConfig]) -> None:
    """Raise ConfigError if settings of an algorithm name another one."""
    own = kind.model_fields["algo"].default
    if kind is not CommonConfig and algo is not None and str(named(algo)).lower() != own.lower():
        raise ConfigError(
            f"algo can't be {algo} in {kind.__name__}, which is for {own}.", key="algo", value=algo,
            hint="Take the config class of that algorithm, or leave algo out.",
        )  # fmt: skip
