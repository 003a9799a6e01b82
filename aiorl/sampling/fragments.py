"""Fragments of level seats: from recorded steps to columns, episodes and whole episodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.postprocess import needs_action_values, needs_values, postprocessed
from aiorl.data import columns as c
from aiorl.data.fragment import Fragment, SamplePlan
from aiorl.data.metrics import EpisodeColumns
from aiorl.process.log_once import warn_of_long_episode
from aiorl.sampling.table import LevelTable

Array = NDArray[Any]
F32 = NDArray[np.float32]
Flags = NDArray[np.bool_]

_MANY_ROWS = 5000

FRAGMENT_COLUMNS = frozenset(
    {
        c.OBS, c.NEW_OBS, c.LAST_OBS, c.ACTIONS, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.ACTION_LOGP,
        c.ACTION_DIST_INPUTS, c.VF_PREDS, c.ADVANTAGES, c.VALUE_TARGETS, c.BOOTSTRAP_VALUES, c.N_STEP_RETURNS,
        c.DISCOUNTS, c.N_STEPS, c.PRIORITIES,
    }
)  # fmt: skip
"""Names of the columns that can be had in lockstep."""


class Assembler:
    """Makes fragments with the columns asked for.

    Attributes:
        columns: names of those that can be had in lockstep.
        needs_values: the policy's values must be recorded at every step.
        needs_dist_inputs: so must the inputs of its action distribution.
    """

    def __init__(self, policy: GraphPolicy, plan: SamplePlan, reward_limit: float) -> None:
        """See Lockstep for the arguments."""
        self._policy = policy
        self.columns = columns = {name for name in plan.columns if name in FRAGMENT_COLUMNS}
        scaled = {c.SCALED_REWARDS} if policy.reward_scaler is not None and c.REWARDS in columns else set()
        self._wanted = tuple(sorted(columns | scaled))
        self._postprocess = postprocess = plan.postprocess
        self._settings = dict(plan.postprocess_params)
        self._limit = reward_limit
        self._wants_finals = c.NEW_OBS in columns
        self._wants_last = self._wants_finals or c.LAST_OBS in columns
        self._needs_final_values = needs_values(postprocess) or c.BOOTSTRAP_VALUES in columns
        self.needs_values = self._needs_final_values or c.VF_PREDS in columns
        self._needs_action_values = needs_action_values(postprocess)
        self.needs_dist_inputs = self._needs_action_values or c.ACTION_DIST_INPUTS in columns

    def assemble(self, table: LevelTable, tracker: EpisodeTracker, state: Sequence[F32]) -> Fragment:
        """Return the fragment of one table, cut wherever the table ends.

        Args:
            table: a full table.
            tracker: takes in its episodes.
            state: recurrent state after its last step.
        """
        columns, bootstrap = self._columns(table, tracker, state)
        columns |= postprocessed(self._postprocess, columns, self._settings, bootstrap)
        for name, place in table.derived.items():
            made = columns.get(name)
            if made is not None and made.shape == place.shape and made.dtype == place.dtype:
                place[...] = made
                columns[name] = place
        extras: dict[str, Array] = {}
        if self._wants_last:
            extras[c.LAST_OBS] = table.obs[-1]
        if self._wants_finals and table.finals:
            index, finals = table.followers()
            extras[c.FINAL_INDEX] = index.astype(np.int32)
            extras[c.FINAL_OBS] = finals
        extras |= table.state_columns()
        return Fragment(self._selected(columns, table.layout), extras)

    def record(
        self, table: LevelTable, tracker: EpisodeTracker, state: Sequence[F32]
    ) -> tuple[dict[str, Array], Array | None]:
        """Return what an EpisodeCollector takes of a table."""
        columns, _ = self._columns(table, tracker, state)
        return columns, table.followers()[1] if self._wants_last else None

    def finish_episodes(self, columns: dict[str, Array], finals: Array | None) -> Fragment:
        """Return the fragment of whole episodes, as one environment's."""
        columns |= postprocessed(self._postprocess, columns, self._settings)
        extras: dict[str, Array] = {}
        if finals is not None:
            if self._wants_finals:
                extras[c.FINAL_INDEX] = np.argwhere(columns[c.DONES]).astype(np.int32)
                extras[c.FINAL_OBS] = finals
            extras[c.LAST_OBS] = finals[-1:]
        for number, component in enumerate(self._policy.initial_state(1)):
            extras[c.state_in(number)] = component
        return Fragment(self._selected(columns), extras)

    def _columns(
        self, table: LevelTable, tracker: EpisodeTracker, state: Sequence[F32]
    ) -> tuple[dict[str, Array], F32]:
        """Return all columns but the postprocessed ones, and the value of the observation after the last step."""
        dones = table.terminateds | table.truncateds
        tracker.advance(table.rewards, dones, table.valid)
        if self._limit:
            np.clip(table.rewards, -self._limit, self._limit, out=table.rewards)
        columns: dict[str, Array] = {
            c.OBS: table.obs[:-1],
            c.ACTIONS: table.actions,
            c.REWARDS: table.rewards,
            c.TERMINATEDS: table.terminateds,
            c.TRUNCATEDS: table.truncateds,
            c.ACTION_LOGP: table.logp,
        }
        if self._policy.reward_scaler is not None:
            columns[c.SCALED_REWARDS] = self._policy.reward_scaler.of_envs(table.rewards, dones, table.valid)
        if len(table.dist_inputs) == len(table.rewards):
            columns[c.ACTION_DIST_INPUTS] = table.dist_inputs
        if self._needs_action_values:
            columns[c.ACTION_VALUES] = self._policy.distribution.action_values(table.dist_inputs, table.actions)
        if self.needs_values:
            columns[c.VF_PREDS] = table.values
        if table.valid is not None:
            columns[c.VALID] = table.valid
        bootstrap = np.zeros(table.rewards.shape[1], np.float32)
        if self._needs_final_values:
            bootstrap, columns[c.BOOTSTRAP_VALUES] = self._final_values(table, state)
        return columns, bootstrap

    def _final_values(self, table: LevelTable, state: Sequence[F32]) -> tuple[F32, F32]:
        """Return values after the last step [N], and of true final observations at truncated rows [T, N], else 0.

        All are evaluated in one call. An environment that is reset by its next call shows its final
        observation as the next row's, whose value the policy has given already.
        """
        num_envs = table.rewards.shape[1]
        truncated = table.truncateds & ~table.terminateds
        at_truncation = np.zeros(table.rewards.shape, np.float32)
        any_truncated = bool(truncated.any())
        if not needs_values(self._postprocess) and not any_truncated:
            return np.zeros(num_envs, np.float32), at_truncation
        places: list[tuple[int, NDArray[np.int64]]] = []
        obs: list[Array] = [table.obs[-1]]
        states: list[list[F32]] = [[component] for component in state]
        if any_truncated:
            for final in table.finals:
                keep = truncated[final.t, final.envs]
                if keep.any():
                    places.append((final.t, final.envs[keep]))
                    obs.append(final.obs[keep])
                    for parts, component in zip(states, final.state, strict=True):
                        parts.append(component[keep])
        joined = [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in states]
        values = self._policy.values(np.concatenate(obs) if len(obs) > 1 else obs[0], joined)
        bootstrap = values[:num_envs]
        if any_truncated:
            np.copyto(at_truncation[:-1], table.values[1:], where=truncated[:-1])
            np.copyto(at_truncation[-1], bootstrap, where=truncated[-1])
            start = num_envs
            for t, index in places:
                at_truncation[t, index] = values[start : start + len(index)]
                start += len(index)
        return bootstrap, at_truncation

    def _selected(self, columns: Mapping[str, Array], first: Collection[str] = ()) -> dict[str, Array]:
        """Return the columns asked for; those that ``first`` names come in its order, before the others."""
        order = (*(name for name in first if name in self._wanted), *self._wanted)
        selected = {name: columns[name] for name in order if name in columns}
        if c.VALID in columns:
            selected[c.VALID] = columns[c.VALID]
        return selected


