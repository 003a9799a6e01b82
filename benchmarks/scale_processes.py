"""One learner and its workers, with real sessions, sockets and processes; samplers only sleep.

    python -m benchmarks.scale_processes learner SESSIONS [KEYS]    # prints its figures as JSON
    python -m benchmarks.scale_processes worker ADDRESS SESSIONS [KEYS]    # started by the learner

Everything but environments, policies and updates is what a run uses. Several sessions share a
worker process, each with connections, a thread and an endpoint of its own. The weights say how long
samplers sleep.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
from numpy.typing import NDArray

from aiorl.config.schema import CommonConfig
from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import PolicyGraph
from aiorl.keys import make_keys
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.transport.security import load_worker_keys
from aiorl.net.transport.system import give_back_idle_memory, share_one_heap
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint
from aiorl.net.wire.messages import Samples, Snapshot
from aiorl.process.program import raise_open_file_limit
from aiorl.process.tasks import new_event_loop
from aiorl.run.remote_source import RemoteSource
from aiorl.run.worker import service
from aiorl.run.worker.sampler_unit import StopSampling, UnitPlace
from benchmarks.measure import run_fresh
from benchmarks.scale_parts import NoTraining, idle_learning, make_samples

__all__ = ["main", "measured"]

_MAX_PROCESSES = 8
_SMALL, _LARGE = 4_610, 1_688_000
"""Weights: 64x64 for CartPole, and the Nature network, 6.8 MB."""
_PACE_S = 0.1
_SETTLE_S, _MEASURE_S = 1.0, 5.0
_ALL_JOIN_S, _ALL_HEAR_S, _END_S = 40.0, 40.0, 10.0
_TIMES = 3
_NEVER_S = 1e6
_WITHIN_S = 110.0
_TIMES_OUT = {"lease_timeout_s": _NEVER_S, "heartbeat_timeout_s": 30.0}


def measured(sessions: int, *, keys: bool) -> tuple[dict[str, float], str]:
    """Return the figures of a learner with this number of workers, and the reason why some are
    missing, "" for none.

    Raises:
        RuntimeError: none could be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [str(sessions)]
        if keys:
            make_keys(Path(folder))
            words.append(folder)
        found, problem = run_fresh(
            "benchmarks.scale_processes", "learner", *words, timeout_s=_WITHIN_S
        )
    return found, problem


# The learner
# --------------------------------------------------------------------------------------------------


