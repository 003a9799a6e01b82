"""Accounts of runs: what a run does in plain words, its figures, and how far it is from its end."""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import time
from pathlib import Path
from typing import Any

from aiorl.config.addresses import RUN_FILE
from aiorl.config.files import parse_value
from aiorl.config.layers import CONFIG_FILE
from aiorl.errors import AiorlError
from aiorl.run.overview import STATUS_FILE
from aiorl.run.report.loggers import JSONL_FILE
from aiorl.status import Part, status_of_run
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
_CRITERIA = ("stop_return", "stop_evaluation_return", "stop_timesteps", "stop_time_s")


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
        return {
            "glance": self.glance(),
            "account": {name: self._account.get(name) for name in ("learner", "workers", "gone", "num_gone")},
            "result": {name: value for name, value in self._result.items() if name != "hist_stats"},
            "failures": self._failures(),
            "logs": log_names(self.path),
            "words": self._account.get("logs", {}),
            "films": films(self.path),
        }

    def _failures(self) -> list[dict[str, str]]:
        log = self.path / "log.txt"
        return _failures_in(log, signature(log))

    def _look(self) -> dict[str, Any]:
        try:
            account = status_of_run(self.path)
        except AiorlError:  # it has just begun, or is a copy of the results alone
            changed = max((at[2] for at in signature(*(self.path / name for name in FILES))), default=0) / 1e9
            account = {"silent_s": max(0.0, time.time() - changed), "is_alive": None}
        self._account, self._result = account, last_result(self.path)
        result = Part(self._result)
        evaluation = result.part("evaluation")
        self._evaluation = evaluation.number("episode_reward_mean") or self._evaluation
        head = _head_of(config_text(self.path))
        phase, words = self._phase()
        figures = {name: result.number(name) for name in self._result}
        returns = result.part("hist_stats").numbers("episode_reward")
        figures |= {"std": statistics.pstdev(returns)} if returns else {}
        figures |= {"policy_lag": result.part("policy_lag").number("mean"), "evaluation_return": self._evaluation}
        if phase in ("ended", "failed", "gone", "unknown"):
            figures |= {"sampled_steps_per_s": None, "trained_steps_per_s": None}
        return {
            "name": self.name,
            "env": head.text("env", 100),
            "algo": head.text("algo", 100),
            "seed": head.number("seed"),
            "phase": phase,
            "words": one_line(words, _MAX_WORDS),
            "changed": time.time() - float(account["silent_s"]),
            "figures": figures,
            "stops": {name: goal for name in _CRITERIA if (goal := head.number(name)) is not None},
        }

    def _phase(self) -> tuple[str, str]:
        """Return the kind of thing that the run does, and a sentence about it."""
        learner, is_alive = Part(self._account).part("learner"), self._account.get("is_alive")
        end, state = learner.text("end"), learner.text("state") or "starting"
        if end == _FAILED:
            errors = self._failures()
            return "failed", f"Failed: {errors[-1]['text'] if errors else 'its log has the reason.'}"
        if end:
            return "ended", end
        if is_alive is False:
            return "gone", "Its process is gone without a last word. It continues with --resume."
        if float(self._account["silent_s"]) >= _SILENT_S:
            if is_alive:
                return "silent", "Its process exists, but has written nothing for a while."
            return "unknown", "No process of this host writes here."
        if not self._result:
            return "starting", f"{state[:1].upper()}{state[1:]}."
        waited_s = learner.number("no_update_s") or 0.0
        if waited_s > _SLOW_S:
            return "waiting", f"No update for {waited_s:.0f} s. {self._account.get('learner_words', '')}"
        return "training", "Training."


@functools.lru_cache(maxsize=1000)
def _head_of(config: str) -> Part:
    """Return some settings of a config's text; reading all of them takes ten times as long."""
    return Part({found[1]: parse_value(found[2]) for found in _HEAD.finditer(config)})


@functools.lru_cache(maxsize=256)
def _failures_in(log: Path, state: object) -> list[dict[str, str]]:
    """Return the newest errors in a log with a `signature`."""
    return log_entries(log, level="ERROR")[0][-_MAX_FAILURES:]


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
        paths = [self.root] if self.is_single else []
        if not self.is_single:
            with contextlib.suppress(OSError):
                paths = sorted(path for path in self.root.iterdir() if _is_run(path))
        names = {one_line(path.absolute().name, 255): path for path in paths}
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
