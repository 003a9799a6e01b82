"""What a run shows while it goes, and what it says at its end.

On a terminal: one live panel with the figures that matter, a curve of the mean return, and the latest events below.
Elsewhere (a file, a pipe, CI): plain lines, at most one figure line a second, each with its time. Figures come from
results, see `aiorl.run.report.results`. Displays are to be called from one thread; `DisplayHandler` brings log records
of others over.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console

from aiorl.process.program import has_reader
from aiorl.run.report.figures import (
    Headline,
    Summary,
    bytes_text,
    clock_text,
    lag_text,
    mean_return_text,
    number_at,
    policy_returns_text,
    rate_text,
    steps_text,
    summary_lines,
)
from aiorl.run.report.live_display import LiveDisplay

_PLAIN_S = 1.0
_MAX_PENDING = 100


def make_display(headline: Headline, stream: TextIO | None = None) -> Display:
    """A live panel if `stream` is a terminal that can show one, else plain lines.

    Args:
        headline: what the run is.
        stream: where to write; None is stdout.
    """
    console = Console(file=stream or sys.stdout, highlight=False)
    can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    if can_draw:
        return LiveDisplay(headline, console)
    return PlainDisplay(headline, stream or sys.stdout)


class PlainDisplay:
    """Lines for files and pipes: figures at most once a second, events as they come."""

    def __init__(self, headline: Headline, stream: TextIO) -> None:
        self._headline, self._stream = headline, stream
        self._result: Mapping[str, Any] | None = None
        self._shown_at = -math.inf
        self._gone = False
        self._started = math.nan

    def start(self, now: float) -> None:
        """Says what the run is."""
        self._started = now
        self._line(f"aiorl: {self._headline.algo} on {self._headline.env}", now)

    def status(self, text: str, now: float) -> None:
        """Says what is waited for."""
        self._line(text, now)

    def join(self, command: str, now: float) -> None:
        """Says how more workers join."""
        self._line(f"more workers join with: {command}", now)

    def update(self, result: Mapping[str, Any], now: float) -> None:
        """Writes a result's figures, if the last ones are a second old; else keeps them for the end."""
        self._result = result
        if now - self._shown_at >= _PLAIN_S:
            self._figures(now)

    def event(self, text: str, now: float, level: int = logging.INFO) -> None:
        """Writes something that happened."""
        mark = {logging.WARNING: "warning: ", logging.ERROR: "error: "}.get(level, "")
        self._line(f"{mark}{text}", now)

    def tick(self, now: float) -> None:
        """Writes figures that were held back, once they are due."""
        if self._result is not None and now - self._shown_at >= _PLAIN_S:
            self._figures(now)

    def finish(self, summary: Summary, now: float) -> None:
        """Writes the last figures and the summary."""
        if self._result is not None:
            self._figures(now)
        self._write("\n".join(summary_lines(summary)))

    def close(self) -> None:
        """Does nothing."""

    def _figures(self, now: float) -> None:
        result, self._result, self._shown_at = self._result or {}, None, now
        by_policy = policy_returns_text(result)
        self._line(
            f"iteration {int(result.get('training_iteration', 0)):<5,d}"
            f" steps {int(result.get('timesteps_total', 0)):<11,d}"
            f" return {mean_return_text(result, Headline('', '', 0)):<14}"
            f" sampled/s {rate_text(number_at(result, 'sampled_steps_per_s')):<8}"
            f" trained/s {rate_text(number_at(result, 'trained_steps_per_s')):<8}"
            f" lag {lag_text(result)}"
            + ("" if self._headline.is_alone else _workers_text(result))
            + (f"  policies {by_policy}" if by_policy else ""),
            now,
        )

    def _line(self, text: str, now: float) -> None:
        self._write(f"{clock_text(now - self._started)}  {text}")

    def _write(self, text: str) -> None:
        if self._gone:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()
            self._gone = self._stream is sys.stdout and not has_reader()
        except BrokenPipeError:
            self._gone = True
        except OSError:
            pass  # a full disk has no room for this line, perhaps for later ones
        if self._gone:  # whoever read the lines has left (`| head`): that ends the lines, not the training
            sys.stderr.write("aiorl: nobody reads standard output any more; the run goes on, and Ctrl-C ends it\n")


def shown_on_a_line(
    results: Iterable[dict[str, Any]], headline: Headline, stream: TextIO | None = None
) -> Iterator[dict[str, Any]]:
    """Yield results, and write the figures of each over those before, on one line: in notebooks and scripts.

    Args:
        results: of a run.
        headline: what the run is, with its goals.
        stream: where to write; None is stdout.
    """
    stream, began, width = stream or sys.stdout, time.monotonic(), 0
    try:
        for result in results:
            line = (
                f"{clock_text(time.monotonic() - began)}  iteration {int(result.get('training_iteration', 0)):,d}  "
                f"steps {steps_text(result, headline)}  return {mean_return_text(result, headline)}"
            )
            with contextlib.suppress(OSError):  # whoever read it has left
                stream.write(f"\r{line:{width}}")
                stream.flush()
            width = len(line)
            yield result
    finally:
        if width:
            with contextlib.suppress(OSError):
                stream.write("\n")


def _workers_text(result: Mapping[str, Any]) -> str:
    received = bytes_text(number_at(result.get("transport", {}), "bytes_in_per_s"))
    return f"  workers {result.get('num_healthy_workers', 0)}  in {received}/s"


Display = LiveDisplay | PlainDisplay
"""Shows a run. Times are monotonic seconds; the run's own time starts at the first call. All calls are cheap."""


class DisplayHandler(logging.Handler):
    """Keeps log records of any thread, at most 100, until the display's own thread shows them as events."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._pending: deque[tuple[str, int]] = deque(maxlen=_MAX_PENDING)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record's message; tracebacks stay in the log file."""
        try:
            self._pending.append((record.getMessage(), record.levelno))
        except Exception:  # a wrong format string
            self.handleError(record)

    def drain(self, display: Display, now: float) -> None:
        """Shows what came in since the last call."""
        while self._pending:
            text, level = self._pending.popleft()
            display.event(text, now, level)
