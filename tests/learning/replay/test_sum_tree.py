"""Sum tree against plain sums over a list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from aiorl.learning.replay.priorities import SumTree

PRIORITIES = st.one_of(st.just(0.0), st.floats(1e-200, 1e200), st.floats(0.001, 10.0))


def filled(priorities: list[float]) -> SumTree:
    tree = SumTree(len(priorities))
    tree.set_run(0, np.array(priorities))
    return tree


def slow_find(priorities: np.ndarray, value: float) -> int:
    """Return the first slot whose running sum is above the value."""
    return int(np.flatnonzero(np.cumsum(priorities) > value)[0])


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 8, 1000, 3000])
def test_values_find_their_slots(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    priorities = rng.integers(0, 5, capacity).astype(np.float64)  # whole numbers: sums are exact
    priorities[rng.integers(capacity)] = 3.0
    tree = filled(priorities.tolist())
    assert tree.total == priorities.sum()
    values = np.concatenate(
        [rng.uniform(0, tree.total, 200), np.arange(0, min(int(tree.total), 200))]
    )
    assert tree.find(values).tolist() == [slow_find(priorities, value) for value in values]


@settings(max_examples=80)
@given(st.lists(PRIORITIES, min_size=1, max_size=70), st.data())
def test_sums_depend_only_on_the_current_priorities(
    start: list[float], data: st.DataObject
) -> None:
    tree = filled(start)
    plain = np.array(start)
    for _ in range(data.draw(st.integers(0, 5))):
        if data.draw(st.booleans()):
            slots = data.draw(st.lists(st.integers(0, len(start) - 1), max_size=90))
            values = data.draw(st.lists(PRIORITIES, min_size=len(slots), max_size=len(slots)))
            tree.set(np.array(slots, np.int64), np.array(values))
            for slot, value in zip(slots, values, strict=True):
                plain[slot] = value
        else:
            first = data.draw(st.integers(0, len(start) - 1))
            values = data.draw(st.lists(PRIORITIES, max_size=len(start) - first))
            tree.set_run(first, np.array(values))
            plain[first : first + len(values)] = values
    assert tree.priorities.tolist() == plain.tolist()
    assert tree._levels[0].tolist() == filled(plain.tolist())._levels[0].tolist()  # to the bit
    assert tree.total == pytest.approx(plain.sum(), rel=1e-12)


@settings(max_examples=100)
@given(
    st.lists(PRIORITIES, min_size=1, max_size=70),
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
def test_a_slot_with_priority_0_is_never_found_despite_rounding(
    priorities: list[float], where: list[float]
) -> None:
    priorities[len(where) % len(priorities)] = 1.0
    tree = filled(priorities)
    values = np.array([*where, 0.0, 1.0]) * tree.total
    assert (tree.priorities[tree.find(values)] > 0).all()
