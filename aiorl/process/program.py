"""Signals and output of a program: it respects stop signals, and output errors never make it fail.

The first Ctrl-C, SIGTERM or SIGHUP (the terminal is closed) asks for an orderly end, and a second
one ends the process immediately. SIGHUP counts as SIGTERM, unless it is ignored, as under nohup.
This module loads almost nothing, since a signal can come while a program is still importing.
"""

from __future__ import annotations

import io
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


REPEATED_S = 0.5
"""Seconds in which a second stop signal is a repetition of the first: `timeout` and some supervisors
send one to a process and again to its group."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CTRL_C = "Ctrl-C"
"""Name of the signal that ends a run for good; after the others, it can continue."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end: not SIGHUP if its starter, such as nohup,
    has it ignored.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return _STOP_SIGNALS[:-1]
    return _STOP_SIGNALS


def status_after(number: int) -> int:
    """Return the exit status of a process that a stop signal has ended in order."""
    return 128 + (signal.SIGTERM if number == signal.SIGHUP else number)


def end_at_once_on_stop_signals(program: str) -> None:
    """End this process with one line when a stop signal comes, until ``on_stop_signals`` takes
    over.

    Use it while there is nothing to save or to end yet; otherwise Python would print a traceback.
    The status is 0 after Ctrl-C, and 143 after SIGTERM or SIGHUP.
    """

    def end(number: int, frame: object) -> None:
        with suppress(OSError):
            os.write(2, f"{program}: ended by {_name(number)} before the run began\n".encode())
        os._exit(0 if number == signal.SIGINT else status_after(number))

    for number in stop_signals():
        signal.signal(number, end)


def raise_open_file_limit() -> None:
    """Raise this process's limit of open files as far as permitted."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # macOS refuses what its kernel cannot hold
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def on_stop_signals(stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the name of the first stop signal; call this on the running loop.

    A second signal counts only after `REPEATED_S`.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    handle = _first_and_second(stop)
    for number in stop_signals():
        loop.add_signal_handler(number, handle, number)


def on_stop_signals_for_loop_of_another_thread(
    loop: asyncio.AbstractEventLoop, stop: Callable[[str], None], break_off: Callable[[], None]
) -> None:
    """Call ``stop`` with the name of the first stop signal, on a loop in another thread; call this
    in the main thread.

    The loop handles a signal immediately, even while the main thread is in a long C call. If a
    debugger handles Ctrl-C, the loop ignores it.

    Args:
        loop: event loop that calls ``stop``.
        stop: called with the name of the first signal.
        break_off: called in the main thread as soon as possible; can raise, like any signal
            handler.
    """
    import socket

    handle = _first_and_second(stop)
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)

    def interrupt(number: int, frame: object) -> None:
        break_off()

    def handle_all() -> None:
        for number in reader.recv(64):
            if signal.getsignal(number) is interrupt:
                handle(number)

    loop.call_soon_threadsafe(loop.add_reader, reader, handle_all)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    writer.detach()  # open until the process ends
    for number in stop_signals():
        signal.signal(number, interrupt)


def _first_and_second(stop: Callable[[str], None]) -> Callable[[int], None]:
    """Return the function to call with each stop signal."""
    import time

    first: float | None = None

    def handle(number: int) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            stop(_name(number))
        elif time.monotonic() - first > REPEATED_S:
            os._exit(status_after(number))

    return handle


def _name(number: int) -> str:
    return CTRL_C if number == signal.SIGINT else signal.Signals(number).name


def end_within(seconds: float, status: int) -> None:
    """End this process with a status after a time, since closing an event loop waits for threads,
    perhaps forever.
    """
    end_process = threading.Timer(seconds, os._exit, (status,))
    end_process.daemon = True
    end_process.start()


def log_to_stderr(level: str | None) -> None:
    """Send the log of a program without a display to `sys.stderr`, from this level of aiorl's on;
    None for INFO.
    """
    logging.basicConfig(
        level=logging.WARNING,
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        # logs of many hosts may be joined
        format=f"%(asctime)s {os.uname().nodename} %(levelname).1s %(message)s",
    )
    logging.getLogger("aiorl").setLevel("WARNING" if level == "WARN" else level or "INFO")


_without_reader: set[int] = set()


def keep_output_from_failing() -> None:
    """Replace `sys.stdout` and `sys.stderr` by line-buffered streams that drop output that cannot
    be written.

    Otherwise a ``print`` in an environment or a callback would fail when the disk of the log is
    full, and with it its caller.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:  # None in a program of a user's that was started without
            raw = _Lossy(descriptor, "wb", closefd=False)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=True,
            )
            setattr(sys, name, text)


def has_reader() -> bool:
    """Return False once writing to standard output has shown that no one reads it."""
    return 1 not in _without_reader


class _Lossy(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]  # any buffer
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                _without_reader.add(self.fileno())
            return memoryview(data).nbytes  # type: ignore[arg-type]
