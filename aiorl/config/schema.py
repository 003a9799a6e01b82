"""Every key that may be set: its type, unit, default and meaning.

`CommonConfig` holds the keys that all algorithms share; an algorithm subclasses it, changes defaults and adds its
own keys with `key(...)`. A config is frozen: change it with `updated`, which validates again. Values that are
wrong, unknown or not supported yet raise `ConfigError`, before any process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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

_run = partial(key, group="Run")
_learning = partial(key, group="Learning")
_sampling = partial(key, group="Sampling")
_hosts = partial(key, group="Workers and hosts")
_resources = partial(key, group="Resources")
_reports = partial(key, group="Reports")
_offline = partial(key, group="Offline data")


class CommonConfig(WorkerConfig):
    """The keys that every algorithm has, with their defaults: those of workers, and here the learner's own.

    Subclasses set `algo` and other defaults, add keys, and say by `on_policy` whether a train batch must be made up
    of whole fragments of one policy version.
    """

    on_policy: ClassVar[bool] = False

    # Run
    stop_return: float | None = _run(
        None, "End once the mean return of the last 100 finished episodes is at least this."
    )
    stop_timesteps: int | None = _run(None, "End after so many env steps were trained on.", unit="env steps", ge=1)
    stop_time_s: float | None = _run(None, "End after this time.", unit="s", gt=0)
    run_dir: str | None = _run(None, "Directory for all files of the run; null makes ./runs/<algo>_<env>_<time>.")
    resume: str | None = _run(None, "Run directory to go on from, at its newest valid checkpoint.")
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
    lr: float = _learning(1e-4, "Learning rate.", gt=0)
    train_batch_size: int = _learning(
        200, "Env steps in one train batch. On-policy: a whole number of fragments.", unit="env steps", ge=1
    )
    model: ModelConfig = _learning(ModelConfig(), "Shape of the networks.", where="both")
    optimizer: dict[str, Any] = _learning(
        {}, "Options of the optimizer.",
        unsupported="the algorithm's own keys (lr, grad_clip, ...) set up its optimizer",
    )  # fmt: skip
    xla: Literal["auto", "on", "off"] = _learning(
        "auto", "Compile the update with XLA; auto picks by what the network holds and says which it took."
    )
    eager: bool = _learning(
        False, "Run updates without tf.function, to debug them.",
        unsupported="updates always run compiled; eager updates are not there yet",
    )  # fmt: skip
    no_eager_on_workers: bool = _learning(
        False, "Keep workers in graph mode when eager is on.", unsupported="it goes with eager, which is not there yet"
    )
    eager_tracing: bool = _learning(
        False, "Trace eager policies.", unsupported="it goes with eager, which is not there yet"
    )
    min_iter_time_s: float = _learning(
        0.0, "Least duration of one training iteration, no effect on learning itself; 0 lets the command line report "
        "often at first and once a second later.", unit="s", ge=0,
    )  # fmt: skip
    timesteps_per_iteration: int = _learning(
        0, "Least env steps in one training iteration; no effect on learning itself.", unit="env steps", ge=0
    )

    # Sampling
    num_workers: int = _sampling(
        2, "Worker processes started with the learner; others may join at any time. 0: only those that join.",
        unit="processes", ge=0,
    )  # fmt: skip
    sampling: Literal["auto", "columnar", "general"] = _sampling(
        "auto", "How workers sample: columnar steps plain single-agent environments in lockstep, fastest; general "
        "does everything; auto takes columnar where it can.",
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
    num_gpus: float = _resources(
        0, "GPUs of the learner: 0 hides them, a fraction bounds the share of memory.", ge=0,
        unsupported="training on GPUs is not there yet",
    )  # fmt: skip
    num_gpus_per_worker: float = _resources(0, "The same for workers.", ge=0, unsupported="workers act on CPUs only")
    num_cpus_for_driver: int = _resources(
        1, "CPU threads of the learner outside TensorFlow, as a launcher grants them.", unit="threads", ge=1,
        unsupported="only a launcher can honour it; set threads to bound the learner's TensorFlow threads",
    )  # fmt: skip
    custom_resources_per_worker: dict[str, Any] = _resources({}, "Always empty: aiorl schedules no machines.")
    memory: int = _resources(
        0, "Heap quota of the learner; 0 is none.", unit="bytes", ge=0,
        unsupported="memory quotas are not there yet; bound the process with your service manager (ulimit, cgroups)",
    )  # fmt: skip
    memory_per_worker: int = _resources(
        0, "Heap quota of one worker; 0 is none.", unit="bytes", ge=0,
        unsupported="memory quotas are not there yet; bound the process with ulimit or cgroups",
    )  # fmt: skip
    object_store_memory: int = _resources(
        0, "Most bytes of received batches that wait to be trained on; 0 takes 1 GiB. Nothing is dropped: workers "
        "wait.", unit="bytes", ge=0,
    )  # fmt: skip
    object_store_memory_per_worker: int = _resources(
        0, "Most bytes of batches that wait to be sent in one worker; 0 takes the default.", unit="bytes", ge=0,
        unsupported="leases bound what a worker holds already",
    )  # fmt: skip

    # Reports
    metrics_smoothing_episodes: int = _reports(
        100, "Least episodes that reported averages are taken over, if that many have ended.", unit="episodes", ge=1
    )
    log_sys_usage: bool = _reports(True, "Add CPU and memory use to results.")
    collect_metrics_timeout: float = _reports(
        180.0, "How long metrics of workers are waited for.", unit="s", gt=0,
        unsupported="metrics come with the fragments, so nothing is waited for",
    )  # fmt: skip
    evaluation_interval: int | None = _reports(
        None, "Evaluate every so many iterations; null or 0 never does.", unit="iterations", ge=0,
        unsupported="evaluation workers are not there yet",
    )  # fmt: skip
    evaluation_num_episodes: int = _reports(
        10, "Episodes of one evaluation.", unit="episodes", ge=1, unsupported="evaluation workers are not there yet"
    )
    evaluation_config: dict[str, Any] = _reports(
        {}, "Keys that evaluation workers have otherwise.", unsupported="evaluation workers are not there yet"
    )

    # Offline data
    input: str | list[str] | dict[str, float] = _offline(
        "sampler", "Where experience comes from: sampler, files, or a mixture of sources.",
        unsupported="offline data is not there yet; only sampler is read",
    )  # fmt: skip
    input_evaluation: list[str] = _offline(
        ["is", "wis"], "How offline runs are judged: is, wis, simulation.",
        unsupported="it goes with offline input, which is not there yet",
    )  # fmt: skip
    postprocess_inputs: bool = _offline(
        False, "Postprocess offline trajectories with the current policy.",
        unsupported="it goes with offline input, which is not there yet",
    )  # fmt: skip
    shuffle_buffer_size: int = _offline(
        0, "Batches in the sliding window that shuffles offline input.", unit="batches", ge=0,
        unsupported="it goes with offline input, which is not there yet",
    )  # fmt: skip
    output: str | None = _offline(
        None, "Where sample batches are written.", unsupported="writing of sample batches is not there yet"
    )
    output_compress_columns: list[str] = _offline(
        ["obs", "new_obs"], "Columns that are compressed in the output.",
        unsupported="it goes with output, which is not there yet",
    )  # fmt: skip
    output_max_file_size: int = _offline(
        64 * 2**20, "Size at which a new output file is begun.", unit="bytes", ge=1,
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
