"""Contents of files of experience, and rows that don't fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.arrays import Batch
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError
from aiorl.offline.column_names import missing_columns
from aiorl.offline.episodes import ended, trajectories
from aiorl.offline.estimators import ACTION_PROB, ROUNDING
from aiorl.offline.registry import format_of, stored_batches
from aiorl.offline.sound_rows import ORIGIN, origins
from aiorl.offline.unit_actions import NORMALIZED, seem_scaled

Array = NDArray[Any]

_SHOWN_ERRORS = 20
_NOT_THE_NEXT_STEP = "t is not that of the previous row plus 1"
_LABEL = 16


@dataclass(slots=True)
class _Column:
    """Statistics of a column over a whole file.

    Attributes:
        dtype: dtype of its values; several are joined by " or ".
        shape: shape of a row; None if rows differ.
        low, high: smallest and largest finite value seen.
    """

    dtype: str
    shape: tuple[int, ...] | None
    low: float = np.inf
    high: float = -np.inf

    def add(self, column: Array) -> None:
        """Add the column of a batch."""
        name = column.dtype.name
        if name not in self.dtype.split(" or "):
            self.dtype += f" or {name}"
        if column.shape[1:] != self.shape:
            self.shape = None
        if column.dtype.kind in "biuf":
            finite = column[np.isfinite(column)] if column.dtype.kind == "f" else column
            if finite.size:
                self.low, self.high = (
                    min(self.low, float(finite.min())),
                    max(self.high, float(finite.max())),
                )

    @property
    def is_seen(self) -> bool:
        """True once there is a finite value."""
        return self.low <= self.high

    @property
    def space(self) -> str:
        """Space of the values, as far as they show it."""
        shape = "rows that differ" if self.shape is None else f"{self.shape}"
        if (
            self.shape == ()
            and self.dtype.startswith(("int", "uint"))
            and self.is_seen
            and self.low >= 0
        ):
            return f"Discrete({int(self.high) + 1}), as far as seen"
        return f"Box of {shape} {self.dtype}" + (
            f", seen {self.low:.4g} to {self.high:.4g}" if self.is_seen else ""
        )

    def __str__(self) -> str:
        return self.dtype + (
            " of differing shapes"
            if self.shape is None
            else f"{[*self.shape]}"
            if self.shape
            else ""
        )


@dataclass(slots=True)
class _Policy:
    """Statistics of one policy's rows over a whole file.

    Attributes:
        rows: number of rows.
        columns: columns by name.
        returns, lengths: returns and lengths of the whole episodes.
        cut: agent and number of the other episodes.
    """

    rows: int = 0
    columns: dict[str, _Column] = field(default_factory=dict)
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cut: set[tuple[int, int]] = field(default_factory=set)

    def add(self, batch: SampleBatch) -> None:
        """Add a batch of episodes."""
        self.rows += batch.count
        for name, column in batch.items():
            if name not in self.columns:
                self.columns[name] = _Column(column.dtype.name, column.shape[1:])
            self.columns[name].add(column)
        if c.EPS_ID in batch and c.REWARDS in batch:
            self._add_episodes(batch)

    def _add_episodes(self, batch: SampleBatch) -> None:
        for part in trajectories(batch):
            begins = c.T not in part or part[c.T][0] == 0
            if begins and ended(part)[-1]:
                self.returns.append(float(part[c.REWARDS].sum(dtype=np.float64)))
                self.lengths.append(part.count)
            else:
                agent = int(part[c.AGENT_INDEX][0]) if c.AGENT_INDEX in part else 0
                self.cut.add((agent, int(part[c.EPS_ID][0])))

    def facts(self, space: spaces.Space[Any] | None) -> Iterator[tuple[str, str]]:
        """Yield a label and a fact for each line of `inspect_file`."""
        taken = self.columns.get(c.ACTIONS)
        for label, column in (("observations", self.columns.get(c.OBS)), ("actions", taken)):
            if column is not None:
                yield label, column.space
        if space is not None:
            yield "of the env", f"{space}"
            if taken and taken.is_seen and seem_scaled(space, taken.low, taken.high):
                yield (
                    "",
                    f"actions seem to be scaled to [-1, 1], as RLlib stores them: set {NORMALIZED}",
                )
        whole = f"{len(self.returns):,} ended"
        if self.cut:
            whole += f", {len(self.cut):,} without all of their rows in the file"
        yield (
            "episodes",
            whole if c.EPS_ID in self.columns else "unknown: there is no column eps_id",
        )
        if self.returns:
            yield "returns", _spread(self.returns)
            yield "lengths", _spread(self.lengths)
        yield "probabilities", self._probabilities()
        yield "columns", ", ".join(f"{name} {column}" for name, column in self.columns.items())
        for name, consequence in missing_columns(self.columns):
            yield "missing", f"{name}: {consequence}"

    def _probabilities(self) -> str:
        for name in (ACTION_PROB, c.ACTION_LOGP):
            found = self.columns.get(name)
            if found is not None and found.is_seen:
                ends = (
                    [found.low, found.high]
                    if name == ACTION_PROB
                    else np.exp(np.minimum([found.low, found.high], 700))
                )
                return f"of the actions taken {ends[0]:.3g} to {ends[1]:.3g}"
        return "none recorded; importance sampling needs action_prob or action_logp"


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):,.4g} on average, {min(values):,.4g} to {max(values):,.4g}"


def count_of(number: int, one: str, many: str) -> str:
    """Return a number and its noun, singular or plural."""
    return f"1 {one}" if number == 1 else f"{number:,} {many}"


def policy_batches(batch: Batch) -> Mapping[str, SampleBatch]:
    """Return rows by policy id, for a plain batch under the default id."""
    return {DEFAULT_POLICY_ID: batch} if isinstance(batch, SampleBatch) else batch.policy_batches


def inspect_file(path: str, space: spaces.Space[Any] | None = None) -> tuple[list[str], bool]:
    """Read a whole file once; return lines that describe it, and whether all of it could be read.

    Args:
        path: the file.
        space: action space of the environment, shown along with the actions.

    Raises:
        DataError: its format is unknown.
        ConfigError: a package for its format is missing.
    """
    policies: dict[str, _Policy] = {}
    errors: list[str] = []
    batches: set[int] = set()
    for stored in stored_batches(path, joins_episodes=True, keeps_origins=True):
        if isinstance(stored, DataError):
            errors.append(str(stored) if len(errors) < _SHOWN_ERRORS else "")
            continue
        for policy_id, rows in policy_batches(stored.batch).items():
            numbers, _ = origins(rows.pop(ORIGIN))
            batches.update(np.unique(numbers).tolist())
            policies.setdefault(policy_id, _Policy()).add(rows)
    total = sum(policy.rows for policy in policies.values())
    lines = [
        f"{path}: {format_of(path).name}, {count_of(len(batches), 'batch', 'batches')}, {total:,}"
        " rows"
    ]
    for policy_id, policy in policies.items():
        if policy_id != DEFAULT_POLICY_ID:
            lines.append(f"  policy {policy_id}: {policy.rows:,} rows")
        lines += [f"  {label:{_LABEL}}{fact}" for label, fact in policy.facts(space)]
    if errors:
        lines.append(f"  {'unreadable':{_LABEL}}{count_of(len(errors), 'place', 'places')}:")
        lines += [f"    {error}" for error in errors[:_SHOWN_ERRORS]]
        if len(errors) > _SHOWN_ERRORS:
            lines.append(f"    and {len(errors) - _SHOWN_ERRORS:,} more")
    return lines, not errors


def validate_file(path: str) -> Iterator[str]:
    """Yield all faults of a file as ``FILE, line 3, row 12: fault``, with rows counted from 1.

    Raises:
        DataError: its format is unknown.
        ConfigError: a package for its format is missing.
    """
    first: dict[str, tuple[str, dict[str, tuple[np.dtype[Any], tuple[int, ...]]]]] = {}
    places: dict[int, str] = {}
    reported: set[str] = set()
    for stored in stored_batches(path, keeps_origins=True):
        if isinstance(stored, DataError):
            reported.add(stored.place)
            yield str(stored)
            continue
        for policy_id, rows in policy_batches(stored.batch).items():
            numbers, row_numbers = origins(rows.pop(ORIGIN))
            places[int(numbers[0])] = stored.place
            where = f"{path}, {_place(stored.place, policy_id)}"
            form = {name: (column.dtype, column.shape[1:]) for name, column in rows.items()}
            if policy_id not in first and c.OBS not in rows:
                yield f"{where}: column 'obs' is missing: {dict(missing_columns(rows))[c.OBS]}"
            place, expected = first.setdefault(policy_id, (stored.place, form))
            for fault in _differences(form, expected, place):
                yield f"{where}: {fault}"
            for is_wrong, fault in _checks(rows):
                wrong = np.sort(row_numbers[is_wrong])
                if len(wrong):
                    yield f"{where}, row {int(wrong[0]) + 1}: {fault}{_and_more(len(wrong))}"
    yield from _validate_episodes(path, places, reported)


def _validate_episodes(path: str, places: Mapping[int, str], reported: set[str]) -> Iterator[str]:
    """Yield the faults from row to row of each episode, whose rows can be anywhere in the file.

    Args:
        path: the file.
        places: number of a batch -> its place.
        reported: places and rows that can't be used, which are not yielded again.
    """
    for stored in stored_batches(path, joins_episodes=True, keeps_origins=True):
        if isinstance(stored, DataError):
            if stored.place not in reported:
                yield str(stored)
            continue
        for policy_id, rows in policy_batches(stored.batch).items():
            numbers, row_numbers = origins(rows.pop(ORIGIN))
            if c.EPS_ID not in rows:
                continue
            for is_wrong, fault in _step_checks(rows):
                # the row before may be missing only because it can't be used
                wrong = [
                    at
                    for at in np.flatnonzero(is_wrong)
                    if _row(places[int(numbers[at])], policy_id, int(row_numbers[at]) - 1)
                    not in reported
                ]
                if wrong:
                    at = wrong[0]
                    where = _row(places[int(numbers[at])], policy_id, int(row_numbers[at]))
                    yield f"{path}, {where}: {fault}{_and_more(len(wrong))}"


def _place(place: str, policy_id: str) -> str:
    return place if policy_id == DEFAULT_POLICY_ID else f"{place}, policy {policy_id!r}"


def _row(place: str, policy_id: str, row: int) -> str:
    """Return the place of a row, which counts from 0 here and from 1 in the text."""
    return f"{_place(place, policy_id)}, row {row + 1}"


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more rows)" if count > 1 else ""


def _differences(form: Mapping[str, Any], expected: Mapping[str, Any], first: str) -> Iterator[str]:
    for name in sorted(form.keys() | expected.keys()):
        if form.get(name) != expected.get(name):
            here, there = (
                f"rows of {found[1]} {found[0]}" if (found := of.get(name)) else "missing"
                for of in (form, expected)
            )
            yield f"column {name!r} is {here}, in {first} {there}"


def _checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    is_discrete = (
        c.ACTIONS in rows and rows[c.ACTIONS].dtype.kind in "iu"
    )  # other actions can have densities
    if ACTION_PROB in rows and _is_numbers(rows[ACTION_PROB]):
        prob = rows[ACTION_PROB]
        fits: Array = (prob > 0) & (
            (prob <= np.exp(ROUNDING)) if is_discrete else np.isfinite(prob)
        )
        yield (
            ~fits,
            (
                "action_prob is not in (0, 1]"
                if is_discrete
                else "action_prob is not above 0 and finite"
            ),
        )
    if c.ACTION_LOGP in rows and _is_numbers(rows[c.ACTION_LOGP]):
        logp = rows[c.ACTION_LOGP]
        yield ~np.isfinite(logp), "action_logp is not finite"
        if is_discrete:
            yield (
                logp > ROUNDING,
                "action_logp is above 0, which is impossible for a discrete action",
            )
    if {c.DONES, c.TERMINATEDS, c.TRUNCATEDS} <= rows.keys():
        ends = rows[c.TERMINATEDS] | rows[c.TRUNCATEDS]
        yield rows[c.DONES] != ends, "dones is not terminateds or truncateds"
    if c.EPS_ID in rows:
        yield from _restart_checks(rows)


def _restart_checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    """Check that no episode ends or begins between rows of the same episode and agent in a
    batch.
    """
    goes_on = _goes_on(rows)
    falls = np.zeros(len(goes_on), np.bool_)
    if c.T in rows:
        t = rows[c.T]
        falls = goes_on & (t[1:] <= t[:-1])
        # without repeated steps, the rows can be of one episode whose other steps are in other
        # batches
        runs = np.append(0, np.cumsum(~goes_on))
        for run in np.unique(runs[1:][falls]):
            start, end = np.searchsorted(runs, [run, run + 1])
            if len(np.unique(t[start:end])) == end - start:
                goes_on[start : end - 1] &= ~falls[start : end - 1]
                falls[start : end - 1] = False
    if c.DONES in rows:
        yield (
            np.append(goes_on & rows[c.DONES][:-1], False),
            "the episode is done here, but continues in the next row",
        )
    if c.T in rows:
        yield np.append(False, falls), _NOT_THE_NEXT_STEP


def _step_checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    """Check the steps from each row to the next of the same episode and agent, all of whose rows
    are together.
    """
    goes_on = _goes_on(rows)
    if c.T in rows:
        steps = rows[c.T].astype(np.int64)
        yield np.append(False, goes_on & (steps[1:] > steps[:-1] + 1)), _NOT_THE_NEXT_STEP
        goes_on &= steps[1:] == steps[:-1] + 1
    if c.OBS in rows and c.NEW_OBS in rows and rows[c.OBS].shape == rows[c.NEW_OBS].shape:
        following = rows[c.NEW_OBS][:-1]
        obs = rows[c.OBS][1:]
        same = _in_all(following == obs)
        if following.dtype.kind == "f" and not same.all():
            same = _in_all(np.isclose(following, obs, rtol=1e-4, atol=1e-5, equal_nan=True))
        yield np.append(False, goes_on & ~same), "obs is not new_obs of the previous row"


def _goes_on(rows: SampleBatch) -> Array:
    """Return for each row except the last whether the next one is of the same episode and agent."""
    goes_on: Array = rows[c.EPS_ID][1:] == rows[c.EPS_ID][:-1]
    if c.AGENT_INDEX in rows:
        goes_on &= rows[c.AGENT_INDEX][1:] == rows[c.AGENT_INDEX][:-1]
    return goes_on


def _in_all(flags: Array) -> Array:
    """Return for each row whether all its flags are set."""
    return np.asarray(flags.all(axis=tuple(range(1, flags.ndim))))


def _is_numbers(column: Array) -> bool:
    return column.ndim == 1 and column.dtype.kind in "iuf"
