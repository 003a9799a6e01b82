"""What files of experience hold, and which of their rows don't fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.arrays import Batch
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError
from aiorl.offline.estimators import ACTION_PROB, ROUNDING
from aiorl.offline.registry import format_of

Array = NDArray[Any]

_KEPT_ERRORS = 20


@dataclass(slots=True)
class ColumnSummary:
    """A column over a whole file.

    Attributes:
        dtype: of its values; several joined by " or ".
        shape: of a row; None where rows differ.
        low, high: smallest and largest finite value seen; None where there is none.
    """

    dtype: str
    shape: tuple[int, ...] | None
    low: float | None = None
    high: float | None = None

    def add(self, column: Array) -> None:
        """Take in a batch's part of it."""
        name = column.dtype.name
        if name not in self.dtype.split(" or "):
            self.dtype += f" or {name}"
        if column.shape[1:] != self.shape:
            self.shape = None
        if column.dtype.kind in "biuf" and column.size:
            finite = column[np.isfinite(column)] if column.dtype.kind == "f" else column
            if finite.size:
                low, high = float(finite.min()), float(finite.max())
                self.low = low if self.low is None else min(self.low, low)
                self.high = high if self.high is None else max(self.high, high)

    @property
    def space(self) -> str:
        """The space that values like these come from, as far as they tell."""
        shape = "rows that differ" if self.shape is None else f"{self.shape}"
        if self.shape == () and self.dtype.startswith(("int", "uint")) and self.low is not None and self.low >= 0:
            return f"Discrete({int(self.high or 0) + 1}), as far as seen"
        seen = "" if self.low is None or self.high is None else f", seen {self.low:.4g} to {self.high:.4g}"
        return f"Box of {shape} {self.dtype}{seen}"


@dataclass(slots=True)
class PolicySummary:
    """One policy's rows over a whole file.

    Attributes:
        rows: number of them.
        columns: by name.
        returns, lengths: of the episodes that ended in the file.
        open_episodes: rewards and rows of those that did not, by agent and episode.
    """

    rows: int = 0
    columns: dict[str, ColumnSummary] = field(default_factory=dict)
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    open_episodes: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)

    def add(self, batch: SampleBatch) -> None:
        """Take in a batch."""
        self.rows += batch.count
        for name, column in batch.items():
            if name not in self.columns:
                self.columns[name] = ColumnSummary(column.dtype.name, column.shape[1:])
            self.columns[name].add(column)
        if c.EPS_ID in batch and c.REWARDS in batch:
            self._add_episodes(batch)

    def _add_episodes(self, batch: SampleBatch) -> None:
        episodes, agents = batch[c.EPS_ID], batch.get(c.AGENT_INDEX)
        rewards = batch[c.REWARDS].astype(np.float64)
        is_last = np.append(episodes[1:] != episodes[:-1], True)
        dones = batch[c.DONES] if c.DONES in batch else np.zeros(batch.count, bool)
        if agents is not None:
            is_last[:-1] |= agents[1:] != agents[:-1]
        ends = np.flatnonzero(is_last | dones) + 1
        starts = np.append(0, ends[:-1])
        for start, end, earned in zip(starts, ends, np.add.reduceat(rewards, starts), strict=True):
            key = (0 if agents is None else int(agents[start]), int(episodes[start]))
            before, length = self.open_episodes.pop(key, (0.0, 0))
            total, length = before + float(earned), length + int(end - start)
            if dones[end - 1]:
                self.returns.append(total)
                self.lengths.append(length)
            else:
                self.open_episodes[key] = (total, length)

    @property
    def probabilities(self) -> tuple[float, float] | None:
        """Smallest and largest probability of an action taken; None where none are recorded."""
        if (found := self.columns.get(ACTION_PROB)) is not None and found.low is not None and found.high is not None:
            return found.low, found.high
        if (found := self.columns.get(c.ACTION_LOGP)) is not None and found.low is not None and found.high is not None:
            return float(np.exp(found.low)), float(np.exp(min(found.high, 700.0)))
        return None


@dataclass(slots=True)
class FileSummary:
    """What a file holds.

    Attributes:
        path: of the file.
        format_name: its format.
        batches: number of stored batches.
        policies: rows by policy id.
        num_errors: places that could not be read.
        errors: the first of them.
    """

    path: str
    format_name: str
    batches: int = 0
    policies: dict[str, PolicySummary] = field(default_factory=dict)
    num_errors: int = 0
    errors: list[str] = field(default_factory=list)

    def note(self, error: str) -> None:
        """Count what could not be read."""
        self.num_errors += 1
        if len(self.errors) < _KEPT_ERRORS:
            self.errors.append(error)


def policy_batches(batch: Batch) -> Mapping[str, SampleBatch]:
    """Policy id -> rows, also of a plain batch."""
    return {DEFAULT_POLICY_ID: batch} if isinstance(batch, SampleBatch) else batch.policy_batches


def inspect_file(path: str) -> FileSummary:
    """Read a whole file once and tell what it holds.

    Raises:
        DataError: it is of no known format.
        ConfigError: a package is missing that its format needs.
    """
    found = format_of(path)
    summary = FileSummary(path, found.name)
    try:
        for stored in found.read(path):
            if isinstance(stored, DataError):
                summary.note(str(stored))
                continue
            summary.batches += 1
            for policy_id, rows in policy_batches(stored.batch).items():
                summary.policies.setdefault(policy_id, PolicySummary()).add(rows)
    except (DataError, OSError) as error:
        summary.note(str(error))
    return summary


