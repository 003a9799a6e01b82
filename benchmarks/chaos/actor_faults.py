"""Campaign over actors: a program of actors with local and joined processes is struck by random
faults, and all of its calls are accounted for.

    start -> faults of every kind
        -> faults that leave the hub alive -> peace, measure
        -> faults that leave the hub alive -> peace, measure -> Ctrl-C
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from aiorl.keys import make_keys
from benchmarks.chaos.actor_hub import NUM_HERE, NUM_JOINED, Ending
from benchmarks.chaos.link import Link, free_pair
from benchmarks.chaos.memory import TRIM_S
from benchmarks.chaos.processes import Started, crashes_in, end_all, marked, memory_of, send

__all__ = ["ActorReport", "accounts_of", "run_actor_chaos"]

_STARTS_S = 60.0
_BACK_S = 60.0
_END_S = 20.0
_GOODBYE_S = 8.0
_ORPHANS_S = 15.0
"""A process whose parent dies while it starts notices that when it has started."""
_PAUSE_S = (0.5, 3.0)
_HOLD_S = (0.3, 6.0)
"""Shorter and longer than the silence after which an actor is lost, 3 s."""
_LEAST_S = 300.0
"""Shortest campaign in which growth is judged; a shorter one is still warming up."""
_MEMORY_GROWTH = 0.05
_SPARE_BYTES = 4 << 20
_SPARE_FILES = 4
_SHARE_WITH_ENDS = 0.3
_SHARES_WITHOUT = (0.3, 0.4)
"""Shares of the faults that leave the hub alive: those before the first measurement warm it up."""
_ENDS_HUB = ("kill-hub", "end-hub")
_FIRST_PART_ONLY = (*_ENDS_HUB, "corrupt-link")
"""Faults that leave no hub that can be measured. libzmq 4.3.5 never closes some connections on which
a message was damaged: the report of the event can change `errno`, by which it decides."""
_ALONE = (*_ENDS_HUB, "kill-host")
"""Faults that begin when those before them are over, and end before the next."""
_LOOK_S = 0.1
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(slots=True)
class ActorReport:
    """Outcome of a campaign.

    Attributes:
        seed: seed of the faults.
        faults: kind -> number of faults.
        calls: end of calls -> their number; "hub" are those that ended with a killed hub.
        runs: calls that actors have run, with those of actors by actors.
        complaints: all that must not be.
        memory: private memory of the hub in both times of peace, MB.
        files: its open files in both.
    """

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    complaints: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if there is no complaint, and enough has happened to say so."""
        return not self.complaints and self.calls[Ending.OK] > 0 and self.calls[Ending.LOST] > 0

    def text(self) -> str:
        """Return the report for people."""
        lines = [
            f"faults: {sum(self.faults.values())}: {_listed(self.faults)}",
            f"calls: {sum(self.calls.values()):,}: {_listed(self.calls)}; runs {self.runs:,}",
            f"memory of the hub, MB: {self.memory}; open files: {self.files}",
            *(f"COMPLAINT: {complaint}" for complaint in self.complaints[:40]),
            "every bar holds" if self.ok else "NOT every bar holds",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "faults": dict(self.faults),
            "calls": dict(self.calls),
            "runs": self.runs,
            "complaints": self.complaints,
            "memory": self.memory,
            "files": self.files,
        }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))


async def run_actor_chaos(
    seconds: float, seed: int, folder: Path, tell: Callable[[str], None], patience: float = 1.0
) -> ActorReport:
    """Run the campaign; cancelling it ends every process first.

    Args:
        seconds: how long new faults begin.
        seed: seed of the faults.
        folder: existing directory for logs and journals.
        tell: receives the progress, one line at a time.
        patience: factor for all timeouts, 1 for a quiet machine.
    """
    report = ActorReport(seed)
    peace_s = min(TRIM_S, seconds / 8)
    campaign = _Campaign(folder, report, tell, patience)
    try:
        await campaign.start()
        await campaign.strike(_SHARE_WITH_ENDS * seconds, hub_ends=True)
        for share in _SHARES_WITHOUT:
            await campaign.strike(share * seconds, hub_ends=False)
            await campaign.measure(peace_s)
        if seconds >= _LEAST_S:
            _judge_growth(report)
        await campaign.finish()
    except TimeoutError as error:
        report.complaints.append(f"gave up: {error}")
    finally:
        await campaign.close()
    accounts_of(folder, report)
    return report


