"""Account of a run for `aiorl status`: who runs where, how fast, how far behind, and what each
worker said last.

It is one document of plain data, which the learner writes to its run directory and sends to all who
ask. All texts from workers have passed `aiorl.text`. Everything in it is bounded: the workers by
the slots, those that are gone by `_MAX_GONE`, and the whole by the bytes that the caller allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiorl.errors import ConfigError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.roster import Worker
from aiorl.process.machine import host_name
from aiorl.process.versions import versions
from aiorl.run.core import News
from aiorl.run.ports import TrainingView
from aiorl.text import one_line

STATUS_FILE = "status.json"
"""File of a run directory with the newest account."""
MAX_BYTES = 1 << 20
"""Most bytes of the account in a file."""
_RESULT = (
    "training_iteration",
    "timesteps_total",
    "env_steps_trained_total",
    "updates_total",
    "updates_skipped",
    "episodes_total",
    "time_total_s",
    "sampled_steps_per_s",
    "trained_steps_per_s",
    "episode_reward_mean_last_100",
)
_MAX_GONE = 64
_MAX_WORDS = 300
_WINDOW_S = 5.0
_MAX_ENV_S = 1e6
_SMOOTHING = 0.2
_BUSY = 0.9
"""Share of the learner's time that it spends on updates, from which more workers do not help."""
_SLOW_HOST = 1.5
"""Ratio to the median of the other hosts from which a host is called slow."""


@dataclass(slots=True)
class _Pace:
    """Pace of a worker over whole fragments: at least one, and at least `_WINDOW_S`.

    Attributes:
        began: beginning of the current window, which is the end of the last one.
        env_steps: env steps in it so far.
        env_s: seconds that their environment took.
        last: length of the last window, env steps and seconds of the environment in it.
    """

    began: float
    env_steps: int = 0
    env_s: float = 0.0
    last: tuple[float, int, float] = (0.0, 0, 0.0)

    def add(self, now: float, env_steps: int, env_s: float) -> None:
        """Add a fragment that has arrived."""
        self.env_steps += env_steps
        self.env_s += env_s
        took_s = now - self.began
        if took_s >= _WINDOW_S:
            self.last = (took_s, self.env_steps, self.env_s)
            self.began = now
            self.env_steps = 0
            self.env_s = 0.0

    def env_steps_per_s(self, now: float) -> float:
        """Return env steps per second; they become fewer while no fragment arrives."""
        took_s, env_steps, _ = self.last
        if not took_s:
            env_steps = self.env_steps
        return env_steps / max(took_s, now - self.began, 1e-3)

    @property
    def env_step_ms(self) -> float | None:
        """Milliseconds of the environment for an env step; None while unknown."""
        _, env_steps, env_s = self.last
        if not env_steps:
            env_steps = self.env_steps
            env_s = self.env_s
        return 1000 * env_s / env_steps if env_steps else None


@dataclass(slots=True)
class _Figures:
    """Figures of a live worker."""

    host: str
    pid: int
    joined: float = field(default_factory=time.time)
    env_steps: int = 0
    lag: int = 0
    words: str = ""
    pace: _Pace = field(default_factory=lambda: _Pace(time.monotonic()))


