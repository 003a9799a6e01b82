"""From recorded steps to a fragment: values of final observations, advantages, derived columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.fragment import Fragment
from aiorl.errors import ConfigError, nearest
from aiorl.policy.postprocess import POSTPROCESSORS
from aiorl.sampler.block import StepBlock
from aiorl.sampler.complete import CompleteEpisodes, Recorded
from aiorl.sampler.episodes import EpisodeTracker, Segments

__all__ = ["FRAGMENT_COLUMNS", "Assembler", "Postprocess"]

Array = NDArray[Any]
F32 = NDArray[np.float32]
Postprocess = Callable[..., tuple[F32, F32] | None]
"""A function with the arguments of ``policy.postprocess.gae``."""

FRAGMENT_COLUMNS = frozenset(
    {
        c.OBS,
        c.NEW_OBS,
        c.LAST_OBS,
        c.FINAL_OBS,
        c.FINAL_INDEX,
        c.ACTIONS,
        c.REWARDS,
        c.PREV_ACTIONS,
        c.PREV_REWARDS,
        c.TERMINATEDS,
        c.TRUNCATEDS,
        c.DONES,
        c.VALID,
        c.EPS_ID,
        c.AGENT_INDEX,
        c.T,
        c.ACTION_LOGP,
        c.ACTION_DIST_INPUTS,
        c.VF_PREDS,
        c.ADVANTAGES,
        c.VALUE_TARGETS,
        c.BOOTSTRAP_VALUES,
    }
)
"""Names a fragment of the columnar sampler may be asked to carry."""

_POSTPROCESSED = (c.ADVANTAGES, c.VALUE_TARGETS)


class ValuePolicy(Protocol):
    """What the assembler asks of a policy."""

    def initial_state(self, num_rows: int) -> list[F32]:
        """Recurrent state at an episode's start."""

    def values(self, obs: Array, state: Sequence[F32] = ()) -> F32:
        """Values [M] of observations."""


@dataclass(slots=True)
class _LastRow:
    """What the next block needs of the row before it."""

    actions: Array
    rewards: F32
    opens_episode: NDArray[np.bool_]


