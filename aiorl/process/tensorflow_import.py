"""The import of TensorFlow, in as little time as can be. Only what is called here loads it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator

from aiorl.errors import ConfigError

__all__ = ["lacks_memory", "load_tensorflow", "prepare_import"]


NO_MEMORY = (
    "there is not enough memory to load TensorFlow, which takes about 3 GB of addresses. Raise the limit (ulimit -v), "
    "or end other programs."
)
_SIGNS = "failed to map segment|cannot allocate memory|out of memory"


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised during, came of memory that was not granted."""
    while error is not None:
        if isinstance(error, MemoryError) or re.search(_SIGNS, str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


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
        try:
            tensorflow = importlib.import_module("tensorflow")
        except (ImportError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            raise ConfigError(NO_MEMORY, key="memory") from error
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
