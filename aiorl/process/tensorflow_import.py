"""The import of TensorFlow, in as little time as can be. Only what is called here loads it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator

__all__ = ["load_tensorflow", "prepare_import"]


def prepare_import() -> None:
    """Set the variable that Keras reads at import; `aiorl` itself has set TensorFlow's."""
    os.environ["KERAS_BACKEND"] = "tensorflow"


def load_tensorflow(*, threads: int | None = None) -> None:
    """Import it; no thread of its own runs afterwards.

    Args:
        threads: that its kernels may use, without GPUs unless CUDA_VISIBLE_DEVICES names some; None leaves all as it
            is, and so does a process that has it loaded.
    """
    if threads is not None and "tensorflow" not in sys.modules:
        prepare_import()
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    else:
        threads = None
    with _hidden("matplotlib", "cv2"), _no_collection():
        tensorflow = importlib.import_module("tensorflow")
    if threads is not None:
        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        # one inter-op thread can hang on nested functions (tensorflow#38969)
        tensorflow.config.threading.set_inter_op_parallelism_threads(max(2, threads))


@contextlib.contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """Let imports of optional packages fail: Keras would load pyplot for helpers of its own, half a second."""
    hidden = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # how the import system is told so
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Look for no garbage, and never again in what was made meanwhile: an import makes much and drops little."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
