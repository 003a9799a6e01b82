"""Leases: permission for a worker to send a number of fragments, sampled at a minimum policy
version.

On-policy algorithms *deal* exactly one train batch to the live workers. Streaming algorithms
*stream*: each worker has one lease, which the learner raises as far as the budget of the whole run
allows (`pacing`). The learner keeps a `LeaseBook`, a worker its `WorkerLeases`. A Lease message
states the total ever granted under its id, so repeating it after a reconnect is harmless.

Leases have a timeout. A worker is *overdue* if it sends nothing for that long while the others keep
sending. The fragments it owes are leased to the others, and it gets no further lease until it sends
one.
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
"""Factor: a worker may take this many times as long for a fragment as the slowest other worker's
newest one took."""
_FIRST_PATIENCE = 24
"""Factor on the timeout while no worker sends anything and some workers have no lease yet."""


class Grant(NamedTuple):
    """A lease and the slot of its worker."""

    slot: int
    lease: Lease


@dataclass(slots=True)
class _Open:
    """A lease that is not used up, or that can be raised again."""

    slot: int
    lease_id: int
    total: int
    remaining: int
    min_version: int
    oldest_min_version: int
    deal: bool

    def grant(self) -> Grant:
        return Grant(self.slot, Lease(self.lease_id, self.total, self.min_version))


@dataclass(slots=True)
class _Holder:
    """A slot's worker and its leases.

    Attributes:
        leases: open leases by id.
        stream: the lease that is raised while the run streams.
        since: time of its newest fragment, or of the first lease after it owed nothing, whichever
            is later.
        fragment_s: seconds its newest fragment took, -1 before the first.
        is_overdue: True while the learner does not wait for the fragments it owes.
    """

    leases: dict[int, _Open] = field(default_factory=dict)
    stream: _Open | None = None
    since: float = 0.0
    fragment_s: float = -1.0
    is_overdue: bool = False

    @property
    def owed(self) -> int:
        """Fragments leased to this worker and not received yet."""
        return sum(lease.remaining for lease in self.leases.values())


class LeaseBook:
    """The learner's leases: granted, used, and passed to other workers when one is lost or overdue.

    The book has no clock: ``now`` is any monotonic time in seconds.

    Args:
        first_id: id of the first lease; ids increase from there and are never reused.

    Attributes:
        pacing: the budget of a run that streams; None otherwise.
        held: fragments of the current deal that no worker has.
    """

    def __init__(self, first_id: int = 1) -> None:
        self.pacing: Pacing | None = None
        self.unassigned = 0
        self._next_id = first_id
        self._holders: dict[int, _Holder] = {}
        self._deal_version = -1

    def outstanding(self, slot: int | None = None) -> int:
        """Return the number of fragments leased and not received yet, for one slot or for all."""
        if slot is None:
            return sum(holder.owed for holder in self._holders.values())
        return self._holders[slot].owed if slot in self._holders else 0

    def join(self, slot: int) -> None:
        """Open the account of a worker that has joined."""
        self._holders[slot] = _Holder()
        if self.pacing is not None:
            self.pacing.join(slot)

    def begin_streaming(self, pacing: Pacing) -> None:
        """Grant leases through `stream` from now on."""
        self.pacing = pacing
        for slot in self._holders:
            pacing.join(slot)

    def deal(self, version: int, fragments: int, now: float) -> list[Grant]:
        """Lease one train batch: ``fragments`` in total, at ``version`` or newer.

        The shares are contiguous in slot order and differ by at most one; the first slots get the
        larger ones. Without workers, all fragments are held until `redeal`. The previous deal is no
        longer tracked, even if it is unfinished: its leased fragments can still arrive, its held
        ones are forgotten.
        """
        for holder in self._holders.values():
            for lease in holder.leases.values():
                lease.deal = False
        self.unassigned = fragments
        self._deal_version = version
        return self.redeal(now)

    def redeal(self, now: float) -> list[Grant]:
        """Lease the held fragments of the current deal; overdue workers get some only if there are
        no others.
        """
        if not self.unassigned or not self._holders:
            return []
        slots = sorted(slot for slot, holder in self._holders.items() if not holder.is_overdue)
        slots = slots or sorted(self._holders)
        share, larger = divmod(self.unassigned, len(slots))
        self.unassigned = 0
        shares = [share + (position < larger) for position in range(len(slots))]
        return [
            self.grant(slot, fragments, self._deal_version, now, deal=True)
            for slot, fragments in zip(slots, shares, strict=True)
            if fragments
        ]

    def grant(
        self, slot: int, fragments: int, min_version: int, now: float, *, deal: bool = False
    ) -> Grant:
        """Grant a new lease, as part of the current deal or independent of any deal."""
        if fragments < 1:
            raise InternalError(f"a lease of {fragments} fragments")
        holder = self._holders[slot]
        if not holder.owed:
            holder.since = now
        lease = _Open(
            slot=slot,
            lease_id=self._next_id,
            total=fragments,
            remaining=fragments,
            min_version=min_version,
            oldest_min_version=min_version,
            deal=deal,
        )
        holder.leases[self._next_id] = lease
        self._next_id += 1
        return lease.grant()

    def stream(self, waiting: int, min_version: int, now: float) -> list[Grant]:
        """Raise streaming leases as far as the budget allows; ``waiting`` fragments are queued or
        in use.
        """
        if self.pacing is None:
            raise InternalError("leases are streamed without a budget")
        return [
            self.extend(slot, fragments, min_version, now)
            for slot, fragments in Counter(self.pacing.next_leases(waiting, now)).items()
        ]

    def extend(self, slot: int, fragments: int, min_version: int, now: float) -> Grant:
        """Raise the streaming lease of a slot by ``fragments``."""
        holder = self._holders[slot]
        lease = holder.stream
        if lease is None:
            grant = self.grant(slot, fragments, min_version, now)
            holder.stream = holder.leases[grant.lease.lease_id]
            return grant
        if not holder.owed:
            holder.since = now
        lease.total += fragments
        lease.remaining += fragments
        lease.min_version = max(lease.min_version, min_version)
        return lease.grant()

    def use(self, slot: int, lease_id: int, first_version: int, now: float) -> str:
        """Count one received fragment; return "" or, if its lease does not cover it, the reason in
        plain words.
        """
        holder = self._holders[slot]
        lease = holder.leases.get(lease_id)
        if lease is None or lease.remaining <= 0:
            return f"a fragment outside of its leases (lease {lease_id})"
        if first_version < lease.oldest_min_version:
            return (
                f"a fragment of policy version {first_version} under a lease for"
                f" {lease.oldest_min_version} or newer"
            )
        lease.remaining -= 1
        is_streamed = lease is holder.stream
        if self.pacing is not None and is_streamed:
            self.pacing.arrived(slot, holder.since, now)
        holder.fragment_s = now - holder.since
        holder.since = now
        holder.is_overdue = False
        if not lease.remaining and not is_streamed:
            del holder.leases[lease_id]
        return ""

    def take_overdue(self, timeout_s: float, now: float) -> list[LeaseOverdue]:
        """Return the workers that have become overdue, each one once, and hold their share of the
        current deal.

        A worker is overdue if it has sent nothing for ``timeout_s`` seconds and for several times
        as long as the slowest other worker took for its newest fragment. If no other worker sends
        fragments, the wait is much longer, and some worker must be without a lease.
        """
        late = [
            (slot, holder)
            for slot, holder in self._holders.items()
            if now - holder.since > timeout_s and not holder.is_overdue and holder.owed
        ]
        overdue: list[LeaseOverdue] = []
        if not late:
            return overdue
        live = (holder for holder in self._holders.values() if not holder.is_overdue)
        slow = nlargest(len(late) + 1, live, key=lambda holder: holder.fragment_s)[::-1]
        for slot, holder in late:
            waited_s = now - holder.since
            while slow[-1].is_overdue:
                slow.pop()
            rest = (peer for peer in reversed(slow) if peer is not holder and not peer.is_overdue)
            slowest_s = next(rest, _Holder()).fragment_s
            if slowest_s >= 0:
                is_overdue = waited_s > _PATIENCE * slowest_s
            else:
                is_overdue = self._may_pass_over(waited_s, timeout_s)
            if is_overdue:
                overdue.append(LeaseOverdue(slot, holder.owed, waited_s))
                self.retire(slot)
        return overdue

    def retire(self, slot: int) -> bool:
        """Stop waiting for the fragments a worker owes, which can still arrive; return False if we
        had stopped.
        """
        holder = self._holders[slot]
        if holder.is_overdue:
            return False
        holder.is_overdue = True
        for lease in holder.leases.values():
            if lease.deal:
                self.unassigned += lease.remaining
                lease.deal = False
        if self.pacing is not None:
            self.pacing.write_off(slot)
        return True

    def forgive(self, seconds: float) -> None:
        """Extend all deadlines by the time in which the learner itself stood still."""
        for holder in self._holders.values():
            holder.since += seconds

    def outstanding_leases(self, slot: int) -> list[Lease]:
        """Return the leases of a slot that have fragments left, to repeat after a reconnect."""
        return [
            lease.grant().lease for lease in self._holders[slot].leases.values() if lease.remaining
        ]

    def drop_slot(self, slot: int) -> int:
        """End all leases of a lost worker, hold its part of the current deal, and return the
        fragments it owed.
        """
        holder = self._holders.pop(slot)
        self.unassigned += sum(lease.remaining for lease in holder.leases.values() if lease.deal)
        if self.pacing is not None:
            self.pacing.leave(slot)
        return holder.owed

    def _may_pass_over(self, waited_s: float, timeout_s: float) -> bool:
        """Return whether a worker counts as overdue although no other sends: some workers wait for
        a lease.
        """
        return waited_s > _FIRST_PATIENCE * timeout_s and any(
            not holder.is_overdue and not holder.owed for holder in self._holders.values()
        )


@dataclass(slots=True)
class _Usage:
    lease: Lease
    begun: int = 0
    open: int = 0


class WorkerLeases:
    """A worker's leases: the fragments that it can begin now, and those that it has begun."""

    def __init__(self) -> None:
        self._leases: dict[int, _Usage] = {}

    def add(self, lease: Lease) -> bool:
        """Add or raise a lease; return False if the message contains nothing new."""
        usage = self._leases.get(lease.lease_id)
        if usage is None:
            self._forget_exhausted()
            self._leases[lease.lease_id] = _Usage(lease)
            return True
        if (
            lease.fragments <= usage.lease.fragments
            and lease.min_version <= usage.lease.min_version
        ):
            return False
        fragments = max(lease.fragments, usage.lease.fragments)
        usage.lease = Lease(
            lease.lease_id, fragments, max(lease.min_version, usage.lease.min_version)
        )
        return True

    def available(self, version: int) -> int:
        """Return the number of fragments that can begin with a policy of this version."""
        return sum(
            usage.lease.fragments - usage.begun
            for usage in self._leases.values()
            if usage.lease.min_version <= version
        )

    def begin(self, version: int) -> int | None:
        """Begin a fragment under the oldest lease that allows it; return the lease id, or None if
        none does.
        """
        for lease_id, usage in self._leases.items():
            if usage.begun < usage.lease.fragments and usage.lease.min_version <= version:
                usage.begun += 1
                usage.open += 1
                return lease_id
        return None

    def finish(self, lease_id: int) -> bool:
        """End a fragment that was begun; return False if it does not belong to a lease still
        held.
        """
        usage = self._leases.get(lease_id)
        if usage is None or not usage.open:
            return False
        usage.open -= 1
        return True

    def give_back(self, lease_id: int) -> bool:
        """End a fragment without a result, so that it can be begun again; return False as `finish`
        does.
        """
        if not self.finish(lease_id):
            return False
        self._leases[lease_id].begun -= 1
        return True

    def version_needed(self) -> int | None:
        """Return the lowest version that would allow a fragment, or None if no lease is left."""
        return min(
            (
                usage.lease.min_version
                for usage in self._leases.values()
                if usage.begun < usage.lease.fragments
            ),
            default=None,
        )

    @property
    def begun(self) -> int:
        """Fragments begun and not finished."""
        return sum(usage.open for usage in self._leases.values())

    def clear(self) -> None:
        """Forget every lease."""
        self._leases.clear()

    def _forget_exhausted(self) -> None:
        if len(self._leases) < _KEPT_EXHAUSTED:
            return
        for lease_id, usage in list(self._leases.items()):
            if usage.begun >= usage.lease.fragments and not usage.open:
                del self._leases[lease_id]
            if len(self._leases) < _KEPT_EXHAUSTED:
                return
