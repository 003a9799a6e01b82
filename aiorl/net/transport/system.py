"""Process settings for the transport: message memory that stays with the process, and enough file
descriptors.

ZeroMQ allocates each large frame, and frees it once the decoded columns are dropped. glibc returns
this memory to the system immediately and requests it again for the next frame, with a page fault
for each page. On one TCP connection with frames of 128 KiB this costs half to two thirds of the
throughput (measured: 0.6 to 1.8 GB/s by default, 2.3 to 3.2 GB/s with `keep_message_buffers`).
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
    """Keep up to ``max_kept_bytes`` of freed memory in the process; the setting holds for the whole
    process.

    Returns:
        True if the setting is in force; False if the C library isn't glibc.
    """
    return _set(
        {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: max_kept_bytes, _M_TOP_PAD: 16 << 20}
    )


def share_one_heap() -> bool:
    """Let all threads allocate from one heap; call it before the first thread starts.

    By default, a thread that allocates while another one does gets its own heap. Weights and
    messages are allocated in one thread and dropped in another, which would leave holes in both
    heaps.

    Returns:
        True if the setting is in force; False if the C library isn't glibc.
    """
    return _set({_M_ARENA_MAX: 1})


def give_back_idle_memory() -> bool:
    """Return free pages in the middle of the heaps to the system; takes about a millisecond for
    each 100 MB.

    Messages are allocated in one thread and freed in another, so heaps fragment. Without this call,
    a worker that gets two policies a second grows by about 5 MB an hour for hours.

    Returns:
        True if any pages were returned; False if none were, or if the C library isn't glibc.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0)))
    except (AttributeError, OSError, TypeError):
        return False


async def give_back_regularly(every_s: float = 60.0) -> None:
    """Call `give_back_idle_memory` every ``every_s`` seconds in a thread, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        with contextlib.suppress(RuntimeError):  # no thread can start: try again next time
            await asyncio.to_thread(give_back_idle_memory)


def _set(settings: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(
        [mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings.items()]
    )


def open_file_limit() -> int:
    """Return the number of files and connections that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def peers_per_port(max_peers: int) -> int:
    """Return how many connections each of two ports can take within the limit of open files, at
    most ``max_peers``.

    Half of the free descriptors, up to 1,024, stay free. Checkpoints, logs and pipes of workers
    need them, and so do excess connections, which exist for a moment until they are cut.
    """
    free = open_file_limit() - _num_open()
    reserve = min(free // 2, _MAX_RESERVE)
    return max(1, min(max_peers, (free - reserve) // 2))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
