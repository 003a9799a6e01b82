"""MultiAgentEpisode: what is remembered of an episode between two turns, and what callbacks may ask of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.errors import EnvError, UnknownPolicyError
from aiorl.policy.policy_map import AgentBinding
from aiorl.sampler.lane import Lane
from aiorl.sampler.track import AgentTrack

if TYPE_CHECKING:
    from aiorl.sampler.builder import BatchBuilder

__all__ = ["MultiAgentEpisode"]

Array = NDArray[Any]
Fault = TypeVar("Fault", bound=EnvError)


class MultiAgentEpisode:
    """One episode of one environment, with any number of agents.

    Methods that ask about an agent mean the only one of a single-agent environment, unless told which.

    Attributes:
        episode_id: the same in all its rows, different from every other episode's.
        env_id: the environment.
        place: its name and number, for messages.
        length: environment steps so far.
        total_reward: raw rewards of all agents so far.
        agent_rewards: (agent id, policy id) -> raw rewards so far.
        custom_metrics: name -> number; reported with the episode.
        hist_data: name -> list of numbers; reported with the episode.
        user_data: free for use by callbacks.
        batch_builder: where its rows go.
        tracks: agent id -> what is remembered of the agent, in order of appearance; the sampler's own.
        add_extra_batch: call it with a batch that shall go out beside the sampled ones.
    """

    def __init__(
        self,
        env_id: Any,
        episode_id: int,
        lanes: Mapping[str, Lane],
        binding: AgentBinding,
        batch_builder: BatchBuilder,
        add_extra_batch: Callable[[Any], None],
    ) -> None:
        """An episode without observations yet."""
        self.env_id = env_id
        self.place = (str(env_id), 0)
        self.episode_id = episode_id
        self.length = 0
        self.total_reward = 0.0
        self.agent_rewards: dict[tuple[Any, str], float] = defaultdict(float)
        self.custom_metrics: dict[str, float] = {}
        self.hist_data: dict[str, list[Any]] = {}
        self.user_data: dict[str, Any] = {}
        self.batch_builder = batch_builder
        self.tracks: dict[Any, AgentTrack] = {}
        self.add_extra_batch = add_extra_batch
        self._lanes = lanes
        self._binding = binding

    def policy_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> str:
        """The agent's policy id; the mapping function is asked at its first appearance only.

        Raises:
            UnknownPolicyError: the mapping function named no policy (also a ValueError).
        """
        return self._binding.policy_for(agent_id)

    def last_observation_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array | None:
        """The agent's latest filtered observation; None before any."""
        track = self.tracks.get(agent_id)
        return None if track is None else track.latest_obs()

    def last_raw_obs_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Any:
        """The agent's latest observation as the environment gave it; None before any."""
        track = self.tracks.get(agent_id)
        return None if track is None else track.raw_obs

    def last_info_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> dict[str, Any] | None:
        """The agent's latest info; None before any observation."""
        track = self.tracks.get(agent_id)
        return None if track is None else track.info

    def last_action_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array:
        """The agent's latest action, unclipped, as rows hold it; zeros before any."""
        return self._entry(agent_id, c.ACTIONS)

    def prev_action_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array:
        """The action before the latest one; zeros before any."""
        return self._entry(agent_id, c.PREV_ACTIONS)

    def prev_reward_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> float:
        """The reward before the latest one; 0.0 before any."""
        track = self.tracks.get(agent_id)
        return 0.0 if track is None else track.prev_reward

    def rnn_state_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> list[Array]:
        """The agent's recurrent state; the initial one before any action."""
        track = self.tracks.get(agent_id)
        if track is not None:
            return track.rnn_state()
        lane = self._lane_for(agent_id)
        return [lane.store[name][0].copy() for name in lane.state_columns]

    def last_pi_info_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> dict[str, Any]:
        """What the policy gave beside the agent's latest action; empty before any."""
        track = self.tracks.get(agent_id)
        return {} if track is None else track.pi_info()

    def get_agents(self) -> list[Any]:
        """Agents observed so far, in order of appearance."""
        return list(self.tracks)

    # --- the sampler's side ---

    def fault(self, kind: type[Fault], message: str) -> Fault:
        """An error that names the environment, and the step that it is at."""
        name, number = self.place
        return kind(name, message, vector_index=number, step=self.length)

    def track_for(self, agent_id: Any) -> AgentTrack:
        """The agent's track, made and bound to a policy at its first observation."""
        track = self.tracks.get(agent_id)
        if track is None:
            lane = self._lane_for(agent_id)
            track = self.tracks[agent_id] = AgentTrack(agent_id, len(self.tracks), lane, self)
            lane.open(track)
        return track

    def add_rewards(self, rewards: Mapping[Any, Any]) -> None:
        """Count the rewards of one step, also those of agents that are not observed now."""
        agent_rewards, tracks, total = self.agent_rewards, self.tracks, self.total_reward
        for agent_id, reward in rewards.items():
            if reward is None:
                continue
            number = float(reward)
            total += number
            track = tracks.get(agent_id)
            if track is None:
                agent_rewards[agent_id, self.policy_for(agent_id)] += number
            else:
                track.reward += number
                agent_rewards[track.key] += number
        self.total_reward = total

    def soft_reset(self, episode_id: int) -> None:
        """Go on as a new episode: length, totals, metrics and id restart; recurrent states and bindings stay."""
        self.episode_id = episode_id
        self.length = 0
        self.total_reward = 0.0
        self.agent_rewards = defaultdict(float)
        self.custom_metrics = {}
        self.hist_data = {}
        for track in self.tracks.values():
            track.fed = 0
            track.reward = track.last_reward = track.prev_reward = 0.0
            track.has_rows = False

    def close(self) -> None:
        """The episode is over for good."""
        for track in self.tracks.values():
            track.lane.close(track)

    def _lane_for(self, agent_id: Any) -> Lane:
        policy_id = self.policy_for(agent_id)
        lane = self._lanes.get(policy_id)
        if lane is None:
            raise UnknownPolicyError(policy_id, self._lanes)
        return lane

    def _entry(self, agent_id: Any, name: str) -> Array:
        track = self.tracks.get(agent_id)
        if track is None:
            store = self._lane_for(agent_id).store
            return np.zeros_like(store[name][0])
        entry: Array = track.entry(name, track.acted)
        return entry

    def __repr__(self) -> str:
        return f"MultiAgentEpisode(env {self.env_id!r}, {self.length} steps, reward {self.total_reward:g})"
