"""TensorFlow's process-wide settings, which are made before its first import.

TensorFlow reads its thread counts and devices only once, so this module is called before
``models``, ``losses`` or ``algorithms`` are imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from aiorl.config.parts import RuntimePart
from aiorl.errors import ConfigError
from aiorl.learning.compilation_cache import CompilationCache
from aiorl.process.imports import check_address_space, load_tensorflow, prepare_import
from aiorl.process.machine import usable_cores

logger = logging.getLogger(__name__)

_CACHE_FLAG = "--tf_xla_persistent_cache_directory"
_cache: CompilationCache | None = None  # one per process: TensorFlow reads its variables only once


def prepare_environment(runtime: RuntimePart) -> None:
    """Set the environment variables that TensorFlow reads; imports nothing."""
    prepare_import()
    if runtime.num_gpus == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if runtime.compilation_cache != "off":
        _keep_compilations(runtime)


def compilation_cache() -> CompilationCache | None:
    """Return the on-disk cache of compiled updates; None without one, or if the user set
    ``TF_XLA_FLAGS``.
    """
    return _cache


def _keep_compilations(runtime: RuntimePart) -> None:
    """Let TensorFlow keep compiled code on disk unless the user already does; log why if that is
    impossible.
    """
    global _cache
    flags = os.environ.get("TF_XLA_FLAGS", "").strip()
    if _CACHE_FLAG in flags:
        return
    if flags and not flags.startswith("-"):  # the name of a file with flags
        return
    is_auto = runtime.compilation_cache == "auto"
    root = runtime.compilation_cache
    level = logging.WARNING
    if is_auto:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "aiorl", "xla")
        level = logging.INFO
    root = os.path.expanduser(root)
    try:
        if is_auto and not os.path.isabs(root):
            raise OSError("there is no home directory")
        if not root.isprintable() or set(root) & set(" '\"\\"):
            raise OSError("its name has blanks or quotes, which TF_XLA_FLAGS can't contain")
        _cache = CompilationCache.open(Path(root), num_threads(runtime))
    except OSError as error:
        logger.log(level, "XLA's compiled code is not kept in %s for later runs: %s", root, error)
        return
    os.environ["TF_XLA_FLAGS"] = (
        f"{flags} {_CACHE_FLAG}={_cache.folder} --tf_xla_persistent_cache_device_types=CPU".strip()
    )


def num_threads(runtime: RuntimePart) -> int:
    """Return the number of threads for TensorFlow's kernels: as configured, but not more than the
    available cores.
    """
    cores = usable_cores()
    threads = runtime.threads
    if not threads:
        threads = int(runtime.session_args.get("intra_op_parallelism_threads", cores))
    return max(1, min(threads, cores))


def begin_loading() -> None:
    """Load TensorFlow's libraries in a thread, which takes half a second, while other modules are
    imported.

    The import then finds them loaded, or waits for the rest. The thread calls the C function, which
    releases the GIL.

    Raises:
        ConfigError: there is not enough address space for them.
    """
    check_address_space()
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None or not sys.platform.startswith("linux"):
        return
    folder = Path(spec.origin).parent
    load = ctypes.CDLL(None).dlopen
    load.argtypes = [ctypes.c_char_p, ctypes.c_int]
    load.restype = ctypes.c_void_p

    def load_all() -> None:
        with _without_greetings:
            for name in ("framework", "cc"):
                library = folder / f"libtensorflow_{name}.so.2"
                load(os.fsencode(library), os.RTLD_NOW)  # the import reports any failure

    threading.Thread(target=load_all, name="tensorflow", daemon=True).start()


def import_tensorflow(runtime: RuntimePart) -> None:
    """Import TensorFlow as fast as possible; leaves none of its own threads running."""
    prepare_environment(runtime)
    with _without_greetings:
        load_tensorflow()


def configure_tensorflow(runtime: RuntimePart) -> None:
    """Import TensorFlow with the threads and devices of the settings; takes a few seconds.

    In a process that has used TensorFlow before, threads stay unchanged.

    Raises:
        ConfigError: GPUs were requested and TensorFlow sees none.
    """
    import_tensorflow(runtime)
    import tensorflow as tf

    # One inter-op thread can hang on nested functions (tensorflow#38969)
    options = runtime.session_args
    threads = num_threads(runtime)
    inter = int(options.get("inter_op_parallelism_threads", 2))
    num_cpus = int(options.get("device_count", {}).get("CPU", 1))
    may_grow = bool(options.get("gpu_options", {}).get("allow_growth", True))
    _check_gpus(tf, runtime.num_gpus)
    tf.config.set_soft_device_placement(bool(options.get("allow_soft_placement", True)))
    tf.debugging.set_log_device_placement(bool(options.get("log_device_placement", False)))
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, min(inter, threads)))
        _split_cpu(tf, num_cpus)
        _use_gpus(tf, runtime.num_gpus, may_grow=may_grow)
    except RuntimeError:
        logger.info(
            "TensorFlow is already in use in this process and keeps its threads and devices"
        )
    # the update itself logs when it compiles for another batch size; TensorFlow's warning would
    # only alarm
    tf.get_logger().addFilter(lambda record: "tf.function retracing" not in record.getMessage())


def _split_cpu(tf: Any, count: int) -> None:
    if count > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )


def _check_gpus(tf: Any, num_gpus: float) -> None:
    """Raise ConfigError if TensorFlow sees too few GPUs."""
    num_visible = len(tf.config.list_physical_devices("GPU"))
    if num_gpus > num_visible:
        raise ConfigError(
            f"num_gpus is {num_gpus:g}, but the number of GPUs that TensorFlow sees is"
            f" {num_visible}.",
            key="num_gpus",
            value=num_gpus,
            hint="Install aiorl[learner-gpu] on a host with CUDA, or set num_gpus: 0.",
        )


def _use_gpus(tf: Any, num_gpus: float, *, may_grow: bool) -> None:
    """Make `num_gpus` GPUs visible to TensorFlow, or such a share of the memory of the first."""
    gpus = tf.config.list_physical_devices("GPU")
    used = gpus[: math.ceil(num_gpus)]
    if gpus:
        tf.config.set_visible_devices(used, "GPU")
    if 0 < num_gpus < 1:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=num_gpus * _gpu_memory_mib())
        tf.config.set_logical_device_configuration(used[0], [limit])
        return
    for gpu in used:
        tf.config.experimental.set_memory_growth(gpu, may_grow)


def _gpu_memory_mib() -> float:
    """Return the memory of this host's smallest GPU, which TensorFlow doesn't report."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        report = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(float(line) for line in report.stdout.splitlines())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"num_gpus is a fraction, but nvidia-smi doesn't report the GPU's memory: {error}.",
            key="num_gpus",
            hint="Set a whole number.",
        ) from error


class _Greetings:
    """Suppression of the output of C and C++ libraries on standard error while any thread loads
    TensorFlow; Linux only.

    No setting silences them. Descriptor 2 and Python's streams belong to the program and are not
    changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._nowhere: int | None = None  # never closed, because a thread may still write to it

    def __enter__(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users > 1 or not sys.platform.startswith("linux"):
                return
            program = ctypes.CDLL(None)
            if self._nowhere is None:
                program.fopen.restype = ctypes.c_void_p
                self._nowhere = program.fopen(b"/dev/null", b"w")
            self._stream = ctypes.c_void_p.in_dll(program, "stderr")
            self._stderr = self._stream.value
            self._stream.value = self._nowhere or self._stderr

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and sys.platform.startswith("linux"):
                self._stream.value = self._stderr


_without_greetings = _Greetings()
