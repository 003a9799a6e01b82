"""`tf`: TensorFlow, loaded at its first use.

So an algorithm's keys, its class and its loss can stand in one module, which the command line reads in milliseconds and
without TensorFlow.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Tensors", "tf"]

if TYPE_CHECKING:
    import tensorflow as tf

Tensors = dict[str, "tf.Tensor"]
"""Name -> tensor."""


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, found)  # the next one finds it at once
        return found


if not TYPE_CHECKING:
    tf = _Lazy("tensorflow")
