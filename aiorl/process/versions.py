"""Versions of Python, aiorl and the packages that it needs, which should be the same on all hosts
of a run.
"""

from __future__ import annotations

import contextlib
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
    installed = {"python": platform.python_version(), **dict.fromkeys(("aiorl", *NEEDED), "")}
    for name in ("aiorl", *NEEDED):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
