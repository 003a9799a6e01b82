r"""Callbacks that report metrics of your own: how far CartPole's pole leans, and how far the cart strays.

    python -m aiorl.learner --env CartPole-v1 --callbacks examples.custom_metrics:PoleWatch \
        --run-dir runs/custom_metrics --stop-return 475

Every result then has the mean, least and greatest value of `largest_lean` and `stray` over the episodes that ended,
in result.jsonl, progress.csv and TensorBoard. The first and the last:

    grep -o '"custom_metrics":{[^}]*}' runs/custom_metrics/result.jsonl | sed -n '1p; $p'

Hooks run in the worker processes, on_train_result in the learner. Callbacks see every step, so environments are polled
turn by turn: slower than without them, for an environment as light as CartPole.
"""

from __future__ import annotations

from typing import Any

from aiorl import DefaultCallbacks, MultiAgentEpisode


class PoleWatch(DefaultCallbacks):
    """Watches observations: cart position and velocity, pole angle (radians) and angular velocity."""

    def on_episode_start(self, *, episode: MultiAgentEpisode, **kwargs: Any) -> None:
        """`user_data` is yours, to keep what you need until the episode ends."""
        episode.user_data["leans"] = []
        episode.user_data["places"] = []

    def on_episode_step(self, *, episode: MultiAgentEpisode, **kwargs: Any) -> None:
        """After each step of the environment."""
        (agent,) = episode.get_agents()
        place, _, lean, _ = episode.last_raw_obs_for(agent)
        episode.user_data["leans"].append(abs(float(lean)))
        episode.user_data["places"].append(abs(float(place)))

    def on_episode_end(self, *, episode: MultiAgentEpisode, **kwargs: Any) -> None:
        """`custom_metrics` are numbers, one for each episode; `hist_data` are lists, kept whole."""
        episode.custom_metrics["largest_lean"] = max(episode.user_data["leans"])
        episode.custom_metrics["stray"] = max(episode.user_data["places"])
        episode.hist_data["leans"] = episode.user_data["leans"]

    def on_train_result(self, *, result: dict[str, Any], **kwargs: Any) -> None:
        """What is added to a result here is logged like the rest of it."""
        result["solved_share"] = min(1.0, result["episode_reward_mean"] / 475)
