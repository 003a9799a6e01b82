"""TensorFlow's process-wide settings, made before it is first imported.

TensorFlow reads its thread counts and devices once; so this module is called before anything of ``models``,
``losses`` or ``algorithms`` is imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError

__all__ = ["configure_tensorflow", "num_threads", "prepare_environment"]

logger = logging.getLogger(__name__)


def prepare_environment(config: CommonConfig) -> None:
    """Set the environment variables that TensorFlow reads at import; imports nothing."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if config.num_gpus == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def num_threads(config: CommonConfig) -> int:
    """Threads for TensorFlow's kernels: as configured, but no more than there are cores to run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    wanted = config.threads or int(config.local_tf_session_args.get("intra_op_parallelism_threads", cores))
    return max(1, min(wanted, cores))


def configure_tensorflow(config: CommonConfig, log: Path | None = None) -> None:
    """Import TensorFlow with the threads and devices of the config; takes about two seconds.

    Args:
        config: the effective configuration.
        log: file for what TensorFlow's libraries print while they are loaded; None leaves it on stderr.

    Raises:
        ConfigError: GPUs were asked for and TensorFlow sees none.
    """
    prepare_environment(config)
    with _stderr_to(log), _hidden("matplotlib"):
        import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(num_threads(config))
    # One inter-op thread can hang on nested functions (tensorflow#38969)
    inter = int(config.local_tf_session_args.get("inter_op_parallelism_threads", 2))
    tf.config.threading.set_inter_op_parallelism_threads(max(2, min(inter, num_threads(config))))
    gpus = tf.config.list_physical_devices("GPU")
    if config.num_gpus > 0 and not gpus:
        raise ConfigError(
            f"num_gpus is {config.num_gpus:g}, but TensorFlow sees no GPU.",
            key="num_gpus",
            value=config.num_gpus,
            hint="Install aiorl[learner-gpu] on a host with CUDA, or set num_gpus: 0.",
        )
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    # the update says itself when it compiles for another size of batch; a warning about it would alarm for nothing
    tf.get_logger().addFilter(lambda record: "tf.function retracing" not in record.getMessage())
    if config.eager:
        tf.config.run_functions_eagerly(True)


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Let imports of an optional package fail: Keras would load pyplot for helpers of its own, half a second."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # how the import system is told so
    try:
        yield
    finally:
        del sys.modules[package]


@contextlib.contextmanager
def _stderr_to(log: Path | None) -> Iterator[None]:
    """Send the process's standard error to a file: no setting keeps TensorFlow's libraries from greeting there."""
    if log is None:
        yield
        return
    saved = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
