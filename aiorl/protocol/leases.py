"""Leave to sample: who may send how many fragments at which policy version.

On-policy algorithms *deal* exactly one train batch over the live workers; streaming ones *stream*: each worker has one
lease that is raised as the budget of the whole run allows (`pacing`). The learner keeps a `LeaseBook`, a worker its
`WorkerLeases`. A Lease message states the total ever granted under its id, so repeating it after a reconnect is
harmless.

A lease has a time. Where a worker has brought nothing for so long, while others bring theirs, it is *overdue*: what it
owes is leased to the others, and it gets no other lease until it brings one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from aiorl.errors import InternalError
from aiorl.protocol.events import LeaseOverdue
from aiorl.protocol.pacing import Pacing
from aiorl.wire.messages import Lease

__all__ = ["Grant", "LeaseBook", "WorkerLeases"]

_KEPT_EXHAUSTED = 256
_PATIENCE = 4.0
"""A worker may take so many times as long for a fragment as the slowest of the others did for its newest one."""


class Grant(NamedTuple):
    """A lease and whom it is for."""

    slot: int
    lease: Lease


@dataclass(slots=True)
class _Holder:
    """What a slot's worker has done with its leases.

    Attributes:
        since: when it was given a lease after it owed nothing, or brought a fragment, whichever was later.
        fragment_s: seconds it took for its newest fragment, -1 before the first.
        is_overdue: whether what it owes is not waited for.
    """

    since: float = 0.0
    fragment_s: float = -1.0
    is_overdue: bool = False


@dataclass(slots=True)
class _Open:
    slot: int
    lease_id: int
    total: int
    left: int
    min_version: int
    oldest_min_version: int
    deal: bool
    streaming: bool

    def grant(self) -> Grant:
        return Grant(self.slot, Lease(self.lease_id, self.total, self.min_version))


class LeaseBook:
    """The learner's leases: granted, used, and given to others when a worker is lost or overdue.

    It has no clock: ``now`` is any monotonic time in seconds.

    Args:
        first_id: id of the first lease; ids rise from there and are never used again.

    Attributes:
        pacing: the budget of a run that streams; None otherwise.
    """

    def __init__(self, first_id: int = 1) -> None:
        self.pacing: Pacing | None = None
        self._next_id = first_id
        self._open: dict[int, _Open] = {}
        self._by_slot: dict[int, dict[int, _Open]] = {}
        self._streaming: dict[int, _Open] = {}
        self._holders: dict[int, _Holder] = {}
        self._held = 0
        self._deal_version = -1

    @property
    def held(self) -> int:
        """Fragments of the current deal that nobody has."""
        return self._held

    def outstanding(self, slot: int | None = None) -> int:
        """Fragments leased and not received yet, of one slot or of all."""
        leases = self._open.values() if slot is None else self._by_slot.get(slot, {}).values()
        return sum(lease.left for lease in leases)

    def deal_outstanding(self) -> int:
        """Fragments of the current deal not received yet, the held ones included."""
        return self._held + sum(lease.left for lease in self._open.values() if lease.deal)

    def join(self, slot: int) -> None:
        """A worker is there."""
        self._holders[slot] = _Holder()
        if self.pacing is not None:
            self.pacing.join(slot)

    def set_pacing(self, pacing: Pacing) -> None:
        """From now on leases are granted by `stream`."""
        self.pacing = pacing
        for slot in self._holders:
            pacing.join(slot)

    def deal(self, version: int, fragments: int, now: float) -> list[Grant]:
        """Lease one train batch: ``fragments`` in all, at ``version`` or newer.

        The shares are contiguous in slot order and differ by at most one, the first slots having the larger
        ones. Without workers all of it is held until `redeal`. An unfinished deal before it is no longer
        looked after: what is still out of it may come in, what was held is forgotten.
        """
        for lease in self._open.values():
            lease.deal = False
        self._held = fragments
        self._deal_version = version
        return self.redeal(now)

    def hold(self, fragments: int) -> None:
        """Fragments of the current deal are wanted again; `redeal` leases them."""
        self._held += fragments

    def redeal(self, now: float) -> list[Grant]:
        """Lease the held fragments of the current deal, in shares as `deal` makes them; overdue workers come last."""
        order = sorted(slot for slot, holder in self._holders.items() if not holder.is_overdue) or sorted(self._holders)
        if not order or not self._held:
            return []
        share, larger = divmod(self._held, len(order))
        self._held = 0
        grants = []
        for position, slot in enumerate(order):
            fragments = share + (position < larger)
            if fragments:
                grants.append(self.grant(slot, fragments, self._deal_version, now, deal=True))
        return grants

    def grant(self, slot: int, fragments: int, min_version: int, now: float, *, deal: bool = False) -> Grant:
        """A lease of its own, as a part of the current deal or apart from any."""
        if fragments < 1:
            raise InternalError(f"a lease of {fragments} fragments")
        self._begin_to_owe(slot, now)
        lease = _Open(slot, self._next_id, fragments, fragments, min_version, min_version, deal, streaming=False)
        self._next_id += 1
        self._open[lease.lease_id] = lease
        self._by_slot.setdefault(slot, {})[lease.lease_id] = lease
        return lease.grant()

    def stream(self, waiting: int, min_version: int, now: float) -> list[Grant]:
        """Raise streaming leases as far as the budget goes, ``waiting`` fragments being queued or in use."""
        if self.pacing is None:
            raise InternalError("leases are streamed without a budget")
        return [
            self.extend(slot, fragments, min_version, now)
            for slot, fragments in Counter(self.pacing.next_leases(waiting, now)).items()
        ]

    def extend(self, slot: int, fragments: int, min_version: int, now: float) -> Grant:
        """Raise a slot's streaming lease by so many fragments."""
        lease = self._streaming.get(slot)
        if lease is None:
            grant = self.grant(slot, fragments, min_version, now)
            lease = self._open[grant.lease.lease_id]
            lease.streaming = True
            self._streaming[slot] = lease
            return grant
        self._begin_to_owe(slot, now)
        lease.total += fragments
        lease.left += fragments
        lease.min_version = max(lease.min_version, min_version)
        return lease.grant()

    def use(self, slot: int, lease_id: int, first_version: int, now: float) -> str:
        """Count one fragment received; the reason in plain words if its lease does not cover it, else ""."""
        lease = self._open.get(lease_id)
        if lease is None or lease.slot != slot or lease.left <= 0:
            return f"a fragment outside of its leases (lease {lease_id})"
        if first_version < lease.oldest_min_version:
            return f"a fragment of policy version {first_version} under a lease for {lease.oldest_min_version} or newer"
        lease.left -= 1
        holder = self._holders[slot]
        holder.fragment_s = now - holder.since
        if self.pacing is not None and lease.streaming:
            self.pacing.arrived(slot, holder.since, now)
        holder.since = now
        holder.is_overdue = False
        if not lease.left and not lease.streaming:
            self._close(lease)
        return ""

    def take_overdue(self, timeout_s: float, now: float) -> list[LeaseOverdue]:
        """Workers that have become overdue, each told once; what they owe of the current deal is held.

        A worker is overdue when it has brought nothing for ``timeout_s`` seconds and for several times as long as the
        slowest of the others took for its newest fragment. Where there are no others that bring theirs, nobody is.
        """
        taken: list[LeaseOverdue] = []
        slowest: list[tuple[float, int]] | None = None
        for slot, holder in self._holders.items():
            waited_s = now - holder.since
            if waited_s <= timeout_s or holder.is_overdue or not self._owes(slot):
                continue
            if slowest is None:
                slowest = self._slowest_two()
            others_s = [fragment_s for fragment_s, number in slowest if number != slot]
            if others_s and waited_s > _PATIENCE * others_s[0]:
                taken.append(LeaseOverdue(slot, self.outstanding(slot), waited_s))
                self._write_off(slot)
                slowest = None
        return taken

    def retire(self, slot: int) -> bool:
        """Wait for nothing more of a worker that has nothing left to bring; False if that is so already."""
        holder = self._holders[slot]
        if holder.is_overdue:
            return False
        self._write_off(slot)
        return True

    def forgive(self, seconds: float) -> None:
        """It was the learner that stood still for so long: nobody is late for it."""
        for holder in self._holders.values():
            holder.since += seconds

    def outstanding_leases(self, slot: int) -> list[Lease]:
        """The leases of a slot that have fragments left, to be said again after a reconnect."""
        return [lease.grant().lease for lease in self._by_slot.get(slot, {}).values() if lease.left]

    def drop_slot(self, slot: int) -> int:
        """End all leases of a lost worker; its part of the current deal is held. Returns what was out."""
        gone = 0
        self._holders.pop(slot, None)
        if self.pacing is not None:
            self.pacing.leave(slot)
        for lease in list(self._by_slot.get(slot, {}).values()):
            gone += lease.left
            if lease.deal:
                self._held += lease.left
            self._close(lease)
        self._streaming.pop(slot, None)
        return gone

    def check_valid(self) -> None:
        """Raise InternalError if a lease is overdrawn or the two indices differ."""
        by_slot = [lease for leases in self._by_slot.values() for lease in leases.values()]
        if sorted(lease.lease_id for lease in by_slot) != sorted(self._open):
            raise InternalError("leases by id and by slot differ")
        for lease in by_slot:
            if not 0 <= lease.left <= lease.total or (lease.left == 0 and not lease.streaming):
                raise InternalError(f"a lease of {lease.total} fragments has {lease.left} left")
        if self.pacing is not None:
            self.pacing.check_valid()

    def _slowest_two(self) -> list[tuple[float, int]]:
        """Time for the newest fragment and slot of the two slowest workers that bring theirs, the slowest first."""
        return heapq.nlargest(
            2,
            (
                (holder.fragment_s, slot)
                for slot, holder in self._holders.items()
                if holder.fragment_s >= 0 and not holder.is_overdue
            ),
        )

    def _owes(self, slot: int) -> bool:
        return any(lease.left for lease in self._by_slot.get(slot, {}).values())

    def _begin_to_owe(self, slot: int, now: float) -> None:
        """Note the time, if a worker that is given a lease owed nothing before."""
        if not self._owes(slot):
            self._holders[slot].since = now

    def _write_off(self, slot: int) -> None:
        """Wait no longer for what a worker owes; it may still come."""
        self._holders[slot].is_overdue = True
        for lease in self._by_slot.get(slot, {}).values():
            if lease.deal:
                self._held += lease.left
                lease.deal = False
        if self.pacing is not None:
            self.pacing.write_off(slot)

    def _close(self, lease: _Open) -> None:
        del self._open[lease.lease_id]
        leases = self._by_slot[lease.slot]
        del leases[lease.lease_id]
        if not leases:
            del self._by_slot[lease.slot]


