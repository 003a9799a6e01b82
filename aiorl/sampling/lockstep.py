"""Lockstep: sampling in which all environments step together, with whole columns per step.

The loop writes directly into a `LevelTable`, of which a `FragmentBuilder` makes fragments. The same
seeds give the same rows, regardless of where fragments are cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.filters import NoFilter, ObservationFilter
from aiorl.acting.graph_policy import ActRows, GraphPolicy
from aiorl.acting.preprocessors import Preprocessor, preprocessor_for
from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.columns import F32, Array
from aiorl.data.fragment import Fragment, SamplePlan
from aiorl.data.metrics import EpisodeColumns, PerfStats, RolloutMetrics
from aiorl.env.base_env import LockstepEnv, TrainingDisabled, VectorStep, env_seeds
from aiorl.env.native_vector_env import training_disabled
from aiorl.errors import SamplerDied
from aiorl.process.log_once import report
from aiorl.process.machine import spare_cores
from aiorl.sampling.clipping import ClipWatch
from aiorl.sampling.fragments import FragmentBuilder
from aiorl.sampling.table import FinalRows, LevelTable


class Lockstep:
    """Sampler of fragments of fixed length from environments that all step together, with one
    policy.

    Attributes:
        env: the environments.
        policy: the policy; new weights take effect at the next step.
        filter: observation filter; a state set between two steps takes effect with the next
            observation.
        perf: seconds spent so far, by activity.
        is_stopped: True makes ``sample`` raise SamplerDied at the next step; any thread can set it.
    """

    def __init__(
        self,
        env: LockstepEnv,
        policy: GraphPolicy,
        plan: SamplePlan,
        settings: WorkerConfig,
        preprocessor: Preprocessor | None = None,
        filter: ObservationFilter | None = None,
    ) -> None:
        """Prepare to sample; the first ``sample`` takes the first step.

        Args:
            env: the environments; they are reset here, and the caller closes them.
            policy: policy for all of them. If it scales rewards, advantages are computed from
                scaled rewards, which are sent as SCALED_REWARDS along with REWARDS.
            plan: columns and postprocessing of a fragment; columns that lockstep does not have are
                left out.
            settings: config keys for samplers. A fragment has ``rollout_fragment_length`` steps of
                each environment, or at least as many transitions in whole episodes, which follow
                each other as if from one environment. Rewards are clipped in rows but not in
                ``take_episodes``; actions are only clipped for the environment. The seed is for the
                environments and the choice of actions; None seeds neither.
            preprocessor: maps an observation to model input; None = the default for the observation
                space.
            filter: observation filter; None = none.
        """
        self.env = env
        self.policy = policy
        self.filter = NoFilter() if filter is None else filter
        self.perf = PerfStats()
        self.is_stopped = False
        self._preprocessor = preprocessor or preprocessor_for(env.observation_space)
        self._settings = settings
        self._rng = np.random.default_rng(settings.seed)
        layout = ActionLayout(env.action_space)
        self._builder = FragmentBuilder(
            policy,
            plan,
            settings,
            num_envs=env.num_envs,
            obs_shape=self._preprocessor.shape,
            obs_dtype=self.filter.output_dtype(self._preprocessor.dtype),
            clip_watch=ClipWatch.of(
                c.DEFAULT_POLICY_ID, policy, layout, clips=settings.clip_actions
            ),
        )
        is_discrete = isinstance(env.action_space, spaces.Discrete)
        self._to_env: Callable[[Array], Array] | None = None
        if settings.clip_actions and layout.is_bounded:
            self._to_env = layout.clip
        elif not is_discrete:  # the environment may change the array, which is sent
            self._to_env = np.ndarray.copy
        self._begins = env.can_begin and env.num_envs > 1 and is_discrete and spare_cores() > 0
        self._counts_games = env.take_finished_games() is not None
        self._state: list[F32] = policy.initial_state(env.num_envs)
        self._table: LevelTable | None = None
        self._next_obs: Array | None = None

    def sample(self, on_step: Callable[[], None] | None = None) -> Fragment:
        """Return the next fragment; block until it is full.

        Args:
            on_step: called between two steps; None for none. It can set weights and filter state.
                If it raises, this method raises the same error, and the next call continues from
                there.

        Raises:
            EnvError: the environment failed (see LockstepEnv).
            TrainingDisabled: a step must not be trained on (``training_enabled`` in its info); this
                sampler cannot continue.
            SamplerDied: ``is_stopped`` was set.
            Exception: ``on_step`` raised it.
        """
        fragment = None
        while fragment is None:
            fragment = self._builder.add(self._full_table(on_step), self._state)
        return fragment

    def take_episodes(self) -> EpisodeColumns:
        """Return the episodes that ended since the last call; whole games if wrappers cut games
        into episodes.
        """
        episodes = self._builder.tracker.take_finished()
        if not self._counts_games:
            return episodes
        games = self.env.take_finished_games() or ()
        return EpisodeColumns.of([RolloutMetrics(game.length, game.reward) for game in games])

    def prepare(self) -> LevelTable:
        """Return the empty table of the next fragment, with the randomness of its actions.

        ``sample`` calls it, too. A caller can do so before, for example while a fragment is being
        sent.
        """
        if self._table is None:
            if self._next_obs is None:
                self._next_obs = self._first_obs()
            steps = self._settings.rollout_fragment_length
            noise = self.policy.draw_noise(self._rng, steps, self.env.num_envs)
            self._table = self._builder.empty_table(noise, self._state)
            self._table.obs[0] = self._next_obs
        return self._table

    def _full_table(self, on_step: Callable[[], None] | None) -> LevelTable:
        """Return a full table; its last observation is also the first of the next one."""
        table = self.prepare()
        self._run_steps(table, on_step)
        self._table = None
        self._next_obs = table.obs[-1].copy()
        return table

    def _first_obs(self) -> NDArray[Any]:
        seed = self._settings.seed
        seeds = None if seed is None else env_seeds(seed, self.env.num_envs)
        raw_obs = self.env.reset(seeds)
        obs = self._observed(raw_obs)
        self._report_observed(raw_obs, obs)
        return obs

    def _run_steps(self, table: LevelTable, on_step: Callable[[], None] | None) -> None:
        """Fill the rest of the table; can be called again after an exception from ``on_step``."""
        # local names, because this loop is most of what the sampler itself costs
        clock = time.perf_counter
        act_into: Callable[..., list[F32]] = self.policy.act_into
        if self._begins:
            act_into = self._act_by_halves
        env_step = self.env.step
        obs = table.obs
        rewards = table.rewards
        terminateds = table.terminateds
        truncateds = table.truncateds
        to_env = self._to_env
        obs_is_plain = self._obs_is_plain
        state = self._state
        notes_states = bool(state and table.state_every)
        inference_s = env_s = processing_s = 0.0
        must_report = True  # one step of each table is enough for a debug log
        first = t = table.filled
        report("compute_actions_input", c.DEFAULT_POLICY_ID, [obs[first], *state])
        places = table.policy_rows(with_logp=not self.policy.logp_is_apart)
        turns = zip(obs[first:-1], table.noise[first:], places, strict=True)
        try:
            for t, (obs_t, noise, rows) in enumerate(turns, first):
                if self.is_stopped:
                    raise SamplerDied("the sampler was stopped")
                if on_step is not None:
                    table.filled = t
                    self._state = state
                    on_step()
                if notes_states:
                    table.note_state(t, state)
                began = clock()
                state = act_into(obs_t, state, noise, rows)
                acted = clock()
                inference_s += acted - began
                if must_report:
                    report("compute_actions_result", c.DEFAULT_POLICY_ID, [rows._asdict(), state])
                actions = rows.actions
                if to_env is not None:
                    actions = to_env(actions)
                step = env_step(actions)
                stepped = clock()
                env_s += stepped - acted
                rewards[t] = step.rewards
                terminateds[t] = step.terminateds
                truncateds[t] = step.truncateds
                if step.valid is not None:
                    table.mark_valid(t, step.valid)
                if step.infos and training_disabled(step, self.env.num_envs):
                    raise TrainingDisabled(self.env.env_id)
                if step.final_index is not None:
                    self._take_finals(table, t, step, state)
                elif obs_is_plain:
                    obs[t + 1] = step.obs
                else:
                    obs[t + 1] = self._observed(step.obs)
                if state:
                    _restart(state, step)
                if must_report:
                    self._report_observed(step.obs, obs[t + 1], step.infos)
                    must_report = False
                processing_s += clock() - stepped
            table.filled = len(rewards)
            self._state = state
        finally:
            self.perf.iters += table.filled - first
            self.perf.inference_time += inference_s
            self.perf.env_wait_time += env_s
            self.perf.processing_time += processing_s

    def _act_by_halves(
        self, obs: NDArray[Any], state: Sequence[F32], noise: F32, rows: ActRows
    ) -> list[F32]:
        """Act like the policy's ``act_into``; half of the environments step while the policy acts
        for the others.
        """
        half = self.env.num_envs // 2
        after: list[list[F32]] = []
        actions, dist_inputs, values, logp = rows
        logp_of_part = None
        try:
            for part in (slice(half), slice(half, None)):
                if logp is not None:
                    logp_of_part = logp[part]
                of_part = ActRows(actions[part], dist_inputs[part], values[part], logp_of_part)
                after.append(
                    self.policy.act_into(
                        obs[part], [component[part] for component in state], noise[part], of_part
                    )
                )
                self.env.begin(part, of_part.actions)
        except BaseException:
            # some environments step with actions that a later call would not know
            self.is_stopped = True
            raise
        return [np.concatenate(parts) for parts in zip(*after, strict=True)]

    def _take_finals(self, table: LevelTable, t: int, step: VectorStep, state: list[F32]) -> None:
        """Record the next observations to act on and the true final ones; each enters the filter
        once.

        The observations that a step led to enter it together, then the first ones of new episodes
        one by one, as in turn-by-turn sampling.
        """
        assert step.final_index is not None, "a step without finals"
        assert step.final_obs is not None, "finals without observations"
        if self._obs_is_plain:
            table.obs[t + 1] = step.obs
            final_obs = step.final_obs
        else:
            stepped_to = step.obs.copy()
            stepped_to[step.final_index] = step.final_obs
            table.obs[t + 1] = self._observed(stepped_to)
            final_obs = table.obs[t + 1, step.final_index]
            first_obs = self._preprocessor.transform(step.obs[step.final_index])
            table.obs[t + 1, step.final_index] = self.filter.filter_in_order(first_obs)
        final_state = [component[step.final_index] for component in state]
        table.finals.append(FinalRows(t, step.final_index, final_obs, final_state))

    @property
    def _obs_is_plain(self) -> bool:
        """True if networks get the observations as they are."""
        return self._preprocessor.is_identity and self.filter.is_identity

    def _observed(self, obs: NDArray[Any]) -> NDArray[Any]:
        if not self._preprocessor.is_identity:
            obs = self._preprocessor.transform(obs)
        return self.filter(obs)

    def _report_observed(
        self, raw_obs: NDArray[Any], obs: NDArray[Any], infos: Mapping[str, Any] | None = None
    ) -> None:
        report("raw_obs", raw_obs)
        if infos:
            report("infos", infos)
        report(
            "preprocessed_obs", c.DEFAULT_POLICY_ID, lambda: self._preprocessor.transform(raw_obs)
        )
        report("filtered_obs", c.DEFAULT_POLICY_ID, obs)


def _restart(state: list[F32], step: VectorStep) -> None:
    """Zero the recurrent state of the environments whose next row opens an episode."""
    for component in state:
        if step.final_index is not None:
            component[step.final_index] = 0.0
        if step.valid is not None:
            component[~step.valid] = 0.0
