"""What a run calls of its user's functions: checked before it starts, and named where they fail."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from aiorl.errors import AiorlError, ConfigError

__all__ = ["check_takes", "named_failures"]

logger = logging.getLogger(__name__)


def check_takes(function: Callable[..., Any], what: str, key: str, /, *args: Any, **kwargs: Any) -> None:
    """Nothing, where the function can be called with such arguments; it is not called.

    Args:
        function: what will be called.
        what: its name in messages.
        key: the setting that names it.
        *args: positional arguments, of which only the number counts.
        **kwargs: keyword arguments, of which only the names count.

    Raises:
        ConfigError: it cannot.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions don't tell theirs
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [f"{len(args)} positional"] * bool(args) + list(kwargs)
        raise ConfigError(
            f"{what} can't be called as it is here, with {', '.join(given)}: {error}.",
            key=key,
            hint=f"Its signature is {signature}.",
        ) from error


def named_failures(function: Callable[..., Any], what: str, key: str, *, hint: str = "") -> Callable[..., Any]:
    """Return a user's function or class, whose errors become a ConfigError; the traceback is logged.

    Errors of aiorl, for example those of an environment that the function called, stay as they are.

    Args:
        function: the user's.
        what: its name in messages.
        key: the setting that names it.
        hint: what to do.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AiorlError:
            raise
        except Exception as error:
            # whatever a user's function raises
            logger.exception("%s failed", what)
            raise ConfigError(f"{what} failed: {error!r:.500}", key=key, hint=hint) from error

    return call
