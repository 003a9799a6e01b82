"""Lazy `tf`: TensorFlow, loaded at first use.

With it, one module can hold an algorithm's keys, class and loss, and the command line still imports
that module in milliseconds, without TensorFlow.
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
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)  # so the next access needs no lookup
        return value


if not TYPE_CHECKING:
    tf = _Lazy("tensorflow")
