"""Makes the C library keep the memory that messages are put in, and give back now and then what lies idle.

ZeroMQ allocates each large frame and frees it once decoded columns are dropped. glibc hands such memory back to
the system at once and takes it again for the next frame, each page faulted in anew: on one TCP connection with
frames of 128 KiB that costs half to two thirds of the throughput (measured: 0.6 to 1.8 GB/s as it comes, 2.3 to
3.2 GB/s with what is set here).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes

__all__ = ["give_back_idle_memory", "give_back_regularly", "keep_message_buffers", "share_one_heap"]

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


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
