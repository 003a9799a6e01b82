"""Numbers of columns that are not finite."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import DTypeLike

from aiorl.data.columns import all_finite


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
