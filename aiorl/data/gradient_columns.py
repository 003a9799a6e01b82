"""Columns of a gradient, which a worker sends in place of the rows that it is of.

There is one for the gradient of each weight, in the weight's shape. Where a number was not finite there is none of
these, only the number of rows and CULPRIT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.errors import BatchError

__all__ = ["CULPRIT", "GRADIENT_OF", "METRICS", "NUM_ROWS", "gradients_in", "is_gradient", "num_rows"]

GRADIENT_OF = "gradient/"
"""Prefix of the name of a weight: its gradient, float32."""
METRICS = "metrics"
"""Float32 [M], what the loss said of the rows, in the order of the algorithm's metrics; the loss itself is the last."""
NUM_ROWS = "num_rows"
"""Int32 [1], the transitions that it is of."""
CULPRIT = "culprit"
"""Int32 [1], the column of the sample plan that held a number that is not finite, from 1; 0 for none of them."""

_MAX_ROWS = 1 << 24


def is_gradient(columns: Mapping[str, NDArray[Any]]) -> bool:
    """Whether these are the columns of a gradient, not of rows."""
    return NUM_ROWS in columns


def num_rows(columns: Mapping[str, NDArray[Any]]) -> int:
    """The transitions that a gradient is of.

    Raises: BatchError if that is no number from 1 to 2**24.
    """
    found = columns.get(NUM_ROWS)
    if found is None or found.shape != (1,) or found.dtype != np.int32 or not 1 <= found[0] <= _MAX_ROWS:
        raise BatchError(NUM_ROWS, f"int32 [1], from 1 to {_MAX_ROWS}", "none" if found is None else f"{found!r:.100}")
    return int(found[0])


def gradients_in(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Weight name -> its gradient."""
    return {name.removeprefix(GRADIENT_OF): array for name, array in columns.items() if name.startswith(GRADIENT_OF)}
