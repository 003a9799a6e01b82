"""How much a streaming run may have under way, and whose turn it is: one budget for all workers together.

Fragments leased, queued and in the learner's hands are bounded by what can be trained on before it is too old: with
``B`` fragments to a batch and samples at most ``L`` policy versions old, the last of ``(L + 1) B`` fragments in a
queue is ``L`` versions old when its turn comes. Below that bound the budget follows the learner: it grows while the
learner waits for fragments that workers were not let make, and shrinks while more than a batch waits for the learner,
so that samples are as fresh as can be. It shrinks too while more than a few come too old of workers that are not slow
by themselves: where these are in each other's way on one host, the learner waits whatever the budget is, and a larger
one only makes each fragment take longer. So it goes back there in small steps and far between.

A worker whose fragments take so long that the policy outruns it is left out until the policy slows down, or until a
fragment that it is let try shows that it has become faster. That comes at once where it kept up until then, since a
host or a link may have stood still for a moment; its first fragment, in which its environments were built, says little
as well. The others share by time: who has been given the least work comes first, and a fast worker makes more fragments
of its share. Only where the bound on age keeps the learner waiting do the faster workers come before the slower ones.

Workers that have not brought anything yet may never do so. Beyond a share of the budget they get what the others leave.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TypeAlias

from aiorl.errors import InternalError

__all__ = ["Pacing", "SlowWorker"]

_FIRST_BATCHES = 4
"""Batches under way at first, before it is known what the learner and the workers make of them."""
_UNBOUNDED = 1 << 30
_SMOOTHING = 0.2
_STARVED = 0.02
"""The learner counts as waiting for fragments when it does so for this share of the time."""
_SCARCE = (0.02, 0.1)
"""The same, smoothed over many updates: above the second share the faster workers come first, until it is below the
first one."""
_SCARCE_SMOOTHING = 0.05
_CLASSES_PER_OCTAVE = 4
"""Workers whose speeds differ by less than this share by time in any case."""
_MAX_TRIED = 0.0075
"""Workers whose speed is not known, or is said to be too low, are tried while no larger share of all is too old."""
_PROBE_EVERY = 1000
"""Of so many fragments one may come from a worker that is taken to be too slow, to see whether it still is."""
_PARDON_AFTER = 100
"""A worker that has brought so many since it was last tried is tried again as soon as it is taken to be too slow."""
_TRIAL_SHARE = 2
"""One of so many fragments may be owed by workers that have brought none before others come first; one in any case."""
_IN_HAND = 2
"""Batches that the learner has taken: one in use, one that waits for it."""
_LOOK_AGAIN_S = 0.1
_MAX_READY = 64
_MARGIN = 0.5
"""Deviations above the mean for which a fragment must be young enough."""
_LESS_TRUST, _MORE_TRUST = 0.02, 5e-5
"""How a fragment that came too old, or not, changes the share of L that is made use of."""
_LEAST_TRUST = 0.25
_STALE_WITHIN = 200
_MAX_STALE = (0.001, 0.004)
"""Share of fragments that come too old: above the first the budget doesn't grow, above the second it shrinks."""
_MAX_SHARE_OF_LAG = 0.5
"""A worker that takes longer by itself is too slow; it is not the budget that made its fragment too old."""
_STEP, _SMALL_STEP = 1 / 4, 1 / 10
_PROVEN = 250
"""So many fragments must have come under a budget before it goes where fragments have come too old."""


@dataclass(frozen=True, slots=True)
class SlowWorker:
    """A worker that is left out: the policy outruns its fragments.

    Attributes:
        slot: its slot.
        fragment_s: seconds that it needs for a fragment.
        updates: updates in that time.
    """

    slot: int
    fragment_s: float
    updates: float


@dataclass(slots=True, eq=False)
class _Pace:
    """What is known of a worker.

    Attributes:
        slot: its slot.
        owed: fragments leased to it and not come yet.
        mean_s: seconds that it needs for a fragment, -1 while unknown.
        usual_s: the same as it was before its newest fragment.
        deviation_s: mean deviation from that.
        share_s: seconds of work given to it so far.
        last_arrival: when its newest fragment came.
        is_risked: whether it was given its newest lease though it was taken to be too slow.
        is_tried: whether its newest fragment was to show its speed.
        is_first: whether that was the only one yet: it may have taken longer than others will.
        num_since_tried: fragments it has brought since.
        turn: number of its valid entry in the queue of those that may get a lease, 0 for none.
    """

    slot: int
    owed: int = 0
    mean_s: float = -1.0
    usual_s: float = -1.0
    deviation_s: float = 0.0
    share_s: float = 0.0
    last_arrival: float = float("-inf")
    is_risked: bool = False
    is_tried: bool = False
    is_first: bool = False
    num_since_tried: int = 0
    turn: int = 0


