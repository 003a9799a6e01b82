"""The live panel that a run shows on a terminal."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import termios
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

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
    sparkline,
    steps_text,
    summary_lines,
)

_REFRESH_S = 0.25
_NUM_EVENTS = 6
_STYLES = {logging.INFO: "", logging.WARNING: "yellow", logging.ERROR: "bold red"}


class LiveDisplay:
    """One panel that is redrawn in place, at most four times a second."""

    def __init__(self, headline: Headline, console: Console) -> None:
        self._headline, self._console = headline, console
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=True, redirect_stderr=True)
        self._result: Mapping[str, Any] = {}
        self._returns: list[float] = []
        self._events: deque[tuple[float, str, int]] = deque(maxlen=_NUM_EVENTS)
        self._status = "starting"
        self._join = ""
        self._shown: Panel | None = None
        self._size = console.size
        self._started = self._now = self._drawn = math.nan

    def start(self, now: float) -> None:
        """Begins to show."""
        self._started = now
        self._echo_control(False)
        self._live.start()
        self._draw(now, force=True)

    def status(self, text: str, now: float) -> None:
        """Says what is waited for, until the first result."""
        self._status = text
        self._draw(now, force=True)

    def join(self, command: str, now: float) -> None:
        """Says how more workers join, whole: on as many lines as it takes."""
        self._join = command
        self._draw(now, force=True)

    def update(self, result: Mapping[str, Any], now: float) -> None:
        """Shows a result's figures."""
        self._result = result
        mean = number_at(result, "episode_reward_mean")
        if math.isfinite(mean):
            self._returns.append(mean)
            if len(self._returns) > 2048:
                self._returns = self._returns[::2]
        self._draw(now)

    def event(self, text: str, now: float, level: int = logging.INFO) -> None:
        """Shows something that happened below the figures."""
        self._events.append((now - self._started, text, level))
        self._draw(now)

    def tick(self, now: float) -> None:
        """Lets the clock go on."""
        self._draw(now)

    def finish(self, summary: Summary, now: float) -> None:
        """Leaves the last figures on the screen, and writes the summary below."""
        self._draw(now, force=True)
        self.close()
        # Not cropped and not wrapped, so that commands can be copied whole.
        for line in summary_lines(summary):
            style = "dim" if line.startswith("  #") else ""
            if line == summary.reason:
                style = "bold green" if summary.ok else "bold red"
            self._console.print(Text(line, style=style), soft_wrap=True)

    def close(self) -> None:
        """Gives the terminal back."""
        self._live.stop()
        self._echo_control(True)

    def _echo_control(self, is_on: bool) -> None:
        """Have the terminal show Ctrl-C as ^C, or not: behind a full line it would begin another, and tear the panel.

        Only in the foreground: others who touch a terminal are stopped.
        """
        with contextlib.suppress(OSError, ValueError, termios.error):
            terminal = self._console.file.fileno()
            if os.tcgetpgrp(terminal) == os.getpgrp():
                modes = termios.tcgetattr(terminal)
                modes[3] = modes[3] | termios.ECHOCTL if is_on else modes[3] & ~termios.ECHOCTL
                termios.tcsetattr(terminal, termios.TCSANOW, modes)

    def _draw(self, now: float, *, force: bool = False) -> None:
        self._now = now
        if not self._live.is_started or (not force and now - self._drawn < _REFRESH_S):
            return
        self._drawn = now
        self._take_back_what_was_wrapped()
        self._shown = self._panel()
        self._live.update(self._shown, refresh=True)

    def _take_back_what_was_wrapped(self) -> None:
        """Erase what a narrower terminal has made of the last frame: each of its lines stands on several now.

        rich erases as many lines as it has drawn.
        """
        former, self._size = self._size, self._console.size
        if self._shown is None or self._size.width >= former.width:
            return
        options = self._console.options.update_dimensions(former.width, former.height).update(height=None)
        num_lines = min(len(self._console.render_lines(self._shown, options, pad=False)), former.height)
        num_more = num_lines * (math.ceil(former.width / self._size.width) - 1)
        erase, up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
        self._console.control(Control(ControlType.CARRIAGE_RETURN, *(erase, up) * num_more))

    def _panel(self) -> Panel:
        head, result = self._headline, self._result
        title = Text.assemble(("aiorl ", "bold"), (head.algo, "bold cyan"), " on ", (head.env, "bold cyan"))
        parts: list[Any] = [self._figures() if result else Text(self._status, style="italic")]
        by_policy = policy_returns_text(result)
        if by_policy:
            line = Text.assemble(("policies  ", "dim"), by_policy)
            line.truncate(self._console.width - 4, overflow="ellipsis")
            parts.append(line)
        width = max(10, self._console.width - 30)
        if len(self._returns) > 1:
            curve = sparkline(self._returns, width=min(width, 90))
            ends = f" {min(self._returns):.4g} to {max(self._returns):.4g}"
            parts.append(Text.assemble(("return  ", "dim"), (curve, "cyan"), (ends, "dim")))
        if self._join:
            parts.append(Text.assemble(("join    ", "dim"), self._join, overflow="fold"))
        if self._events:
            parts.append(Text(""))
            for at, text, level in self._events:
                line = Text.assemble((f"{clock_text(at)}  ", "dim"), (text, _STYLES.get(level, "")))
                line.truncate(self._console.width - 4, overflow="ellipsis")
                parts.append(line)
        subtitle = Text(f"{clock_text(self._now - self._started)}   Ctrl-C ends the run and keeps it", style="dim")
        return Panel(Group(*parts), title=title, title_align="left", subtitle=subtitle, subtitle_align="right",
                     border_style="cyan", padding=(0, 1))  # fmt: skip

    def _figures(self) -> Table:
        head, result = self._headline, self._result
        alive = int(result.get("num_healthy_workers", 0))
        style = "bold red" if alive == 0 else "yellow" if alive < head.num_workers else "green"
        workers = str(alive) if alive > head.num_workers else f"{alive} of {head.num_workers}"
        if head.is_alone:
            workers, style = "this process", "green"
        received = bytes_text(number_at(result.get("transport", {}), "bytes_in_per_s"))
        figures: list[tuple[str, str | Text]] = [
            ("mean return", Text(mean_return_text(result, head), style="bold green")),
            ("sampled/s", rate_text(number_at(result, "sampled_steps_per_s"))),
            ("workers", Text(workers, style=style)),
            ("env steps", steps_text(result, head)),
            ("trained/s", rate_text(number_at(result, "trained_steps_per_s"))),
            ("policy lag", lag_text(result)),
            ("episodes", f"{int(result.get('episodes_total', 0)):,}"),
            ("iteration", f"{int(result.get('training_iteration', 0)):,}"),
            ("received", f"{received}/s"),
        ]
        table = Table.grid(padding=(0, 1), expand=True)
        for share in (5, 3, 3):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(no_wrap=True, ratio=share)
        for row in range(0, len(figures), 3):
            table.add_row(*itertools.chain.from_iterable(figures[row : row + 3]))
        return table
