from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aiorl.errors import InternalError
from aiorl.net.protocol.events import LeaseOverdue
from aiorl.net.protocol.leases import LeaseBook, WorkerLeases
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.wire.messages import Lease


def make(*slots: int, first_id: int = 1) -> LeaseBook:
    book = LeaseBook(first_id)
    for slot in slots:
        book.join(slot)
    return book


def shares(grants: list) -> list[tuple[int, int]]:
    return [(grant.slot, grant.lease.fragments) for grant in grants]


def test_a_deal_is_even_and_the_first_slots_have_the_larger_shares() -> None:
    assert shares(make(5, 1, 2).deal(3, 8, 0.0)) == [(1, 3), (2, 3), (5, 2)]
    assert shares(make(1, 2, 3).deal(3, 2, 0.0)) == [(1, 1), (2, 1)]


@given(st.integers(1, 200), st.sets(st.integers(1, 50), min_size=1))
def test_a_deal_leases_exactly_one_train_batch(fragments: int, slots: set[int]) -> None:
    book = make(*slots)
    grants = book.deal(7, fragments, 0.0)
    assert sum(grant.lease.fragments for grant in grants) == fragments == book.deal_outstanding()
    sizes = [grant.lease.fragments for grant in grants]
    assert max(sizes) - min(sizes) <= 1
    assert [grant.slot for grant in grants] == sorted(slots)[: len(grants)]
    assert all(grant.lease.min_version == 7 for grant in grants)


def test_a_lost_workers_share_goes_to_the_others() -> None:
    book = make(1, 2)
    first, second = book.deal(1, 6, 0.0)
    assert book.use(2, second.lease.lease_id, 1, 0.0) == ""
    assert book.drop_slot(2, 0.0) == 2
    assert book.held == 2
    assert shares(book.redeal(0.0)) == [(1, 2)]
    assert book.outstanding(1) == 5 == book.deal_outstanding()
    assert book.outstanding(2) == 0
    assert first.lease.lease_id in [lease.lease_id for lease in book.outstanding_leases(1)]


def test_a_deal_without_workers_is_held_until_one_joins() -> None:
    book = LeaseBook()
    assert book.deal(1, 4, 0.0) == []
    assert book.redeal(0.0) == []
    book.join(3)
    assert shares(book.redeal(0.0)) == [(3, 4)]
    assert book.held == 0


def test_a_new_deal_forgets_what_the_old_one_held() -> None:
    book = make(1)
    book.deal(1, 4, 0.0)
    book.drop_slot(1, 0.0)
    book.join(2)
    book.deal(2, 3, 0.0)
    book.drop_slot(2, 0.0)
    assert book.held == 3


def test_streaming_raises_one_lease() -> None:
    book = make(1, first_id=10)
    assert book.extend(1, 3, 5, 0.0).lease == Lease(10, 3, 5)
    for _ in range(3):
        assert book.use(1, 10, 5, 0.0) == ""
    assert book.extend(1, 2, 6, 0.0).lease == Lease(10, 5, 6)
    assert book.use(1, 10, 5, 0.0) == "", "begun before the bound was raised"
    book.check_valid()
    assert book.drop_slot(1, 0.0) == 1
    book.join(1)
    assert book.extend(1, 1, 6, 0.0).lease == Lease(11, 1, 6)


def test_fragments_outside_of_a_lease_are_told() -> None:
    book = make(1)
    (grant,) = book.deal(4, 1, 0.0)
    lease_id = grant.lease.lease_id
    assert "outside" in book.use(2, lease_id, 4, 0.0)
    assert "outside" in book.use(1, lease_id + 1, 4, 0.0)
    assert "version 3" in book.use(1, lease_id, 3, 0.0)
    assert book.use(1, lease_id, 4, 0.0) == ""
    assert "outside" in book.use(1, lease_id, 4, 0.0)
    book.check_valid()


def test_a_lease_of_nothing_is_a_bug() -> None:
    with pytest.raises(InternalError):
        make(1).grant(1, 0, 0, 0.0)