_Turn: TypeAlias = tuple[int, float, float, int, _Pace]
"""Owed, speed class, share_s, turn: who comes first has the least of them."""


class Pacing:
    """The budget of one run; no clock: ``now`` is any monotonic time in seconds.

    Args:
        fragments_per_batch: B.
        max_policy_lag: L; None: samples may be of any age.
        per_worker: fragments that one worker may owe at a time.
        largest: what the budget never exceeds, whatever L allows; None = nothing else.

    Attributes:
        per_worker: fragments that one worker may owe at a time; may be changed.
        budget: fragments that may be leased, queued or in the learner's hands now, all together.
        largest: what the budget never exceeds.
        outstanding: fragments leased and not come yet.
    """

    def __init__(
        self, fragments_per_batch: int, max_policy_lag: int | None, per_worker: int, largest: int | None = None
    ) -> None:
        self._batch = fragments_per_batch
        self._max_lag = max_policy_lag
        self.per_worker = per_worker
        self.largest = _UNBOUNDED if max_policy_lag is None else (max_policy_lag + 1) * fragments_per_batch
        if largest is not None:
            self.largest = min(self.largest, max(largest, fragments_per_batch))
        self._smallest = min(2 * fragments_per_batch, self.largest)
        self.budget = min(_FIRST_BATCHES * fragments_per_batch, self.largest)
        self.outstanding = 0
        self._paces: dict[int, _Pace] = {}
        self._ready: list[_Turn] = []
        self._new: list[_Turn] = []  # the same of workers that have brought nothing yet
        self._on_trial = 0  # fragments that these owe
        self._slow: dict[int, _Pace] = {}
        self._moved: dict[int, _Pace] = {}  # brought something since leases were given, so that its turn is another one
        self._turns = 0
        self._update_s = 0.0
        self._last_update = float("-inf")
        self._looked_at_slow = float("-inf")
        self._next_probe = _PROBE_EVERY  # a probe is due once so many fragments have come
        self._held_back = False
        self._starved = 0.0
        self._is_scarce = False
        self._num_arrived = 0
        self._num_stale = 0
        self._stale = 0.0
        self._stale_weight = 1 / max(_STALE_WITHIN, self.largest)
        self._num_at_change = 0
        self._known_good = self.largest
        self._trust = 1.0

    # Workers ------------------------------------------------------------------------------------------------

    def join(self, slot: int) -> None:
        """A worker is there; it begins level with the one that was given the least work."""
        share_s = min((known.share_s for known in self._paces.values()), default=0.0)
        pace = self._paces[slot] = _Pace(slot, share_s=share_s)
        self._line_up(pace)

    def leave(self, slot: int) -> None:
        """A worker is gone, and what it owes will not come."""
        pace = self._paces.pop(slot, None)
        if pace is not None:
            self._slow.pop(slot, None)
            self._moved.pop(slot, None)
            self.outstanding -= pace.owed
            self._end_trial(pace)
            pace.turn = 0

    def write_off(self, slot: int) -> None:
        """What a worker owes is not waited for any more; it gets no other lease until it brings one."""
        pace = self._paces[slot]
        self.outstanding -= pace.owed
        self._end_trial(pace)
        pace.owed = pace.turn = 0
        self._slow.pop(slot, None)
        self._moved.pop(slot, None)

    def arrived(self, slot: int, begun: float, now: float) -> None:
        """Note a fragment of a worker that could begin it at ``begun`` at the earliest."""
        pace = self._paces[slot]
        self._end_trial(pace)
        if pace.owed:
            pace.owed -= 1
            self.outstanding -= 1
        took_s = now - (begun if begun > pace.last_arrival else pace.last_arrival)
        if took_s < 0:
            took_s = 0.0
        pace.last_arrival = now
        self._num_arrived += 1
        if self._trust < 1:
            self._trust = min(1.0, self._trust + _MORE_TRUST)
        if self._stale:
            self._stale -= self._stale_weight * self._stale
        usual_s = pace.usual_s = pace.mean_s
        if self._shows_speed(pace):
            if pace.is_risked and took_s < usual_s / 2:  # what held it up may have held up others
                self._next_probe = self._num_arrived
            pace.is_tried, pace.is_first, pace.is_risked = True, usual_s < 0, False
            pace.mean_s, pace.deviation_s = took_s, took_s / 4
            pace.num_since_tried = 0
        else:
            pace.is_tried = False
            off_s = took_s - usual_s
            pace.mean_s = usual_s + _SMOOTHING * off_s
            pace.deviation_s += _SMOOTHING * (abs(off_s) - pace.deviation_s)
            pace.num_since_tried += 1
        self._moved[slot] = pace

    def outdated(self, slot: int) -> None:
        """Note that a fragment of a worker came to nothing because the policy had outrun it."""
        self._num_stale += 1
        pace = self._paces.get(slot)
        if pace is not None and not pace.is_tried:
            self._trust = max(_LEAST_TRUST, self._trust * (1 - _LESS_TRUST))
            if pace.usual_s <= _MAX_SHARE_OF_LAG * (self._max_lag or 0) * self._update_s:
                self._stale += self._stale_weight

    def slow_workers(self) -> list[SlowWorker]:
        """Workers left out because the policy outruns their fragments."""
        each_s = self._update_s or float("inf")
        known = [pace for pace in self._slow.values() if not self._is_to_be_tried(pace)]
        return [SlowWorker(pace.slot, pace.mean_s, pace.mean_s / each_s) for pace in known]

    # The learner --------------------------------------------------------------------------------------------

    def updated(self, waited_s: float, queued: int, now: float) -> None:
        """Note that an update has ended.

        Args:
            waited_s: how long the update thread had to wait for its batch.
            queued: fragments that wait for a later batch.
            now: the time.
        """
        took_s = now - self._last_update
        first, self._last_update = self._last_update == float("-inf"), now
        held_back, self._held_back = self._held_back, False
        if first:
            return
        self._update_s = self._update_s + _SCARCE_SMOOTHING * (took_s - self._update_s) if self._update_s else took_s
        starved = min(1.0, waited_s / took_s) if took_s > 0 else 0.0
        self._starved += _SCARCE_SMOOTHING * (starved - self._starved)
        self._set_scarce(self.budget >= self.largest and self._starved > _SCARCE[not self._is_scarce])
        if self._num_since_change < self.outstanding:
            return  # what the change before has brought about is not to be seen yet
        grow_below, shrink_above = _MAX_STALE
        if self._stale > shrink_above:
            self._known_good = self._change(self.budget - max(1, int(self.budget * _SMALL_STEP)))
            self._stale = shrink_above / 2  # one step for each that came too old
        elif starved > _STARVED:
            if held_back and self._stale < grow_below:
                self._grow()
        elif queued > self._batch:
            self._change(self.budget - max(1, (queued - self._batch) // 2))

    def _grow(self) -> None:
        """Let more be under way, once those that were first leased under this budget would be too old if they could.

        Beyond a budget under which none were, it goes in small steps and far between: each costs a few fragments, and
        workers that are in each other's way on one host keep the learner waiting whatever the budget is.
        """
        if self._max_lag is not None and self._num_since_change < self.largest:
            return
        if self.budget < self._known_good:
            self._change(min(self.budget + max(1, int(self.budget * _STEP)), self._known_good))
        elif self._num_since_change >= _PROVEN:
            self._known_good = self._change(self.budget + max(1, int(self.budget * _SMALL_STEP)))

    # Leases -------------------------------------------------------------------------------------------------

    def next_leases(self, waiting: int, now: float) -> list[int]:
        """Whom to lease a fragment to now; a slot may come more than once. They count as leased.

        Args:
            waiting: fragments queued or in the learner's hands.
            now: the time.
        """
        if now - self._looked_at_slow >= _LOOK_AGAIN_S:
            self._looked_at_slow = now
            for left_out in [pace for pace in self._slow.values() if self._keeps_up(pace, waiting, now)]:
                del self._slow[left_out.slot]
                self._line_up(left_out)
        for moved in self._moved.values():
            self._line_up(moved)
        self._moved.clear()
        chosen: list[int] = []
        while self.budget - waiting - self.outstanding > 0:
            if (pace := self._whose_turn()) is None:
                return chosen
            pace.turn = 0
            if not self._keeps_up(pace, waiting, now):
                self._slow[pace.slot] = pace
                continue
            chosen.append(pace.slot)
            pace.owed += 1
            self.outstanding += 1
            self._on_trial += pace.mean_s < 0
            if pace.mean_s > 0:
                pace.share_s += pace.mean_s
            if self._max_lag is None or not self._shows_speed(pace):  # else this one is to show it
                self._line_up(pace)
        self._held_back = True
        return chosen

    def check_valid(self) -> None:
        """Raise InternalError unless the counts add up."""
        owed = [pace.owed for pace in self._paces.values()]
        if sum(owed) != self.outstanding or min(owed, default=0) < 0:
            raise InternalError(f"{self.outstanding} fragments are said to be leased, workers owe {sum(owed)}")
        on_trial = sum(pace.owed for pace in self._paces.values() if pace.mean_s < 0)
        if on_trial != self._on_trial:
            raise InternalError(f"{self._on_trial} fragments are said to be on trial, new workers owe {on_trial}")

    def _whose_turn(self) -> _Pace | None:
        """Who is next, None if nobody may owe another fragment."""
        new_first = self._on_trial < max(1, self.budget // _TRIAL_SHARE)
        for line in (self._new, self._ready) if new_first else (self._ready, self._new):
            while line:
                _, _, _, turn, pace = heapq.heappop(line)
                if turn == pace.turn:
                    return pace
        return None

    def _end_trial(self, pace: _Pace) -> None:
        """What a worker owes is not on trial any more, if it was."""
        if pace.mean_s < 0:
            self._on_trial -= pace.owed

    def _line_up(self, pace: _Pace) -> None:
        """Let a worker have its turn, if it may owe another fragment."""
        line = self._new if pace.mean_s < 0 else self._ready
        if len(line) > _MAX_READY + 4 * len(self._paces):  # most have been overtaken by newer ones
            line[:] = [entry for entry in line if entry[3] == entry[4].turn]
            heapq.heapify(line)
        if pace.owed < self.per_worker and pace.slot not in self._slow:
            self._turns += 1
            pace.turn = self._turns
            speed = 0.0
            if self._is_scarce and pace.mean_s > 0:
                speed = round(_CLASSES_PER_OCTAVE * math.log2(pace.mean_s))
            heapq.heappush(line, (pace.owed, speed, pace.share_s, pace.turn, pace))

    def _change(self, budget: int) -> int:
        self.budget = min(max(budget, self._smallest), self.largest)
        self._num_at_change = self._num_arrived
        return self.budget

    @property
    def _num_since_change(self) -> int:
        """Fragments that have come since the budget was last changed."""
        return self._num_arrived - self._num_at_change

    def _set_scarce(self, is_scarce: bool) -> None:
        if is_scarce is not self._is_scarce:
            self._is_scarce = is_scarce
            self._ready.clear()
            self._new.clear()
            for pace in self._paces.values():
                if pace.turn:
                    self._line_up(pace)

    def _may_try(self, waiting: int) -> bool:
        """Whether a fragment may be risked that can turn out too old."""
        few = self._num_stale <= self._batch + _MAX_TRIED * self._num_arrived
        return few or self.outstanding + waiting < self._batch

    @staticmethod
    def _is_to_be_tried(pace: _Pace) -> bool:
        """Whether a worker has brought too little to tell its speed."""
        return pace.mean_s < 0 or pace.is_first

    def _shows_speed(self, pace: _Pace) -> bool:
        """Whether the fragment that a worker makes is to show its speed."""
        return pace.is_risked or self._is_to_be_tried(pace)

    def _keeps_up(self, pace: _Pace, waiting: int, now: float) -> bool:
        """Whether a fragment begun now would still be young enough when its turn comes."""
        if self._max_lag is None or not self._update_s or pace.is_risked:
            return True
        if self._is_to_be_tried(pace):
            return self._may_try(waiting)
        each_s = max(self._update_s, now - self._last_update)
        # The queue of now says little of that when it comes: at least the learner's hands may be full then.
        lag = (pace.mean_s + _MARGIN * pace.deviation_s) / each_s + min(waiting / self._batch, _IN_HAND)
        if lag <= self._max_lag * self._trust or pace.mean_s <= each_s:  # then a long queue is the budget's affair
            return True
        is_pardoned = pace.num_since_tried >= _PARDON_AFTER
        is_probe_due = self._num_arrived >= self._next_probe
        if pace.owed or not (is_pardoned or is_probe_due) or not self._may_try(waiting):
            return False
        if not is_pardoned:
            self._next_probe = self._num_arrived + _PROBE_EVERY
        pace.is_risked = True
        return True
