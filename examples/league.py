r"""A league: a policy learns against frozen copies of itself, which join while the run trains.

    aiorl train --env examples.league:RockPaperScissors --callbacks examples.league:League \
        --multiagent.policies "{learner: null, opponent_0: null}" \
        --multiagent.policy-mapping-fn examples.league:policy_for \
        --multiagent.policies-to-train "[learner]" \
        --run-dir runs/league --stop-timesteps 60000

Every five iterations the learner's weights become a new opponent, and the oldest one leaves. Workers
get its network with the next weights. Checkpoints have all of them, so that a resumed run continues
against the same opponents, and `aiorl evaluate runs/league` plays against them.

One player's win is the other's loss, so `return` stays 0. The learner's own return is above 0 while it
beats its former selves. To see it next to that of each opponent:

    grep -o '"policy_reward_mean":{[^}]*}' runs/league/result.jsonl | tail -n 1
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl import DefaultCallbacks, MultiAgentEnv

EVERY = 5
NUM_OPPONENTS = 5
ROUNDS = 15


class RockPaperScissors(MultiAgentEnv):
    """Two players, who see each other's last move; a round won is 1, a round lost -1."""

    observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, config: dict[str, Any]) -> None:
        """Take `--env-config`, which has no settings here."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return observations without a last move, and infos, by player."""
        self.round = 0
        return self._seen({"left": 3, "right": 3}), {}

    def step(self, action_dict: dict[str, int]) -> Any:
        """Play a round."""
        self.round += 1
        # 0 for a draw, 1 if the move on the left beats the other one, 2 if it loses
        outcome = (action_dict["left"] - action_dict["right"]) % 3
        reward = {0: 0.0, 1: 1.0, 2: -1.0}[int(outcome)]
        ends = {"__all__": self.round == ROUNDS}
        never = {"__all__": False}
        return self._seen(action_dict), {"left": reward, "right": -reward}, ends, never, {}

    def _seen(self, moves: dict[str, int]) -> dict[str, np.ndarray]:
        one_hot = np.eye(4, dtype=np.float32)
        return {"left": one_hot[moves["right"]], "right": one_hot[moves["left"]]}


def policy_for(agent_id: str, episode: Any, worker: Any) -> str:
    """Return the policy of a player: on the right, one of the opponents that there are now."""
    if agent_id == "left":
        return "learner"
    opponents = sorted(worker.policy_map.keys() - {"learner"})
    return opponents[episode.episode_id % len(opponents)]


def number_of(policy_id: str) -> int:
    """Return the iteration after which an opponent joined."""
    return int(policy_id.removeprefix("opponent_"))


class League(DefaultCallbacks):
    """Lets the learner's copies join and leave."""

    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Add a copy of the learner, and remove the oldest one if there are many.

        The run has the list of copies, also after a resume; `opponent_0` is a new network and stays.
        """
        iteration = result["training_iteration"]
        if iteration % EVERY:
            return
        trainer.add_policy(f"opponent_{iteration}", like="learner")
        copies = sorted({*trainer.policy_ids} - {"learner", "opponent_0"}, key=number_of)
        if len(copies) > NUM_OPPONENTS:
            trainer.remove_policy(copies[0])