def test_a_worker_begins_the_oldest_lease_that_its_version_allows() -> None:
    leases = WorkerLeases()
    leases.add(Lease(1, 1, 5))
    leases.add(Lease(2, 1, 3))
    assert leases.begin(2) is None
    assert leases.version_needed() == 3
    assert leases.available(3) == 1
    assert leases.begin(3) == 2
    assert leases.begin(3) is None
    assert leases.begin(5) == 1
    assert leases.begun == 2
    assert leases.version_needed() is None


def test_the_same_lease_said_twice_grants_nothing_twice() -> None:
    leases = WorkerLeases()
    assert leases.add(Lease(1, 2, 0))
    assert not leases.add(Lease(1, 2, 0))
    assert leases.available(0) == 2
    assert leases.add(Lease(1, 3, 1))
    assert not leases.add(Lease(1, 2, 0))
    assert leases.available(0) == 0
    assert leases.available(1) == 3


def test_an_abandoned_fragment_may_be_begun_anew() -> None:
    leases = WorkerLeases()
    leases.add(Lease(1, 1, 0))
    assert not leases.finish(1), "not begun"
    assert leases.begin(0) == 1
    assert leases.give_back(1)
    assert not leases.give_back(1)
    assert leases.begin(0) == 1
    assert leases.finish(1)
    assert leases.begin(0) is None


def test_exhausted_leases_are_forgotten_in_the_end() -> None:
    leases = WorkerLeases()
    for number in range(1, 5000):
        leases.add(Lease(number, 1, 0))
        assert leases.begin(0) == number
        assert leases.finish(number)
    assert len(leases._leases) <= 256


def test_fragments_that_could_not_be_used_are_leased_once_more() -> None:
    book = make(1)
    (grant,) = book.deal(3, 2, 0.0)
    assert book.use(1, grant.lease.lease_id, 3, 0.0) == ""
    assert book.use(1, grant.lease.lease_id, 3, 0.0) == ""
    assert book.deal_outstanding() == 0
    book.hold(1)
    assert book.deal_outstanding() == 1
    (again,) = book.redeal(0.0)
    assert (again.slot, again.lease.fragments, again.lease.min_version) == (1, 1, 3)
    book.check_valid()


def test_what_a_worker_that_brings_nothing_owes_is_dealt_to_the_others() -> None:
    """It lives, so no heartbeat tells; the others have brought theirs, so it is not the environment that is slow."""
    book = make(1, 2, 3)
    leases = {grant.slot: grant.lease.lease_id for grant in book.deal(1, 6, 0.0)}
    for slot in (1, 2):
        for seconds in (1.0, 2.0):
            assert book.use(slot, leases[slot], 1, seconds) == ""
    assert book.take_overdue(10.0, 9.9) == []
    assert book.take_overdue(10.0, 10.5) == [LeaseOverdue(3, 2, 10.5)]
    again = book.redeal(10.5)
    assert shares(again) == [(1, 1), (2, 1)]
    for slot, lease in again:
        assert book.use(slot, lease.lease_id, 1, 11.0) == ""
    assert book.take_overdue(10.0, 60.0) == [], "told once"
    book.deal(2, 4, 61.0)
    assert book.outstanding(3) == 2, "nothing else is leased to it"
    assert book.use(3, leases[3], 1, 62.0) == "", "it may still come"
    assert {slot for slot, _ in shares(book.deal(3, 6, 63.0))} == {1, 2, 3}
    book.check_valid()


def test_nobody_is_overdue_where_all_are_slow() -> None:
    book = make(1, 2)
    leases = {grant.slot: grant.lease.lease_id for grant in book.deal(1, 4, 0.0)}
    assert book.take_overdue(10.0, 500.0) == [], "no other has brought anything yet"
    assert book.use(1, leases[1], 1, 600.0) == ""
    assert book.take_overdue(10.0, 700.0) == [], "the other one needed 600 s"
    assert [late.slot for late in book.take_overdue(10.0, 2500.0)] == [2]


