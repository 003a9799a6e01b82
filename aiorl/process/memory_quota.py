"""Bound of the memory that a process takes by itself, which ends it with an error that says so."""

from __future__ import annotations

import asyncio
import os

from aiorl.errors import MemoryQuotaError

__all__ = ["check_heap", "heap_bytes", "keep_within"]

_EVERY_S = 0.2
_PAGE = os.sysconf("SC_PAGE_SIZE")


def heap_bytes() -> int:
    """Resident memory of this process that is its own: heaps and stacks, without libraries and other mapped files.

    Where the system does not tell these apart, all that is resident; 0 where no descriptor is left to look with.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared = map(int, file.read().split()[:3])
        return (resident - shared) * _PAGE
    except OSError:
        pass
    try:
        import psutil

        return int(psutil.Process().memory_info().rss)
    except Exception:  # whatever an import or psutil makes of it
        return 0


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
