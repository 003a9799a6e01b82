"""BatchBuilder: rows of one environment, postprocessed by trajectory, until they are cut into a
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import PolicyError
from aiorl.sampling.seats import Lane, Rows, Seat, Segment

OnPostprocessed = Callable[[Any, Seat, SampleBatch, Mapping[Any, tuple[Policy, SampleBatch]]], None]
"""Hook with these arguments: the episode, the agent, its batch, the original batches of all agents
by agent id."""

Part = SampleBatch | Segment
"""Rows that are postprocessed, or that still lie in their policy's table and will be."""


class BatchBuilder:
    """Rows of one environment, collected episode after episode for a batch.

    Attributes:
        count: environment steps since the last batch.
        held: number of rows held, of all agents.
    """

    def __init__(self, on_postprocessed: OnPostprocessed | None) -> None:
        """Make an empty builder.

        Args:
            on_postprocessed: hook; None for none.
        """
        self.count = self.held = 0
        self._on_postprocessed = on_postprocessed
        self._pending: list[Seat] = []
        self._parts: dict[str, list[Part]] = {}
        self._vacated: dict[Lane, list[int]] = {}

    def seat_for(self, lane: Lane) -> int:
        """Return a seat for an agent of its environment, preferably one that an earlier episode has
        left.
        """
        numbers = self._vacated.get(lane)
        if not numbers:
            return lane.table.take_seat()
        number = numbers.pop()
        lane.table.restart(number)
        return number

    def expect_rows(self, seat: Seat) -> None:
        """Register an agent without rows, whose latest observation is about to become one."""
        table = seat.lane.table
        number = seat.number
        seat.waits_from = row = table.row_of(number)
        table.keep_from(number, row)
        seat.has_rows = True
        self._pending.append(seat)

    def has_pending_agent_data(self) -> bool:
        """Return True while there are rows that are not postprocessed."""
        return bool(self._pending)

    def total(self) -> int:
        """Return the number of rows held, of all agents."""
        return self.held

    @property
    def policy_ids(self) -> set[str]:
        """Ids of the policies of which it has rows."""
        return {*self._parts, *(seat.lane.policy_id for seat in self._pending)}

    def vacate(self, seat: Seat) -> None:
        """Release an agent's seat, which is given back together with the rows that wait in it."""
        if seat.rows.left_at < 0:
            seat.leave()
            self._vacated.setdefault(seat.lane, []).append(seat.number)

    def postprocess(self, episode: Any) -> None:
        """Postprocess each agent's rows since the last call.

        They are one piece of one episode, or several pieces if rows in between were not recorded.
        Each piece is a trajectory, because the last row of a piece is not followed by the next row.
        If no hook sees trajectories, they are only noted, and postprocessed together when the batch
        is built.

        Raises:
            PolicyError: the policy did not return a batch (also a ValueError).
        """
        pending = self._pending
        self._pending = []
        if all(seat.lane.in_bulk for seat in pending):
            for seat in pending:
                self._parts.setdefault(seat.lane.policy_id, []).append(seat.cut())
            return
        segments = [seat.cut() for seat in pending]
        rows = [segment.lane.rows([segment]) for segment in segments]
        originals: dict[Any, tuple[Policy, SampleBatch]] = {}
        if len(pending) > 1 or self._on_postprocessed is not None:
            for seat, of_seat in zip(pending, rows, strict=True):
                # copies, so that changes to one agent's batch do not show in another's
                columns = {name: column.copy() for name, column in of_seat.columns.items()}
                originals[seat.agent_id] = (seat.lane.policy, SampleBatch(columns))
        for seat, segment, of_seat in zip(pending, segments, rows, strict=True):
            parts = self._parts.setdefault(seat.lane.policy_id, [])
            if seat.lane.in_bulk:
                parts.append(segment)
            else:
                parts += self._postprocessed(episode, seat, of_seat, originals)

    def _postprocessed(
        self,
        episode: Any,
        seat: Seat,
        rows: Rows,
        originals: Mapping[Any, tuple[Policy, SampleBatch]],
    ) -> Iterator[SampleBatch]:
        policy = seat.lane.policy
        whole = SampleBatch(rows.columns)
        first = 0
        of_other_agents = {
            agent_id: original
            for agent_id, original in originals.items()
            if agent_id != seat.agent_id
        }
        for end in rows.trajectory_ends.tolist():
            trajectory = whole if end - first == whole.count else whole.slice(first, end)
            self.held -= trajectory.count
            batch = policy.postprocess_trajectory(trajectory, of_other_agents, episode)
            if not isinstance(batch, SampleBatch):
                raise PolicyError(
                    f"postprocess_trajectory of policy {seat.lane.policy_id!r}"
                    f" ({type(policy).__name__}) returned {type(batch).__name__}, expected a"
                    " SampleBatch; return the batch that it is given"
                )
            if self._on_postprocessed is not None:
                self._on_postprocessed(episode, seat, batch, originals)
            self.held += batch.count
            yield batch
            first = end
        seat.lane.table.taken(np.array([seat.number]))

    def cut(self, episode: Any, *, is_over: bool = False) -> Cut:
        """Return all rows held, for one batch; the builder is then empty."""
        self.postprocess(episode)
        for seat in episode.seats.values():
            if seat.is_done and seat.rows.left_at < 0:  # even if its episode continues
                self.vacate(seat)
                episode.has_left(seat)
        if not is_over:  # hooks of the episode's end can read all entries
            episode.forget_left()
        return self._emptied(self._parts)

    def discard(self) -> None:
        """Drop all rows held; their seats are released."""
        self._pending = []
        self._emptied({}).give_back()

    def _emptied(self, parts: dict[str, list[Part]]) -> Cut:
        cut = Cut(parts, self.count, self._vacated)
        self.count = self.held = 0
        self._parts = {}
        self._vacated = {}
        return cut


