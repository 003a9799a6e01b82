"""Lane: one policy's way through a turn. Observations of its agents in, one evaluation, actions out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.errors import BadObservationError, BatchError, EnvContractError, PolicyError
from aiorl.log_once import log_once, summarize
from aiorl.observation.filters import ObservationFilter
from aiorl.observation.preprocessors import Preprocessor
from aiorl.policy.policy import Policy, check_policy_input
from aiorl.sampler.slots import SlotStore, as_index
from aiorl.sampler.track import AgentTrack

__all__ = ["Lane"]

logger = logging.getLogger(__name__)

Array = NDArray[Any]
OffPolicyActions = Mapping[Any, Mapping[Any, Any]]

_ROW_COLUMNS = frozenset(
    {
        c.T, c.EPS_ID, c.AGENT_INDEX, c.OBS, c.ACTIONS, c.REWARDS, c.PREV_ACTIONS, c.PREV_REWARDS, c.TERMINATEDS,
        c.TRUNCATEDS, c.DONES, c.INFOS, c.NEW_OBS,
    }
)  # fmt: skip
"""Columns that every row has; a policy cannot add one of that name."""


class Lane:
    """All agents of one policy, over all environments and live episodes.

    Attributes:
        policy_id: the policy's id.
        policy: the policy.
        store: its agents' observations and evaluations.
        extra_columns: columns that the policy adds to rows, recurrent states included.
        state_columns: columns of the recurrent state after a step, one per component.
        arriving: agents observed in this turn whose observations have no slot yet.
        queue: agents that wait for an action at their latest observation.
    """

    def __init__(
        self,
        policy_id: str,
        policy: Policy,
        preprocessor: Preprocessor,
        observation_filter: ObservationFilter,
        *,
        clip_actions: bool,
        clip_rewards: float = 0.0,
    ) -> None:
        """Get ready for a policy's agents.

        Args:
            policy_id: the policy's name.
            policy: acts for the agents.
            preprocessor: of its observations.
            observation_filter: behind the preprocessor.
            clip_actions: what environments get is clipped to their action space.
            clip_rewards: previous rewards are limited to ``[-clip_rewards, clip_rewards]``, as the rows' rewards are,
                so that a policy sees at the end of a trajectory what it sees within; 0 = not at all.

        Raises:
            UnsupportedSpaceError: the policy asks for nested observations (also a ValueError).
        """
        check_policy_input(getattr(policy, "observation_space", None))
        self.policy_id = policy_id
        self.policy = policy
        self.store = SlotStore()
        self.extra_columns: list[str] = []
        self._preprocessor = preprocessor
        self._filter = observation_filter
        self._clip_actions = clip_actions
        self._clip_rewards = clip_rewards
        self._layout = ActionLayout(policy.action_space)
        self._has_mask = getattr(policy, "has_action_mask", False)
        self._tracks: dict[int, AgentTrack] = {}
        self.queue: list[AgentTrack] = []
        self.arriving: list[AgentTrack] = []
        self.store.define(c.OBS, preprocessor.shape, observation_filter.output_dtype(preprocessor.dtype))
        for name in (c.ACTIONS, c.PREV_ACTIONS):
            self.store.define(name, self._layout.shape, self._layout.dtype)
        self.store.define(c.PREV_REWARDS, (), np.float32)
        initial_state = [np.asarray(component) for component in policy.get_initial_state()]
        self.state_columns = [c.state_out(index) for index in range(len(initial_state))]
        self._state_in_columns = [c.state_in(index) for index in range(len(initial_state))]
        self._own_columns: frozenset[str] | None = None
        for index, component in enumerate(initial_state):
            self.store.define(c.state_out(index), component.shape, component.dtype, component)
            self.store.define(c.state_in(index), component.shape, component.dtype)

    # --- agents ---

    def open(self, track: AgentTrack) -> None:
        """Look after an agent's slots from now on."""
        self._tracks[id(track)] = track

    def close(self, track: AgentTrack) -> None:
        """An agent's episode is over; what callbacks may still ask of it is kept with it."""
        track.freeze()
        self._tracks.pop(id(track), None)

    def begin_turn(self) -> None:
        """Forget slots that no agent needs, if there are many."""
        self.arriving.clear()
        self.queue.clear()
        if self.store.wants_compaction:
            live = [slot for track in self._tracks.values() for slot in track.live_slots()]
            moved = self.store.compact(np.unique(np.array(live, np.int64)))
            for track in self._tracks.values():
                track.move_slots(moved)

    # --- observations ---

    def take_in(self) -> None:
        """Preprocess and filter what arrived, in one batch; each observation enters the filter once.

        Raises:
            BadObservationError: an observation that does not fit its space or is not finite.
        """
        arriving = self.arriving
        if not arriving:
            return
        try:
            batch = self._preprocessor.transform_rows([track.raw_obs for track in arriving])
        except (BatchError, ValueError, TypeError) as error:
            raise self._culprit(error) from error
        if batch.dtype.kind == "f" and np.count_nonzero(np.isfinite(batch)) != batch.size:
            raise self._culprit(None)
        filtered = self._filter(batch)
        first = self.store.reserve(len(arriving))
        self.store.write(c.OBS, slice(first, first + len(arriving)), filtered)
        for slot, track in enumerate(arriving, first):
            track.incoming = slot
        if log_once("preprocessed_obs"):
            logger.info("Preprocessed observations of %r: %s", self.policy_id, summarize(batch))
            logger.info("Filtered observations of %r: %s", self.policy_id, summarize(filtered))
        self.arriving = []

    def _culprit(self, error: Exception | None) -> BadObservationError:
        """The error to raise, naming the first observation at fault."""
        for track in self.arriving:
            raw = track.raw_obs
            message = "" if error is None else str(error)
            try:
                row = self._preprocessor.transform_rows([raw])
                if row.dtype.kind != "f" or np.isfinite(row).all():
                    continue
                message = f"observation holds NaN or infinity: {summarize(raw)}"
            except (BatchError, ValueError, TypeError) as own:
                message = str(own)
            return track.episode.fault(BadObservationError, f"agent {track.agent_id!r}: {message}")
        return BadObservationError("environment", f"observations of policy {self.policy_id!r}: {error}")

    # --- actions ---

    def evaluate(self, off_policy_actions: OffPolicyActions, actions_out: dict[Any, dict[Any, Any]]) -> float:
        """Evaluate the policy once for all agents that wait.

        Args:
            off_policy_actions: environment id -> agent id -> action that was taken instead.
            actions_out: environment id -> agent id -> action; where to put the actions.
        Returns: seconds that the policy took.

        Raises:
            BatchError: the policy returned another number of rows or states than it was given, other columns than
                before, or actions that its space cannot hold (also a ValueError).
            PolicyError: what it returned is not actions, states and columns (also a ValueError).
            BadObservationError: an action mask forbids every action (also a ValueError).
        """
        tracks = self.queue
        if not tracks:
            return 0.0
        store, policy = self.store, self.policy
        index = as_index([track.slot for track in tracks])
        obs = store[c.OBS][index]
        if self._has_mask and len(stuck := policy.rows_without_action(obs)):
            track = tracks[stuck[0]]
            message = f"agent {track.agent_id!r}: its action mask forbids every action"
            raise track.episode.fault(BadObservationError, message)
        prev_actions = store[c.ACTIONS].take([track.fed for track in tracks], 0)
        prev_rewards = np.array([track.last_reward for track in tracks], np.float32)
        if self._clip_rewards:
            np.clip(prev_rewards, -self._clip_rewards, self._clip_rewards, out=prev_rewards)
        states: list[Array] = []
        if self.state_columns:
            before = [track.state for track in tracks]
            states = [store[name].take(before, 0) for name in self.state_columns]
        # recorded before the policy sees them: it may write into what it is given
        if isinstance(index, slice):
            obs = obs.copy()
        store.write(c.PREV_ACTIONS, index, prev_actions)
        store.write(c.PREV_REWARDS, index, prev_rewards)
        rows = len(tracks)
        self._record(index, rows, zip(self._state_in_columns, states, strict=True))
        if log_once("compute_actions_input"):
            logger.info("Inputs to policy %r: %s", self.policy_id, summarize([obs, *states]))
        has_memory = getattr(policy.exploration, "has_memory", False)
        whose: dict[str, Any] = {"agent_ids": [track.agent_id for track in tracks]} if has_memory else {}
        began = time.perf_counter()
        result = policy.compute_actions(
            obs,
            states,
            prev_action_batch=prev_actions,
            prev_reward_batch=prev_rewards,
            info_batch=[track.info for track in tracks],
            episodes=[track.episode for track in tracks],
            timestep=policy.global_timestep,
            **whose,
        )
        inferred_s = time.perf_counter() - began
        actions, states_out, extras = self._unpacked(result)
        if log_once("compute_actions_result"):
            logger.info("Outputs of policy %r: %s", self.policy_id, summarize([actions, states_out, extras]))
        column = self._layout.to_column(actions)
        if len(column) != rows:
            raise BatchError(c.ACTIONS, f"{rows} actions of policy {self.policy_id!r}", f"{len(column)}")
        store.write(c.ACTIONS, index, column)
        self._record(index, rows, zip(self.state_columns, states_out, strict=True))
        self._record(index, rows, extras.items())
        for_env = self._layout.to_env(self._layout.clip(column) if self._clip_actions else column)
        for track, action in zip(tracks, for_env, strict=True):
            track.acted = track.fed = track.state = track.slot
            actions_out[track.env_id][track.agent_id] = action
        if off_policy_actions:
            self._record_off_policy(tracks, off_policy_actions)
        self.queue = []
        return inferred_s

    def _unpacked(self, result: Any) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
        """What the policy returned, as far as it can be checked without looking at the rows."""
        if not (
            isinstance(result, tuple | list)
            and len(result) == 3
            and isinstance(result[1], tuple | list | np.ndarray)
            and isinstance(result[2], Mapping)
        ):
            given = f"({', '.join(type(part).__name__ for part in result)})" if isinstance(result, tuple) else result
            raise PolicyError(
                f"compute_actions of policy {self.policy_id!r} ({type(self.policy).__name__}) returned {given!s:.200}, "
                "expected (actions, list of states, dict of columns); return empty ones where there is nothing to give"
            )
        actions, states_out, extras = result
        if len(states_out) != len(self.state_columns):
            raise BatchError(
                "state_out",
                f"{len(self.state_columns)} recurrent states of policy {self.policy_id!r}, as it has initially",
                f"{len(states_out)}",
            )
        if extras.keys() != self._own_columns:
            self._settle_columns(extras)
        return actions, states_out, extras

    def _settle_columns(self, extras: Mapping[str, Any]) -> None:
        """The columns of the first evaluation are those of all."""
        if self._own_columns is None:
            taken = sorted(extras.keys() & {*_ROW_COLUMNS, *self.state_columns, *self._state_in_columns})
            if taken:
                raise BatchError(
                    taken[0], f"a name that rows do not have already, for a column of policy {self.policy_id!r}", taken
                )
            self._own_columns = frozenset(extras)
            return
        odd = sorted(self._own_columns ^ extras.keys())
        raise BatchError(
            odd[0],
            f"the columns {sorted(self._own_columns)} of policy {self.policy_id!r}, the same at every evaluation",
            sorted(extras),
        )

    def _record(self, index: slice | NDArray[np.int64], rows: int, columns: Iterable[tuple[str, Any]]) -> None:
        for name, given in columns:
            values = np.asarray(given)
            if values.shape[:1] != (rows,):
                raise BatchError(name, f"{rows} rows of policy {self.policy_id!r}", f"shape {values.shape}")
            self.store.write(name, index, values)
            if name not in self.extra_columns:
                self.extra_columns.append(name)

    def _record_off_policy(self, tracks: Sequence[AgentTrack], taken: OffPolicyActions) -> None:
        for track in tracks:
            by_agent = taken.get(track.env_id)
            if by_agent and (action := by_agent.get(track.agent_id)) is not None:
                try:
                    self.store[c.ACTIONS][track.slot] = self._layout.to_row(action)
                except BatchError as error:
                    message = f"the action that was taken for agent {track.agent_id!r} does not fit: {error}"
                    raise track.episode.fault(EnvContractError, message) from error
