"""Whole episodes out of batches as they were sampled, in which episodes may be cut into parts and interleaved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from aiorl.data import columns as c
from aiorl.data.concat import Batch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError

__all__ = ["EpisodeAssembler", "trajectories"]


class EpisodeAssembler:
    """Joins the parts of episodes that come in the order of time, of one worker or file.

    An episode begins with the row whose ``t`` is 0 and ends with one that is done. Without ``t`` it begins where
    another one ends or its ``eps_id`` is new; without flags of its end, each part is whole.

    Attributes:
        num_left_out: rows of episodes whose beginning or end never came.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._open: dict[int, list[SampleBatch]] = {}
        self.num_left_out = 0

    def add(self, batch: Batch) -> Iterator[SampleBatch]:
        """Take a batch, and yield the episodes that end in it.

        Raises:
            BatchError: a multi-agent batch, or parts of one episode with different columns (a ValueError).
        """
        if not isinstance(batch, SampleBatch):
            raise BatchError("policy_batches", "a single-agent batch", "a MultiAgentBatch")
        for part in trajectories(batch) if batch.count else ():
            yield from self._add_part(part)

    def finish(self) -> None:
        """No more will come: episodes that have not ended are left out."""
        for key in list(self._open):
            self._drop(key)

    def _add_part(self, part: SampleBatch) -> Iterator[SampleBatch]:
        key = int(part[c.EPS_ID][0]) if c.EPS_ID in part else 0
        if c.T in part:
            before = self._open.get(key)
            expected = int(before[-1][c.T][-1]) + 1 if before else 0
            if int(part[c.T][0]) != expected:
                self._drop(key)
                if part[c.T][0] != 0:
                    self.num_left_out += part.count
                    return
        self._open.setdefault(key, []).append(part)
        if _is_over(part):
            yield SampleBatch.concat(self._open.pop(key))

    def _drop(self, key: int) -> None:
        self.num_left_out += sum(part.count for part in self._open.pop(key, []))


def trajectories(batch: SampleBatch) -> Iterator[SampleBatch]:
    """Runs of rows that follow each other in one episode, as views; none goes on behind an end, or a gap in ``t``."""
    for part in batch.split_by_episode() if c.EPS_ID in batch else [batch]:
        ends = np.zeros(part.count, bool)
        for name in (c.DONES, c.TERMINATEDS, c.TRUNCATEDS):
            if name in part:
                ends |= part[name].astype(bool)
        if c.T in part:
            ends[:-1] |= part[c.T][1:] != part[c.T][:-1] + 1
        edges = [0, *(np.flatnonzero(ends[:-1]) + 1).tolist(), part.count]
        for start, end in itertools.pairwise(edges):
            yield part.slice(start, end)


def _is_over(part: SampleBatch) -> bool:
    flags = [name for name in (c.DONES, c.TERMINATEDS, c.TRUNCATEDS) if name in part]
    return not flags or any(bool(part[name][-1]) for name in flags)
