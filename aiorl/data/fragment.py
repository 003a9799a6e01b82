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
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.arrays import all_finite
from aiorl.data.columns import BOOTSTRAP_VALUES, ColumnSpec, is_of_sequences
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
        return tuple(name for name in self.columns if not is_of_sequences(name))

    @property
    def of_sequences(self) -> tuple[str, ...]:
        """Columns with an entry for each environment or sequence."""
        return tuple(filter(is_of_sequences, self.columns))

    def policy_settings(self) -> dict[str, Any]:
        """Return the plan's settings for the acting policy, see `GraphPolicy`."""
        return {
            "postprocess": self.postprocess,
            "postprocess_params": dict(self.postprocess_params),
            "bootstrap_values": BOOTSTRAP_VALUES in self.columns,
            "raw_obs": self.raw_obs,
            "return_discount": self.return_discount,
        }


Array = NDArray[Any]


class Fragment:
    """T steps of N environments as columns.

    Attributes:
        columns: name -> ``[T, N, ...]`` array.
        extras: name -> array of another shape: ``last_obs`` [N, ...], ``final_index`` [K, 2] and
            ``final_obs`` [K, ...], ``state_in_<i>`` [N, H].
    """

    __slots__ = ("columns", "extras")

    def __init__(
        self, columns: Mapping[str, Array], extras: Mapping[str, Array] | None = None
    ) -> None:
        """Store the arrays without copying them.

        Args:
            columns: name -> column ``[T, N, ...]``.
            extras: name -> array of another shape, see above.

        Raises:
            BatchError: there are no columns, or their leading ``[T, N]`` dimensions differ.
        """
        self.columns: dict[str, Array] = dict(columns)
        self.extras: dict[str, Array] = dict(extras or {})
        if not self.columns:
            raise BatchError("fragment", "at least one column", "none")
        shape: tuple[int, ...] | None = None
        for name, column in self.columns.items():
            if shape is None:
                shape = column.shape[:2]
            if column.ndim < 2 or column.shape[:2] != shape:
                raise BatchError(name, f"leading dimensions {shape}", f"shape {column.shape}")

    @property
    def length(self) -> int:
        """Number of steps T."""
        return int(next(iter(self.columns.values())).shape[0])

    @property
    def num_envs(self) -> int:
        """Number of environments N."""
        return int(next(iter(self.columns.values())).shape[1])

    @property
    def env_steps(self) -> int:
        """Number of transitions: rows that are not ``valid == False``."""
        valid = self.columns.get(c.VALID)
        return self.length * self.num_envs if valid is None else int(np.count_nonzero(valid))

    def new_obs(self) -> Array:
        """Return the observation after each row, ``[T, N, ...]``; see `new_obs`."""
        return new_obs({**self.columns, **self.extras})

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
            keep = _env_major(valid)
            rows = {name: column[keep] for name, column in rows.items()}
        return SampleBatch(rows)

    def __repr__(self) -> str:
        return f"Fragment(T={self.length}, N={self.num_envs}, columns={sorted(self.columns)})"


def new_obs(arrays: Mapping[str, Array]) -> Array:
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
    following = np.concatenate([arrays[c.OBS][1:], arrays[c.LAST_OBS][None]])
    if c.FINAL_INDEX in arrays:
        following[tuple(arrays[c.FINAL_INDEX].T)] = arrays[c.FINAL_OBS]
    return following


def check_new_obs(arrays: Mapping[str, Array]) -> None:
    """Raise if `new_obs` can't be rebuilt from a fragment's arrays.

    Raises:
        BatchError: an array is missing or does not fit.
    """
    obs = arrays.get(c.OBS)
    if obs is None or c.LAST_OBS not in arrays:
        raise BatchError(
            c.NEW_OBS, f"itself, or {c.OBS!r} and {c.LAST_OBS!r}, in the fragment", sorted(arrays)
        )
    wanted = [(c.LAST_OBS, obs.shape[1:], obs.dtype)]
    index = arrays.get(c.FINAL_INDEX)
    if index is not None or c.FINAL_OBS in arrays:
        rows = len(index) if index is not None and index.ndim else 0
        wanted += [
            (c.FINAL_INDEX, (rows, 2), np.dtype(np.int32)),
            (c.FINAL_OBS, (rows, *obs.shape[2:]), obs.dtype),
        ]
    for name, shape, dtype in wanted:
        found = arrays.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            raise BatchError(
                name,
                f"{dtype} {shape}",
                "none" if found is None else f"{found.dtype} {found.shape}",
            )
    if index is None:
        return
    if ((index < 0) | (index >= obs.shape[:2])).any():
        raise BatchError(c.FINAL_INDEX, f"rows of [{obs.shape[0]}, {obs.shape[1]}, ...]", "others")
    if len(np.unique(np.ravel_multi_index(tuple(index.T), obs.shape[:2]))) != len(index):
        raise BatchError(c.FINAL_INDEX, "each row once", "some twice")


