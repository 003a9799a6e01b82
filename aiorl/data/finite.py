"""Whether numbers are finite, as cheaply as can be: it is asked of everything that an environment says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["all_finite", "first_not_finite"]

_FEW = 16
"""So many numbers are looked at sooner by Python than by NumPy."""


def all_finite(numbers: NDArray[Any]) -> bool:
    """Whether an array of floats holds neither NaN nor infinity."""
    size = numbers.size
    if size <= _FEW and numbers.itemsize <= 8 and math.isfinite(sum(numbers.ravel().tolist())):
        return True  # else there is one, or large numbers have overflown
    return int(np.count_nonzero(np.isfinite(numbers))) == size


def first_not_finite(columns: Mapping[str, NDArray[Any]]) -> str:
    """The first column of floats that holds a NaN or an infinity; "" if none does."""
    return next((name for name, array in columns.items() if array.dtype.kind == "f" and not all_finite(array)), "")
