"""Columns of batches, fragments and gradients: their names, shapes and numbers; the default policy.

Conventions: T steps, N environments, B rows. Fragments are time-major ``[T, N, ...]``, batches
``[B, ...]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aiorl.errors import BatchError
from aiorl.text import shortened

DEFAULT_POLICY_ID = "default_policy"
"""Id of the only policy, unless policies are configured."""
DEFAULT_AGENT_ID = "agent0"
"""Id of the only agent of a single-agent environment."""

OBS = "obs"
"""Filtered, preprocessed observation for which the action was chosen."""
NEW_OBS = "new_obs"
"""Observation after the step; at an episode's end the true final one."""
ACTIONS = "actions"
"""Chosen action, unclipped."""
REWARDS = "rewards"
"""float32 reward of the step."""
SCALED_REWARDS = "scaled_rewards"
"""float32: reward for learning, if ``normalize_rewards`` is set. It is sent to the learner under
the name of REWARDS, unless the sample plan asks for both."""
PREV_ACTIONS = "prev_actions"
"""Action of the step before; zeros at an episode's start."""
PREV_REWARDS = "prev_rewards"
"""float32: reward of the step before; 0 at an episode's start."""
TERMINATEDS = "terminateds"
"""bool: the episode ended in a terminal state; the value target does not bootstrap."""
TRUNCATEDS = "truncateds"
"""bool: the episode was cut from outside (time limit, horizon); the value target bootstraps."""
DONES = "dones"
"""bool: ``terminateds | truncateds``."""
INFOS = "infos"
"""object: info dict of the step. Not sent."""
EPS_ID = "eps_id"
"""int64: constant within an episode, different between episodes of a worker."""
AGENT_INDEX = "agent_index"
"""int64: number of the agent in its episode, in order of appearance, from 0."""
T = "t"
"""int32: step within the episode, from 0."""
ACTION_LOGP = "action_logp"
"""float32: log-probability of the action under the behaviour policy."""
ACTION_DIST_INPUTS = "action_dist_inputs"
"""float32 [.., P]: inputs of the behaviour policy's action distribution."""
ACTION_VALUES = "action_values"
"""float32: behaviour policy's value of the chosen action, if it computes action values. Not
sent."""
VF_PREDS = "vf_preds"
"""float32: behaviour policy's value of the observation."""
ADVANTAGES = "advantages"
"""float32: advantage of the action over the policy's average behaviour."""
VALUE_TARGETS = "value_targets"
"""float32: return that the value function should predict."""
N_STEP_RETURNS = "n_step_returns"
"""float32: discounted sum of the rewards of this row and the following ones, ``n_steps`` in all."""
DISCOUNTS = "discounts"
"""float32: weight of the value after those steps: gamma to the power of ``n_steps``, 0 if they end
in a terminal state."""
N_STEPS = "n_steps"
"""int32: rows whose rewards are summed, at least 1. ``new_obs`` is always the observation after one
step."""
PRIORITIES = "priorities"
"""float32: size of the row's TD error according to its sampler, as the initial priority in a
replay."""
TD_ERROR = "td_error"
"""Figure of an update with rows of a replay: the absolute TD error [B] of each row."""
BATCH_INDEXES = "batch_indexes"
"""int64: the number in its replay of a row that was drawn from there."""
BOOTSTRAP_VALUES = "bootstrap_values"
"""float32: behaviour policy's value of the true final observation at truncated rows, else 0."""
VALID = "valid"
"""bool: False if a row is not a transition (the call that reset a NEXT_STEP environment). Absent =
all True."""
PIECE = "piece"
"""int64: number of the piece of stored experience from which the row was read, the same for all
readers and passes; 0 for other rows."""

LAST_OBS = "last_obs"
"""``[N, ...]``: observation after a fragment's last step."""
FINAL_INDEX = "final_index"
"""int32 ``[K, 2]``: (t, n) of rows whose ``new_obs`` is not the next row's ``obs``."""
FINAL_OBS = "final_obs"
"""``[K, ...]``: the true final observations of those rows."""


def is_of_sequences(name: str) -> bool:
    """Return whether a column has one entry for each environment or sequence, [N, ...], not for
    each row.
    """
    return name == LAST_OBS or name.startswith("state_in_")


def state_in(index: int) -> str:
    """Return the name of the recurrent state component before the step."""
    return f"state_in_{index}"


def state_out(index: int) -> str:
    """Return the name of the recurrent state component after the step."""
    return f"state_out_{index}"


