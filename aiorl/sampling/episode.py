"""MultiAgentEpisode: state of an episode between two turns, and its face for callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from numpy.typing import NDArray

from aiorl.acting.policy_map import AgentBinding
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.errors import BadRewardError, EnvError, UnknownPolicyError
from aiorl.sampling.builder import BatchBuilder
from aiorl.sampling.seats import Lane, Seat

Array = NDArray[Any]
Fault = TypeVar("Fault", bound=EnvError)


class MultiAgentEpisode:
    """Episode of one environment, with any number of agents.

    The default ``agent_id`` of methods is the only agent of a single-agent environment.

    Attributes:
        episode_id: number that is the same in all its rows and unique to the episode.
        env_id: the environment.
        place: its name and number, for messages.
        length: environment steps so far.
        total_reward: raw rewards of all agents so far.
        custom_metrics: name -> number; reported with the episode.
        hist_data: name -> list of numbers; reported with the episode.
        user_data: free for use by callbacks.
        batch_builder: builder that collects its rows.
        seats: agent id -> state of the agent, in order of appearance; for the sampler only.
        add_extra_batch: function that adds a batch to the sampled ones.
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
        """Begin without observations.

        Args:
            env_id: the environment.
            episode_id: number of the episode, unique to it.
            lanes: policy id -> rows that wait for an evaluation of that policy.
            binding: assignment of agents to policies.
            batch_builder: builder that collects the rows.
            add_extra_batch: function that adds a batch to the sampled ones.
        """
        self.env_id = env_id
        self.place = (str(env_id), 0)
        self.episode_id = episode_id
        self.length = 0
        self.total_reward = 0.0
        self.custom_metrics: dict[str, float] = {}
        self.hist_data: dict[str, list[Any]] = {}
        self.user_data: dict[str, Any] = {}
        self.batch_builder = batch_builder
        self.seats: dict[Any, Seat] = {}
        self.add_extra_batch = add_extra_batch
        self._lanes = lanes
        self._binding = binding
        self._rewards_before: dict[Any, float] = {}  # of agents that have not been observed yet

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        """(agent id, policy id) -> raw rewards so far."""
        rewards = {seat.key: seat.total for seat in self.seats.values() if seat.is_rewarded}
        for agent_id, total in self._rewards_before.items():
            rewards[agent_id, self.policy_for(agent_id)] = total
        return rewards

    def policy_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> str:
        """Return the policy id of the agent ``agent_id``; the mapping function is called when the agent first appears.

        Raises:
            UnknownPolicyError: the mapping function returned an unknown policy (also a ValueError).
        """
        return self._binding.policy_for(agent_id, self)

    def last_observation_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array | None:
        """Return the latest filtered observation of ``agent_id``, in the policy's shape; None before the first."""
        seat = self.seats.get(agent_id)
        return None if seat is None else seat.latest_obs()

    def last_raw_obs_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Any:
        """Return the latest observation of ``agent_id`` as the environment returned it; None before the first."""
        seat = self.seats.get(agent_id)
        return None if seat is None else seat.raw_obs

    def last_info_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> dict[str, Any] | None:
        """Return the latest info of ``agent_id``; None before the first observation."""
        seat = self.seats.get(agent_id)
        return None if seat is None else seat.info

    def last_action_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array:
        """Return the latest action of ``agent_id``, unclipped, in the shape that rows store; zeros before the first."""
        return self._entry(agent_id, c.ACTIONS)

    def prev_action_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array:
        """Return the action of ``agent_id`` before the latest one, in the shape that rows store; zeros without one."""
        return self._entry(agent_id, c.PREV_ACTIONS)

    def prev_reward_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> float:
        """Return the reward of ``agent_id`` before the latest one; 0.0 if there is none."""
        seat = self.seats.get(agent_id)
        return 0.0 if seat is None else seat.prev_reward()

    def rnn_state_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> list[Array]:
        """Return the recurrent state of ``agent_id``, an array [...] per component; the initial one at first."""
        seat = self.seats.get(agent_id)
        if seat is not None:
            return seat.rnn_state()
        return [component.copy() for component in self._lane_for(agent_id).actor.initial_state]

    def last_pi_info_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> dict[str, Any]:
        """Return the policy's extra outputs for the latest action of ``agent_id``; empty before the first."""
        seat = self.seats.get(agent_id)
        return {} if seat is None else seat.pi_info()

    def get_agents(self) -> list[Any]:
        """Return the agents observed so far, in order of appearance."""
        return list(self.seats)

    # --- the sampler's side ---

    def fault(self, kind: type[Fault], message: str) -> Fault:
        """Return an error with the environment's name and step.

        Args:
            kind: class of the error.
            message: the failure.
        """
        name, number = self.place
        return kind(name, message, vector_index=number, step=self.length)

    def seat_for(self, agent_id: Any) -> Seat:
        """Return the seat of ``agent_id``; it is made and bound to a policy at the first observation."""
        seat = self.seats.get(agent_id)
        if seat is None:
            lane = self._lane_for(agent_id)
            seat = Seat(agent_id, len(self.seats), lane, self.batch_builder.seat_for(lane), self)
            self.seats[agent_id] = seat
            if agent_id in self._rewards_before:
                seat.total, seat.is_rewarded = self._rewards_before.pop(agent_id), True
        return seat

    def add_rewards(self, rewards: Mapping[Any, Any]) -> None:
        """Add the rewards of one step, including those of agents that are not observed in it.

        Raises:
            BadRewardError: a reward is not a finite number (also a ValueError).
        """
        seats, total = self.seats, self.total_reward
        try:
            for agent_id, reward in rewards.items():
                if reward is None:
                    continue
                number = float(reward)
                total += number
                seat = seats.get(agent_id)
                if seat is None:
                    self._rewards_before[agent_id] = self._rewards_before.get(agent_id, 0.0) + number
                else:
                    seat.reward += number
                    seat.total += number
                    seat.is_rewarded = True
        except (TypeError, ValueError, AttributeError) as error:
            message = f"rewards are {rewards!r:.200}, expected a number for each agent"
            raise self.fault(BadRewardError, message) from error
        if not math.isfinite(total):
            raise self.fault(BadRewardError, f"rewards are {rewards!r:.200}, expected finite numbers")
        self.total_reward = total
        for agent_id in self._rewards_before:
            self.policy_for(agent_id)  # the mapping function is called when an agent first appears

    def soft_reset(self, episode_id: int) -> None:
        """Continue as the new episode ``episode_id``: length, totals and metrics restart, states and bindings stay."""
        self.episode_id = episode_id
        self.length = 0
        self.total_reward = 0.0
        self._rewards_before = {}
        self.custom_metrics = {}
        self.hist_data = {}
        for seat in self.seats.values():
            seat.restart()

    def close(self) -> None:
        """Release all seats: the episode has ended."""
        for seat in self.seats.values():
            self.batch_builder.vacate(seat)

    def _lane_for(self, agent_id: Any) -> Lane:
        policy_id = self.policy_for(agent_id)
        lane = self._lanes.get(policy_id)
        if lane is None:
            raise UnknownPolicyError(policy_id, self._lanes)
        return lane

    def _entry(self, agent_id: Any, name: str) -> Array:
        seat = self.seats.get(agent_id)
        entry: Array = self._lane_for(agent_id).actor.layout.zeros() if seat is None else seat.entry(name)
        return entry

    def __repr__(self) -> str:
        return f"MultiAgentEpisode(env {self.env_id!r}, {self.length} steps, reward {self.total_reward:g})"
