"""ColumnarUnit: single-agent environments in lockstep, whole columns at a time; the fastest way to sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.metrics import EpisodeColumns, PerfStats, RolloutMetrics
from aiorl.env.atari import is_atari
from aiorl.env.env_maker import make_lockstep_env
from aiorl.env.lockstep import LockstepEnv
from aiorl.env.registry import is_atari_id, resolve_env
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError, PolicyError
from aiorl.log_once import log_once
from aiorl.observation.filters import make_filter
from aiorl.observation.preprocessors import preprocessor_for
from aiorl.policy.loading import load_policy
from aiorl.sampler.columnar import ColumnarSampler
from aiorl.wire.messages import PolicyGraph, Snapshot
from aiorl.worker.apply import SnapshotSlot
from aiorl.worker.unit import (
    Produced,
    SamplerUnit,
    StepClock,
    UnitPlace,
    check_graphs,
    monitor_directory,
    perf_columns,
    unit_seed,
)

__all__ = ["ColumnarUnit"]


class ColumnarUnit(SamplerUnit):
    """A ColumnarSampler with its environments, policy and filter.

    Attributes:
        env: the environments.
        policy: the default policy.
        filter: its observation filter.
        sampler: the sampler.
    """

    def __init__(
        self, part: WorkerPart, graphs: Mapping[str, PolicyGraph], snapshot: Snapshot, place: UnitPlace
    ) -> None:
        """Build environments, policy, filter and sampler; may take as long as the environments do.

        Args:
            part: the worker's part of the configuration.
            graphs: policy id -> acting graph.
            snapshot: weights and filter state to begin with.
            place: which sampler of the run it is.

        Raises:
            ConfigError: a setting that cannot be honoured here, such as an environment not installed.
            EnvError: the environment's constructor failed.
            PolicyError: a graph that cannot be used.
        """
        policy_part = _only_policy(part)
        check_graphs(part, graphs)
        log_once.set_up(place.slot, part.log_level)
        graph = graphs[DEFAULT_POLICY_ID]
        wrapping = Wrapping.of(part, monitor_directory(part, place))
        self.env = make_lockstep_env(
            part.env,
            part.env_config,
            part.num_envs_per_worker,
            part.vectorize,
            worker_index=place.slot,
            horizon=part.horizon,
            wrapping=wrapping,
        )
        self.policy = load_policy(
            graph["graph"],
            graph["spec"],
            config={**policy_part.config, "worker_index": place.slot, "num_workers": place.num_workers},
            threads=part.num_cpus_per_worker,
        )
        if self.policy.action_space != self.env.action_space:
            raise PolicyError(
                f"this host's {part.env!r} has the action space {self.env.action_space}, the learner's has "
                f"{self.policy.action_space}; install the same version of the environment on both"
            )
        spec = self.policy.spec
        preprocessor = preprocessor_for(self.env.observation_space)
        if tuple(preprocessor.shape) != tuple(spec.obs_shape):
            raise PolicyError(
                f"this host's {part.env!r} has observations of shape {preprocessor.shape}, the learner's "
                f"{spec.obs_shape}; install the same version of the environment on both"
            )
        self.filter = make_filter(part.observation_filter, preprocessor.shape)
        self._slot = SnapshotSlot(
            {DEFAULT_POLICY_ID: self.policy},
            {DEFAULT_POLICY_ID: self.filter},
            place.incarnation,
            synchronize_filters=part.synchronize_filters,
        )
        self._slot.offer(snapshot)
        self._clock = StepClock()
        plan = policy_part.sample_plan
        clip_rewards = part.clip_rewards
        self.sampler = ColumnarSampler(
            self.env,
            self.policy,
            fragment_length=part.rollout_fragment_length,
            # recurrent states go along by themselves
            columns=[name for name in (*plan.columns, *plan.extras) if not name.startswith("state_in_")],
            batch_mode=part.batch_mode,
            preprocessor=preprocessor,
            filter=self.filter,
            postprocess=plan.postprocess,
            postprocess_settings=plan.postprocess_params,
            clip_rewards=_is_deepmind(part.env, self.env, wrapping) if clip_rewards is None else clip_rewards,
            clip_actions=part.clip_actions,
            seed=unit_seed(part.seed, place, part.life),
            on_step=self._between_steps,
        )

    @property
    def version(self) -> int:
        """See SamplerUnit."""
        return self._slot.version

    @property
    def in_env_s(self) -> float:
        """See SamplerUnit."""
        return self._clock.in_step_s

    def offer(self, snapshot: Snapshot) -> None:
        """See SamplerUnit."""
        self._slot.offer(snapshot)

    def stop(self) -> None:
        """See SamplerUnit; a step that is under way is waited for by nobody."""
        self._slot.stop()

    def sample(self) -> Produced:
        """See SamplerUnit."""
        try:
            self._between_steps()
            first_version = self._slot.version
            fragment = self.sampler.sample()
            return Produced(
                {DEFAULT_POLICY_ID: {**fragment.columns, **fragment.extras}},
                fragment.env_steps,
                fragment.env_steps,
                fragment.length,
                fragment.num_envs,
                self._take_episodes(),
                first_version,
                self._slot.version,
                self._take_perf(),
            )
        finally:
            self._clock.idle()

    def take_deltas(self, sequence: int) -> dict[str, dict[str, Any]]:
        """See SamplerUnit."""
        return {} if self.filter.is_identity else {DEFAULT_POLICY_ID: dict(self.filter.take_delta(sequence))}

    def close(self) -> None:
        """See SamplerUnit."""
        self.env.close()

    def _between_steps(self) -> None:
        self._clock.step()
        self._slot.between_steps()

    def _take_episodes(self) -> EpisodeColumns:
        """Episodes that ended; where the wrappers cut a game into several, whole games instead."""
        episodes = self.sampler.take_episodes()
        games = self.env.take_finished_games()
        return episodes if games is None else EpisodeColumns.of([RolloutMetrics(g.length, g.reward) for g in games])

    def _take_perf(self) -> dict[str, float]:
        perf, self.sampler.perf = self.sampler.perf, PerfStats()
        return perf_columns(perf)


def _only_policy(part: WorkerPart) -> PolicyPart:
    """The default policy's part.

    Raises:
        ConfigError: there are others, or it is the user's own.
    """
    policy = part.policies.get(DEFAULT_POLICY_ID)
    if len(part.policies) != 1 or policy is None or policy.policy_class is not None:
        raise ConfigError("columnar sampling knows one policy, and only as the learner's network.", key="sampling")
    return policy


def _is_deepmind(env_name: str, env: LockstepEnv, wrapping: Wrapping) -> bool:
    """Whether the environments got the DeepMind wrappers; those of other processes are judged by their name."""
    if not wrapping.deepmind:
        return False
    here = env.unwrapped
    if here:
        return any(map(is_atari, here))
    shape = env.observation_space.shape or ()  # a game's memory, or its grey screen, gets no such wrappers
    return is_atari_id(resolve_env(env_name).gym_id or "") and len(shape) > 2