def _judge_growth(report: ActorReport) -> None:
    begin, end = report.memory
    if end > begin * (1 + _MEMORY_GROWTH) + _SPARE_BYTES / 1e6:
        report.complaints.append(f"the hub has grown from {begin:.1f} to {end:.1f} MB")
    first, last = report.files
    if last > first + _SPARE_FILES:
        report.complaints.append(f"the hub's open files have grown from {first} to {last}")


class _Campaign:
    """The processes of a campaign, and the faults.

    Args:
        folder: directory for logs and journals.
        report: has the seed of the faults, and takes complaints.
        tell: receives the progress.
        patience: factor for all timeouts.
    """

    def __init__(
        self, folder: Path, report: ActorReport, tell: Callable[[str], None], patience: float
    ) -> None:
        self._folder = folder
        self._random = random.Random(report.seed)
        self._report = report
        self._tell = tell
        self._patience = patience
        self._mark = secrets.token_hex(8)
        self._life = -1
        pair = free_pair()
        self._port = int(pair[0].getsockname()[1])
        for each in pair:
            each.close()
        self._link = Link(self._port)
        self._running: list[asyncio.Task[None]] = []
        self._kinds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "kill-local": lambda: self._kill(self._locals()),
            "stop-local": lambda: self._stop(self._locals()),
            "kill-joined": lambda: self._kill(self._joined()),
            "stop-joined": lambda: self._stop(self._joined()),
            "reset-link": self._reset_link,
            "hold-link": self._hold_link,
            "corrupt-link": self._corrupt_link,
            "stop-hub": lambda: self._stop([psutil.Process(self._hub.pid)]),
            "kill-host": self._kill_host,
            "kill-hub": self._kill_hub,
            "end-hub": self._end_hub,
        }

    # Life
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all processes, and wait until every actor answers.

        Raises:
            TimeoutError: they do not.
        """
        make_keys(self._folder / "keys")
        self._link.start()
        self._start_host()
        self._start_hub()
        await self._all_answer(_STARTS_S)
        self._tell("all actors answer")

    async def strike(self, seconds: float, *, hub_ends: bool) -> None:
        """Begin faults for some time, then wait until every actor answers again.

        Raises:
            TimeoutError: they do not.
        """
        kinds = [kind for kind in self._kinds if hub_ends or kind not in _FIRST_PART_ONLY]
        until = time.monotonic() + seconds
        rounds: list[str] = []
        while time.monotonic() < until:
            if not rounds:
                rounds = self._random.sample(kinds, len(kinds))
            kind = rounds.pop()
            self._report.faults[kind] += 1
            if kind in _ALONE:
                await asyncio.gather(*self._running)
                await self._kinds[kind]()
            else:
                self._running.append(asyncio.create_task(self._kinds[kind]()))
            await asyncio.sleep(self._random.uniform(*_PAUSE_S))
        await asyncio.gather(*self._running)
        began = time.monotonic()
        await self._all_answer(_BACK_S)
        self._tell(f"all actors answer again {time.monotonic() - began:.1f} s after the faults")

    async def measure(self, seconds: float) -> None:
        """Add the least memory of the hub within a time of peace, and its open files."""
        hub = psutil.Process(self._hub.pid)
        least = float("inf")
        files = 1 << 30
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            least = min(least, memory_of(hub) or least)
            files = min(files, hub.num_fds())
            await asyncio.sleep(0.5)
        self._report.memory.append(round(least / 1e6, 1))
        self._report.files.append(files)

    async def finish(self) -> None:
        """End the program by Ctrl-C, as a user does."""
        await self._end_program()
        status = await self._wait_for(self._host)
        if status:
            self._complain(f"the joined host ended with {status}: {self._host.last_words()}")
        await self._check_gone(lambda process: True, "after the end")

    async def close(self) -> None:
        """End all remaining processes."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.to_thread(end_all, marked(self._mark))
        await self._link.close()
        for path in self._folder.glob("*.log"):
            crashes = crashes_in(path.read_text(encoding="utf-8", errors="replace"))
            self._report.complaints += [f"{path.name}: {line}" for line in crashes]

    # Faults
    # ----------------------------------------------------------------------------------------------

    async def _kill(self, processes: list[psutil.Process]) -> None:
        if processes:
            send(self._random.choice(processes), signal.SIGKILL)

    async def _stop(self, processes: list[psutil.Process]) -> None:
        if processes:
            process = self._random.choice(processes)
            send(process, signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(*_HOLD_S))
            send(process, signal.SIGCONT)

    async def _reset_link(self) -> None:
        self._link.reset()

    async def _hold_link(self) -> None:
        self._link.hold()
        await asyncio.sleep(self._random.uniform(*_HOLD_S))
        self._link.release()

    async def _corrupt_link(self) -> None:
        self._link.corrupt_share = 0.2
        await asyncio.sleep(self._random.uniform(0.5, 2.0))
        self._link.corrupt_share = 0.0

    async def _kill_host(self) -> None:
        host = self._host
        children = psutil.Process(host.pid).children(recursive=True)
        host.send(signal.SIGKILL)
        await self._wait_for(host)
        await self._check_gone(children.__contains__, "after their parent was killed")
        self._start_host()

    async def _kill_hub(self) -> None:
        children = self._locals()
        self._hub.send(signal.SIGKILL)
        await self._wait_for(self._hub)
        await self._check_gone(children.__contains__, "after the hub was killed")
        self._start_hub()
        await self._all_answer(_STARTS_S)

    async def _end_hub(self) -> None:
        await self._end_program()
        # The goodbye has ended the joined processes, too, but those that were away.
        try:
            await asyncio.to_thread(self._host.wait, _GOODBYE_S * self._patience)
        except TimeoutError:
            self._host.send(signal.SIGTERM)
            await self._wait_for(self._host)
        self._start_host()
        self._start_hub()
        await self._all_answer(_STARTS_S)

    async def _end_program(self) -> None:
        children = self._locals()
        self._hub.send(signal.SIGINT)
        status = await self._wait_for(self._hub)
        if status:
            self._complain(f"the hub ended with {status}: {self._hub.last_words()}")
        await self._check_gone(children.__contains__, "after the hub has ended")

    # Processes
    # ----------------------------------------------------------------------------------------------

    def _start_hub(self) -> None:
        self._life += 1
        command = [sys.executable, "-m", "benchmarks.chaos.actor_hub", str(self._folder)]
        self._hub = self._started([*command, str(self._life), str(self._port)], "hub")

    def _start_host(self) -> None:
        command = [sys.executable, "-m", "aiorl.worker", "--slots", str(NUM_JOINED)]
        command += ["--connect", f"tcp://127.0.0.1:{self._link.port}"]
        command += ["--keys", str(self._folder / "keys"), "--max-worker-restarts", "1000000"]
        self._host = self._started(command, "host")

    def _started(self, command: list[str], name: str) -> Started:
        output = self._folder / f"{name}.log"
        return Started(command, mark=self._mark, output=output, environment=_ENVIRONMENT)

    def _locals(self) -> list[psutil.Process]:
        return _running_in(self._hub.pid, "aiorl.actors.process")

    def _joined(self) -> list[psutil.Process]:
        return _running_in(self._host.pid, "aiorl.worker")

    async def _wait_for(self, process: Started) -> int:
        """Return the exit status of a process that is to end.

        Raises:
            TimeoutError: it does not.
        """
        return await asyncio.to_thread(process.wait, _END_S * self._patience)

    async def _check_gone(self, is_meant: Callable[[psutil.Process], bool], when: str) -> None:
        """Wait until processes have ended; those that do not are orphans."""
        until = time.monotonic() + _ORPHANS_S * self._patience
        while time.monotonic() < until:
            if not any(map(is_meant, marked(self._mark))):
                return
            await asyncio.sleep(_LOOK_S)
        for process in filter(is_meant, marked(self._mark)):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                self._complain(f"orphan {when}: {process.pid} {command:.200}")

    async def _all_answer(self, seconds: float) -> None:
        """Wait until calls that begin from now on have been answered by every actor."""
        path = self._folder / f"calls-{self._life}.jsonl"
        until = time.monotonic() + seconds * self._patience
        offset = path.stat().st_size if path.exists() else 0
        begun: dict[str, int] = {}
        answered: set[int] = set()
        while len(answered) < NUM_HERE + NUM_JOINED:
            if time.monotonic() > until:
                words = f"{self._hub.last_words()}; {self._host.last_words()}"
                raise TimeoutError(f"only the actors {answered} answer within {seconds} s; {words}")
            await asyncio.sleep(_LOOK_S)
            if not path.exists():
                continue
            lines, offset = _lines_from(path, offset)
            for token, *rest in lines:
                if rest[0] == "begin":
                    begun[token] = rest[2]
                elif rest[0] == Ending.OK and begun.get(token, -1) >= 0:
                    answered.add(begun[token])

    def _complain(self, text: str) -> None:
        self._report.complaints.append(text)
        self._tell(text)


