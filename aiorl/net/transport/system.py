"""What the transport asks of its process: to keep the memory of messages, and to have enough descriptors.

ZeroMQ allocates each large frame and frees it once decoded columns are dropped. glibc hands such memory back to
the system at once and takes it again for the next frame, each page faulted in anew: on one TCP connection with
frames of 128 KiB that costs half to two thirds of the throughput (measured: 0.6 to 1.8 GB/s as it comes, 2.3 to
3.2 GB/s with `keep_message_buffers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MAX_RESERVE = 1024


def keep_message_buffers(*, max_kept_bytes: int = 256 << 20) -> bool:
    """Let up to ``max_kept_bytes`` of freed memory stay with the process; for the whole process.

    Returns: whether it is in force; False where the C library isn't glibc.
    """
    return _set({_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: max_kept_bytes, _M_TOP_PAD: 16 << 20})


def share_one_heap() -> bool:
    """Let all threads allocate from one heap; to be called before the first thread is started.

    Else a thread that allocates while another does gets a heap of its own. What comes in one thread and is dropped in
    another, as weights and messages are, then leaves holes in both.

    Returns: whether it is in force; False where the C library isn't glibc.
    """
    return _set({_M_ARENA_MAX: 1})


def give_back_idle_memory() -> bool:
    """Give free pages in the middle of the heaps back to the system; takes about a millisecond for each 100 MB.

    Messages are allocated in one thread and freed in another, so heaps fragment: without this a worker that takes up
    two policies a second grows by some 5 MB an hour for hours.

    Returns: whether any were given back; False where the C library isn't glibc.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0)))
    except (AttributeError, OSError, TypeError):
        return False


async def give_back_regularly(every_s: float = 60.0) -> None:
    """`give_back_idle_memory` again and again, beside the loop, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        with contextlib.suppress(RuntimeError):  # no thread can be started: there is a next time
            await asyncio.to_thread(give_back_idle_memory)


def _set(settings: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all([mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings.items()])


def raise_open_file_limit() -> int:
    """Raise this process's limit of open files as far as it may; returns the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses what its kernel cannot hold
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_file_limit()


def open_file_limit() -> int:
    """How many files and connections this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def peers_per_port(max_peers: int) -> int:
    """As many connections on each of two ports as the limit of open files allows, at most ``max_peers``.

    Half of what is free, up to 1,024, stays free: for checkpoints, logs and the pipes of workers, and for connections
    beyond the bound, which exist for a moment until they are cut.
    """
    free = open_file_limit() - _num_open()
    reserve = min(free // 2, _MAX_RESERVE)
    return max(1, min(max_peers, (free - reserve) // 2))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
