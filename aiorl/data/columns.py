"""Names of the columns that flow through aiorl, their shapes, and those of gradients; the default policy.

Conventions: T steps, N environments, B rows. Fragments are time-major ``[T, N, ...]``, batches ``[B, ...]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aiorl.errors import BatchError

DEFAULT_POLICY_ID = "default_policy"
DEFAULT_AGENT_ID = "agent0"

OBS = "obs"
"""Filtered, preprocessed observation the action was chosen at."""
NEW_OBS = "new_obs"
"""Observation that followed; at an episode's end the true final one."""
ACTIONS = "actions"
"""Action chosen, unclipped."""
REWARDS = "rewards"
"""float32 reward of the step."""
SCALED_REWARDS = "scaled_rewards"
"""float32: the reward as it is learned from, where ``normalize_rewards`` is set. What is sent to the learner has it
under the name of REWARDS, unless the sample plan asks for both."""
PREV_ACTIONS = "prev_actions"
PREV_REWARDS = "prev_rewards"
TERMINATEDS = "terminateds"
"""bool: the episode ended in a terminal state; nothing is bootstrapped."""
TRUNCATEDS = "truncateds"
"""bool: the episode was cut from outside (time limit, horizon); the value target bootstraps."""
DONES = "dones"
"""bool: ``terminateds | truncateds``."""
INFOS = "infos"
EPS_ID = "eps_id"
"""int64: constant within an episode, different between episodes of a worker."""
AGENT_INDEX = "agent_index"
T = "t"
"""int32: step within the episode, from 0."""
ACTION_LOGP = "action_logp"
"""float32: log-probability of the action under the behaviour policy."""
ACTION_DIST_INPUTS = "action_dist_inputs"
"""float32 [.., P]: inputs of the behaviour policy's action distribution."""
ACTION_VALUES = "action_values"
"""float32: behaviour policy's value of the action chosen, where it has values of actions. Not sent."""
VF_PREDS = "vf_preds"
"""float32: behaviour policy's value of the observation."""
ADVANTAGES = "advantages"
VALUE_TARGETS = "value_targets"
N_STEP_RETURNS = "n_step_returns"
"""float32: discounted sum of the rewards of this row and those behind it, ``n_steps`` in all."""
DISCOUNTS = "discounts"
"""float32: what the value of the observation behind those steps counts: gamma to the power of ``n_steps``, 0 where
they end in a terminal state."""
N_STEPS = "n_steps"
"""int32: rows whose rewards are summed, at least 1. ``new_obs`` itself is always that of one step."""
PRIORITIES = "priorities"
"""float32: size of the row's TD error as whoever sampled it found it, by which a replay draws it at first."""
BOOTSTRAP_VALUES = "bootstrap_values"
"""float32: behaviour policy's value of the true final observation at truncated rows, else 0."""
VALID = "valid"
"""bool: False where a row is no transition (the call that reset a NEXT_STEP environment). Absent = all True."""
PIECE = "piece"
"""int64: number of the piece of stored experience that the row was read in, the same whoever reads it and whenever; 0
for rows of none."""

LAST_OBS = "last_obs"
"""``[N, ...]``: observation after a fragment's last step."""
FINAL_INDEX = "final_index"
"""int32 ``[K, 2]``: (t, n) of rows whose ``new_obs`` is not the next row's ``obs``."""
FINAL_OBS = "final_obs"
"""``[K, ...]``: the true final observations of those rows."""


def is_of_sequences(name: str) -> bool:
    """Whether a fragment has one entry for each environment or sequence, [N, ...], and not one for each row."""
    return name == LAST_OBS or name.startswith("state_in_")


def state_in(index: int) -> str:
    """Name of the recurrent state component that went into the step."""
    return f"state_in_{index}"


def state_out(index: int) -> str:
    """Name of the recurrent state component that came out of the step."""
    return f"state_out_{index}"


Array = NDArray[Any]
Dtype = Literal["float32", "int32", "uint8"]
Piece = tuple[str, int, Array]
"""Name of an array, number of its first row in this piece of it, and these rows."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of the train batch.

    Attributes:
        name: as in the fragment.
        shape: of one row.
        dtype: as the update gets it; int64 and bool of the fragment become int32 and float32.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: Dtype = "float32"

    @property
    def is_packed(self) -> bool:
        """Return whether it lies in the packed array of `aiorl.learning.algorithms.batch_buffers`."""
        return len(self.shape) <= 1 and self.dtype in ("float32", "int32")

    @property
    def width(self) -> int:
        """Elements of one row."""
        return prod(self.shape)

    def check(self, array: Array, leading: tuple[int, ...]) -> None:
        """Raise BatchError unless an array ``[*leading, *shape]`` can be taken for this column."""
        if array.shape != (*leading, *self.shape):
            raise BatchError(self.name, f"shape {(*leading, *self.shape)}", array.shape)
        if not self._converts(array.dtype):
            raise BatchError(self.name, f"what fits {self.dtype}", array.dtype)

    def _converts(self, given: np.dtype[Any]) -> bool:
        if self.dtype == "float32":
            return given.kind in "fb"
        if self.dtype == "int32":
            return given.kind in "iu"
        return given == np.uint8


GRADIENT_OF = "gradient/"
"""Prefix of the name of a weight: its gradient, float32."""
METRICS = "metrics"
"""Float32 [M], what the loss said of the rows, in the order of the algorithm's metrics; the loss itself is the last."""
NUM_ROWS = "num_rows"
"""Int32 [1], the transitions that it is of."""
CULPRIT = "culprit"
"""Int32 [1], the column of the sample plan that held a number that is not finite, from 1; 0 for none of them."""

_MAX_ROWS = 1 << 24


def is_gradient(columns: Mapping[str, NDArray[Any]]) -> bool:
    """Whether these are the columns of a gradient, not of rows."""
    return NUM_ROWS in columns


def num_rows(columns: Mapping[str, NDArray[Any]]) -> int:
    """The transitions that a gradient is of.

    Raises: BatchError if that is no number from 1 to 2**24.
    """
    found = columns.get(NUM_ROWS)
    if found is None or found.shape != (1,) or found.dtype != np.int32 or not 1 <= found[0] <= _MAX_ROWS:
        raise BatchError(NUM_ROWS, f"int32 [1], from 1 to {_MAX_ROWS}", "none" if found is None else f"{found!r:.100}")
    return int(found[0])


def gradients_in(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Weight name -> its gradient."""
    return {name.removeprefix(GRADIENT_OF): array for name, array in columns.items() if name.startswith(GRADIENT_OF)}
