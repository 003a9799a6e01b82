"""EvaluatorInterface: what learning code needs of whoever holds environments and policies."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiorl.data.concat import Batch

__all__ = ["EvaluatorInterface"]

P = ParamSpec("P")
R = TypeVar("R")


class EvaluatorInterface(ABC):
    """Samples, and computes and applies gradients."""

    @abstractmethod
    def sample(self) -> Batch:
        """A batch of experience, played with the weights in force."""

    @abstractmethod
    def learn_on_batch(self, samples: Batch) -> dict[str, Any]:
        """Update the policies on a batch; returns figures about it."""

    @abstractmethod
    def compute_gradients(self, samples: Batch) -> tuple[Any, dict[str, Any]]:
        """Gradients on a batch, and figures about them with ``batch_count``."""

    @abstractmethod
    def apply_gradients(self, gradients: Any) -> dict[str, Any]:
        """Update the policies with what ``compute_gradients`` gave; returns figures about it."""

    @abstractmethod
    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Weights by policy id."""

    @abstractmethod
    def set_weights(self, weights: Mapping[str, Any], global_vars: Mapping[str, Any] | None = None) -> None:
        """Take up weights by policy id."""

    def get_host(self) -> str:
        """Name of the host it runs on."""
        return socket.gethostname()

    def apply(self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function gives, called with this object and the arguments."""
        return function(self, *args, **kwargs)
