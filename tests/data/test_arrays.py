"""Arrays in one allocation, and numbers that are not finite."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import DTypeLike

from aiorl.data.arrays import ALIGN_BYTES, all_finite, allocate_together
from aiorl.net.wire.format import ALIGN

specs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(["?", "f2", "f4", "i8", "u1"]),
    ),
    max_size=6,
)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@given(specs)
def test_arrays_are_in_order_each_at_the_next_multiple_of_eight(given_specs) -> None:
    arrays = allocate_together(given_specs)
    assert [(array.shape, array.dtype) for array in arrays] == [
        (s, np.dtype(d)) for s, d in given_specs
    ]
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
    assert ALIGN_BYTES == ALIGN, "like frames"


@pytest.mark.parametrize("size", [1, 16, 17])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_numbers_that_are_not_finite_are_found_and_large_ones_are_finite(
    dtype: DTypeLike, size: int
) -> None:
    assert all_finite(np.full(size, np.finfo(dtype).max, dtype)), "although their sum is infinite"
    assert all_finite(np.zeros((0, 3), dtype))
    for bad, place in itertools.product((np.nan, np.inf, -np.inf), {0, size - 1}):
        numbers = np.zeros(size, dtype)
        numbers[place] = bad
        assert not all_finite(numbers)
        assert not all_finite(numbers[::-1].reshape(1, size, 1))
    assert not all_finite(np.array([np.inf, -np.inf], dtype))
