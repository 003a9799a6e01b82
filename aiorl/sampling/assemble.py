"""From recorded steps to a fragment: values of final observations, advantages, derived columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.postprocess import ScalesRewards, needs_action_values, needs_values, postprocessed
from aiorl.data import columns as c
from aiorl.data.fragment import Fragment
from aiorl.sampling.block import StepBlock
from aiorl.sampling.complete import CompleteEpisodes, Recorded
from aiorl.sampling.episodes import EpisodeTracker

__all__ = ["FRAGMENT_COLUMNS", "Assembler"]

Array = NDArray[Any]
F32 = NDArray[np.float32]

FRAGMENT_COLUMNS = frozenset(
    {
        c.OBS, c.NEW_OBS, c.LAST_OBS, c.ACTIONS, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.ACTION_LOGP,
        c.ACTION_DIST_INPUTS, c.VF_PREDS, c.ADVANTAGES, c.VALUE_TARGETS, c.BOOTSTRAP_VALUES, c.N_STEP_RETURNS,
        c.DISCOUNTS, c.N_STEPS, c.PRIORITIES,
    }
)  # fmt: skip
"""Names of the columns that can be had in lockstep."""


class ActionKind(Protocol):
    """What the assembler asks of an action distribution."""

    def action_values(self, inputs: F32, actions: Array) -> F32:
        """Values [T, N] of actions [T, N, ...] for inputs [T, N, P]."""


class ValuePolicy(Protocol):
    """What the assembler asks of a policy."""

    @property
    def distribution(self) -> ActionKind:
        """Of the actions."""

    def initial_state(self, num_rows: int) -> list[F32]:
        """Recurrent state at an episode's start."""

    def values(self, obs: Array, state: Sequence[F32] = ()) -> F32:
        """Values [M] of observations."""


