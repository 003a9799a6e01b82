"""Arrays that lie one behind the other in one piece of memory, so that they can be sent as one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["ALIGN_BYTES", "allocate_together"]

ALIGN_BYTES = 8
"""Each array starts at the next multiple of this, counted from the first one's first byte."""


def allocate_together(specs: Sequence[tuple[tuple[int, ...], DTypeLike]]) -> list[NDArray[Any]]:
    """Uninitialised C-contiguous arrays in one allocation, in this order; what lies between them is zero.

    The allocation lives as long as any of them.

    Args:
        specs: shape and dtype of each array.
    """
    places = []
    gaps = []
    end = 0
    for shape, kind in specs:
        dtype = np.dtype(kind)
        start = end + -end % ALIGN_BYTES
        if start != end:
            gaps.append(slice(end, start))
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        end = start + size
        places.append((shape, dtype, start))
    arena = np.empty(end, np.uint8)
    for gap in gaps:
        arena[gap] = 0
    return [np.ndarray(shape, dtype, arena, start) for shape, dtype, start in places]
