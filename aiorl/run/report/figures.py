"""Figures and summary that a display shows, and short texts for numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiorl.config.command_line import as_typed
from aiorl.text import return_text

_NUM_POLICIES = 6
_BARS = "▁▂▃▄▅▆▇█"


class Headline(NamedTuple):
    """Contents and goals of a run, for the panel's title and figures.

    Attributes:
        algo: its algorithm.
        env: its environment.
        num_workers: workers that the learner starts; None if its process samples by itself.
        goals: bounds of the stop criteria by key.
    """

    algo: str
    env: str
    num_workers: int | None
    goals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcome of a run.

    Attributes:
        reason: one sentence, such as "Solved: mean return 476.2 over the last 100 episodes."
        run_dir: path of its run directory, or "" if there is nothing to show.
        ok: True unless the run failed.
        checkpoint: path of the newest checkpoint, or "" if there is none.
        picture: path of the learning curve's picture, or "" if there is none.
        next_steps: pairs to show: a purpose, and the command for it.
    """

    reason: str
    run_dir: str
    ok: bool = True
    checkpoint: str = ""
    picture: str = ""
    next_steps: Sequence[tuple[str, str]] = ()


def summary_lines(summary: Summary) -> list[str]:
    """Return the summary as plain lines; only the reason if there is nothing else to show."""
    if not summary.run_dir:
        return [summary.reason]
    lines = ["", summary.reason, "", f"  run directory   {summary.run_dir}"]
    if summary.picture:
        lines.append(f"  learning curve  {summary.picture}")
    if summary.checkpoint:
        lines.append(f"  checkpoint      {summary.checkpoint}")
    if summary.next_steps:
        lines += ["", "What to type next:"]
        for what, command in summary.next_steps:
            lines += [f"  # {what}", f"  {as_typed(command)}"]
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the course of `values` in at most `width` characters; each shows the mean of its
    share.
    """
    if not values:
        return ""
    num_shares = min(width, len(values))
    bounds = [round(i * len(values) / num_shares) for i in range(num_shares + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(bounds)]
    low = min(means)
    high = max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def figures(result: Mapping[str, Any], headline: Headline) -> dict[str, str]:
    """Return the figures of a result that displays show: text by name, with the goal if there is
    one.
    """
    steps = int(result.get("timesteps_total", 0))
    mean = number_at(result, "episode_reward_mean_last_100")
    goals = headline.goals
    goal = f", goal {goals['stop_return']:g}" if "stop_return" in goals else ""
    steps_text = f"{steps:,}"
    if "stop_timesteps" in goals:
        steps_text = f"{rate_text(steps)} of {rate_text(goals['stop_timesteps'])}"
    lag = [number_at(result.get("policy_lag", {}), name) for name in ("min", "mean", "max")]
    bytes_in_per_s = number_at(result.get("transport", {}), "bytes_in_per_s")
    return {
        "mean return": f"{return_text(mean)}{goal}" if math.isfinite(mean) else "no episode yet",
        "sampled/s": rate_text(number_at(result, "sampled_steps_per_s")),
        "workers": _workers_text(result, headline.num_workers),
        "env steps": steps_text,
        "trained/s": rate_text(number_at(result, "trained_steps_per_s")),
        "policy lag": "{:.0f}/{:.1f}/{:.0f}".format(*lag) if math.isfinite(lag[1]) else "-",
        "episodes": f"{int(result.get('episodes_total', 0)):,}",
        "iteration": f"{int(result.get('training_iteration', 0)):,}",
        "received": f"{bytes_text(bytes_in_per_s)}/s",
    }


def _workers_text(result: Mapping[str, Any], num_workers: int | None) -> str:
    if num_workers is None:
        return "this process"
    alive = int(result.get("num_healthy_workers", 0))
    if alive > num_workers:  # more can join than the run was started with
        return str(alive)
    return f"{alive} of {num_workers}"


def policy_returns_text(result: Mapping[str, Any]) -> str:
    """Return the mean return of each policy's agents, "left 1.0, right -1.0", or "" if there is
    only one policy.
    """
    means = result.get("policy_reward_mean") or {}
    if len(means) < 2:
        return ""
    text = ", ".join(
        f"{name:.24} {value:.1f}" for name, value in list(means.items())[:_NUM_POLICIES]
    )
    if len(means) > _NUM_POLICIES:
        text += f" and {len(means) - _NUM_POLICIES} more"
    return text


def rate_text(value: float) -> str:
    """Return a rate or count in a few characters: 9,999, 349 k, 1.34 M."""
    if not math.isfinite(value):
        return "-"
    if value < 10_000:
        return f"{value:,.0f}"
    if value < 1e6:
        return f"{value / 1000:,.0f} k"
    return f"{value / 1e6:,.2f} M"


def bytes_text(value: float) -> str:
    """Return a number of bytes in a few characters: 12.3 MB."""
    if not math.isfinite(value):
        return "-"
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def clock_text(seconds: float) -> str:
    """Return a duration as minutes:seconds, or hours:minutes:seconds."""
    whole = max(0, int(seconds)) if math.isfinite(seconds) else 0
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes:02}:{seconds:02}"


def number_at(values: Mapping[str, Any], name: str) -> float:
    """Return the number with that name, or NaN if there is none."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
