"""Arrays in one allocation."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiorl.data.arrays import ALIGN_BYTES, allocate_together
from aiorl.net.wire.format import ALIGN

specs = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(["?", "f2", "f4", "i8", "u1"])),
    max_size=6,
)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@given(specs)
def test_arrays_lie_in_order_each_at_the_next_multiple_of_eight(given_specs) -> None:
    arrays = allocate_together(given_specs)
    assert [(array.shape, array.dtype) for array in arrays] == [(s, np.dtype(d)) for s, d in given_specs]
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)
    for before, after in itertools.pairwise(arrays):
        end = address(before) + before.nbytes
        assert address(after) - end == -(end - address(arrays[0])) % ALIGN_BYTES
        assert after.base is before.base
        start = end - address(before.base)
        assert not before.base[start : start + -start % ALIGN_BYTES].any()
    for number, array in enumerate(arrays):
        array[...] = number % 2
    assert all((array == number % 2).all() for number, array in enumerate(arrays))


def test_it_aligns_as_frames_do() -> None:
    assert ALIGN_BYTES == ALIGN
