"""Fragments of environments in lockstep, made of full tables; statistics of their episodes.

Derived columns, such as advantages, are computed once per fragment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.postprocess import NEED_ACTION_VALUES, NEED_VALUES, postprocessed
from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.columns import F32, Array
from aiorl.data.fragment import Fragment, SamplePlan
from aiorl.data.metrics import EpisodeColumns
from aiorl.process.log_once import warn_of_long_episode
from aiorl.sampling.clipping import ClipWatch
from aiorl.sampling.table import DERIVED, Layout, LevelTable

Flags = NDArray[np.bool_]

_MANY_ROWS = 5000

FRAGMENT_COLUMNS = frozenset(
    {
        c.OBS,
        c.NEW_OBS,
        c.LAST_OBS,
        c.ACTIONS,
        c.REWARDS,
        c.TERMINATEDS,
        c.TRUNCATEDS,
        c.ACTION_LOGP,
        c.ACTION_DIST_INPUTS,
        c.VF_PREDS,
        c.ADVANTAGES,
        c.VALUE_TARGETS,
        c.BOOTSTRAP_VALUES,
        c.N_STEP_RETURNS,
        c.DISCOUNTS,
        c.N_STEPS,
        c.PRIORITIES,
    }
)
"""Names of the columns available in lockstep."""


class FragmentBuilder:
    """Makes empty tables, and fragments of the full ones: one of each, or of whole episodes.

    Attributes:
        tracker: lengths and returns of the episodes.
    """

    def __init__(
        self,
        policy: GraphPolicy,
        plan: SamplePlan,
        settings: WorkerConfig,
        *,
        num_envs: int,
        obs_shape: tuple[int, ...],
        obs_dtype: DTypeLike,
        clip_watch: ClipWatch | None,
    ) -> None:
        """Lay out the tables.

        Args:
            policy: the policy that acts.
            plan: columns and postprocessing of a fragment.
            settings: config keys for samplers.
            num_envs: N, the number of environments.
            obs_shape: shape of a filtered observation.
            obs_dtype: its dtype.
            clip_watch: looks at the actions; None for none.
        """
        self._policy = policy
        self._plan = plan
        self._length = settings.rollout_fragment_length
        self._reward_limit = settings.reward_limit
        self._clip_watch = clip_watch
        self.tracker = EpisodeTracker(num_envs)
        self._collector = None if settings.is_truncating else EpisodeCollector(num_envs)
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
        keeps_dist_inputs = (
            self._needs_action_values or c.ACTION_DIST_INPUTS in columns or policy.logp_is_apart
        )
        if self._collector is not None:
            columns = set()  # no table is sent as it is
        self._layout = self._layout_with(
            columns,
            num_envs=num_envs,
            obs_shape=obs_shape,
            obs_dtype=np.dtype(obs_dtype),
            keeps_dist_inputs=keeps_dist_inputs,
        )

    def _layout_with(
        self,
        sent: Collection[str],
        *,
        num_envs: int,
        obs_shape: tuple[int, ...],
        obs_dtype: np.dtype[Any],
        keeps_dist_inputs: bool,
    ) -> Layout:
        """Return shape and dtype of each array of a table by column name, in the order in which
        they lie in memory.

        Columns to send come first. Integers precede floats: integers are sent compressed and would
        otherwise separate the floats. Observations come last, because the one after the last step
        may be sent, too. A column that need not be kept has a single row.
        """
        steps = self._length
        acts = self._policy.distribution
        each_step = (steps, num_envs)
        float32 = np.dtype(np.float32)
        flag = np.dtype(np.bool_)
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
            c.OBS: ((steps + 1, num_envs, *obs_shape), obs_dtype),
        }
        order = sorted(
            arrays, key=lambda name: (name not in sent, name == c.OBS, arrays[name][1].kind == "f")
        )
        return {name: arrays[name] for name in order}

    def empty_table(self, noise: F32, state: Sequence[F32]) -> LevelTable:
        """Return a table for the next T steps.

        Args:
            noise: [T, N, K] randomness of the actions.
            state: recurrent state [N, ...] before the first step, per component.
        """
        return LevelTable(self._layout, noise, state, self._plan.state_every)

    def add(self, table: LevelTable, state: Sequence[F32]) -> Fragment | None:
        """Take in a full table; return a fragment once there are enough rows for one.

        Args:
            table: the table, which must not be used any more.
            state: recurrent state [N, ...] after the last step, per component.
        """
        if self._policy.logp_is_apart:
            dist_inputs, actions = (
                column.reshape(-1, *column.shape[2:])
                for column in (table.dist_inputs, table.actions)
            )
            logp = self._policy.distribution.logp(dist_inputs, actions)
            table.logp[...] = logp.reshape(table.logp.shape)
        if self._clip_watch is not None:
            self._clip_watch.look(table.actions)
        columns, bootstrap = self._columns(table, state)
        collector = self._collector
        if collector is None:
            return self._cut_anywhere(table, columns, bootstrap)
        finals = None
        if self._wants_last:
            _, finals = table.followers()
        collector.add(columns, finals)
        if collector.ready_rows < table.rewards.size:
            return None
        return self._whole_episodes(*collector.take())

    def _cut_anywhere(
        self, table: LevelTable, columns: dict[str, Array], bootstrap: F32
    ) -> Fragment:
        """Return the fragment of one table, cut at the table's end."""
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
        for number, component in enumerate(self._policy.initial_state(1)):
            extras[c.state_in(number)] = component
        return Fragment(self._selected(columns), extras)

    def _columns(self, table: LevelTable, state: Sequence[F32]) -> tuple[dict[str, Array], F32]:
        """Return all columns except the postprocessed ones, and the values of the observations
        after the last step.
        """
        dones = table.terminateds | table.truncateds
        self.tracker.advance(table.rewards, dones, table.valid)
        limit = self._reward_limit
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
        if self._policy.reward_scaler is not None:
            columns[c.SCALED_REWARDS] = self._policy.reward_scaler.scale_envs(
                table.rewards, dones, table.valid
            )
        if len(table.dist_inputs) == len(table.rewards):
            columns[c.ACTION_DIST_INPUTS] = table.dist_inputs
        if self._needs_action_values:
            columns[c.ACTION_VALUES] = self._policy.distribution.action_values(
                table.dist_inputs, table.actions
            )
        if self._needs_values:
            columns[c.VF_PREDS] = table.values
        if table.valid is not None:
            columns[c.VALID] = table.valid
        bootstrap = np.zeros(table.rewards.shape[1], np.float32)
        if self._needs_final_values:
            bootstrap, columns[c.BOOTSTRAP_VALUES] = self._final_values(table, state)
        return columns, bootstrap

    def _final_values(self, table: LevelTable, state: Sequence[F32]) -> tuple[F32, F32]:
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
        states: list[list[F32]] = [[component] for component in state]
        for final in table.finals:
            keep = truncated[final.t, final.envs]
            if keep.any():
                places.append((final.t, final.envs[keep]))
                obs.append(final.obs[keep])
                for parts, component in zip(states, final.state, strict=True):
                    parts.append(component[keep])
        values = self._policy.values(_joined(obs), [_joined(parts) for parts in states])
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


