"""Parts of runs with gradients computed by workers, named by import path."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

import gymnasium


class NoTensorFlow(MetaPathFinder):
    """Import finder that hides TensorFlow; it goes first in `sys.meta_path`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name=fullname)


def without_tensorflow(config: Any) -> gymnasium.Env[Any, Any]:
    """Make a CartPole; its worker process then can't import TensorFlow, as if it were not installed."""
    if config.worker_index:
        sys.meta_path.insert(0, NoTensorFlow())
    return gymnasium.make("CartPole-v1")
