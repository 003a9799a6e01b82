"""Contents of files of experience, and rows that don't fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from aiorl.data import columns as c
from aiorl.data.actions import Space
from aiorl.data.columns import DEFAULT_POLICY_ID, Array
from aiorl.data.sample_batch import SampleBatch, rows_by_policy
from aiorl.errors import DataError
from aiorl.offline.column_names import missing_columns
from aiorl.offline.episodes import ended, trajectories
from aiorl.offline.estimators import ACTION_PROB, ROUNDING
from aiorl.offline.registry import format_of, stored_batches
from aiorl.offline.sound_rows import ORIGIN, RowLeftOut, origins
from aiorl.offline.stored_columns import Form, form_of
from aiorl.offline.unit_actions import NORMALIZED, seem_scaled

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
        if column.dtype.kind == "f":
            column = column[np.isfinite(column)]
        if column.dtype.kind in "biuf" and column.size:
            self.low = min(self.low, float(column.min()))
            self.high = max(self.high, float(column.max()))

    @property
    def is_seen(self) -> bool:
        """True once there is a finite value."""
        return self.low <= self.high

    @property
    def space(self) -> str:
        """Space of the values, as far as they show it."""
        is_whole = self.dtype.startswith(("int", "uint"))
        if self.shape == () and is_whole and self.is_seen and self.low >= 0:
            return f"Discrete({int(self.high) + 1}), as far as seen"
        shape = "rows that differ" if self.shape is None else self.shape
        text = f"Box of {shape} {self.dtype}"
        if self.is_seen:
            text += f", seen {self.low:.4g} to {self.high:.4g}"
        return text

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of differing shapes"
        if not self.shape:
            return self.dtype
        return f"{self.dtype}{[*self.shape]}"


@dataclass(slots=True)
class _Policy:
    """Statistics of one policy's rows over a whole file.

    Attributes:
        incomplete: numbers of the episodes whose rows are without ``t`` and not all here.
        rows: number of rows.
        columns: columns by name.
        returns, lengths: returns and lengths of the whole episodes.
        cut: agent and number of the other episodes.
    """

    incomplete: set[int | None]
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
            eps_id = int(part[c.EPS_ID][0])
            begins = c.T not in part or part[c.T][0] == 0
            if begins and ended(part)[-1] and eps_id not in self.incomplete:
                self.returns.append(float(part[c.REWARDS].sum(dtype=np.float64)))
                self.lengths.append(part.count)
            else:
                agents = part.get(c.AGENT_INDEX, (0,))
                self.cut.add((int(agents[0]), eps_id))

    def facts(self, space: Space | None) -> Iterator[tuple[str, str]]:
        """Yield a label and a fact for each line of `inspect_file`."""
        obs = self.columns.get(c.OBS)
        actions = self.columns.get(c.ACTIONS)
        if obs is not None:
            yield "observations", obs.space
        if actions is not None:
            yield "actions", actions.space
        if space is not None:
            yield "of the env", f"{space}"
            if actions and actions.is_seen and seem_scaled(space, actions.low, actions.high):
                advice = f"set {NORMALIZED}"
                yield "", f"actions seem to be scaled to [-1, 1], as RLlib stores them: {advice}"
        yield "episodes", self._episodes()
        if self.returns:
            yield "returns", _spread(self.returns)
            yield "lengths", _spread(self.lengths)
        yield "probabilities", self._probabilities()
        yield "columns", ", ".join(f"{name} {column}" for name, column in self.columns.items())
        for name, consequence in missing_columns(self.columns):
            yield "missing", f"{name}: {consequence}"

    def _episodes(self) -> str:
        if c.EPS_ID not in self.columns:
            return "unknown: there is no column eps_id"
        text = f"{len(self.returns):,} ended"
        if self.cut:
            text += f", {len(self.cut):,} without all of their rows in the file"
        return text

    def _probabilities(self) -> str:
        prob = self.columns.get(ACTION_PROB)
        if prob is not None and prob.is_seen:
            return f"of the actions taken {prob.low:.3g} to {prob.high:.3g}"
        logp = self.columns.get(c.ACTION_LOGP)
        if logp is not None and logp.is_seen:
            # densities of continuous actions can be too large for a float
            low, high = np.exp(np.minimum([logp.low, logp.high], 700))
            return f"of the actions taken {low:.3g} to {high:.3g}"
        return "none recorded; importance sampling needs action_prob or action_logp"


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):,.4g} on average, {min(values):,.4g} to {max(values):,.4g}"


def count_of(
    number: int,
    singular: str,
    plural: str,
) -> str:
    """Return a number and its noun, singular or plural."""
    if number == 1:
        return f"1 {singular}"
    return f"{number:,} {plural}"


def inspect_file(
    path: str,
    space: Space | None = None,
) -> tuple[list[str], bool]:
    """Read a whole file once; return lines that describe it, and whether all of it could be read.

    Args:
        path: the file.
        space: action space of the environment, shown along with the actions.

    Raises:
        DataError: its format is unknown.
        ConfigError: a package for its format is missing.
    """
    policies: dict[str, _Policy] = {}
    incomplete: set[int | None] = set()
    errors: list[str] = []
    batches: set[int] = set()
    for stored in stored_batches(path, joins_episodes=True, keeps_origins=True):
        if isinstance(stored, DataError):
            errors.append(str(stored) if len(errors) < _SHOWN_ERRORS else "")
            if isinstance(stored, RowLeftOut):
                incomplete.add(stored.eps_id)
            continue
        for policy_id, rows in rows_by_policy(stored.batch).items():
            numbers, _ = origins(rows.pop(ORIGIN))
            batches.update(np.unique(numbers).tolist())
            policies.setdefault(policy_id, _Policy(incomplete)).add(rows)
    num_batches = count_of(len(batches), "batch", "batches")
    num_rows = sum(policy.rows for policy in policies.values())
    lines = [f"{path}: {format_of(path).name}, {num_batches}, {num_rows:,} rows"]
    for policy_id, policy in policies.items():
        if policy_id != DEFAULT_POLICY_ID:
            lines.append(f"  policy {policy_id}: {policy.rows:,} rows")
        lines += [f"  {label:{_LABEL}}{fact}" for label, fact in policy.facts(space)]
    if errors:
        num_places = count_of(len(errors), "place", "places")
        lines.append(f"  {'unreadable':{_LABEL}}{num_places}:")
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
    first: dict[str, tuple[str, Form]] = {}
    places: dict[int, str] = {}
    reported: set[str] = set()
    for stored in stored_batches(path, keeps_origins=True):
        if isinstance(stored, DataError):
            reported.add(stored.place)
            yield str(stored)
            continue
        for policy_id, rows in rows_by_policy(stored.batch).items():
            numbers, row_numbers = origins(rows.pop(ORIGIN))
            places[int(numbers[0])] = stored.place
            where = f"{path}, {_place(stored.place, policy_id)}"
            form = form_of(rows)
            if policy_id not in first and c.OBS not in rows:
                yield f"{where}: column 'obs' is missing: {dict(missing_columns(rows))[c.OBS]}"
            place, expected = first.setdefault(policy_id, (stored.place, form))
            for fault in _differences(form, expected, place):
                yield f"{where}: {fault}"
            for is_wrong, fault in _checks(rows):
                wrong = np.sort(row_numbers[is_wrong]) + 1
                if len(wrong):
                    yield f"{where}, row {wrong[0]}: {fault}{_and_more(len(wrong))}"
    yield from _validate_episodes(path, places, reported)


def _validate_episodes(
    path: str,
    places: Mapping[int, str],
    reported: set[str],
) -> Iterator[str]:
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
        for policy_id, rows in rows_by_policy(stored.batch).items():
            numbers, row_numbers = origins(rows.pop(ORIGIN))
            if c.EPS_ID not in rows:
                continue
            for is_wrong, fault in _step_checks(rows):
                wrong = []
                for batch, row in zip(numbers[is_wrong], row_numbers[is_wrong], strict=True):
                    place = places[int(batch)]
                    # the row before may be missing only because it can't be used
                    if _row(place, policy_id, row - 1) not in reported:
                        wrong.append(_row(place, policy_id, row))
                if wrong:
                    yield f"{path}, {wrong[0]}: {fault}{_and_more(len(wrong))}"


def _place(place: str, policy_id: str) -> str:
    return place if policy_id == DEFAULT_POLICY_ID else f"{place}, policy {policy_id!r}"


def _row(
    place: str,
    policy_id: str,
    row: int,
) -> str:
    """Return the place of a row, which counts from 0 here and from 1 in the text."""
    return f"{_place(place, policy_id)}, row {row + 1}"


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more rows)" if count > 1 else ""


def _differences(
    form: Form,
    expected: Form,
    first: str,
) -> Iterator[str]:
    for name in sorted(form.keys() | expected.keys()):
        if form.get(name) != expected.get(name):
            rows = _described(form, name)
            yield f"column {name!r} is {rows}, in {first} {_described(expected, name)}"


def _described(form: Form, name: str) -> str:
    if name not in form:
        return "missing"
    dtype, shape = form[name]
    return f"rows of {shape} {dtype}"


def _checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    """Check each row by itself, and the rows of each episode that are next to each other."""
    # other actions can have densities
    is_discrete = c.ACTIONS in rows and rows[c.ACTIONS].dtype.kind in "iu"
    if ACTION_PROB in rows and _is_numbers(rows[ACTION_PROB]):
        prob = rows[ACTION_PROB]
        is_positive: Array = prob > 0
        if is_discrete:
            is_probability = is_positive & (prob <= np.exp(ROUNDING))
            yield ~is_probability, "action_prob is not in (0, 1]"
        else:
            is_density = is_positive & np.isfinite(prob)
            yield ~is_density, "action_prob is not above 0 and finite"
    if c.ACTION_LOGP in rows and _is_numbers(rows[c.ACTION_LOGP]):
        logp = rows[c.ACTION_LOGP]
        yield ~np.isfinite(logp), "action_logp is not finite"
        if is_discrete:
            fault = "action_logp is above 0, which is impossible for a discrete action"
            yield logp > ROUNDING, fault
    if {c.DONES, c.TERMINATEDS, c.TRUNCATEDS} <= rows.keys():
        ends = rows[c.TERMINATEDS] | rows[c.TRUNCATEDS]
        yield rows[c.DONES] != ends, "dones is not terminateds or truncateds"
    if c.EPS_ID in rows:
        yield from _restart_checks(rows)


def _restart_checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    """Check that no episode ends or begins between rows of the same episode and agent in a
    batch.
    """
    continues = _continues(rows)
    falls = np.zeros(len(continues), np.bool_)
    if c.T in rows:
        t = rows[c.T]
        falls = continues & (t[1:] <= t[:-1])
        # without repeated steps, the rows can be of one episode whose other steps are in other
        # batches
        runs = np.append(0, np.cumsum(~continues))
        for run in np.unique(runs[1:][falls]):
            start, end = np.searchsorted(runs, [run, run + 1])
            if len(np.unique(t[start:end])) == end - start:
                pairs = slice(start, end - 1)
                continues[pairs] &= ~falls[pairs]
                falls[pairs] = False
    if c.DONES in rows:
        is_end = np.append(continues & rows[c.DONES][:-1], False)
        yield is_end, "the episode is done here, but continues in the next row"
    if c.T in rows:
        yield np.append(False, falls), _NOT_THE_NEXT_STEP


def _step_checks(rows: SampleBatch) -> Iterator[tuple[Array, str]]:
    """Check the steps from each row to the next of the same episode and agent, all of whose rows
    are together.
    """
    continues = _continues(rows)
    if c.T in rows:
        differences = np.diff(rows[c.T].astype(np.int64))
        yield np.append(False, continues & (differences > 1)), _NOT_THE_NEXT_STEP
        continues &= differences == 1
    if c.OBS in rows and c.NEW_OBS in rows and rows[c.OBS].shape == rows[c.NEW_OBS].shape:
        following = rows[c.NEW_OBS][:-1]
        obs = rows[c.OBS][1:]
        same = _in_all(following == obs)
        if following.dtype.kind == "f" and not same.all():
            is_close = np.isclose(
                following,
                obs,
                rtol=1e-4,
                atol=1e-5,
                equal_nan=True,
            )
            same = _in_all(is_close)
        yield np.append(False, continues & ~same), "obs is not new_obs of the previous row"


def _continues(rows: SampleBatch) -> Array:
    """Return for each row except the last whether the next one is of the same episode and agent."""
    episodes = rows[c.EPS_ID]
    continues: Array = episodes[1:] == episodes[:-1]
    if c.AGENT_INDEX in rows:
        agents = rows[c.AGENT_INDEX]
        continues &= agents[1:] == agents[:-1]
    return continues


def _in_all(flags: Array) -> Array:
    """Return for each row whether all its flags are set."""
    return np.asarray(flags.all(axis=tuple(range(1, flags.ndim))))


def _is_numbers(column: Array) -> bool:
    return column.ndim == 1 and column.dtype.kind in "iuf"
