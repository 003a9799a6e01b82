"""Values of environment variables that look like secrets: left out of what is printed or saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiorl.errors import ConfigError

__all__ = ["WITHHELD", "restore_withheld", "without_secrets"]

WITHHELD = "<withheld>"
"""Stands in printed and saved configs for a value that looks like a secret."""

_SECRET = re.compile(r"token|secret|passw|credential|api_?key|access_?key|private", re.IGNORECASE)
_ENVIRONS = ("extra_python_environs_for_driver", "extra_python_environs_for_worker")


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values as they may be saved: environment variables that look like secrets are withheld."""
    shown = {
        group: {name: WITHHELD if _SECRET.search(name) else text for name, text in values[group].items()}
        for group in _ENVIRONS
        if group in values
    }
    return {**values, **shown}


def restore_withheld(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Take what was withheld from the variables of this process.

    Raises: ConfigError naming a variable that is not set here.
    """
    for group in _ENVIRONS:
        variables = values.get(group)
        if not isinstance(variables, dict):
            continue
        for name, text in variables.items():
            if text != WITHHELD:
                continue
            if name not in environ:
                raise ConfigError(
                    f"{group}.{name} was withheld when this config was saved, and {name} is not set here.",
                    key=f"{group}.{name}",
                    hint=f"Set the environment variable {name}.",
                )
            variables[name] = environ[name]
