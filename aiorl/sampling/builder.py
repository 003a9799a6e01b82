"""BatchBuilder: rows of one environment until they are cut, postprocessed by trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import BatchError, PolicyError
from aiorl.sampling.seats import Lane, Seat, Segment

OnPostprocessed = Callable[[Any, Seat, SampleBatch, Mapping[Any, tuple[Policy, SampleBatch]]], None]
"""Called with the episode, the agent, its batch and the original batches of all agents by agent id."""

Part = SampleBatch | Segment
"""Rows that are postprocessed, or are to be, where they lie in their policy's table."""


class BatchBuilder:
    """Rows of one environment, collected episode after episode until they make a batch.

    Attributes:
        count: environment steps since the last batch.
        held: rows held, of all agents.
    """

    def __init__(self, on_postprocessed: OnPostprocessed | None) -> None:
        """Make an empty builder.

        Args:
            on_postprocessed: hook; None where nobody listens.
        """
        self.count = self.held = 0
        self._on_postprocessed = on_postprocessed
        self._pending: list[Seat] = []
        self._parts: dict[str, list[Part]] = {}
        self._vacated: dict[Lane, list[int]] = {}

    def seat_for(self, lane: Lane) -> int:
        """Return a seat for an agent of its environment, if possible one that an earlier episode has left."""
        left = self._vacated.get(lane)
        if not left:
            return lane.table.take_seat()
        number = left.pop()
        lane.table.restart(number)
        return number

    def expect_rows(self, seat: Seat) -> None:
        """Note that an agent without rows is about to get one, that of its latest observation."""
        table, number = seat.lane.table, seat.number
        seat.waits_from = row = table.row_of(number)
        table.keep_from(number, row)
        seat.has_rows = True
        self._pending.append(seat)

    def has_pending_agent_data(self) -> bool:
        """Tell whether there are rows not yet postprocessed."""
        return bool(self._pending)

    def total(self) -> int:
        """Return the number of rows held, of all agents."""
        return self.held

    def vacate(self, seat: Seat) -> None:
        """Take an agent's seat, which is given back with the rows that wait in it."""
        if seat.left_at < 0:
            seat.leave()
            self._vacated.setdefault(seat.lane, []).append(seat.number)

    def postprocess(self, episode: Any) -> None:
        """Postprocess what each agent did since the last time.

        It is one piece of one episode, or several where rows in between were not recorded: what follows a row's end
        is then not the next row, so each piece is a trajectory of its own. Where nobody looks at trajectories, they
        are noted only, and postprocessed with others when the batch is built.

        Raises:
            BatchError: rows that are not one trajectory (also a ValueError).
            PolicyError: the policy gave back no batch (also a ValueError).
        """
        pending, self._pending = self._pending, []
        cuts = [(seat, seat.cut()) for seat in pending]
        originals: OriginalBatches | None = None
        for seat, segment in cuts:
            parts = self._parts.setdefault(seat.lane.policy_id, [])
            if seat.lane.in_bulk:
                parts.append(segment)
                continue
            if originals is None:
                originals = OriginalBatches({other.agent_id: (other, its) for other, its in cuts})
            parts += self._postprocessed(episode, seat, segment, originals)
        if originals is not None:
            originals.close()

    def _postprocessed(
        self, episode: Any, seat: Seat, segment: Segment, originals: OriginalBatches
    ) -> Iterator[SampleBatch]:
        lane = seat.lane
        rows = lane.rows([segment])
        whole = SampleBatch(rows.columns)
        others: Mapping[Any, Any] = originals.without(seat.agent_id) if len(originals) > 1 else {}
        first = 0
        for end in rows.trajectory_ends.tolist():
            own = whole if end - first == whole.count else whole.slice(first, end)
            check_trajectory(own)
            self.held -= own.count
            batch = lane.policy.postprocess_trajectory(own, others, episode)
            if not isinstance(batch, SampleBatch):
                raise PolicyError(
                    f"postprocess_trajectory of policy {lane.policy_id!r} ({type(lane.policy).__name__}) "
                    f"returned {type(batch).__name__}, expected a SampleBatch; return the batch it was given"
                )
            if self._on_postprocessed is not None:
                self._on_postprocessed(episode, seat, batch, originals)
            self.held += batch.count
            yield batch
            first = end
        lane.table.taken(np.array([segment.seat]))

    def cut(self, episode: Any) -> Cut:
        """Hand over all rows held, for one batch; the builder is empty afterwards."""
        self.postprocess(episode)
        for seat in episode.seats.values():
            if seat.done:  # however long its episode goes on
                self.vacate(seat)
        return self._emptied(self._parts)

    def discard(self) -> None:
        """Forget everything held; the seats of these rows are vacated."""
        self._pending = []
        self._emptied({}).give_back()

    def _emptied(self, parts: dict[str, list[Part]]) -> Cut:
        cut = Cut(parts, self.count, self._vacated)
        self.count = self.held = 0
        self._parts, self._vacated = {}, {}
        return cut


