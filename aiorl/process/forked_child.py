"""Forked children of a process that samples or trains: they end when they exit or fail, as a child of any program does.

Only the forking thread lives on in a child. Exit handlers of C++ libraries wait there for the others: with ONNX
Runtime's, a child that calls ``sys.exit`` never ends. So C's exit ends a child at once, after Python's handlers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["keep_children_out", "let_children_end"]

T = TypeVar("T")


@functools.cache
def let_children_end() -> None:
    """Have children that this process forks from now on end without exit handlers of C++ libraries; once is enough."""
    os.register_at_fork(after_in_child=_skip_exit_handlers)


def keep_children_out(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; a child that it forks, and that raises in it, ends there instead of coming back."""
    let_children_end()
    process = os.getpid()
    try:
        return function(*arguments)
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        raise


def _end(error: BaseException) -> NoReturn:
    """End this process as an uncaught exception ends a program.

    Nothing is flushed, since another thread of the parent may have held a stream's lock.
    """
    status, said = 1, ""
    if not isinstance(error, SystemExit):
        said = "".join(traceback.format_exception(error))
    elif isinstance(error.code, int | None):
        status = (error.code or 0) & 0xFF
    else:
        said = f"{error.code}\n"
    try:
        os.write(2, said.encode(errors="replace"))
    finally:
        os._exit(status)


def _skip_exit_handlers() -> None:
    program = ctypes.CDLL(None)
    if hasattr(program, "on_exit"):  # glibc: calls the last one registered first, with the exit status
        program.on_exit(program._exit, None)
