"""Accounts of runs: what a run does in plain words, its figures, and how far it is from its end."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiorl.config.addresses import RUN_FILE
from aiorl.config.files import parse_value
from aiorl.config.layers import CONFIG_FILE
from aiorl.errors import AiorlError
from aiorl.run.overview import STATUS_FILE
from aiorl.run.report.loggers import JSONL_FILE
from aiorl.status import status_of_run
from aiorl.text import one_line
from aiorl.watch.reading import config_text, films, last_result, log_entries, log_names, signature

FILES = (RUN_FILE, STATUS_FILE, JSONL_FILE, CONFIG_FILE, "log.txt")
"""Files whose changes a page shows."""
_SILENT_S = 20.0
_SETTLED_S = 120.0
"""Age of the newest change from which only another change is looked for."""
_SLOW_S = 30.0
_FAILED = "the learner failed"
_MAX_WORDS = 300
_MAX_FAILURES = 20
_HEAD = re.compile(r"(?m)^(algo|env|seed|stop_[a-z_]+): (.+)$")
_STOPS = {
    "stop_return": ("return", "episode_reward_mean_last_100", None),
    "stop_evaluation_return": ("evaluation", "evaluation_return", None),
    "stop_timesteps": ("env steps trained", "env_steps_trained_total", "trained_steps_per_s"),
    "stop_time_s": ("seconds", "time_total_s", "second_s"),
}
"""Stop criterion -> its words, its figure, and the rate of the figure, if it grows steadily."""


def plain(value: Any) -> Any:
    """Return a value of JSON with texts and numbers that every reader of JSON takes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 1 << 53 else None
    if isinstance(value, dict):
        return {plain(str(name)): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def number(values: object, name: str) -> float | None:
    """Return the finite number with a name in a mapping, None if there is none."""
    found = values.get(name) if isinstance(values, Mapping) else None
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < 1e18
    return float(found) if is_number else None  # type: ignore[arg-type]  # it is a number


class Run:
    """A run directory as a page shows it.

    Attributes:
        name: its name for people, which is unique in the page.
        path: the directory.
    """

    def __init__(self, name: str, path: Path) -> None:
        """Take over a directory without reading it yet."""
        self.name, self.path = name, path
        self._files: object = None
        self._glance: dict[str, Any] = {}
        self._account: dict[str, Any] = {}
        self._result: dict[str, Any] = {}
        self._evaluation: float | None = None
        self._log: tuple[object, list[dict[str, str]]] = (None, [])

    def glance(self) -> dict[str, Any]:
        """Return the run's most important figures."""
        files = signature(*(self.path / name for name in FILES))
        is_settled = time.time() - self._glance.get("changed", time.time()) > _SETTLED_S
        if files != self._files or not (is_settled or self._glance["phase"] in ("ended", "failed")):
            self._glance = self._look()
            self._files = files
        return self._glance

    def details(self) -> dict[str, Any]:
        """Return all that a page of this run shows besides curves, the config and whole logs."""
        glance = self.glance()
        at = signature(self.path / "log.txt")
        if at != self._log[0]:
            self._log = at, self._failures()
        return {
            "glance": glance,
            "account": {name: plain(self._account.get(name)) for name in ("learner", "workers", "gone", "num_gone")},
            "result": plain({name: value for name, value in self._result.items() if name != "hist_stats"}),
            "failures": self._log[1],
            "logs": log_names(self.path),
            "words": self._account.get("logs", {}),
            "films": films(self.path),
        }

    def config_head(self) -> dict[str, Any]:
        """Return algorithm, environment, seed and stop criteria; reading the whole config takes ten times as long."""
        found = _HEAD.finditer(config_text(self.path))
        values = {match[1]: parse_value(match[2]) for match in found}
        return {name: value for name, value in values.items() if isinstance(value, str | int | float)}

    def _failures(self) -> list[dict[str, str]]:
        return log_entries(self.path / "log.txt", level="ERROR")[0][-_MAX_FAILURES:]

    def _look(self) -> dict[str, Any]:
        try:
            account = status_of_run(self.path)
        except AiorlError:  # it has just begun, or is a copy of the results alone
            changed = max((at[2] for at in signature(*(self.path / name for name in FILES))), default=0) / 1e9
            account = {"silent_s": max(0.0, time.time() - changed), "is_alive": None}
        self._account, self._result = account, last_result(self.path) or _mapping(account.get("result"))
        head, result = self.config_head(), self._result
        evaluation = result.get("evaluation")
        self._evaluation = number(evaluation, "episode_reward_mean") or self._evaluation
        phase, words = self._phase()
        figures = {
            name: number(result, name)
            for name in (
                "training_iteration", "timesteps_total", "env_steps_trained_total", "updates_total", "episodes_total",
                "time_total_s", "sampled_steps_per_s", "trained_steps_per_s", "episode_reward_mean",
                "episode_reward_min", "episode_reward_max", "episode_reward_mean_last_100", "num_healthy_workers",
            )
        }  # fmt: skip
        figures |= {"evaluation_return": self._evaluation, "second_s": 1.0, "std": _spread(result)}
        figures["policy_lag"] = number(result.get("policy_lag"), "mean")
        if phase in ("ended", "failed", "gone", "unknown"):
            figures |= {"sampled_steps_per_s": None, "trained_steps_per_s": None}
        return {
            "name": self.name,
            "env": one_line(str(head.get("env", "")), 100),
            "algo": one_line(str(head.get("algo", "")), 100),
            "seed": head.get("seed"),
            "phase": phase,
            "words": plain(one_line(words, _MAX_WORDS)),
            "changed": time.time() - float(account["silent_s"]),
            "figures": figures,
            "stops": [_stop(name, head[name], figures) for name in _STOPS if number(head, name) is not None],
        }

    def _phase(self) -> tuple[str, str]:
        """Return the kind of thing that the run does, and a sentence about it."""
        account, learner = self._account, _mapping(self._account.get("learner"))
        silent_s, is_alive = float(account["silent_s"]), account.get("is_alive")
        end, state = learner.get("end"), str(learner.get("state") or "starting")
        if end == _FAILED:
            errors = self._failures()
            return (
                "failed",
                f"Failed: {errors[-1]['text']}" if errors else "The learner failed; its log has the reason.",
            )
        if end:
            return "ended", str(end)
        if is_alive is False:
            return "gone", "Its process is gone without a last word. It continues with --resume."
        if silent_s >= _SILENT_S:
            if is_alive:
                return "silent", "Its process exists, but has written nothing for a while."
            return "unknown", "No process of this host writes here."
        if not self._result:
            return "starting", f"{state[:1].upper()}{state[1:]}."
        waited_s = number(learner, "no_update_s") or 0.0
        if waited_s > _SLOW_S:
            said = str(account.get("learner_words") or "")
            return "waiting", f"No update for {waited_s:.0f} s. {said}"
        return "training", "Training."


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _spread(result: Mapping[str, Any]) -> float | None:
    """Return the standard deviation of the newest returns."""
    returns = _mapping(result.get("hist_stats")).get("episode_reward")
    found = [each for each in returns if type(each) in (int, float)] if isinstance(returns, list) else []
    found = [float(each) for each in found if abs(each) < 1e150]
    return statistics.pstdev(found) if found else None


def _stop(name: str, goal: Any, figures: Mapping[str, float | None]) -> dict[str, Any]:
    """Return how far a run is from a stop criterion, and the seconds left, if its figure grows steadily."""
    words, figure, rate = _STOPS[name]
    now, speed = figures.get(figure), None if rate is None else figures.get(rate)
    left_s = max(0.0, goal - now) / speed if speed and now is not None else None
    is_finite = left_s is not None and math.isfinite(left_s)
    return {"words": words, "goal": goal, "now": now, "left_s": left_s if is_finite else None, "is_share": bool(rate)}


# All runs -----------------------------------------------------------------------------------------------------


class Runs:
    """The runs below a directory, or the one that it holds.

    Attributes:
        root: the directory.
        is_single: True if it is a run itself.
    """

    def __init__(self, root: Path) -> None:
        """Look for runs.

        Args:
            root: a run directory, or a directory of runs.
        """
        self.root = root
        self._runs: dict[str, Run] = {}
        self.is_single = _is_run(root)

    def find(self) -> dict[str, Run]:
        """Return the runs that exist now by name, sorted."""
        if self.is_single:
            paths = [self.root]
        else:
            try:
                paths = sorted(path for path in self.root.iterdir() if _is_run(path))
            except OSError:
                paths = []
        names = {plain(path.absolute().name): path for path in paths}
        self._runs = {name: self._runs.get(name) or Run(name, path) for name, path in names.items()}
        return self._runs

    def run(self, name: str) -> Run | None:
        """Return the run with a name, None if there is none."""
        return self._runs.get(name) or self.find().get(name)

    def glances(self) -> list[dict[str, Any]]:
        """Return the figures of all runs."""
        return [run.glance() for run in self.find().values()]


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (RUN_FILE, JSONL_FILE, CONFIG_FILE))
