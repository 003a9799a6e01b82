"""ColumnarSampler: environments in lockstep and one policy in, fragments of whole columns out.

The loop writes straight into preallocated arrays; what can be derived afterwards (values of final
observations, advantages, episode ids, returns) is computed once per fragment. The same seeds give the same
rows; where fragments are cut does not change them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.fragment import Fragment
from aiorl.data.metrics import EpisodeColumns, PerfStats
from aiorl.env.lockstep import LockstepEnv, VectorStep, env_seeds, training_disabled_error
from aiorl.env.vector_infos import training_disabled
from aiorl.errors import ConfigError
from aiorl.log_once import log_once, summarize
from aiorl.observation.filters import NoFilter, ObservationFilter
from aiorl.observation.preprocessors import Preprocessor, preprocessor_for
from aiorl.sampler.assemble import Assembler, Postprocess
from aiorl.sampler.block import BlockSpec, FinalRows, StepBlock
from aiorl.sampler.complete import EpisodeCollector
from aiorl.sampler.episodes import EpisodeTracker

__all__ = ["BATCH_MODES", "ActingPolicy", "ColumnarSampler"]

logger = logging.getLogger(__name__)

BATCH_MODES = ("truncate_episodes", "complete_episodes")

F32 = NDArray[np.float32]


class ActionKind(Protocol):
    """What the sampler asks of an action distribution: how its arrays look."""

    num_inputs: int
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]


class ActingPolicy(Protocol):
    """What the sampler asks of a policy; ``OnnxPolicy`` is one."""

    @property
    def distribution(self) -> ActionKind:
        """How actions look."""

    def initial_state(self, num_rows: int) -> list[F32]:
        """Recurrent state at an episode's start, one array [N, ...] per component."""

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Randomness for actions, [*leading, K]."""

    def act_into(
        self, obs: NDArray[Any], state: Sequence[F32], noise: F32, rows: Mapping[str, NDArray[Any]]
    ) -> list[F32]:
        """Write actions, logp, distribution inputs and values into the rows; return the state after the step."""

    def values(self, obs: NDArray[Any], state: Sequence[F32] = ()) -> F32:
        """Values [N] of observations."""


class ColumnarSampler:
    """Samples fragments of fixed length from environments stepped in lockstep.

    Not to be used by several threads at once.

    Attributes:
        env: the environments.
        policy: acts; new weights take effect at the next step.
        filter: observation filter; a state adopted between two steps takes effect with the next observation.
        perf: where time went so far.
        env_steps: transitions sampled so far.
    """

    def __init__(
        self,
        env: LockstepEnv,
        policy: ActingPolicy,
        *,
        fragment_length: int,
        columns: Collection[str],
        batch_mode: str = "truncate_episodes",
        preprocessor: Preprocessor | None = None,
        filter: ObservationFilter | None = None,
        postprocess: str | Postprocess = "none",
        postprocess_settings: Mapping[str, Any] | None = None,
        clip_rewards: bool | float = False,
        clip_actions: bool = True,
        seed: int = 0,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        """Get ready; nothing is stepped before the first ``sample``.

        Args:
            env: environments; the sampler resets them, the caller closes them.
            policy: what acts.
            fragment_length: T, steps of each environment per fragment; for complete episodes, a fragment
                holds at least ``T * N`` transitions.
            columns: names of the columns and extras a fragment shall carry (``data.columns``). ``new_obs``
                asks for the extras from which it can be rebuilt.
            batch_mode: ``"truncate_episodes"`` cuts after T steps; ``"complete_episodes"`` gives whole
                episodes, one after the other, as a fragment of one environment.
            preprocessor: observation to model input; None = the one for the observation space.
            filter: observation filter; None = none.
            postprocess: ``"gae"``, ``"none"``, or a function with the arguments of ``policy.postprocess.gae``
                that returns advantages and value targets, or None.
            postprocess_settings: keyword arguments for it, such as gamma and lam.
            clip_rewards: True clips rewards to [-1, 1], a number to its own range, False not at all. Returns
                in ``take_episodes`` are never clipped.
            clip_actions: clip what the environment gets to the bounds of its action space; the column keeps
                the action as chosen.
            seed: seeds the environments (``lockstep.env_seeds``) and the choice of actions.
            on_step: called between two steps. It may set weights and filter state. If it raises, ``sample``
                raises the same, and the next ``sample`` goes on where this one stopped.

        Raises:
            ConfigError: a setting that cannot be honoured.
        """
        if fragment_length < 1:
            raise ConfigError(
                f"rollout_fragment_length is {fragment_length}, expected at least 1.",
                key="rollout_fragment_length",
                value=fragment_length,
            )
        if batch_mode not in BATCH_MODES:
            raise ConfigError(
                f"batch_mode is {batch_mode!r}, expected one of {', '.join(BATCH_MODES)}.",
                key="batch_mode",
                value=batch_mode,
            )
        self.env = env
        self.policy = policy
        self.filter = filter if filter is not None else NoFilter()
        self.perf = PerfStats()
        self.env_steps = 0
        self._preprocessor = preprocessor or preprocessor_for(env.observation_space)
        self._on_step = on_step
        self._seed = seed
        sequence = np.random.SeedSequence(seed)
        self._rng = np.random.default_rng(sequence)
        self._tracker = EpisodeTracker(env.num_envs, int(sequence.generate_state(1)[0]) << 31)
        self._assembler = Assembler(policy, columns, postprocess, postprocess_settings, clip_rewards)
        self._collector = EpisodeCollector() if batch_mode == "complete_episodes" else None
        obs_dtype = self.filter.output_dtype(self._preprocessor.dtype)
        self._spec = BlockSpec(
            steps=fragment_length,
            num_envs=env.num_envs,
            obs_shape=self._preprocessor.shape,
            obs_dtype=obs_dtype,
            action_shape=tuple(policy.distribution.action_shape),
            action_dtype=policy.distribution.action_dtype,
            num_dist_inputs=int(policy.distribution.num_inputs),
            keep_dist_inputs=c.ACTION_DIST_INPUTS in columns,
            keep_values=self._assembler.needs_values,
            sent=frozenset(columns) if batch_mode == "truncate_episodes" else frozenset(),
        )
        self._bounds = _action_bounds(env.action_space) if clip_actions else None
        self._actions_need_copy = not isinstance(env.action_space, spaces.Discrete)
        self._obs_is_plain = self._preprocessor.is_identity and self.filter.is_identity
        self._state: list[F32] = policy.initial_state(env.num_envs)
        self._block: StepBlock | None = None

    def sample(self) -> Fragment:
        """The next fragment; blocks until it is full.

        Raises:
            EnvError: the environment failed (see LockstepEnv).
            ConfigError: a step is not to be trained on (``training_enabled`` in its info), which is for general
                sampling to do.
            Exception: whatever ``on_step`` raised.
        """
        if log_once("sample_start"):
            logger.info("Sampling %d environment steps", self._spec.steps * self._spec.num_envs)
        fragment = self._next_fragment()
        if log_once("sample_end"):
            logger.info("Sampled: %s", summarize(fragment.columns, width=len(fragment.columns)))
        return fragment

    def _next_fragment(self) -> Fragment:
        if self._collector is None:
            block = self._run_block()
            return self._assembler.assemble(block, self._tracker, self._state)
        wanted = self._spec.steps * self._spec.num_envs
        while self._collector.ready_rows < wanted:
            block = self._run_block()
            self._collector.add(self._assembler.record(block, self._tracker, self._state))
        return self._assembler.finish_episodes(self._collector.take())

    def take_episodes(self) -> EpisodeColumns:
        """Episodes that ended in the fragments returned so far and were not yet taken."""
        return self._tracker.take_finished()

    def _run_block(self) -> StepBlock:
        """A full block, its last observation already the first of the next one."""
        block = self._block
        if block is None:
            block = self._block = self._new_block(self._first_obs())
        self._run_steps(block)
        self._block = self._new_block(block.obs[-1])
        valid = block.valid
        self.env_steps += block.rewards.size if valid is None else int(np.count_nonzero(valid))
        return block

    def _new_block(self, first_obs: NDArray[Any]) -> StepBlock:
        noise = self.policy.draw_noise(self._rng, self._spec.steps, self._spec.num_envs)
        block = StepBlock(self._spec, noise, self._state)
        block.obs[0] = first_obs
        return block

    def _first_obs(self) -> NDArray[Any]:
        raw_obs = self.env.reset(env_seeds(self._seed, self.env.num_envs))
        obs = self._observed(raw_obs)
        self._report_observed(raw_obs, obs)
        return obs

    def _run_steps(self, block: StepBlock) -> None:
        """Fill the rest of the block. After an exception from ``on_step`` it can be called again."""
        clock = time.perf_counter
        act_into, env_step, on_step = self.policy.act_into, self.env.step, self._on_step
        rows, obs, noise = block.policy_rows(), block.obs, block.noise
        actions, rewards = block.actions, block.rewards
        terminateds, truncateds = block.terminateds, block.truncateds
        bounds, copy, plain = self._bounds, self._actions_need_copy, self._obs_is_plain
        state = self._state
        inference_s = env_s = processing_s = 0.0
        reports = True
        first = t = block.filled
        if log_once("compute_actions_input"):
            logger.info("Inputs to the policy: %s", summarize([obs[first], *state]))
        try:
            for t in range(first, self._spec.steps):
                if on_step is not None:
                    block.filled, self._state = t, state
                    on_step()
                began = clock()
                state = act_into(obs[t], state, noise[t], rows[t])
                acted = clock()
                inference_s += acted - began
                if reports:
                    self._report_acted(rows[t], state)
                chosen = actions[t]
                if bounds is not None:
                    chosen = np.clip(chosen, *bounds)
                elif copy:
                    chosen = chosen.copy()
                step = env_step(chosen)
                stepped = clock()
                env_s += stepped - acted
                rewards[t] = step.rewards
                terminateds[t] = step.terminateds
                truncateds[t] = step.truncateds
                if step.valid is not None:
                    block.mark_valid(t, step.valid)
                if step.infos:
                    self._check_trained_on(step)
                if step.final_index is not None:
                    self._take_finals(block, t, step, state)
                elif plain:
                    obs[t + 1] = step.obs
                else:
                    obs[t + 1] = self._observed(step.obs)
                if state:
                    _restart(state, step)
                if reports:
                    self._report_observed(step.obs, obs[t + 1], step.infos)
                    reports = False
                processing_s += clock() - stepped
            block.filled, self._state = self._spec.steps, state
        finally:
            self.perf.iters += block.filled - first
            self.perf.inference_time += inference_s
            self.perf.env_wait_time += env_s
            self.perf.processing_time += processing_s

    def _take_finals(self, block: StepBlock, t: int, step: VectorStep, state: list[F32]) -> None:
        """Record what to act on next and the true final observations; each enters the filter once.

        What was stepped to enters it together, then the first observations of new episodes one by one, as in general
        sampling.
        """
        assert step.final_index is not None, "a step without finals"
        assert step.final_obs is not None, "finals without observations"
        if self._obs_is_plain:
            block.obs[t + 1] = step.obs
            final_obs = step.final_obs
        else:
            stepped_to = step.obs.copy()
            stepped_to[step.final_index] = step.final_obs
            block.obs[t + 1] = self._observed(stepped_to)
            final_obs = block.obs[t + 1, step.final_index]
            first_obs = self._preprocessor.transform(step.obs[step.final_index])
            block.obs[t + 1, step.final_index] = self.filter.one_by_one(first_obs)
        final_state = [component[step.final_index] for component in state]
        block.finals.append(FinalRows(t, step.final_index, final_obs, final_state))

    def _observed(self, obs: NDArray[Any]) -> NDArray[Any]:
        return self.filter(self._preprocessor.transform(obs))

    def _check_trained_on(self, step: VectorStep) -> None:
        if training_disabled(step, self._spec.num_envs):
            raise training_disabled_error(self.env.env_id)

    # --- reports, at most one turn of each block ---

    def _report_observed(
        self, raw_obs: NDArray[Any], obs: NDArray[Any], infos: Mapping[str, Any] | None = None
    ) -> None:
        if log_once("raw_obs"):
            logger.info("Raw observations from the environment: %s", summarize(raw_obs))
        if infos and log_once("infos"):
            logger.info("Infos from the environment: %s", summarize(infos))
        if log_once("preprocessed_obs"):
            logger.info("Preprocessed observations: %s", summarize(self._preprocessor.transform(raw_obs)))
            logger.info("Filtered observations: %s", summarize(obs))

    def _report_acted(self, rows: Mapping[str, NDArray[Any]], state: list[F32]) -> None:
        if log_once("compute_actions_result"):
            logger.info("Outputs of the policy: %s", summarize([rows, state]))


def _restart(state: list[F32], step: VectorStep) -> None:
    """Zero the recurrent state of the environments whose next row opens an episode."""
    for component in state:
        if step.final_index is not None:
            component[step.final_index] = 0.0
        if step.valid is not None:
            component[~step.valid] = 0.0


def _action_bounds(space: spaces.Space[Any]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """What actions are clipped to; infinite where a component has no bound; None if nothing has."""
    if not isinstance(space, spaces.Box):
        return None
    if not (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
        return None
    return space.low, space.high
