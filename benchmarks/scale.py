"""Many workers on one learner: how fast they join, what each costs, how long a broadcast takes, and
what limits next.

1 to 256 workers have real sessions, sockets and processes, with and without keys
(`scale_processes`); up to 10,000 are simulated (`scale_simulation`). `python -m benchmarks.scale
FILE` writes the tables of `docs/scale.md` from the file that `python -m benchmarks scale --json
FILE` has written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiorl.net.wire.format import MAX_WORKERS
from aiorl.text import one_line
from benchmarks.measure import run_fresh
from benchmarks.result import Figure, readable
from benchmarks.scale_processes import measured

__all__ = [
    "main",
    "scale_real_001",
    "scale_real_016",
    "scale_real_064",
    "scale_real_256",
    "scale_simulated",
    "tables",
]

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
MEASURED = (1, 16, 64, 256)
SIMULATED = (1, 16, 64, 256, 1_000, 4_096, 10_000)
_MAX_PROBLEM = 200
_REAL, _SIMULATED = "scale/{} workers, {}", "scale/{} simulated workers"
_WITH = {False: "no keys", True: "keys"}


@dataclass(frozen=True, slots=True)
class _What:
    """A row of a table: its text, its unit, and the number by which the measured one is
    multiplied.
    """

    text: str
    unit: str
    factor: float = 1.0


ROWS = {
    "join_s": _What("all join at once", "s"),
    "join_cpu_ms": _What("CPU time for each that joins", "ms"),
    "memory_kb": _What("learner's memory for each", "kB"),
    "idle_us": _What("CPU time for each and second, idle", "us"),
    "paced_per_s": _What("fragments/s, 10 from each", "/s"),
    "paced_us": _What("CPU time for each of them", "us"),
    "flood_per_s": _What("fragments/s, as fast as they can", "/s"),
    "flood_us": _What("CPU time for each of them", "us"),
    "flood_loop_us": _What("of it in the loop's thread", "us"),
    "small_s": _What("broadcast of 18 kB, until the last has it", "ms", 1e3),
    "small_cpu_s": _What("CPU time for it", "ms", 1e3),
    "large_s": _What("broadcast of 6.8 MB, until the last has it", "ms", 1e3),
    "large_cpu_s": _What("CPU time for it", "ms", 1e3),
    "ended": _What("connections that ended or were refused", ""),
}
_SIMULATED_ROWS = {
    "join_us": _What("one joins", "us"),
    "fragment_us": _What("a fragment", "us"),
    "idle_us": _What("each worker and second, idle", "us"),
    "return_us": _What("one is lost, its successor joins", "us"),
    "reconnect_us": _What("one comes back over another connection", "us"),
    "update_us": _What("a new version", "us"),
    "session_bytes": _What("memory for each worker", "kB", 1e-3),
}


def scale_real_001() -> list[Figure]:
    """Measure one worker."""
    return _real(1)


def scale_real_016() -> list[Figure]:
    """Measure 16 workers."""
    return _real(16)


def scale_real_064() -> list[Figure]:
    """Measure 64 workers."""
    return _real(64)


def scale_real_256() -> list[Figure]:
    """Measure 256 workers."""
    return _real(256)


def scale_simulated() -> list[Figure]:
    """Simulate 1 to 10,000 workers."""
    figures: list[Figure] = []
    for workers in SIMULATED:
        name = _SIMULATED.format(workers)
        try:
            found = run_fresh("benchmarks.scale_simulation", str(workers))
        except Exception as error:  # the other sizes must still be measured
            figures.append(_unmeasured(name, error))
        else:
            figures += _figures(name, _SIMULATED_ROWS, found)
    return figures


def _real(workers: int) -> list[Figure]:
    figures: list[Figure] = []
    for keys, said in _WITH.items():
        name = _REAL.format(workers, said)
        try:
            found, problem = measured(workers, keys=keys)
        except Exception as error:  # the other one must still be measured
            figures.append(_unmeasured(name, error))
        else:
            figures += _figures(name, ROWS, found)
            if problem:
                figures.append(Figure.unmeasured(name, one_line(problem, _MAX_PROBLEM)))
    return figures


def _unmeasured(name: str, error: Exception) -> Figure:
    return Figure.unmeasured(
        name, one_line(f"{type(error).__name__}: {error}"[-_MAX_PROBLEM:], _MAX_PROBLEM)
    )


def _figures(name: str, rows: dict[str, _What], found: dict[str, float]) -> list[Figure]:
    return [
        Figure(
            f"{name}: {key}",
            found[key] * what.factor,
            what.unit,
            target=0.0 if key == "ended" else None,
            smaller_is_better=True,
        )
        for key, what in rows.items()
        if key in found
    ]


# The page
# --------------------------------------------------------------------------------------------------


def tables(figures: Sequence[Figure]) -> dict[str, list[str]]:
    """Return the lines of each table of the page by its name."""
    by_name = {figure.name: figure for figure in figures}
    made = {
        f"real, {said}": _table(
            by_name, ROWS, {size: _REAL.format(size, said) for size in MEASURED}
        )
        for said in _WITH.values()
    }
    made["simulated"] = _table(
        by_name, _SIMULATED_ROWS, {size: _SIMULATED.format(size) for size in SIMULATED}
    )
    made["served"] = _served(by_name, MEASURED[-1])
    return made


def _table(
    by_name: dict[str, Figure], rows: dict[str, _What], columns: dict[int, str]
) -> list[str]:
    """Return a table with a column for each number of workers; a size that could not be measured
    says so.
    """
    lines = [
        f"| Workers | {' | '.join(f'{size:,}' for size in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for key, what in rows.items():
        cells = [by_name.get(f"{name}: {key}") for name in columns.values()]
        unit = f" ({what.unit})" if what.unit.strip("/s") or what.unit == "s" else ""
        text = " | ".join(
            "not measured" if cell is None else readable(cell.value) for cell in cells
        )
        lines.append(f"| {what.text}{unit} | {text} |")
    for name in columns.values():
        if name in by_name:
            lines += ["", f"{name.removeprefix('scale/')}: not measured: {by_name[name].problem}"]
    return lines


def _served(by_name: dict[str, Figure], size: int) -> list[str]:
    """Return the table of workers that one learner can serve, from the figures of the largest
    measured number.
    """
    lines = ["| A worker's fragments/s | Without keys | With keys |", "|---|---|---|"]
    values = []
    for said in _WITH.values():
        name = _REAL.format(size, said)
        loop, idle = (by_name.get(f"{name}: {key}") for key in ("flood_loop_us", "idle_us"))
        values.append(None if loop is None or idle is None else (loop.value, idle.value))
    for rate in (0.2, 1, 5, 20):
        cells = [
            "not measured" if value is None else _count(1e6 / (rate * value[0] + value[1]))
            for value in values
        ]
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return lines


def _count(workers: float) -> str:
    return (
        f"{workers:,.0f}"
        if workers <= MAX_WORKERS
        else f"{workers:,.0f}: more than the {MAX_WORKERS:,} of a run"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="figures, as `python -m benchmarks scale --json` writes",
    )
    args = parser.parse_args(argv)
    figures = [Figure.from_dict(row) for row in json.loads(args.file.read_text("utf-8"))]
    PAGE.write_text(with_tables(PAGE.read_text("utf-8"), figures), encoding="utf-8")
    return 0


def with_tables(page: str, figures: Sequence[Figure]) -> str:
    """Return the page with its tables made from figures.

    Raises:
        ValueError: the page lacks the marks of a table.
    """
    for name, lines in tables(figures).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, has_begin, rest = page.partition(begin)
        _, has_end, after = rest.partition(end)
        if not has_begin or not has_end:
            raise ValueError(f"the page needs the lines {begin!r} and {end!r}")
        page = "\n".join([f"{before}{begin}", *lines, "", f"{end}{after}"])
    return page


if __name__ == "__main__":
    sys.exit(main())
