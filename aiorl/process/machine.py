"""This process and the machine it runs on: cores, memory, age, who looks into it, and its forked children.

A forked child ends when it exits or fails, as a child of any program does. Only the forking thread lives on in it. Exit
handlers of C++ libraries wait there for the others: with ONNX Runtime's, a child that calls ``sys.exit`` never ends. So
C's exit ends a child at once, after Python's handlers.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

from aiorl.errors import MemoryQuotaError


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


_START_TIME = 19
"""Place of the start time in /proc/PID/stat, counted from behind the program's name."""


def age_s() -> float:
    """Seconds since this process was started.

    On Linux both ends are told by one clock, that of the kernel. The hour at which the kernel was booted, which is what
    is left to add to a start time in order to compare it with the hour, is known in whole seconds only.

    Returns: NaN where it can't be told, for want of a descriptor to look with.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        started_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError):  # another system
        pass
    try:
        return float(time.time() - psutil.Process().create_time())
    except (OSError, psutil.Error):
        return math.nan


_EVERY_S = 0.2


def heap_bytes() -> int:
    """Resident memory of this process that is its own: heaps and stacks, without libraries and other mapped files.

    Where the system does not tell these apart, all that is resident; 0 where no descriptor is left to look with.
    """
    try:
        taken = psutil.Process().memory_info()
    except (OSError, psutil.Error):
        return 0
    return int(taken.rss - getattr(taken, "shared", 0))


def check_heap(max_bytes: int, key: str) -> None:
    """Raise MemoryQuotaError if this process has taken more than a setting allows it.

    Args:
        max_bytes: 0 is no quota.
        key: the setting, for the error.
    """
    taken = heap_bytes() if max_bytes else 0
    if taken > max_bytes:
        raise MemoryQuotaError(key, max_bytes, taken)


async def keep_within(max_bytes: int, key: str) -> None:
    """`check_heap` again and again, beside the loop, until it raises or is cancelled."""
    while True:
        check_heap(max_bytes, key)
        await asyncio.sleep(_EVERY_S)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can take: what the machine has left, or its control groups.

    Args:
        root: of the file system; tests have one of their own.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(root)])


def _left_in_groups(root: Path) -> list[int]:
    """Bytes left in this process's control groups and those around them, as far as they have limits."""
    left: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, limit, usage, inactive = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            inactive = "total_inactive_file"
        else:
            continue
        top = root / "sys/fs/cgroup" / base
        group = top / path.strip("/")
        for place in (group, *group.parents):
            most, used = _text(place / limit).strip(), _text(place / usage).strip()
            if most.isdecimal() and used.isdecimal():
                left.append(max(0, int(most) - int(used) + _reclaimable(place / "memory.stat", inactive)))
            if place == top:
                break
    return left


def _reclaimable(stat: Path, name: str) -> int:
    """Bytes of files that the system keeps in memory only while nobody wants it."""
    for line in _text(stat).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _text(path: Path) -> str:
    """What is in a file; nothing where it can't be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


_EVENTS = ("builtins.breakpoint", "sys.settrace")
_NUM_TOOLS = 6  # of sys.monitoring


def is_looked_into() -> bool:
    """Whether a debugger or a profiler is at work."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(_NUM_TOOLS)]
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


def on_debugger(make_way: Callable[[], None]) -> None:
    """Call ``make_way`` once before a debugger asks its user something; at once if one is at work already.

    By an audit hook, which stays for the life of the process: for programs, not for libraries.
    """
    if is_looked_into():
        make_way()
        return
    has_come = False

    def look(event: str, arguments: object) -> None:
        nonlocal has_come
        if event in _EVENTS and not has_come:
            has_come = True
            make_way()

    sys.addaudithook(look)


T = TypeVar("T")


@functools.cache
def let_children_end() -> None:
    """Have children that this process forks from now on end without exit handlers of C++ libraries; once is enough."""
    os.register_at_fork(after_in_child=_skip_exit_handlers)


def keep_children_out(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; a child that it forks, and that raises in it, ends there instead of coming back."""
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
    status, said = 1, ""
    if not isinstance(error, SystemExit):
        said = "".join(traceback.format_exception(error))
    elif isinstance(error.code, int | None):
        status = (error.code or 0) & 0xFF
    else:
        said = f"{error.code}\n"
    try:
        os.write(2, said.encode(errors="replace"))
    finally:
        os._exit(status)


def _skip_exit_handlers() -> None:
    program = ctypes.CDLL(None)
    if hasattr(program, "on_exit"):  # glibc: calls the last one registered first, with the exit status
        program.on_exit(program._exit, None)
