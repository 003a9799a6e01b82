"""Display of a run's progress and of its summary at the end.

On a terminal, a live panel shows the most important figures, a curve of the mean return, and the
latest events. Elsewhere (a file, a pipe, CI), plain lines have the time, with at most one line of
figures per second. Figures come from results; see `aiorl.run.report.results`. Call a display from
one thread only. `DisplayHandler` takes log records from other threads.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import termios
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from aiorl.process.program import has_reader
from aiorl.run.report.figures import (
    Headline,
    Summary,
    clock_text,
    figures,
    number_at,
    policy_returns_text,
    sparkline,
    summary_lines,
)

_PLAIN_S = 1.0
_MAX_PENDING = 100
_REFRESH_S = 0.25
_NUM_EVENTS = 6
_STYLES = {logging.INFO: "", logging.WARNING: "yellow", logging.ERROR: "bold red"}


def make_display(headline: Headline, stream: TextIO | None = None) -> Display:
    """Return a live panel if `stream` is a terminal that can show one, else a display of plain
    lines.

    Args:
        headline: what the run does.
        stream: stream to write to; None is stdout.
    """
    console = Console(file=stream or sys.stdout, highlight=False)
    is_capable = console.is_terminal and not console.is_dumb_terminal
    if is_capable and console.encoding.startswith("utf"):
        return LiveDisplay(headline, console)
    return PlainDisplay(headline, stream or sys.stdout)


class PlainDisplay:
    """Plain lines for files and pipes: figures at most once a second, events immediately."""

    def __init__(self, headline: Headline, stream: TextIO) -> None:
        self._headline = headline
        self._stream = stream
        self._result: Mapping[str, Any] | None = None
        self._shown_at = -math.inf
        self._has_no_reader = False
        self._started = math.nan

    def start(self, now: float) -> None:
        """Write the algorithm and the environment."""
        self._started = now
        self._line(f"aiorl: {self._headline.algo} on {self._headline.env}", now)

    def status(self, text: str, now: float) -> None:
        """Write the reason for a wait."""
        self._line(text, now)

    def way(self, name: str, text: str, now: float) -> None:
        """Write the command by which more workers join, or the address of the run's page or of its
        clients.
        """
        labels = {
            "join": "more workers join with",
            "page": "page of this run",
            "clients": "clients play at",
        }
        self._line(f"{labels[name]}: {text}", now)

    def update(self, result: Mapping[str, Any], now: float) -> None:
        """Write a result's figures if the last ones are a second old; otherwise keep them for
        later.
        """
        self._result = result
        if now - self._shown_at >= _PLAIN_S:
            self._figures(now)

    def event(self, text: str, now: float, level: int = logging.INFO) -> None:
        """Write an event."""
        mark = {logging.WARNING: "warning: ", logging.ERROR: "error: "}.get(level, "")
        self._line(f"{mark}{text}", now)

    def tick(self, now: float) -> None:
        """Write the figures kept back, if they are due."""
        if self._result is not None and now - self._shown_at >= _PLAIN_S:
            self._figures(now)

    def finish(self, summary: Summary, now: float) -> None:
        """Write the last figures and the summary."""
        if self._result is not None:
            self._figures(now)
        self._write("\n".join(summary_lines(summary)))

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _figures(self, now: float) -> None:
        result = self._result or {}
        self._result = None
        self._shown_at = now
        headline = self._headline
        texts = figures(result, headline._replace(goals={}))
        line = (
            f"iteration {texts['iteration']:<5} steps {texts['env steps']:<11}"
            f" return {texts['mean return']:<14} sampled/s {texts['sampled/s']:<8}"
            f" trained/s {texts['trained/s']:<8} lag {texts['policy lag']}"
        )
        if headline.num_workers is not None:
            line += f"  workers {texts['workers']}  in {texts['received']}"
        by_policy = policy_returns_text(result)
        if by_policy:
            line += f"  policies {by_policy}"
        self._line(line, now)

    def _line(self, text: str, now: float) -> None:
        self._write(f"{clock_text(now - self._started)}  {text}")

    def _write(self, text: str) -> None:
        if self._has_no_reader:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()
            self._has_no_reader = self._stream is sys.stdout and not has_reader()
        except BrokenPipeError:
            self._has_no_reader = True
        except OSError:
            pass  # a full disk loses this line, but perhaps not later ones
        # the reader has left (`| head`): that ends the output, not the training
        if self._has_no_reader:
            sys.stderr.write(
                "aiorl: standard output has no reader any more; the run continues, and Ctrl-C ends"
                " it\n"
            )


class LiveDisplay:
    """Live panel, redrawn in place at most four times a second."""

    def __init__(self, headline: Headline, console: Console) -> None:
        self._headline = headline
        self._console = console
        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True
        )
        self._result: Mapping[str, Any] = {}
        self._returns: list[float] = []
        self._events: deque[tuple[float, str, int]] = deque(maxlen=_NUM_EVENTS)
        self._status = "starting"
        self._ways: dict[str, str] = {}
        self._last_panel: Panel | None = None
        self._size = console.size
        self._started = self._now = self._drawn = math.nan

    def start(self, now: float) -> None:
        """Start to show the panel."""
        self._started = now
        self._echo_control(False)
        self._live.start()
        self._draw(now, force=True)

    def status(self, text: str, now: float) -> None:
        """Show the reason for a wait, until the first result."""
        self._status = text
        self._draw(now, force=True)

    def way(self, name: str, text: str, now: float) -> None:
        """Show the command by which more workers join (``join``), or the run's page or clients, in
        full.
        """
        self._ways[name] = text
        self._draw(now, force=True)

    def update(self, result: Mapping[str, Any], now: float) -> None:
        """Show a result's figures."""
        self._result = result
        mean = number_at(result, "episode_reward_mean")
        if math.isfinite(mean):
            self._returns.append(mean)
            if len(self._returns) > 2048:
                self._returns = self._returns[::2]
        self._draw(now)

    def event(self, text: str, now: float, level: int = logging.INFO) -> None:
        """Show an event below the figures."""
        self._events.append((now - self._started, text, level))
        self._draw(now)

    def tick(self, now: float) -> None:
        """Update the clock."""
        self._draw(now)

    def finish(self, summary: Summary, now: float) -> None:
        """Leave the last figures on the screen, and write the summary below."""
        self._draw(now, force=True)
        self.close()
        # neither cropped nor wrapped, so that commands can be copied whole
        for line in summary_lines(summary):
            style = "dim" if line.startswith("  #") else ""
            if line == summary.reason:
                style = "bold green" if summary.ok else "bold red"
            self._console.print(Text(line, style=style), soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal."""
        self._live.stop()
        self._echo_control(True)

    def _echo_control(self, is_on: bool) -> None:
        """Switch the terminal's echo of Ctrl-C as ^C: after a full line it would start a new one
        and break the panel.

        Does nothing in the background, where a process that changes the terminal is stopped.
        """
        with contextlib.suppress(OSError, ValueError, termios.error):
            terminal = self._console.file.fileno()
            if os.tcgetpgrp(terminal) == os.getpgrp():
                modes = termios.tcgetattr(terminal)
                if is_on:
                    modes[3] |= termios.ECHOCTL
                else:
                    modes[3] &= ~termios.ECHOCTL
                termios.tcsetattr(terminal, termios.TCSANOW, modes)

    def _draw(self, now: float, *, force: bool = False) -> None:
        self._now = now
        if not self._live.is_started or (not force and now - self._drawn < _REFRESH_S):
            return
        self._drawn = now
        self._erase_wrapped_lines()
        self._last_panel = self._panel()
        self._live.update(self._last_panel, refresh=True)

    def _erase_wrapped_lines(self) -> None:
        """Erase the extra lines of the last frame after the terminal became narrower, which wraps
        each line.

        rich erases only the number of lines that it drew.
        """
        former = self._size
        self._size = self._console.size
        if self._last_panel is None or self._size.width >= former.width:
            return
        options = self._console.options.update_dimensions(former.width, former.height)
        lines = self._console.render_lines(self._last_panel, options.update(height=None), pad=False)
        num_rows_per_line = math.ceil(former.width / self._size.width)
        num_extra = min(len(lines), former.height) * (num_rows_per_line - 1)
        erase_row_and_go_up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)]
        self._console.control(
            Control(ControlType.CARRIAGE_RETURN, *erase_row_and_go_up * num_extra)
        )

    def _panel(self) -> Panel:
        parts: list[Any] = []
        if self._result:
            parts.append(self._figures())
        else:
            parts.append(Text(self._status, style="italic"))
        by_policy = policy_returns_text(self._result)
        if by_policy:
            parts.append(self._truncated_line("policies  ", by_policy))
        if len(self._returns) > 1:
            width = max(10, self._console.width - 30)
            curve = sparkline(self._returns, width=min(width, 90))
            ends = f" {min(self._returns):.4g} to {max(self._returns):.4g}"
            parts.append(Text.assemble(("return  ", "dim"), (curve, "cyan"), (ends, "dim")))
        for name, text in self._ways.items():
            parts.append(Text.assemble((f"{name:8}", "dim"), text, overflow="fold"))
        if self._events:
            parts.append(Text(""))
        for at, text, level in self._events:
            parts.append(
                self._truncated_line(f"{clock_text(at)}  ", text, style=_STYLES.get(level, ""))
            )
        return Panel(
            Group(*parts),
            title=Text.assemble(
                ("aiorl ", "bold"),
                (self._headline.algo, "bold cyan"),
                " on ",
                (self._headline.env, "bold cyan"),
            ),
            title_align="left",
            subtitle=Text(
                f"{clock_text(self._now - self._started)}   Ctrl-C ends the run and keeps it",
                style="dim",
            ),
            subtitle_align="right",
            border_style="cyan",
            padding=(0, 1),
        )

    def _truncated_line(self, label: str, text: str, style: str = "") -> Text:
        """Return a line that fits into the panel: a label and a text."""
        line = Text.assemble((label, "dim"), (text, style))
        line.truncate(self._console.width - 4, overflow="ellipsis")
        return line

    def _figures(self) -> Table:
        num_workers = self._headline.num_workers
        alive = int(self._result.get("num_healthy_workers", 0))
        if num_workers is None or alive >= max(1, num_workers):
            colour = "green"
        elif alive:
            colour = "yellow"
        else:
            colour = "bold red"
        styles = {"mean return": "bold green", "workers": colour}
        cells: list[str | Text] = []
        for name, text in figures(self._result, self._headline).items():
            cells += [name, Text(text, styles.get(name, ""))]
        table = Table.grid(padding=(0, 1), expand=True)
        for share in (5, 3, 3):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(no_wrap=True, ratio=share)
        for row in range(0, len(cells), 6):
            table.add_row(*cells[row : row + 6])
        return table


def with_progress_line(
    results: Iterable[dict[str, Any]], headline: Headline, stream: TextIO | None = None
) -> Iterator[dict[str, Any]]:
    """Yield results, and show the figures of each on one line that the next overwrites, for
    notebooks and scripts.

    Args:
        results: results of a run.
        headline: what the run does.
        stream: stream to write to; None is stdout.

    Yields:
        The results, unchanged.
    """
    stream = stream or sys.stdout
    began = time.monotonic()
    width = 0  # of the last line, which the next one covers
    try:
        for result in results:
            texts = figures(result, headline)
            clock = clock_text(time.monotonic() - began)
            line = (
                f"{clock}  iteration {texts['iteration']}  steps {texts['env steps']}"
                f"  return {texts['mean return']}"
            )
            with contextlib.suppress(OSError):  # the reader has left
                stream.write(f"\r{line:{width}}")
                stream.flush()
            width = len(line)
            yield result
    finally:
        if width:
            with contextlib.suppress(OSError):
                stream.write("\n")


Display = LiveDisplay | PlainDisplay
"""Display of a run. Times are monotonic seconds; the run's own time starts at the first call. All
calls are fast."""


class DisplayHandler(logging.Handler):
    """Queue of log records from any thread, at most 100, that the display's own thread shows as
    events.
    """

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._pending: deque[tuple[str, int]] = deque(maxlen=_MAX_PENDING)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's message; tracebacks are in the log file only."""
        try:
            self._pending.append((record.getMessage(), record.levelno))
        except Exception:  # a wrong format string
            self.handleError(record)

    def drain(self, display: Display, now: float) -> None:
        """Show the messages received since the last call."""
        while self._pending:
            text, level = self._pending.popleft()
            display.event(text, now, level)
