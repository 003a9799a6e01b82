"""Settings, and how they are put together: defaults < preset < YAML file < command line.

The two functions below come from rooms above this one. The top of the package sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

build_trainer: Callable[[Any], Any]
"""Returns a trainer for a config."""

translate_old_keys: Callable[[Mapping[str, Any]], dict[str, Any]]
"""Returns settings with old keys renamed or dropped, or raises ConfigError; see `aiorl.compat.old_keys`."""
