"""`python -m aiorl.launch.ssh_learner`: the learner under `aiorl launch ssh`.

It shows what its launcher writes to it among its own events, outlives a closed terminal to save a
checkpoint, and ends with its launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from aiorl.process.children import watch_parent
from aiorl.process.imports import find_modules_here
from aiorl.process.program import end_at_once_on_stop_signals

logger = logging.getLogger("aiorl.launch.ssh")

_LEAVE_S = 60.0
_POLL_S = 0.1


def main() -> None:
    """Train with the options of the learner, and end the process."""
    end_at_once_on_stop_signals("aiorl")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher asks for an orderly end
    watch_parent(lambda: os.kill(os.getpid(), signal.SIGTERM), on_line=_show, grace_s=_LEAVE_S)
    find_modules_here()
    from aiorl.learner import command

    sys.argv[0] = "aiorl"  # for messages that name the command
    command()


def _show(line: str) -> None:
    """Show a line as soon as there is a display."""
    from aiorl.run.report.console import DisplayHandler

    while not any(isinstance(handler, DisplayHandler) for handler in logging.getLogger().handlers):
        time.sleep(_POLL_S)
    logger.warning("%s", line.rstrip())


if __name__ == "__main__":
    main()
