"""The keys that workers read, and the part of the config that a worker gets in the handshake.

A key that workers obey is declared in `WorkerConfig`, once. The learner's config, the handshake and the settings of
samplers have it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from aiorl.config import deep_update, to_plain
from aiorl.config.code import named, plain_code
from aiorl.config.key import check_known, key, plain_error, show_keys_in_help
from aiorl.config.layers import DEFAULT_ALGO
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.errors import ConfigError

if TYPE_CHECKING:
    from aiorl.config.schema import CommonConfig

_run = partial(key, group="Run", where="both")
_sampling = partial(key, group="Sampling", where="workers")
_offline = partial(key, group="Offline data", where="workers")
_resources = partial(key, group="Resources", where="workers")
_model = partial(key, group="Model", where="workers")
_agents = partial(key, group="Multi-agent", where="workers")
_transport = partial(key, group="Transport", where="both")

Code = Annotated[str, BeforeValidator(named)]
"""A text that names code; a config takes the object itself as well."""

CodeWithSettings = Annotated[str | dict[str, Any], BeforeValidator(plain_code)]
"""A text that names code, or a mapping that has this text and settings for it."""


OF_EVALUATIONS: Mapping[str, Any] = MappingProxyType(
    {
        "num_envs_per_worker": 1,
        "rollout_fragment_length": 1,
        "batch_mode": "complete_episodes",
        "sample_async": False,
        "fake_sampler": False,
        "remote_worker_envs": False,
        "vectorize": "auto",
        "soft_horizon": False,
        "no_done_at_end": False,
        "extra_python_environs_for_worker": {},
    }
)
"""Values that every evaluation gives these keys, whatever its run has; it decides its seed as well."""


class WorkerModelConfig(BaseModel):
    """Keys of `model` that workers read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    dim: int = _model(84, ge=1)
    """Height and width Atari frames are resized to."""
    framestack: bool = _model(True)
    """Stack the last four Atari frames."""
    custom_preprocessor: Code | None = _model(None, where="both")
    """Preprocessor subclass (package.module:Name) that makes arrays of observations."""


class WorkerMultiAgentConfig(BaseModel):
    """Keys of `multiagent` that workers read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    policy_mapping_fn: Code | dict[str, str] | None = _agents(None)
    """Function (package.module:Name) from agent id, and optionally episode and worker, to policy id; or a mapping of
    agent ids to policy ids."""
    observation_fn: Code | None = _agents(None)
    """Function (package.module:Name) that rewrites the agents' observations."""


