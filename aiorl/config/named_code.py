"""What code a config names. Reading a config runs none; a run imports what it names."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["code_named_in", "foreign_code"]

_NO_CODE = {"bind", "init_from", "resume", "run_dir"}
_VARIABLES = ("extra_python_environs_for_driver", "extra_python_environs_for_worker")


def code_named_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> text, of all that may be an import path: it has a colon, wherever in the config it stands.

    Some of it may be no import path, but no import path is missing.
    """
    values = {name: value for name, value in config.items() if name not in {*_NO_CODE, *_VARIABLES}}
    return {name: text for name, text in _texts(values, "") if ":" in text}


def foreign_code(paths: Sequence[Path], *configs: Mapping[str, Any]) -> str:
    """What to tell a user of a config that somebody else wrote, before anything that it names is imported.

    Args:
        paths: where it was found.
        configs: what it holds, checked or not; a text that stands in several of them is shown once.
    Returns: lines of printable text; "" where all of them are the user's own, or no code is named.
    """
    others: dict[int, Path] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            others.setdefault(path.stat().st_uid, path)
    others.pop(os.getuid(), None)
    if not others:
        return ""
    lines: dict[str, str] = {}
    for values in configs:
        for name, text in code_named_in(values).items():
            lines.setdefault(text, f"  {_shown(name)}: {text!r}")
        for group in _VARIABLES:
            variables = values.get(group)
            if variables and isinstance(variables, Mapping):  # what is none is refused later
                line = f"  {group}: {', '.join(_shown(str(name)) for name in variables)}"
                lines.setdefault(line, line)
    if not lines:
        return ""
    whose = " and ".join(f"{_shown(str(path))} belongs to {_user(uid)}" for uid, path in others.items())
    title = f"warning: {whose}, not to you. Its config names code and variables that take effect with your rights:"
    return "\n".join([title, *lines.values()])


def _texts(value: object, dotted: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield dotted, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{dotted}.{name}" if dotted else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{dotted}[{number}]")


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"the user with id {uid}"