def test_to_look_for_overdue_workers_among_many_that_are_slow_asks_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    book = make(*range(1, 301))
    for slot in range(1, 301):
        book.grant(slot, 2, 0, 0.0)
    for slot in range(1, 301):
        book.use(slot, slot, 0, 50.0)
    asked = 0
    holders = book._holders

    class Counted(dict[int, object]):
        def items(self) -> object:
            nonlocal asked
            for item in holders.items():
                asked += 1
                yield item

    monkeypatch.setattr(book, "_holders", Counted(holders))
    assert book.take_overdue(10.0, 100.0) == []
    assert asked <= 2 * len(holders)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_worker_that_has_nothing_left_owes_nothing_and_gets_nothing(is_streaming: bool) -> None:
    book = make(1, 2)
    if is_streaming:
        book.set_pacing(Pacing(2, None, 2))
        assert {slot for slot, _ in shares(book.stream(0, 0, 0.0))} == {1, 2}
    else:
        book.deal(1, 4, 0.0)
    owed = book.outstanding(1)
    assert book.retire(1)
    assert not book.retire(1)
    if is_streaming:
        assert {slot for slot, _ in shares(book.stream(0, 0, 1.0))} <= {2}
    else:
        assert shares(book.redeal(1.0)) == [(2, owed)]
        assert shares(book.deal(2, 4, 2.0)) == [(2, 4)]
    assert book.take_overdue(10.0, 1000.0) == [], "nobody waits for it"
    book.check_valid()


def test_time_in_which_the_learner_stood_still_makes_nobody_overdue() -> None:
    book = make(1, 2)
    leases = {grant.slot: grant.lease.lease_id for grant in book.deal(1, 4, 0.0)}
    assert book.use(1, leases[1], 1, 1.0) == ""
    book.forgive(100.0)
    assert book.take_overdue(10.0, 101.0) == []


def test_the_only_worker_left_is_dealt_to_though_it_is_overdue() -> None:
    book = make(1, 2)
    leases = {grant.slot: grant.lease.lease_id for grant in book.deal(1, 2, 0.0)}
    assert book.use(1, leases[1], 1, 1.0) == ""
    assert [late.slot for late in book.take_overdue(10.0, 20.0)] == [2]
    book.drop_slot(1, 21.0)
    assert shares(book.redeal(21.0)) == [(2, 1)]


class Crowd:
    """Honest workers, and others that register and bring nothing, through many deals on a clock of their own.

    Attributes:
        book: the leases.
        now: the time, in steps of 0.1 s.
        updates: deals that were brought in full.
        brought: slot -> fragments.
    """

    def __init__(self, fragments: int) -> None:
        self.book = LeaseBook()
        self.now = 0.0
        self.updates = 0
        self.brought: Counter[int] = Counter()
        self._fragments = fragments
        self._arrived = fragments
        self._workers: dict[int, float] = {}  # honest slot -> seconds for a fragment
        self._due: dict[int, float] = {}

    def join(self, slot: int, source: str, fragment_s: float | None = None) -> None:
        """A worker registers; ``fragment_s``: what it takes for a fragment if it is honest."""
        self.book.join(slot, source)
        if fragment_s is not None:
            self._workers[slot] = fragment_s
        self.book.redeal(self.now)

    def leave(self, slot: int) -> None:
        """A worker is lost."""
        self.book.drop_slot(slot, self.now)
        self._workers.pop(slot, None)
        self._due.pop(slot, None)
        self.book.redeal(self.now)

    def run(self, seconds: float) -> list[int]:
        """Let time pass; the slots that became overdue."""
        overdue: list[int] = []
        for _ in range(round(10 * seconds)):
            if self._arrived >= self._fragments:
                self.updates += 1
                self._arrived = 0
                self.book.deal(self.updates, self._fragments, self.now)
                assert self.book.deal_outstanding() == self._fragments, "a deal is exactly one train batch"
            self.now += 0.1
            for slot, fragment_s in self._workers.items():
                self._bring(slot, fragment_s)
            late = self.book.take_overdue(5.0, self.now)
            overdue += [event.slot for event in late]
            if late:
                self.book.redeal(self.now)
            self.book.check_valid()
        return overdue

    def _bring(self, slot: int, fragment_s: float) -> None:
        leases = self.book.outstanding_leases(slot)
        if not leases:
            self._due.pop(slot, None)
            return
        if self.now < self._due.setdefault(slot, self.now - 0.1 + fragment_s) - 1e-6:
            return
        self._due[slot] = self.now + fragment_s
        newest = leases[-1]
        assert self.book.use(slot, newest.lease_id, newest.min_version, self.now) == ""
        self.brought[slot] += 1
        self._arrived += newest.min_version == self.updates


