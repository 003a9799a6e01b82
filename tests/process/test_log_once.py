from __future__ import annotations

import numpy as np
import pytest

from aiorl.process.log_once import PERIOD_S, LogOnce, summarize


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
        (np.arange(6, dtype=np.float32).reshape(2, 3), "array(float32, [2, 3], min 0, max 5, mean 2.5)"),
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
def test_data_is_summed_up_in_a_line(value, text):
    assert summarize(value) == text
