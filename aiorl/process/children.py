"""What a parent and the worker processes that it starts have agreed on.

Whatever ends a worker, its parent starts it again, unless the worker says with its exit status that this would be of no
use. A status of 0 says nothing: an environment may have called ``exit``. A learner hands things to its workers by
environment variables, which other users can't read. A worker takes them out of its environment before anything else
runs there, so that nothing it starts inherits them. A worker ends when its parent does, however that ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable

FAILED = 1
"""The worker failed; another one may do better."""
WRONG_USAGE = 2
"""The command line cannot be understood."""
RUN_IS_OVER = 32
"""The learner said goodbye for good."""
HOPELESS = 33
"""The worker failed, and would fail the same way again: the learner refused it for good, or its keys are unusable."""
STOPPED = 128 + signal.SIGTERM
"""The worker left in an orderly way because somebody asked it to, by a signal."""
DEFAULT_MAX_RESTARTS = 3
TRY_AGAIN_S = 10.0
"""How long to wait before a start is tried again that failed for a lack which may pass."""
_UVLOOP_MEANS_EMFILE = -1  # what its spawn raises where some descriptors are left, but too few
_LACKS = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, _UVLOOP_MEANS_EMFILE}
)
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HEALTHY_BEFORE_A_SIGNAL_S = 10.0


def status_text(status: int) -> str:
    """An exit status for people: a signal by its name."""
    with contextlib.suppress(ValueError):
        return f"status {status} ({signal.Signals(-status).name})"
    return f"status {status}"


def may_pass(error: OSError) -> bool:
    """Whether a start failed for want of processes, memory, descriptors or disk, which says nothing of the child."""
    return error.errno in _LACKS


class Restarts:
    """Counts the restarts of one child.

    At most ``max_restarts`` in a row, after pauses that grow. A child that has worked, and run for ``healthy_after_s``,
    gets its allowance back. If a signal ended it (a kill, a lack of memory, an abort in a C library), ten seconds are
    enough: that says little about the child.

    Attributes:
        in_a_row: restarts since the child last ran healthily.
    """

    def __init__(self, max_restarts: int, *, healthy_after_s: float = 60.0) -> None:
        self._max_restarts = max_restarts
        self._healthy_after_s = healthy_after_s
        self.in_a_row = 0

    def pause_after(self, status: int, lived_s: float, *, has_worked: bool = True) -> float | None:
        """Seconds to wait before the next start, which counts as made; None if there shall be none.

        Args:
            status: exit status of the child that has ended, negative for a signal.
            lived_s: how long it ran, seconds.
            has_worked: whether it has done anything of what it is there for, as far as its parent knows.
        """
        by_signal = status < 0 or status > 128
        healthy_s = min(_HEALTHY_BEFORE_A_SIGNAL_S, self._healthy_after_s) if by_signal else self._healthy_after_s
        if has_worked and lived_s > healthy_s:
            self.in_a_row = 0
        if status in (RUN_IS_OVER, HOPELESS, WRONG_USAGE) or self.in_a_row >= self._max_restarts:
            return None
        pause_s = _BACKOFF_S[min(self.in_a_row, len(_BACKOFF_S) - 1)]
        self.in_a_row += 1
        return pause_s


KEYS_VARIABLE = "AIORL_RUN_KEYS"
"""The run's keys, see `aiorl.net.transport.run_keys`."""
WORKER_ID_VARIABLE = "AIORL_WORKER_ID"
"""The name by which the learner will know the worker."""


def take_handed_over() -> dict[str, str]:
    """Take all of it out of this process's environment; what is not there is ""."""
    return {name: os.environ.pop(name, "") for name in (KEYS_VARIABLE, WORKER_ID_VARIABLE)}


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