class EpisodeTracker:
    """Lengths and returns of the episodes of N environments, from table to table.

    Nothing is computed per step: the rows of each environment are cut into segments at the ends of
    episodes, and all computation is per segment.

    A row with ``valid == False`` (the reset call of a NEXT_STEP environment) does not count as a
    step.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin with a new episode in each environment."""
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._finished = [EpisodeColumns.empty()]

    def advance(
        self,
        rewards: NDArray[Any],
        dones: NDArray[np.bool_],
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add the next T steps.

        Args:
            rewards: [T, N] raw rewards.
            dones: [T, N] True if the row ended its episode.
            valid: [T, N] True if the row is a transition; None = all are.
        """
        steps, num_envs = rewards.shape
        opens = np.ones((num_envs, steps), np.bool_)
        opens[:, 1:] = dones[:-1].T
        start = np.flatnonzero(opens)  # positions n * T + t
        env, row = np.divmod(start, steps)
        length = np.diff(start, append=steps * num_envs)
        is_first = row == 0
        totals = np.add.reduceat(rewards.T.astype(np.float64, order="C").reshape(-1), start)
        totals += np.where(is_first, self._returns[env], 0.0)
        lengths = length + np.where(is_first, self._lengths[env], 0)
        if valid is not None:
            lengths -= ~valid[row, env]  # a row that is not a transition opens an episode
        is_last = np.append(is_first[1:], True)
        closed = ~is_last
        closed[is_last] = dones[-1]
        if closed.any():
            # segments lie environment by environment
            order = np.argsort((row + length)[closed], kind="stable")
            self._finished.append(
                EpisodeColumns(lengths[closed][order].astype(np.int32), totals[closed][order])
            )
        goes_on = ~dones[-1]
        self._returns = totals[is_last] * goes_on
        self._lengths = lengths[is_last] * goes_on

    def take_finished(self) -> EpisodeColumns:
        """Return the episodes that ended since the last call, in the order in which they ended."""
        finished = self._finished
        self._finished = [EpisodeColumns.empty()]
        return EpisodeColumns(
            np.concatenate([part.lengths for part in finished]),
            np.concatenate([part.rewards for part in finished]),
        )


class EpisodeCollector:
    """Rows of environments in lockstep, kept until their episodes are complete.

    Attributes:
        ready_rows: number of transitions of complete episodes that wait.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin empty."""
        self.ready_rows = 0
        self._parts: list[dict[str, Array]] = []
        self._finals: list[Array] = []
        self._unfinished = np.zeros(num_envs, np.int64)

    def add(self, columns: dict[str, Array], finals: Array | None) -> None:
        """Add the next T steps; warn once if many rows of one environment have no end.

        Args:
            columns: name -> [T, N, ...].
            finals: [K, ...] true final observations of all rows that end an episode, in the order
                of steps; None if they are not needed.
        """
        if finals is not None:
            self._finals.append(finals)
        dones = columns[c.DONES] = columns[c.TERMINATEDS] | columns[c.TRUNCATEDS]
        valid = columns.setdefault(c.VALID, np.ones(dones.shape, np.bool_))
        self._parts.append(columns)
        complete = _complete(dones)
        # True if an episode ends within these steps
        ends = complete[0]
        before = self._unfinished
        self.ready_rows += int(before[ends].sum()) + int(np.count_nonzero(valid & complete))
        self._unfinished = np.where(ends, 0, before) + np.count_nonzero(valid & ~complete, axis=0)
        index = int(self._unfinished.argmax())
        if self._unfinished[index] > _MANY_ROWS:
            warn_of_long_episode(_MANY_ROWS, index, int(self._unfinished[index]))

    def take(self) -> tuple[dict[str, Array], Array | None]:
        """Return the rows [B, 1, ...] of all complete episodes, environment by environment, and
        their finals.
        """
        columns = {
            name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]
        }
        complete = _complete(columns[c.DONES])
        is_ready = (columns[c.VALID] & complete).T
        rows = {
            name: column.swapaxes(0, 1)[is_ready][:, None]
            for name, column in columns.items()
            if name != c.VALID
        }
        finals = None
        if self._finals:
            ends = np.argwhere(columns[c.DONES])
            # they were added step by step, and rows go environment by environment
            finals = np.concatenate(self._finals)[np.lexsort((ends[:, 0], ends[:, 1]))]
            self._finals = []
        columns[c.VALID] &= ~complete  # rows already taken no longer count as transitions
        columns[c.DONES] &= ~complete
        needed: Flags = np.logical_or.reduce(columns[c.VALID], axis=1)
        first = int(needed.argmax()) if needed.any() else len(needed)
        self._parts = [{name: column[first:].copy() for name, column in columns.items()}]
        self.ready_rows = 0
        return rows, finals


def _complete(dones: Flags) -> Flags:
    """Mark rows [L, N] up to the last end of an episode in their environment."""
    complete: Flags = np.logical_or.accumulate(dones[::-1], axis=0)[::-1]
    return complete
