"""Whether somebody looks into this process: a debugger, a profiler."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["is_looked_into", "on_debugger"]

_EVENTS = ("builtins.breakpoint", "sys.settrace")
_NUM_TOOLS = 6  # of sys.monitoring


def is_looked_into() -> bool:
    """Whether a debugger or a profiler is at work."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(_NUM_TOOLS)]
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


def on_debugger(make_way: Callable[[], None]) -> None:
    """Call ``make_way`` once before a debugger asks its user something; at once if one is at work already.

    By an audit hook, which stays for the life of the process: for programs, not for libraries.
    """
    if is_looked_into():
        make_way()
        return
    has_come = False

    def look(event: str, arguments: object) -> None:
        nonlocal has_come
        if event in _EVENTS and not has_come:
            has_come = True
            make_way()

    sys.addaudithook(look)
