"""Versions of Python, aiorl and the packages that it needs, which should be the same on all hosts
of a run.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform

NEEDED = (
    "gymnasium",
    "lz4",
    "msgpack",
    "numpy",
    "onnxruntime",
    "orjson",
    "psutil",
    "pydantic",
    "pyzmq",
)
"""Packages of the base install that workers and learner load."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions by name, "" for a package that is not installed; aiorl may run from its
    sources.
    """
    installed = {name: installed_version(name) for name in ("aiorl", *NEEDED)}
    return {"python": platform.python_version(), **installed}


def installed_version(package: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
