from __future__ import annotations

import io
import logging
import os
import pty
import re
import termios
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from aiorl.run.report.console import LiveDisplay
from aiorl.run.report.figures import Headline, Summary

HEADLINE = Headline("ppo", "CartPole-v1", num_workers=2, goals={"stop_return": 475})
RESULT: dict[str, Any] = {
    "training_iteration": 42,
    "timesteps_total": 1_234_567,
    "episodes_total": 310,
    "episode_reward_mean": 300.0,
    "episode_reward_mean_last_100": 312.4,
    "sampled_steps_per_s": 349_123.0,
    "trained_steps_per_s": 1.2e6,
    "policy_lag": {"min": 0.0, "mean": 0.5, "max": 1.0},
    "num_healthy_workers": 2,
    "transport": {"bytes_in_per_s": 1.23e7},
}


Make = Callable[..., tuple[LiveDisplay, Console]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes started displays in a console; all are closed at the end."""
    made: list[LiveDisplay] = []

    def build(width: int = 80, file: Any = None) -> tuple[LiveDisplay, Console]:
        console = Console(
            file=file or io.StringIO(),
            force_terminal=True,
            width=width,
            height=60,
            color_system=None,
        )
        made.append(LiveDisplay(HEADLINE, console))
        made[-1].start(0.0)
        return made[-1], console

    yield build
    for display in made:
        display.close()


def last_frame(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text[text.rindex("╭") :]


@pytest.mark.parametrize("width", [80, 120])
def test_all_figures_are_complete_at_usual_widths(make: Make, width: int) -> None:
    display, console = make(width)
    for number in range(60):
        display.update({**RESULT, "episode_reward_mean": float(number)}, 1.0)
    display.event("worker 1 joined", 2.0)
    display.event("worker 2 was lost " + "x" * 200, 2.0, logging.WARNING)
    display.tick(65.0)
    frame = last_frame(console)
    for figure in (
        "ppo",
        "CartPole-v1",
        "312.4",
        "475",
        "349 k",
        "1.20 M",
        "1,234,567",
        "0/0.5/1",
        "12.3 MB/s",
        "310",
        "42",
        "▁▁",
        "██",
        "worker 1 joined",
        "worker 2 was lost",
        "01:05",
    ):
        assert figure in frame, figure
    assert all(
        len(line) == width for line in frame.splitlines() if line.startswith(("╭", "│", "╰"))
    )


def test_at_most_four_frames_are_drawn_per_second(make: Make) -> None:
    display, console = make()
    for number in range(1000):
        display.update(RESULT, number / 1000)
    assert console.file.getvalue().count("╭") <= 6


def test_the_status_is_shown_until_the_first_result(make: Make) -> None:
    display, console = make()
    display.status("waiting for 2 workers", 0.1)
    assert "waiting for 2 workers" in last_frame(console)
    display.update({**RESULT, "policy_reward_mean": {"left": 1.0, "right": -1.0}}, 1.0)
    assert "waiting for 2 workers" not in last_frame(console)
    assert "left 1.0, right -1.0" in last_frame(console)


def test_only_the_latest_events_are_shown(make: Make) -> None:
    display, console = make()
    for number in range(20):
        display.event(f"event number {number};", float(number))
    frame = last_frame(console)
    assert "number 19;" in frame
    assert "number 14;" in frame
    assert "number 13;" not in frame


def test_the_summary_is_below_the_panel_in_whole_lines(make: Make) -> None:
    display, console = make()
    command = "aiorl train --resume runs/" + "x" * 80
    display.finish(Summary("Solved.", "runs/x", next_steps=[("continue", command)]), 1.0)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert f"  {command}" in lines
    assert "Solved." in lines


def test_the_join_command_is_readable_on_80_columns_throughout_the_run(make: Make) -> None:
    command = (
        "aiorl worker --connect tcp://learner-0.training.example.org:50571 --keys /home/me/keys"
    )
    display, console = make()
    display.way("join", command, 0.1)
    for number in range(20):
        display.event(f"event number {number};", float(number))
    display.update(RESULT, 30.0)
    inside = [line.strip("│ ").strip() for line in last_frame(console).splitlines()]
    assert command in " ".join(inside)


class Screen(io.StringIO):
    """Terminal of changing width that wraps its lines again when it gets narrower, as most do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [""]
        self.row = 0

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[\??\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\x1b[1A":
                self.row = max(0, self.row - 1)
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif not part.startswith(("\x1b", "\r")):
                self.rows[self.row] += part
        return len(text)

    def shrink(self, width: int) -> None:
        wrapped = [
            [row[at : at + width] for at in range(0, max(1, len(row)), width)] for row in self.rows
        ]
        self.row = sum(map(len, wrapped[: self.row + 1])) - 1
        self.rows = [row for rows in wrapped for row in rows]


@pytest.mark.parametrize("widths", [(80, 79), (100, 80, 60, 40)])
def test_a_narrower_terminal_shows_no_remains_of_former_frames(
    make: Make, widths: tuple[int, ...]
) -> None:
    screen = Screen()
    screen.write("$ a former command\n")
    display, console = make(widths[0], file=screen)
    display.way("join", "aiorl worker --connect tcp://127.0.0.1:5557", 0.1)
    for number, width in enumerate(widths):
        if number:
            screen.shrink(width)
            console.width = width
        display.update(RESULT, float(number))
    shown = [row for row in screen.rows if row]
    assert shown[0].startswith("$ a former command"[: min(widths)])
    assert sum("╭" in row for row in shown) == 1
    assert sum("╰" in row for row in shown) == 1
    begin = max(number for number, row in enumerate(shown) if "╭" in row)
    assert begin == 1, "\n".join(shown)


def test_ctrl_c_is_not_echoed_into_the_panel_and_is_again_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master, slave = pty.openpty()
    # as a shell sets it for its commands
    monkeypatch.setattr(os, "tcgetpgrp", lambda terminal: os.getpgrp())
    with os.fdopen(slave, "w") as terminal:
        display = LiveDisplay(HEADLINE, Console(file=terminal, force_terminal=True))

        def echoes() -> bool:
            return bool(termios.tcgetattr(terminal)[3] & termios.ECHOCTL)

        assert echoes()
        display.start(0.0)
        assert not echoes()
        display.close()
        assert echoes()
    os.close(master)