class Cut(NamedTuple):
    """Rows of one batch before it is built.

    Attributes:
        parts: policy id -> its rows, in order.
        env_steps: number of environment steps.
        vacated: seats that are free once the rows are taken out.
    """

    parts: dict[str, list[Part]]
    env_steps: int
    vacated: Mapping[Lane, Sequence[int]]

    def give_back(self) -> None:
        """Free the seats after the rows have been taken out."""
        for lane, numbers in self.vacated.items():
            for number in numbers:
                lane.table.free_seat(number)


def build_batches(
    cuts: Sequence[Cut], lanes: Mapping[str, Lane], *, is_multi_agent: bool
) -> list[SampleBatch | MultiAgentBatch]:
    """Build a batch of each cut; a plain one if there is only the default policy.

    Rows that are still in a table are gathered and postprocessed together.
    """
    for policy_id, lane in lanes.items():
        if lane.in_bulk:
            _take_out(lane, [cut.parts[policy_id] for cut in cuts if cut.parts.get(policy_id)])
    batches: list[SampleBatch | MultiAgentBatch] = []
    for cut in cuts:
        joined = {
            policy_id: _joined(parts, lanes[policy_id]) for policy_id, parts in cut.parts.items()
        }
        if is_multi_agent:
            batches.append(MultiAgentBatch(joined, cut.env_steps))
        else:
            batches.append(MultiAgentBatch.wrap_as_needed(joined, cut.env_steps))
        cut.give_back()
    return batches


def _take_out(lane: Lane, cuts: Sequence[list[Part]]) -> None:
    """Replace the segments of each list with one batch."""
    segments = [part for parts in cuts for part in parts if isinstance(part, Segment)]
    if not segments:
        return
    rows = lane.rows(segments)
    whole = SampleBatch(rows.columns)
    if isinstance(lane.policy, GraphPolicy):
        lane.policy.postprocess_trajectories(whole, rows.trajectory_ends)
    lane.table.taken(np.unique(np.array([segment.seat for segment in segments], np.int64)))
    first = number = 0
    for parts in cuts:
        number += len(parts)
        end = int(rows.segment_ends[number - 1])
        parts[:] = [whole.slice(first, end)]
        first = end


def _joined(parts: Sequence[Part], lane: Lane) -> SampleBatch:
    batches = [part for part in parts if isinstance(part, SampleBatch)]
    return batches[0] if lane.in_bulk else SampleBatch.concat(batches)
