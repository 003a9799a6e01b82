"""Run under faults: a learner with its own workers, and workers that join it from outside, each
over a link.

The cluster does what an operator or a service manager does. It resumes a learner that has ended
immediately, and restarts an outside worker's command that has ended. It records processes that
ended without orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from aiorl.keys import make_keys
from benchmarks.chaos.link import Link, free_pair
from benchmarks.chaos.processes import Ended, Started, end_all, marked, send, worker_leaves
from benchmarks.chaos.progress import Progress, Span
from benchmarks.chaos.resumes import Resumes

__all__ = ["LEARNER", "Cluster", "ClusterFailed", "Missed", "Outsider"]

LEARNER = "the learner"

_NUM_LOCAL = 2
_OUTSIDE = {"outside-lasting": 1, "outside-single": 1, "outside-pair": 2}
_LOCAL_KEY, _INTRUDER = "worker", "intruder"  # an admitted key that belongs to no worker
_LOOK_S = 0.1
_RESTART_S = 0.5
_TRAINS_S = 60.0
_STARTS = 5
_END_S = 20.0
_MAX_FILES = 1024
_NEVER_GIVEN_UP = 1_000_000
# An abort shows in the process's output even if no one sees its exit status.
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
_ALGO_SETTINGS = {
    "ppo": {"sgd_minibatch_size": 256, "num_sgd_iter": 2},
    "impala": {"max_policy_lag": 1},
}
_NUM_ENVS, _FRAGMENT_LENGTH, _BATCH_STEPS = 4, 32, 1024


class Missed(Exception):
    """A condition that must hold after a fault does not hold."""


class ClusterFailed(Exception):
    """The run can't be brought back to training."""


@dataclass(eq=False, slots=True)
class Outsider:
    """Host of workers: one command, one key, one link.

    Attributes:
        name: name of its key.
        num_workers: worker processes that its command runs.
        spared: no fault ends its processes, so that one life sees all the others.
        link: relay between it and the learner.
        process: its command.
        is_ending: it was ended on purpose.
    """

    name: str
    num_workers: int
    spared: bool
    link: Link
    process: Started
    is_ending: bool = False

    def samplers(self) -> list[psutil.Process]:
        """Return its processes that sample."""
        return worker_leaves(self.process.pid)


