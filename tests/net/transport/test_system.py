"""Memory of received frames, which stays with the process."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys

import pytest

from aiorl.net.transport import system

needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc has these settings"
)


def run(program: str, *arguments: str) -> int:
    """Return the number that a Python program prints."""
    command = [sys.executable, "-c", program, *arguments]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


_CHURN = """
import ctypes, resource, sys
from aiorl.net.transport.system import keep_message_buffers
if sys.argv[1] == "keep":
    assert keep_message_buffers()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    blocks = [libc.malloc(130 << 10) for _ in range(64)]
    for block in blocks:
        ctypes.memset(block, 1, 130 << 10)
    for block in reversed(blocks):
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@needs_glibc
def test_freed_buffers_are_used_again_without_new_page_faults():
    faults = {mode: run(_CHURN, mode) for mode in ("keep", "as it comes")}
    assert faults["keep"] * 3 < faults["as it comes"], faults


_HOLES = """
import ctypes, psutil
from aiorl.net.transport.system import give_back_idle_memory, keep_message_buffers
assert keep_message_buffers()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(64 << 10) for _ in range(512)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
for block in blocks[::2]:
    libc.free(block)
before = psutil.Process().memory_full_info().uss
assert give_back_idle_memory()
print(before - psutil.Process().memory_full_info().uss)
"""


@needs_glibc
def test_idle_memory_between_blocks_in_use_is_given_back():
    assert run(_HOLES) > 10 << 20


_HEAPS = """
import ctypes, sys, threading
from aiorl.net.transport.system import share_one_heap
if sys.argv[1] == "one":
    assert share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
barrier, heaps = threading.Barrier(4), set()
def allocate():
    for _ in range(50):
        barrier.wait()
        heaps.add(libc.malloc(2000) >> 26)  # a heap of a thread is aligned to 64 MiB
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(heaps))
"""


@needs_glibc
def test_threads_share_one_heap_if_requested():
    heaps = {mode: run(_HEAPS, mode) for mode in ("one", "as it comes")}
    # the first heap may consist of two mappings
    assert heaps["one"] <= 2 < heaps["as it comes"], heaps


async def test_memory_is_given_back_later_where_no_thread_can_be_started_for_now(monkeypatch):
    given_back = asyncio.Event()
    tries = iter([RuntimeError("can't start new thread"), None])

    async def to_thread(call):
        if error := next(tries):
            raise error
        given_back.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    task = asyncio.create_task(system.give_back_regularly(0.001))
    await asyncio.wait_for(given_back.wait(), 10)
    task.cancel()
