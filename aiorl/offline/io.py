"""InputReader and OutputWriter: where a worker's batches come from and where copies of them go.

By default they come from the worker's sampler and go nowhere else.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.data.arrays import Batch, concat_batches
from aiorl.errors import ConfigError


class InputReader(ABC):
    """Gives batches, one after the other; subclass it to read experience of your own."""

    @abstractmethod
    def next(self) -> Batch:
        """Return the next batch; blocks until there is one."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything; may be called more than once."""


class OutputWriter(ABC):
    """Takes every batch that a worker samples, before it is compressed; subclass it to keep them."""

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Take a batch; it belongs to the worker's caller as well and must not be changed."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything; may be called more than once."""


class SamplerInput(InputReader):
    """Batches of a sampler, each with the extra batches that came about meanwhile."""

    def __init__(self, sampler: Any) -> None:
        """Read from a sampler: what its ``get_data`` and ``get_extra_batches`` return."""
        self._sampler = sampler

    def next(self) -> Batch:
        """See InputReader.

        Raises:
            Exception: whatever the sampler raises.
        """
        return concat_batches([self._sampler.get_data(), *self._sampler.get_extra_batches()])


class NoopWriter(OutputWriter):
    """Keeps nothing."""

    def write(self, batch: Batch) -> None:
        """Do nothing."""


class IOContext:
    """The place of a reader or writer, as it may want to know when it is made.

    Attributes:
        log_dir: the run's directory, None if there is none.
        config: the policies' base config.
        worker_index: the worker's index, 0 = local.
        num_workers: how many workers share the input, as far as the worker knows.
        worker: the RolloutWorker, None outside of one and when it is gone.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        config: Mapping[str, Any] | None = None,
        worker_index: int = 0,
        worker: Any = None,
    ) -> None:
        """Note the place; whoever keeps it does not keep the worker alive."""
        self.log_dir = log_dir
        self.config = dict(config or {})
        self.worker_index = worker_index
        try:
            self._worker: Callable[[], Any] = weakref.ref(worker)
        except TypeError:  # None, and objects of other kinds that know no weak references
            self._worker = lambda: worker

    @property
    def worker(self) -> Any:  # noqa: D102 (the class describes it)
        return self._worker()

    @property
    def num_workers(self) -> int:  # noqa: D102 (the class describes it)
        return int(getattr(self.worker, "num_workers", 0))

    def default_sampler_input(self) -> InputReader:
        """Return a reader of the worker's own sampler.

        Raises:
            ConfigError: there is no worker with a sampler.
        """
        sampler = getattr(self.worker, "sampler", None)
        if sampler is None:
            raise ConfigError("sampler input needs a worker with a sampler, and this context has none.", key="input")
        return SamplerInput(sampler)


InputCreator = Callable[[IOContext], InputReader]
OutputCreator = Callable[[IOContext], OutputWriter]


def sampler_input(context: IOContext) -> InputReader:
    """Return the default input: the worker's own sampler."""
    return context.default_sampler_input()


def noop_output(context: IOContext) -> OutputWriter:
    """Return the default output: none."""
    return NoopWriter()