class Assembler:
    """Makes fragments with the columns asked for.

    Attributes:
        needs_values: the policy's values must be recorded at every step.
        needs_dist_inputs: so must the inputs of its action distribution.
    """

    def __init__(
        self,
        policy: ValuePolicy,
        columns: Collection[str],
        postprocess: str,
        settings: Mapping[str, Any] | None,
        reward_limit: float,
        reward_scaler: ScalesRewards | None = None,
    ) -> None:
        """See LockstepSampler for the arguments."""
        self._policy = policy
        self._scaler = reward_scaler
        scaled = {c.SCALED_REWARDS} if reward_scaler is not None and c.REWARDS in columns else set()
        self._wanted = tuple(sorted({*columns, *scaled}))
        self._postprocess = postprocess
        self._settings = dict(settings or {})
        self._limit = reward_limit
        self._wants_finals = c.NEW_OBS in columns
        self._wants_last = self._wants_finals or c.LAST_OBS in columns
        self._needs_final_values = needs_values(postprocess) or c.BOOTSTRAP_VALUES in columns
        self.needs_values = self._needs_final_values or c.VF_PREDS in columns
        self._needs_action_values = needs_action_values(postprocess)
        self.needs_dist_inputs = self._needs_action_values or c.ACTION_DIST_INPUTS in columns

    def assemble(self, block: StepBlock, tracker: EpisodeTracker, state: Sequence[F32]) -> Fragment:
        """The fragment of one block, cut wherever the block ends.

        Args:
            block: a full block.
            tracker: takes in the block's episodes.
            state: recurrent state after the block's last step.
        """
        columns, bootstrap = self._columns(block, tracker, state)
        columns |= postprocessed(self._postprocess, columns, self._settings, bootstrap)
        for name, place in block.derived.items():
            made = columns.get(name)
            if made is not None and made.shape == place.shape and made.dtype == place.dtype:
                place[...] = made
                columns[name] = place
        extras: dict[str, Array] = {}
        if self._wants_last:
            extras[c.LAST_OBS] = block.obs[-1]
        if self._wants_finals and block.finals:
            index, finals = block.followers()
            extras[c.FINAL_INDEX] = index.astype(np.int32)
            extras[c.FINAL_OBS] = finals
        extras |= block.state_columns()
        return Fragment(self._selected(columns, block.spec.arrays()), extras)

    def record(self, block: StepBlock, tracker: EpisodeTracker, state: Sequence[F32]) -> Recorded:
        """The block's columns for a collector of complete episodes; see ``assemble``."""
        columns, _ = self._columns(block, tracker, state)
        dones = block.terminateds | block.truncateds
        if not self._wants_last:
            return Recorded(columns, dones, None, None)
        index, finals = block.followers()
        return Recorded(columns, dones, index, finals)

    def finish_episodes(self, episodes: CompleteEpisodes) -> Fragment:
        """The fragment of whole episodes, as one environment's."""
        columns = dict(episodes.columns)
        columns |= postprocessed(self._postprocess, columns, self._settings)
        extras: dict[str, Array] = {}
        if episodes.final_obs is not None and episodes.final_rows is not None:
            if self._wants_finals:
                rows = episodes.final_rows
                extras[c.FINAL_INDEX] = np.stack([rows, np.zeros_like(rows)], axis=1).astype(np.int32)
                extras[c.FINAL_OBS] = episodes.final_obs
            extras[c.LAST_OBS] = episodes.final_obs[-1:]
        for number, component in enumerate(self._policy.initial_state(1)):
            extras[c.state_in(number)] = component
        return Fragment(self._selected(columns), extras)

    def _columns(self, block: StepBlock, tracker: EpisodeTracker, state: Sequence[F32]) -> tuple[dict[str, Array], F32]:
        """All columns but the postprocessed ones, and the value of the observation after the last step."""
        dones = block.terminateds | block.truncateds
        tracker.advance(block.rewards, dones, block.valid)
        if self._limit:
            np.clip(block.rewards, -self._limit, self._limit, out=block.rewards)
        columns: dict[str, Array] = {
            c.OBS: block.obs[:-1],
            c.ACTIONS: block.actions,
            c.REWARDS: block.rewards,
            c.TERMINATEDS: block.terminateds,
            c.TRUNCATEDS: block.truncateds,
            c.ACTION_LOGP: block.logp,
        }
        if self._scaler is not None:
            columns[c.SCALED_REWARDS] = self._scaler.of_envs(block.rewards, dones, block.valid)
        if block.spec.keep_dist_inputs:
            columns[c.ACTION_DIST_INPUTS] = block.dist_inputs
        if self._needs_action_values:
            columns[c.ACTION_VALUES] = self._policy.distribution.action_values(block.dist_inputs, block.actions)
        if block.spec.keep_values:
            columns[c.VF_PREDS] = block.values
        if block.valid is not None:
            columns[c.VALID] = block.valid
        bootstrap = np.zeros(block.spec.num_envs, np.float32)
        if self._needs_final_values:
            bootstrap, columns[c.BOOTSTRAP_VALUES] = self._final_values(block, state)
        return columns, bootstrap

    def _final_values(self, block: StepBlock, state: Sequence[F32]) -> tuple[F32, F32]:
        """Values after the last step [N], and of true final observations at truncated rows [T, N], else 0.

        All are evaluated in one call. An environment that is reset by its next call shows its final
        observation as the next row's, whose value the policy has given already.
        """
        num_envs = block.spec.num_envs
        truncated = block.truncateds & ~block.terminateds
        at_truncation = np.zeros(block.rewards.shape, np.float32)
        any_truncated = bool(truncated.any())
        if not needs_values(self._postprocess) and not any_truncated:
            return np.zeros(num_envs, np.float32), at_truncation
        places: list[tuple[int, NDArray[np.int64]]] = []
        obs: list[Array] = [block.obs[-1]]
        states: list[list[F32]] = [[component] for component in state]
        if any_truncated:
            for final in block.finals:
                keep = truncated[final.t, final.index]
                if keep.any():
                    places.append((final.t, final.index[keep]))
                    obs.append(final.obs[keep])
                    for parts, component in zip(states, final.state, strict=True):
                        parts.append(component[keep])
        joined = [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in states]
        values = self._policy.values(np.concatenate(obs) if len(obs) > 1 else obs[0], joined)
        bootstrap = values[:num_envs]
        if any_truncated:
            np.copyto(at_truncation[:-1], block.values[1:], where=truncated[:-1])
            np.copyto(at_truncation[-1], bootstrap, where=truncated[-1])
            start = num_envs
            for t, index in places:
                at_truncation[t, index] = values[start : start + len(index)]
                start += len(index)
        return bootstrap, at_truncation

    def _selected(self, columns: Mapping[str, Array], first: Iterable[str] = ()) -> dict[str, Array]:
        """The columns asked for; those that ``first`` names come in its order, before the others."""
        order = (*(name for name in first if name in self._wanted), *self._wanted)
        selected = {name: columns[name] for name in order if name in columns}
        if c.VALID in columns:
            selected[c.VALID] = columns[c.VALID]
        return selected
