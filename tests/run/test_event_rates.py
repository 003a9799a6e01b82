"""How much of what peers do is told."""

from __future__ import annotations

from aiorl.run.service import EventRates


def test_of_each_kind_and_source_so_many_are_told_and_the_rest_is_counted() -> None:
    rates = EventRates(per_source=2, per_kind=5, window_s=60.0)
    assert [rates.allow("failures", 1, 0.0) for _ in range(4)] == [True, True, False, False]
    assert rates.allow("failures", 2, 1.0)
    assert rates.allow("joins", 1, 1.0)
    assert rates.take_left_out(59.9) == {}
    assert rates.take_left_out(60.0) == {"failures": 2}
    assert rates.take_left_out(60.0) == {}
    assert rates.allow("failures", 1, 60.0), "another window"


def test_many_sources_are_told_of_no_more_than_the_kind_allows_and_are_not_all_remembered() -> None:
    rates = EventRates(per_source=10, per_kind=60)
    assert sum(rates.allow("refused", number, 0.0) for number in range(100_000)) == 60
    assert len(rates._told_of) == 60
    assert rates.take_left_out(61.0) == {"refused": 100_000 - 60}
    rates.allow("refused", 1, 61.0)
    assert len(rates._told_of) == 1


def test_what_several_sources_say_alike_is_told_once_and_does_not_use_up_what_others_may_say() -> None:
    rates = EventRates(per_source=2, per_kind=5)
    assert [rates.allow("failures", number, 0.0, what="boom") for number in range(100)] == [True] + [False] * 99
    assert rates.allow("failures", 7, 0.0, what="bang")
    assert [rates.allow("refused", 7, 0.0, at_most=1) for _ in range(2)] == [True, False]
    assert rates.allow("refused", 8, 0.0, at_most=1)
    assert rates.take_left_out(60.0) == {"failures": 99, "refused": 1}
