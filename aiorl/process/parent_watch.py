"""End this process when its parent ends, however the parent ended.

The parent holds the other end of our standard input, and writes nothing to it but requests. When the parent is gone,
also by SIGKILL, the pipe ends. A thread waits for that, so that neither a blocked event loop nor an environment stuck
in C code can keep an orphan alive.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

__all__ = ["watch_parent"]


def watch_parent(
    on_lost: Callable[[], object] = lambda: None,
    *,
    on_line: Callable[[str], object] = lambda line: None,
    grace_s: float = 2.0,
) -> threading.Thread:
    """Start the watching thread.

    Args:
        on_lost: called once in the watching thread when the parent is gone, to end in an orderly way.
        on_line: called in the watching thread with each line that the parent writes.
        grace_s: seconds given to `on_lost` before the process is ended with status 3.
    """

    def wait_for_end() -> None:
        # a reader of its own: at the end of Python, sys.stdin must not be locked by a daemon thread
        with open(sys.stdin.fileno(), encoding="utf-8", errors="replace", closefd=False) as lines:
            for line in lines:
                on_line(line)
        try:
            on_lost()
        finally:
            threading.Event().wait(grace_s)
            os._exit(3)

    thread = threading.Thread(target=wait_for_end, name="parent-watch", daemon=True)
    thread.start()
    return thread