class TransportConfig(BaseModel):
    """Sockets, queues and time limits between learner and workers."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # unknown keys are refused where settings are merged

    heartbeat_interval_s: float = _transport(1.0, unit="s", gt=0)
    """How often each side says that it lives."""
    heartbeat_timeout_s: float = _transport(10.0, unit="s", gt=0)
    """Silence after which the other side counts as lost."""
    build_timeout_s: float = _transport(120.0, unit="s", gt=0, where="learner")
    """The same for a worker that builds its environment, which may keep it from answering."""
    lease_timeout_s: float = _transport(5.0, unit="s", gt=0, where="learner")
    """A worker that brings no fragment for this long, and for several times as long as others need, is named, and its
    work is leased to others."""
    max_message_bytes: int = _transport(256 * 2**20, unit="bytes", ge=2**16)
    """Largest message, decompressed; larger ones are refused before memory is taken."""
    max_header_bytes: int = _transport(2**20, unit="bytes", ge=2**17)
    """Largest message header taken."""
    send_queue_length: int = _transport(64, unit="messages", ge=1)
    """Messages that may wait to be sent to one peer."""
    compression: Literal["auto", "off"] = _transport("auto")
    """auto compresses a column with LZ4 if that pays; off never does."""
    reconnect_max_s: float = _transport(5.0, where="workers", unit="s", gt=0)
    """Longest pause between two tries to reach the learner."""


class WorkerConfig(BaseModel):
    """Keys that workers read, with their defaults; also the settings of a RolloutWorker and its sampler."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **others: Any) -> None:
        """Show the keys in Python's `help`."""
        show_keys_in_help(cls)

    algo: Code = _run(DEFAULT_ALGO)
    """Algorithm: the name of a module in aiorl/learning/algorithms, or package.module:Name for a class of your own."""
    env: Code | None = _run(None)
    """Environment: a Gymnasium id, package.module:Name for your own class or function, module:name for a name that the
    module registers with register_env, or gym:ID for the old gym package."""
    env_config: dict[str, Any] = _run({}, where="workers")
    """Arguments for the environment's creator."""
    wrappers: list[CodeWithSettings] = _run([], where="workers")
    """Wrappers around each Gymnasium environment, innermost first: classes (package.module:Name); with arguments,
    mappings {class: NAME, kwargs: {...}}."""
    seed: int | None = _run(None, ge=0, lt=2**32)
    """Seed of everything random, combined with the worker's index; null takes a fresh one."""
    log_level: Literal["DEBUG", "INFO", "WARN", "ERROR"] = _run("INFO")
    """Least severe messages that are logged."""
    num_envs_per_worker: int = _sampling(1, unit="environments", ge=1)
    """Environments that one worker steps together."""
    vectorize: Literal["auto", "native", "serial", "remote"] = _sampling("auto")
    """How a worker steps its environments: native (their own vectorised form), serial (in turn), remote (one process
    each), auto (native if there is a native form, else serial)."""
    samplers_per_worker: int = _sampling(1, ge=1)
    """Samplers in one worker process whose waits overlap, each with its own environments."""
    rollout_fragment_length: int = _sampling(200, unit="steps", ge=1)
    """Steps of each environment in one fragment."""
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = _sampling("truncate_episodes")
    """Fragments cut episodes anywhere, or end only where episodes end."""
    horizon: int | None = _sampling(None, unit="steps", ge=1)
    """Longest episode; null takes the environment's own limit, if it has one."""
    soft_horizon: bool = _sampling(False)
    """At the horizon close the episode without a reset."""
    no_done_at_end: bool = _sampling(False)
    """Never record done; needed with soft_horizon unless the environment never ends."""
    observation_filter: Literal["NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"] = _sampling(
        "NoFilter", where="both"
    )
    """Running normalisation of observations. Replay algorithms, bc and marwil store raw rows and normalise them in
    training."""
    synchronize_filters: bool = _sampling(True, where="both")
    """Send the merged filter statistics to the workers."""
    clip_actions: bool = _sampling(True, where="both")
    """Clip actions to the action space before the environment gets them."""
    clip_rewards: bool | Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = _sampling(None)
    """Clip rewards for learning to [-1, 1], or to [-x, x] for a number x; null does so for DeepMind-wrapped Atari
    only."""
    preprocessor_pref: Literal["deepmind", "rllib"] = _sampling("deepmind")
    """Which preprocessing Atari frames get."""
    sample_async: bool = _sampling(False)
    """Sample continuously in the background."""
    compress_observations: bool | Literal["bulk"] = _sampling(False)
    """Compress observations in batches: row by row, or bulk for whole columns. Workers compress what they send by
    column if that pays, even with transport.compression: off."""
    remote_worker_envs: bool = _sampling(False)
    """One process per environment, each polled as soon as it is ready; vectorize: remote steps them together."""
    remote_env_batch_wait_ms: float = _sampling(0.0, unit="ms", ge=0, allow_inf_nan=False)
    """How long a poll of remote environments gathers more ready ones."""
    max_env_restarts_per_hour: int = _sampling(0, unit="restarts", ge=0)
    """With remote_worker_envs: replacements of one environment's failed process; 0 makes each failure an error."""
    fake_sampler: bool = _sampling(False)
    """Return the first batch for ever, to test the rest."""
    model: WorkerModelConfig = key(WorkerModelConfig(), group="Learning", where="both")
    """Shape of the networks."""
    multiagent: WorkerMultiAgentConfig = _sampling(WorkerMultiAgentConfig(), where="both")
    """Which policies there are and who acts with which."""
    transport: TransportConfig = key(TransportConfig(), group="Workers and hosts", where="both")
    """Sockets, queues and time limits."""
    extra_python_environs_for_worker: dict[str, str] = key({}, group="Workers and hosts", where="workers")
    """Environment variables set in the workers."""
    eager: bool = key(False, group="Learning", where="both")
    """Run updates, and TensorFlow policies on workers, without tf.function, for debugging."""
    no_eager_on_workers: bool = key(False, group="Learning", where="workers")
    """Keep workers in graph mode with eager; networks always act as graphs there."""
    eager_tracing: bool = key(False, group="Learning", where="both")
    """With eager: trace updates and policies as plain graphs, without XLA."""
    memory_per_worker: int = _resources(0, unit="bytes", ge=0)
    """Heap limit of a worker process, which fails beyond it; 0 is no limit."""
    object_store_memory_per_worker: int = _resources(0, unit="bytes", ge=0)
    """Limit of a worker's fragments that the learner has not acknowledged; 0 takes 256 MiB."""
    num_cpus_per_worker: int = _resources(1, unit="threads", ge=1)
    """Threads that the libraries of a worker process may use."""
    monitor: bool = key(False, group="Reports", where="both")
    """Write episode statistics and videos."""
    callbacks: Code | dict[str, Code] | None = key(None, group="Reports", where="both")
    """DefaultCallbacks subclass (package.module:Name), or a mapping of hooks to functions of one dict."""

    # Offline data
    input: Code | list[str] | dict[str, float] = _offline("sampler")
    """Source of experience: sampler; a file, directory, pattern, URI or minari:NAME, or a list of them; a mapping of
    these and sampler to probabilities; or package.module:Name for a function from an IOContext to an InputReader.
    Workers share files between them."""
    input_evaluation: list[Literal["is", "wis", "simulation"]] = _offline(["is", "wis"])
    """How runs on stored experience are judged: is, wis (off-policy estimates, which need the probabilities of stored
    actions), simulation (the environment is sampled as well)."""
    postprocess_inputs: bool = _offline(False)
    """Postprocess stored trajectories with the current policy."""
    actions_in_input_normalized: bool = _offline(False)
    """Stored actions of a bounded Box are scaled to [-1, 1], as by RLlib since 1.4, and are scaled back when read."""
    shuffle_buffer_size: int = _offline(0, unit="batches", ge=0)
    """Batches in the sliding window that shuffles stored experience."""
    input_epochs: int | None = _offline(None, unit="passes", ge=1)
    """Passes over stored experience before the run ends; each reads every row once. null reads without end."""
    input_hold_out: float = _offline(0.0, ge=0, lt=1)
    """Share of stored episodes to leave out, the same in every run, for python -m aiorl.estimate --hold-out."""
    input_max_corrupt: int = _offline(100, unit="places", ge=0)
    """Unreadable places in files that one sampler may skip; one more ends the run."""
    output: Code | None = _offline(None)
    """Where to write sample batches as JSON lines: logdir (the run's directory), a directory or URI, or
    package.module:Name for a function from an IOContext to an OutputWriter."""
    output_compress_columns: list[str] = _offline(["obs", "new_obs"], needs="output")
    """Columns that are compressed in the output."""
    output_max_file_size: int = _offline(64 * 2**20, unit="bytes", ge=1, needs="output")
    """Size at which a new output file is begun."""

    @property
    def is_truncating(self) -> bool:
        """Fragments are cut at a number of steps, not at the ends of episodes."""
        return self.batch_mode == "truncate_episodes"

    @property
    def is_filtered(self) -> bool:
        """Networks get observations that a filter has normalised."""
        return self.observation_filter != "NoFilter"

    @property
    def cut_length(self) -> int | float:
        """Steps of one environment after which its rows are cut; infinite where episodes are kept whole."""
        return self.rollout_fragment_length if self.is_truncating else math.inf

    @property
    def reward_limit(self) -> float:
        """Rewards of rows lie in ``[-limit, limit]``; 0 = wherever they do."""
        return float(self.clip_rewards or 0.0)


