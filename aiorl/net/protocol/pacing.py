"""Pacing of a streaming run: how many fragments may be under way, and which worker gets the next
lease.

All workers share one budget. Let a batch have ``B`` fragments and samples be at most ``L`` policy
versions old. The fragments leased, queued and held by the learner together stay within at most ``(R
+ 1) B``, because the last of them is ``R`` versions old when its turn comes. The *reach* ``R``
begins at ``L``. Each fragment that arrives too old lowers it by one step: a tenth of ``L``, or less
if more than 200 fragments may be under way. Every 400 fragments that arrive in time raise it by one
step.

Within that bound the budget follows the learner. It grows by a quarter while the learner waits for
fragments because the budget held workers back. It shrinks by half of the fragments queued beyond
one batch. The next lease goes to the worker that owes the fewest fragments and, among those, was
given the least work in seconds. A worker whose fragment would be more than ``R`` versions old is
*left out* until the policy slows down or a *trial*, a single fragment, shows that the worker has
become faster. A worker that has sent fewer than two fragments is on trial, too. Workers that have
failed no trial get one immediately; the others take turns while fewer than 1 in 400 fragments
arrive too old. Trials take at most half of the budget if other workers could use it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TypeAlias

from aiorl.errors import InternalError

_FIRST_BATCHES = 4
"""Batches under way at first, before the pace of learner and workers is known."""
_UNBOUNDED = 1 << 30
_SMOOTHING = 0.2
_UPDATE_SMOOTHING = 0.05
_MARGIN = 0.5
"""Number of deviations above the mean fragment time at which a fragment must still be young
enough."""
_STARVED = 0.02
"""Share of the time: above it, the learner counts as waiting for fragments."""
_STEP = 0.1
_LEAST_REACH = 0.15
"""Shares of L: the reach falls by the first for each fragment that arrives too old, and never below
the second."""
_MANY = 200
"""Above this number of fragments under way, the step is smaller."""
_MAX_STALE = 1 / 400
"""Share of fragments that may arrive too old: here the reach stays constant; above it, failed
workers get no trial."""
_IN_HAND = 2
"""Batches held by the learner: one in use, one that waits for it."""
_LOOK_AGAIN_S = 0.1
_MAX_LINE = 64


@dataclass(frozen=True, slots=True)
class SlowWorker:
    """A worker that is left out because the policy outruns its fragments.

    Attributes:
        slot: its slot.
        fragment_s: seconds it needs for a fragment.
        updates: learner updates in that time.
    """

    slot: int
    fragment_s: float
    updates: float


@dataclass(slots=True, eq=False)
class _Pace:
    """Pace of a worker.

    Attributes:
        slot: its slot.
        share_s: seconds of work given to it so far.
        owed: fragments leased to it that have not arrived yet.
        mean_s: mean seconds it needs for a fragment, -1 while unknown.
        deviation_s: mean absolute deviation from ``mean_s``.
        last_arrival: arrival time of its newest fragment.
        num_brought: fragments it has sent.
        needs_trial: True if it is new or left out, so that its next lease is a trial.
        owes_trial: True if the fragment it owes is a trial.
        was_trial: True if its newest fragment was a trial.
        num_failed: trials in a row that it has failed.
        turn: number of its valid entry in a line, 0 for none.
    """

    slot: int
    share_s: float
    owed: int = 0
    mean_s: float = -1.0
    deviation_s: float = 0.0
    last_arrival: float = float("-inf")
    num_brought: int = 0
    needs_trial: bool = True
    owes_trial: bool = False
    was_trial: bool = False
    num_failed: int = 0
    turn: int = 0


_Turn: TypeAlias = tuple[int, float, int, _Pace]
"""Entry of a heap, least first: fragments owed or trials failed, ``share_s``, turn, worker."""


class Pacing:
    """Budget of one run. It has no clock: ``now`` is any monotonic time in seconds.

    Args:
        fragments_per_batch: B.
        max_policy_lag: L, or None if samples may be of any age.
        per_worker: fragments that one worker may owe at a time.
        largest: further bound of the budget, or None.

    Attributes:
        per_worker: fragments that one worker may owe at a time; can be changed.
        budget: current limit of fragments leased, queued and held by the learner, all together.
        largest: bound of the budget.
        outstanding: fragments leased that have not arrived yet.
    """

    def __init__(
        self,
        fragments_per_batch: int,
        max_policy_lag: int | None,
        per_worker: int,
        largest: int | None = None,
    ) -> None:
        self._batch = fragments_per_batch
        self.per_worker = per_worker
        self.largest = _UNBOUNDED
        if max_policy_lag is not None:
            self.largest = (max_policy_lag + 1) * fragments_per_batch
        if largest is not None:
            self.largest = min(self.largest, max(largest, fragments_per_batch))
        self._reach = _Reach(max_policy_lag, self.largest)
        self.budget = min(_FIRST_BATCHES * fragments_per_batch, self.largest)
        self.outstanding = 0
        self._paces: dict[int, _Pace] = {}
        self._ready: list[_Turn] = []
        self._trials: list[_Turn] = []
        self._num_turns = 0
        # ``share_s`` of the worker that was leased a fragment last, except for trials
        self._level_s = 0.0
        self._num_on_trial = 0  # workers that owe a trial
        self._updates = _Updates()
        self._looked = float("-inf")
        self._num_at_change = 0  # fragments that had arrived when the budget was last changed

    # Workers
    # ----------------------------------------------------------------------------------------------

    def join(self, slot: int) -> None:
        """Add a worker; it begins level with the worker whose turn came last."""
        pace = self._paces[slot] = _Pace(slot, self._level_s)
        self._line_up(pace)

    def leave(self, slot: int) -> None:
        """Forget a worker that is gone; the fragments it owes will not arrive."""
        if slot in self._paces:
            self.write_off(slot)
            del self._paces[slot]

    def write_off(self, slot: int) -> None:
        """Stop waiting for the fragments a worker owes; it gets no further lease until it sends
        one.
        """
        pace = self._paces[slot]
        self.outstanding -= pace.owed
        pace.owed = pace.turn = 0
        self._end_trial(pace)

    def arrived(self, slot: int, begun: float, now: float) -> None:
        """Record the arrival of a fragment that the worker could begin at ``begun`` at the
        earliest.
        """
        pace = self._paces[slot]
        if pace.owed:
            pace.owed -= 1
            self.outstanding -= 1
        took_s = max(0.0, now - max(begun, pace.last_arrival))
        pace.last_arrival = now
        pace.num_brought += 1
        self._reach.arrived()
        pace.was_trial = self._end_trial(pace)
        if pace.was_trial or pace.mean_s < 0:
            # the first one, in which environments were built, says little
            pace.needs_trial = pace.num_brought < 2
            pace.mean_s = took_s
            pace.deviation_s = took_s / 4
        else:
            off_s = took_s - pace.mean_s
            pace.mean_s += _SMOOTHING * off_s
            pace.deviation_s += _SMOOTHING * (abs(off_s) - pace.deviation_s)
            if not pace.needs_trial:
                pace.num_failed = 0
        self._line_up(pace)

    def outdated(self, slot: int) -> None:
        """Record that a fragment was discarded because the policy had outrun it."""
        self._reach.num_stale += 1
        pace = self._paces.get(slot)
        if pace is not None and not pace.was_trial and self._reach.max_lag:
            self._reach.shorten()
            self._change(min(self.budget, self._largest_now()))

    def slow_workers(self, now: float) -> list[SlowWorker]:
        """Return the workers left out because the policy outruns their fragments, whatever waits in
        the queue.
        """
        update_s = self._updates.mean_s or float("inf")
        return [
            SlowWorker(slot=pace.slot, fragment_s=pace.mean_s, updates=pace.mean_s / update_s)
            for pace in self._paces.values()
            if pace.needs_trial and pace.num_brought > 1 and not self._keeps_up(pace, 0, now)
        ]

    # The learner
    # ----------------------------------------------------------------------------------------------

    def updated(self, waited_s: float, queued: int, now: float) -> None:
        """Record that an update has ended.

        Args:
            waited_s: seconds the update thread waited for its batch.
            queued: fragments that wait for a later batch.
            now: the time in seconds.
        """
        updates = self._updates
        was_held_back = updates.held_back
        updates.held_back = False
        took_s = updates.ended(now, queued // self._batch)
        if took_s is None:
            return
        if self._reach.num_arrived - self._num_at_change < self.outstanding:
            return  # the effect of the previous change does not show yet
        if waited_s > _STARVED * took_s:
            if was_held_back:
                self._change(self.budget + max(1, self.budget // 4))
        elif queued > self._batch:
            self._change(self.budget - max(1, (queued - self._batch) // 2))

    def _change(self, budget: int) -> None:
        budget = min(max(budget, 2 * self._batch), self._largest_now())
        if budget != self.budget:
            self.budget = budget
            self._num_at_change = self._reach.num_arrived

    def _largest_now(self) -> int:
        if not self._reach.max_lag:
            return self.largest
        return min(self.largest, int((self._reach.versions + 1) * self._batch))

    # Leases
    # ----------------------------------------------------------------------------------------------

    def next_leases(self, waiting: int, now: float) -> list[int]:
        """Return the slots to lease a fragment to now, and count these as leased; a slot can occur
        more than once.

        Args:
            waiting: fragments queued or held by the learner.
            now: the time in seconds.
        """
        if now - self._looked >= _LOOK_AGAIN_S:
            self._looked = now
            for candidate in self._paces.values():
                is_left_out = candidate.needs_trial and candidate.num_brought > 1
                if is_left_out and self._keeps_up(candidate, waiting, now):
                    candidate.needs_trial = False
                    self._line_up(candidate)
        chosen: list[int] = []
        while self.budget - waiting - self.outstanding > 0:
            pace = self._whose_turn(waiting, now)
            if pace is None:
                return chosen
            chosen.append(pace.slot)
            pace.owed += 1
            self.outstanding += 1
            pace.share_s += max(0.0, pace.mean_s)
            if pace.needs_trial:
                pace.owes_trial = True
                self._num_on_trial += 1
            else:
                self._level_s = pace.share_s
                self._line_up(pace)
        self._updates.held_back = True
        return chosen

    def check_valid(self) -> None:
        """Check that the counts add up.

        Raises:
            InternalError: when they do not.
        """
        owed = [pace.owed for pace in self._paces.values()]
        if sum(owed) != self.outstanding or min(owed, default=0) < 0:
            raise InternalError(
                f"{self.outstanding} fragments are counted as leased, but workers owe {sum(owed)}"
            )
        on_trial = sum(pace.owes_trial for pace in self._paces.values())
        if on_trial != self._num_on_trial:
            raise InternalError(
                f"{self._num_on_trial} workers are counted as on trial, but {on_trial} are"
            )

    def _whose_turn(self, waiting: int, now: float) -> _Pace | None:
        """Return the worker that is next, or None if no worker may owe another fragment."""
        lines = (self._ready, self._trials)
        if self._num_on_trial < max(1, self.budget // 2):
            lines = (self._trials, self._ready)
        for line in lines:
            while line:
                first, _, turn, pace = line[0]
                has_failed = line is self._trials and first > 0
                if turn == pace.turn and has_failed and not self._may_try_again(waiting):
                    break
                heapq.heappop(line)
                if turn != pace.turn:
                    continue
                pace.turn = 0
                if pace.needs_trial or self._keeps_up(pace, waiting, now):
                    return pace
                pace.needs_trial = True
                pace.num_failed += pace.was_trial
                self._line_up(pace)
        return None

    def _line_up(self, pace: _Pace) -> None:
        """Put a worker in line if it may owe another fragment."""
        pace.turn = 0
        if pace.needs_trial:
            line = self._trials
            max_owed = 1
            first = pace.num_failed
            share_s = 0.0
        else:
            line = self._ready
            max_owed = self.per_worker
            first = pace.owed
            share_s = pace.share_s
        # most entries of a long line are stale: newer ones replace them
        if len(line) > _MAX_LINE + 4 * len(self._paces):
            line[:] = [entry for entry in line if entry[2] == entry[3].turn]
            heapq.heapify(line)
        if pace.owed < max_owed:
            self._num_turns += 1
            pace.turn = self._num_turns
            heapq.heappush(line, (first, share_s, pace.turn, pace))

    def _end_trial(self, pace: _Pace) -> bool:
        """Clear the worker's trial; return whether it owed one."""
        owed = pace.owes_trial
        pace.owes_trial = False
        self._num_on_trial -= owed
        return owed

    def _may_try_again(self, waiting: int) -> bool:
        """Return whether a worker that has failed a trial can have another."""
        reach = self._reach
        if reach.max_lag is None or self.outstanding + waiting < self._batch:
            return True
        return reach.num_stale <= self._batch + _MAX_STALE * reach.num_arrived

    def _keeps_up(self, pace: _Pace, waiting: int, now: float) -> bool:
        """Return whether a fragment begun now would still be young enough when its turn comes."""
        reach = self._reach
        updates = self._updates
        if reach.max_lag is None or not updates.mean_s:
            return True
        update_s = max(updates.mean_s, now - updates.newest)
        # a fast worker's long queue is the budget's concern
        if pace.mean_s <= update_s:
            return True
        # how many updates fit into a fragment is known once that time has been watched
        if now - updates.began < pace.mean_s:
            return True
        # Today's queue says little about the queue at arrival: the learner's hands alone may be
        # full by then.
        lag_in_queue = min(waiting / self._batch, _IN_HAND)
        lag = (pace.mean_s + _MARGIN * pace.deviation_s) / update_s + lag_in_queue
        return lag <= reach.versions


