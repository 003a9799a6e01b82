r"""Callbacks that report custom metrics: how far CartPole's pole leans and the cart strays.

    aiorl train --env CartPole-v1 --callbacks examples.custom_metrics:PoleWatch \
        --run-dir runs/custom_metrics --stop-return 475

Every result then has the mean, minimum and maximum of `largest_lean` and `stray` over the episodes
that ended, in result.jsonl, progress.csv and TensorBoard. To see the first and the last:

    grep -o '"custom_metrics":{[^}]*}' runs/custom_metrics/result.jsonl | sed -n '1p; $p'

Hooks run in the worker processes, except on_train_result, which runs in the learner. Because
callbacks see every step, environments are polled one by one. For an environment as light as
CartPole, that is slower than without callbacks.
"""

from __future__ import annotations

from typing import Any

from aiorl import DefaultCallbacks, MultiAgentEpisode


class PoleWatch(DefaultCallbacks):
    """Watches observations: cart position and velocity, pole angle (radians) and angular
    velocity.
    """

    def on_episode_start(self, *, episode: MultiAgentEpisode, **kwargs: Any) -> None:
        """Start to track the lean; `user_data` is yours and lasts until the episode ends."""
        episode.user_data["leans"] = []
        episode.user_data["places"] = []

    def on_episode_step(self, *, episode: MultiAgentEpisode, **kwargs: Any) -> None:
        """Update the largest lean after each step of the environment."""
        (agent,) = episode.get_agents()
        place, _, lean, _ = episode.last_raw_obs_for(agent)
        episode.user_data["leans"].append(abs(float(lean)))
        episode.user_data["places"].append(abs(float(place)))

    def on_episode_end(self, *, episode: MultiAgentEpisode, **kwargs: Any) -> None:
        """Report the episode:

        `custom_metrics` holds one number per episode, `hist_data` whole lists.
        """
        episode.custom_metrics["largest_lean"] = max(episode.user_data["leans"])
        episode.custom_metrics["stray"] = max(episode.user_data["places"])
        episode.hist_data["leans"] = episode.user_data["leans"]

    def on_train_result(self, *, result: dict[str, Any], **kwargs: Any) -> None:
        """Add to a result; additions are logged like the rest of it."""
        result["solved_share"] = min(1.0, result["episode_reward_mean"] / 475)
