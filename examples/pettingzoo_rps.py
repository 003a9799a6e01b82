r"""A PettingZoo game with an opponent in plain Python: rock, paper, scissors.

    aiorl train --env pettingzoo:classic.rps_v2 --env-config "{max_cycles: 15}" \
        --multiagent.policies \
        "{learner: null, habit: {class: 'examples.pettingzoo_rps:CreatureOfHabit'}}" \
        --multiagent.policy-mapping-fn examples.pettingzoo_rps:policy_for \
        --multiagent.policies-to-train "[learner]" \
        --run-dir runs/rps --stop-timesteps 60000

`pettingzoo:MODULE` names any module with a `parallel_env` or `env` function, in PettingZoo or
elsewhere. The opponent here always plays paper, scissors, rock, paper, ... The learner sees the
opponent's last move and learns to predict the next one. One player's win is the other's loss, so
`return` stays 0: look at the policies' own returns instead. They end near 15 and -15, the number of
rounds:

    grep -o '"policy_reward_mean":{[^}]*}' runs/rps/result.jsonl | tail -n 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiorl import Policy


class CreatureOfHabit(Policy):
    """Plays the move that follows its last one; workers run it as it is, and it never learns."""

    def compute_actions(
        self,
        obs: np.ndarray,
        state_batches: Sequence[np.ndarray] = (),
        prev_action_batch: Any = None,
        *_: Any,
        **__: Any,
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        """Return actions [N] for N games, no recurrent state and no columns to record."""
        num_actions = self.action_space.n
        return (np.asarray(prev_action_batch) + 1) % num_actions, [], {}


def policy_for(agent_id: str) -> str:
    """Return the policy of a player; PettingZoo calls the two `player_0` and `player_1`."""
    return "learner" if agent_id == "player_0" else "habit"
