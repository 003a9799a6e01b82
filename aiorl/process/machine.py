"""This process and its machine: cores, memory, age, debuggers and forked children.

A forked child ends when it exits or fails, like a child of any program. It contains only the
forking thread, but exit handlers of C++ libraries wait for the others: with ONNX Runtime, a child
that calls ``sys.exit`` never ends. Therefore C's exit ends a child immediately after Python's
handlers.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from aiorl.errors import MemoryQuotaError
from aiorl.process.children import WORKERS_TOGETHER


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process can use, by its affinity and the quotas of its
    control groups.

    Args:
        root: root of the file system; tests use their own.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    for group in _groups(root, "cpu"):
        times = _text(group / "cpu.max").split() or [
            _text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        if all(map(str.isdecimal, times)):
            cores = min(cores, max(1, int(times[0]) // int(times[1])))
    return cores


def host_name() -> str:
    """Return the name of this host: as Slurm calls it in its jobs, otherwise that of the machine,
    which several nodes of Slurm can share.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def spare_cores() -> int:
    """Return the number of cores that stay idle if each worker started together with this one uses
    one.
    """
    together = os.environ.get(WORKERS_TOGETHER, "")
    num_workers = int(together) if together.isdecimal() else 1
    return max(0, usable_cores() - num_workers)


_START_TIME = 19
"""Index of the start time in /proc/PID/stat, counted after the program's name."""


def age_s() -> float:
    """Return the seconds since this process was started.

    On Linux, both times come from the kernel's clock. Converting the start time to wall-clock time
    instead would need the boot time, which is known only in whole seconds.

    Returns:
        The age; NaN if it cannot be determined for lack of a file descriptor.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        started_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError):  # another system
        pass
    import psutil  # takes long to load; the same below

    try:
        return float(time.time() - psutil.Process().create_time())
    except (OSError, psutil.Error):
        return math.nan


def is_still_at(descriptor: int | None, path: Path) -> bool:
    """Return True if a path leads to this open file; False for None, and if the file was removed or
    replaced.
    """
    if descriptor is None:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


_EVERY_S = 0.2
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group with its limit and its use, and the name of its inactive bytes; of both
versions."""


def heap_bytes() -> int:
    """Return the bytes of this process's own resident memory: heaps and stacks, without libraries
    and mapped files.

    This is all resident memory if the system does not distinguish these, and 0 if no file
    descriptor is left.
    """
    import psutil

    try:
        memory = psutil.Process().memory_info()
    except (OSError, psutil.Error):
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))


def check_heap(max_bytes: int, key: str) -> None:
    """Check that this process has not taken more memory than a setting allows.

    Args:
        max_bytes: the quota; 0 for none.
        key: name of the setting, for the error.

    Raises:
        MemoryQuotaError: it has taken more.
    """
    if not max_bytes:
        return
    num_bytes = heap_bytes()
    if num_bytes > max_bytes:
        raise MemoryQuotaError(key, max_bytes, num_bytes)


async def keep_within(max_bytes: int, key: str) -> None:
    """Call `check_heap` regularly until it raises or this is cancelled."""
    while True:
        check_heap(max_bytes, key)
        await asyncio.sleep(_EVERY_S)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that are left for this process on the machine and in its control
    groups.

    Args:
        root: root of the file system; tests use their own.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *_available_in_groups(root)])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's control groups for a controller, of both versions, each followed by its
    parents.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = top / path.strip("/")
            yield from (place for place in (group, *group.parents) if place.is_relative_to(top))


def _available_in_groups(root: Path) -> list[int]:
    """Return the bytes left in this process's control groups and their parents, for those with
    limits.
    """
    available: list[int] = []
    for group in _groups(root, "memory"):
        for limit, usage, inactive in _MEMORY_FILES:
            most = _text(group / limit).strip()
            used = _text(group / usage).strip()
            if most.isdecimal() and used.isdecimal():
                reclaimable = _reclaimable(group / "memory.stat", inactive)
                available.append(max(0, int(most) - int(used) + reclaimable))
    return available


def _reclaimable(stat: Path, name: str) -> int:
    """Return the bytes of cached files, which the system drops when the memory is needed."""
    for line in _text(stat).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _text(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


_EVENTS = ("builtins.breakpoint", "sys.settrace")
_NUM_TOOLS = 6  # number of tool ids in sys.monitoring


def is_debugged() -> bool:
    """Return True while a debugger or a profiler is active."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    return monitoring is not None and any(map(monitoring.get_tool, range(_NUM_TOOLS)))


def on_debugger(make_way: Callable[[], None]) -> None:
    """Call ``make_way`` once before a debugger prompts its user; immediately if a debugger is
    already active.

    This installs an audit hook, which stays for the life of the process: for programs, not for
    libraries.
    """
    if is_debugged():
        make_way()
        return
    is_called = False

    def look(event: str, arguments: object) -> None:
        nonlocal is_called
        if event in _EVENTS and not is_called:
            is_called = True
            make_way()

    sys.addaudithook(look)


T = TypeVar("T")


@functools.cache
def let_children_end() -> None:
    """Make children forked from now on end without exit handlers of C++ libraries; further calls
    have no effect.
    """
    os.register_at_fork(after_in_child=_skip_exit_handlers)


def keep_children_out(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; a child that is forked in it and raises an error there ends instead of
    returning.
    """
    let_children_end()
    process = os.getpid()
    try:
        return function(*arguments)
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        raise


def _end(error: BaseException) -> NoReturn:
    """End this process as an uncaught exception ends a program.

    Nothing is flushed, since another thread of the parent may have held a stream's lock.
    """
    status = 1
    text = ""
    if not isinstance(error, SystemExit):
        text = "".join(traceback.format_exception(error))
    elif isinstance(error.code, int | None):
        status = (error.code or 0) & 0xFF
    else:
        text = f"{error.code}\n"
    try:
        os.write(2, text.encode(errors="replace"))
    finally:
        os._exit(status)


def _skip_exit_handlers() -> None:
    program = ctypes.CDLL(None)
    # glibc calls the function registered last first, with the exit status.
    if hasattr(program, "on_exit"):
        program.on_exit(program._exit, None)
