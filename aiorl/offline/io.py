"""InputReader and OutputWriter: the source of a worker's batches, and the destination of their
copies.

By default batches come from the worker's sampler and are not copied.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import (
    Batch,
    MultiAgentBatch,
    SampleBatch,
    concat_batches,
    rows_by_policy,
)
from aiorl.errors import ConfigError


class InputReader(ABC):
    """Source of batches, one after the other; subclass it to read your own experience.

    Attributes:
        mixes_sources: True if its batches can have different columns, because they come from
            several sources. Those that are joined keep the columns that all have.
    """

    mixes_sources = False

    @abstractmethod
    def next(self) -> Batch:
        """Return the next batch of rows ``[B, ...]``; blocks until there is one."""

    def close(self) -> None:  # noqa: B027 - most readers have nothing to release
        """Release all resources; can be called more than once."""


class OutputWriter(ABC):
    """Destination of every batch that a worker samples, before compression; subclass it to store
    batches.
    """

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Write a `batch` of rows ``[B, ...]`` without changing it, because the worker's caller has
        it as well.
        """

    def close(self) -> None:  # noqa: B027 - most writers have nothing to release
        """Release all resources; can be called more than once."""


def with_common_columns(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches with only those columns of each policy that all batches with rows of the
    policy have.

    Args:
        batches: batches of one policy or of several.
    """
    names: dict[str, set[str]] = {}
    for batch in batches:
        for policy_id, rows in rows_by_policy(batch).items():
            names[policy_id] = names.get(policy_id, set(rows)) & set(rows)
    narrowed: list[Batch] = []
    for batch in batches:
        policies = {
            policy_id: SampleBatch({name: rows[name] for name in rows if name in names[policy_id]})
            for policy_id, rows in rows_by_policy(batch).items()
        }
        if isinstance(batch, SampleBatch):
            rows = policies[DEFAULT_POLICY_ID]
            rows.env_steps = batch.env_steps
            narrowed.append(rows)
        else:
            narrowed.append(MultiAgentBatch(policies, batch.count))
    return narrowed


class SamplerInput(InputReader):
    """Batches of a sampler, each with the extra batches that were finished meanwhile."""

    def __init__(self, sampler: Any) -> None:
        """Read from a `sampler` with the methods ``get_data`` and ``get_extra_batches``."""
        self._sampler = sampler

    def next(self) -> Batch:
        """Return the sampler's next batch of rows ``[B, ...]``, with its extra batches.

        Raises:
            Exception: any error of the sampler.
        """
        return concat_batches([self._sampler.get_data(), *self._sampler.get_extra_batches()])


class NoopWriter(OutputWriter):
    """Writer that discards all batches."""

    def write(self, batch: Batch) -> None:
        """Do nothing."""


class IOContext:
    """Surroundings of a reader or writer, for its constructor.

    Attributes:
        log_dir: the run's directory; None if there is none.
        config: the policies' base config.
        worker_index: the worker's index, 0 = local.
        num_workers: number of workers that share the input, as far as the worker knows.
        worker: the RolloutWorker; None outside of one and after its end.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        config: Mapping[str, Any] | None = None,
        worker_index: int = 0,
        worker: Any = None,
    ) -> None:
        """Store the values.

        Args:
            log_dir: the run's directory; None if there is none.
            config: the policies' base config; None is an empty one.
            worker_index: the worker's index, 0 = local.
            worker: the RolloutWorker, to which only a weak reference is kept.
        """
        self.log_dir = log_dir
        self.config = dict(config or {})
        self.worker_index = worker_index
        try:
            self._worker: Callable[[], Any] = weakref.ref(worker)
        except TypeError:  # None, and objects that don't support weak references
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
            raise ConfigError(
                "sampler input needs a worker with a sampler, and this context has none.",
                key="input",
            )
        return SamplerInput(sampler)


InputCreator = Callable[[IOContext], InputReader]
OutputCreator = Callable[[IOContext], OutputWriter]


def sampler_input(context: IOContext) -> InputReader:
    """Return the default input: the worker's own sampler."""
    return context.default_sampler_input()


def noop_output(context: IOContext) -> OutputWriter:
    """Return the default output, which discards all batches."""
    return NoopWriter()