def check_evaluation_keys(changes: Mapping[str, Any]) -> None:
    """Refuse keys that workers don't have, and those that an evaluation decides itself.

    Raises: ConfigError naming the key.
    """
    check_known(WorkerConfig, changes)
    for name in changes:
        if name == "seed" or name in OF_EVALUATIONS:
            raise ConfigError(
                f"{name} can't be set for an evaluation, which decides it itself: it plays whole episodes, one after "
                "the other, in one environment in its own process.",
                key=name, value=changes[name],
                hint="Leave it out. The seed is an argument of aiorl.evaluate; set variables "
                "before the evaluation starts.",
            )  # fmt: skip


class PolicyPart(BaseModel):
    """Facts that a worker needs of one policy.

    Attributes:
        policy_class: import path of a user's own Policy; None = the graph that the learner sends under the id.
        algo: the algorithm that the graph's network is of; None = the run's.
        observation_space: of what environments show its agents, as `space_to_dict` gives it; None = the environment's.
        action_space: of its agents' actions, likewise.
        config: its own settings, whatever the policy reads.
        sample_plan: what is computed and sent of its rows.
        is_trained: its rows are sent to the learner; those of other policies stay on the worker.
        layout: of its rows where environments are not in lockstep: one by one, [B, 1, ...], or as sequences
            [L, S, ...].
        sequence_length: L.
        sends: what its rows are sent as: themselves, or the gradient of its algorithm over them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    policy_class: str | None = None
    algo: str | None = None
    observation_space: dict[str, Any] | None = None
    action_space: dict[str, Any] | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    sample_plan: SamplePlan = SamplePlan()
    is_trained: bool = True
    layout: Literal["rows", "sequences"] = "rows"
    sequence_length: int = Field(default=1, ge=1)
    sends: Literal["rows", "gradients"] = "rows"


class WorkerPart(WorkerConfig):
    """Config that a worker gets: the keys that workers read, and facts that the learner has made of others.

    Unknown keys are ignored, so that a worker of an older patch release can still join.

    Attributes:
        policies: policy id -> what is to be known of it.
        log_dir: the run's directory on the learner's host; where that is not to be seen, files go elsewhere.
        life: number of workers that have sampled in the same slot before and are gone, from the updates on that a
            resumed run began with: seeds differ by it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    env: Code
    policies: dict[str, PolicyPart] = Field(default_factory=lambda: {DEFAULT_POLICY_ID: PolicyPart()}, min_length=1)
    log_dir: str | None = None
    life: int = Field(default=0, ge=0)

    @classmethod
    def of(
        cls, config: CommonConfig, *, policies: Mapping[str, PolicyPart] | None = None, log_dir: str | None = None
    ) -> Self:
        """Return the workers' part of the learner's config.

        Args:
            config: the effective config.
            policies: policy id -> its part; None is the default policy alone, of which nothing is computed or sent.
            log_dir: the run's directory.
        Raises: ConfigError when the config names no environment.
        """
        own = {"policies": policies or {DEFAULT_POLICY_ID: PolicyPart()}, "log_dir": log_dir}
        return cls.from_dict(config.model_dump(include=set(WorkerConfig.model_fields)) | own)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the part that came in a handshake, checked.

        Raises: ConfigError naming the first key at fault.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise plain_error(cls, error) from None

    def for_evaluation(self, changes: Mapping[str, Any]) -> Self:
        """Return this part with the settings of an evaluation deep-merged into it, checked again.

        Raises: ConfigError naming a key that can't be set for an evaluation, or the first one at fault.
        """
        check_evaluation_keys(changes)
        return self.from_dict(deep_update(self.to_dict(), changes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the wire: dicts, lists, strings, numbers, None."""
        plain: dict[str, Any] = to_plain(self.model_dump())
        return plain