class EpisodeTracker:
    """Lengths and returns of the episodes of N environments, from table to table.

    Nothing is done per step: the rows of each environment are cut into segments at the ends of episodes, and everything
    is computed per segment.

    A row with ``valid == False`` (the reset call of a NEXT_STEP environment) counts to no length.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin with a new episode in each environment."""
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._finished: list[EpisodeColumns] = []

    def advance(self, rewards: NDArray[Any], dones: NDArray[np.bool_], valid: NDArray[np.bool_] | None = None) -> None:
        """Take in the next T steps.

        Args:
            rewards: [T, N] raw rewards.
            dones: [T, N] the row ended its episode.
            valid: [T, N] the row is a transition; None = all are.
        """
        steps, num_envs = rewards.shape
        after = np.flatnonzero(dones.T) + 1  # positions n * T + t
        first = np.arange(num_envs) * steps
        inner = after[after % steps != 0]
        start = np.union1d(first, inner) if len(inner) else first
        length = np.diff(start, append=steps * num_envs)
        last = start + length - 1
        env, is_first = start // steps, start % steps == 0
        totals = np.add.reduceat(rewards.T.reshape(-1).astype(np.float64), start)
        totals += np.where(is_first, self._returns[env], 0.0)
        lengths = length + np.where(is_first, self._lengths[env], 0)
        if valid is not None:
            lengths -= ~valid.T.reshape(-1)[start]  # a row that is no transition opens an episode
        closed = dones.T.reshape(-1)[last]
        if closed.any():
            order = np.lexsort((last[closed] // steps, last[closed] % steps))
            self._finished.append(EpisodeColumns(lengths[closed][order].astype(np.int32), totals[closed][order]))
        is_last = np.append(is_first[1:], True)
        goes_on = ~closed[is_last]
        self._returns = totals[is_last] * goes_on
        self._lengths = lengths[is_last] * goes_on

    def take_finished(self) -> EpisodeColumns:
        """Return episodes that ended since the last call, in the order they ended."""
        finished, self._finished = self._finished, []
        if not finished:
            return EpisodeColumns.empty()
        return EpisodeColumns(
            np.concatenate([part.lengths for part in finished]),
            np.concatenate([part.rewards for part in finished]),
        )


class EpisodeCollector:
    """Keeps rows of level seats until their episodes are complete.

    Attributes:
        ready_rows: transitions of complete episodes not yet taken.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin empty."""
        self.ready_rows = 0
        self._kept: list[dict[str, Array]] = []
        self._finals: list[Array] = []
        self._unfinished = np.zeros(num_envs, np.int64)

    @property
    def kept_steps(self) -> int:
        """Steps of every environment that are kept."""
        return sum(len(part[c.DONES]) for part in self._kept)

    def add(self, columns: dict[str, Array], finals: Array | None) -> None:
        """Keep the next T steps. Many rows of one environment without an end are worth a warning, once.

        Args:
            columns: name -> [T, N, ...].
            finals: [K, ...] true final observations of all rows that end an episode, in the order of steps; None where
                those are not wanted.
        """
        if finals is not None:
            self._finals.append(finals)
        dones = columns[c.DONES] = columns[c.TERMINATEDS] | columns[c.TRUNCATEDS]
        valid = columns.setdefault(c.VALID, np.ones(dones.shape, np.bool_))
        self._kept.append(columns)
        complete = _complete(dones)
        ends, before = complete[0], self._unfinished  # an episode ends in here
        self.ready_rows += int(before[ends].sum()) + int(np.count_nonzero(valid & complete))
        self._unfinished = np.where(ends, 0, before) + np.count_nonzero(valid & ~complete, axis=0)
        index = int(self._unfinished.argmax())
        if self._unfinished[index] > _MANY_ROWS:
            warn_of_long_episode(_MANY_ROWS, index, int(self._unfinished[index]))

    def take(self) -> tuple[dict[str, Array], Array | None]:
        """Return the rows [B, 1, ...] of all complete episodes, environment after environment, and their finals."""
        kept = {name: np.concatenate([part[name] for part in self._kept]) for name in self._kept[0]}
        complete = _complete(kept[c.DONES])
        taken = (kept[c.VALID] & complete).T
        rows = {name: column.swapaxes(0, 1)[taken][:, None] for name, column in kept.items() if name != c.VALID}
        finals, ends = None, np.argwhere(kept[c.DONES])
        if self._finals:
            finals = np.concatenate(self._finals)[np.lexsort((ends[:, 0], ends[:, 1]))]
            self._finals = []
        kept[c.VALID] &= ~complete  # rows that are taken are no transitions any more
        kept[c.DONES] &= ~complete
        needed: Flags = np.logical_or.reduce(kept[c.VALID], axis=1)
        first = int(needed.argmax()) if needed.any() else len(needed)
        self._kept = [{name: column[first:].copy() for name, column in kept.items()}]
        self.ready_rows = 0
        return rows, finals


def _complete(dones: Flags) -> Flags:
    """Mark rows [L, N] at or before the last end of an episode in their environment."""
    complete: Flags = np.logical_or.accumulate(dones[::-1], axis=0)[::-1]
    return complete
