"""Packages that only some need: whether they are there, and how to install them."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from aiorl.errors import ConfigError

__all__ = ["install_command", "missing", "needed_by", "want_packages"]


def install_command(extra: str) -> str:
    """Return what to type to install an extra: into the clone that runs, or beside the aiorl that is installed."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install 'aiorl[{extra}]'"  # pip keeps the aiorl that is installed, and reads its extras


def missing(modules: Iterable[str]) -> list[str]:
    """Those of some top-level modules that are not installed; none is imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def want_packages(by: str, modules: Iterable[str], extra: str, *, key: str, value: object = None) -> None:
    """Refuse what needs packages that are not installed; none is imported.

    Args:
        by: who needs them, as the message begins.
        modules: their top-level modules.
        extra: aiorl's extra that brings them.
        key: setting that asks for them.
        value: its value.

    Raises:
        ConfigError: some are missing.
    """
    if absent := missing(modules):
        raise ConfigError(
            f"{by} needs {', '.join(absent)}, not installed here.",
            key=key,
            value=value,
            hint=f"Install it with: {install_command(extra)}",
        )


@contextlib.contextmanager
def needed_by(by: str, what: str, extra: str, *, key: str, value: object = None) -> Iterator[None]:
    """Import in here what only some need.

    Args:
        by: who needs it, as the message begins.
        what: what the message calls the packages.
        extra: aiorl's extra that brings them.
        key: setting that asks for them.
        value: its value.

    Raises:
        ConfigError: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{by} needs {what}: {error}.",
            key=key,
            value=value,
            hint=f"Install it with: {install_command(extra)}",
        ) from error
