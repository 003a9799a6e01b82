"""The first steps of aiorl's commands: they survive closed streams, and Ctrl-C while they load
gives one line.

The package itself calls this module before it imports anything else, which takes a second in total.
It therefore imports almost nothing, and does nothing in programs of users.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["ONE_THREAD", "begin", "has_loaded", "is_command"]

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
"""Environment variables with which libraries of numbers use one thread. They read them when they
are loaded.
"""


def begin() -> None:
    """Prepare this process, one of aiorl's commands: until `has_loaded`, Ctrl-C ends it with one
    line.

    A signal that is ignored, as in the background of a shell, stays ignored.
    """
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that the starter has closed, as by ``>&-``.

    Otherwise the next file to be opened would get their numbers, and with them all that is written
    there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        # It gets the lowest free number: this one, unless a library has opened a file there
        # meanwhile.
        opened = os.open(os.devnull, os.O_RDWR)
        if opened == descriptor:
            os.set_inheritable(opened, True)
        mode = "r" if name == "stdin" else "w"
        stream = os.fdopen(opened, mode, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, stream)


def has_loaded() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as usual, unless a command handles it in its own way
    already.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_command() -> bool:
    """Return True if this process runs one of aiorl's modules or its script, not a program of a
    user's.
    """
    if sys.argv and os.path.basename(sys.argv[0]) == "aiorl":
        return True
    words = sys.orig_argv
    if "-m" not in words[:-1]:
        return False
    module = words[words.index("-m") + 1]
    return module.partition(".")[0] == "aiorl"


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, b"aiorl: ended by Ctrl-C\n")
    finally:
        os._exit(130)
