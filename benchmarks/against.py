"""`python -m benchmarks.against REV [NAME...]`: compare the working tree's figures with those of
another revision.

Figures of the same tree vary from hour to hour by more than most changes do. So one run measures
both trees alternately, round by round, each with its own benchmarks. The revision is checked out
into a temporary worktree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.measure import exit_on_sigterm
from benchmarks.result import Figure, make_console, make_table, readable

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]

_KNOWN = (
    "import json, benchmarks.__main__ as b; print(json.dumps({n: f.__module__ for n, f in"
    " b._functions().items()}))"
)
_MEASURE = (
    "import importlib, json, sys; figures = getattr(importlib.import_module(sys.argv[1]),"
    " sys.argv[2])(); print(json.dumps([figure.to_dict() for figure in figures]))"
)

Rounds = dict[str, list[tuple[Figure, Figure]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both trees alternately and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("rev", metavar="REV", help="commit, tag or branch to compare with")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="as for `python -m benchmarks`; default: all"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds for each figure and tree; default: 5"
    )
    args = parser.parse_args(argv)
    console = make_console()
    exit_on_sigterm()  # otherwise the temporary worktree is left behind
    with _checked_out(args.rev) as there:
        known, known_there = _run(ROOT, _KNOWN), _run(there, _KNOWN)
        chosen = [
            n for n in known if not args.names or any(n.startswith(prefix) for prefix in args.names)
        ]
        for name in [name for name in chosen if name not in known_there]:
            console.print(f"{name}: not in {args.rev}", highlight=False)
        shared = [name for name in chosen if name in known_there]
        if not shared:
            parser.error(f"no such benchmark in both trees; here: {', '.join(known)}")
        rounds: Rounds = {}
        try:
            for name in shared:
                for number in range(args.rounds):
                    console.print(
                        f"[dim]{name}, round {number + 1} of {args.rounds} ...[/dim]",
                        highlight=False,
                    )
                    commands = [(ROOT, known[name]), (there, known_there[name])]
                    # Each round swaps the order, so that neither tree always gets the warmer
                    # machine.
                    order = (0, 1) if number % 2 == 0 else (1, 0)
                    measured = {which: _figures(*commands[which], name) for which in order}
                    for figure, new in measured[0].items():
                        if (old := measured[1].get(figure)) is None:
                            continue
                        rounds.setdefault(figure, []).append((new, old))
                        said = (
                            f"  {figure}: {readable(new.value)} {new.unit} here,"
                            f" {readable(old.value)} there"
                        )
                        if new.ratio is not None and old.ratio is not None:
                            said += f"; to baseline {new.ratio:.3f} and {old.ratio:.3f}"
                        console.print(said, highlight=False)
        finally:  # Ctrl-C after an hour does not lose the rounds measured
            if rounds:
                console.print(_table(rounds, args.rev))
    return 0


@contextmanager
def _checked_out(rev: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        try:
            subprocess.run([*git, "add", "--quiet", "--detach", str(tree), rev], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.returncode) from None  # git has printed the reason
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _run(tree: Path, script: str, *arguments: str) -> Any:
    """Run a script with the modules of ``tree``; return the JSON on the last line it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _figures(tree: Path, module: str, function: str) -> Mapping[str, Figure]:
    figures = [Figure.from_dict(data) for data in _run(tree, _MEASURE, module, function)]
    return {figure.name: figure for figure in figures}


def _table(rounds: Rounds, rev: str) -> Table:
    title = f"working tree (new) against {rev} (old), medians; spread = (highest - lowest) / median"
    columns = (
        "name",
        "new",
        "old",
        "unit",
        "spread new, old",
        "new/old (range)",
        "to baseline: new, old",
    )
    table = make_table(title, columns)
    for name, pairs in rounds.items():
        new, old = zip(*pairs, strict=True)
        values = [[figure.value for figure in figures] for figures in (new, old)]
        ratios = [a / b for a, b in zip(*values, strict=True) if b]
        to_baseline = [
            [figure.ratio for figure in figures if figure.ratio is not None]
            for figures in (new, old)
        ]
        table.add_row(
            name,
            *(readable(statistics.median(column)) for column in values),
            new[0].unit,
            ", ".join(_spread(column) for column in values),
            (
                f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"
                if ratios
                else ""
            ),
            ", ".join(f"{statistics.median(column):.3f}" for column in to_baseline if column),
        )
    return table


def _spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    return f"{(max(values) - min(values)) / middle:.0%}" if middle else "-"


if __name__ == "__main__":
    sys.exit(main())
