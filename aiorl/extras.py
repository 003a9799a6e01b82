"""Packages that only some need: whether they are there, and how to install them."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable
from pathlib import Path

__all__ = ["install_command", "missing"]


def install_command(extra: str) -> str:
    """What to type to install an extra of aiorl, which comes from a clone of its repository."""
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install '.[{extra}]' in a clone of aiorl"


def missing(modules: Iterable[str]) -> list[str]:
    """Those of some top-level modules that are not installed; none is imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]
