"""Campaign: for each algorithm a run that is started, struck, left in peace, struck again and
ended.

    start -> faults of every kind -> peace, memory
        -> faults that leave the learner alive -> peace, memory -> Ctrl-C

The second round of faults is the longer one: growth of a learner under faults shows only if it
lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.chaos.cluster import LEARNER, Cluster, ClusterFailed, Missed
from benchmarks.chaos.disk import Disk
from benchmarks.chaos.faults import KINDS, NoTarget, Strike
from benchmarks.chaos.memory import TRIM_S, measure_memory
from benchmarks.chaos.plan import Effect, Planned, Planner
from benchmarks.chaos.processes import aborted, crashes_in, ended_in
from benchmarks.chaos.progress import SETTLE_S, Span, longest_standstill, standstill, time_dead
from benchmarks.chaos.report import Bars, Report, Struck

__all__ = ["Options", "run_chaos"]

_SHARE_WITH_DEATHS = 0.4
_RISES_S = 100.0
_ALL_BACK_S = 60.0
_BLAME_S = 3.0
"""An end of the learner within this time after a fault counts as that fault's, too."""

_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ |+].*\n|\n)*(\S.*)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a campaign.

    Attributes:
        seconds: total time during which faults begin.
        seed: seed of the plan.
        kinds: names of the kinds to draw from.
        algos: algorithms, one run each.
        folder: existing directory for all logs.
        bars: bounds.
        patience: factor for all timeouts, 1 for a quiet machine.
    """

    seconds: float
    seed: int
    kinds: Sequence[str]
    algos: Sequence[str]
    folder: Path
    bars: Bars
    patience: float = 1.0

    @property
    def peace_s(self) -> float:
        """Seconds of a quiet phase, in which memory is measured."""
        return min(TRIM_S, self.seconds / 12)


async def run_chaos(options: Options, tell: Callable[[str], None]) -> Report:
    """Run the campaign; cancelling it ends every process first.

    Args:
        options: settings.
        tell: receives the progress, one line at a time.
    """
    report = Report(options.seed, options.bars)
    planner = Planner({name: KINDS[name].effect for name in options.kinds}, options.seed)
    disk = Disk(options.folder / "disk")
    began = time.monotonic()
    try:
        if disk.why_not and "disk-full" in options.kinds:
            report.skipped["disk-full"] = f"skipped: {disk.why_not}"
        for algo in options.algos:
            await _Run(algo, options, planner, disk, report, tell, began).go()
    finally:
        disk.close()
    return report


class _Run:
    """Run of one algorithm."""

    def __init__(
        self,
        algo: str,
        options: Options,
        planner: Planner,
        disk: Disk,
        report: Report,
        tell: Callable[[str], None],
        began: float,
    ) -> None:
        self._algo, self._options, self._planner, self._disk = algo, options, planner, disk
        self._report, self._began = report, began
        self._tell_line = tell
        self._folder = options.folder / algo
        self._folder.mkdir()
        self._cluster = Cluster(
            algo, self._folder, disk.path / algo, secrets.token_hex(8), options.patience
        )

    async def go(self) -> None:
        seconds = self._options.seconds / len(self._options.algos)
        cluster, report, peace_s = self._cluster, self._report, self._options.peace_s
        try:
            await cluster.start()
            self._tell(f"trains with {cluster.workers_there} workers")
            await self._part(self._planner.part(_SHARE_WITH_DEATHS * seconds, learner_ends=True))
            await asyncio.sleep(peace_s / 2)  # the learner is young
            begin = await measure_memory(cluster, peace_s)
            await self._part(
                self._planner.part((1 - _SHARE_WITH_DEATHS) * seconds, learner_ends=False)
            )
            end = await measure_memory(cluster, peace_s)
            for name, value in begin.to_dict().items():
                report.memory[f"{self._algo}, {name.replace('_', ' ')}"] = (
                    value,
                    end.to_dict()[name],
                )
            report.complaints += [f"{self._algo}: {text}" for text in await cluster.finish()]
            report.orphans += await cluster.orphans()
        except ClusterFailed as failed:
            report.complaints.append(f"{self._algo}: gave up: {failed}")
        finally:
            await cluster.close()
            self._keep_files()
        self._take_stock()

    async def _part(self, planned: Sequence[Planned]) -> None:
        """Strike as planned, then wait until the run is healthy again."""
        cluster = self._cluster
        try:
            async with asyncio.TaskGroup() as tasks:
                for each in planned:
                    await asyncio.sleep(each.pause_s)
                    # a learner could not start on a full disk
                    if KINDS[each.kind].effect is Effect.ENDS_LEARNER:
                        with contextlib.suppress(Missed):
                            await cluster.until(
                                lambda: cluster.is_training and not self._disk.is_full,
                                2 * _RISES_S,
                                "",
                            )
                    tasks.create_task(self._strike(each))
        except* ClusterFailed as failed:
            raise ClusterFailed(str(failed.exceptions[0])) from None
        try:
            await cluster.until(
                lambda: cluster.is_training and cluster.workers_there >= cluster.num_workers,
                _ALL_BACK_S,
                f"not all of {cluster.num_workers} workers were back",
            )
        except Missed as missed:
            self._report.complaints.append(
                f"{self._algo}: {missed}: {cluster.workers_there} are there"
            )
        self._tell(f"part done, {cluster.workers_there} workers are there")

    async def _strike(self, planned: Planned) -> None:
        cluster, kind = self._cluster, KINDS[planned.kind]
        strike = Strike(cluster, self._disk, random.Random(planned.seed))
        misses: list[str] = []
        try:
            await kind.act(strike)
        except (NoTarget, psutil.NoSuchProcess):  # or it has just ended
            self._report.skipped.setdefault(kind.name, "had no target once or more")
            return
        except Missed as missed:
            misses.append(str(missed))
        if strike.ended is None:
            strike.over()
        assert strike.ended is not None
        span = Span(strike.began, strike.ended)
        rises = cluster.progress.rises
        with contextlib.suppress(Missed):
            await cluster.until(lambda: rises and rises[-1] > span.end + SETTLE_S, _RISES_S, "")
        blamed = Span(span.begin, span.end + _BLAME_S)
        misses += [
            str(e)
            for e in cluster.unexpected
            if e.who == LEARNER and blamed.meets(Span(e.at, e.at))
        ]
        struck = self._measured(planned, strike, span, tuple(misses))
        self._report.struck.append(struck)
        self._tell(_told(struck))

    def _measured(
        self, planned: Planned, strike: Strike, span: Span, misses: tuple[str, ...]
    ) -> Struck:
        cluster = self._cluster
        ends_learner = KINDS[planned.kind].effect is Effect.ENDS_LEARNER
        deaths = [*cluster.deaths, *([cluster.down] if cluster.down is not None else [])]
        recovery_s = (
            time_dead(cluster.deaths, span)
            if ends_learner
            else standstill(cluster.progress.rises, span)
        )
        # A death while this fault still has an effect explains the rest.
        meant = Span(span.begin, span.end + max(SETTLE_S, recovery_s or 0.0))
        return Struck(
            number=planned.number,
            algo=self._algo,
            kind=planned.kind,
            target=strike.target,
            at_s=span.begin - time.time() + time.monotonic() - self._began,
            held_s=span.end - span.begin,
            ends_learner=ends_learner,
            beside_death=not ends_learner and any(meant.meets(death) for death in deaths),
            recovery_s=recovery_s,
            misses=misses,
        )

    def _take_stock(self) -> None:
        """Collect the findings that are known once all processes have ended."""
        cluster, report = self._cluster, self._report
        progress = cluster.progress
        report.results += len(progress.rows)
        report.gaps += [f"{self._algo}: {gap}" for gap in progress.gaps]
        report.resumes += cluster.resumes.compared
        report.weights_compared += cluster.resumes.weights_compared
        report.forgotten += [f"{self._algo}: {each}" for each in cluster.resumes.missing]
        for name, steps in progress.left.items():
            report.left[name] = report.left.get(name, 0) + steps
        report.deaths_s += [death.end - death.begin for death in cluster.deaths]
        if progress.rises:
            whole = Span(progress.rises[0], progress.rises[-1])
            report.standstills_s[self._algo] = longest_standstill(
                progress.rises, whole, cluster.deaths
            )
        crashes: list[str] = []
        ended = list(cluster.unexpected)
        tracebacks: Counter[str] = Counter(report.tracebacks)
        for path in sorted(self._folder.rglob("*.txt*")):  # rotated logs, too
            text = path.read_text(encoding="utf-8", errors="replace")
            who = f"{self._algo} {path.name}"
            crashes += [f"{who}: {line}" for line in crashes_in(text)]
            if path != self._folder / "learner.txt":  # its lines are in log.txt as well
                ended += ended_in(who, text)
                tracebacks.update(line[:200] for line in _TRACEBACK.findall(text))
        report.aborted += aborted(crashes, ended)
        report.tracebacks = dict(tracebacks)

    def _keep_files(self) -> None:
        """Copy the files that explain a run from the disk before it is deleted."""
        with contextlib.suppress(OSError):
            shutil.copytree(
                self._cluster.run_dir,
                self._folder / "run",
                ignore=shutil.ignore_patterns("checkpoints", "events*"),
            )
        shutil.rmtree(self._cluster.run_dir, ignore_errors=True)

    def _tell(self, text: str) -> None:
        self._tell_line(f"{time.monotonic() - self._began:7.1f} s  {self._algo:6}  {text}")


def _told(struck: Struck) -> str:
    if struck.recovery_s is None:
        became = "NOT SURVIVED: trained steps do not rise"
    else:
        became = f"trained again after {struck.recovery_s:.2f} s"
        if struck.beside_death:
            became = "the learner was dead meanwhile"
        if struck.misses:
            became = f"NOT SURVIVED: {'; '.join(struck.misses)}"
    target = f" ({struck.target})" if struck.target else ""
    return (
        f"#{struck.number} {struck.kind}{target} at {struck.at_s:.1f} s, for {struck.held_s:.1f} s:"
        f" {became}"
    )
