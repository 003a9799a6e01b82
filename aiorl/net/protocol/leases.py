"""Leave to sample: who may send how many fragments at which policy version.

On-policy algorithms *deal* exactly one train batch over the live workers; streaming ones *stream*: each worker has one
lease that is raised as the budget of the whole run allows (`pacing`). The learner keeps a `LeaseBook`, a worker its
`WorkerLeases`. A Lease message states the total ever granted under its id, so repeating it after a reconnect is
harmless.

A lease has a time. Where a worker has brought nothing for so long, while others bring theirs, it is *overdue*: what it
owes is leased to the others, and it gets no other lease until it brings one.

Workers that have brought nothing yet may never do so. Beside others they get half of a deal at most. Where workers of
one source have held deals up too often, those of it that have brought nothing since are *doubted*: no deal waits for
them. Each is leased one fragment apart, which counts if it comes in time; who has brought it is doubted no more once
the source has been at peace for long enough.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from aiorl.errors import InternalError
from aiorl.net.protocol.events import LeaseOverdue
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.protocol.rates import Allowances
from aiorl.net.protocol.roster import MAX_REMEMBERED
from aiorl.net.wire.messages import Lease

__all__ = ["Grant", "LeaseBook", "WorkerLeases"]

_KEPT_EXHAUSTED = 256
_PATIENCE = 4.0
"""A worker may take so many times as long for a fragment as the slowest of the others did for its newest one."""
_FIRST_PATIENCE = 24
"""Where nobody brings anything and some have not been asked, those who were have so many times as long."""
_HOLDUPS_AT_ONCE, _HOLDUPS_PER_S = 16, 1 / 30
"""How often workers of one source may hold a deal up, whatever they register as, before no deal waits for new ones."""


class Grant(NamedTuple):
    """A lease and whom it is for."""

    slot: int
    lease: Lease


@dataclass(slots=True)
class _Holder:
    """What a slot's worker has done with its leases.

    Attributes:
        source: where it comes from, its key or else its host.
        since: when it was given a lease after it owed nothing, or brought a fragment, whichever was later.
        fragment_s: seconds it took for its newest fragment, -1 before the first.
        is_overdue: whether what it owes is not waited for.
        has_brought: whether it has brought a fragment since it registered or was overdue.
        is_proven: the same, and its source was trusted then or later.
    """

    source: str = ""
    since: float = 0.0
    fragment_s: float = -1.0
    is_overdue: bool = False
    has_brought: bool = False
    is_proven: bool = False


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
        self._holders: dict[int, _Holder] = {}  # in the order in which they joined
        self._holdups = Allowances(_HOLDUPS_AT_ONCE, _HOLDUPS_PER_S, MAX_REMEMBERED)
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

    def join(self, slot: int, source: str = "") -> None:
        """A worker is there; ``source`` is where it comes from, its key or else its host."""
        self._holders[slot] = _Holder(source)
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
        ones; but workers that have brought nothing yet get half at most where others have. Without workers all of it
        is held until `redeal`. An unfinished deal before it is no longer looked after: what is still out of it may come
        in, what was held is forgotten. Doubted workers are leased one fragment each beside it, half as many at a time.
        """
        for lease in self._open.values():
            lease.deal = False
        self._held = fragments
        self._deal_version = version
        return self.redeal(now) + self._try_doubted(max(1, fragments // 2), now)

    def hold(self, fragments: int) -> None:
        """Fragments of the current deal are wanted again; `redeal` leases them."""
        self._held += fragments

    def redeal(self, now: float) -> list[Grant]:
        """Lease the held fragments of the current deal, in shares as `deal` makes them.

        Overdue workers come last, and doubted ones before them.
        """
        if not self._held or not self._holders:
            return []
        held, self._held = self._held, 0
        proven, new, doubted = self._by_standing(now)
        if proven and new:
            shares = _even_shares(sorted(proven + new), held)
            most = max(1, held // 2)
            if sum(shares.get(slot, 0) for slot in new) > most:
                shares = _even_shares(self._in_turn(new), most) | _even_shares(proven, held - most)
        else:
            tried = [slot for slot in doubted if self._holders[slot].has_brought]
            order = proven or self._in_turn(new or tried or doubted or sorted(self._holders))
            shares = _even_shares(order, held)
        return [
            self.grant(slot, shares[slot], self._deal_version, now, deal=True)
            for slot in sorted(shares)
            if shares[slot]
        ]

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
        if not holder.is_proven:
            holder.has_brought, holder.is_proven = True, self._holdups.is_left(holder.source, now)
        if not lease.left and not lease.streaming:
            self._close(lease)
        return ""

    def take_overdue(self, timeout_s: float, now: float) -> list[LeaseOverdue]:
        """Workers that have become overdue, each told once; what they owe of the current deal is held.

        A worker is overdue when it has brought nothing for ``timeout_s`` seconds and for several times as long as the
        slowest of the others took for its newest fragment. Where there are no others that bring theirs, that takes much
        longer, and there must be others that owe nothing.
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
            if waited_s > _PATIENCE * others_s[0] if others_s else self._may_pass_over(waited_s, timeout_s):
                taken.append(LeaseOverdue(slot, self.outstanding(slot), waited_s))
                self._note_holdup(slot, holder, now)
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

    def drop_slot(self, slot: int, now: float) -> int:
        """End all leases of a lost worker; its part of the current deal is held. Returns what was out."""
        gone = 0
        holder = self._holders.pop(slot, None)
        if holder is not None:
            self._note_holdup(slot, holder, now)
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

    def _by_standing(self, now: float) -> tuple[list[int], list[int], list[int]]:
        """Slots of those that are not overdue: proven ones, new ones, and doubted ones; each rising."""
        proven: list[int] = []
        new: list[int] = []
        doubted: list[int] = []
        for slot, holder in sorted(self._holders.items()):
            if not holder.is_overdue:
                is_trusted = holder.is_proven or self._holdups.is_left(holder.source, now)
                holder.is_proven = is_trusted and holder.has_brought
                (proven if holder.is_proven else new if is_trusted else doubted).append(slot)
        return proven, new, doubted

    def _in_turn(self, slots: Iterable[int]) -> list[int]:
        """Sources take turns, so that many workers of one do not stand before the first of another."""
        turns: Counter[str] = Counter()
        ranked: list[tuple[int, int]] = []
        for slot in slots:
            source = self._holders[slot].source
            ranked.append((turns[source], slot))
            turns[source] += 1
        return [slot for _, slot in sorted(ranked, key=itemgetter(0))]

    def _try_doubted(self, most: int, now: float) -> list[Grant]:
        """One fragment apart from the deal for each doubted worker, ``most`` at a time, in the order they joined."""
        proven, _, doubted = self._by_standing(now)
        if not proven or not doubted:
            return []
        untried = {slot for slot in doubted if not self._holders[slot].has_brought}
        line = [slot for slot in self._holders if slot in untried and not self._owes(slot)]
        room = most - (len(untried) - len(line))
        return [self.grant(slot, 1, self._deal_version, now) for slot in self._in_turn(line)[: max(0, room)]]

    def _may_pass_over(self, waited_s: float, timeout_s: float) -> bool:
        """Whether a worker that owes may be overdue though nobody has brought anything: others wait to be asked."""
        return waited_s > _FIRST_PATIENCE * timeout_s and any(
            not holder.is_overdue and not self._owes(slot) for slot, holder in self._holders.items()
        )

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

    def _note_holdup(self, slot: int, holder: _Holder, now: float) -> None:
        """A worker will not bring what it owes in time: that is held against its source if a deal waits for it."""
        if any(lease.deal for lease in self._by_slot.get(slot, {}).values()):
            self._holdups.take(holder.source, now)

    def _write_off(self, slot: int) -> None:
        """Wait no longer for what a worker owes; it may still come."""
        holder = self._holders[slot]
        holder.is_overdue, holder.has_brought, holder.is_proven = True, False, False
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


def _even_shares(slots: Sequence[int], fragments: int) -> dict[int, int]:
    """Slot -> its share; they differ by at most one, the first ones having the larger ones."""
    share, larger = divmod(fragments, len(slots))
    return {slot: share + (position < larger) for position, slot in enumerate(slots)}


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
