from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorl.errors import InternalError
from aiorl.protocol.leases import LeaseBook, WorkerLeases, is_stale
from aiorl.protocol.messages import Lease, Samples


def shares(grants: list) -> list[tuple[int, int]]:
    return [(grant.slot, grant.lease.fragments) for grant in grants]


def test_a_deal_is_even_and_the_first_slots_have_the_larger_shares() -> None:
    assert shares(LeaseBook().deal(3, 8, [5, 1, 2])) == [(1, 3), (2, 3), (5, 2)]
    assert shares(LeaseBook().deal(3, 2, [1, 2, 3])) == [(1, 1), (2, 1)]


@given(st.integers(1, 200), st.sets(st.integers(1, 50), min_size=1))
def test_a_deal_leases_exactly_one_train_batch(fragments: int, slots: set[int]) -> None:
    book = LeaseBook()
    grants = book.deal(7, fragments, slots)
    assert sum(grant.lease.fragments for grant in grants) == fragments == book.deal_outstanding()
    sizes = [grant.lease.fragments for grant in grants]
    assert max(sizes) - min(sizes) <= 1
    assert [grant.slot for grant in grants] == sorted(slots)[: len(grants)]
    assert all(grant.lease.min_version == 7 for grant in grants)


def test_a_lost_workers_share_goes_to_the_others() -> None:
    book = LeaseBook()
    first, second = book.deal(1, 6, [1, 2])
    assert book.use(2, second.lease.lease_id, 1) == ""
    assert book.drop_slot(2) == 2
    assert book.held == 2
    assert shares(book.redeal([1])) == [(1, 2)]
    assert book.outstanding(1) == 5 == book.deal_outstanding()
    assert book.outstanding(2) == 0
    assert first.lease.lease_id in [lease.lease_id for lease in book.outstanding_leases(1)]


def test_a_deal_without_workers_is_held_until_one_joins() -> None:
    book = LeaseBook()
    assert book.deal(1, 4, []) == []
    assert book.redeal([]) == []
    assert shares(book.redeal([3])) == [(3, 4)]
    assert book.held == 0


def test_a_new_deal_forgets_what_the_old_one_held() -> None:
    book = LeaseBook()
    book.deal(1, 4, [1])
    book.drop_slot(1)
    book.deal(2, 3, [2])
    book.drop_slot(2)
    assert book.held == 3


def test_topping_up_raises_one_lease() -> None:
    book = LeaseBook(first_id=10)
    grant = book.top_up(1, 3, 5)
    assert grant is not None
    assert grant.lease == Lease(10, 3, 5)
    assert book.top_up(1, 3, 6) is None
    for _ in range(3):
        assert book.use(1, 10, 5) == ""
    grant = book.top_up(1, 2, 6)
    assert grant is not None
    assert grant.lease == Lease(10, 5, 6)
    assert book.use(1, 10, 5) == "", "begun before the bound was raised"
    book.check_valid()
    assert book.drop_slot(1) == 1
    grant = book.top_up(1, 1, 6)
    assert grant is not None
    assert grant.lease == Lease(11, 1, 6)


def test_fragments_outside_of_a_lease_are_told() -> None:
    book = LeaseBook()
    (grant,) = book.deal(4, 1, [1])
    lease_id = grant.lease.lease_id
    assert "outside" in book.use(2, lease_id, 4)
    assert "outside" in book.use(1, lease_id + 1, 4)
    assert "version 3" in book.use(1, lease_id, 3)
    assert book.use(1, lease_id, 4) == ""
    assert "outside" in book.use(1, lease_id, 4)
    book.check_valid()


def test_a_lease_of_nothing_is_a_bug() -> None:
    with pytest.raises(InternalError):
        LeaseBook().grant(1, 0, 0)


def test_staleness_counts_from_the_oldest_row() -> None:
    samples = Samples(1, 1, 1, 1, 5, 9, 1, 1, {}, {}, {}, {})
    assert not is_stale(samples, 8, 3)
    assert is_stale(samples, 9, 3)


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
    book = LeaseBook()
    (grant,) = book.deal(3, 2, [1])
    assert book.use(1, grant.lease.lease_id, 3) == ""
    assert book.use(1, grant.lease.lease_id, 3) == ""
    assert book.deal_outstanding() == 0
    book.hold(1)
    assert book.deal_outstanding() == 1
    (again,) = book.redeal([2])
    assert (again.slot, again.lease.fragments, again.lease.min_version) == (2, 1, 3)
    book.check_valid()
