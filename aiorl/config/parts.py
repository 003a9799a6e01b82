"""Parts of the learner's config, by who reads them.

A run takes its config apart once, where it is put together, and hands each of its parts only the keys
that this part obeys. Users' classes, such as algorithms and callbacks, read the config itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiorl.config.layers import without_secrets
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import TransportConfig

_MEASURE = (
    "env",
    "env_config",
    "wrappers",
    "horizon",
    "clip_actions",
    "preprocessor_pref",
    "evaluation_config",
)
"""Keys that decide what the score of an evaluation measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePart:
    """Settings of TensorFlow in the learner's process.

    Attributes:
        compilation_cache: directory for code compiled by XLA, "auto" or "off".
        num_gpus: GPUs to use, or a share of one.
        threads: threads of its kernels; 0 = as in ``session_args``.
        session_args: options of the runtime.
    """

    compilation_cache: str = "off"
    num_gpus: float = 0.0
    threads: int = 0
    session_args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: CommonConfig) -> Self:
        """Take this part of a config."""
        return cls(
            compilation_cache="off" if config.xla == "off" else config.compilation_cache,
            num_gpus=config.num_gpus,
            threads=config.threads,
            session_args=config.session_args(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPart:
    """Address, keys and limits of the connections to workers.

    Attributes:
        bind: address that the learner listens on.
        advertise: addresses by which other hosts reach it; None = those of ``bind``.
        keys: directory of its keys; None = it has none.
        insecure: True if anyone who reaches the port can join.
        limits: sizes and times of messages and connections.
        max_queued_bytes: bytes of fragments that may wait for training; 0 = a default.
    """

    bind: str
    advertise: str | None
    keys: str | None
    insecure: bool
    limits: TransportConfig
    max_queued_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """Processes that sample, and what they sample.

    Attributes:
        env: name of the environment.
        is_alone: True if the learner's process samples by itself.
        num_workers: workers that the learner starts.
        num_envs: environments of all these workers, or of the learner's process.
        has_horizon: True if episodes end after a number of steps set by the user, or are stored.
        is_truncating: True if fragments can end within an episode.
        data_ends: True if the run ends when all stored experience has been read.
        memory: heap limit of the learner's process, bytes; 0 = none.
        max_worker_restarts: restarts of a worker before it is given up.
        ignore_worker_failures: True if the run continues without workers that are given up.
        num_cpus_per_worker: threads of the libraries in a worker.
        worker_environ: environment variables of the workers.
    """

    env: str
    is_alone: bool
    num_workers: int
    num_envs: int
    has_horizon: bool
    is_truncating: bool
    data_ends: bool
    memory: int
    max_worker_restarts: int
    ignore_worker_failures: bool
    num_cpus_per_worker: int
    worker_environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart:
    """Length and contents of the results of iterations.

    Attributes:
        min_iter_time_s: least duration of an iteration.
        timesteps_per_iteration: least env steps trained on in an iteration.
        metrics_smoothing_episodes: episodes in averages.
        log_sys_usage: True if results have the use of CPU and memory.
    """

    min_iter_time_s: float = 0.0
    timesteps_per_iteration: int = 0
    metrics_smoothing_episodes: int = 100
    log_sys_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPart:
    """Files and ports of a run for users.

    Attributes:
        loggers: the user's loggers.
        config: all keys as plain data without secrets, for the loggers.
        web: port of the run's page; None = it has none.
        client_port: port for clients that play episodes; None = there is none.
        allow_origin: origins whose web pages may be such clients.
        advertise: addresses by which other hosts reach the learner; None = those of the ports.
    """

    loggers: Sequence[str]
    config: Mapping[str, Any]
    web: int | str | None
    client_port: int | str | None
    allow_origin: Sequence[str]
    advertise: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePart:
    """Checkpoints: how often they are written, and what they say of the run.

    Attributes:
        interval_s: time between two checkpoints; 0 writes only one, at the end.
        keep: newest checkpoints to keep.
        settings: all keys as plain data, which checkpoints hold without secrets.
    """

    interval_s: float
    keep: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPart:
    """Evaluations during training.

    Attributes:
        interval: iterations between two evaluations; None or 0 = there are none.
        num_episodes: episodes of one evaluation.
        num_processes: processes that evaluate; 0 = training waits; None = one if a core is free.
        num_workers: workers that the learner starts.
        changes: keys of workers that differ in evaluations, and ``explore``.
        seed: seed of the run, or None.
        stop_return: mean return of an evaluation that ends the run, or None.
        measure: values of the keys that decide what a score measures, as plain data: scores are
            compared only if all of them are equal.
    """

    interval: int | None
    num_episodes: int
    num_processes: int | None
    num_workers: int
    changes: Mapping[str, Any]
    seed: int | None
    stop_return: float | None
    measure: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """All parts of a run's config, made once.

    Attributes:
        runtime: TensorFlow.
        transport: connections to workers.
        sample: processes that sample.
        report: results of iterations.
        save: checkpoints.
        evaluation: evaluations during training.
        files: files and ports for users.
    """

    runtime: RuntimePart
    transport: TransportPart
    sample: SamplePart
    report: ReportPart
    save: SavePart
    evaluation: EvaluationPart
    files: FilesPart

    @classmethod
    def of(cls, config: CommonConfig) -> Self:
        """Take a config apart."""
        settings = config.to_dict()
        num_samplers = max(1, config.num_workers) * config.samplers_per_worker
        return cls(
            runtime=RuntimePart.of(config),
            transport=TransportPart(
                bind=config.bind,
                advertise=config.advertise,
                keys=config.keys,
                insecure=config.insecure,
                limits=config.transport,
                max_queued_bytes=config.object_store_memory,
            ),
            sample=SamplePart(
                env=str(config.env),
                is_alone=config.is_alone,
                num_workers=config.num_workers,
                num_envs=num_samplers * config.num_envs_per_worker,
                has_horizon=config.horizon is not None or config.input != "sampler",
                is_truncating=config.is_truncating,
                data_ends=config.input_epochs is not None,
                memory=config.memory,
                max_worker_restarts=config.max_worker_restarts,
                ignore_worker_failures=config.ignore_worker_failures,
                num_cpus_per_worker=config.num_cpus_per_worker,
                worker_environ=config.extra_python_environs_for_worker,
            ),
            report=ReportPart(
                min_iter_time_s=config.min_iter_time_s,
                timesteps_per_iteration=config.timesteps_per_iteration,
                metrics_smoothing_episodes=config.metrics_smoothing_episodes,
                log_sys_usage=config.log_sys_usage,
            ),
            save=SavePart(
                interval_s=config.checkpoint_interval_s,
                keep=config.checkpoint_keep,
                settings=settings,
            ),
            evaluation=EvaluationPart(
                interval=config.evaluation_interval,
                num_episodes=config.evaluation_num_episodes,
                num_processes=config.evaluation_num_workers,
                num_workers=config.num_workers,
                changes=config.evaluation_config,
                seed=config.seed,
                stop_return=config.stop_evaluation_return,
                measure={name: settings[name] for name in _MEASURE},
            ),
            files=FilesPart(
                loggers=config.loggers,
                config=without_secrets(settings),
                web=config.web,
                client_port=config.client_port,
                allow_origin=config.allow_origin,
                advertise=config.advertise,
            ),
        )
