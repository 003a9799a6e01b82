"""Every key that may be set: its type, unit, default and meaning.

`CommonConfig` holds the keys that all algorithms share; an algorithm subclasses it, changes defaults and adds its
own keys with `key(...)`. A config is frozen: change it with `updated`, which validates again. Values that are
wrong, unknown or not supported yet raise `ConfigError`, before any process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ValidationError, field_validator

from aiorl.config.address import is_open_bind
from aiorl.config.check import check_known, check_model, check_supported, plain_error, warn_unheeded
from aiorl.config.key import key
from aiorl.config.legacy import check_removed, rename_legacy
from aiorl.config.merge import deep_update, to_plain, with_base_config
from aiorl.config.parts import ModelConfig, MultiAgentConfig, TransportConfig
from aiorl.config.worker import WorkerConfig
from aiorl.errors import ConfigError

__all__ = [
    "CommonConfig",
    "ModelConfig",
    "MultiAgentConfig",
    "TransportConfig",
    "key",
    "with_common_config",
]


class CommonConfig(WorkerConfig):
    """The keys that every algorithm has, with their defaults: those of workers, and here the learner's own.

    Subclasses set `algo` and other defaults, add keys, and say by `on_policy` whether a train batch must be made up
    of whole fragments of one policy version.
    """

    on_policy: ClassVar[bool] = False

    # Run
    stop_return: float | None = key(
        None, "End once the mean return of the last 100 finished episodes is at least this.", group="Run"
    )
    stop_timesteps: int | None = key(
        None, "End after so many env steps were trained on.", group="Run", unit="env steps", ge=1
    )
    stop_time_s: float | None = key(None, "End after this time.", group="Run", unit="s", gt=0)
    run_dir: str | None = key(
        None, "Directory for all files of the run; null makes ./runs/<algo>_<env>_<time>.", group="Run"
    )
    resume: str | None = key(None, "Run directory to go on from, at its newest valid checkpoint.", group="Run")
    checkpoint_interval_s: float = key(
        60.0, "Time between two checkpoints; 0 writes one at the end only.", group="Run", unit="s", ge=0
    )
    checkpoint_keep: int = key(3, "Newest checkpoints that are kept.", group="Run", unit="checkpoints", ge=1)
    log_max_bytes: int = key(
        64 * 2**20,
        "Size at which log.txt and each logs/worker-N.txt is begun anew; what it held is kept in one file beside it, "
        "NAME.1, so each log takes twice that at most.",
        group="Run", unit="bytes", ge=2**16,
    )  # fmt: skip

    # Learning
    gamma: float = key(0.99, "Discount of future rewards.", group="Learning", ge=0, le=1)
    lr: float = key(1e-4, "Learning rate.", group="Learning", gt=0)
    train_batch_size: int = key(
        200, "Env steps in one train batch. On-policy: a whole number of fragments.", group="Learning",
        unit="env steps", ge=1,
    )  # fmt: skip
    model: ModelConfig = key(ModelConfig(), "Shape of the networks.", group="Learning", where="both")
    optimizer: dict[str, Any] = key(
        {}, "Options of the optimizer.", group="Learning",
        unsupported="the algorithm's own keys (lr, grad_clip, ...) set up its optimizer",
    )  # fmt: skip
    xla: Literal["auto", "on", "off"] = key(
        "auto", "Compile the update with XLA; auto picks by what the network holds and says which it took.",
        group="Learning",
    )  # fmt: skip
    eager: bool = key(
        False, "Run updates without tf.function, to debug them.", group="Learning",
        unsupported="updates always run compiled; eager updates are not there yet",
    )  # fmt: skip
    no_eager_on_workers: bool = key(
        False, "Keep workers in graph mode when eager is on.", group="Learning",
        unsupported="it goes with eager, which is not there yet",
    )  # fmt: skip
    eager_tracing: bool = key(
        False, "Trace eager policies.", group="Learning", unsupported="it goes with eager, which is not there yet"
    )
    min_iter_time_s: float = key(
        0.0, "Least duration of one training iteration, no effect on learning itself; 0 lets the command line report "
        "often at first and once a second later.", group="Learning", unit="s", ge=0,
    )  # fmt: skip
    timesteps_per_iteration: int = key(
        0, "Least env steps in one training iteration; no effect on learning itself.", group="Learning",
        unit="env steps", ge=0,
    )  # fmt: skip

    # Sampling
    num_workers: int = key(
        2, "Worker processes started with the learner; others may join at any time. 0: only those that join.",
        group="Sampling", unit="processes", ge=0,
    )  # fmt: skip
    sampling: Literal["auto", "columnar", "general"] = key(
        "auto",
        "How workers sample: columnar steps plain single-agent environments in lockstep, fastest; general does "
        "everything; auto takes columnar where it can.",
        group="Sampling",
    )  # fmt: skip
    multiagent: MultiAgentConfig = key(
        MultiAgentConfig(), "Which policies there are and who acts with which.", group="Sampling", where="both"
    )

    # Workers and hosts
    bind: str = key(
        "tcp://127.0.0.1:0",
        "Address the learner listens on; port 0 takes a free one. Others than loopback need keys or insecure.",
        group="Workers and hosts",
    )  # fmt: skip
    keys: str | None = key(
        None, "Directory of CURVE keys, as python -m aiorl.keys makes it.", group="Workers and hosts"
    )
    insecure: bool = key(
        False, "Do without keys: anybody who reaches the port can join, on loopback any user of this host.",
        group="Workers and hosts",
    )  # fmt: skip
    max_worker_restarts: int = key(
        3, "Restarts of one local worker before it is given up; a healthy period sets the count back.",
        group="Workers and hosts", ge=0,
    )  # fmt: skip
    ignore_worker_failures: bool = key(
        False, "Go on with the others when a worker is given up; else the run ends with its error.",
        group="Workers and hosts",
    )  # fmt: skip
    extra_python_environs_for_driver: dict[str, str] = key(
        {}, "Environment variables set in the learner.", group="Workers and hosts"
    )

    # Resources
    threads: int = key(
        0, "Threads of the learner's TensorFlow; 0 takes local_tf_session_args, but no more than there are cores.",
        group="Resources", unit="threads", ge=0,
    )  # fmt: skip
    tf_session_args: dict[str, Any] = key(
        {
            "intra_op_parallelism_threads": 2,
            "inter_op_parallelism_threads": 2,
            "gpu_options": {"allow_growth": True},
            "log_device_placement": False,
            "device_count": {"CPU": 1},
            "allow_soft_placement": True,
        },
        "Options of the TensorFlow runtime, wherever it runs.", group="Resources",
    )  # fmt: skip
    local_tf_session_args: dict[str, int] = key(
        {"intra_op_parallelism_threads": 8, "inter_op_parallelism_threads": 8},
        "The same for the learner, which wins there.", group="Resources",
    )  # fmt: skip
    num_gpus: float = key(
        0, "GPUs of the learner: 0 hides them, a fraction bounds the share of memory.", group="Resources", ge=0,
        unsupported="training on GPUs is not there yet",
    )  # fmt: skip
    num_gpus_per_worker: float = key(
        0, "The same for workers.", group="Resources", ge=0, unsupported="workers act on CPUs only"
    )
    num_cpus_for_driver: int = key(
        1, "CPU threads of the learner outside TensorFlow, as a launcher grants them.", group="Resources",
        unit="threads", ge=1,
        unsupported="only a launcher can honour it; set threads to bound the learner's TensorFlow threads",
    )  # fmt: skip
    custom_resources_per_worker: dict[str, Any] = key(
        {}, "Always empty: aiorl schedules no machines.", group="Resources"
    )
    memory: int = key(
        0, "Heap quota of the learner; 0 is none.", group="Resources", unit="bytes", ge=0,
        unsupported="memory quotas are not there yet; bound the process with your service manager (ulimit, cgroups)",
    )  # fmt: skip
    memory_per_worker: int = key(
        0, "Heap quota of one worker; 0 is none.", group="Resources", unit="bytes", ge=0,
        unsupported="memory quotas are not there yet; bound the process with ulimit or cgroups",
    )  # fmt: skip
    object_store_memory: int = key(
        0, "Most bytes of received batches that wait to be trained on; 0 takes 1 GiB. Nothing is dropped: workers "
        "wait.", group="Resources", unit="bytes", ge=0,
    )  # fmt: skip
    object_store_memory_per_worker: int = key(
        0, "Most bytes of batches that wait to be sent in one worker; 0 takes the default.", group="Resources",
        unit="bytes", ge=0,
        unsupported="leases bound what a worker holds already",
    )  # fmt: skip

    # Reports
    metrics_smoothing_episodes: int = key(
        100, "Least episodes that reported averages are taken over, if that many have ended.", group="Reports",
        unit="episodes", ge=1,
    )  # fmt: skip
    log_sys_usage: bool = key(True, "Add CPU and memory use to results.", group="Reports")
    collect_metrics_timeout: float = key(
        180.0, "How long metrics of workers are waited for.", group="Reports", unit="s", gt=0,
        unsupported="metrics come with the fragments, so nothing is waited for",
    )  # fmt: skip
    evaluation_interval: int | None = key(
        None, "Evaluate every so many iterations; null or 0 never does.", group="Reports", unit="iterations", ge=0,
        unsupported="evaluation workers are not there yet",
    )  # fmt: skip
    evaluation_num_episodes: int = key(
        10, "Episodes of one evaluation.", group="Reports", unit="episodes", ge=1,
        unsupported="evaluation workers are not there yet",
    )  # fmt: skip
    evaluation_config: dict[str, Any] = key(
        {}, "Keys that evaluation workers have otherwise.", group="Reports",
        unsupported="evaluation workers are not there yet",
    )  # fmt: skip

    # Offline data
    input: str | list[str] | dict[str, float] = key(
        "sampler", "Where experience comes from: sampler, files, or a mixture of sources.", group="Offline data",
        unsupported="offline data is not there yet; only sampler is read",
    )  # fmt: skip
    input_evaluation: list[str] = key(
        ["is", "wis"], "How offline runs are judged: is, wis, simulation.", group="Offline data",
        unsupported="it goes with offline input, which is not there yet",
    )  # fmt: skip
    postprocess_inputs: bool = key(
        False, "Postprocess offline trajectories with the current policy.", group="Offline data",
        unsupported="it goes with offline input, which is not there yet",
    )  # fmt: skip
    shuffle_buffer_size: int = key(
        0, "Batches in the sliding window that shuffles offline input.", group="Offline data",
        unit="batches", ge=0,
        unsupported="it goes with offline input, which is not there yet",
    )  # fmt: skip
    output: str | None = key(
        None, "Where sample batches are written.", group="Offline data",
        unsupported="writing of sample batches is not there yet",
    )  # fmt: skip
    output_compress_columns: list[str] = key(
        ["obs", "new_obs"], "Columns that are compressed in the output.", group="Offline data",
        unsupported="it goes with output, which is not there yet",
    )  # fmt: skip
    output_max_file_size: int = key(
        64 * 2**20, "Size at which a new output file is begun.", group="Offline data", unit="bytes",
        ge=1,
        unsupported="it goes with output, which is not there yet",
    )  # fmt: skip

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
        check_removed(values)
        values = rename_legacy(values)
        if allow_unknown:
            values = {name: value for name, value in values.items() if name in cls.model_fields}
        check_known(cls, values)
        merged = deep_update(cls().to_dict(), values)
        try:
            config = cls.model_validate(merged)
        except ValidationError as error:
            raise plain_error(cls, error) from None
        config.model_fields_set.intersection_update(values)  # those that are set, not all that were validated
        check_supported(config)
        if config.model.custom_model is None:
            check_model(config.model)
        warn_unheeded("multiagent", config.multiagent)
        config.check()
        return config

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """This config with `changes` deep-merged into it, checked again.

        Raises: ConfigError, as `from_mapping`.
        """
        return type(self).from_mapping(deep_update(self.to_dict(), changes))

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
        if self.model.use_lstm and self.model.use_gru:
            raise ConfigError("model.use_lstm and model.use_gru can't both be true.", key="model.use_gru", value=True)
        if self.model.lstm_use_prev_action_reward and not (self.model.use_lstm or self.model.use_gru):
            raise ConfigError(
                "model.lstm_use_prev_action_reward needs a recurrent cell.",
                key="model.lstm_use_prev_action_reward", value=True,
                hint="Set model.use_lstm or model.use_gru.",
            )  # fmt: skip
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
        self.check_batch_size()

    def sequence_length(self) -> int:
        """Steps of one sequence that is trained through; of complete episodes, the least there are."""
        whole = self.batch_mode == "complete_episodes"  # their fragments are one long row of episodes
        return self.rollout_fragment_length * (self.num_envs_per_worker if whole else 1)

    def check_batch_size(self) -> None:
        """Refuses train batches that whole fragments can't make up.

        Raises: ConfigError with the nearest sizes that work.
        """
        fragment = self.rollout_fragment_length * self.num_envs_per_worker
        size = self.train_batch_size
        if not self.on_policy or self.batch_mode != "truncate_episodes" or size % fragment == 0:
            return
        is_set = "num_envs_per_worker" in self.model_fields_set
        below = size - size % fragment
        fits = f"{below} or {below + fragment}" if below else f"{fragment}"
        raise ConfigError(
            f"train_batch_size {size} can't be made up of fragments of {fragment} env steps "
            f"(rollout_fragment_length {self.rollout_fragment_length} x num_envs_per_worker "
            f"{self.num_envs_per_worker}).",
            key="train_batch_size", value=size,
            hint=f"Set train_batch_size to {fits}, or change rollout_fragment_length."
            + ("" if is_set else " An external environment has num_envs_per_worker: 1; then say so."),
        )  # fmt: skip

    @field_validator("env", mode="before")
    @classmethod
    def _name_env(cls, env: object) -> object:
        """A class is named by its import path, so that workers in other processes find it."""
        if not isinstance(env, type) and not callable(env):
            return env
        module, name = getattr(env, "__module__", "__main__"), getattr(env, "__qualname__", "<locals>")
        if module == "__main__" or "<" in name:
            raise ValueError("workers can't import it; put it at the top of a module, and give 'module:name'")
        return f"{module}:{name}"

    @field_validator("input_evaluation", mode="before")
    @classmethod
    def _want_list(cls, value: object) -> object:
        if not isinstance(value, list):
            raise ValueError("must be a list, such as [is, wis]")
        return value


def with_common_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The common defaults, updated by `extra` one level deep: a sub-dict in `extra` replaces the whole one."""
    return with_base_config(CommonConfig().to_dict(), extra)