Array = NDArray[Any]
"""Column of any dtype and shape."""
Columns = Mapping[str, Array]
"""Columns, or other arrays of a fragment or batch, by name."""
Bools = NDArray[np.bool_]
"""Flags of any shape."""
I32 = NDArray[np.int32]
"""Whole numbers of any shape, for TensorFlow."""
F32 = NDArray[np.float32]
"""Numbers of any shape for networks."""
F64 = NDArray[np.float64]
"""Numbers of any shape that are summed over many rows."""
I64 = NDArray[np.int64]
"""Indices or whole numbers of any shape."""
NUMBER_KINDS = frozenset("biuf")
"""Kinds of NumPy's dtypes that are numbers: truth values, integers and floats."""
Dtype = Literal["float32", "int32", "uint8"]
"""Dtype of a column in an update."""
Piece = tuple[str, int, Array]
"""Name of an array, index of the first row in a piece of it, and the rows of the piece."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Column of the train batch.

    Attributes:
        name: name in the fragment.
        shape: shape of one row.
        dtype: dtype for the update; int64 and bool of the fragment become int32 and float32.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: Dtype = "float32"

    @property
    def is_packed(self) -> bool:
        """True if it is part of the packed array of `aiorl.learning.batch_buffers`."""
        return len(self.shape) <= 1 and self.dtype in ("float32", "int32")

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape)

    def check(self, array: Array, leading: tuple[int, ...]) -> None:
        """Raise BatchError unless an array ``[*leading, *shape]`` can be used for this column."""
        if array.shape != (*leading, *self.shape):
            raise BatchError(
                self.name,
                f"shape {(*leading, *self.shape)}",
                array.shape,
            )
        if not self._converts(array.dtype):
            raise BatchError(
                self.name,
                f"a dtype that fits {self.dtype}",
                array.dtype,
            )

    def _converts(self, dtype: np.dtype[Any]) -> bool:
        if self.dtype == "float32":
            return dtype.kind in "fb"
        if self.dtype == "int32":
            return dtype.kind in "iu"
        return dtype == np.uint8


GRADIENT_OF = "gradient/"
"""Prefix of a weight's name for its gradient, float32."""
METRICS = "metrics"
"""float32 [M], metrics of the loss over the rows, in the order of the algorithm's metrics; the loss
itself is last."""
NUM_ROWS = "num_rows"
"""int32 [1], number of transitions in the gradient."""
CULPRIT = "culprit"
"""int32 [1], column of the sample plan that held a number that is not finite, counted from 1; 0 if
there was none."""

_MAX_ROWS = 1 << 24


def is_gradient(columns: Columns) -> bool:
    """Return whether the columns are those of a gradient, not of rows."""
    return NUM_ROWS in columns


def num_rows(columns: Columns) -> int:
    """Return the number of transitions in a gradient.

    Raises:
        BatchError: it is not from 1 to 2**24.
    """
    rows = columns.get(NUM_ROWS)
    is_number = rows is not None and rows.shape == (1,) and rows.dtype == np.int32
    if rows is None or not is_number or not 1 <= rows[0] <= _MAX_ROWS:
        description = "none" if rows is None else f"{rows!r:.100}"
        raise BatchError(
            NUM_ROWS,
            f"int32 [1], from 1 to {_MAX_ROWS}",
            description,
        )
    return int(rows[0])


def gradients_in(columns: Columns) -> dict[str, F32]:
    """Return weight name -> its gradient."""
    return {
        name.removeprefix(GRADIENT_OF): array
        for name, array in columns.items()
        if name.startswith(GRADIENT_OF)
    }


_FEW = 16
"""Number of values up to which Python checks them faster than NumPy."""


def all_finite(numbers: Array) -> bool:
    """Return whether all floats of an array are finite."""
    size = numbers.size
    if size <= _FEW and numbers.itemsize <= 8 and math.isfinite(sum(numbers.ravel().tolist())):
        return True  # otherwise there is a NaN or an infinity, or the sum has overflowed
    num_finite = int(np.count_nonzero(np.isfinite(numbers)))
    return num_finite == size


def first_not_finite(columns: Columns) -> str:
    """Return the first column of floats with a NaN or an infinity; "" if there is none."""
    for name, array in columns.items():
        if array.dtype.kind == "f" and not all_finite(array):
            return name
    return ""


def described_value(value: Any) -> str:
    """Return a value that is no array of numbers as text for messages, with its type."""
    return f"{shortened(repr(value), 100)} ({type(value).__name__})"