class MeasuredLearner:
    """A learner, and the processes with its workers."""

    def __init__(self, sessions: int, keys: str | None) -> None:
        self._sessions = sessions
        self._keys = keys
        self._cores = sorted(os.sched_getaffinity(0))
        config = CommonConfig(
            env="CartPole-v1",
            num_workers=0,
            bind="tcp://127.0.0.1:0",
            keys=keys,
            insecure=keys is None,
            train_batch_size=max(1, sessions // 4),
            transport=_TIMES_OUT,
        )
        self._training = NoTraining(config)
        training: Any = self._training
        parts = self._training.parts
        self._source = RemoteSource(
            training, training.core, transport=parts.transport, sample=parts.sample
        )
        self._learning = idle_learning(config)
        self._processes: list[asyncio.subprocess.Process] = []
        self._me = psutil.Process()

    async def measure(self) -> tuple[dict[str, float], str]:
        """Measure all figures, one after the other, up to the first that fails; return them and the
        reason for that.
        """
        found = dict[str, float]()
        problem = ""
        try:
            await self._start_processes()
            found |= await self._joins()
            found |= await self._rates("paced", _PACE_S)
            found |= await self._broadcasts("small", _SMALL)
            found |= await self._broadcasts("large", _LARGE)
            found |= await self._rates("flood", 0.0)
            found |= await self._ends()
        except (OSError, RuntimeError) as error:  # a timeout is an OSError
            problem = f"{type(error).__name__}: {error}; {'; '.join(self._training.said[:3])}"
        finally:
            await self._source.close("the measurement is over", final=True)
            await asyncio.gather(*map(self._end, self._processes))
        return found, problem

    async def _joins(self) -> dict[str, float]:
        """Let all workers join at the same moment, and then wait."""
        source = self._source
        source.admit(self._learning)
        await asyncio.sleep(_SETTLE_S)
        give_back_idle_memory()
        before, cpu_s, began = self._me.memory_info().rss, time.process_time(), time.monotonic()
        for process in self._processes:
            self._tell(process, "join")
        if not await source.wait_for_workers(self._sessions, _ALL_JOIN_S):
            raise RuntimeError(
                f"only {len(source.session.slots)} of {self._sessions} workers have joined"
            )
        took_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
        idle, *_ = await self._shares()
        give_back_idle_memory()
        return {
            "join_s": took_s,
            "join_cpu_ms": 1e3 * cpu_s / self._sessions,
            "idle_us": 1e6 * idle / self._sessions,
            "memory_kb": (self._me.memory_info().rss - before) / 1e3 / self._sessions,
        }

    async def _start_processes(self) -> None:
        count = min(_MAX_PROCESSES, self._sessions)
        for number in range(count):
            own = self._sessions // count + (number < self._sessions % count)
            words = [
                "worker",
                self._source.address,
                str(own),
                *([] if self._keys is None else [self._keys]),
            ]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.scale_processes",
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self._processes.append(process)
        for process in self._processes:
            await self._hear(process)
        if len(self._cores) > 1:
            _pin(self._me, self._cores[:1])
            for process in self._processes:
                _pin(psutil.Process(process.pid), self._cores[1:])

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of a process; kill it if it does not come."""
        try:
            async with asyncio.timeout(_END_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.communicate()

    def _tell(self, process: asyncio.subprocess.Process, what: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{what}\n".encode())

    async def _hear(self, process: asyncio.subprocess.Process) -> Any:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_ALL_HEAR_S):
                line = await process.stdout.readline()
        except TimeoutError:
            raise RuntimeError(f"nothing was heard of some workers for {_ALL_HEAR_S:g} s") from None
        if not line:
            raise RuntimeError("a process with workers has ended")
        return json.loads(line)

    async def _shares(self) -> tuple[float, float, float]:
        """Measure for a while: shares of a core that the learner and its loop's thread take, and
        updates a second.
        """

        def now() -> NDArray[np.float64]:
            return np.array(
                [
                    time.process_time(),
                    time.thread_time(),
                    self._training.counters.updates,
                    time.monotonic(),
                ]
            )

        before = now()
        await asyncio.sleep(_MEASURE_S)
        all_s, loop_s, updates, took_s = now() - before
        return all_s / took_s, loop_s / took_s, updates / took_s

    async def _rates(self, name: str, pause_s: float) -> dict[str, float]:
        """Let each sampler sleep before each fragment; return fragments per second and CPU time for
        each.
        """
        await self._publish(_SMALL, pause_s)
        self._source.core.go_on()
        self._source.pump()
        await asyncio.sleep(_SETTLE_S)
        whole, loop, updates = await self._shares()
        rate = updates * self._training.config.train_batch_size
        if not rate:
            raise RuntimeError(f"no fragment arrived while samplers slept {pause_s:g} s")
        return {
            f"{name}_per_s": rate,
            f"{name}_us": 1e6 * whole / rate,
            f"{name}_loop_us": 1e6 * loop / rate,
        }

    async def _publish(self, size: int, pause_s: float) -> None:
        weights = {"w": np.ones(size, np.float32), "pause_s": np.array([pause_s], np.float32)}
        self._source.set_weights({DEFAULT_POLICY_ID: weights})

    async def _broadcasts(self, name: str, size: int) -> dict[str, float]:
        """Publish a few versions; return the time until the last worker has one, and the learner's
        CPU time.
        """
        times, cpu_s = [], time.process_time()
        for _ in range(_TIMES):
            began = time.monotonic()
            await self._publish(size, _NEVER_S)
            version = self._source.session.version
            heard = [await self._heard(process, version) for process in self._processes]
            times.append(max(heard) - began)
            await asyncio.sleep(0.1)
        return {
            f"{name}_s": sorted(times)[_TIMES // 2],
            f"{name}_cpu_s": (time.process_time() - cpu_s) / _TIMES,
        }

    async def _heard(self, process: asyncio.subprocess.Process, version: int) -> float:
        """Return when the last worker of a process had this version or a newer one."""
        while True:
            said = await self._hear(process)
            if "version" in said and said["version"] >= version:
                return float(said["at"])

    async def _ends(self) -> dict[str, float]:
        """Return how many connections ended or were refused, as workers and learner see it."""
        ended: list[str] = list(self._training.said)
        for process in self._processes:
            self._tell(process, "report")
            while "ended" not in (said := await self._hear(process)):
                pass
            ended += said["ended"]
        for text in ended[:20]:
            print(text, file=sys.stderr)
        return {"ended": float(len(ended))}


def _pin(process: psutil.Process, cores: Sequence[int]) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)


# The workers
# --------------------------------------------------------------------------------------------------


class _Noted(logging.Handler):
    """Keeps what a worker's log says of connections that ended, were refused or did not come
    about.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record if it is a warning, or says that a connection ended."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING or "ended" in text or "was heard" in text:
            self.texts.append(text)


class _Arrivals:
    """Reports to the learner when all sessions of this process have a version or a newer one."""

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self._said = -1
        self.versions: dict[_Sleeper, int] = {}

    def note(self, unit: _Sleeper, version: int) -> None:
        """Take note that a session has a version."""
        self.versions[unit] = version
        if (
            len(self.versions) == self._sessions
            and (least := min(self.versions.values())) > self._said
        ):
            self._said = least
            say({"version": least, "at": time.monotonic()})


def say(what: Any) -> None:
    """Write a line for the learner."""
    print(json.dumps(what), flush=True)


class _Sleeper:
    """Sampler unit that sleeps, and returns the same fragment again and again."""

    arrivals: _Arrivals

    def __init__(
        self,
        part: WorkerPart,
        graphs: Mapping[str, PolicyGraph],
        snapshot: Snapshot,
        place: UnitPlace,
    ) -> None:
        self.in_env_s = 0.0
        self._stopped = threading.Event()
        self._changed = threading.Event()
        self._snapshot = snapshot
        self._pause_s = _NEVER_S
        self._take(snapshot)

    def offer(self, snapshot: Snapshot) -> None:
        """Take up a version at once."""
        self._take(snapshot)
        self.arrivals.note(self, snapshot.version)
        self._changed.set()

    def _take(self, snapshot: Snapshot) -> None:
        weights: Mapping[str, NDArray[Any]] = snapshot.weights[DEFAULT_POLICY_ID]
        self._snapshot = snapshot
        if "pause_s" in weights:  # the algorithm's own weights say nothing of it
            self._pause_s = float(weights["pause_s"][0])

    def stop(self) -> None:
        """Make `sample` return at once."""
        self._stopped.set()
        self._changed.set()

    def sample(self) -> Samples:
        """Sleep, and return a fragment."""
        until = time.monotonic() + self._pause_s
        while (left_s := until - time.monotonic()) > 0 and not self._stopped.is_set():
            self._changed.wait(min(left_s, 60.0))
            if self._changed.is_set():
                self._changed.clear()
                until = min(until, time.monotonic() + self._pause_s)
        if self._stopped.is_set():
            raise StopSampling
        return make_samples(self._snapshot.version)

    def prepare(self) -> None:
        """Do nothing."""

    def waits_for(self) -> str:
        """Return "": it waits for nothing that an environment does."""
        return ""

    def take_deltas(self, sequence: int) -> dict[str, dict[str, Any]]:
        """Return no deltas."""
        return {}

    def close(self) -> None:
        """Leave: a successor counts from now on."""
        self.arrivals.versions.pop(self, None)


async def _work(address: str, sessions: int, keys: str | None) -> None:
    """Join with all sessions at the same time once the learner says so, and stay until it says
    goodbye.
    """
    share_one_heap()
    raise_open_file_limit()
    noted = _Noted()
    logging.getLogger("aiorl").addHandler(noted)
    logging.getLogger("aiorl").setLevel(logging.INFO)
    own = None if keys is None else load_worker_keys(Path(keys))
    _Sleeper.arrivals = _Arrivals(sessions)
    names = [os.urandom(8).hex() for _ in range(sessions)]
    units = [
        service.WorkerService(
            ZmqWorkerEndpoint(address, keys=own),
            WorkerSession(WorkerSettings(name, "here", os.getpid())),
        )
        for name in names
    ]
    loop = asyncio.get_running_loop()
    say({"ready": sessions})
    if not await loop.run_in_executor(None, sys.stdin.readline):
        return  # the learner is gone
    tasks = [asyncio.create_task(unit.run()) for unit in units]

    def report() -> None:
        while sys.stdin.readline():
            say({"ended": noted.texts})
        os._exit(0)  # the learner is gone

    threading.Thread(target=report, daemon=True).start()
    await asyncio.gather(*tasks)


def main(argv: Sequence[str] | None = None) -> int:
    """Be the learner or a process with workers."""
    role, *words = sys.argv[1:] if argv is None else argv
    keys = words[-1] if len(words) > (1 if role == "learner" else 2) else None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if role == "worker":
            with patch.object(service, "SamplerUnit", _Sleeper):
                runner.run(_work(words[0], int(words[1]), keys))
        else:

            async def learn() -> tuple[dict[str, float], str]:
                return await MeasuredLearner(int(words[0]), keys).measure()

            say(runner.run(learn()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
