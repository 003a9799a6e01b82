"""Import paths in settings: ``package.module:Name``."""

from __future__ import annotations

import importlib
import re
from typing import Any

from aiorl.errors import ConfigError, nearest

__all__ = ["import_object", "import_path_of", "is_import_path"]

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_SCHEMES = ("minari",)


def is_import_path(text: str) -> bool:
    """Whether a text has the form ``package.module:Name``, and no prefix that means something else."""
    return _FORM.fullmatch(text) is not None and text.partition(":")[0] not in _SCHEMES


def import_path_of(thing: object) -> str | None:
    """The import path of a class or function; None where only this process knows it, as with one of a notebook's."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None)
    if module is None or name is None or module == "__main__" or "<" in name:
        return None
    return f"{module}:{name}"


def import_object(path: str, *, key: str) -> Any:
    """What an import path names.

    Args:
        path: ``package.module:Name``; the name may have dots.
        key: dotted name of the setting, for errors.

    Raises: ConfigError if the path has no such form, the module can't be imported, or it has no such name.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key} is {path!r}, expected 'package.module:Name'.", key=key, value=path)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        # whatever a user's module raises when it is run: the setting can't be honoured
        raise ConfigError(
            f"{key} is {path!r}, but importing {module_name!r} failed: {error!r:.500}.",
            key=key,
            value=path,
            hint="Is it installed, or its folder on PYTHONPATH?",
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            hint = nearest(part, [known for known in vars(found) if not known.startswith("_")]).strip()
            raise ConfigError(
                f"{key} is {path!r}, but {module_name!r} has no {name!r}.", key=key, value=path, hint=hint
            )
        found = getattr(found, part)
    return found
