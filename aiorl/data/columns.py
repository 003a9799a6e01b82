"""Names of the columns that flow through aiorl, and of the default policy.

Conventions: T steps, N environments, B rows. Fragments are time-major ``[T, N, ...]``, batches ``[B, ...]``.
"""

from __future__ import annotations

__all__ = [
    "ACTIONS",
    "ACTION_DIST_INPUTS",
    "ACTION_LOGP",
    "ACTION_VALUES",
    "ADVANTAGES",
    "AGENT_INDEX",
    "BOOTSTRAP_VALUES",
    "DEFAULT_AGENT_ID",
    "DEFAULT_POLICY_ID",
    "DISCOUNTS",
    "DONES",
    "EPS_ID",
    "FINAL_INDEX",
    "FINAL_OBS",
    "INFOS",
    "LAST_OBS",
    "NEW_OBS",
    "N_STEPS",
    "N_STEP_RETURNS",
    "OBS",
    "PIECE",
    "PREV_ACTIONS",
    "PREV_REWARDS",
    "PRIORITIES",
    "REWARDS",
    "SCALED_REWARDS",
    "TERMINATEDS",
    "TRUNCATEDS",
    "VALID",
    "VALUE_TARGETS",
    "VF_PREDS",
    "T",
    "state_in",
    "state_out",
]

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
