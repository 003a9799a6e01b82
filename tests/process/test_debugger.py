"""Whoever talks to a debugger has the terminal for himself."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from aiorl.process.debugger import is_looked_into, on_debugger
{before}
on_debugger(lambda: print("make way"))
print("begun")
{after}
print(is_looked_into())
"""


def said(before: str = "", after: str = "") -> list[str]:
    code = CODE.format(before=before, after=after)
    options = {"input": "p 6 * 7\nc\nc\n", "capture_output": True, "text": True, "timeout": 30, "check": True}
    return subprocess.run([sys.executable, "-c", code], **options).stdout.splitlines()  # type: ignore[call-overload]


def test_way_is_made_once_before_a_debugger_asks() -> None:
    lines = said(after="breakpoint()\nbreakpoint()")
    assert lines[:2] == ["begun", "make way"]
    assert lines.count("make way") == 1
    assert "(Pdb) 42" in lines


@pytest.mark.parametrize(("how", "line"), [("settrace", 0), ("setprofile", 0)])
def test_who_looks_in_already_is_seen(how: str, line: int) -> None:
    lines = said(before=f"sys.{how}(lambda *arguments: None)")
    assert lines[line] == "make way"
    assert lines[-1] == "True"


def test_where_nobody_looks_in_nothing_is_done() -> None:
    assert said() == ["begun", "False"]
