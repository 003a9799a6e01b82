from __future__ import annotations

import asyncio
import math
import mmap
import resource

import pytest

from aiorl.errors import MemoryQuotaError
from aiorl.process.age import age_s
from aiorl.process.memory_quota import check_heap, heap_bytes, keep_within

MIB = 2**20


def take(mib: int) -> mmap.mmap:
    """Memory fresh from the system: an allocator may hand out what the process held and had freed before."""
    block = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[:: mmap.PAGESIZE] = b"x" * (mib * MIB // mmap.PAGESIZE)
    return block


def test_what_this_process_takes_is_told() -> None:
    before = heap_bytes()
    with take(64):
        assert 60 * MIB < heap_bytes() - before < 80 * MIB


def test_beyond_its_quota_a_process_has_an_error_that_names_the_setting() -> None:
    check_heap(0, "memory")
    check_heap(heap_bytes() + 64 * MIB, "memory")
    with pytest.raises(MemoryError, match=r"memory is 1,048,576 bytes, but .* has taken [0-9,]+\. Set more") as caught:
        check_heap(MIB, "memory")
    error = caught.value
    assert isinstance(error, MemoryQuotaError)
    assert (error.key, error.max_bytes) == ("memory", MIB)


def test_it_is_looked_at_again_and_again() -> None:
    blocks: list[mmap.mmap] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, lambda: blocks.append(take(128)))
        await asyncio.wait_for(keep_within(heap_bytes() + 64 * MIB, "memory"), 20)

    with pytest.raises(MemoryQuotaError):
        asyncio.run(main())
    assert len(blocks) == 1


def test_out_of_descriptors_no_process_is_ended_for_what_cannot_be_measured() -> None:
    """It once ended the run of a learner that strangers had left without any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            open("/proc/self/statm", "rb")  # noqa: SIM115
        check_heap(1, "memory")
        assert math.isnan(age_s())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
