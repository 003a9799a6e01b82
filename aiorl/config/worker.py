"""Keys that workers read, and the part of the config that a worker gets in the handshake.

Each key is declared once, in a table. The configs of the learner, of the handshake and of samplers
are made of the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
)

from aiorl.config import is_group, put_on_top, to_plain, without_emptied
from aiorl.config.code import named, plain_code, plain_wrapper, with_objects, without_objects
from aiorl.config.key import check_known, key, plain_error, show_keys_in_help, unchanging
from aiorl.config.layers import DEFAULT_ALGO
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.errors import ConfigError
from aiorl.text import agent_text

if TYPE_CHECKING:
    from aiorl.config.schema import CommonConfig

_run = partial(key, group="Run", where="both")
_sampling = partial(key, group="Sampling", where="workers")
_offline = partial(key, group="Offline data", where="workers")
_resources = partial(key, group="Resources", where="workers", place=False)
_model = partial(key, group="Model", where="workers")
_agents = partial(key, group="Multi-agent", where="workers")
_transport = partial(key, group="Transport", where="both", place=False)

Code = Annotated[str, BeforeValidator(named)]
"""Text that names code; a config accepts the object itself as well."""

CodeWithSettings = Annotated[str | dict[str, Any], BeforeValidator(plain_code)]
"""Text that names code, or a mapping with this text and settings for it."""

WrapperWithSettings = Annotated[str | dict[str, Any], BeforeValidator(plain_wrapper)]
"""Text that names a wrapper, or a mapping with this text and arguments of any kind."""

MAX_ROWS = 2**31 - 1
"""Limit of the sizes of fragments, batches and minibatches: rows are numbered in 32 bits."""

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
"""Values of these keys in every evaluation, whatever its run uses; an evaluation also chooses its
own seed."""


_TABLE = ConfigDict(frozen=True, extra="forbid", validate_default=False, defer_build=True)
"""Form of a table of keys, which is only a base of configs."""


class WorkerModelConfig(BaseModel):
    """Keys of `model` that workers read."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    __setattr__ = unchanging("model")

    dim: int = _model(84, ge=1)
    """Height and width to which Atari frames are resized."""
    framestack: bool = _model(True)
    """Stack the last four Atari frames."""
    custom_preprocessor: Code | None = _model(None, where="both")
    """Preprocessor subclass (package.module:Name) that turns observations into arrays."""


def agents_as_text(mapping: Any) -> Any:
    """Return a mapping of agent ids to policy ids with the ids of agents as text; other values are
    returned unchanged.

    Raises:
        ValueError: a policy id is not text, or two agents have the same text and different
            policies.
    """
    if not is_group(mapping):
        return mapping
    policy_ids: dict[str, str] = {}
    for agent_id, policy_id in mapping.items():
        name = agent_text(agent_id)
        if not isinstance(policy_id, str):
            raise ValueError(
                f"policy ids must be text, but that of agent {name} is {policy_id!r:.100}"
            )
        if policy_ids.setdefault(name, policy_id) != policy_id:
            raise ValueError(
                f"two agents are written {name}, but have different policies: use a function"
            )
    return policy_ids


class WorkerMultiAgentConfig(BaseModel):
    """Keys of `multiagent` that workers read."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    __setattr__ = unchanging("multiagent")

    policy_mapping_fn: Annotated[Code | dict[str, str] | None, BeforeValidator(agents_as_text)] = (
        _agents(None)
    )
    """Function (package.module:Name) from an agent id, and optionally episode and worker, to a
    policy id; or a mapping of agent ids to policy ids. In a file, numbers and tuples are written as
    text: "0", "(0, 1)"."""
    observation_fn: Code | None = _agents(None)
    """Function (package.module:Name) that rewrites the agents' observations."""


class TransportConfig(BaseModel):
    """Sockets, queues and time limits between learner and workers."""

    # merging the settings refuses unknown keys
    model_config = ConfigDict(frozen=True, extra="ignore")
    __setattr__ = unchanging("transport")

    heartbeat_interval_s: float = _transport(1.0, unit="s", gt=0)
    """Time between two heartbeats of each side."""
    heartbeat_timeout_s: float = _transport(10.0, unit="s", gt=0)
    """Silence after which the other side counts as lost."""
    build_timeout_s: float = _transport(120.0, unit="s", gt=0, where="learner")
    """The same limit for a worker that builds its environment and may not answer meanwhile."""
    lease_timeout_s: float = _transport(5.0, unit="s", gt=0, where="learner")
    """Time after which a worker without a new fragment is reported and its work is leased to
    others; it must also be several times slower than they are."""
    max_message_bytes: int = _transport(256 * 2**20, unit="bytes", ge=2**16)
    """Largest message after decompression; larger ones are refused before memory is allocated."""
    max_header_bytes: int = _transport(2**20, unit="bytes", ge=2**17)
    """Largest message header accepted."""
    send_queue_length: int = _transport(64, unit="messages", ge=1)
    """Messages that can wait to be sent to one peer."""
    compression: Literal["auto", "off"] = _transport("auto")
    """Compression of columns with LZ4: auto only if it pays, and not within a host; off never."""
    reconnect_max_s: float = _transport(5.0, where="workers", unit="s", gt=0)
    """Longest pause between two attempts to reach the learner."""


