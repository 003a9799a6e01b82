"""Lockstep: sampling in which all environments step together, with whole columns per step.

The loop writes directly into a `LevelTable`. Derived columns are computed once per fragment. The
same seeds give the same rows, regardless of where fragments are cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.filters import NoFilter, ObservationFilter
from aiorl.acting.graph_policy import ActRows, GraphPolicy
from aiorl.acting.postprocess import NEED_ACTION_VALUES, NEED_VALUES, postprocessed
from aiorl.acting.preprocessors import Preprocessor, preprocessor_for
from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.fragment import Fragment, SamplePlan
from aiorl.data.metrics import EpisodeColumns, PerfStats, RolloutMetrics
from aiorl.env.base_env import LockstepEnv, TrainingDisabled, VectorStep, env_seeds
from aiorl.env.native_vector_env import training_disabled
from aiorl.errors import SamplerDied
from aiorl.process.log_once import report
from aiorl.process.machine import spare_cores
from aiorl.sampling.clipping import ClipWatch
from aiorl.sampling.fragments import FRAGMENT_COLUMNS, EpisodeCollector, EpisodeTracker
from aiorl.sampling.table import DERIVED, FinalRows, Layout, LevelTable

Array = NDArray[Any]
F32 = NDArray[np.float32]


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
        self.filter = filter if filter is not None else NoFilter()
        self.perf = PerfStats()
        self.is_stopped = False
        self._preprocessor = preprocessor or preprocessor_for(env.observation_space)
        self._settings = settings
        self._plan = plan
        self._rng = np.random.default_rng(settings.seed)
        self._tracker = EpisodeTracker(env.num_envs)
        columns = {name for name in plan.columns if name in FRAGMENT_COLUMNS}
        sent = set(columns)
        if policy.reward_scaler is not None and c.REWARDS in columns:
            sent.add(c.SCALED_REWARDS)
        self._sent = tuple(sorted(sent))
        self._wants_finals = c.NEW_OBS in columns
        self._wants_last = self._wants_finals or c.LAST_OBS in columns
        self._needs_final_values = plan.postprocess in NEED_VALUES or c.BOOTSTRAP_VALUES in columns
        self._needs_values = self._needs_final_values or c.VF_PREDS in columns
        self._needs_action_values = plan.postprocess in NEED_ACTION_VALUES
        needs_dist_inputs = self._needs_action_values or c.ACTION_DIST_INPUTS in columns
        self._collector = None if settings.is_truncating else EpisodeCollector(env.num_envs)
        self._steps = settings.rollout_fragment_length
        self._layout = self._layout_with(
            columns if settings.is_truncating else (),
            keeps_dist_inputs=needs_dist_inputs or policy.logp_is_apart,
        )
        layout = ActionLayout(env.action_space)
        self._clip = layout.clip if settings.clip_actions and layout.is_bounded else None
        self._clip_watch = ClipWatch.of(
            c.DEFAULT_POLICY_ID, policy, layout, clips=settings.clip_actions
        )
        self._actions_need_copy = not isinstance(env.action_space, spaces.Discrete)
        self._begins = (
            env.can_begin and env.num_envs > 1 and not self._actions_need_copy and spare_cores() > 0
        )
        self._obs_is_plain = self._preprocessor.is_identity and self.filter.is_identity
        self._state: list[F32] = policy.initial_state(env.num_envs)
        self._table: LevelTable | None = None
        self._next_obs: Array | None = None

    def _layout_with(self, sent: Collection[str], *, keeps_dist_inputs: bool) -> Layout:
        """Return shape and dtype of each array of a table by column name, in the order in which
        they lie in memory.

        Columns to send come first. Integers precede floats: integers are sent compressed and would
        otherwise separate the floats. Observations come last, because the one after the last step
        may be sent, too. A column that need not be kept has a single row.
        """
        steps = self._steps
        num_envs = self.env.num_envs
        acts = self.policy.distribution
        each_step = (steps, num_envs)
        float32 = np.dtype(np.float32)
        flag = np.dtype(np.bool_)
        obs_dtype = np.dtype(self.filter.output_dtype(self._preprocessor.dtype))
        arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            c.ACTIONS: ((*each_step, *acts.action_shape), np.dtype(acts.action_dtype)),
            c.TERMINATEDS: (each_step, flag),
            c.TRUNCATEDS: (each_step, flag),
            c.ACTION_DIST_INPUTS: (
                (steps if keeps_dist_inputs else 1, num_envs, int(acts.num_inputs)),
                float32,
            ),
            c.ACTION_LOGP: (each_step, float32),
            c.VF_PREDS: ((steps if self._needs_values else 1, num_envs), float32),
            c.REWARDS: (each_step, float32),
            **{name: (each_step, float32) for name in DERIVED if name in sent},
            c.OBS: ((steps + 1, num_envs, *self._preprocessor.shape), obs_dtype),
        }
        order = sorted(
            arrays, key=lambda name: (name not in sent, name == c.OBS, arrays[name][1].kind == "f")
        )
        return {name: arrays[name] for name in order}

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
        if self._collector is None:
            return self._cut_anywhere(self._fill_table(on_step))
        least_rows = self._steps * self.env.num_envs
        while self._collector.ready_rows < least_rows:
            table = self._fill_table(on_step)
            columns, _ = self._columns(table)
            self._collector.add(columns, table.followers()[1] if self._wants_last else None)
        return self._whole_episodes(*self._collector.take())

    def take_episodes(self) -> EpisodeColumns:
        """Return the episodes that ended since the last call; whole games if wrappers cut games
        into episodes.
        """
        episodes = self._tracker.take_finished()
        games = self.env.take_finished_games()
        if games is None:
            return episodes
        return EpisodeColumns.of([RolloutMetrics(game.length, game.reward) for game in games])

    def prepare(self) -> LevelTable:
        """Return the empty table of the next fragment, with the randomness of its actions.

        ``sample`` calls it, too. A caller can do so before, for example while a fragment is being
        sent.
        """
        if self._table is None:
            if self._next_obs is None:
                self._next_obs = self._first_obs()
            noise = self.policy.draw_noise(self._rng, self._steps, self.env.num_envs)
            self._table = LevelTable(self._layout, noise, self._state, self._plan.state_every)
            self._table.obs[0] = self._next_obs
        return self._table

    def _fill_table(self, on_step: Callable[[], None] | None) -> LevelTable:
        """Return a full table; its last observation is also the first of the next one."""
        table = self.prepare()
        self._run_steps(table, on_step)
        if self.policy.logp_is_apart:
            flat = [
                column.reshape(-1, *column.shape[2:])
                for column in (table.dist_inputs, table.actions)
            ]
            table.logp[...] = self.policy.distribution.logp(*flat).reshape(table.logp.shape)
        if self._clip_watch is not None:
            self._clip_watch.look(table.actions)
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
        act_into = self._act_by_halves if self._begins else self.policy.act_into
        env_step = self.env.step
        obs = table.obs
        rewards = table.rewards
        terminateds = table.terminateds
        truncateds = table.truncateds
        clip = self._clip
        copy = self._actions_need_copy
        obs_is_plain = self._obs_is_plain
        state = self._state
        notes_states = bool(state and self._plan.state_every)
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
                if clip is not None:
                    actions = clip(actions)
                elif copy:  # the environment may change the array, which is sent
                    actions = actions.copy()
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
            table.filled = self._steps
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
        try:
            for part in (slice(half), slice(half, None)):
                of_part = ActRows(
                    actions[part],
                    dist_inputs[part],
                    values[part],
                    None if logp is None else logp[part],
                )
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

    def _observed(self, obs: NDArray[Any]) -> NDArray[Any]:
        return self.filter(self._preprocessor.transform(obs))

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

    # --- fragments ---

    def _cut_anywhere(self, table: LevelTable) -> Fragment:
        """Return the fragment of one table, cut at the table's end."""
        columns, bootstrap = self._columns(table)
        columns |= postprocessed(
            self._plan.postprocess, columns, self._plan.postprocess_params, bootstrap
        )
        # into the memory that is sent as one piece, if they fit
        for name, target in table.derived.items():
            column = columns.get(name)
            if column is None or (column.shape, column.dtype) != (target.shape, target.dtype):
                continue
            target[...] = column
            columns[name] = target
        extras: dict[str, Array] = {}
        if self._wants_last:
            extras[c.LAST_OBS] = table.obs[-1]
        if self._wants_finals and table.finals:
            index, finals = table.followers()
            extras[c.FINAL_INDEX] = index.astype(np.int32)
            extras[c.FINAL_OBS] = finals
        extras |= table.state_columns()
        return Fragment(self._selected(columns, self._layout), extras)

    def _whole_episodes(self, columns: dict[str, Array], finals: Array | None) -> Fragment:
        """Return a fragment of whole episodes, as if from one environment."""
        columns |= postprocessed(self._plan.postprocess, columns, self._plan.postprocess_params)
        extras: dict[str, Array] = {}
        if finals is not None:
            if self._wants_finals:
                extras[c.FINAL_INDEX] = np.argwhere(columns[c.DONES]).astype(np.int32)
                extras[c.FINAL_OBS] = finals
            extras[c.LAST_OBS] = finals[-1:]
        for number, component in enumerate(self.policy.initial_state(1)):
            extras[c.state_in(number)] = component
        return Fragment(self._selected(columns), extras)

    def _columns(self, table: LevelTable) -> tuple[dict[str, Array], F32]:
        """Return all columns except the postprocessed ones, and the values of the observations
        after the last step.
        """
        dones = table.terminateds | table.truncateds
        self._tracker.advance(table.rewards, dones, table.valid)
        limit = self._settings.reward_limit
        if limit:
            np.clip(table.rewards, -limit, limit, out=table.rewards)
        columns: dict[str, Array] = {
            c.OBS: table.obs[:-1],
            c.ACTIONS: table.actions,
            c.REWARDS: table.rewards,
            c.TERMINATEDS: table.terminateds,
            c.TRUNCATEDS: table.truncateds,
            c.ACTION_LOGP: table.logp,
        }
        if self.policy.reward_scaler is not None:
            columns[c.SCALED_REWARDS] = self.policy.reward_scaler.scale_envs(
                table.rewards, dones, table.valid
            )
        if len(table.dist_inputs) == len(table.rewards):
            columns[c.ACTION_DIST_INPUTS] = table.dist_inputs
        if self._needs_action_values:
            columns[c.ACTION_VALUES] = self.policy.distribution.action_values(
                table.dist_inputs, table.actions
            )
        if self._needs_values:
            columns[c.VF_PREDS] = table.values
        if table.valid is not None:
            columns[c.VALID] = table.valid
        bootstrap = np.zeros(table.rewards.shape[1], np.float32)
        if self._needs_final_values:
            bootstrap, columns[c.BOOTSTRAP_VALUES] = self._final_values(table)
        return columns, bootstrap

    def _final_values(self, table: LevelTable) -> tuple[F32, F32]:
        """Return values after the last step [N], and of true final observations at truncated rows
        [T, N], else 0.

        One call evaluates all of them. If the next call resets an environment, its final
        observation is also that of the next row, so its value is already known.
        """
        num_envs = table.rewards.shape[1]
        truncated = table.truncateds & ~table.terminateds
        at_truncation = np.zeros(table.rewards.shape, np.float32)
        if self._plan.postprocess not in NEED_VALUES and not truncated.any():
            return np.zeros(num_envs, np.float32), at_truncation
        places: list[tuple[int, NDArray[np.int64]]] = []
        obs: list[Array] = [table.obs[-1]]
        states: list[list[F32]] = [[component] for component in self._state]
        for final in table.finals:
            keep = truncated[final.t, final.envs]
            if keep.any():
                places.append((final.t, final.envs[keep]))
                obs.append(final.obs[keep])
                for parts, component in zip(states, final.state, strict=True):
                    parts.append(component[keep])
        values = self.policy.values(_joined(obs), [_joined(parts) for parts in states])
        bootstrap = values[:num_envs]
        np.copyto(at_truncation[:-1], table.values[1:], where=truncated[:-1])
        np.copyto(at_truncation[-1], bootstrap, where=truncated[-1])
        start = num_envs
        for t, index in places:
            at_truncation[t, index] = values[start : start + len(index)]
            start += len(index)
        return bootstrap, at_truncation

    def _selected(
        self, columns: Mapping[str, Array], first: Collection[str] = ()
    ) -> dict[str, Array]:
        """Return the columns to send: those named by ``first`` in its order, then the others."""
        order = (*(name for name in first if name in self._sent), *self._sent)
        selected = {name: columns[name] for name in order if name in columns}
        if c.VALID in columns:
            selected[c.VALID] = columns[c.VALID]
        return selected


def _joined(parts: Sequence[Array]) -> Array:
    """Return the parts as one array, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _restart(state: list[F32], step: VectorStep) -> None:
    """Zero the recurrent state of the environments whose next row opens an episode."""
    for component in state:
        if step.final_index is not None:
            component[step.final_index] = 0.0
        if step.valid is not None:
            component[~step.valid] = 0.0
