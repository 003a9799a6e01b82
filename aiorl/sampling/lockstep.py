"""LockstepSampler: environments in lockstep and one policy in, fragments of whole columns out.

The loop writes straight into preallocated arrays; what can be derived afterwards (values of final
observations, advantages, returns) is computed once per fragment. The same seeds give the same
rows; where fragments are cut does not change them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.graph_policy import ActRows
from aiorl.acting.observation.filters import NoFilter, ObservationFilter
from aiorl.acting.observation.preprocessors import Preprocessor, preprocessor_for
from aiorl.acting.postprocess import ScalesRewards
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.fragment import Fragment
from aiorl.data.metrics import EpisodeColumns, PerfStats, RolloutMetrics
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.lockstep import LockstepEnv, TrainingDisabled, VectorStep, env_seeds
from aiorl.env.vector_infos import training_disabled
from aiorl.errors import SamplerDied
from aiorl.process.log_once import report
from aiorl.sampling.assemble import Assembler
from aiorl.sampling.block import BlockSpec, FinalRows, StepBlock
from aiorl.sampling.complete import EpisodeCollector
from aiorl.sampling.episodes import EpisodeTracker

__all__ = ["ActingPolicy", "LockstepSampler"]

F32 = NDArray[np.float32]


class ActionKind(Protocol):
    """What the sampler asks of an action distribution: how its arrays look."""

    num_inputs: int
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]

    def logp(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """Log-probabilities [R] of actions [R, ...] for inputs [R, P]."""

    def action_values(self, inputs: F32, actions: NDArray[Any]) -> F32:
        """Values [T, N] of actions [T, N, ...] for inputs [T, N, P]; asked for only where rows get priorities."""


class ActingPolicy(Protocol):
    """What the sampler asks of a policy; ``OnnxPolicy`` is one."""

    @property
    def distribution(self) -> ActionKind:
        """How actions look."""

    @property
    def logp_is_apart(self) -> bool:
        """Whether rows without log-probabilities may be acted into, and the distribution has the same later."""

    def initial_state(self, num_rows: int) -> list[F32]:
        """Recurrent state at an episode's start, one array [N, ...] per component."""

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Randomness for actions, [*leading, K]."""

    def act_into(self, obs: NDArray[Any], state: Sequence[F32], noise: F32, rows: ActRows) -> list[F32]:
        """Write actions, logp, distribution inputs and values into the rows; return the state after the step."""

    def values(self, obs: NDArray[Any], state: Sequence[F32] = ()) -> F32:
        """Values [N] of observations."""


class LockstepSampler:
    """Samples fragments of fixed length from environments stepped in lockstep.

    Of several threads that sample at once, one after the other gets a fragment.

    Attributes:
        env: the environments.
        policy: acts; new weights take effect at the next step.
        filter: observation filter; a state adopted between two steps takes effect with the next observation.
        on_step: called between two steps, None for nothing. It may set weights and filter state. If it raises,
            ``sample`` raises the same, and the next ``sample`` goes on where this one stopped.
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
        complete_episodes: bool = False,
        preprocessor: Preprocessor | None = None,
        filter: ObservationFilter | None = None,
        postprocess: str = "none",
        postprocess_settings: Mapping[str, Any] | None = None,
        reward_limit: float = 0.0,
        reward_scaler: ScalesRewards | None = None,
        clip_actions: bool = True,
        state_every: int = 0,
        seed: int | None = 0,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        """Get ready; nothing is stepped before the first ``sample``.

        Args:
            env: environments; the sampler resets them, the caller closes them.
            policy: what acts.
            fragment_length: T, steps of each environment per fragment; for complete episodes, a fragment
                holds at least ``T * N`` transitions.
            columns: names of what a fragment shall carry (``data.columns``). ``new_obs`` asks for what it can be
                made of (``data.fragment``).
            complete_episodes: give whole episodes, one after the other, as a fragment of one environment; else
                cut after T steps.
            preprocessor: observation to model input; None = the one for the observation space.
            filter: observation filter; None = none.
            postprocess: name in ``policy.postprocess.POSTPROCESSORS``.
            postprocess_settings: keyword arguments for it, such as gamma and lam.
            reward_limit: clip rewards to [-limit, limit]; 0 does not. Returns in ``take_episodes`` are never clipped.
            reward_scaler: scales rewards to learn from, after they are clipped: advantages come of them, and they are
                sent as SCALED_REWARDS where REWARDS are; None does not.
            clip_actions: clip what the environment gets to the bounds of its action space; the column keeps
                the action as chosen.
            state_every: see `SamplePlan`.
            seed: seeds the environments (``lockstep.env_seeds``) and the choice of actions; None seeds neither.
            on_step: see the class.
        """
        self.env = env
        self.policy = policy
        self.filter = filter if filter is not None else NoFilter()
        self.perf = PerfStats()
        self.env_steps = 0
        self._preprocessor = preprocessor or preprocessor_for(env.observation_space)
        self.on_step = on_step
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._tracker = EpisodeTracker(env.num_envs)
        self._assembler = Assembler(policy, columns, postprocess, postprocess_settings, reward_limit, reward_scaler)
        self._collector = EpisodeCollector() if complete_episodes else None
        obs_dtype = self.filter.output_dtype(self._preprocessor.dtype)
        self._spec = BlockSpec(
            steps=fragment_length,
            num_envs=env.num_envs,
            obs_shape=self._preprocessor.shape,
            obs_dtype=obs_dtype,
            action_shape=tuple(policy.distribution.action_shape),
            action_dtype=policy.distribution.action_dtype,
            num_dist_inputs=int(policy.distribution.num_inputs),
            keep_dist_inputs=self._assembler.needs_dist_inputs or policy.logp_is_apart,
            keep_values=self._assembler.needs_values,
            state_every=state_every,
            sent=frozenset() if complete_episodes else frozenset(columns),
        )
        layout = ActionLayout(env.action_space)
        self._clip = layout.clip if clip_actions and layout.is_bounded else None
        self._actions_need_copy = not isinstance(env.action_space, spaces.Discrete)
        self._begins = env.can_begin and env.num_envs > 1 and not self._actions_need_copy
        self._obs_is_plain = self._preprocessor.is_identity and self.filter.is_identity
        self._state: list[F32] = policy.initial_state(env.num_envs)
        self._block: StepBlock | None = None
        self._sampling = threading.RLock()
        self._is_stopped = False

    def sample(self) -> Fragment:
        """The next fragment; blocks until it is full.

        Raises:
            EnvError: the environment failed (see LockstepEnv).
            TrainingDisabled: a step is not to be trained on (``training_enabled`` in its info); nothing can follow.
            Exception: whatever ``on_step`` raised.
        """
        with self._sampling:
            return self._next_fragment()

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
        """Episodes that ended since the last call; where wrappers cut a game into several, whole games instead."""
        episodes, games = self._tracker.take_finished(), self.env.take_finished_games()
        return episodes if games is None else EpisodeColumns.of([RolloutMetrics(g.length, g.reward) for g in games])

    def _run_block(self) -> StepBlock:
        """A full block, its last observation already the first of the next one."""
        block = self._block
        if block is None:
            block = self._block = self._new_block(self._first_obs())
        self._run_steps(block)
        if self.policy.logp_is_apart:
            flat = [column.reshape(-1, *column.shape[2:]) for column in (block.dist_inputs, block.actions)]
            block.logp[...] = self.policy.distribution.logp(*flat).reshape(block.logp.shape)
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
        raw_obs = self.env.reset(None if self._seed is None else env_seeds(self._seed, self.env.num_envs))
        obs = self._observed(raw_obs)
        self._report_observed(raw_obs, obs)
        return obs

    def _run_steps(self, block: StepBlock) -> None:
        """Fill the rest of the block. After an exception from ``on_step`` it can be called again."""
        clock = time.perf_counter
        act_into = self._act_by_halves if self._begins else self.policy.act_into
        env_step, on_step = self.env.step, self.on_step
        obs, rewards = block.obs, block.rewards
        terminateds, truncateds = block.terminateds, block.truncateds
        clip, copy, plain = self._clip, self._actions_need_copy, self._obs_is_plain
        state = self._state
        notes_states = bool(state and self._spec.state_every)
        inference_s = env_s = processing_s = 0.0
        reports = True
        first = t = block.filled
        report("compute_actions_input", c.DEFAULT_POLICY_ID, [obs[first], *state])
        places = block.policy_rows(with_logp=not self.policy.logp_is_apart)
        turns = zip(obs[first:-1], block.noise[first:], places, strict=True)
        try:
            for t, (seen, noise, rows) in enumerate(turns, first):
                if self._is_stopped:
                    raise SamplerDied("the sampler was stopped")
                if on_step is not None:
                    block.filled, self._state = t, state
                    on_step()
                if notes_states:
                    block.note_state(t, state)
                began = clock()
                state = act_into(seen, state, noise, rows)
                acted = clock()
                inference_s += acted - began
                if reports:
                    report("compute_actions_result", c.DEFAULT_POLICY_ID, [rows._asdict(), state])
                chosen = rows.actions
                if clip is not None:
                    chosen = clip(chosen)
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
                    self._check_infos(step)
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

    def _act_by_halves(self, obs: NDArray[Any], state: Sequence[F32], noise: F32, rows: ActRows) -> list[F32]:
        """As ``act_into`` of the policy; half of the environments step while the others are still acted for."""
        half = self.env.num_envs // 2
        after: list[list[F32]] = []
        actions, dist_inputs, values, logp = rows
        try:
            for part in (slice(half), slice(half, None)):
                of_part = ActRows(actions[part], dist_inputs[part], values[part], None if logp is None else logp[part])
                after.append(self.policy.act_into(obs[part], [each[part] for each in state], noise[part], of_part))
                self.env.begin(part, of_part.actions)
        except BaseException:
            self._is_stopped = True  # some step, by actions that nobody would know of the next time
            raise
        return [np.concatenate(parts) for parts in zip(*after, strict=True)]

    def _take_finals(self, block: StepBlock, t: int, step: VectorStep, state: list[F32]) -> None:
        """Record what to act on next and the true final observations; each enters the filter once.

        What was stepped to enters it together, then the first observations of new episodes one by one, as in sampling
        turn by turn.
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

    def _check_infos(self, step: VectorStep) -> None:
        if training_disabled(step, self._spec.num_envs):
            raise TrainingDisabled(self.env.env_id)

    # --- as every sampler of a RolloutWorker ---

    def get_data(self) -> SampleBatch:
        """The next fragment as rows."""
        return self.sample().to_sample_batch()

    def get_metrics(self) -> list[RolloutMetrics]:
        """See ``take_episodes``."""
        episodes = self.take_episodes()
        pairs = zip(episodes.lengths.tolist(), episodes.rewards.tolist(), strict=True)
        return [RolloutMetrics(length, reward) for length, reward in pairs]

    def get_extra_batches(self) -> list[SampleBatch]:
        """None: there are no episodes that could add any."""
        return []

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """No fragment is sampled inside this block, by another thread."""
        return self._sampling

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Let ``sample`` raise from the next step on; an environment that blocks is not interrupted.

        Args:
            timeout_s: wait at most so long for another thread's ``sample`` to end, seconds.
        Returns: nothing samples any more.
        """
        self._is_stopped = True
        is_over = self._sampling.acquire(timeout=timeout_s)
        if is_over:
            self._sampling.release()
        return is_over

    # --- reports, at most one turn of each block ---

    def _report_observed(
        self, raw_obs: NDArray[Any], obs: NDArray[Any], infos: Mapping[str, Any] | None = None
    ) -> None:
        report("raw_obs", raw_obs)
        if infos:
            report("infos", infos)
        report("preprocessed_obs", c.DEFAULT_POLICY_ID, lambda: self._preprocessor.transform(raw_obs))
        report("filtered_obs", c.DEFAULT_POLICY_ID, obs)


def _restart(state: list[F32], step: VectorStep) -> None:
    """Zero the recurrent state of the environments whose next row opens an episode."""
    for component in state:
        if step.final_index is not None:
            component[step.final_index] = 0.0
        if step.valid is not None:
            component[~step.valid] = 0.0
