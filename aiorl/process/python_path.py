"""Where Python processes started from here look for modules."""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig

__all__ = ["child_python", "find_modules_here", "python_path"]

_found_last: set[str] = set()


def find_modules_here() -> None:
    """Let modules in the current directory be found after all others, so that none hides a module of Python's own."""
    with contextlib.suppress(OSError):  # the directory is gone
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
            _found_last.add(here)


def child_python(module: str) -> list[str]:
    """Return the command of a child that runs a module of aiorl, which finds modules by `python_path` and as here."""
    return [sys.executable, "-P", "-m", module]


def python_path() -> dict[str, str]:
    """The environment variable by which another Python finds the modules that this one does; none if it does anyway.

    Such as those beside the script that is run, which are on no other process's path. Python's own folders and those of
    installed packages are left out: what a process starts in its turn may be a Python of another version.
    """
    standard = sysconfig.get_path("stdlib")
    installed = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    known = {*map(os.path.realpath, (*installed, os.path.join(standard, "lib-dynload")))}
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    own = [
        place
        for place in sys.path
        if place and os.path.realpath(place) not in known and os.path.basename(place) != archive
        if place not in _found_last or place != os.getcwd()  # a child finds it by itself, last as well
    ]
    said = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # also what was added to it since this Python began
    places = dict.fromkeys([*own, *filter(None, said)])
    return {"PYTHONPATH": os.pathsep.join(places)} if places else {}
