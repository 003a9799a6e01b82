"""Seeds of TensorFlow that leave its kernels as they are, unless one of them draws numbers.

Each run seeds TensorFlow, which then makes all kernels of eager operations again: half of the time
of a small trainer. Only kernels that draw numbers by the global seed have anything of it.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

_has_drawn = False


def install() -> None:
    """Seed in this way in this process; loads TensorFlow."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import random_seed

    get_seed = random_seed.get_seed
    set_global_seed = context.set_global_seed

    def get_seed_and_note(op_seed: Any) -> Any:
        global _has_drawn
        _has_drawn = True
        return get_seed(op_seed)

    def set_seed_quickly(seed: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not _has_drawn:
                patch.setattr(context.pywrap_tfe, "TFE_ContextClearCaches", lambda handle: None)
            set_global_seed(seed)

    random_seed.get_seed = get_seed_and_note
    context.set_global_seed = set_seed_quickly


def forget() -> None:
    """Forget kernels that draw numbers: nothing uses the functions that call them any more."""
    global _has_drawn
    if _has_drawn:
        sys.modules["tensorflow.python.eager.context"].context().clear_kernel_cache()
        _has_drawn = False