def _running_in(pid: int, module: str) -> list[psutil.Process]:
    """Return the processes without children below a process that run a module."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
        return [each for each in children if module in each.cmdline()]
    return []


def _lines_from(path: Path, offset: int) -> tuple[list[list[Any]], int]:
    """Return the whole lines of a journal from an offset on, and the offset after them."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    end = data.rfind(b"\n") + 1
    lines = []
    for line in data[:end].splitlines():
        with contextlib.suppress(ValueError):  # the offset was within a line
            lines.append(json.loads(line))
    return lines, offset + end


# Accounts
# --------------------------------------------------------------------------------------------------


def accounts_of(folder: Path, report: ActorReport) -> None:
    """Read the journals: each call has ended once, as it should, and was run at most once.

    Args:
        folder: directory with the journals of a campaign.
        report: takes the counts, and a complaint for each call that breaks the rule.
    """
    runs, in_one_process = _runs_of(folder.glob("ran-*.txt"))
    report.runs = runs.total()
    complaints = report.complaints
    complaints += [f"{token} was run twice by one process" for token in in_one_process]
    for path in sorted(folder.glob("calls-*.jsonl")):
        lines, _ = _lines_from(path, 0)
        kinds = {line[0]: line[2] for line in lines if line[1] == "begin"}
        ends = Counter(line[0] for line in lines if line[0] and line[1] != "begin")
        complaints += [f"{token} ended {count} times" for token, count in ends.items() if count > 1]
        has_ended = any(not line[0] for line in lines)
        open_calls = [token for token in kinds if token not in ends]
        if has_ended:
            complaints += [f"{token} ({kinds[token]}) has no end" for token in open_calls]
        else:
            report.calls["hub"] += len(open_calls)
        for token, ending, *_ in (line for line in lines if line[0] and line[1] != "begin"):
            report.calls[ending.partition(":")[0]] += 1
            if ending.partition(":")[0] in (Ending.WRONG, Ending.STUCK):
                complaints.append(f"{token} ({kinds[token]}) ended {ending:.300}")
            elif ending == Ending.OK and not runs[token]:
                complaints.append(f"{token} was answered without having been run")
        most = {"broadcast": NUM_HERE + NUM_JOINED}
        complaints += [
            f"{token} ({kind}) was run {runs[token]} times"
            for token, kind in kinds.items()
            if runs[token] > most.get(kind, 1) or runs[f"{token}/other"] > 1
        ]


def _runs_of(paths: Iterable[Path]) -> tuple[Counter[str], list[str]]:
    """Return how often each call was run, and the calls that one process has run twice."""
    runs: Counter[str] = Counter()
    twice: list[str] = []
    for path in paths:
        in_process = Counter(path.read_text(encoding="utf-8").split())
        twice += [token for token, count in in_process.items() if count > 1]
        runs += in_process
    return runs, twice
