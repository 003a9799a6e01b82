"""Leave to sample: who may send how many fragments at which policy version.

On-policy algorithms *deal* exactly one train batch over the live workers; streaming ones *stream*: each worker has one
lease that is raised as the budget of the whole run allows (`pacing`). The learner keeps a `LeaseBook`, a worker its
`WorkerLeases`. A Lease message states the total ever granted under its id, so repeating it after a reconnect is
harmless.

A lease has a time. Where a worker has brought nothing for so long, while others bring theirs, it is *overdue*: what it
owes is leased to the others, and it gets no other lease until it brings one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

from aiorl.errors import InternalError
from aiorl.net.protocol.events import LeaseOverdue
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.wire.messages import Lease

_KEPT_EXHAUSTED = 256
_PATIENCE = 4.0
"""A worker may take so many times as long for a fragment as the slowest of the others did for its newest one."""
_FIRST_PATIENCE = 24
"""Where nobody brings anything and some have not been asked, those who were have so many times as long."""


class Grant(NamedTuple):
    """A lease and whom it is for."""

    slot: int
    lease: Lease


@dataclass(slots=True)
class _Open:
    """A lease that is not used up, or may be raised again."""

    slot: int
    lease_id: int
    total: int
    left: int
    min_version: int
    oldest_min_version: int
    deal: bool

    def grant(self) -> Grant:
        return Grant(self.slot, Lease(self.lease_id, self.total, self.min_version))


@dataclass(slots=True)
class _Holder:
    """A slot's worker and its leases.

    Attributes:
        leases: its open leases by id.
        stream: the one of them that is raised while the run streams.
        since: when it was given a lease after it owed nothing, or brought a fragment, whichever was later.
        fragment_s: seconds it took for its newest fragment, -1 before the first.
        is_overdue: what it owes is not waited for.
    """

    leases: dict[int, _Open] = field(default_factory=dict)
    stream: _Open | None = None
    since: float = 0.0
    fragment_s: float = -1.0
    is_overdue: bool = False

    @property
    def owed(self) -> int:
        """Fragments leased to it and not received yet."""
        return sum(lease.left for lease in self.leases.values())


class LeaseBook:
    """The learner's leases: granted, used, and given to others when a worker is lost or overdue.

    It has no clock: ``now`` is any monotonic time in seconds.

    Args:
        first_id: id of the first lease; ids rise from there and are never used again.

    Attributes:
        pacing: the budget of a run that streams; None otherwise.
        held: fragments of the current deal that nobody has.
    """

    def __init__(self, first_id: int = 1) -> None:
        self.pacing: Pacing | None = None
        self.held = 0
        self._next_id = first_id
        self._holders: dict[int, _Holder] = {}
        self._deal_version = -1

    def outstanding(self, slot: int | None = None) -> int:
        """Return the fragments leased and not received yet, of one slot or of all."""
        if slot is None:
            return sum(holder.owed for holder in self._holders.values())
        return self._holders[slot].owed if slot in self._holders else 0

    def deal_outstanding(self) -> int:
        """Return the fragments of the current deal not received yet, the held ones included."""
        leases = (lease for holder in self._holders.values() for lease in holder.leases.values())
        return self.held + sum(lease.left for lease in leases if lease.deal)

    def join(self, slot: int) -> None:
        """Open the account of a worker that is there now."""
        self._holders[slot] = _Holder()
        if self.pacing is not None:
            self.pacing.join(slot)

    def begin_streaming(self, pacing: Pacing) -> None:
        """Grant leases by `stream` from now on."""
        self.pacing = pacing
        for slot in self._holders:
            pacing.join(slot)

    def deal(self, version: int, fragments: int, now: float) -> list[Grant]:
        """Lease one train batch: ``fragments`` in all, at ``version`` or newer.

        The shares are contiguous in slot order and differ by at most one, the first slots having the larger ones.
        Without workers all of it is held until `redeal`. An unfinished deal before it is no longer looked after: what
        is still out of it may come in, what was held is forgotten.
        """
        for holder in self._holders.values():
            for lease in holder.leases.values():
                lease.deal = False
        self.held = fragments
        self._deal_version = version
        return self.redeal(now)

    def redeal(self, now: float) -> list[Grant]:
        """Lease the held fragments of the current deal, to workers that are overdue only if there are no others."""
        slots = sorted(slot for slot, holder in self._holders.items() if not holder.is_overdue)
        slots = slots or sorted(self._holders)
        if not slots:
            return []
        share, larger = divmod(self.held, len(slots))
        self.held = 0
        shares = [share + (position < larger) for position in range(len(slots))]
        return [
            self.grant(slot, fragments, self._deal_version, now, deal=True)
            for slot, fragments in zip(slots, shares, strict=True)
            if fragments
        ]

    def grant(self, slot: int, fragments: int, min_version: int, now: float, *, deal: bool = False) -> Grant:
        """Grant a lease of its own, as a part of the current deal or apart from any."""
        if fragments < 1:
            raise InternalError(f"a lease of {fragments} fragments")
        holder = self._holders[slot]
        if not holder.owed:
            holder.since = now
        lease = _Open(slot, self._next_id, fragments, fragments, min_version, min_version, deal)
        holder.leases[self._next_id] = lease
        self._next_id += 1
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
        holder = self._holders[slot]
        lease = holder.stream
        if lease is None:
            grant = self.grant(slot, fragments, min_version, now)
            holder.stream = holder.leases[grant.lease.lease_id]
            return grant
        if not holder.owed:
            holder.since = now
        lease.total += fragments
        lease.left += fragments
        lease.min_version = max(lease.min_version, min_version)
        return lease.grant()

    def use(self, slot: int, lease_id: int, first_version: int, now: float) -> str:
        """Count one fragment received; returns the reason in plain words if its lease does not cover it, else ""."""
        holder = self._holders[slot]
        lease = holder.leases.get(lease_id)
        if lease is None or lease.left <= 0:
            return f"a fragment outside of its leases (lease {lease_id})"
        if first_version < lease.oldest_min_version:
            return f"a fragment of policy version {first_version} under a lease for {lease.oldest_min_version} or newer"
        lease.left -= 1
        is_streamed = lease is holder.stream
        if self.pacing is not None and is_streamed:
            self.pacing.arrived(slot, holder.since, now)
        holder.fragment_s, holder.since, holder.is_overdue = now - holder.since, now, False
        if not lease.left and not is_streamed:
            del holder.leases[lease_id]
        return ""

    def take_overdue(self, timeout_s: float, now: float) -> list[LeaseOverdue]:
        """Return the workers that have become overdue, each once; what they owe of the current deal is held.

        A worker is overdue when it has brought nothing for ``timeout_s`` seconds and for several times as long as the
        slowest of the others took for its newest fragment. Where no others bring theirs, that takes much longer, and
        there must be others that owe nothing.
        """
        late = [
            (slot, holder)
            for slot, holder in self._holders.items()
            if now - holder.since > timeout_s and not holder.is_overdue and holder.owed
        ]
        taken: list[LeaseOverdue] = []
        slowest = self._slowest_two() if late else []
        for slot, holder in late:
            waited_s = now - holder.since
            others_s = [fragment_s for fragment_s, number in slowest if number != slot]
            if waited_s > _PATIENCE * others_s[0] if others_s else self._may_pass_over(waited_s, timeout_s):
                taken.append(LeaseOverdue(slot, holder.owed, waited_s))
                self.retire(slot)
                slowest = self._slowest_two()
        return taken

    def retire(self, slot: int) -> bool:
        """Wait no longer for what a worker owes, though it may still come; False if that is so already."""
        holder = self._holders[slot]
        if holder.is_overdue:
            return False
        holder.is_overdue = True
        for lease in holder.leases.values():
            self.held += lease.left * lease.deal
            lease.deal = False
        if self.pacing is not None:
            self.pacing.write_off(slot)
        return True

    def forgive(self, seconds: float) -> None:
        """Make nobody late for time in which the learner stood still."""
        for holder in self._holders.values():
            holder.since += seconds

    def outstanding_leases(self, slot: int) -> list[Lease]:
        """Return the leases of a slot that have fragments left, to be said again after a reconnect."""
        return [lease.grant().lease for lease in self._holders[slot].leases.values() if lease.left]

    def drop_slot(self, slot: int) -> int:
        """End all leases of a lost worker; its part of the current deal is held. Returns the number still out."""
        holder = self._holders.pop(slot)
        self.held += sum(lease.left for lease in holder.leases.values() if lease.deal)
        if self.pacing is not None:
            self.pacing.leave(slot)
        return holder.owed

    def _may_pass_over(self, waited_s: float, timeout_s: float) -> bool:
        """Return whether a worker that owes may be overdue though nobody brings anything: others wait to be asked."""
        return waited_s > _FIRST_PATIENCE * timeout_s and any(
            not holder.is_overdue and not holder.owed for holder in self._holders.values()
        )

    def _slowest_two(self) -> list[tuple[float, int]]:
        """Return fragment time and slot of the two slowest workers that bring theirs, the slowest first."""
        times = (
            (holder.fragment_s, slot)
            for slot, holder in self._holders.items()
            if holder.fragment_s >= 0 and not holder.is_overdue
        )
        return nlargest(2, times)


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
