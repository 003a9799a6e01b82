"""Settings of all tests.

XLA keeps its compiled code while the tests run, and not in the user's home.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import quick_seeds
import quick_variables
from forked_children import forking
from hypothesis import HealthCheck, settings
from learner_server import can_fork, share_server

QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Flags for code that runs once or twice. Processes that tests start compile as users' processes
do."""
MEMORY = "/dev/shm"
WAITING = ("launch", "transport", "process", "env", "worker")
LONG = (
    "examples",
    "learning",
    "integration",
    "trainer",
    "export",
    "algorithms",
    "models",
    "protocol",
)


# no test depends on the clock: a busy machine takes long to draw and to run an example
settings.register_profile(
    "aiorl", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("aiorl")


def pytest_configure(config: pytest.Config) -> None:
    """Set variables in the first process.

    The others inherit them, as do the learners that tests start.
    """
    # hundreds of processes import the same modules, and pytest compiles each test file: once is
    # enough
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # a fifth of an export goes into copies of the graph to go back to if an optimisation of it
    # fails, which is an error here
    os.environ["TF2ONNX_CATCH_ERRORS"] = "FALSE"
    # a script that starts tests in the background makes them and their children ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (
        config.getoption("numprocesses", None)
        and os.path.isdir(MEMORY)
        and shutil.disk_usage(MEMORY).free > 4 << 30
    ):
        # hundreds of checkpoints wait for the disk elsewhere
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    if "PYTEST_XDIST_WORKER" in os.environ or "TF_XLA_FLAGS" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="compiled-")
    flags = (
        f"--tf_xla_persistent_cache_directory={folder} --tf_xla_persistent_cache_device_types=CPU"
    )
    os.environ["TF_XLA_FLAGS"] = flags
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if can_fork and config.getoption("numprocesses", None):
        config.add_cleanup(share_server())


def pytest_collection(session: pytest.Session) -> None:
    """Pause the garbage collector while modules are imported, since they all stay, and have XLA
    compile quickly.
    """
    if session.config.getoption("numprocesses", None):
        return  # others collect
    gc.disable()
    if session.config.option.markexpr in ("not slow", "slow and not nightly"):
        os.environ.setdefault("XLA_FLAGS", QUICK_XLA)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark further tests as slow because of other marks, and order the files selected by ``-m``."""
    with_a_quick_case: set[str] = set()
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
        if item.get_closest_marker("rest_slow") and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if test in with_a_quick_case:
                item.add_marker("slow")
            with_a_quick_case.add(test)
    yield
    _order_files(items)


def _order_files(items: list[pytest.Item]) -> None:
    """Put folders with the longest files first, so that no process is alone with one of them in the
    end.

    Files that mostly wait alternate with them, to run along with files that need both cores.
    """
    rank = {folder: number for number, folder in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(LONG)))
    places: dict[Path, int] = {}
    counts = {True: 0, False: 0}
    for item in items:
        waits = item.path.parent.name in WAITING
        if item.path not in places:
            places[item.path] = 2 * counts[waits] + waits
            counts[waits] += 1
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude everything loaded so far from garbage collection, which took a tenth of the time."""
    if "tensorflow" in sys.modules and os.environ.get("XLA_FLAGS") == QUICK_XLA:
        import tensorflow as tf

        # reads the flags, which other processes don't get; no other process compiles the same code
        # now
        tf.function(lambda: tf.zeros(()) + float(os.getpid()), jit_compile=True, autograph=False)()
        quick_variables.install()
        if session.config.option.markexpr == "not slow":
            import quick_adam

            quick_adam.install()
            quick_seeds.install()
    if os.environ.get("XLA_FLAGS") == QUICK_XLA:
        del os.environ["XLA_FLAGS"]
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def forked_children() -> Iterator[None]:
    """Fork the processes that aiorl starts in this one."""
    with forking():
        yield


@pytest.fixture(scope="module", autouse=True)
def own_seeds() -> Iterator[None]:
    """Begin each file without operations of another one that draw numbers."""
    yield
    quick_seeds.forget()


def _own_log_level() -> Iterator[None]:
    """Restore the log level that a run changed, even a run that is never stopped."""
    level = logging.getLogger("aiorl").level
    yield
    logging.getLogger("aiorl").setLevel(level)


own_log_level = pytest.fixture(autouse=True)(_own_log_level)
own_log_level_of_module = pytest.fixture(autouse=True, scope="module")(_own_log_level)
