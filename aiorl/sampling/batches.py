"""BatchReader: a worker's batches, from its input to its output."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from aiorl.data.sample_batch import (
    Batch,
    MultiAgentBatch,
    SampleBatch,
    columns_of,
    compressed,
    concat_batches,
)
from aiorl.errors import ConfigError, EndOfData
from aiorl.offline.estimators import ESTIMATORS, OffPolicyEstimator, episode_parts
from aiorl.offline.io import InputReader, IOContext, OutputWriter, SamplerInput, with_common_columns
from aiorl.process.log_once import report
from aiorl.sampling.async_sampler import AsyncSampler
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import SIMULATION, WorkerSettings


class BatchReader:
    """Batches of a worker: read from its input, shown to the callback, written to its output and
    used for estimates.

    Attributes:
        rollout_fragment_length: T, the minimum of environment steps in a batch: the setting times
            ``num_envs``.
        io_context: argument that reader and writer were made with.
        input_reader: source of the batches.
        output_writer: writer of copies of them.
        reward_estimators: off-policy estimators.
        callbacks: the hooks.
        last_batch: batch that ``fake_sampler`` returns repeatedly, None before the first batch.
    """

    def __init__(
        self, settings: WorkerSettings, context: IOContext, callbacks: DefaultCallbacks
    ) -> None:
        """Prepare, without a policy; `make_estimators` and `open` make the parts.

        Args:
            settings: the worker's settings.
            context: argument to make reader and writer with.
            callbacks: the hooks.
        """
        self._config = settings.config
        self._io = settings.io
        self.rollout_fragment_length = (
            self._config.rollout_fragment_length * self._config.num_envs_per_worker
        )
        self.io_context = context
        self.callbacks = callbacks
        self.last_batch: Batch | None = None
        self._batches: list[Batch] = []  # read, but not returned yet
        self.reward_estimators: list[OffPolicyEstimator] = []

    def make_estimators(self) -> None:
        """Make the estimators, which ask the worker of the context for its policies."""
        self.reward_estimators = [
            ESTIMATORS[name].create(self.io_context)
            for name in sorted(self._io.input_evaluation)
            if name in ESTIMATORS
        ]

    def open(self, sampler: SyncSampler | AsyncSampler) -> None:
        """Make the reader and the writer.

        Args:
            sampler: the worker's sampler, which is paused for estimates.

        Raises:
            AssertionError: the reader or the writer is of another class.
            ConfigError: the input is the sampler's batches, which input evaluation drops.
        """
        self._sampler = sampler
        self.input_reader: InputReader = _checked(
            "input_creator", self._io.input_creator(self.io_context), InputReader
        )
        if self._io.wants_simulation and isinstance(self.input_reader, SamplerInput):
            raise ConfigError(
                f"input_evaluation {SIMULATION!r} drops the sampler's batches, which are the input"
                " here.",
                key="input_evaluation",
                value=SIMULATION,
                hint="Use it with stored input only.",
            )
        self.output_writer: OutputWriter = _checked(
            "output_creator", self._io.output_creator(self.io_context), OutputWriter
        )

    def read(self) -> Batch:
        """Return the next batch; the first one again and again for ``fake_sampler``.

        Raises:
            ConfigError: the reader returned an object that is not a batch.
            Exception: the reader, the callback, the writer or an estimator raised it. Batches that
                were read before are kept for the next call.
        """
        if self._config.fake_sampler and self.last_batch is not None:
            return self.last_batch
        report("sample_start", self.rollout_fragment_length)
        batch = self._read_enough()
        report("sample_end", columns_of(batch))
        self.output_writer.write(batch)
        if self.reward_estimators:
            # Two threads must not evaluate a policy at the same time, and estimators evaluate
            # policies.
            with self._sampler.paused():
                for part in episode_parts(batch):
                    for estimator in self.reward_estimators:
                        estimator.process(part)
        how = self._config.compress_observations
        if how:
            batch = compressed(batch, is_bulk=how == "bulk")
        if self._config.fake_sampler:
            self.last_batch = batch
        return batch

    def _read_enough(self) -> Batch:
        """Read a batch and pass it to the callback; keep the parts for the next call if that
        raises.
        """
        limit = math.inf
        if self._config.is_truncating:
            limit = self._config.num_envs_per_worker
        while not self._batches or (
            len(self._batches) < limit
            and sum(batch.env_steps for batch in self._batches) < self.rollout_fragment_length
        ):
            try:
                batch: object = self.input_reader.next()
            except EndOfData:  # the batches read so far are the end of the stored experience
                if not self._batches:
                    raise
                break
            if not isinstance(batch, SampleBatch | MultiAgentBatch):
                raise ConfigError(
                    f"the input reader {type(self.input_reader).__name__} returned a"
                    f" {type(batch).__name__}, expected a SampleBatch or a MultiAgentBatch.",
                    key="input",
                    value=batch,
                )
            self._batches.append(batch)
        batches = self._batches
        self._batches = []
        try:
            if self.input_reader.mixes_sources and len(batches) > 1:
                whole = concat_batches(with_common_columns(batches))
            else:
                whole = concat_batches(batches)
            self.callbacks.on_sample_end(worker=self.io_context.worker, samples=whole)
        except BaseException:
            self._batches = batches + self._batches
            raise
        return whole

    def close(self) -> None:
        """Close the reader, then the writer, if they are made, even if the reader raises."""
        with contextlib.ExitStack() as last_first:
            for name in ("output_writer", "input_reader"):
                if hasattr(self, name):
                    last_first.callback(getattr(self, name).close)


def _checked(name: str, stream: Any, kind: type) -> Any:
    """Return the object that the setting ``name`` made, or raise an AssertionError if it is of
    another class.
    """
    if not isinstance(stream, kind):
        raise AssertionError(f"{name} made a {type(stream).__name__}, expected an {kind.__name__}")
    return stream
