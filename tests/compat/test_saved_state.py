from __future__ import annotations

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from aiorl.compat.saved_state import SavedState, dump_state, load_state
from aiorl.errors import CheckpointError

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text()
)
entries = st.dictionaries(
    st.text(), st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
)


@given(
    st.dictionaries(st.text(), entries, max_size=3), st.dictionaries(st.text(), entries, max_size=3)
)
def test_a_saved_state_is_restored(filters, policies):
    """R51."""
    assert load_state(dump_state(SavedState(filters, policies))) == (filters, policies)


def test_a_state_other_than_plain_data_is_refused():
    """R51: no pickle."""
    with pytest.raises(CheckpointError):
        dump_state(SavedState({}, {"a": {"function": len}}))


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(data):
    """R51."""
    with pytest.raises(CheckpointError):
        load_state(data)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [1, 2],
        {"format": "aiorl-rollout-worker", "version": 2, "filters": {}, "policies": {}},
        {"format": "aiorl-rollout-worker", "version": 1, "filters": {}},
        {"format": "aiorl-rollout-worker", "version": 1, "filters": {"a": 3}, "policies": {}},
    ],
)
def test_other_versions_and_forms_are_refused(content):
    """R51."""
    with pytest.raises(CheckpointError):
        load_state(msgpack.packb(content))


@given(st.integers(0, 400), st.integers(0, 255))
def test_damaged_bytes_are_refused_or_read_as_something_else_but_never_crash(position, value):
    """R51."""
    data = bytearray(
        dump_state(SavedState({"a": {"n": np.zeros(3)}}, {"a": {"weights": {"w": np.ones(20)}}}))
    )
    data[position % len(data)] = value
    with contextlib.suppress(CheckpointError):
        load_state(bytes(data))
