"""How likely actions were: under the policy that is judged, and under the one that played."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout, leaf_spaces
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, PolicyError

__all__ = [
    "ACTION_PROB",
    "ROUNDING",
    "ActionLikelihoods",
    "action_log_likelihoods",
    "behaviour_log_likelihoods",
    "check_actions",
    "has_behaviour_likelihoods",
]

F64 = NDArray[np.float64]

ACTION_PROB = "action_prob"
"""The old policy's probability of the action taken; ``action_logp`` will do as well."""

_MAX_ROWS_NAMED = 5
ROUNDING = 1e-4
"""By which a logarithm of a probability may exceed 0: it was summed up in float32."""
_MAX_DISAGREEMENT = 1e-2
"""Between ``action_logp`` and the logarithm of ``action_prob``."""


@runtime_checkable
class ActionLikelihoods(Protocol):
    """A policy that knows how likely it would have taken given actions; users' policies may offer it."""

    def compute_log_likelihoods(
        self,
        actions: NDArray[Any],
        obs: NDArray[Any],
        state_batches: list[NDArray[Any]],
        prev_action_batch: NDArray[Any] | None,
        prev_reward_batch: NDArray[Any] | None,
    ) -> NDArray[Any]:
        """Log-probabilities [B] of actions [B, ...] at observations [B, ...]."""


def action_log_likelihoods(policy: Policy, batch: SampleBatch) -> F64:
    """Log-probabilities [B], under a policy without exploration, of the actions in a batch.

    A recurrent policy is given the states that the batch has.

    Raises:
        PolicyError: the policy cannot tell.
        BatchError: actions that its space does not have; the message names the rows (a ValueError).
    """
    actions, obs = batch[c.ACTIONS], batch[c.OBS]
    prev_actions, prev_rewards = batch.get(c.PREV_ACTIONS), batch.get(c.PREV_REWARDS)
    states: list[NDArray[Any]] = []
    while c.state_in(len(states)) in batch:
        states.append(batch[c.state_in(len(states))])
    if isinstance(policy, ActionLikelihoods):
        logp = policy.compute_log_likelihoods(actions, obs, states, prev_actions, prev_rewards)
    elif isinstance(policy, GraphPolicy):
        actions = check_actions(batch, policy.layout)
        # the columns of compute_actions say all about the distribution; which actions were chosen is of no interest
        _, _, columns = policy.compute_actions(obs, states, prev_actions, prev_rewards, explore=False)
        logp = policy.distribution.logp(columns[c.ACTION_DIST_INPUTS], actions)
    else:
        raise PolicyError(
            f"{type(policy).__name__} cannot tell how likely an action is, which off-policy estimation needs; give it "
            "a method compute_log_likelihoods(actions, obs, state_batches, prev_action_batch, prev_reward_batch)"
        )
    return np.asarray(logp, np.float64)


def check_actions(batch: SampleBatch, layout: ActionLayout) -> NDArray[Any]:
    """The actions of a batch, in column form.

    Raises:
        BatchError: the space does not have them; the message names the rows (a ValueError).
    """
    actions = layout.to_column(batch[c.ACTIONS])
    for leaf, column in zip(layout.leaves, layout.split(actions), strict=True):
        flat = column.reshape(len(column), -1)
        low, high = _range_of(leaf)
        is_wrong = ~((flat >= low) & (flat <= high)).all(axis=1)
        _refuse(batch, c.ACTIONS, is_wrong, f"actions of {leaf}")
    return actions


def _range_of(leaf: spaces.Space[Any]) -> tuple[Any, Any]:
    """Least and greatest of each component; a Box has what a policy did before it was clipped, so any finite number."""
    match leaf:
        case spaces.Discrete():
            return leaf.start, leaf.start + leaf.n - 1
        case spaces.MultiDiscrete():
            return leaf.start.ravel(), (leaf.start + leaf.nvec - 1).ravel()
        case spaces.MultiBinary():
            return 0, 1
    return -np.finfo(np.float64).max, np.finfo(np.float64).max


def has_behaviour_likelihoods(batch: SampleBatch) -> bool:
    """Whether a batch tells how likely the old policy's actions were."""
    return c.ACTION_LOGP in batch or ACTION_PROB in batch


def behaviour_log_likelihoods(batch: SampleBatch, action_space: spaces.Space[Any]) -> F64:
    """Log-probabilities [B] of the actions under the policy that took them; densities where actions are continuous.

    Raises:
        BatchError: they are missing, impossible (not above 0, above 1 but for densities, not finite), or stored twice
            and not the same; the message names the rows (a ValueError).
    """
    has_logp, has_prob = c.ACTION_LOGP in batch, ACTION_PROB in batch
    if not (has_logp or has_prob):
        raise BatchError(ACTION_PROB, f"it or {c.ACTION_LOGP!r} to be there for off-policy estimation", sorted(batch))
    is_density = any(isinstance(leaf, spaces.Box) for leaf in leaf_spaces(action_space))
    logp = np.zeros(batch.count)
    if has_prob:
        prob = _numbers(batch, ACTION_PROB)
        limit = np.inf if is_density else np.exp(ROUNDING)
        expected = "finite densities above 0" if is_density else "probabilities in (0, 1]"
        _refuse(batch, ACTION_PROB, ~((prob > 0.0) & (prob <= limit) & np.isfinite(prob)), expected)
        logp = np.log(prob)
    if has_logp:
        stored = _numbers(batch, c.ACTION_LOGP)
        expected = "finite logarithms of densities" if is_density else "finite logarithms of probabilities, at most 0"
        _refuse(batch, c.ACTION_LOGP, ~(np.isfinite(stored) & (is_density | (stored <= ROUNDING))), expected)
        if has_prob:
            expected = f"the logarithm of {ACTION_PROB!r}, which is there too"
            _refuse(batch, c.ACTION_LOGP, np.abs(stored - logp) > _MAX_DISAGREEMENT, expected)
        logp = stored
    return logp if is_density else np.minimum(logp, 0.0)


def _numbers(batch: SampleBatch, name: str) -> F64:
    column = batch[name]
    if column.dtype.kind not in "fiub" or column.ndim != 1:
        raise BatchError(name, "one number for each row", f"{column.dtype} {list(column.shape)}")
    return column.astype(np.float64)


def _refuse(batch: SampleBatch, name: str, is_wrong: NDArray[np.bool_], expected: str) -> None:
    """Raise BatchError, naming rows, if any is wrong."""
    rows = np.flatnonzero(is_wrong)
    if not len(rows):
        return
    values = batch[name]
    shown = [f"row {row}: {_text(values[row])}" for row in rows[:_MAX_ROWS_NAMED].tolist()]
    more = f" and {len(rows) - len(shown)} more" if len(rows) > len(shown) else ""
    episode = f" of episode {batch[c.EPS_ID][rows[0]]}" if c.EPS_ID in batch else ""
    raise BatchError(name, expected, f"{', '.join(shown)}{more}{episode}")


def _text(value: Any) -> str:
    return f"{value:.6g}" if np.ndim(value) == 0 else f"{np.asarray(value).tolist()!r:.60}"
