from __future__ import annotations

import numpy as np
import pytest

from aiorl.process.log_once import PERIOD_S, EventRates, LogOnce, summarize


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def once(clock):
    return LogOnce(lambda: clock[0])


def test_each_message_comes_once(once, clock):
    """R31."""
    assert [once("a"), once("a"), once("b")] == [True, False, True]
    clock[0] += 10 * PERIOD_S
    assert not once("a")


def test_in_periodic_mode_each_message_comes_once_a_minute(once, clock):
    """R31: worker 0 or 1 at DEBUG."""
    once.set_up(1, "DEBUG")
    assert once("a")
    clock[0] += PERIOD_S / 2
    assert once("b")
    assert not once("a")
    clock[0] += PERIOD_S / 2
    assert once("a")
    assert not once("a")
    assert not once("b")


def test_a_disabled_one_says_nothing_not_even_periodically(once, clock):
    """R31: worker index above 1, even at DEBUG."""
    once.set_up(2, "DEBUG")
    assert not once("a")
    clock[0] += 2 * PERIOD_S
    assert not once("a")
    once.reset()
    assert once("a")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            np.arange(6, dtype=np.float32).reshape(2, 3),
            "array(float32, [2, 3], min 0, max 5, mean 2.5)",
        ),
        (np.zeros(0), "array(float64, [0])"),
        (np.array([None, {}], object), "array(object, [2])"),
        ({"a": {"b": 1}}, "{'a': {'b': 1}}"),
        ([1, "two", (3,)], "[1, 'two', [3]]"),
        (list(range(9)), "[0, 1, 2, 3, ... 9 items]"),
        ({n: n for n in range(6)}, "{0: 0, 1: 1, 2: 2, 3: 3, ... 6 entries}"),
        ([[[[[1]]]]], "[[[[[1 items]]]]]"),
        ({1: {2: {3: {4: {5: 6}}}}}, "{1: {2: {3: {4: {1 entries}}}}}"),
        ("x" * 300, repr("x" * 300)[:197] + "..."),
    ],
)
def test_data_is_summarized_in_a_line(value, text):
    assert summarize(value) == text


def test_a_limited_number_of_each_kind_and_source_is_reported_and_the_rest_counted() -> None:
    rates = EventRates(per_source=2, per_kind=5, window_s=60.0)
    assert [rates.allow("failures", 1, 0.0) for _ in range(4)] == [True, True, False, False]
    assert rates.allow("failures", 2, 1.0)
    assert rates.allow("joins", 1, 1.0)
    assert rates.take_left_out(59.9) == {}
    assert rates.take_left_out(60.0) == {"failures": 2}
    assert rates.take_left_out(60.0) == {}
    assert rates.allow("failures", 1, 60.0), "another window"


def test_many_sources_cannot_exceed_the_limit_of_a_kind() -> None:
    rates = EventRates(per_source=10, per_kind=60)
    assert sum(rates.allow("refused", number, 0.0) for number in range(1000)) == 60
    assert rates.take_left_out(61.0) == {"refused": 1000 - 60}


def test_equal_text_of_several_sources_is_reported_once_and_counts_once() -> None:
    rates = EventRates(per_source=2, per_kind=5)
    assert [rates.allow("failures", number, 0.0, what="boom") for number in range(100)] == [
        True
    ] + [False] * 99
    assert rates.allow("failures", 7, 0.0, what="bang")
    assert [rates.allow("refused", 7, 0.0, at_most=1) for _ in range(2)] == [True, False]
    assert rates.allow("refused", 8, 0.0, at_most=1)
    assert rates.take_left_out(60.0) == {"failures": 99, "refused": 1}
