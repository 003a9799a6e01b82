from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import DTypeLike

from aiorl.data.arrays import all_finite


@pytest.mark.parametrize("size", [1, 16, 17, 400])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_what_is_not_finite_is_found_anywhere_and_large_numbers_are_finite(dtype: DTypeLike, size: int) -> None:
    largest = np.full(size, np.finfo(dtype).max, dtype)  # their sum is infinite
    assert all_finite(largest)
    assert all_finite(np.arange(size).astype(dtype).reshape(1, size, 1))
    for bad in (np.nan, np.inf, -np.inf):
        for place in {0, size - 1}:
            numbers = np.zeros(size, dtype)
            numbers[place] = bad
            assert not all_finite(numbers)
            assert not all_finite(numbers[::-1])
    assert not all_finite(np.array([np.inf, -np.inf], dtype))


def test_no_numbers_are_finite() -> None:
    assert all_finite(np.zeros((0, 3), np.float32))
