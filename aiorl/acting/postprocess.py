"""Advantages, value targets, n-step returns and first priorities, computed on the worker from a
fragment's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.data import columns as c
from aiorl.data.columns import F32, F64, I64, Array, Bools
from aiorl.data.fragment import check_n_steps, new_obs
from aiorl.errors import BatchError

_BLOCK_ROWS = 1 << 15  # in all environments of a block: their temporaries stay in the cache


def gae(
    rewards: F32,
    vf_preds: F32,
    bootstrap: F32,
    terminateds: Bools,
    truncateds: Bools,
    truncation_values: F32 | None = None,
    *,
    gamma: float,
    lam: float,
    valid: Bools | None = None,
) -> tuple[F32, F32]:
    """Return generalised advantage estimates, and the corresponding value targets.

    Let V' be the value after the step: 0 after a termination, the value of the true final
    observation after a truncation, else the value of the next row. Then ``delta_t = r_t + gamma
    V'_t - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where the second term is left out at the
    end of an episode. ``value_targets = A + V``. `lam` = 0 gives one-step targets, `lam` = 1
    discounted returns. A row that is both terminated and truncated counts as terminated.

    Args:
        rewards: [T, N] float32.
        vf_preds: [T, N] float32, V_t.
        bootstrap: [N] float32, value of the observation after the last row; ignored if that row
            ended an episode.
        terminateds: [T, N] bool.
        truncateds: [T, N] bool.
        truncation_values: [T, N] float32, value of the true final observation at truncated rows,
            ignored elsewhere; None = no row is truncated, or none has a value.
        gamma: discount per step.
        lam: decay of the estimator.
        valid: [T, N] bool, False where a row is no transition: its advantage is 0 and its target
            V_t.

    Returns:
        Advantages and value_targets, both float32 [T, N]. They are computed in float64, and the
        numbers of one environment don't depend on the number of other environments.

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.
    """
    shape = rewards.shape
    advantages = np.empty(shape, np.float32)
    targets = np.empty(shape, np.float32)
    block = max(1, _BLOCK_ROWS // shape[0])
    for first in range(0, shape[1], block):
        envs = slice(first, first + block)
        values = vf_preds[:, envs].astype(np.float64)
        following = _following_values(
            values,
            bootstrap=bootstrap[envs],
            terminateds=terminateds[:, envs],
            truncateds=truncateds[:, envs],
            truncation_values=None if truncation_values is None else truncation_values[:, envs],
        )
        following *= gamma
        following += rewards[:, envs]
        deltas = np.subtract(following, values, out=following)
        is_end = terminateds[:, envs] | truncateds[:, envs]
        decay = np.where(is_end, 0.0, gamma * lam)
        if valid is not None:
            no_transition = ~valid[:, envs]
            deltas[no_transition] = 0.0
            decay[no_transition] = 0.0
        sums = discounted_sums(deltas, decay)
        advantages[:, envs] = sums
        values += sums
        targets[:, envs] = values
    return advantages, targets


def _following_values(
    values: F64,
    bootstrap: F32,
    terminateds: Bools,
    truncateds: Bools,
    truncation_values: F32 | None,
) -> F64:
    """Return V' of each row: the value after the step."""
    following = np.empty_like(values)
    following[:-1] = values[1:]
    following[-1:] = bootstrap
    if truncation_values is None:
        following[truncateds] = 0.0
    else:
        np.copyto(following, truncation_values, where=truncateds)
    following[terminateds] = 0.0
    return following


def returns(
    rewards: F32,
    terminateds: Bools,
    truncateds: Bools,
    *,
    gamma: float,
    valid: Bools | None = None,
) -> dict[str, Array]:
    """Return ADVANTAGES [T, N]: discounted sums of the rewards from each row to the end of its
    episode or fragment.

    This is `gae` without values; see there for arguments.
    """
    no_values = np.zeros_like(rewards)
    sums, _ = gae(
        rewards,
        vf_preds=no_values,
        bootstrap=no_values[0],
        terminateds=terminateds,
        truncateds=truncateds,
        gamma=gamma,
        lam=1.0,
        valid=valid,
    )
    return {c.ADVANTAGES: sums}


def n_step_columns(**arguments: Any) -> dict[str, Array]:
    """Return N_STEP_RETURNS, DISCOUNTS and N_STEPS [T, N] of up to n steps; see `n_step`."""
    targets = n_step(**arguments)
    return {
        c.N_STEP_RETURNS: targets.returns,
        c.DISCOUNTS: targets.discounts,
        c.N_STEPS: targets.steps,
    }