class _Reach:
    """Reach of a run, and the fragments by which it is set (see the module).

    Args:
        max_lag: L, or None if samples may be of any age.
        largest: bound of the budget.

    Attributes:
        max_lag: L, or None.
        versions: R, 0 if L is None.
        num_arrived: fragments that have arrived.
        num_stale: those of them that arrived too old.
    """

    def __init__(self, max_lag: int | None, largest: int) -> None:
        self.max_lag = max_lag
        self.versions = float(max_lag or 0)
        self.num_arrived = 0
        self.num_stale = 0
        self._step = self.versions * _STEP * min(1.0, _MANY / largest)

    def arrived(self) -> None:
        """Count a fragment."""
        self.num_arrived += 1
        if self.max_lag:
            self.versions = min(self.max_lag, self.versions + _MAX_STALE * self._step)

    def shorten(self) -> None:
        """Lower the reach by a step; there must be an L."""
        least = _LEAST_REACH * (self.max_lag or 0)
        self.versions = max(least, self.versions - self._step)


@dataclass(slots=True)
class _Updates:
    """Pace of the learner's updates.

    Batches that waited while the first update was compiled are trained on in quick succession,
    which says nothing about the pace. It is measured from the last of them on.

    Attributes:
        mean_s: mean seconds from one update to the next, 0 while unknown.
        began: time from which the pace is measured.
        newest: time of the newest update.
        held_back: True if the budget held workers back since then.
        num_measured: updates in ``mean_s``.
        num_waiting: updates that still come before ``began``, -1 before the first one.
    """

    mean_s: float = 0.0
    began: float = float("-inf")
    newest: float = float("-inf")
    held_back: bool = False
    num_measured: int = 0
    num_waiting: int = -1

    def ended(self, now: float, queued_batches: int) -> float | None:
        """Record an update.

        Returns:
            Seconds since the one before; None before the pace is measured.
        """
        took_s = now - self.newest
        self.newest = now
        if self.num_waiting < 0:
            self.num_waiting = queued_batches + _IN_HAND
        if self.num_waiting:
            self.num_waiting -= 1
            self.began = now
            return None
        self.num_measured += 1
        # the first ones have equal weights, so that a single one says little
        weight = max(_UPDATE_SMOOTHING, 1 / self.num_measured)
        self.mean_s += weight * (took_s - self.mean_s)
        return took_s