class RunKeys(BaseModel):
    """Keys of a run: its algorithm, its environment, its random numbers, its log."""

    model_config = _TABLE

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Show the keys in Python's `help`."""
        show_keys_in_help(cls)

    algo: Code = _run(DEFAULT_ALGO, place=False)
    """Algorithm: the name of a module in aiorl/learning/algorithms, or package.module:Name for your
    own class."""
    env: Code | None = _run(None, place=False)
    """Environment: a Gymnasium id; package.module:Name for your own class or function; module:name
    for a name that the module registers with register_env; or gym:ID for the old gym package."""
    env_config: dict[str, Any] = _run({}, where="workers", place=False)
    """Arguments for the environment's creator; without worker processes, they can be any
    objects."""
    wrappers: list[WrapperWithSettings] = _run([], where="workers", place=False)
    """Wrappers around each Gymnasium environment, innermost first: classes (package.module:Name),
    or mappings {class: NAME, kwargs: {...}} to pass arguments."""
    seed: int | None = _run(None, ge=0, lt=2**32, place=False)
    """Seed of all random numbers, combined with the worker's index; null draws a new one."""
    log_level: Literal["DEBUG", "INFO", "WARN", "ERROR"] = _run("INFO", place=False)
    """Lowest severity of messages that are logged."""

    @field_validator("env_config", mode="after")
    @classmethod
    def _with_objects(cls, arguments: dict[str, Any]) -> Any:
        return with_objects(arguments)

    @field_serializer("env_config", "wrappers")
    def _without_objects_of_environments(self, arguments: Any) -> Any:
        return without_objects(arguments)


class FragmentKeys(BaseModel):
    """Keys of the environments that a worker steps together, and of the fragments that it sends."""

    model_config = _TABLE

    num_envs_per_worker: int = _sampling(1, unit="environments", ge=1, le=MAX_ROWS)
    """Environments that one worker steps together."""
    vectorize: Literal["auto", "native", "serial", "remote"] = _sampling("auto")
    """Stepping of a worker's environments: native (vectorised by the environment), serial (one
    after the other), remote (one process each), auto (native if available, else serial)."""
    samplers_per_worker: int = _sampling(1, ge=1)
    """Samplers in one worker process, each with its own environments; they work while others
    wait."""
    rollout_fragment_length: int = _sampling(200, unit="steps", ge=1, le=MAX_ROWS)
    """Steps of each environment in one fragment."""
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = _sampling("truncate_episodes")
    """Truncated fragments can end within an episode; complete ones only at the end of an
    episode."""
    horizon: int | None = _sampling(None, unit="steps", ge=1)
    """Longest episode; null uses the environment's own limit, if it has one."""
    soft_horizon: bool = _sampling(False)
    """End episodes at the horizon without resetting the environment."""
    no_done_at_end: bool = _sampling(False)
    """Never record done; required with soft_horizon unless the environment never ends an
    episode."""

    @property
    def is_truncating(self) -> bool:
        """True if fragments end after a number of steps, False if they end with episodes."""
        return self.batch_mode == "truncate_episodes"

    @property
    def cut_length(self) -> int | float:
        """Steps of one environment after which its rows are cut; infinite if episodes are kept
        whole.
        """
        return self.rollout_fragment_length if self.is_truncating else math.inf


