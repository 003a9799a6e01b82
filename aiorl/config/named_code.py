"""What code a config names. Reading a config runs none; a run imports what it names."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path

from aiorl.config.load import CONFIG_FILE
from aiorl.config.schema import CommonConfig

__all__ = ["code_named_in", "warning_of_foreign_code"]

_NO_CODE = {"bind", "resume", "run_dir"}
_VARIABLES = ("extra_python_environs_for_driver", "extra_python_environs_for_worker")


def code_named_in(config: CommonConfig) -> dict[str, str]:
    """Dotted key -> text, of all that may be an import path: it has a colon, wherever in the config it stands.

    Some of it may be no import path, but no import path is missing.
    """
    values = {name: value for name, value in config.to_dict().items() if name not in {*_NO_CODE, *_VARIABLES}}
    return {name: text for name, text in _texts(values, "") if ":" in text}


def warning_of_foreign_code(config: CommonConfig) -> str:
    """What to tell a user whose run goes on in a directory of somebody else, before anything is imported.

    Returns: lines of printable text; "" where the directory and its config are the user's own, no run is resumed, or
        no code is named.
    """
    if config.resume is None:
        return ""
    run_dir = Path(config.resume)
    owners = set()
    for path in (run_dir, run_dir / CONFIG_FILE):
        with contextlib.suppress(OSError):
            owners.add(path.stat().st_uid)
    others = sorted(owners - {os.getuid()})
    lines = [f"  {_shown(name)}: {text!r}" for name, text in code_named_in(config).items()]
    for group in _VARIABLES:
        names = ", ".join(_shown(name) for name in getattr(config, group))
        if names:
            lines.append(f"  {group}: {names}")
    if not others or not lines:
        return ""
    whose = " and ".join(_user(uid) for uid in others)
    title = (
        f"warning: {_shown(str(run_dir))} belongs to {whose}, not to you. "
        "Its config names code and variables that take effect with your rights:"
    )
    return "\n".join([title, *lines])


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