class Cut(NamedTuple):
    """Rows of one batch before it is built.

    Attributes:
        parts: policy id -> its rows, in order.
        env_steps: environment steps.
        vacated: seats that are free once the rows are taken out.
    """

    parts: dict[str, list[Part]]
    env_steps: int
    vacated: Mapping[Lane, Sequence[int]]

    def give_back(self) -> None:
        """Free the seats: the rows are taken out."""
        for lane, numbers in self.vacated.items():
            for number in numbers:
                lane.table.free_seat(number)


def build_batches(
    cuts: Sequence[Cut], lanes: Mapping[str, Lane], *, is_multi_agent: bool
) -> list[SampleBatch | MultiAgentBatch]:
    """Build a batch of each cut, plain ones if there is only the default policy.

    Rows that are still in a table are gathered and postprocessed all together.
    """
    for policy_id, lane in lanes.items():
        if lane.in_bulk:
            _take_out(lane, [parts for cut in cuts if (parts := cut.parts.get(policy_id))])
    batches: list[SampleBatch | MultiAgentBatch] = []
    for cut in cuts:
        joined = {policy_id: _joined(parts, lanes[policy_id]) for policy_id, parts in cut.parts.items()}
        if is_multi_agent:
            batches.append(MultiAgentBatch(joined, cut.env_steps))
        else:
            batches.append(MultiAgentBatch.wrap_as_needed(joined, cut.env_steps))
        cut.give_back()
    return batches


def _take_out(lane: Lane, parts: Sequence[list[Part]]) -> None:
    """Replace the segments of each list by one batch."""
    segments = [part for one in parts for part in one if isinstance(part, Segment)]
    if not segments:
        return
    rows = lane.rows(segments)
    whole = SampleBatch(rows.columns)
    if isinstance(lane.policy, GraphPolicy):
        lane.policy.postprocess_trajectories(whole, rows.trajectory_ends)
    lane.table.taken(np.unique(np.array([segment.seat for segment in segments], np.int64)))
    first = number = 0
    for one in parts:
        number += len(one)
        end = int(rows.segment_ends[number - 1])
        one[:] = [whole.slice(first, end)]
        first = end


def _joined(parts: Sequence[Part], lane: Lane) -> SampleBatch:
    batches = [part for part in parts if isinstance(part, SampleBatch)]
    return batches[0] if lane.in_bulk else SampleBatch.concat(batches)


def check_trajectory(batch: SampleBatch) -> None:
    """Raise if rows are not those of one agent in one episode.

    Raises:
        BatchError: a row before the last one is done, or the rows have several episode ids (also a ValueError).
    """
    dones, episode_ids = batch[c.DONES], batch[c.EPS_ID]
    if np.count_nonzero(dones[:-1]):
        inner = int(np.flatnonzero(dones[:-1])[0])
        raise BatchError(c.DONES, "rows of a single trajectory", f"row {inner} of {batch.count} is done")
    if np.count_nonzero(episode_ids[1:] != episode_ids[:-1]):
        raise BatchError(c.EPS_ID, "rows of a single trajectory", f"episodes {np.unique(episode_ids).tolist()}")


class OriginalBatches(Mapping[Any, tuple[Policy, SampleBatch]]):
    """Agent id -> (policy, batch before postprocessing), of the agents that are postprocessed together.

    A batch is made when it is first asked for, with memory of its own: nothing that is done to one agent's
    batch is seen in another's. Batches that nobody asked for during postprocessing cannot be had later.
    """

    def __init__(self, segments: Mapping[Any, tuple[Seat, Segment]]) -> None:
        """Cover these agents."""
        self._segments = segments
        self._made: dict[Any, tuple[Policy, SampleBatch]] = {}
        self._is_over = False
        self._whole = self

    def __getitem__(self, agent_id: Any) -> tuple[Policy, SampleBatch]:
        seat, segment = self._segments[agent_id]
        pair = self._made.get(agent_id)
        if pair is None:
            if self._whole._is_over:
                raise RuntimeError("the original batches are there during postprocessing only")
            pair = self._made[agent_id] = (seat.lane.policy, SampleBatch(seat.lane.rows([segment]).columns))
        return pair

    def __iter__(self) -> Iterator[Any]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def without(self, agent_id: Any) -> Mapping[Any, tuple[Policy, SampleBatch]]:
        """Return the same batches, but one agent's."""
        others = OriginalBatches({other: its for other, its in self._segments.items() if other != agent_id})
        others._made, others._whole = self._made, self
        return others

    def close(self) -> None:
        """Refuse to make more."""
        self._is_over = True
