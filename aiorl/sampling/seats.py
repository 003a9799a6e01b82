"""Lane and Seat: one policy's path through a turn, and one agent's state next to its policy's
table.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.actor import Actor, FurtherInputs
from aiorl.acting.distributions import ActionDistribution
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.columns import Array
from aiorl.errors import BadObservationError, BatchError, EnvContractError
from aiorl.sampling.clipping import ClipWatch
from aiorl.sampling.table import Table

OffPolicyActions = Mapping[Any, Mapping[Any, Any]]

# no column of a policy has these names
_IS_SKIPPED = "is skipped"
_END = "its end"
# bits in the column of ends
_TERMINATED = 1
_TRUNCATED = 2
_ROW_COLUMNS = (c.T, c.OBS, c.ACTIONS, c.REWARDS, c.PREV_ACTIONS, c.PREV_REWARDS, c.NEW_OBS)
_NEAR = {c.PREV_ACTIONS: (c.ACTIONS, -1), c.PREV_REWARDS: (c.REWARDS, -1), c.NEW_OBS: (c.OBS, 1)}
"""Columns of rows whose values lie in the previous or the next row of a table."""
_OURS = (Policy.postprocess_trajectory, GraphPolicy.postprocess_trajectory)


@dataclass(slots=True)
class AgentRecord:
    """Agent in the metrics of an episode, also after it has left.

    Attributes:
        key: its id and its policy's.
        index: its number in the episode, by order of appearance.
        total: sum of its rewards in the episode.
        is_rewarded: True if it got a reward.
    """

    key: tuple[Any, str]
    index: int
    total: float = 0.0
    is_rewarded: bool = False

    def reset(self) -> None:
        """Begin a new episode."""
        self.total = 0.0
        self.is_rewarded = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class SeatRows:
    """Rows of one agent in its policy's table, as callbacks read them.

    Attributes:
        lane: its policy's lane.
        number: its seat in the policy's table.
        table: the policy's table; a copy of the latest rows before other agents overwrite them.
        opening: row of its first observation in the episode.
        acted: latest row with an action, -1 before the first.
        left_at: latest row when it left its seat, -1 before.
    """

    lane: Lane
    number: int
    table: Table
    opening: int
    acted: int = -1
    left_at: int = -1

    @property
    def latest(self) -> int:
        """Number of the latest row."""
        return self.table.row_of(self.number) if self.left_at < 0 else self.left_at

    def leave(self) -> None:
        """Release the seat; user code can still read the entries."""
        self.left_at = self.latest
        if not self.lane.is_shown:
            return
        if self.acted == self.left_at - 1:
            # few of them are still referred to when the next turn begins
            self.lane.just_left.append(weakref.ref(self))
        else:  # the seat's next agent writes to the latest row
            self.freeze()

    def freeze(self) -> None:
        """Copy the rows that user code can still read, before other agents overwrite them."""
        self.table = self.table.excerpt(self.number, self.left_at)

    def entry(self, name: str) -> Array:
        """Return a copy of the latest evaluation's entry in a column; zeros before the first
        action.
        """
        if self.acted < 0:
            return self.lane.actor.layout.zeros()
        column, offset = _source(name)
        return self.table.entry(column, self.acted + offset, self.number)

    def obs(self) -> Array:
        """Return the latest filtered observation."""
        return self.table.entry(c.OBS, self.latest, self.number)

    def prev_reward(self) -> float:
        """Return the reward before the latest one; 0.0 if there is none."""
        row = self.latest
        if row <= self.opening:
            return 0.0
        return float(self.table.entry(c.REWARDS, row - 2, self.number))

    def pi_info(self) -> dict[str, Any]:
        """Return the extra columns of the latest evaluation, empty before the first."""
        if self.acted < 0:
            return {}
        return {name: self.entry(name) for name in self.lane.extra_columns}

    def rnn_state(self) -> list[Array]:
        """Return the recurrent state for the next evaluation."""
        if self.acted < 0:
            return [component.copy() for component in self.lane.actor.initial_state]
        return [self.entry(name) for name in self.lane.state_columns]


@dataclass(slots=True, eq=False)
class Seat:
    """Agent in one episode.

    Attributes:
        agent_id: the agent.
        lane: its policy's lane.
        number: its seat in the policy's table, which another agent can take once this one has left.
        episode: the episode; None once the agent has left it.
        record: its metrics.
        rows: its rows for callbacks.
        env_id: its environment.
        is_observed: True if the table's latest row is an observation of this episode.
        waits_from: first row that is not postprocessed, -1 for none.
        reward: sum of rewards since the latest observation.
        raw_obs: latest observation as the environment returned it.
        info: latest info.
        is_done: True if its own flag was true.
        seen_at: number of the latest turn in which it was observed.
        has_rows: True if a row was recorded in this episode.
    """

    agent_id: Any
    lane: Lane
    number: int
    episode: Any
    record: AgentRecord
    rows: SeatRows = field(init=False)
    env_id: Any = field(init=False)
    is_observed: bool = False
    waits_from: int = -1
    reward: float = 0.0
    raw_obs: Any = None
    info: Any = field(default_factory=dict)
    is_done: bool = False
    seen_at: int = 0
    has_rows: bool = False

    def __post_init__(self) -> None:
        """Begin without observations."""
        table = self.lane.table
        self.rows = SeatRows(
            lane=self.lane,
            number=self.number,
            table=table,
            opening=table.row_of(self.number) + 1,
        )
        self.env_id = self.episode.env_id

    def cut(self) -> Segment:
        """Return the rows that wait, as a segment."""
        first = self.waits_from
        self.waits_from = -1
        return Segment(
            lane=self.lane,
            seat=self.number,
            first=first,
            end=self.lane.table.row_of(self.number),
            episode_id=self.episode.episode_id,
            agent_index=self.record.index,
        )

    def restart(self) -> None:
        """Continue as a new episode; the latest observation is its first one if it is of this
        turn.
        """
        self.reward = 0.0
        self.record.reset()
        self.has_rows = False
        self.is_observed = self.is_observed and self.seen_at == self.lane.turn
        rows = self.rows
        if self.is_done:
            rows.opening = rows.latest
        elif self.is_observed:
            self.lane.table.start_anew(self.number, again=c.OBS)
            rows.opening = rows.latest
        elif rows.opening <= rows.latest:
            # only if a row has come since the last restart: one per restart would move its last
            # action out of reach
            self.lane.table.start_anew(self.number, again=None)
            rows.opening = rows.latest + 1

    def leave(self) -> None:
        """Release the seat at the episode's end; user code can still read the entries."""
        self.episode = None  # breaks a reference cycle, which would live until garbage collection
        self.rows.leave()


