"""Options of a remote class, and their effects in the process of its object."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.actors.values import num_bytes, pack
from aiorl.errors import ConfigError
from aiorl.process.early import ONE_THREAD
from aiorl.process.machine import check_heap

_THREADS = (*ONE_THREAD, "TF_NUM_INTRAOP_THREADS")
"""Environment variables with the number of threads of a library."""

_LIMITS = ("num_cpus", "num_gpus", "memory", "object_store_memory")
"""Options of the process itself."""


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Limits of an actor's process, and what happens if it ends.

    Attributes:
        num_cpus: threads that libraries use, rounded up; None leaves them as they are.
        num_gpus: 0 hides the GPUs from the process; None leaves them as they are.
        memory: heap quota in bytes, which is checked after each call; None is no quota.
        object_store_memory: largest result in bytes; None is no limit.
        resources: always empty or None, since aiorl does not schedule machines.
        max_restarts: how often the actor is started again, with the same arguments, after it was
            lost.
        on: "here", "joined" or None, as for `Actors.start`.
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: float | None = None
    object_store_memory: float | None = None
    resources: Mapping[str, float] | None = None
    max_restarts: int = 0
    on: str | None = None

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ConfigError: a limit is impossible, or there are GPUs or custom resources.
        """
        restarts = self.max_restarts
        if not isinstance(restarts, int) or restarts < 0:
            text = f"max_restarts is {restarts!r}, expected a whole number of at least 0."
            raise ConfigError(text, key="max_restarts", value=restarts)
        for name in _LIMITS:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if value is not None and not (is_number and value >= 0):
                text = f"{name} is {value!r}, expected a number of at least 0."
                raise ConfigError(text, key=name, value=value)
        if self.num_gpus:
            raise ConfigError(
                f"num_gpus is {self.num_gpus!r}, but aiorl assigns no GPUs to actors.",
                key="num_gpus",
                hint="Leave it out, and set CUDA_VISIBLE_DEVICES where the processes are started.",
            )
        if self.resources:
            raise ConfigError(
                f"resources is {dict(self.resources)!r}, but aiorl schedules no machines.",
                key="resources",
                hint="Start workers on hosts with these resources.",
            )

    def changed(self, options: Mapping[str, Any]) -> ActorOptions:
        """Return a copy with other options.

        Args:
            options: attribute -> value.

        Raises:
            ConfigError: there is no such option, or its value is impossible.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name, value in options.items():
            if name not in names:
                text = f"an actor has no option {name!r}, expected one of: {', '.join(names)}."
                raise ConfigError(text, key=name, value=value)
        return dataclasses.replace(self, **options)

    def limits(self) -> dict[str, float]:
        """Return the limits of the process that are set."""
        return {name: getattr(self, name) for name in _LIMITS if getattr(self, name) is not None}


class LimitedObject:
    """Object of an actor in a process with limits; it has the methods of the object.

    Limits of memory raise an error in the call that has exceeded them.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        limits: Mapping[str, float],
        args: list[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Limit this process, and make the object.

        Args:
            make: the object's class.
            limits: result of `ActorOptions.limits`.
            args: positional arguments of the class.
            kwargs: keyword arguments of the class.

        Raises:
            MemoryQuotaError: the process has taken more memory than its quota.
            Exception: the class raised it.
        """
        if "num_cpus" in limits:
            # TensorFlow reads them before its first computation, others when they are loaded
            threads = max(1, math.ceil(limits["num_cpus"]))
            os.environ.update(dict.fromkeys(_THREADS, str(threads)))
            # one inter-op thread can hang on nested functions (tensorflow#38969)
            os.environ["TF_NUM_INTEROP_THREADS"] = str(max(2, threads))
        if "num_gpus" in limits:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._max_heap = int(limits.get("memory", 0))
        self._max_result = limits.get("object_store_memory", math.inf)
        self._object = make(*args, **kwargs)
        self._check(None)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the object; methods check the limits of memory."""
        attribute = getattr(self._object, name)
        is_limited = self._max_heap or self._max_result < math.inf
        is_stream = inspect.isgeneratorfunction(attribute) or inspect.isasyncgenfunction(attribute)
        if not is_limited or is_stream or not callable(attribute):
            return attribute
        if inspect.iscoroutinefunction(attribute):

            @functools.wraps(attribute)
            async def call_on_loop(*args: Any, **kwargs: Any) -> Any:
                return self._check(await attribute(*args, **kwargs))

            return call_on_loop

        @functools.wraps(attribute)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._check(attribute(*args, **kwargs))

        return call

    def _check(self, result: Any) -> Any:
        """Return a result if the limits of memory hold.

        Raises:
            MemoryQuotaError: the process has taken more memory than its quota.
            ConfigError: the result is too large.
        """
        check_heap(self._max_heap, "memory")
        if self._max_result < math.inf:
            size = num_bytes(pack(result))
            if size > self._max_result:
                raise ConfigError(
                    f"object_store_memory is {self._max_result:,.0f} bytes, but a result has"
                    f" {size:,}.",
                    key="object_store_memory",
                    value=self._max_result,
                )
        return result
