"""Assembly of train batches from fragments, in an order that does not depend on when the fragments
arrive.

`BatchAssembler` holds references only; the algorithm's `make_batch` copies the columns once. It has
no clock, socket or thread. It gives a reason for every fragment that it discards, so that the
ledger balances.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.columns import OBS, VALID, is_gradient, num_rows
from aiorl.data.metrics import MAX_HIST, MAX_NAME, MAX_NAMES, EpisodeColumns
from aiorl.errors import BatchError, InternalError
from aiorl.learning.algorithm import LeasePlan
from aiorl.net.protocol.events import SamplesAccepted
from aiorl.net.protocol.ledger import MAX_FRAGMENT_STEPS
from aiorl.net.wire.messages import Samples

_MAX_OBSERVATIONS = 1 << 40
"""Bound on the observations of a delta, well below 2**53, where the count of a filter would stop
increasing."""
STALE = "stale"
_MAX_NAME = MAX_NAME + 20  # including its prefix

PolicyColumns = Mapping[str, Mapping[str, NDArray[Any]]]


def check_samples(samples: Samples) -> EpisodeColumns:
    """Check that a fragment's counts, columns and episodes are consistent, since a worker may be
    broken.

    With several agents an env step can have any number of rows. Rows of policies that do not learn
    are counted, but not sent.

    Args:
        samples: a fragment; the algorithm checks the contents of its columns.

    Returns:
        The finished episodes.

    Raises:
        BatchError: the fragment is inconsistent; the error names the part at fault.
    """
    rows = sum(map(_rows_of, samples.batches.values()))
    for name, steps, least in (
        ("env_steps", samples.env_steps, 0),
        ("agent_steps", samples.agent_steps, rows),
    ):
        if not least <= steps <= MAX_FRAGMENT_STEPS:
            raise BatchError(name, f"at least {least} and at most {MAX_FRAGMENT_STEPS}", steps)
    for name, value in samples.perf.items():
        if not math.isfinite(value):
            raise BatchError(f"perf {name:.50}", "a finite number", value)
    for policy_id, delta in samples.filter_deltas.items():
        count = delta.get("n")
        if count is not None and count.size == 1 and count.item() > _MAX_OBSERVATIONS:
            raise BatchError(
                f"filter delta {policy_id:.50}",
                f"at most {_MAX_OBSERVATIONS} samples",
                count.item(),
            )
    return _checked_episodes(samples.episodes)


def _rows_of(columns: Mapping[str, NDArray[Any]]) -> int:
    """Return the number of transitions in the columns of a policy."""
    if is_gradient(columns):
        return num_rows(columns)
    obs = columns.get(OBS)
    valid = columns.get(VALID)
    if obs is None or obs.ndim < 2:
        raise BatchError("batches", "columns [T, N, ...]", "none")
    if valid is None:
        return int(obs.shape[0] * obs.shape[1])
    return int(np.count_nonzero(valid))


def _checked_episodes(arrays: Mapping[str, NDArray[Any]]) -> EpisodeColumns:
    """Return the finished episodes."""
    lengths = arrays.get("lengths")
    rewards = arrays.get("rewards")
    if lengths is None or rewards is None or lengths.ndim != 1 or lengths.shape != rewards.shape:
        raise BatchError("episodes", "lengths and rewards [E]", ", ".join(sorted(arrays))[:100])
    if lengths.dtype.kind != "i" or lengths.dtype.itemsize > 4 or (lengths < 0).any():
        raise BatchError("episodes", "lengths int32 >= 0", lengths.dtype)
    if len(arrays) > MAX_NAMES + 2:
        raise BatchError("episodes", f"at most {MAX_NAMES} names", len(arrays))
    for name, values in arrays.items():
        key = f"episodes {name:.100}"
        kind, *parts = name.split("/", 2)
        if len(name) > _MAX_NAME or (kind == "estimate" and (len(parts) < 2 or not all(parts))):
            raise BatchError(
                key,
                f"a name of at most {_MAX_NAME} characters, an estimator and its metric",
                "another",
            )
        if name.startswith("hist/") and values.size > MAX_HIST:
            raise BatchError(key, f"at most {MAX_HIST} values", values.size)
        if name != "lengths" and (
            values.ndim != 1 or values.dtype.kind != "f" or not np.isfinite(values).all()
        ):
            raise BatchError(key, "finite numbers [E]", f"{values.dtype} {values.shape}")
    return EpisodeColumns.from_arrays(arrays)


@dataclass(frozen=True, slots=True)
class AssembledBatch:
    """The fragments of one train batch, ready for `PolicyGroup.make_batch`.

    Attributes:
        fragments: sorted by slot and number (on-policy), or in the order of arrival (streaming).
        env_steps: total number of env steps.
    """

    fragments: tuple[SamplesAccepted, ...]
    env_steps: int

    @property
    def batches(self) -> list[PolicyColumns]:
        """Columns of each fragment, by policy id."""
        return [fragment.message.batches for fragment in self.fragments]


class BatchAssembler:
    """Queues fragments and hands them out in batches.

    On-policy, it takes only fragments of the current version, as many as one batch needs, and hands
    them out sorted. Two runs with the same seeds therefore train on the same batches, whatever
    order the network delivers them in. If fragments contain whole episodes, their length is known
    only once they arrive. The assembler then asks in rounds for the fragments still missing, so
    that a batch does not get too large.

    Streaming, it is a queue that drops fragments that are too old; leases bound its length
    (`aiorl.net.protocol.pacing`).

    The version is the learner's: call `set_version` after each update. The session drops duplicates
    before.
    """

    def __init__(self, plan: LeasePlan) -> None:
        """Start with an empty queue at version 0, with the algorithm's plan."""
        self._plan = plan
        self._newest_bytes = self._queued_bytes = 0
        self._queue: deque[SamplesAccepted] = deque()
        self._version = self._oldest = 0  # no fragment in the queue has an older version
        self._wanted = plan.fragments_per_batch
        self._discarded: list[tuple[str, SamplesAccepted]] = []

    @property
    def queued_env_steps(self) -> int:
        """Number of env steps that wait."""
        return sum(fragment.message.env_steps for fragment in self._queue)

    @property
    def queued_fragments(self) -> int:
        """Number of fragments that wait."""
        return len(self._queue)

    def bytes_with(self, coming: int) -> int:
        """Return the bytes that would wait after ``coming`` more fragments of the size of the
        newest one.
        """
        return self._queued_bytes + coming * self._newest_bytes

    @property
    def is_ready(self) -> bool:
        """True while a whole batch waits for `take`."""
        return len(self._queue) >= self._wanted and not self._env_steps_missing

    @property
    def _env_steps_missing(self) -> int:
        """Number of env steps still missing, on-policy if the number of fragments is not known
        beforehand; else 0.
        """
        env_steps = self._plan.env_steps_per_batch
        if env_steps is None or self._wanted >= self._plan.fragments_per_batch:
            return 0
        return max(0, env_steps - self.queued_env_steps)

    def begin_batch(self) -> int:
        """Return the number of fragments to sample first for a new batch, on-policy."""
        self._wanted = self._plan.fragments_per_batch
        if self._plan.env_steps_per_batch is not None and not self._queue:
            # its root, so that two more rounds are mostly enough
            self._wanted = math.isqrt(self._wanted - 1) + 1
        return self._wanted

    def more_wanted(self) -> int:
        """Return the number of further fragments to sample for the batch, on-policy; 0 until
        earlier ones arrive.
        """
        num_queued = len(self._queue)
        env_steps = self._env_steps_missing
        if num_queued < self._wanted or not env_steps:
            return 0
        num_missing = min(
            -(-env_steps * num_queued // max(1, self.queued_env_steps)),
            self._plan.fragments_per_batch - num_queued,
        )
        self._wanted += num_missing
        return num_missing

    def add(self, fragment: SamplesAccepted, ahead: int = 0) -> None:
        """Queue a fragment, or discard it for a reason that `take_discarded` returns; see `prune`.

        Raises:
            InternalError: the fragment has a version that the learner has not reached.
        """
        version = fragment.message.first_version
        if version > self._version:
            raise InternalError(f"a fragment of version {version} at version {self._version}")
        if self._is_stale(version, ahead):
            self._discarded.append((STALE, fragment))
        elif self._plan.mode == "on_policy" and len(self._queue) >= self._wanted:
            self._discarded.append(("surplus", fragment))
        else:
            self._queue.append(fragment)
            self._oldest = min(self._oldest, version)
            self._newest_bytes = _bytes_of(fragment)
            self._queued_bytes += self._newest_bytes

    def take(self) -> AssembledBatch:
        """Return one train batch; `is_ready` must be True."""
        fragments = [self._queue.popleft() for _ in range(self._wanted)]
        self._queued_bytes -= sum(map(_bytes_of, fragments))
        self._wanted = self._plan.fragments_per_batch
        if self._plan.mode == "on_policy":
            fragments.sort(key=lambda fragment: (fragment.slot, fragment.message.seq))
        env_steps = sum(fragment.message.env_steps for fragment in fragments)
        return AssembledBatch(tuple(fragments), env_steps)

    def set_version(self, version: int) -> None:
        """Set the version of the learner's new policy and discard fragments that are now too
        old.
        """
        self._version = version
        self.prune()

    def prune(self, ahead: int = 0) -> None:
        """Discard fragments that will be too old to train on after ``ahead`` more updates."""
        if self._is_stale(self._oldest, ahead):
            waiting = self._queue
            self._queue = deque()
            self._oldest = self._version
            self._queued_bytes = 0
            for fragment in waiting:
                self.add(fragment, ahead)

    def take_discarded(self) -> list[tuple[str, SamplesAccepted]]:
        """Return the fragments discarded since the last call, each with its reason.

        `STALE` means older than the bound on policy lag; "surplus" means more than an on-policy
        batch needs.
        """
        discarded = self._discarded
        self._discarded = []
        return discarded

    def _is_stale(self, version: int, ahead: int) -> bool:
        bound = self._plan.max_policy_lag
        return bound is not None and self._version + ahead - version > bound


def _bytes_of(fragment: SamplesAccepted) -> int:
    return sum(
        array.nbytes for columns in fragment.message.batches.values() for array in columns.values()
    )