class Segment(NamedTuple):
    """Rows of one agent in one episode that lie in a table: those of its seat from ``first`` to
    before ``end``.
    """

    lane: Lane
    seat: int
    first: int
    end: int
    episode_id: int
    agent_index: int


class Rows(NamedTuple):
    """Rows of several segments.

    Attributes:
        columns: name -> [B, ...].
        segment_ends: for each segment, the index after its last row.
        trajectory_ends: for each trajectory, the index after its last row. A segment has several
            trajectories if rows in between were not recorded: the last row before a gap is not
            followed by the next row.
    """

    columns: dict[str, Array]
    segment_ends: NDArray[np.int64]
    trajectory_ends: NDArray[np.int64]


Arrival = tuple[Seat, Any, float, int]
"""Agent observed in a turn: its seat; the observation as the environment returned it; the reward
and the step of the row that ends here, 0 and -1 at the start of an episode. A plain tuple, since
many are made."""


@dataclass(slots=True)
class Arrivals:
    """Agents of one policy that are observed in a turn and are not in the table yet.

    Attributes:
        agents: the agents.
        ends: those whose row ends their episode: index in ``agents``, terminated, truncated.
        infos: those with a non-empty info: index in ``agents``, info.
        skipped: those whose row must not be trained on: index in ``agents``.
    """

    agents: list[Arrival] = field(default_factory=list)
    ends: list[tuple[int, bool, bool]] = field(default_factory=list)
    infos: list[tuple[int, Any]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all of them; faster than making another object, once a turn."""
        self.agents.clear()
        self.ends.clear()
        self.infos.clear()
        self.skipped.clear()


class Lane:
    """All agents of one policy, over all environments and live episodes.

    Attributes:
        policy_id: the policy's id.
        policy: the policy.
        actor: the policy with its preprocessing and its handling of actions.
        table: observations and actions of its agents.
        state_columns: columns of the recurrent state after a step, one per component.
        own_columns: columns that the policy adds to rows, without recurrent states; known after its
            first evaluation.
        extra_columns: these, and the states before and after each row.
        arrivals: agents observed in this turn that are not in the table yet.
        queue: agents that wait for an action for their latest observation.
        just_left: rows of agents that have left their seats in this turn and whose entries are
            still only in the table.
        turn: number of the turn.
        is_shown: True if user code can read the agents' latest observations and actions.
        in_bulk: True if its rows are postprocessed together, because neither the policy nor a hook
            needs trajectories.
        late_logp: distribution that computes log-probabilities of all rows together when they are
            taken out; None if the policy computes them at each evaluation.
    """

    def __init__(
        self,
        actor: Actor,
        *,
        clip_rewards: float = 0.0,
        is_shown: bool = True,
        shows_trajectories: bool = True,
        is_on_policy: bool = False,
    ) -> None:
        """Prepare the table for a policy's agents.

        Args:
            actor: actor of the agents.
            clip_rewards: limit of rewards and previous rewards in rows: ``[-clip_rewards,
                clip_rewards]``; 0 = none.
            is_shown: True if user code can read the agents' latest observations and actions.
            shows_trajectories: True if a hook sees every trajectory, regardless of the policy.
            is_on_policy: True if no environment replaces the policy's actions by its own.
        """
        self.policy_id = actor.policy_id
        self.policy = actor.policy
        self.actor = actor
        self.table = table = Table()
        self.clip_rewards = clip_rewards
        self.arrivals = Arrivals()
        self.queue: list[Seat] = []
        self.just_left: list[weakref.ref[SeatRows]] = []
        self.turn = 0
        self.is_shown = is_shown
        postprocess = getattr(actor.policy.postprocess_trajectory, "__func__", None)
        self.in_bulk = postprocess in _OURS and not shows_trajectories
        self.late_logp: ActionDistribution | None = None
        if (
            self.in_bulk
            and is_on_policy
            and not is_shown
            and actor.is_plain
            and isinstance(self.policy, GraphPolicy)
            and self.policy.logp_is_apart
        ):
            self.late_logp = self.policy.distribution
        table.define(c.OBS, actor.obs_shape, actor.obs_dtype)
        table.define(c.ACTIONS, actor.layout.shape, actor.layout.dtype, actor.layout.zeros())
        table.define(c.REWARDS, (), np.float64, 0.0)
        table.define(c.T, (), np.int32)
        table.define(_END, (), np.int8)
        self.state_columns = [c.state_out(index) for index in range(len(actor.initial_state))]
        for name, component in zip(self.state_columns, actor.initial_state, strict=True):
            table.define(name, component.shape, component.dtype, component)
        self.own_columns: list[str] = []
        self._clip_watch = ClipWatch.of(
            actor.policy_id, actor.policy, actor.layout, clips=actor.clips_actions
        )

    @property
    def extra_columns(self) -> list[str]:  # noqa: D102 (the class describes it)
        return [
            *map(c.state_in, range(len(self.state_columns))),
            *self.state_columns,
            *self.own_columns,
        ]

    def begin_turn(self, turn: int) -> None:
        """Drop leftovers of an unfinished turn, and keep the entries of agents that left in the
        previous one.
        """
        self.turn = turn
        for reference in self.just_left:
            rows = reference()
            if rows is not None:
                rows.freeze()
        self.just_left.clear()
        self.queue.clear()
        if self.arrivals.agents:
            self.arrivals.clear()

    # --- observations ---

    def take_in(self) -> None:
        """Preprocess and filter the arrived observations in one batch; write them and the results
        of previous actions.

        Raises:
            BadObservationError: an observation does not fit its space or is not finite.
        """
        arrivals = self.arrivals
        if not arrivals.agents:
            return
        seats, obs, rewards, steps = zip(*arrivals.agents, strict=True)
        try:
            filtered = self.actor.observe(obs)
        except (BatchError, ValueError, TypeError) as error:
            raise self._culprit(error) from error
        table = self.table
        closed, opened = table.add(np.array([seat.number for seat in seats], np.int64))
        if max(steps) >= 0:  # otherwise all are first observations
            table.put(c.REWARDS, closed, rewards)
            table.put(c.T, closed, steps)
            table.put(_END, closed, 0)
        for place, terminated, truncated in arrivals.ends:
            table.put(
                _END, closed[place], bool(terminated) * _TERMINATED | bool(truncated) * _TRUNCATED
            )
        if arrivals.infos or c.INFOS in table:
            table.define(c.INFOS, (), np.object_)
            table.put(c.INFOS, closed, None)
            for place, info in arrivals.infos:
                table.put(c.INFOS, closed[place], info)
        if arrivals.skipped or _IS_SKIPPED in table:
            table.define(_IS_SKIPPED, (), np.bool_)
            table.put(_IS_SKIPPED, closed, False)
            table.put(_IS_SKIPPED, closed[arrivals.skipped], True)
        table.write(c.OBS, opened, filtered)
        arrivals.clear()

    def _culprit(self, error: Exception) -> BadObservationError:
        """Return the error to raise, which names the first observation at fault."""
        for seat, obs, *_ in self.arrivals.agents:
            message = self.actor.describe_fault(obs)
            if message:
                fault: BadObservationError = seat.episode.fault(
                    BadObservationError, f"agent {seat.agent_id!r}: {message}"
                )
                return fault
        return BadObservationError(
            "environment", f"observations of policy {self.policy_id!r}: {error}"
        )

    # --- actions ---

    def evaluate(
        self, off_policy_actions: OffPolicyActions, actions_out: dict[Any, dict[Any, Any]]
    ) -> float:
        """Evaluate the policy once for all agents that wait.

        Args:
            off_policy_actions: environment id -> agent id -> action taken instead of the policy's.
            actions_out: environment id -> agent id -> action; the actions are added to it.

        Returns:
            Seconds that the policy took.

        Raises:
            BadObservationError: an action mask forbids every action (also a ValueError).
            BatchError: see `Actor.act`.
            PolicyError: see `Actor.act`.
        """
        seats = self.queue
        if not seats:
            return 0.0
        table = self.table
        numbers = np.array([seat.number for seat in seats], np.int64)
        index = table.at(numbers)
        obs = table.read(c.OBS, index)
        stuck = self.actor.rows_without_action(obs)
        if len(stuck):
            seat = seats[stuck[0]]
            message = f"agent {seat.agent_id!r}: its action mask forbids every action"
            fault: BadObservationError = seat.episode.fault(BadObservationError, message)
            raise fault
        states = [table.read(name, table.before(index)) for name in self.state_columns]
        acted = self.actor.act(
            obs,
            states,
            lambda: self._further_inputs(seats, index),
            with_logp=self.late_logp is None,
        )
        table.write(c.ACTIONS, index, acted.actions)
        for name, values in zip(self.state_columns, acted.states, strict=True):
            table.write(name, index, values)
        for name, column in acted.columns.items():
            table.write(name, index, column)
        if not self.own_columns:
            self.own_columns = list(acted.columns)
        for seat, action in zip(seats, self.actor.to_env(acted.actions), strict=True):
            actions_out[seat.env_id][seat.agent_id] = action
        if self.is_shown:
            for seat, row in zip(seats, table.rows_of(numbers), strict=True):
                seat.rows.acted = row
        if off_policy_actions:
            self._record_off_policy(seats, index, off_policy_actions)
        self.queue = []
        return acted.seconds

    def _further_inputs(self, seats: Sequence[Seat], index: NDArray[np.int64]) -> FurtherInputs:
        before = self.table.before(index)
        rewards = self.clipped(self.table.read(c.REWARDS, before))
        return FurtherInputs(
            prev_actions=self.table.read(c.ACTIONS, before),
            prev_rewards=rewards,
            infos=[seat.info for seat in seats],
            episodes=[seat.episode for seat in seats],
            agent_ids=[seat.agent_id for seat in seats],
        )

    def clipped(self, rewards: Array) -> NDArray[np.float32]:
        """Return rewards as stored in rows."""
        column = rewards.astype(np.float32)
        if self.clip_rewards:
            np.clip(column, -self.clip_rewards, self.clip_rewards, out=column)
        return column

    def _record_off_policy(
        self, seats: Sequence[Seat], index: NDArray[np.int64], off_policy_actions: OffPolicyActions
    ) -> None:
        for seat, place in zip(seats, index, strict=True):
            by_agent = off_policy_actions.get(seat.env_id) or {}
            action = by_agent.get(seat.agent_id)
            if action is None:
                continue
            try:
                self.table.put(c.ACTIONS, place, self.actor.layout.to_row(action))
            except BatchError as error:
                message = f"the action taken for agent {seat.agent_id!r} does not fit: {error}"
                raise seat.episode.fault(EnvContractError, message) from error

    # --- rows ---

    def rows(self, segments: Sequence[Segment]) -> Rows:
        """Copy the rows of segments, one segment after the other."""
        numbers, first, ends, ids, indices = (
            np.array([segment[1:] for segment in segments], np.int64).reshape(-1, 5).T
        )
        lengths = ends - first
        table = self.table
        places = table.places(numbers, first, lengths)
        if _IS_SKIPPED in table:
            is_row = ~table.gather({_IS_SKIPPED: (_IS_SKIPPED, 0)}, places)[_IS_SKIPPED]
            owner = np.repeat(np.arange(len(segments)), lengths)[is_row]
            lengths = np.bincount(owner, minlength=len(segments))
            places = places[is_row]
        columns = table.gather(
            {name: _source(name) for name in (*_ROW_COLUMNS, *self.extra_columns, _END)}, places
        )
        if self._clip_watch is not None:
            self._clip_watch.look(columns[c.ACTIONS])
        end = columns.pop(_END)
        columns |= {
            c.EPS_ID: np.repeat(ids, lengths),
            c.AGENT_INDEX: np.repeat(indices.astype(np.int32), lengths),
            c.REWARDS: self.clipped(columns[c.REWARDS]),
            c.PREV_REWARDS: self.clipped(columns[c.PREV_REWARDS]),
            c.TERMINATEDS: end & _TERMINATED != 0,
            c.TRUNCATEDS: end & _TRUNCATED != 0,
            c.DONES: end != 0,
            c.INFOS: self._infos(places),
        }
        if self.late_logp is not None:
            columns[c.ACTION_LOGP] = self.late_logp.logp(
                columns[c.ACTION_DIST_INPUTS], columns[c.ACTIONS]
            )
        segment_ends = np.cumsum(lengths)
        gaps = table.gaps(places)
        trajectory_ends = segment_ends
        if len(gaps):
            trajectory_ends = np.union1d(segment_ends, gaps)
        return Rows(columns, segment_ends, trajectory_ends)

    def _infos(self, places: NDArray[np.int64]) -> Array:
        if c.INFOS not in self.table:
            return np.fromiter([{} for _ in range(len(places))], np.object_, len(places))
        infos = self.table.gather({c.INFOS: (c.INFOS, 0)}, places)[c.INFOS]
        return np.fromiter([info or {} for info in infos], np.object_, len(places))


def _source(name: str) -> tuple[str, int]:
    """Return the table's column for a column of rows, and the offset of its row: 0 the same, -1 the
    previous one.
    """
    if name in _NEAR:
        return _NEAR[name]
    if name.startswith("state_in_"):
        return "state_out_" + name.removeprefix("state_in_"), -1
    return name, 0
