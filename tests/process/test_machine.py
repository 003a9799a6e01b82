"""This process and its machine: age, memory, debuggers, forked children."""

from __future__ import annotations

import math
import mmap
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aiorl.process.machine import age_s, available_bytes, check_heap, heap_bytes, usable_cores

TELL = "from aiorl.process.machine import age_s; print(age_s())"
TICK_S = 0.02


def test_a_process_is_no_older_than_its_parent_has_seen_it() -> None:
    """H4: by wall-clock time, it could be a second more."""
    began = time.monotonic()
    age = subprocess.run(
        [sys.executable, "-c", TELL], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert 0 <= float(age) <= time.monotonic() - began + TICK_S


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        (None, {}, 1000),
        (
            "0::/user/job\n",  # a parent group
            {
                "user/job/memory.max": "max\n",
                "user/job/memory.current": "100\n",
                "user/memory.max": "700\n",
                "user/memory.current": "500\n",
                "user/memory.stat": "anon 300\ninactive_file 150\n",
            },
            700 - 500 + 150,
        ),
        (
            "5:cpu,cpuacct:/a\n4:memory:/docker/b\n",  # control groups version 1
            {
                "memory/docker/b/memory.limit_in_bytes": "400\n",
                "memory/docker/b/memory.usage_in_bytes": "390\n",
                "memory/docker/b/memory.stat": "total_inactive_file 5\n",
            },
            15,
        ),
        # as seen inside its namespace
        (
            "0::/\n",
            {"memory.max": "600\n", "memory.current": "900\n"},
            0,
        ),
        ("nonsense\n0::/x\n", {"x/memory.max": "many\n", "x/memory.current": "-1\n"}, 1000),
    ],
)
def test_available_memory_respects_control_groups(
    tmp_path: Path, groups: str | None, files: dict[str, str], available: int
) -> None:
    if groups is not None:
        write(tmp_path, {"proc/self/cgroup": groups})
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert available_bytes(tmp_path) == available


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (None, {}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "350000 100000\n"}, 3),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        (
            "3:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            8,
        ),
    ],
)
def test_cores_respect_affinity_and_control_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str | None,
    files: dict[str, str],
    cores: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    if groups is not None:
        write(tmp_path, {"proc/self/cgroup": groups})
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert usable_cores(tmp_path) == cores


MIB = 2**20


def take(mib: int) -> mmap.mmap:
    """Map new memory from the system, since an allocator could reuse memory that the process freed
    before.
    """
    block = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (mib * MIB // mmap.PAGESIZE)
    return block


def test_memory_taken_by_this_process_is_measured() -> None:
    before = heap_bytes()
    with take(64):
        assert 60 * MIB < heap_bytes() - before < 80 * MIB


def test_without_descriptors_no_process_is_ended_for_memory_that_cannot_be_measured() -> None:
    """This once ended the run of a learner that strangers had left without descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            open("/proc/self/statm", "rb")  # noqa: SIM115
        check_heap(1, "memory")
        assert math.isnan(age_s())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CODE = """
import sys
from aiorl.process.machine import is_debugged, on_debugger
{before}
on_debugger(lambda: print("make way"))
print("begun")
{after}
print(is_debugged())
"""


def lines_of(before: str = "", after: str = "") -> list[str]:
    code = CODE.format(before=before, after=after)
    options = {
        "input": "p 6 * 7\nc\nc\n",
        "capture_output": True,
        "text": True,
        "timeout": 30,
        "check": True,
    }
    return subprocess.run([sys.executable, "-c", code], **options).stdout.splitlines()  # type: ignore[call-overload]


def test_the_terminal_is_released_once_before_a_debugger_prompts() -> None:
    lines = lines_of(after="breakpoint()\nbreakpoint()")
    assert lines[:2] == ["begun", "make way"]
    assert lines.count("make way") == 1
    assert "(Pdb) 42" in lines


@pytest.mark.parametrize(("how", "line"), [("settrace", 0), ("setprofile", 0)])
def test_an_active_debugger_or_profiler_is_detected(how: str, line: int) -> None:
    lines = lines_of(before=f"sys.{how}(lambda *arguments: None)")
    assert lines[line] == "make way"
    assert lines[-1] == "True"


def test_without_a_debugger_nothing_is_done() -> None:
    assert lines_of() == ["begun", "False"]


PROGRAM = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
import aiorl.acting.acting_graph
from aiorl.process.machine import keep_children_out

def fork(leave):
    child = os.fork()
    if child == 0:
        leave()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return "it did not end"

def leave():
    sys.exit(7)

executor = ThreadPoolExecutor(1)
leaves = (leave, sys.exit, lambda: sys.exit("why"), lambda: 1 / 0)
print([executor.submit(keep_children_out, fork, leave).result() for leave in leaves], fork(leave))
"""


def test_a_forked_child_ends_with_its_own_status_whichever_thread_forked_it() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True
    )
    assert process.stdout == "[7, 0, 1, 1] 7\n"
    assert "why\n" in process.stderr
    assert "ZeroDivisionError" in process.stderr