class Cluster:
    """Run of one algorithm.

    Attributes:
        algo: name of the algorithm.
        folder: directory for logs and keys.
        run_dir: the learner's run directory.
        outsiders: workers from outside.
        progress: results so far.
        resumes: comparison of each resumed learner with its checkpoint.
        deaths: spans from each end of the learner to the next rise of trained steps.
        unexpected: processes started here that ended without orders.
        num_local: number of local workers expected; the caller lowers it if one stays down.
        port: the learner's first port.
    """

    def __init__(self, algo: str, folder: Path, run_dir: Path, mark: str, patience: float) -> None:
        """Prepare the run; `start` starts it.

        Args:
            algo: name of the algorithm.
            folder: existing directory for logs and keys.
            run_dir: run directory; the learner makes it.
            mark: mark by which all processes can be found.
            patience: factor for all timeouts, 1 for a quiet machine.
        """
        self.folder = folder
        self.run_dir = run_dir
        self.outsiders: list[Outsider] = []
        steps = _NUM_ENVS * _FRAGMENT_LENGTH
        self.progress = Progress(
            run_dir / "result.jsonl", fragment_steps=steps, batch_steps=_BATCH_STEPS
        )
        self.resumes = Resumes(run_dir)
        self.deaths: list[Span] = []
        self.unexpected: list[Ended] = []
        self.num_local = _NUM_LOCAL
        self.port = 0
        self.algo = algo
        self._mark = mark
        self._patience = patience
        self._learner: Started | None = None
        self._resuming = asyncio.Lock()
        self._died_at: float | None = None
        self._num_starts = 0
        self._num_intruders = 0
        self._task: asyncio.Task[None] | None = None

    # Facts
    # ----------------------------------------------------------------------------------------------

    @property
    def learner(self) -> Started:
        """The learner's process."""
        assert self._learner is not None
        return self._learner

    @property
    def life(self) -> int:
        """Number of the learner's process, from 0."""
        return len(self.progress.births) - 1

    @property
    def is_training(self) -> bool:
        """True once the current learner has trained."""
        return self._died_at is None and bool(self.progress.rises)

    @property
    def down(self) -> Span | None:
        """Time since which no learner trains; None while one does."""
        return None if self._died_at is None else Span(self._died_at, time.time())

    @property
    def num_workers(self) -> int:
        """Number of workers when all is well."""
        return self.num_local + sum(outsider.num_workers for outsider in self.outsiders)

    @property
    def workers_there(self) -> int:
        """Number of workers in the newest result."""
        return self.progress.rows[-1].workers if self.progress.rows else 0

    def locals(self) -> list[psutil.Process]:
        """Return the learner's own workers."""
        return worker_leaves(self.learner.pid)

    def secret_key(self, name: str) -> Path:
        """Return the path of a private key."""
        return self.folder / "keys" / f"{name}.key_secret"

    def admitted_key(self, name: str) -> Path:
        """Return the path of the file that admits a key."""
        return self.folder / "keys" / "admitted" / f"{name}.key"

    # Life
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all processes; wait until all workers are present and the learner trains.

        Raises:
            ClusterFailed: the run does not begin.
        """
        make_keys(self.folder / "keys", (_LOCAL_KEY, _INTRUDER, *_OUTSIDE))
        pair = free_pair()
        self.port = int(pair[0].getsockname()[1])
        for each in pair:
            each.close()
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self._settings()), encoding="utf-8")
        self._start_learner()
        for index, (name, num_workers) in enumerate(_OUTSIDE.items()):
            link = Link(self.port)
            link.start()
            process = self._start_outsider(name, num_workers, link)
            self.outsiders.append(Outsider(name, num_workers, not index, link, process))
        self._task = asyncio.create_task(self._watch(), name="watch")
        try:
            await self.until(
                lambda: self.is_training and self.workers_there >= self.num_workers,
                _TRAINS_S,
                "it did not begin",
            )
        except Missed as missed:
            raise ClusterFailed(f"{missed}: {self.learner.last_words()}") from None

    async def until(
        self, condition: Callable[[], object], timeout_s: float, complaint: str
    ) -> None:
        """Wait until the condition holds.

        Raises:
            Missed: it does not hold in time (multiplied by patience); its text is the complaint.
            ClusterFailed: the run can't train any more.
        """
        timeout_s *= self._patience
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._task is not None and self._task.done():
                self._task.result()
            if time.monotonic() > deadline:
                raise Missed(f"{complaint} within {timeout_s:g} s")
            await asyncio.sleep(_LOOK_S)

    async def kill_learner(
        self, before_resume: Callable[[], None] = lambda: None
    ) -> list[psutil.Process]:
        """Kill the learner and resume the run immediately; return the dead learner's workers."""
        async with self._resuming:
            workers = self.locals()
            self.learner.send(signal.SIGKILL)
            await self._resume(before_resume)
        return workers

    async def restart_outsider(self, outsider: Outsider, *, whole: bool) -> list[psutil.Process]:
        """Kill an outsider's command and start it again; return the processes that it had started.

        Args:
            outsider: host to restart.
            whole: kill these processes, too, as when a host goes down.
        """
        await self.until(
            lambda: not outsider.is_ending, _TRAINS_S, f"{outsider.name} was not started again"
        )
        outsider.is_ending = True
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(outsider.process.pid).children(recursive=True)
        outsider.process.send(signal.SIGKILL)
        if whole:
            for child in children:
                send(child, signal.SIGKILL)
        await self._start_again(outsider)
        return children

    async def finish(self) -> list[str]:
        """End the run by Ctrl-C, as a user does; return the complaints."""
        await self._stop_watching()
        complaints = []
        self.learner.send(signal.SIGINT)
        ends = [(LEARNER, self.learner), *((each.name, each.process) for each in self.outsiders)]
        for who, process in ends:
            try:
                status = await asyncio.to_thread(process.wait, _END_S * self._patience)
            except TimeoutError:
                complaints.append(
                    f"{who} did not end within {_END_S * self._patience:g} s of the learner's"
                    " Ctrl-C"
                )
                for _, each in ends:  # they wait for each other
                    each.send(signal.SIGKILL)
                break
            if status:
                complaints.append(
                    f"{who} ended with status {status} at the end: {process.last_words()}"
                )
        self.progress.read()
        return complaints

    async def orphans(self) -> list[str]:
        """Return processes that survive the run's end by some time."""
        with contextlib.suppress(Missed):
            await self.until(lambda: not marked(self._mark), _END_S, "")
        named = []
        for process in marked(self._mark):
            with contextlib.suppress(psutil.Error):
                named.append(f"pid {process.pid}: {' '.join(process.cmdline())[:200]}")
        return named

    async def close(self) -> None:
        """End all remaining processes of the run."""
        await self._stop_watching()
        await asyncio.to_thread(end_all, marked(self._mark))
        for outsider in self.outsiders:
            await outsider.link.close()

    def intrude(self, what: str, seconds: float) -> Started:
        """Start a hostile peer; see ``intruder``."""
        self._num_intruders += 1
        command = [
            sys.executable,
            "-m",
            "benchmarks.chaos.intruder",
            what,
            "--port",
            str(self.port),
        ]
        command += ["--key", str(self.secret_key(_INTRUDER)), "--seconds", f"{seconds:.1f}"]
        output = self.folder / f"intruder-{self._num_intruders}.out"
        return Started(command, mark=self._mark, output=output, environment=_ENVIRONMENT)

    # Its parts
    # ----------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "algo": self.algo,
            "env": "benchmarks.chaos.env:PacedCartPole",
            "env_config": {"step_s": 0.0005},
            "num_workers": _NUM_LOCAL,
            "num_envs_per_worker": _NUM_ENVS,
            "rollout_fragment_length": _FRAGMENT_LENGTH,
            "train_batch_size": _BATCH_STEPS,
            "observation_filter": "MeanStdFilter",
            "model": {"fcnet_hiddens": [128, 128]},  # broadcasts of 140 kB fill queues soon
            "bind": f"tcp://127.0.0.1:{self.port}",
            "keys": str(self.folder / "keys"),
            "run_dir": str(self.run_dir),
            "min_iter_time_s": 0.2,
            "checkpoint_interval_s": 2.0,
            "max_worker_restarts": _NEVER_GIVEN_UP,
            **_ALGO_SETTINGS[self.algo],
        }

    def _start_learner(self) -> None:
        has_begun = (self.run_dir / "run.json").exists()
        what = (
            ["--resume", str(self.run_dir)]
            if has_begun
            else ["--config", str(self.folder / "config.yaml")]
        )
        learner = [sys.executable, "-m", "aiorl.learner", *what]
        self.progress.births.append(time.time())
        self.num_local = _NUM_LOCAL
        self._num_starts += 1
        self._learner = Started(
            ["sh", "-c", f'ulimit -n {_MAX_FILES} && exec "$@"', "sh", *learner],
            mark=self._mark,
            output=self.folder / "learner.txt",
            environment=_ENVIRONMENT,
        )

    def _start_outsider(self, name: str, num_workers: int, link: Link) -> Started:
        command = [
            sys.executable,
            "-m",
            "aiorl.worker",
            "--connect",
            f"tcp://127.0.0.1:{link.port}",
        ]
        command += [
            "--keys",
            str(self.secret_key(name)),
            "--max-worker-restarts",
            str(_NEVER_GIVEN_UP),
        ]
        command += ["--num-workers", str(num_workers)]
        return Started(
            command, mark=self._mark, output=self.folder / f"{name}.txt", environment=_ENVIRONMENT
        )

    async def _start_again(self, outsider: Outsider) -> None:
        outsider.is_ending = True
        await asyncio.to_thread(outsider.process.wait)
        await asyncio.sleep(_RESTART_S)
        outsider.process = self._start_outsider(outsider.name, outsider.num_workers, outsider.link)
        outsider.is_ending = False

    async def _resume(self, before_resume: Callable[[], None] = lambda: None) -> None:
        """Start the learner again as soon as its predecessor has ended."""
        if self._died_at is None:
            self._died_at = time.time()
        await asyncio.to_thread(self.learner.wait)
        self.progress.read()
        before_resume()
        await asyncio.to_thread(self.resumes.expect, self.life + 1)
        self._start_learner()

    async def _watch(self) -> None:
        while True:
            self.progress.read()
            births, rises = self.progress.births, self.progress.rises
            if rises and rises[-1] > births[-1] > (self._died_at or 0.0):
                self._num_starts = 0
                if self._died_at is not None:
                    self.deaths.append(
                        Span(self._died_at, next(at for at in rises if at > births[-1]))
                    )
                    self._died_at = None
            await asyncio.to_thread(self.resumes.look, self.progress.firsts)
            if not self._resuming.locked():
                async with self._resuming:
                    await self._look_at_learner()
            for outsider in self.outsiders:
                if not outsider.is_ending and outsider.process.status is not None:
                    self._note(outsider.name, outsider.process)
                    await self._start_again(outsider)
            await asyncio.sleep(_LOOK_S)

    async def _look_at_learner(self) -> None:
        """Resume the run if the learner has ended by itself, or has been idle for so long that it
        will never train.
        """
        trained_at = max([self.progress.births[-1], *self.progress.rises[-1:]])
        is_stuck = time.time() - trained_at > _TRAINS_S * self._patience
        if self.learner.status is None and not is_stuck:
            return
        if self.learner.status is not None:
            self._note(LEARNER, self.learner)
        else:
            said = (
                f"killed: it had not trained for {time.time() - trained_at:.0f} s;"
                f" {self.learner.last_words()}"
            )
            self.unexpected.append(Ended(LEARNER, 0, said, time.time()))
            self.learner.send(signal.SIGKILL)
        if self._num_starts >= _STARTS:
            raise ClusterFailed(
                f"the learner did not train after {_STARTS} starts: {self.learner.last_words()}"
            )
        await asyncio.sleep(_RESTART_S)
        await self._resume()

    def _note(self, who: str, process: Started) -> None:
        self.unexpected.append(Ended(who, process.status or 0, process.last_words(), time.time()))

    async def _stop_watching(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClusterFailed):
                await task
