"""What holds for all tests: what is compiled is kept, by XLA for as long as they run, and not in the user's home."""

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
from collections.abc import Iterator

import pytest
from learner_server import can_fork, share_server

QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""What is compiled here runs once or twice. Not in processes that tests start: these compile as users' do."""
LONG = ("integration", "examples", "trainer", "algorithms", "models", "protocol")


def pytest_configure(config: pytest.Config) -> None:
    """Done in the first process, whose environment the others get, learners that tests start included."""
    # Some hundred processes import the same modules, and pytest compiles each file of tests: once is enough
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Who starts tests in the background of a script has them ignore Ctrl-C, and what they start as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ or "TF_XLA_FLAGS" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="compiled-")
    flags = f"--tf_xla_persistent_cache_directory={folder} --tf_xla_persistent_cache_device_types=CPU"
    os.environ["TF_XLA_FLAGS"] = flags
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if can_fork and config.getoption("numprocesses", None):
        config.add_cleanup(share_server())


def pytest_collection(session: pytest.Session) -> None:
    """Look for no garbage among what is imported and collected, which all stays; have XLA compile with little care."""
    if session.config.getoption("numprocesses", None):
        return  # others collect
    gc.disable()
    if session.config.option.markexpr == "not slow":
        os.environ.setdefault("XLA_FLAGS", QUICK_XLA)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put folders with the longest files first, so that no process is alone with one of them in the end.

    Nightly tests are slow ones, too.
    """
    rank = {folder: number for number, folder in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(LONG)))
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded by now stays, so that no collection of garbage looks through it: a tenth of the time."""
    if "tensorflow" in sys.modules and os.environ.get("XLA_FLAGS") == QUICK_XLA:
        import tensorflow as tf

        # reads the flags, which other processes don't get; nobody else compiles the same at the same time
        tf.function(lambda: tf.zeros(()) + float(os.getpid()), jit_compile=True)()
    if os.environ.get("XLA_FLAGS") == QUICK_XLA:
        del os.environ["XLA_FLAGS"]
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """What a run of one test logs, even one that is never stopped, is none of the next test's."""
    level = logging.getLogger("aiorl").level
    yield
    logging.getLogger("aiorl").setLevel(level)
