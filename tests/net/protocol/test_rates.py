"""Rate limits of peers."""

from __future__ import annotations

from aiorl.net.protocol.rates import Allowance


def test_an_allowance_is_limited_and_refills_with_time() -> None:
    allowance = Allowance(3, 0.5)
    assert [allowance.take(10.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not allowance.take(11.9)
    assert allowance.take(12.0)
    assert not allowance.take(12.0)
    assert [allowance.take(1000.0) for _ in range(4)] == [True] * 3 + [False]
    assert not allowance.take(1002.0, 1.5)
    assert allowance.take(1003.0, 1.5)


def test_more_may_be_allowed_the_first_time() -> None:
    allowance = Allowance(2, 1.0, at_first=5)
    assert [allowance.take(0.0) for _ in range(4)] == [True] * 4
    assert [allowance.take(60.0) for _ in range(4)] == [True, True, False, False]
