"""`python tests/support/readability.py`: measures of how the package reads, with their limits.

They can't be met by packing lines: what a line holds is counted, not how many there are. Density is
in nodes of the syntax tree per code line; other counts are per 1,000 code lines. The command fails
if a limit is exceeded; `--worst NAME` lists the places that count for a measure.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from size import ROOT, is_docstring, python_size

MAX_STATEMENTS = 49_700
"""A feature may raise this limit by what it needs."""
MAX_NODES = 8.5
MAX_NODES_IN_A_ROOM = 9.5
MAX_PER_THOUSAND = {"tuples": 4.0, "ifs": 15.0, "walruses": 1.0, "positional": 2.0}
MAX_VAGUE_PERCENT = 0.7
MAX_WIDE = 12
MAX_DEPTH = 4
MAX_UNFORMATTED = 12
MAX_ATTRIBUTES = 15
"""Attributes of a class that does not count as wide."""
MAX_POSITIONAL = 4
"""Positional arguments of a call that does not count."""
VAGUE = {
    "found",
    "own",
    "said",
    "given",
    "made",
    "known",
    "there",
    "more",
    "others",
    "wanted",
    "here",
    "kept",
    "asked",
    "held",
    "left",
    "named",
    "shown",
    "seen",
    "done",
    "taken",
    "one",
    "each",
}
"""Names that say nothing about their value."""
_MIN_ROOM_LINES = 200
"""Smaller rooms, such as single modules, have no limit of their own."""


@dataclass
class Reading:
    """Counts of one room, or of the whole package.

    Attributes:
        counts: how often each measure was found, with "nodes", "names", "lines" and "statements".
        places: measure -> path and line of each place that counts.
        bases: class -> names of its bases.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    bases: dict[str, list[str]] = field(default_factory=dict)

    def note(self, measure: str, place: str) -> None:
        """Count a place for a measure."""
        self.counts[measure] += 1
        self.places[measure].append(place)

    def per_thousand(self, measure: str) -> float:
        """Return how often a measure was found in 1,000 code lines."""
        return 1000 * self.counts[measure] / max(self.counts["lines"], 1)

    @property
    def density(self) -> float:
        """Nodes of the syntax tree per code line."""
        return self.counts["nodes"] / max(self.counts["lines"], 1)

    @property
    def vague_percent(self) -> float:
        """Share of bound names that say nothing, in percent."""
        return 100 * self.counts["vague"] / max(self.counts["names"], 1)

    @property
    def depth(self) -> int:
        """Classes on the longest path from a class to a base outside the package."""
        return max(map(self._depth_of, self.bases), default=0)

    def _depth_of(self, name: str) -> int:
        return 1 + max(
            (self._depth_of(base) for base in self.bases[name] if base in self.bases), default=0
        )

    def add(self, path: Path) -> None:
        """Count a file."""
        source = path.read_text("utf-8")
        place = path.relative_to(ROOT).as_posix()
        size = python_size(source)
        self.counts["lines"] += size.lines
        self.counts["statements"] += size.statements
        for token in tokenize.generate_tokens(StringIO(source).readline):
            is_comment = token.type == tokenize.COMMENT
            if is_comment and ("fmt: skip" in token.string or "fmt: off" in token.string):
                self.note("unformatted", f"{place}:{token.start[0]}")
        for node in ast.walk(ast.parse(source)):
            if is_docstring(node):
                self.counts["nodes"] -= 1  # it also has a constant: together they count as 0
            else:
                self.counts["nodes"] += 1
                self._add_node(node, f"{place}:{getattr(node, 'lineno', 0)}")

    def _add_node(self, node: ast.AST, place: str) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        self.note("tuples", place)
            case ast.IfExp():
                self.note("ifs", place)
            case ast.NamedExpr():
                self.note("walruses", place)
            case ast.Call() if len(node.args) > MAX_POSITIONAL:
                self.note("positional", f"{place} {len(node.args)} arguments")
            case ast.ClassDef():
                self.bases[node.name] = [_last_name(base) for base in node.bases]
                if (number := len(_attributes(node))) > MAX_ATTRIBUTES:
                    self.note("wide", f"{place} {node.name}: {number} attributes")
        for name in _bound_names(node):
            self.counts["names"] += 1
            if name in VAGUE:
                self.note("vague", f"{place} {name}")


def _last_name(base: ast.expr) -> str:
    """Return the name of a base class, without its module and its type arguments."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class sets on self, or declares in its body."""
    names = set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
    for child in ast.walk(node):
        match child:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def read() -> dict[str, Reading]:
    """Return room -> its reading; "aiorl" is the whole package."""
    readings: defaultdict[str, Reading] = defaultdict(Reading)
    for path in sorted(ROOT.glob("aiorl/**/*.py")):
        readings["aiorl"].add(path)
        readings["/".join(path.relative_to(ROOT).parts[:2])].add(path)
    return dict(readings)


def excesses(readings: dict[str, Reading]) -> Iterator[str]:
    """Yield each limit that is exceeded, as a sentence."""
    whole = readings["aiorl"]
    figures = [
        ("statements", whole.counts["statements"], MAX_STATEMENTS),
        ("nodes per line", whole.density, MAX_NODES),
        ("percent of names that say nothing", whole.vague_percent, MAX_VAGUE_PERCENT),
        (f"classes with over {MAX_ATTRIBUTES} attributes", whole.counts["wide"], MAX_WIDE),
        ("classes on a path of inheritance", whole.depth, MAX_DEPTH),
        ("exceptions for the formatter", whole.counts["unformatted"], MAX_UNFORMATTED),
    ]
    for measure, limit in MAX_PER_THOUSAND.items():
        figures.append((f"{measure} per 1,000 lines", whole.per_thousand(measure), limit))
    for room, reading in readings.items():
        if room != "aiorl" and reading.counts["lines"] >= _MIN_ROOM_LINES:
            figures.append((f"nodes per line in {room}", reading.density, MAX_NODES_IN_A_ROOM))
    for measure, value, limit in figures:
        if value > limit:
            yield f"{value:,.4g} {measure}; at most {limit:,g}"


def row(room: str, reading: Reading) -> str:
    """Return a reading as a line of text."""
    counts = reading.counts
    rates = ", ".join(
        f"{measure} {reading.per_thousand(measure):.1f}" for measure in MAX_PER_THOUSAND
    )
    return (
        f"{room}: {counts['statements']:,} statements, {reading.density:.2f} nodes/line, {rates},"
        f" vague {reading.vague_percent:.2f} %, wide {counts['wide']}, depth {reading.depth}"
    )


def main() -> int:
    """Print the readings and what exceeds a limit; return 1 if anything does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", action="store_true", help="Print each room, too.")
    parser.add_argument(
        "--worst",
        choices=[*MAX_PER_THOUSAND, "vague", "wide", "unformatted"],
        help="List the places that count for this measure.",
    )
    arguments = parser.parse_args()
    readings = read()
    for room, reading in readings.items():
        if arguments.rooms or room == "aiorl":
            print(row(room, reading))
    if arguments.worst:
        print("\n".join(readings["aiorl"].places[arguments.worst]))
    exceeded = list(excesses(readings))
    for sentence in exceeded:
        print(f"readability: {sentence}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