class SamplingKeys(BaseModel):
    """Keys of rows, and of the processes and threads that sample them."""

    model_config = _TABLE

    observation_filter: Literal["NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"] = _sampling(
        "NoFilter", where="both"
    )
    """Running normalization of observations. Replay algorithms, bc and marwil store raw rows and
    normalize them for training."""
    synchronize_filters: bool = _sampling(True, where="both")
    """Send the merged filter statistics to the workers."""
    clip_actions: bool = _sampling(True, where="both")
    """Clip actions to the action space before the environment receives them."""
    clip_rewards: bool | Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = _sampling(None)
    """Clip rewards for learning to [-1, 1], or to [-x, x] for a number x; null does so only for
    DeepMind-wrapped Atari."""
    preprocessor_pref: Literal["deepmind", "rllib"] = _sampling("deepmind")
    """Preprocessing of Atari frames."""
    sample_async: bool = _sampling(False)
    """Sample continuously in the background."""
    compress_observations: bool | Literal["bulk"] = _sampling(False)
    """Compress observations in batches of a RolloutWorker: true row by row, bulk by whole columns.
    Workers on other hosts then compress columns if it pays, even with transport.compression:
    off."""
    remote_worker_envs: bool = _sampling(False)
    """Run each environment in its own process and poll each when it is ready; vectorize: remote
    steps them together."""
    remote_env_batch_wait_ms: float = _sampling(0.0, unit="ms", ge=0, allow_inf_nan=False)
    """Time for which a poll of remote environments waits for more of them to be ready."""
    max_env_restarts_per_hour: int = _sampling(0, unit="restarts", ge=0)
    """With remote_worker_envs: replacements of one environment's failed process per hour; 0 makes
    each failure an error."""
    fake_sampler: bool = _sampling(False)
    """Return the first batch again and again, to test everything else."""

    @property
    def is_filtered(self) -> bool:
        """True if a filter normalizes the observations of networks."""
        return self.observation_filter != "NoFilter"

    @property
    def reward_limit(self) -> float:
        """Limit of the rewards in rows, which lie in ``[-limit, limit]``; 0 means no limit."""
        return float(self.clip_rewards or 0.0)


class ProcessKeys(BaseModel):
    """Keys of a worker's process: its policies, its connection, its resources, its reports."""

    model_config = _TABLE

    model: WorkerModelConfig = key(WorkerModelConfig(), group="Learning", where="both")
    """Shape of the networks."""
    multiagent: WorkerMultiAgentConfig = _sampling(WorkerMultiAgentConfig(), where="both")
    """Policies, and the assignment of agents to them."""
    transport: TransportConfig = key(TransportConfig(), group="Workers and hosts", where="both")
    """Sockets, queues and time limits."""
    extra_python_environs_for_worker: dict[str, str] = key(
        {}, group="Workers and hosts", where="workers", place=True
    )
    """Environment variables set in the workers."""
    eager: bool = key(False, group="Learning", where="both")
    """Run updates, and TensorFlow policies on workers, without tf.function, for debugging."""
    no_eager_on_workers: bool = key(False, group="Learning", where="workers")
    """Keep workers in graph mode with eager; networks always act as graphs on workers."""
    eager_tracing: bool = key(False, group="Learning", where="both")
    """With eager: trace updates and policies as plain graphs, without XLA."""
    memory_per_worker: int = _resources(0, unit="bytes", ge=0)
    """Heap limit of a worker process, which fails above it; 0 means no limit."""
    object_store_memory_per_worker: int = _resources(0, unit="bytes", ge=0)
    """Limit of a worker's fragments that the learner has not acknowledged; 0 means 256 MiB."""
    num_cpus_per_worker: int = _resources(1, unit="threads", ge=1)
    """Threads that the libraries in a worker process can use."""
    monitor: bool = key(False, group="Reports", where="both", place=True)
    """Write episode statistics and videos."""
    callbacks: Code | dict[str, Code | None] | None = key(
        None, group="Reports", where="both", place=False
    )
    """DefaultCallbacks subclass (package.module:Name), or a mapping of hooks to functions of one
    dict."""


class OfflineKeys(BaseModel):
    """Keys of stored experience that workers read and write."""

    model_config = _TABLE

    input: Code | list[str] | dict[str, float] = _offline("sampler", place=False)
    """Source of experience: sampler; a file, directory, pattern, URI or minari:NAME, or a list of
    them; a mapping from these and sampler to shares of the env steps, whose sum is 1; or
    package.module:Name for a function from an IOContext to an InputReader. Files are divided among
    the workers."""
    input_evaluation: list[Literal["is", "wis", "simulation"]] = _offline(
        ["is", "wis"], place=False
    )
    """Evaluation of runs on stored experience: is, wis (off-policy estimates, which need the
    probabilities of stored actions), simulation (also sample the environment)."""
    postprocess_inputs: bool = _offline(False, place=False)
    """Postprocess stored trajectories with the current policy."""
    actions_in_input_normalized: bool = _offline(False, place=False)
    """Stored actions of a bounded Box are scaled to [-1, 1], as in RLlib since 1.4; they are scaled
    back when read."""
    shuffle_buffer_size: int = _offline(0, unit="batches", ge=0, place=False)
    """Size of the sliding window that shuffles stored experience."""
    input_epochs: int | None = _offline(None, unit="passes", ge=1, place=False)
    """Passes over stored experience before the run ends, each over all rows; null never ends."""
    input_hold_out: float = _offline(0.0, ge=0, lt=1, place=False)
    """Fraction of stored episodes to leave out, the same in every run, for aiorl estimate
    --hold-out."""
    input_max_corrupt: int = _offline(100, unit="places", ge=0, place=False)
    """Unreadable places in files that one sampler can skip; another one ends the run."""
    output: Code | None = _offline(None, place=True)
    """Destination of sample batches as JSON lines: logdir (the run's directory), a directory or
    URI, or package.module:Name for a function from an IOContext to an OutputWriter."""
    output_compress_columns: list[str] = _offline(["obs", "new_obs"], needs="output", place=False)
    """Columns that are compressed in the output."""
    output_max_file_size: int = _offline(
        64 * 2**20, unit="bytes", ge=1, needs="output", place=False
    )
    """Size at which a new output file is started."""


