"""EpisodeHooks: calls of users' callbacks and of policies' explorations about episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiorl.acting.policy import Policy
from aiorl.data.sample_batch import SampleBatch
from aiorl.sampling.builder import OnPostprocessed
from aiorl.sampling.callbacks import overridden_hooks
from aiorl.sampling.seats import Seat
from aiorl.sampling.settings import SamplerSetup

_WITH_EPISODE = {
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_postprocess_trajectory",
}
"""Hooks that have an episode among their arguments."""


class EpisodeHooks:
    """Hooks of one sampler's episodes.

    Attributes:
        worker: the hooks' argument of this name during a turn; None between turns, so that the
            sampler does not keep the worker alive.
        see_episodes: True if a hook of the user's gets the episode.
        on_step: hook for each step of an environment; None if it does nothing.
        on_postprocessed: hook for each postprocessed trajectory; None if it does nothing.
    """

    def __init__(self, setup: SamplerSetup) -> None:
        """Find the hooks that do anything."""
        self._setup = setup
        self.worker: Any = None
        hooks = {name: getattr(setup.callbacks, name) for name in overridden_hooks(setup.callbacks)}
        self.see_episodes = bool(hooks.keys() & _WITH_EPISODE)
        self.on_step = hooks.get("on_episode_step")
        self._on_start = hooks.get("on_episode_start")
        self._on_end = hooks.get("on_episode_end")
        self.on_postprocessed: OnPostprocessed | None = None
        if "on_postprocess_trajectory" in hooks:
            self.on_postprocessed = self._call_postprocess_hook

    def episode_starts(self, episode: Any) -> None:
        """Call the hooks of an episode's start."""
        self._call_explorations("on_episode_start", episode)
        if self._on_start is not None:
            self._on_start(**self._arguments(episode))

    def episode_ends(self, episode: Any) -> None:
        """Call the hooks of an episode's end."""
        self.episode_breaks_off(episode)
        if self._on_end is not None:
            self._on_end(**self._arguments(episode))

    def episode_breaks_off(self, episode: Any) -> None:
        """Call the hooks of the end of an episode that is not reported."""
        self._call_explorations("on_episode_end", episode)

    def _call_postprocess_hook(
        self,
        episode: Any,
        seat: Seat,
        batch: SampleBatch,
        originals: Mapping[Any, tuple[Policy, SampleBatch]],
    ) -> None:
        self._setup.callbacks.on_postprocess_trajectory(
            worker=self.worker,
            episode=episode,
            agent_id=seat.agent_id,
            policy_id=seat.lane.policy_id,
            policies=self._setup.policy_map,
            postprocessed_batch=batch,
            original_batches=originals,
        )

    def _arguments(self, episode: Any) -> dict[str, Any]:
        return {
            "worker": self.worker,
            "base_env": self._setup.base_env,
            "policies": self._setup.policy_map,
            "episode": episode,
        }

    def _call_explorations(self, hook: str, episode: Any) -> None:
        policies = self._setup.policy_map
        for policy in (*policies.values(), *policies.leaving.values()):
            exploration = getattr(policy, "exploration", None)
            if exploration is not None:
                getattr(exploration, hook)(
                    policy=policy,
                    environment=self._setup.base_env,
                    episode=episode,
                    tf_sess=None,
                )
