"""`python tests/support/size.py`: code lines and files of the package and its tests, which may only fall.

A code line is a line with code on it: blank lines, comments and docstrings do not count. "page" is the live page's own
JavaScript and CSS. The limits below are the counts at the time they were last lowered; lower them along with what a
change takes away.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = {
    "aiorl": (36_000, 250),
    "many hosts": (2_680, 21),
    "serving": (2_500, 22),
    "page": (1_200, 3),
    "tests": (42_000, 317),
    "tests of many hosts": (1_700, 16),
    "tests of serving": (1_720, 7),
}
"""Folder or group -> the most code lines and files that it may have."""
_GROUPS = {
    "many hosts": (
        "aiorl/launch/", "aiorl/doctor.py", "aiorl/status.py", "aiorl/net/transport/relay", "aiorl/config/addresses.py",
        "aiorl/process/kept_logs.py", "aiorl/process/versions.py", "aiorl/process/shipped.py", "aiorl/run/overview.py",
        "aiorl/acting/run_lock.py",
    ),
    "tests of many hosts": ("tests/launch/",),
    "serving": ("aiorl/web/", "aiorl/serving/", "aiorl/serve.py", "aiorl/client.py", "aiorl/watch/",
                "aiorl/run/worker/local.py"),
    "tests of serving": ("tests/serving/",),
}  # fmt: skip
"""Group -> its files and folders, which are not counted in the folder that they are in."""
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str, suffix: str = ".py") -> int:
    """Return the number of lines with code in Python, JavaScript or CSS."""
    if suffix != ".py":
        return len(re.findall(r"(?m)^\s*(?!//)[^\s].*$", re.sub(r"(?s)/\*.*?\*/", "", source)))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _group(path: Path) -> str:
    """Return the group that a file is counted in, or the folder at the top of the tree that it is in."""
    relative = path.relative_to(ROOT).as_posix()
    return next((name for name, paths in _GROUPS.items() if relative.startswith(paths)), relative.split("/")[0])


def main() -> int:
    """Print the counts; the exit status is 1 if one is above its limit."""
    status = 0
    for name, limits in LIMITS.items():
        files = [path for path in sorted(ROOT.glob("*/**/*.py")) if _group(path) == name]
        if name == "page":  # without the library inside it
            files = [*ROOT.glob("aiorl/watch/page/*.js"), *ROOT.glob("aiorl/watch/page/*.css")]
        counts = sum(code_lines(path.read_text("utf-8"), path.suffix) for path in files), len(files)
        print(f"{name}: {counts[0]:,} code lines in {counts[1]:,} files (limits {limits[0]:,} and {limits[1]:,})")
        if counts[0] > limits[0] or counts[1] > limits[1]:
            print(f"{name} has grown beyond its limit: take something away, or say in the commit why it has to grow")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
