"""`python -m benchmarks [NAME...] [--json FILE]`: measure each figure against its baseline and
print a table.

The table is printed in any case. A figure that can't be measured gets a row that gives the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from aiorl.text import one_line
from benchmarks.measure import exit_on_sigterm
from benchmarks.result import Figure, make_console, make_table, readable

__all__ = ["main"]

_MAX_PROBLEM = 200
MODULES = (
    "sampler",
    "general",
    "remote",
    "atari",
    "wire",
    "update",
    "train",
    "train_presets",
    "apex",
    "leases",
    "host_link",
    "scale",
    "startup",
    "library",
    "serve",
    "clients",
    "attacks",
    "offline",
    "replay",
    "off_policy",
    "watch",
    "actors",
    "stable_baselines",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmarks; run all of them by default.

    Returns: the exit status: 0, 1 if a bound is missed or a figure could not be measured, 130 after
    Ctrl-C.
    """
    known = _functions()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="A NAME is a benchmark or a prefix of one, such as sampler or train_impala. Known: "
        + ", ".join(known),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args(argv)
    chosen = [
        name
        for name in known
        if not args.names or any(name.startswith(prefix) for prefix in args.names)
    ]
    unmatched = [
        prefix for prefix in args.names if not any(name.startswith(prefix) for name in known)
    ]
    if unmatched:
        parser.error(f"no benchmark is called {unmatched[0]!r}; known: {', '.join(known)}")
    exit_on_sigterm()
    console = make_console()
    figures: list[Figure] = []
    try:
        for name in chosen:
            console.print(f"[dim]{name} ...[/dim]", highlight=False)
            measured = _measured(name, known[name])
            figures += measured
            for figure in measured:
                console.print(_line(figure), highlight=False, markup=False)
    except KeyboardInterrupt:
        return 130
    finally:
        console.print(_table(figures))
        if args.json is not None:
            rows = [figure.to_dict() for figure in figures]
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figure.ok for figure in figures) else 1


def _measured(name: str, measure: Callable[[], list[Figure]]) -> list[Figure]:
    """Return a benchmark's figures; if it fails, return one row with the reason, so that the others
    still run.
    """
    try:
        return measure()
    except Exception as error:  # one failed benchmark must not stop the others
        traceback.print_exc()
        return [Figure.unmeasured(name, one_line(f"{type(error).__name__}: {error}", _MAX_PROBLEM))]


def _functions() -> dict[str, Callable[[], list[Figure]]]:
    found: dict[str, Callable[[], list[Figure]]] = {}
    for name in MODULES:
        module = importlib.import_module(f"benchmarks.{name}")
        for function in module.__all__:
            if function.startswith(f"{name}_"):
                found[function] = getattr(module, function)
    return found


def _table(figures: Sequence[Figure]) -> Table:
    columns = ("name", "value", "unit", "baseline", "ratio", "target", "ok")
    table = make_table("aiorl benchmarks: medians, each with its baseline", columns)
    for figure in figures:
        table.add_row(*_cells(figure))
    return table


def _cells(figure: Figure) -> tuple[str, ...]:
    sign = "<=" if figure.smaller_is_better else ">="
    targets = [f"{sign} {readable(figure.target)}"] if figure.target is not None else []
    targets += [f"ratio {sign} {figure.target_ratio:g}"] if figure.target_ratio is not None else []
    targets += [f"not measured: {figure.problem}"] if figure.problem else []
    return (
        figure.name,
        readable(figure.value),
        figure.unit,
        "" if figure.baseline is None else readable(figure.baseline),
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        ", ".join(targets),
        "yes" if figure.ok else "NO",
    )


def _line(figure: Figure) -> str:
    return "  ".join(cell for cell in _cells(figure) if cell)


if __name__ == "__main__":
    sys.exit(main())
