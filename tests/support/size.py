"""`python tests/support/size.py`: code lines and files of the package and its tests, which may only fall.

A code line is a line with code on it: blank lines, comments and docstrings do not count. The limits below are the
counts at the time they were last lowered; lower them along with what a change takes away.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = {"aiorl": (35_984, 244), "tests": (41_998, 317)}
"""Folder -> the most code lines and files that it may have."""
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Return the number of lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> int:
    """Print the counts; the exit status is 1 if one is above its limit."""
    status = 0
    for folder, limits in LIMITS.items():
        files = sorted((ROOT / folder).rglob("*.py"))
        counts = sum(code_lines(path.read_text(encoding="utf-8")) for path in files), len(files)
        print(f"{folder}: {counts[0]:,} code lines in {counts[1]:,} files (limits {limits[0]:,} and {limits[1]:,})")
        if counts[0] > limits[0] or counts[1] > limits[1]:
            print(f"{folder} has grown beyond its limit: take something away, or say in the commit why it has to grow")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