def validate_file(path: str) -> Iterator[str]:
    """Everything in a file that can't be read or doesn't fit, as ``FILE, line 3, row 12: what``; rows count from 1.

    Raises:
        DataError: it is of no known format.
        ConfigError: a package is missing that its format needs.
    """
    found = format_of(path)
    first: dict[str, tuple[str, dict[str, tuple[np.dtype[Any], tuple[int, ...]]]]] = {}
    try:
        for stored in found.read(path):
            if isinstance(stored, DataError):
                yield str(stored)
                continue
            for policy_id, rows in policy_batches(stored.batch).items():
                where = f"{path}, {stored.place}"
                if policy_id != DEFAULT_POLICY_ID:
                    where += f", policy {policy_id!r}"
                form = {name: (column.dtype, column.shape[1:]) for name, column in rows.items()}
                _, expected = first.setdefault(policy_id, (stored.place, form))
                for fault in _differences(form, expected, first[policy_id][0]):
                    yield f"{where}: {fault}"
                for row, others, fault in _misfits(rows):
                    more = f" (and {others:,} more rows)" if others else ""
                    yield f"{where}, row {row + 1}: {fault}{more}"
    except (DataError, OSError) as error:
        yield str(error)


def _differences(form: Mapping[str, Any], expected: Mapping[str, Any], first: str) -> Iterator[str]:
    if missing := sorted(expected.keys() - form.keys()):
        yield f"lacks the columns {', '.join(missing)}, which {first} has"
    if more := sorted(form.keys() - expected.keys()):
        yield f"has the columns {', '.join(more)}, which {first} lacks"
    for name in sorted(form.keys() & expected.keys()):
        if form[name] != expected[name]:
            (dtype, shape), (before, former) = form[name], expected[name]
            yield f"column {name!r} has rows of {shape} {dtype}, in {first} of {former} {before}"


def _misfits(rows: SampleBatch) -> Iterator[tuple[int, int, str]]:
    """Row, how many more there are of the same, and what is wrong."""
    for is_wrong, fault in _checks(rows):
        wrong = np.flatnonzero(is_wrong)
        if len(wrong):
            yield int(wrong[0]), len(wrong) - 1, fault


def _checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    for name in (c.OBS, c.NEW_OBS, c.ACTIONS, c.REWARDS):
        if name in rows and rows[name].dtype.kind == "f":
            column = rows[name]
            yield ~_in_all(np.isfinite(column)), f"{name} holds a number that is not finite"
    is_discrete = c.ACTIONS in rows and rows[c.ACTIONS].dtype.kind in "iu"  # else they may be densities
    if ACTION_PROB in rows and _is_numbers(rows[ACTION_PROB]):
        prob = rows[ACTION_PROB]
        fits: Array = (prob > 0) & ((prob <= np.exp(ROUNDING)) if is_discrete else np.isfinite(prob))
        yield ~fits, "action_prob is not in (0, 1]" if is_discrete else "action_prob is not above 0 and finite"
    if c.ACTION_LOGP in rows and _is_numbers(rows[c.ACTION_LOGP]):
        logp = rows[c.ACTION_LOGP]
        yield ~np.isfinite(logp), "action_logp is not finite"
        if is_discrete:
            yield logp > ROUNDING, "action_logp is above 0, so no probability of a discrete action"
    if {c.DONES, c.TERMINATEDS, c.TRUNCATEDS} <= rows.keys():
        ends = rows[c.TERMINATEDS] | rows[c.TRUNCATEDS]
        yield rows[c.DONES] != ends, "dones is not terminateds or truncateds"
    if c.EPS_ID in rows:
        yield from _episode_checks(rows)


def _episode_checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    """What must hold between a row and the next of the same episode and agent."""
    episodes = rows[c.EPS_ID]
    goes_on = episodes[1:] == episodes[:-1]
    if c.AGENT_INDEX in rows:
        goes_on &= rows[c.AGENT_INDEX][1:] == rows[c.AGENT_INDEX][:-1]
    if c.DONES in rows:
        yield goes_on & rows[c.DONES][:-1], "the episode is done here, but goes on in the next row"
    if c.T in rows:
        steps = rows[c.T].astype(np.int64)
        yield _next(goes_on & (steps[1:] != steps[:-1] + 1)), "t is not that of the row before plus 1"
        goes_on = goes_on & (steps[1:] == steps[:-1] + 1)
    if c.OBS in rows and c.NEW_OBS in rows and rows[c.OBS].shape == rows[c.NEW_OBS].shape:
        following, obs = rows[c.NEW_OBS][:-1], rows[c.OBS][1:]
        same = _in_all(following == obs)
        if following.dtype.kind == "f" and not same.all():
            same = _in_all(np.isclose(following, obs, rtol=1e-4, atol=1e-5, equal_nan=True))
        yield _next(goes_on & ~same), "obs is not new_obs of the row before"


def _in_all(flags: Array) -> Array:
    """Whether a flag is set for every number of a row."""
    return np.asarray(flags.all(axis=tuple(range(1, flags.ndim))))


def _is_numbers(column: Array) -> bool:
    return column.ndim == 1 and column.dtype.kind in "iuf"


def _next(is_wrong: Array) -> Array:
    """The same of the second row of each pair."""
    return np.append(False, is_wrong)
