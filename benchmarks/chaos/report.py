"""Figures of a run under faults, and their bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Bars", "Line", "Report", "Struck"]


@dataclass(frozen=True, slots=True)
class Bars:
    """Bounds; counts that must be zero need none.

    Attributes:
        median_s: median time until trained steps rise again.
        worst_s: bound on each recovery, and on each standstill of trained steps.
        death_median_s: median time from a learner's death until trained steps rise again.
        memory: growth of a process's memory as a share; None only reports it.
        is_ledger_moved: env steps must have been discarded and lost; otherwise the ledger was
            hardly tested.
    """

    median_s: float = 5.0
    worst_s: float = 15.0
    death_median_s: float = 8.0
    memory: float | None = 0.03
    is_ledger_moved: bool = True


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault and its outcome.

    Attributes:
        number: number in the plan.
        algo: algorithm of the run.
        kind: name of its kind.
        target: target in words.
        at_s: seconds from the campaign's start.
        held_s: duration in seconds.
        ends_learner: the fault was meant to end the learner.
        beside_death: the learner's end by another fault overlapped it, so its time is meaningless.
        recovery_s: longest time without a rise of trained steps from its begin; None if they never
            rose again.
        misses: conditions that did not hold afterwards.
    """

    number: int
    algo: str
    kind: str
    target: str
    at_s: float
    held_s: float
    ends_learner: bool
    beside_death: bool
    recovery_s: float | None
    misses: tuple[str, ...] = ()

    @property
    def survived(self) -> bool:
        """True if training continues and every other condition holds."""
        return self.recovery_s is not None and not self.misses


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: its name, value and bound in words, and whether it holds (None: no bound)."""

    name: str
    value: str
    bar: str = ""
    ok: bool | None = None


@dataclass(slots=True)
class Report:
    """Faults of a run and their outcome.

    Attributes:
        seed: seed of the plan.
        bars: bounds.
        struck: faults in the order of their ends.
        skipped: kind -> reason, or count, of faults that were not possible.
        deaths_s: time from each end of a learner until trained steps rose again.
        standstills_s: algorithm -> longest time without a rise while the learner was alive.
        results: number of results with a checked ledger.
        gaps: problems of ledgers.
        resumes: number of resumed learners compared with their checkpoint by the first result.
        weights_compared: number of those compared by weights, too.
        forgotten: state that did not come back.
        left: "discarded" and "lost" -> env steps.
        aborted: processes that ended by themselves.
        orphans: processes that outlived the run.
        complaints: other problems.
        memory: "algorithm, process" -> MB at begin and end.
        tracebacks: last line of a traceback in the logs -> count; reported, not judged.
    """

    seed: int
    bars: Bars
    struck: list[Struck] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    deaths_s: list[float] = field(default_factory=list)
    standstills_s: dict[str, float] = field(default_factory=dict)
    results: int = 0
    gaps: list[str] = field(default_factory=list)
    resumes: int = 0
    weights_compared: int = 0
    forgotten: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    tracebacks: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if every bar holds."""
        return all(line.ok is not False for line in self.lines())

    @property
    def recoveries_s(self) -> list[float]:
        """Recovery times of all faults that neither ended a learner nor overlapped a learner's
        end.
        """
        return _recoveries(each for each in self.struck if not each.ends_learner)

    def lines(self) -> list[Line]:
        """Return all figures, judged and informative."""
        bars = self.bars
        num_survived = sum(each.survived for each in self.struck)
        lines = [
            Line(
                "faults survived",
                f"{num_survived} of {len(self.struck)}",
                "all",
                0 < num_survived == len(self.struck),
            ),
            *_times("recovery, learner alive", self.recoveries_s, bars.median_s, bars.worst_s),
            *_times("recovery, learner dead", self.deaths_s, bars.death_median_s, None),
        ]
        lines += [
            Line(
                f"longest standstill, {algo}",
                f"{seconds:.1f} s",
                f"<= {bars.worst_s:g} s",
                seconds <= bars.worst_s,
            )
            for algo, seconds in self.standstills_s.items()
        ]
        lines += [
            _none("ledger gaps", self.gaps, f" in {self.results:,} results"),
            *self._resume_lines(),
            *(
                Line(
                    f"env steps {name}",
                    f"{steps:,}",
                    "> 0" * bars.is_ledger_moved,
                    steps > 0 or not bars.is_ledger_moved,
                )
                for name, steps in self.left.items()
            ),
            _none("aborted processes", self.aborted),
            _none("orphans", self.orphans),
            _none("complaints", self.complaints),
        ]
        for name, (begin, end) in self.memory.items():
            growth = end / begin - 1.0 if begin else 0.0
            value = f"{begin:.1f} MB, then {end:.1f} MB ({growth:+.1%})"
            if bars.memory is None or "other" in name:
                lines.append(Line(f"memory, {name}", value))
            else:
                lines.append(
                    Line(f"memory, {name}", value, f"<= {bars.memory:+.0%}", growth <= bars.memory)
                )
        return lines

    def _resume_lines(self) -> list[Line]:
        """Judge the resumed state; resumes without a comparison prove nothing."""
        if not any(each.ends_learner for each in self.struck):
            return []
        compared = f"{self.resumes}, weights of {self.weights_compared}"
        return [
            Line(
                "resumes compared",
                compared,
                "> 0 of each",
                min(self.resumes, self.weights_compared) > 0,
            ),
            _none("forgotten in a resume", self.forgotten),
        ]

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """Return, by kind, the count, the survivors, and the median and worst of the known
        times.
        """
        kinds: dict[str, dict[str, Any]] = {}
        for kind in sorted({each.kind for each in self.struck}):
            struck = [each for each in self.struck if each.kind == kind]
            times = _recoveries(struck)
            kinds[kind] = {
                "faults": len(struck),
                "survived": sum(each.survived for each in struck),
                "median_s": statistics.median(times) if times else None,
                "worst_s": max(times, default=None),
            }
        return kinds

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report for JSON."""
        lines = [asdict(line) for line in self.lines()]
        return {"ok": self.ok, "lines": lines, "by_kind": self.by_kind(), **asdict(self)}

    def text(self) -> str:
        """Return the whole report as text."""
        rows = [f"{'fault':28}{'times':>7}{'survived':>10}{'median':>10}{'worst':>10}"]
        for kind, told in self.by_kind().items():
            times = "".join(f"{_seconds(told[name]):>10}" for name in ("median_s", "worst_s"))
            rows.append(f"{kind:28}{told['faults']:>7}{told['survived']:>10}{times}")
        rows += [f"{kind:28} {why}" for kind, why in sorted(self.skipped.items())]
        rows.append("")
        for line in self.lines():
            mark = {True: "ok ", False: "NO ", None: "   "}[line.ok]
            rows.append(
                f"{mark} {line.name:32} {line.value}{f'  ({line.bar})' if line.bar else ''}"
            )
        for title, texts in self._particulars().items():
            rows += ["", f"{title}:", *(f"  {text}" for text in texts)]
        return "\n".join(rows)

    def _particulars(self) -> Mapping[str, Sequence[str]]:
        particulars = {
            "not survived": [
                f"#{each.number} {each.algo} {each.kind} ({each.target}) at {each.at_s:.0f} s: "
                + ("; ".join(each.misses) or "trained steps did not rise again")
                for each in self.struck
                if not each.survived
            ],
            "ledger gaps": self.gaps[:10],
            "forgotten in a resume": self.forgotten[:10],
            "aborted processes": self.aborted,
            "orphans": self.orphans,
            "complaints": self.complaints,
            "tracebacks in logs (not judged)": [
                f"{count} x {text}" for text, count in self.tracebacks.items()
            ],
        }
        return {title: texts for title, texts in particulars.items() if texts}


def _recoveries(struck: Iterable[Struck]) -> list[float]:
    return [
        each.recovery_s for each in struck if each.recovery_s is not None and not each.beside_death
    ]


def _times(name: str, times: Sequence[float], median_s: float, worst_s: float | None) -> list[Line]:
    if not times:
        return [Line(name, "no fault")]
    median, worst = statistics.median(times), max(times)
    return [
        Line(f"{name}, median", f"{median:.2f} s", f"<= {median_s:g} s", median <= median_s),
        Line(
            f"{name}, worst",
            f"{worst:.2f} s",
            "" if worst_s is None else f"<= {worst_s:g} s",
            None if worst_s is None else worst <= worst_s,
        ),
    ]


def _none(name: str, found: Sequence[str], among: str = "") -> Line:
    return Line(name, f"{len(found)}{among}", "0", not found)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