@dataclass(slots=True)
class _Held:
    lease: Lease
    begun: int = 0
    open: int = 0


class WorkerLeases:
    """A worker's leases: what it may begin now, and what it has begun."""

    def __init__(self) -> None:
        self._leases: dict[int, _Held] = {}

    def add(self, lease: Lease) -> bool:
        """Take a Lease message; False if it says nothing new."""
        held = self._leases.get(lease.lease_id)
        if held is None:
            self._forget_exhausted()
            self._leases[lease.lease_id] = _Held(lease)
            return True
        if lease.fragments <= held.lease.fragments and lease.min_version <= held.lease.min_version:
            return False
        fragments = max(lease.fragments, held.lease.fragments)
        held.lease = Lease(lease.lease_id, fragments, max(lease.min_version, held.lease.min_version))
        return True

    def available(self, version: int) -> int:
        """Fragments that may be begun with a policy of this version."""
        return sum(
            held.lease.fragments - held.begun for held in self._leases.values() if held.lease.min_version <= version
        )

    def begin(self, version: int) -> int | None:
        """Begin a fragment under the oldest lease that allows it; its id, or None if none does."""
        for lease_id, held in self._leases.items():
            if held.begun < held.lease.fragments and held.lease.min_version <= version:
                held.begun += 1
                held.open += 1
                return lease_id
        return None

    def finish(self, lease_id: int) -> bool:
        """End a fragment that was begun; False if it was not begun under a lease still held."""
        held = self._leases.get(lease_id)
        if held is None or not held.open:
            return False
        held.open -= 1
        return True

    def give_back(self, lease_id: int) -> bool:
        """End a fragment without result: it may be begun anew."""
        if not self.finish(lease_id):
            return False
        self._leases[lease_id].begun -= 1
        return True

    def version_needed(self) -> int | None:
        """The lowest version that would allow a fragment, None if there is no lease left at all."""
        return min(
            (held.lease.min_version for held in self._leases.values() if held.begun < held.lease.fragments),
            default=None,
        )

    @property
    def begun(self) -> int:
        """Fragments begun and not finished."""
        return sum(held.open for held in self._leases.values())

    def clear(self) -> None:
        """Forget every lease."""
        self._leases.clear()

    def _forget_exhausted(self) -> None:
        if len(self._leases) < _KEPT_EXHAUSTED:
            return
        for lease_id, held in list(self._leases.items()):
            if held.begun >= held.lease.fragments and not held.open:
                del self._leases[lease_id]
            if len(self._leases) < _KEPT_EXHAUSTED:
                return