# pydantic takes the keys of the last table first; that is their order on the wire and in documents
class WorkerConfig(OfflineKeys, ProcessKeys, SamplingKeys, FragmentKeys, RunKeys):
    """Keys that workers read, with their defaults; also the settings of a RolloutWorker and its
    sampler.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=False, defer_build=False
    )


def check_evaluation_keys(changes: Mapping[str, Any]) -> None:
    """Refuse keys that workers don't have, and keys that an evaluation sets itself.

    Raises:
        ConfigError: there is one; the error names it.
    """
    check_known(WorkerConfig, changes)
    for name in changes:
        if name == "seed" or name in OF_EVALUATIONS:
            raise ConfigError(
                f"{name} can't be set for an evaluation, which sets it itself: it plays whole"
                " episodes, one after the other, in one environment in its own process.",
                key=name,
                value=changes[name],
                hint=(
                    "Leave it out. The seed is an argument of aiorl.evaluate; set variables "
                    "before the evaluation starts."
                ),
            )


class PolicyPart(BaseModel):
    """Facts about one policy for a worker.

    Attributes:
        policy_class: import path of a user's own Policy; None = the graph that the learner sends
            under the id.
        algo: algorithm of the graph's network; None = the run's algorithm.
        observation_space: space of its agents' observations, from `space_to_dict`; None = the
            environment's.
        action_space: space of its agents' actions, in the same form.
        config: its own settings, for the policy to read.
        sample_plan: columns of its rows to compute and to send.
        is_trained: True if its rows are sent to the learner; rows of other policies stay on the
            worker.
        layout: layout of its rows if environments are not in lockstep: single rows, [B, 1, ...], or
            sequences [L, S, ...].
        sequence_length: L.
        sends: the rows themselves, or the gradient that its algorithm computes from them.
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
    """Config that a worker gets: the keys that workers read, and facts that the learner derived
    from the other keys.

    Unknown keys are ignored, so that a worker of an older patch release can still join.

    Attributes:
        policies: policy id -> facts about the policy.
        log_dir: the run's directory on the learner's host; if it is not visible here, files go
            elsewhere.
        life: number of workers that sampled in the same slot before and are gone; a resumed run
            adds its number of updates. Seeds differ by it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    env: Code
    policies: dict[str, PolicyPart] = Field(
        default_factory=lambda: {DEFAULT_POLICY_ID: PolicyPart()}, min_length=1
    )
    log_dir: str | None = None
    life: int = Field(default=0, ge=0)

    @classmethod
    def of(
        cls,
        config: CommonConfig,
        *,
        policies: Mapping[str, PolicyPart] | None = None,
        log_dir: str | None = None,
    ) -> Self:
        """Return the workers' part of the learner's config.

        Args:
            config: effective config.
            policies: policy id -> its part; None means the default policy alone, which computes and
                sends no columns.
            log_dir: the run's directory.

        Raises:
            ConfigError: the config names no environment.
        """
        values = config.model_dump(include=set(WorkerConfig.model_fields))
        values |= config.worker_overrides()
        values["policies"] = policies or {DEFAULT_POLICY_ID: PolicyPart()}
        values["log_dir"] = log_dir
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the part that came in a handshake, after checking it.

        Raises:
            ConfigError: a value is wrong; the error names the first key at fault.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise plain_error(cls, error) from None

    def for_evaluation(self, changes: Mapping[str, Any]) -> Self:
        """Return this part with the settings of an evaluation deep-merged and checked.

        Raises:
            ConfigError: a key is at fault, or can't be set for an evaluation; the error names the
                first one.
        """
        check_evaluation_keys(changes)
        values = self.to_dict()
        return self.from_dict(without_emptied(put_on_top(values, changes), defaults=values))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the wire: dicts, lists, strings, numbers, None."""
        plain: dict[str, Any] = to_plain(self.model_dump())
        return plain