def n_step_priorities(
    rewards: F32,
    vf_preds: F32,
    bootstrap: F32,
    terminateds: Bools,
    truncateds: Bools,
    truncation_values: F32 | None = None,
    *,
    action_values: F32,
    gamma: float,
    n: float,
    valid: Bools | None = None,
) -> dict[str, Array]:
    """Return the columns of `n_step_columns`, and PRIORITIES [T, N]: the size of each row's TD
    error at the sampler.

    It is ``|returns + discounts V' - Q|``. V' is the largest value of an action at the observation
    after the row's steps, and Q the value of the action taken, both from the network that acted.
    Rows that are no transition get 0.

    Args:
        rewards: [T, N] float32.
        vf_preds: [T, N] float32, largest value of an action at each row's observation.
        bootstrap: [N] float32, the same at the observation after the last row.
        terminateds: [T, N] bool.
        truncateds: [T, N] bool.
        truncation_values: [T, N] float32, the same at the true final observation of truncated rows;
            see `gae`.
        action_values: [T, N] float32, Q.
        gamma: discount per step.
        n: largest number of steps, at least 1.
        valid: [T, N] bool, False where a row is no transition; None = all are transitions.

    Source: Horgan et al. 2018, https://arxiv.org/abs/1803.00933, section 3 and algorithm 1.
    """
    columns = n_step_columns(
        rewards=rewards,
        terminateds=terminateds,
        truncateds=truncateds,
        gamma=gamma,
        n=n,
        valid=valid,
    )
    following = _following_values(
        vf_preds.astype(np.float64),
        bootstrap=bootstrap,
        terminateds=terminateds,
        truncateds=truncateds,
        truncation_values=truncation_values,
    )
    following[following <= MASKED_LOGIT] = 0.0  # after a truncation there may be no legal action
    last_values = np.take_along_axis(following, last_rows(columns[c.N_STEPS]), axis=0)
    targets = columns[c.N_STEP_RETURNS] + columns[c.DISCOUNTS] * last_values
    priorities = np.abs(targets - action_values)
    priorities[action_values <= MASKED_LOGIT] = 0.0  # actions of other policies may be illegal
    if valid is not None:
        priorities[~valid] = 0.0
    return {**columns, c.PRIORITIES: priorities.astype(np.float32)}


def gae_columns(**arguments: Any) -> dict[str, Array]:
    """Return ADVANTAGES and VALUE_TARGETS [T, N]; see `gae`."""
    advantages, value_targets = gae(**arguments)
    return {c.ADVANTAGES: advantages, c.VALUE_TARGETS: value_targets}


POSTPROCESSORS: dict[str, Callable[..., dict[str, Array]]] = {
    "gae": gae_columns,
    "n_step": n_step_columns,
    "n_step_priorities": n_step_priorities,
    "none": lambda **arguments: {},  # the learner computes the targets, for example for V-trace
    "returns": returns,
}
"""Postprocessors by the name in an algorithm's settings.

Each returns columns [T, N] by name. Its keyword arguments are rewards, terminateds, truncateds,
valid and the settings. If it needs values, it also gets vf_preds, bootstrap and truncation_values;
if it needs values of actions, also action_values [T, N]. See `gae` for their meaning. """
NEED_VALUES = frozenset({"gae", "n_step_priorities"})
NEED_ACTION_VALUES = frozenset({"n_step_priorities"})
"""Postprocessors that need the policy's values, and those that need the values of the actions
taken."""


def postprocessed(
    name: str, columns: Mapping[str, Any], settings: Mapping[str, Any], bootstrap: F32 | None = None
) -> dict[str, Array]:
    """Return the columns [T, N] that a postprocessor computes, by name.

    Args:
        name: name in POSTPROCESSORS.
        columns: rewards and flags, [T, N] each; values, bootstrap values of truncated rows, and
            values of actions if the postprocessor needs them; a column of valid rows unless all are
            transitions; and, optionally, scaled rewards, which replace the others.
        settings: settings of the postprocessor, for example gamma and lam.
        bootstrap: [N], values after the last rows; None = all of these rows ended an episode.
    """
    rewards = columns.get(c.SCALED_REWARDS, columns[c.REWARDS])
    values: dict[str, Any] = {}
    if name in NEED_VALUES:
        if bootstrap is None:
            bootstrap = np.zeros(rewards.shape[1:], np.float32)
        values = {
            "vf_preds": columns[c.VF_PREDS],
            "bootstrap": bootstrap,
            "truncation_values": columns.get(c.BOOTSTRAP_VALUES),
        }
    if name in NEED_ACTION_VALUES:
        values["action_values"] = columns[c.ACTION_VALUES]
    return POSTPROCESSORS[name](
        rewards=rewards,
        terminateds=columns[c.TERMINATEDS],
        truncateds=columns[c.TRUNCATEDS],
        valid=columns.get(c.VALID),
        **values,
        **settings,
    )


