"""Fragment: the result of one sampler's turn, as preallocated time-major columns.

A fragment covers T consecutive steps of N environments stepped in lockstep. Every column is ``[T,
N, ...]``. Arrays of other shapes (the observation after the last step, true final observations of
episodes that were reset inside a step, recurrent states at the first step) are kept next to the
columns as *extras*, so that no observation is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import Array, Bools, Columns, ColumnSpec, all_finite
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError


class PolicyGraph(TypedDict):
    """Exported acting graph and its description.

    Attributes:
        graph: the graph, as bytes of ONNX or TensorFlow.
        spec: its description, see `aiorl.acting.acting_graph.ActingSpec.to_dict`.
    """

    graph: bytes
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Columns and postprocessing that a worker applies to each fragment.

    Attributes:
        postprocess: name in aiorl.acting.postprocess.POSTPROCESSORS.
        postprocess_params: its keyword arguments.
        columns: names of the arrays to send, from `aiorl.data.columns`: columns [T, N, ...], and
            arrays [N, ...] with one entry for each environment or sequence, such as last_obs and
            state_in_0. VALID is added if some rows are not transitions. new_obs can be replaced by
            the arrays it can be rebuilt from, see `new_obs`.
        state_every: distance of the rows whose recurrent states are sent, starting with a
            sequence's first row: ``state_in_i`` is [N, C, H], C = T / state_every rounded up. 0 =
            only the first row, [N, H]. Complete episodes in lockstep have only the first states.
        raw_obs: True if rows hold observations before the filter, whose statistics are sent along:
            the policy filters them when it acts, and the learner when it trains.
        return_discount: discount of the return whose running deviation divides the rewards for
            learning; None = rewards are not scaled.
    """

    postprocess: str = "none"
    postprocess_params: Mapping[str, float] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    state_every: int = 0
    raw_obs: bool = False
    return_discount: float | None = None

    @property
    def of_rows(self) -> tuple[str, ...]:
        """Columns with an entry for each row."""
        return tuple(name for name in self.columns if not c.is_of_sequences(name))

    @property
    def of_sequences(self) -> tuple[str, ...]:
        """Columns with an entry for each environment or sequence."""
        return tuple(filter(c.is_of_sequences, self.columns))

    def policy_settings(self) -> dict[str, Any]:
        """Return the plan's settings for the acting policy, see `GraphPolicy`."""
        return {
            "postprocess": self.postprocess,
            "postprocess_params": dict(self.postprocess_params),
            "bootstrap_values": c.BOOTSTRAP_VALUES in self.columns,
            "raw_obs": self.raw_obs,
            "return_discount": self.return_discount,
        }


class Fragment:
    """T steps of N environments as columns.

    Attributes:
        columns: name -> ``[T, N, ...]`` array.
        extras: name -> array of another shape: ``last_obs`` [N, ...], ``final_index`` [K, 2] and
            ``final_obs`` [K, ...], ``state_in_<i>`` [N, H].
    """

    __slots__ = ("columns", "extras")

    def __init__(
        self,
        columns: Columns,
        extras: Columns | None = None,
    ) -> None:
        """Store the arrays without copying them.

        Args:
            columns: name -> column ``[T, N, ...]``.
            extras: name -> array of another shape, see above.

        Raises:
            BatchError: there are no columns, or their leading ``[T, N]`` dimensions differ.
        """
        self.columns = dict(columns)
        self.extras = dict(extras or {})
        if not self.columns:
            raise BatchError("fragment", "at least one column", "none")
        leading = self._any_column.shape[:2]
        for name, column in self.columns.items():
            if column.ndim < 2 or column.shape[:2] != leading:
                raise BatchError(
                    name,
                    f"leading dimensions {leading}",
                    f"shape {column.shape}",
                )

    @property
    def _any_column(self) -> Array:
        """Column for the dimensions that all have."""
        return next(iter(self.columns.values()))

    @property
    def length(self) -> int:
        """Number of steps T."""
        return int(self._any_column.shape[0])

    @property
    def num_envs(self) -> int:
        """Number of environments N."""
        return int(self._any_column.shape[1])

    @property
    def env_steps(self) -> int:
        """Number of transitions: rows that are not ``valid == False``."""
        valid = self.columns.get(c.VALID)
        if valid is None:
            return self.length * self.num_envs
        return int(np.count_nonzero(valid))

    def new_obs(self) -> Array:
        """Return the observation after each row, ``[T, N, ...]``; see `new_obs`."""
        return new_obs({**self.columns, **self.extras})

    def training_arrays(self) -> dict[str, Array]:
        """Return what to learn from: the columns ``[T, N, ...]`` and the extras, with
        SCALED_REWARDS, if there are any, as REWARDS.
        """
        arrays = {**self.columns, **self.extras}
        if c.SCALED_REWARDS in arrays:
            arrays[c.REWARDS] = arrays.pop(c.SCALED_REWARDS)
        return arrays

    def to_sample_batch(self) -> SampleBatch:
        """Return rows ``[B, ...]``, environment after environment, without the rows that are not
        transitions.

        Adds ``new_obs`` if it can be rebuilt, and ``dones`` if there are both flags.
        """
        columns = dict(self.columns)
        valid = columns.pop(c.VALID, None)
        if c.OBS in columns and c.LAST_OBS in self.extras:
            columns[c.NEW_OBS] = self.new_obs()
        if c.TERMINATEDS in columns and c.TRUNCATEDS in columns:
            columns[c.DONES] = columns[c.TERMINATEDS] | columns[c.TRUNCATEDS]
        rows = {name: _env_major(column) for name, column in columns.items()}
        if valid is not None:
            is_transition = _env_major(valid)
            rows = {name: column[is_transition] for name, column in rows.items()}
        return SampleBatch(rows)

    def __repr__(self) -> str:
        return f"Fragment(T={self.length}, N={self.num_envs}, columns={sorted(self.columns)})"


