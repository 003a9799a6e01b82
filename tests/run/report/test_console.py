from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest

from aiorl.run.report.console import (
    DisplayHandler,
    LiveDisplay,
    PlainDisplay,
    make_display,
    with_progress_line,
)
from aiorl.run.report.figures import Headline, Summary

HEADLINE = Headline("ppo", "CartPole-v1", num_workers=2, goals={"stop_return": 475})


def result(iteration: int, **more: Any) -> dict[str, Any]:
    return {
        "training_iteration": iteration,
        "timesteps_total": iteration * 100,
        "sampled_steps_per_s": 5e4,
        "trained_steps_per_s": 4e4,
        "num_healthy_workers": 2,
        "episode_reward_mean_last_100": 20.0,
        "transport": {"bytes_in_per_s": 1e6},
        "policy_lag": {"min": 0, "mean": 1, "max": 2},
        **more,
    }


def numbers_in(line: str) -> list[str]:
    return re.findall(r"\d(?:[\d.,:]*\d)?", line)


def test_plain_figures_come_at_most_once_a_second_and_always_at_the_end() -> None:
    stream = io.StringIO()
    display = make_display(HEADLINE, stream)
    assert isinstance(display, PlainDisplay)
    display.start(100.0)
    for number in range(21):
        display.update(result(number), 100.0 + number / 10)
    display.tick(101.9)
    display.finish(Summary("Ended.", "runs/x"), 102.05)
    head, *lines, _, ended, _, directory = stream.getvalue().splitlines()
    assert head.startswith("00:00  ")
    assert {"ppo", "CartPole-v1"} <= {*head.split()}
    assert [numbers_in(line)[1] for line in lines] == ["0", "10", "20"]
    assert (ended, directory.split()[-1]) == ("Ended.", "runs/x")
    display.update(result(2, policy_reward_mean={"left": 1.0, "right": -1.0}), 200.0)
    assert stream.getvalue().endswith(" left 1.0, right -1.0\n")
    assert " 1 MB/s " in stream.getvalue()


def test_results_pass_unchanged_with_their_figures_on_one_line() -> None:
    stream = io.StringIO()
    headline = HEADLINE._replace(goals={"stop_return": 475, "stop_timesteps": 100_000})
    for shown in with_progress_line([result(1), result(20), result(300)], headline, stream):
        if shown["training_iteration"] == 20:
            break
    assert stream.getvalue().count("\n") == 1
    _, first, second = stream.getvalue().split("\r")
    assert numbers_in(first)[1:] == ["1", "100", "100", "20.0", "475"]
    assert numbers_in(second)[1:] == ["20", "2,000", "100", "20.0", "475"]


def test_plain_events_are_marked_by_their_level() -> None:
    stream = io.StringIO()
    display = PlainDisplay(HEADLINE, stream)
    display.start(0.0)
    display.status("waiting for 2 workers", 0.5)
    display.event("worker 1 joined", 61.0)
    display.event("worker 1 was lost", 62.0, logging.WARNING)
    display.event("worker 1 failed", 63.0, logging.ERROR)
    _, waits, joined, lost, failed = stream.getvalue().splitlines()
    assert (waits, joined) == ("00:00  waiting for 2 workers", "01:01  worker 1 joined")
    assert re.fullmatch("01:02  .+: worker 1 was lost", lost)
    assert re.fullmatch("01:03  .+: worker 1 failed", failed)


class Faulty(io.StringIO):
    """Stream that fails to write on request."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def test_a_full_disk_loses_lines_and_a_reader_that_leaves_ends_them_but_not_the_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = Faulty()
    display = PlainDisplay(HEADLINE, stream)
    for now, error in enumerate(
        [OSError(28, "No space left on device"), None, BrokenPipeError(), None]
    ):
        stream.error = error
        display.start(0.0)
        display.event(f"event {now}", float(now))
    _, event = stream.getvalue().splitlines()
    assert event.endswith("  event 1")
    assert capsys.readouterr().err.count("\n") == 1


def test_text_that_the_stream_cannot_encode_is_escaped() -> None:
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding="ascii")
    PlainDisplay(HEADLINE, stream).event("caf\u00e9", 0.0)
    assert data.getvalue() == b"00:00  caf\\xe9\n"


def test_log_records_of_any_thread_become_events() -> None:
    stream = io.StringIO()
    display = PlainDisplay(HEADLINE, stream)
    display.start(0.0)
    handler = DisplayHandler()
    logger = logging.Logger("aiorl.test")
    logger.addHandler(handler)
    logger.info("not shown")
    logger.warning("worker %s is slow", 3)
    handler.drain(display, 1.0)
    handler.drain(display, 2.0)
    (line,) = stream.getvalue().splitlines()[1:]
    assert re.fullmatch("00:01  .+: worker 3 is slow", line)
    for number in range(1000):
        logger.warning("%s", number)
    handler.drain(display, 3.0)
    assert len(stream.getvalue().splitlines()) == 102


class Terminal(io.StringIO):
    """Stream that claims to be a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_live_panel_and_a_dumb_one_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_display(HEADLINE, Terminal()), LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(HEADLINE, Terminal()), PlainDisplay)