def _env_major(column: Array) -> Array:
    return column.swapaxes(0, 1).reshape(-1, *column.shape[2:])


def goes_on(
    before: NDArray[Any], after: NDArray[Any], count: int, scratch: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
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
    is_next: NDArray[np.bool_] = np.logical_and.reduce(same, axis=1)
    return is_next


def check_fragment(
    columns: Iterable[ColumnSpec], arrays: Mapping[str, Array], *, is_finite: bool = True
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
    first = next((arrays[column.name] for column in columns if column.name in arrays), None)
    if first is None or first.ndim < 2 or not all(first.shape[:2]):
        found = "none" if first is None else f"shape {first.shape}"
        raise BatchError(columns[0].name, "a column [T, N, ...] of at least one row", found)
    shape = first.shape[:2]
    for column in columns:
        parts = [column]
        if column.name == c.NEW_OBS and c.NEW_OBS not in arrays:
            check_new_obs(arrays)  # it is rebuilt when it is needed
            names = [name for name in (c.OBS, c.LAST_OBS, c.FINAL_OBS) if name in arrays]
            parts = [ColumnSpec(name, column.shape, column.dtype) for name in names]
            column = parts[0]
        if column.name not in arrays:
            raise BatchError(column.name, "in every fragment", f"only {sorted(arrays)!r:.500}")
        column.check(arrays[column.name], shape[1:] if c.is_of_sequences(column.name) else shape)
        if is_finite:
            for part in parts:
                check_numbers(part, arrays[part.name])
    valid = arrays.get(c.VALID)
    if valid is not None and (valid.shape != shape or valid.dtype != np.bool_):
        raise BatchError(c.VALID, f"bool {shape}", f"{valid.dtype} {valid.shape}")
    if c.N_STEPS in arrays:
        check_n_steps(arrays[c.N_STEPS], shape)
    return shape[0], shape[1]


def refuse_others(arrays: Mapping[str, Array], names: Iterable[str]) -> None:
    """Refuse a fragment with other columns than these and those that mark the valid rows and the
    next observations.

    Raises:
        BatchError: there are other columns.
    """
    known = {*names, c.VALID, c.LAST_OBS, c.FINAL_INDEX, c.FINAL_OBS}
    if unknown := sorted(arrays.keys() - known):
        raise BatchError(
            "batches", f"no other columns than {', '.join(sorted(known))}", f"{unknown[0]!r:.100}"
        )


def check_numbers(column: ColumnSpec, array: Array) -> None:
    """Refuse numbers that are not finite, or too large for a column.

    Raises:
        BatchError: there are some.
    """
    if array.dtype.kind == "f":
        if not all_finite(array):
            raise BatchError(column.name, "finite numbers", "a NaN or an infinity")
        if array.dtype.itemsize > 4 and (np.abs(array) > np.finfo(np.float32).max).any():
            raise BatchError(column.name, "numbers of float32", "larger ones")
    elif column.dtype == "int32" and array.size and array.dtype != np.int32:
        bounds = np.iinfo(np.int32)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise BatchError(column.name, "numbers of int32", f"{array.min()} to {array.max()}")


def check_n_steps(steps: Array, shape: tuple[int, ...]) -> None:
    """Raise BatchError unless each row [T, N] has 1 to T - t steps, so that they end within the
    fragment.
    """
    if steps.shape != shape or steps.dtype.kind not in "iu":
        raise BatchError(c.N_STEPS, f"integers {shape}", f"{steps.dtype} {steps.shape}")
    most = np.arange(shape[0], 0, -1)[:, None]
    if ((steps < 1) | (steps > most)).any():
        raise BatchError(
            c.N_STEPS,
            "steps that end within the fragment",
            f"{steps.min()} to {steps.max()} of {shape}",
        )
