"""Seeds of TensorFlow that leave its kernels as they are, unless one of them draws numbers.

Each run seeds TensorFlow, which then makes all kernels of eager operations again: half of the time
of a small trainer. Only kernels that draw numbers by the global seed have anything of it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

_has_drawn = False


def install() -> None:
    """Seed in this way in this process; loads TensorFlow."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import random_seed

    get_seed = random_seed.get_seed
    set_global_seed = context.Context._set_global_seed

    def get_seed_and_note(op_seed: Any) -> Any:
        global _has_drawn
        _has_drawn = True
        return get_seed(op_seed)

    def set_seed_quickly(self: Any, seed: Any) -> None:
        if _has_drawn:
            set_global_seed(self, seed)
        else:
            self._seed = seed
            self._rng = random.Random(None if seed is None else int(seed))

    random_seed.get_seed = get_seed_and_note
    context.Context._set_global_seed = set_seed_quickly


def forget() -> None:
    """Forget kernels that draw numbers: nothing uses the functions that call them any more."""
    global _has_drawn
    if _has_drawn:
        sys.modules["tensorflow.python.eager.context"].context().clear_kernel_cache()
        _has_drawn = False
