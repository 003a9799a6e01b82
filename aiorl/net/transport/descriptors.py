"""How many connections the process's limit of open files allows, with some left over for files."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

__all__ = ["open_file_limit", "peers_per_port", "raise_open_file_limit"]

_MAX_RESERVE = 1024


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