@pytest.mark.parametrize("stays_s", [4.8, 5.4])
def test_one_that_registers_anew_whenever_it_has_held_a_deal_up_is_soon_seldom_waited_for(stays_s: float) -> None:
    crowd = Crowd(4)
    crowd.join(1, "honest", 0.1)
    crowd.join(2, "honest", 0.1)
    crowd.run(1.0)
    before = crowd.updates
    while crowd.now < 241.0:
        crowd.join(3, "hostile")
        crowd.run(stays_s)
        crowd.leave(3)
    assert crowd.updates - before > 0.5 * 240 / 0.2, "half of what the other two make alone"


def test_many_that_bring_nothing_get_half_of_a_deal_before_those_who_bring_theirs_and_then_none() -> None:
    crowd = Crowd(16)
    for slot in (298, 299, 300):
        crowd.join(slot, "honest", 0.1)
    crowd.run(2.0)
    for slot in range(1, 298):
        crowd.join(slot, "hostile")
    crowd.run(1.0)
    assert sum(crowd.book.outstanding(slot) for slot in range(1, 298)) == 8
    crowd.run(10.0)
    before = crowd.updates
    crowd.run(40.0)
    assert crowd.updates - before > 40


def test_where_many_came_first_that_bring_nothing_the_others_get_their_turn() -> None:
    crowd = Crowd(16)
    for slot in range(1, 301):
        crowd.join(slot, "hostile")
    for slot in range(301, 305):
        crowd.join(slot, "honest", 0.1)
    crowd.run(180.0)
    assert crowd.updates > 50
    assert all(crowd.brought[slot] for slot in range(301, 305))


def test_newcomers_get_their_full_share_after_their_first_fragment() -> None:
    crowd = Crowd(64)
    crowd.join(1, "host", 0.1)
    crowd.run(0.2)
    for slot in range(2, 65):
        crowd.join(slot, "host", 0.1)
    crowd.run(20.0)
    crowd.brought.clear()
    before = crowd.updates
    assert not crowd.run(10.0)
    assert set(crowd.brought.values()) == {crowd.updates - before}, "one of each deal is everybody's"


@given(st.integers(7, 15), st.lists(st.tuples(st.integers(1, 6), st.floats(0.1, 8.0)), min_size=1, max_size=20))
@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_whatever_workers_of_its_host_do_a_worker_that_brings_its_fragments_gets_its_full_share(
    fragments: int, lives: list[tuple[int, float]]
) -> None:
    """Workers come, bring nothing and go; those beside them sample on, and one that joins at last is proven soon."""
    crowd = Crowd(fragments)
    crowd.join(7, "host", 0.1)
    crowd.run(2.0)
    for slot, seconds in lives:
        if slot in crowd.book._holders:
            crowd.leave(slot)
        crowd.join(slot, "host")
        crowd.run(seconds)
    for slot in range(1, 7):
        if slot in crowd.book._holders:
            crowd.leave(slot)
        crowd.join(slot, "host", 0.1)
    crowd.run(45.0)
    crowd.brought.clear()
    before = crowd.updates
    crowd.run(5.0)
    share, updates = fragments // 7, crowd.updates - before
    assert updates > 0
    assert all(crowd.brought[slot] >= (updates - 1) * share for slot in range(1, 8))