def new_obs(arrays: Columns) -> Array:
    """Return the observation after each row of a fragment, ``[T, N, ...]``, in whatever form it is
    stored.

    It is either a column of its own, or the next row's observation (LAST_OBS after the last row),
    except for the rows in FINAL_INDEX, which have theirs in FINAL_OBS.

    Raises:
        BatchError: it is stored in neither form, or the arrays don't fit together.
    """
    if c.NEW_OBS in arrays:
        return arrays[c.NEW_OBS]
    check_new_obs(arrays)
    obs = arrays[c.OBS]
    last_obs = arrays[c.LAST_OBS]
    following = np.concatenate([obs[1:], last_obs[None]])
    if c.FINAL_INDEX in arrays:
        steps_and_envs = tuple(arrays[c.FINAL_INDEX].T)
        following[steps_and_envs] = arrays[c.FINAL_OBS]
    return following


def check_new_obs(arrays: Columns) -> None:
    """Raise if `new_obs` can't be rebuilt from a fragment's arrays.

    Raises:
        BatchError: an array is missing or does not fit.
    """
    obs = arrays.get(c.OBS)
    if obs is None or c.LAST_OBS not in arrays:
        expected = f"itself, or {c.OBS!r} and {c.LAST_OBS!r}, in the fragment"
        raise BatchError(c.NEW_OBS, expected, sorted(arrays))
    obs_shape = obs.shape[2:]
    _check_array(arrays, c.LAST_OBS, obs.shape[1:], obs.dtype)
    index = arrays.get(c.FINAL_INDEX)
    if index is None and c.FINAL_OBS not in arrays:
        return
    rows = len(index) if index is not None and index.ndim else 0
    _check_array(
        arrays,
        c.FINAL_INDEX,
        (rows, 2),
        np.dtype(np.int32),
    )
    _check_array(
        arrays,
        c.FINAL_OBS,
        (rows, *obs_shape),
        obs.dtype,
    )
    _check_index(arrays[c.FINAL_INDEX], obs.shape[:2])


