"""What runs whose workers compute gradients are made of, named by import path."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium

__all__ = ["without_tensorflow"]


def without_tensorflow(config: Any) -> gymnasium.Env[Any, Any]:
    """CartPole; a worker process that makes it can't import TensorFlow, as if it were not installed."""
    if config.worker_index:
        sys.modules["tensorflow"] = None  # type: ignore[assignment]  # how the import system is told so
    return gymnasium.make("CartPole-v1")
