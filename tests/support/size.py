"""`python tests/support/size.py`: statements, code lines and files of the package, its tests and
benchmarks.

A code line is a line with code on it: blank lines, comments and docstrings do not count. The counts
are printed and limit nothing: a change may be as long as what it does.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """The counts of one or several files."""

    statements: int = 0
    lines: int = 0
    files: int = 0

    def plus(self, other: Size) -> Size:
        """Return the sum of both."""
        return Size(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __str__(self) -> str:
        statements = f"{self.statements:,} statements, " if self.statements else ""
        return f"{statements}{self.lines:,} code lines in {self.files:,} files"


def is_docstring(node: ast.AST) -> bool:
    """Return True if a statement is nothing but a text."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def python_size(source: str) -> Size:
    """Return the counts of one file of Python."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    statements = 0
    for node in ast.walk(ast.parse(source)):
        if is_docstring(node):
            lines -= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.stmt):
            statements += 1
    return Size(statements, len(lines), 1)


def page_size(source: str) -> Size:
    """Return the counts of one file of JavaScript or CSS."""
    without_comments = re.sub(r"(?s)/\*.*?\*/", "", source)
    return Size(lines=len(re.findall(r"(?m)^\s*(?!//)[^\s].*$", without_comments)), files=1)


def sizes() -> dict[str, Size]:
    """Return folder -> its counts: the whole of `aiorl`, each room in it, its live page, the tests,
    the benchmarks.
    """
    counts: defaultdict[str, Size] = defaultdict(Size)
    for path in sorted(ROOT.glob("aiorl/**/*.py")):
        size = python_size(path.read_text("utf-8"))
        parts = path.relative_to(ROOT).parts
        counts["aiorl"] = counts["aiorl"].plus(size)
        room = "/".join(parts[:2]) if len(parts) > 2 else "aiorl/*.py"
        counts[room] = counts[room].plus(size)
    for path in [*ROOT.glob("aiorl/watch/page/*.js"), *ROOT.glob("aiorl/watch/page/*.css")]:
        counts["page"] = counts["page"].plus(page_size(path.read_text("utf-8")))
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted(ROOT.glob(f"{folder}/**/*.py")):
            counts[folder] = counts[folder].plus(python_size(path.read_text("utf-8")))
    return dict(counts)


if __name__ == "__main__":
    for name, size in sizes().items():
        print(f"{name}: {size}")