def _check_array(
    arrays: Columns,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> None:
    """Raise BatchError unless the array of a name has this shape and dtype."""
    array = arrays.get(name)
    if array is None:
        raise BatchError(name, f"{dtype} {shape}", "none")
    if array.shape != shape or array.dtype != dtype:
        raise BatchError(
            name,
            f"{dtype} {shape}",
            f"{array.dtype} {array.shape}",
        )


def _check_index(index: Array, leading: tuple[int, ...]) -> None:
    """Raise BatchError unless an index [K, 2] names rows of [T, N], none of them twice."""
    steps, envs = leading
    if ((index < 0) | (index >= leading)).any():
        raise BatchError(
            c.FINAL_INDEX,
            f"rows of [{steps}, {envs}, ...]",
            "others",
        )
    rows = np.ravel_multi_index(tuple(index.T), leading)
    if len(np.unique(rows)) != len(index):
        raise BatchError(c.FINAL_INDEX, "each row once", "some twice")


def _env_major(column: Array) -> Array:
    return column.swapaxes(0, 1).reshape(-1, *column.shape[2:])


def continues_stack(
    before: Array,
    after: Array,
    count: int,
    scratch: Bools | None = None,
) -> Bools:
    """Return whether each stack of frames continues the stack before it: all frames but the oldest
    repeated, [N].

    Args:
        before: [N, P * K], N stacks of K frames of P numbers, with the frames of a number side by
            side, oldest first.
        after: [N, P * K], the next stack of each.
        count: K.
        scratch: [N, P * K - 1], reused memory.
    """
    # The next frame of a pixel is its next byte, so a row is compared with the previous row shifted
    # by a byte. Comparisons at a pixel's newest frame compare two different pixels and are ignored.
    same = np.equal(before[:, 1:], after[:, :-1], out=scratch)
    same[:, count - 1 :: count] = True
    is_next: Bools = np.logical_and.reduce(same, axis=1)
    return is_next


def check_fragment(
    columns: Iterable[ColumnSpec],
    arrays: Columns,
    *,
    is_finite: bool = True,
) -> tuple[int, int]:
    """Refuse a fragment whose rows can't be used. Safe in any thread.

    Args:
        columns: columns of rows, or of sequences according to their names; other columns of the
            fragment are ignored.
        arrays: arrays of the fragment by name.
        is_finite: refuse numbers that are not finite or too large.

    Returns:
        T and N.

    Raises:
        BatchError: a column is missing, has another shape or dtype, or holds numbers that are
            refused.
    """
    columns = [column for column in columns if column.name != c.VALID]
    first = next(
        (arrays[column.name] for column in columns if column.name in arrays),
        None,
    )
    if first is None or first.ndim < 2 or not all(first.shape[:2]):
        description = "none" if first is None else f"shape {first.shape}"
        raise BatchError(
            columns[0].name,
            "a column [T, N, ...] of at least one row",
            description,
        )
    leading = first.shape[:2]
    for column in columns:
        sources = _sources_of(column, arrays)
        name = sources[0].name
        if name not in arrays:
            raise BatchError(
                name,
                "in every fragment",
                f"only {sorted(arrays)!r:.500}",
            )
        has_sequences = c.is_of_sequences(name)
        sources[0].check(arrays[name], leading[1:] if has_sequences else leading)
        if is_finite:
            for source in sources:
                check_numbers(source, arrays[source.name])
    valid = arrays.get(c.VALID)
    if valid is not None and (valid.shape != leading or valid.dtype != np.bool_):
        raise BatchError(
            c.VALID,
            f"bool {leading}",
            f"{valid.dtype} {valid.shape}",
        )
    if c.N_STEPS in arrays:
        check_n_steps(arrays[c.N_STEPS], leading)
    return leading[0], leading[1]


def _sources_of(column: ColumnSpec, arrays: Columns) -> list[ColumnSpec]:
    """Return the columns of the fragment that hold a column: itself, or what new_obs is made of."""
    if column.name != c.NEW_OBS or c.NEW_OBS in arrays:
        return [column]
    check_new_obs(arrays)
    names = [name for name in (c.OBS, c.LAST_OBS, c.FINAL_OBS) if name in arrays]
    return [ColumnSpec(name, column.shape, column.dtype) for name in names]


def refuse_others(arrays: Columns, names: Iterable[str]) -> None:
    """Refuse a fragment with other columns than these and those that mark the valid rows and the
    next observations.

    Raises:
        BatchError: there are other columns.
    """
    allowed = {*names, c.VALID, c.LAST_OBS, c.FINAL_INDEX, c.FINAL_OBS}
    unknown = sorted(arrays.keys() - allowed)
    if unknown:
        expected = f"no other columns than {', '.join(sorted(allowed))}"
        raise BatchError("batches", expected, f"{unknown[0]!r:.100}")


def check_numbers(column: ColumnSpec, array: Array) -> None:
    """Refuse numbers that are not finite, or too large for a column.

    Raises:
        BatchError: there are some.
    """
    if array.dtype.kind == "f":
        if not all_finite(array):
            raise BatchError(
                column.name,
                "finite numbers",
                "a NaN or an infinity",
            )
        is_wide = array.dtype.itemsize > 4
        if is_wide and (np.abs(array) > np.finfo(np.float32).max).any():
            raise BatchError(
                column.name,
                "numbers of float32",
                "larger ones",
            )
    elif column.dtype == "int32" and array.size and array.dtype != np.int32:
        bounds = np.iinfo(np.int32)
        smallest = array.min()
        largest = array.max()
        if smallest < bounds.min or largest > bounds.max:
            raise BatchError(
                column.name,
                "numbers of int32",
                f"{smallest} to {largest}",
            )


def check_n_steps(steps: Array, shape: tuple[int, ...]) -> None:
    """Raise BatchError unless each row [T, N] has 1 to T - t steps, so that they end within the
    fragment.
    """
    if steps.shape != shape or steps.dtype.kind not in "iu":
        raise BatchError(
            c.N_STEPS,
            f"integers {shape}",
            f"{steps.dtype} {steps.shape}",
        )
    most = np.arange(shape[0], 0, -1)[:, None]
    if ((steps < 1) | (steps > most)).any():
        expected = "steps that end within the fragment"
        raise BatchError(
            c.N_STEPS,
            expected,
            f"{steps.min()} to {steps.max()} of {shape}",
        )