class NStep(NamedTuple):
    """Targets of value-based algorithms:

    ``returns + discounts V(observation after these steps)``.
    """

    returns: F32
    discounts: F32
    steps: NDArray[np.int32]


def n_step(
    rewards: F32,
    terminateds: Bools,
    truncateds: Bools,
    *,
    gamma: float,
    n: float,
    valid: Bools | None = None,
) -> NStep:
    """Return rewards of up to n steps, and the discounts for bootstrapping.

    Row t takes k steps: n, or fewer if its episode, the fragment or a run of transitions ends
    earlier. ``returns_t = sum of gamma^i r_{t+i}`` over i < k, and ``discounts_t = gamma^k``, or 0
    if the last of these steps terminated. A truncation bootstraps from the true final observation;
    a row that is both counts as terminated.

    Args:
        rewards: [T, N] float32.
        terminateds: [T, N] bool.
        truncateds: [T, N] bool.
        gamma: discount per step.
        n: largest number of steps, at least 1.
        valid: [T, N] bool, False where a row is no transition: it has return and discount 0, and
            takes one step.

    Returns:
        Returns and discounts [T, N] float32, computed in float64, and k, [T, N] int32.

    Raises:
        BatchError: when the shapes differ.

    Source: Sutton 1988, Learning to predict by the methods of temporal differences; Mnih et al.
        2016, https://arxiv.org/abs/1602.01783.
    """
    shape = rewards.shape
    flags = {c.TERMINATEDS: terminateds, c.TRUNCATEDS: truncateds, c.VALID: valid}
    for name, column in flags.items():
        if column is not None and column.shape != shape:
            raise BatchError(name, f"shape {shape}, that of rewards", column.shape)
    goes_on = ~(terminateds | truncateds)
    if valid is not None:
        goes_on &= valid
        goes_on[:-1] &= valid[1:]
    returns = rewards.astype(np.float64)
    steps = np.ones(shape, np.int32)
    # True where the row takes one more step, into the row `ahead` rows later
    is_taking = goes_on.copy()
    for ahead in range(1, min(int(n), len(rewards))):
        is_taking = is_taking[:-1]
        if not is_taking.any():
            break
        rows = slice(0, len(rewards) - ahead)
        discounted = gamma**ahead * rewards[ahead:].astype(np.float64)
        returns[rows] += np.where(is_taking, discounted, 0.0)
        steps[rows] += is_taking
        is_taking = is_taking & goes_on[ahead:]
    is_terminal = np.take_along_axis(terminateds, last_rows(steps), axis=0)
    discounts = np.where(is_terminal, 0.0, float(gamma) ** steps)
    if valid is not None:
        returns[~valid] = 0.0
        discounts[~valid] = 0.0
    return NStep(returns.astype(np.float32), discounts.astype(np.float32), steps)


def n_step_new_obs(arrays: Mapping[str, Array]) -> Array:
    """Return the observation after the steps of each row of a fragment, [T, N, ...], from any way
    of storing it.

    Raises:
        BatchError: when it is missing, or its columns do not fit together.
    """
    following = new_obs(arrays)
    steps = arrays.get(c.N_STEPS)
    if steps is None:
        return following
    check_n_steps(steps, following.shape[:2])
    return following[last_rows(steps), np.arange(following.shape[1])]


def last_rows(steps: Array) -> I64:
    """Return the row [T, N] in which the steps of each row end."""
    return np.arange(len(steps))[:, None] + steps.astype(np.int64) - 1


def discounted_sums(deltas: F64, decay: F64) -> F64:
    """Return A_t = deltas_t + decay_t A_{t+1} for the columns of [T, N].

    `deltas` may be overwritten.
    """
    steps, width = deltas.shape
    if width == 1:
        # for Python's own floats, a loop is several times faster than for arrays of length 1
        running = 0.0
        sums = []
        backwards = zip(
            deltas[::-1, 0].tolist(),
            decay[::-1, 0].tolist(),
            strict=True,
        )
        for delta, factor in backwards:
            running = delta + factor * running
            sums.append(running)
        return np.array(sums[::-1]).reshape(steps, 1)
    rows = list(deltas)
    factors = list(decay)
    scratch = np.empty(width)
    for step in range(steps - 2, -1, -1):
        np.multiply(factors[step], rows[step + 1], out=scratch)
        np.add(rows[step], scratch, out=rows[step])
    return deltas
