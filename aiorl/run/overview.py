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
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiorl.errors import ConfigError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.roster import Worker
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


@dataclass(slots=True)
class _Figures:
    """Figures of a live worker; rates cover the time since ``before``, at least `_WINDOW_S` if it
    is that old.
    """

    host: str
    pid: int
    joined: float
    env_steps: int = 0
    lag: int = 0
    words: str = ""
    before: tuple[float, int] = (0.0, 0)
    between: tuple[float, int] = (0.0, 0)

    def rate(self, now: float) -> float:
        """Return env steps per second."""
        if now - self.between[0] >= _WINDOW_S:
            self.before = self.between
            self.between = (now, self.env_steps)
        at, steps = self.before
        return (self.env_steps - steps) / max(now - at, 1e-3)


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

    def note(self, event: News, version: int) -> None:
        """Take note of what happened to a worker; ``version`` is that of the newest snapshot."""
        match event:
            case ev.SamplesAccepted(slot, _, message) if slot in self._live:
                figures = self._live[slot]
                figures.env_steps += message.env_steps
                figures.lag = version - message.first_version
            case ev.WorkerJoined(slot, _, host, pid):
                now = time.monotonic()
                self._live[slot] = _Figures(
                    host, pid, time.time(), before=(now, 0), between=(now, 0)
                )
            case ev.WorkerFailed(slot, _, message) if slot in self._live:
                self._live[slot].words = one_line(message, _MAX_WORDS)
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
        workers = self.workers()
        state = "training" if self.result else training.status
        account: dict[str, Any] = {
            "run_id": training.directory.run_id,
            "run_dir": str(training.directory.path),
            "time": time.time(),
            "learner": {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "began": self._began,
                "state": "ended" if end else state,
                "end": end,
                "no_update_s": training.silent_s,
                "addresses": list(self.addresses),
                "versions": versions(),
                "env": self._env,
            },
            "result": _finite_numbers({name: self.result.get(name) for name in _RESULT}),
            "policy_lag": _finite_numbers(self.result.get("policy_lag", {})),
            "num_workers": len(workers),
            "num_gone": self._num_gone,
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

    def _row(self, worker: Worker, now: float) -> dict[str, Any]:
        figures = self._live.get(worker.slot) or _Figures(worker.host, worker.pid, time.time())
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
            "env_steps_per_s": figures.rate(now),
            "lag": figures.lag,
            "words": figures.words,
        }


def _finite_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
