"""What may be set, and how it is put together: defaults < algorithm < YAML file < command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

build_trainer: Callable[[Any], Any]
"""Returns a trainer for a config. The top of the package sets it, since trainers stand on configs."""