class Overview:
    """Collector of the account.

    Attributes:
        result: the newest result.
        workers: returns the live workers.
        addresses: addresses at which workers on other hosts reach the learner, best first.
    """

    def __init__(self, env: str) -> None:
        """Begin the account of a run that samples an environment with this name."""
        self.result: Mapping[str, Any] = {}
        self.workers: Callable[[], Sequence[Worker]] = tuple
        self.addresses: Sequence[str] = ()
        self._env = env
        self._began = time.time()
        self._live: dict[int, _Figures] = {}
        self._gone: deque[dict[str, Any]] = deque(maxlen=_MAX_GONE)
        self._num_gone = 0
        self._num_lost = 0
        self._num_joined = 0
        self._num_failures = 0
        self._busy: float | None = None
        self._updates_seen: int | None = None

    def note(self, event: News, version: int) -> None:
        """Take note of what happened to a worker; ``version`` is that of the newest snapshot."""
        match event:
            case ev.SamplesAccepted(slot, _, message) if slot in self._live:
                figures = self._live[slot]
                figures.env_steps += message.env_steps
                env_s = message.perf.get("env_wait_time", 0.0)
                if not 0 <= env_s <= _MAX_ENV_S:  # a peer can send any number
                    env_s = 0.0
                figures.pace.add(time.monotonic(), message.env_steps, env_s)
                figures.lag = version - message.first_version
            case ev.WorkerJoined(slot, _, host, pid):
                self._live[slot] = _Figures(host, pid)
                self._num_joined += 1
            case ev.WorkerFailed(slot, _, message) if slot in self._live:
                self._live[slot].words = one_line(message, _MAX_WORDS)
                self._num_failures += 1
            case ev.WorkerLost(slot, _, reason) if slot in self._live:
                figures = self._live.pop(slot)
                self._gone.append(
                    {
                        "slot": slot,
                        "host": figures.host,
                        "pid": figures.pid,
                        "env_steps": figures.env_steps,
                        "time": time.time(),
                        "words": one_line(reason, _MAX_WORDS),
                    }
                )
                self._num_gone += 1
                self._num_lost += not reason.startswith("left")

    async def keep(self, training: TrainingView, *, end: str = "") -> None:
        """Write the account to the run directory every few seconds; or once, if the run has ended
        for a reason.
        """
        while True:
            # the disk may be full or the directory gone, which others report
            with contextlib.suppress(ConfigError):
                account = self.account(training, end=end)
                await asyncio.to_thread(training.directory.save_json, STATUS_FILE, account)
            if end:
                return
            await asyncio.sleep(_WINDOW_S)

    def account(
        self, training: TrainingView, *, max_bytes: int = MAX_BYTES, end: str = ""
    ) -> dict[str, Any]:
        """Return the account as maps, lists, texts and finite numbers.

        Args:
            training: the run.
            max_bytes: limit of its size as JSON; workers that do not fit are only counted, the gone
                ones come first.
            end: why the run has ended, "" while it has not.
        """
        now = time.monotonic()
        self._look_how_busy()
        workers = self.workers()
        state = "training" if self.result else training.status
        account: dict[str, Any] = {
            "run_id": training.directory.run_id,
            "run_dir": str(training.directory.path),
            "time": time.time(),
            "learner": {
                "host": host_name(),
                "pid": os.getpid(),
                "began": self._began,
                "state": "ended" if end else state,
                "end": end,
                "no_update_s": training.silent_s,
                "addresses": list(self.addresses),
                "versions": versions(),
                "env": self._env,
                "busy": self._busy,
            },
            "advice": self._advice(),
            "result": _finite_numbers({name: self.result.get(name) for name in _RESULT}),
            "policy_lag": _finite_numbers(self.result.get("policy_lag", {})),
            "num_workers": len(workers),
            "num_gone": self._num_gone,
            "num_lost": self._num_lost,
            "num_joined": self._num_joined,
            "num_failures": self._num_failures,
            "workers": [],
            "gone": [],
        }
        num_bytes = len(json.dumps(account))
        gone = (("gone", row) for row in reversed(self._gone))
        live = (("workers", self._row(worker, now)) for worker in workers)
        for name, row in itertools.chain(gone, live):
            num_bytes += len(json.dumps(row)) + 2  # ", " between two rows
            if num_bytes > max_bytes:
                break
            account[name].append(row)
        return account

    def _look_how_busy(self) -> None:
        """Add the newest update to the share of its time that the learner is busy."""
        metrics = self.result.get("learner", {})
        waited_s = metrics.get("wait_for_batch_s")
        updates = self.result.get("updates_total")
        if waited_s is None or updates == self._updates_seen:
            return
        is_first = self._updates_seen is None
        self._updates_seen = updates
        if is_first:  # its batch came while it was compiled, so it waited for nothing
            return
        worked_s = metrics["update_s"] + metrics["make_batch_s"]
        busy = worked_s / max(worked_s + waited_s, 1e-9)
        if self._busy is None:
            self._busy = busy
        self._busy += _SMOOTHING * (busy - self._busy)

    def _advice(self) -> list[str]:
        """Return sentences about what limits the speed of the run."""
        sentences = []
        slowest = _slowest_host(self._live.values())
        if slowest:
            sentences.append(slowest)
        if self._live and self._busy is not None and self._busy > _BUSY:
            sentences.append(
                f"The learner is busy {100 * self._busy:.0f} % of its time, so more workers would"
                " not make this run faster. Faster updates would."
            )
        return sentences

    def _row(self, worker: Worker, now: float) -> dict[str, Any]:
        figures = self._live.get(worker.slot) or _Figures(worker.host, worker.pid)
        return {
            "slot": worker.slot,
            "host": worker.host,
            "pid": worker.pid,
            "local": worker.local,
            "state": worker.state,
            "in_env_s": worker.in_env_s,
            "heard_s": max(0.0, now - worker.last_heard),
            "joined": figures.joined,
            "env_steps": figures.env_steps,
            "env_steps_per_s": figures.pace.env_steps_per_s(now),
            "env_step_ms": figures.pace.env_step_ms,
            "lag": figures.lag,
            "words": figures.words,
        }


def _slowest_host(workers: Iterable[_Figures]) -> str:
    """Return a sentence about the host whose environments are slower than those of others, "" if
    there is none.
    """
    times_of_hosts: dict[str, list[float]] = defaultdict(list)
    for figures in workers:
        step_ms = figures.pace.env_step_ms
        if step_ms is not None:
            times_of_hosts[figures.host].append(step_ms)
    if len(times_of_hosts) < 2:
        return ""
    mean_ms = {host: statistics.fmean(times) for host, times in times_of_hosts.items()}
    slowest = max(mean_ms, key=mean_ms.__getitem__)
    slowest_ms = mean_ms.pop(slowest)
    usual_ms = statistics.median(mean_ms.values())
    if slowest_ms < _SLOW_HOST * usual_ms or not usual_ms:
        return ""
    return (
        f"{one_line(slowest, 100)} is the slowest host: an env step takes {slowest_ms:.3g} ms there,"
        f" and {usual_ms:.3g} ms on the others."
    )


def _finite_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