class Assembler:
    """Makes fragments with the columns asked for.

    Attributes:
        needs_values: the policy's values must be recorded at every step.
    """

    def __init__(
        self,
        policy: ValuePolicy,
        columns: Collection[str],
        postprocess: str | Postprocess,
        settings: Mapping[str, Any] | None,
        clip_rewards: bool | float,
    ) -> None:
        """See ColumnarSampler for the arguments.

        Raises:
            ConfigError: an unknown column or postprocessor, or one that the other does not provide.
        """
        for name in columns:
            if name not in FRAGMENT_COLUMNS:
                raise ConfigError(
                    f"a fragment has no column {name!r}.",
                    key="columns",
                    value=name,
                    hint=nearest(str(name), FRAGMENT_COLUMNS).strip(),
                )
        if isinstance(postprocess, str):
            if postprocess not in POSTPROCESSORS:
                raise ConfigError(
                    f"postprocess is {postprocess!r}, expected one of {', '.join(POSTPROCESSORS)} or a function.",
                    key="postprocess",
                    value=postprocess,
                    hint=nearest(postprocess, POSTPROCESSORS).strip(),
                )
            self._postprocess: Postprocess | None = POSTPROCESSORS[postprocess] if postprocess != "none" else None
        else:
            self._postprocess = postprocess
        if self._postprocess is None and any(name in columns for name in _POSTPROCESSED):
            raise ConfigError(
                "advantages and value targets are asked for, but postprocess is 'none'.", key="postprocess"
            )
        self._policy = policy
        self._wanted = tuple(sorted(columns))
        self._settings = dict(settings or {})
        self._limit = float(clip_rewards)
        if not np.isfinite(self._limit) or self._limit < 0:
            raise ConfigError(f"clip_rewards is {clip_rewards!r}, expected a number > 0.", key="clip_rewards")
        self._wants_finals = any(name in columns for name in (c.NEW_OBS, c.FINAL_OBS, c.FINAL_INDEX))
        self._wants_last = self._wants_finals or c.LAST_OBS in columns
        self._needs_final_values = self._postprocess is not None or c.BOOTSTRAP_VALUES in columns
        self.needs_values = self._needs_final_values or c.VF_PREDS in columns
        self._last_row: _LastRow | None = None

    def assemble(self, block: StepBlock, tracker: EpisodeTracker, state: Sequence[F32]) -> Fragment:
        """The fragment of one block, cut wherever the block ends.

        Args:
            block: a full block.
            tracker: takes in the block's episodes.
            state: recurrent state after the block's last step.
        """
        columns, bootstrap = self._columns(block, tracker, state)
        self._add_postprocessed(columns, bootstrap)
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
        for number, component in enumerate(block.state_in):
            extras[c.state_in(number)] = component
        return Fragment(self._selected(columns, block.spec.arrays()), extras)

    def record(self, block: StepBlock, tracker: EpisodeTracker, state: Sequence[F32]) -> Recorded:
        """The block's columns for a collector of complete episodes; see ``assemble``."""
        columns, _ = self._columns(block, tracker, state)
        dones = block.terminateds | block.truncateds
        if not self._wants_finals:
            return Recorded(columns, dones, None, None)
        index, finals = block.followers()
        return Recorded(columns, dones, index, finals)

    def finish_episodes(self, episodes: CompleteEpisodes) -> Fragment:
        """The fragment of whole episodes, as one environment's."""
        columns = dict(episodes.columns)
        self._add_postprocessed(columns, np.zeros(1, np.float32))
        extras: dict[str, Array] = {}
        if episodes.final_obs is not None and episodes.final_rows is not None:
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
        segments = tracker.advance(block.rewards, dones, block.valid)
        if self._limit:
            np.clip(block.rewards, -self._limit, self._limit, out=block.rewards)
        columns: dict[str, Array] = {
            c.OBS: block.obs[:-1],
            c.ACTIONS: block.actions,
            c.REWARDS: block.rewards,
            c.TERMINATEDS: block.terminateds,
            c.TRUNCATEDS: block.truncateds,
            c.DONES: dones,
            c.ACTION_LOGP: block.logp,
        }
        if block.spec.keep_dist_inputs:
            columns[c.ACTION_DIST_INPUTS] = block.dist_inputs
        if block.spec.keep_values:
            columns[c.VF_PREDS] = block.values
        if block.valid is not None:
            columns[c.VALID] = block.valid
        bootstrap = np.zeros(block.spec.num_envs, np.float32)
        if self._needs_final_values:
            bootstrap, columns[c.BOOTSTRAP_VALUES] = self._final_values(block, state)
        self._add_derived(columns, block, segments)
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
        if self._postprocess is None and not any_truncated:
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

    def _add_derived(self, columns: dict[str, Array], block: StepBlock, segments: Segments) -> None:
        wanted = self._wanted
        if c.EPS_ID in wanted:
            columns[c.EPS_ID] = segments.eps_id()
        if c.T in wanted:
            columns[c.T] = segments.t()
        if c.AGENT_INDEX in wanted:
            columns[c.AGENT_INDEX] = np.zeros(block.rewards.shape, np.int32)
        if c.PREV_ACTIONS in wanted or c.PREV_REWARDS in wanted:
            self._add_previous(columns, block)

    def _add_previous(self, columns: dict[str, Array], block: StepBlock) -> None:
        """Action and reward of the row before; zero where an episode starts.

        A row that only resets shows the final observation of the episode before, whose last action goes with it.
        """
        opens_next = np.zeros(block.rewards.shape, np.bool_) if block.valid is None else ~block.valid
        for final in block.finals:
            opens_next[final.t, final.index] = True
        last = self._last_row
        if last is None:
            everywhere = np.ones(block.spec.num_envs, np.bool_)
            last = _LastRow(np.zeros_like(block.actions[0]), np.zeros_like(block.rewards[0]), everywhere)
        starts = np.concatenate([last.opens_episode[None], opens_next[:-1]])
        previous_actions = np.concatenate([last.actions[None], block.actions[:-1]])
        previous_rewards = np.concatenate([last.rewards[None], block.rewards[:-1]])
        previous_actions[starts] = 0
        previous_rewards[starts] = 0
        columns[c.PREV_ACTIONS] = previous_actions
        columns[c.PREV_REWARDS] = previous_rewards
        self._last_row = _LastRow(block.actions[-1].copy(), block.rewards[-1].copy(), opens_next[-1])

    def _add_postprocessed(self, columns: dict[str, Array], bootstrap: F32) -> None:
        if self._postprocess is None:
            return
        result = self._postprocess(
            columns[c.REWARDS],
            columns[c.VF_PREDS],
            bootstrap,
            columns[c.TERMINATEDS],
            columns[c.TRUNCATEDS],
            columns[c.BOOTSTRAP_VALUES],
            valid=columns.get(c.VALID),
            **self._settings,
        )
        if result is not None:
            columns[c.ADVANTAGES], columns[c.VALUE_TARGETS] = result

    def _selected(self, columns: Mapping[str, Array], first: Iterable[str] = ()) -> dict[str, Array]:
        """The columns asked for; those that ``first`` names come in its order, before the others."""
        order = (*(name for name in first if name in self._wanted), *self._wanted)
        selected = {name: columns[name] for name in order if name in columns}
        if c.VALID in columns:
            selected[c.VALID] = columns[c.VALID]
        return selected
