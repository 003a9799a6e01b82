from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from aiorl.net.protocol.events import LeaseOverdue
from aiorl.net.protocol.leases import Grant, LeaseBook, WorkerLeases
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.wire.messages import Lease


def make(*slots: int, first_id: int = 1) -> LeaseBook:
    book = LeaseBook(first_id)
    for slot in slots:
        book.join(slot)
    return book


def shares(grants: list) -> list[tuple[int, int]]:
    return [(grant.slot, grant.lease.fragments) for grant in grants]


@given(st.integers(1, 200), st.sets(st.integers(1, 50), min_size=1))
def test_a_deal_leases_exactly_one_train_batch(fragments: int, slots: set[int]) -> None:
    book = make(*slots)
    grants = book.deal(7, fragments, 0.0)
    assert sum(grant.lease.fragments for grant in grants) == fragments == book.outstanding()
    sizes = [grant.lease.fragments for grant in grants]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert [grant.slot for grant in grants] == sorted(slots)[: len(grants)]
    assert all(grant.lease.min_version == 7 for grant in grants)


def test_streaming_raises_one_lease() -> None:
    book = make(1, first_id=10)
    assert book.extend(1, 3, 5, 0.0).lease == Lease(10, 3, 5)
    for _ in range(3):
        assert book.use(1, 10, 5, 0.0) == ""
    assert book.extend(1, 2, 6, 0.0).lease == Lease(10, 5, 6)
    assert book.use(1, 10, 5, 0.0) == "", "begun before the bound was raised"
    assert book.drop_slot(1) == 1
    book.join(1)
    assert book.extend(1, 1, 6, 0.0).lease == Lease(11, 1, 6)


def test_fragments_outside_of_a_lease_are_reported() -> None:
    book = make(1)
    (grant,) = book.deal(4, 1, 0.0)
    lease_id = grant.lease.lease_id
    book.join(2)
    assert book.use(2, lease_id, 4, 0.0)
    assert book.use(1, lease_id + 1, 4, 0.0)
    assert book.use(1, lease_id, 3, 0.0)
    assert book.use(1, lease_id, 4, 0.0) == ""
    assert book.use(1, lease_id, 4, 0.0)


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


def test_a_repeated_lease_grants_nothing_more() -> None:
    leases = WorkerLeases()
    assert leases.add(Lease(1, 2, 0))
    assert not leases.add(Lease(1, 2, 0))
    assert leases.available(0) == 2
    assert leases.add(Lease(1, 3, 1))
    assert not leases.add(Lease(1, 2, 0))
    assert leases.available(0) == 0
    assert leases.available(1) == 3


def test_exhausted_leases_are_forgotten_eventually() -> None:
    leases = WorkerLeases()
    for number in range(1, 5000):
        leases.add(Lease(number, 1, 0))
        assert leases.begin(0) == number
        assert leases.finish(number)
    assert len(leases._leases) <= 256


def test_the_debt_of_a_worker_that_sends_nothing_is_dealt_to_the_others() -> None:
    """The worker lives, so heartbeats don't reveal it; the others have sent theirs, so environments
    aren't slow.
    """
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
    assert book.take_overdue(10.0, 60.0) == [], "reported once"
    book.deal(2, 4, 61.0)
    assert book.outstanding(3) == 2, "nothing else is leased to it"
    assert book.use(3, leases[3], 1, 62.0) == "", "it may still come"
    assert {slot for slot, _ in shares(book.deal(3, 6, 63.0))} == {1, 2, 3}


def test_no_worker_is_overdue_if_all_are_slow() -> None:
    book = make(1, 2)
    leases = {grant.slot: grant.lease.lease_id for grant in book.deal(1, 4, 0.0)}
    assert book.take_overdue(10.0, 500.0) == [], "no other has brought anything yet"
    assert book.use(1, leases[1], 1, 600.0) == ""
    assert book.take_overdue(10.0, 700.0) == [], "the other one needed 600 s"
    assert [late.slot for late in book.take_overdue(10.0, 2500.0)] == [2]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_worker_that_has_nothing_left_owes_nothing_and_gets_nothing(is_streaming: bool) -> None:
    book = make(1, 2)
    if is_streaming:
        book.begin_streaming(Pacing(2, None, 2))
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
    assert book.take_overdue(10.0, 1000.0) == [], "no one waits for it"


def test_the_only_worker_left_gets_the_deal_even_if_it_is_overdue() -> None:
    book = make(1, 2)
    leases = {grant.slot: grant.lease.lease_id for grant in book.deal(1, 2, 0.0)}
    assert book.use(1, leases[1], 1, 1.0) == ""
    assert [late.slot for late in book.take_overdue(10.0, 20.0)] == [2]
    book.drop_slot(1)
    assert shares(book.redeal(21.0)) == [(2, 1)]


@given(
    st.integers(0, 9),
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "bring", "retire", "deal", "again"]),
            st.integers(1, 4),
        )
    ),
)
def test_a_deal_is_exactly_one_train_batch_whatever_workers_do(
    fragments: int, history: list[tuple[str, int]]
) -> None:
    book = make(1)
    leases: dict[int, list[tuple[int, int]]] = {}  # slot -> ids of its leases, and their deals
    version = num_left = 0
    live = {1}
    for now, (what, slot) in enumerate([("deal", 0), *history]):
        match what:
            case "join" if slot not in live:
                live.add(slot)
                book.join(slot)
            case "leave" if slot in live:
                live.remove(slot)
                book.drop_slot(slot)
                leases.pop(slot, None)
            case "retire" if slot in live and book.retire(slot):
                leases[slot] = [(lease_id, -1) for lease_id, _ in leases.get(slot, [])]
            case "bring" if leases.get(slot):
                lease_id, of_deal = leases[slot].pop()
                assert book.use(slot, lease_id, version, float(now)) == ""
                num_left -= of_deal == version
            case "again":  # the fragments could not be used
                book.unassigned += 1
                num_left += 1
            case "deal":
                version, num_left = version + 1, fragments
                leases = {
                    owner: [(lease_id, 0) for lease_id, _ in owned]
                    for owner, owned in leases.items()
                }
                _take(leases, book.deal(version, fragments, float(now)), version)
        _take(leases, book.redeal(float(now)), version)
        open_leases = [
            lease for holder in book._holders.values() for lease in holder.leases.values()
        ]
        assert (
            book.unassigned + sum(lease.remaining for lease in open_leases if lease.deal)
            == num_left
        )
        assert not book.unassigned or not live


def _take(leases: dict[int, list[tuple[int, int]]], grants: list[Grant], version: int) -> None:
    for slot, lease in grants:
        leases.setdefault(slot, []).extend([(lease.lease_id, version)] * lease.fragments)
