"""MultiAgentEpisode: state of an episode between two turns, and its face for callbacks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiorl.acting.policy_map import AgentBinding
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_AGENT_ID, Array
from aiorl.env.base_env import MAX_GONE_AGENTS
from aiorl.env.checks import hint_for_vector
from aiorl.errors import BadRewardError, EnvContractError, EnvError, UnknownPolicyError
from aiorl.sampling.builder import BatchBuilder
from aiorl.sampling.seats import AgentRecord, Lane, Seat

Fault = TypeVar("Fault", bound=EnvError)


_READABLE = 16
"""Number of agents that have left whose entries user code can read, or as many as are present if
these are more."""


class _AbsentAgents:
    """Agents of an episode that are not observed yet or not any more.

    Only the latest ones are remembered, so that memory is bounded.

    Attributes:
        rewards_before: rewards of agents that have not been observed yet, by agent id.
        left: seats of agents that have left and whose entries can still be read.
        gone: records of agents that have left and whose entries cannot be read, by agent id.
    """

    def __init__(self, seats: dict[Any, Seat], binding: AgentBinding) -> None:
        """Begin without agents.

        Args:
            seats: seats of the episode by agent id.
            binding: assignment of agents to policies.
        """
        self.rewards_before: dict[Any, float] = {}
        self.left: deque[Seat] = deque()
        self.gone: dict[Any, AgentRecord] = {}
        self._seats = seats
        self._binding = binding

    def add_rewards(self, rewards: Sequence[tuple[Any, float]], episode: MultiAgentEpisode) -> None:
        """Add rewards of agents without a seat: they have left, or have not been observed yet."""
        for agent_id, number in rewards:
            record = self.gone.get(agent_id)
            if record is not None:
                record.total += number
                record.is_rewarded = True
                continue
            self.rewards_before[agent_id] = self.rewards_before.get(agent_id, 0.0) + number
            # the mapping function is called when an agent first appears
            self._binding.policy_for(agent_id, episode)
        self._drop_oldest(self.rewards_before)

    def forget_entries(self) -> None:
        """Drop the entries of agents that have left, but for as many as are present."""
        present = len(self._seats) - len(self.left)
        while self.left and (
            len(self.left) > max(_READABLE, present) or not self.left[0].lane.is_shown
        ):
            seat = self.left.popleft()
            del self._seats[seat.agent_id]
            self.gone[seat.agent_id] = seat.record
        self._drop_oldest(self.gone)

    def reset_rewards(self) -> None:
        """Begin a new episode."""
        self.rewards_before.clear()
        for record in self.gone.values():
            record.reset()

    def _drop_oldest(self, agents: dict[Any, Any]) -> None:
        while len(agents) > max(MAX_GONE_AGENTS, len(self._seats)):
            agent_id = next(iter(agents))
            del agents[agent_id]
            self._binding.forget(agent_id)


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
        seats: agent id -> state of the agent, in order of appearance; for the sampler only. Agents
            that have left are dropped once their rows are taken, but for the latest ones if user
            code can read them.
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
        self._num_agents = 0
        self._absent = _AbsentAgents(self.seats, binding)

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        """(agent id, policy id) -> raw rewards so far; of the agents that have left, only of the
        latest thousand.
        """
        rewards = {record.key: record.total for record in self._records() if record.is_rewarded}
        for agent_id, total in self._absent.rewards_before.items():
            rewards[agent_id, self.policy_for(agent_id)] = total
        return rewards

    def policy_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> str:
        """Return the policy id of the agent ``agent_id``; the mapping function is called when the
        agent first appears.

        Raises:
            UnknownPolicyError: the mapping function returned an unknown policy (also a ValueError).
        """
        return self._binding.policy_for(agent_id, self)

    @property
    def policy_ids(self) -> set[str]:
        """Ids of the policies of its agents."""
        return self._binding.policy_ids

    def last_observation_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array | None:
        """Return the latest filtered observation of ``agent_id``, in the policy's shape; None
        before the first.
        """
        seat = self.seats.get(agent_id)
        if seat is None or not seat.is_observed:
            return None
        return seat.rows.obs()

    def last_raw_obs_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Any:
        """Return the latest observation of ``agent_id`` as the environment returned it; None before
        the first.
        """
        seat = self.seats.get(agent_id)
        return None if seat is None else seat.raw_obs

    def last_info_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> dict[str, Any] | None:
        """Return the latest info of ``agent_id``; None before the first observation."""
        seat = self.seats.get(agent_id)
        return None if seat is None else seat.info

    def last_action_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array:
        """Return the latest action of ``agent_id``, unclipped, in the shape that rows store; zeros
        before the first.
        """
        return self._entry(agent_id, c.ACTIONS)

    def prev_action_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> Array:
        """Return the action of ``agent_id`` before the latest one, in the shape that rows store;
        zeros without one.
        """
        return self._entry(agent_id, c.PREV_ACTIONS)

    def prev_reward_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> float:
        """Return the reward of ``agent_id`` before the latest one; 0.0 if there is none."""
        seat = self.seats.get(agent_id)
        return 0.0 if seat is None else seat.rows.prev_reward()

    def rnn_state_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> list[Array]:
        """Return the recurrent state of ``agent_id``, an array [...] per component; the initial one
        at first.
        """
        seat = self.seats.get(agent_id)
        if seat is not None:
            return seat.rows.rnn_state()
        return [component.copy() for component in self._lane_for(agent_id).actor.initial_state]

    def last_pi_info_for(self, agent_id: Any = DEFAULT_AGENT_ID) -> dict[str, Any]:
        """Return the policy's extra outputs for the latest action of ``agent_id``; empty before the
        first.
        """
        seat = self.seats.get(agent_id)
        return {} if seat is None else seat.rows.pi_info()

    def get_agents(self) -> list[Any]:
        """Return the agents observed so far, in order of appearance; of those that have left, the
        latest thousand.

        Of agents that left long ago nothing is known but their rewards: no more than 16 of them, or
        as many as are present, keep their latest observation, action and info.
        """
        return [record.key[0] for record in self._records()]

    def _records(self) -> list[AgentRecord]:
        """Return the records of the agents that are remembered, in order of appearance."""
        records = [seat.record for seat in self.seats.values()]
        if not self._absent.gone:
            return records
        return sorted([*self._absent.gone.values(), *records], key=lambda record: record.index)

    # --- the sampler's side ---

    def fault(self, kind: type[Fault], message: str) -> Fault:
        """Return an error with the environment's name and step.

        Args:
            kind: class of the error.
            message: the failure.
        """
        name, number = self.place
        return kind(name, message, vector_index=number, step=self.length)

    def observed_again(self, agent_id: Any) -> EnvContractError:
        """Return the error for an agent that is observed after it was done.

        Args:
            agent_id: the agent.
        """
        message = f"agent {agent_id!r} was done and is observed again in the same episode"
        return self.fault(EnvContractError, message)

    def seat_for(self, agent_id: Any) -> Seat:
        """Return the seat of ``agent_id``; it is made and bound to a policy at the first
        observation.

        Raises:
            EnvContractError: the agent has left the episode.
        """
        seat = self.seats.get(agent_id)
        if seat is None:
            if agent_id in self._absent.gone:
                raise self.observed_again(agent_id)
            lane = self._lane_for(agent_id)
            seat = Seat(
                agent_id=agent_id,
                lane=lane,
                number=self.batch_builder.seat_for(lane),
                episode=self,
                record=AgentRecord((agent_id, lane.policy_id), self._num_agents),
            )
            self._num_agents += 1
            self.seats[agent_id] = seat
            rewards_before = self._absent.rewards_before
            if agent_id in rewards_before:
                seat.record.total = rewards_before.pop(agent_id)
                seat.record.is_rewarded = True
        return seat

    def add_rewards(self, rewards: Mapping[Any, Any]) -> None:
        """Add the rewards of one step, including those of agents that are not observed in it.

        Raises:
            BadRewardError: a reward is not a finite number (also a ValueError).
        """
        seats = self.seats
        total = self.total_reward
        unseen: list[tuple[Any, float]] = []
        try:
            for agent_id, reward in rewards.items():
                if reward is None:
                    continue
                number = float(reward)
                total += number
                seat = seats.get(agent_id)
                if seat is None:
                    unseen.append((agent_id, number))
                else:
                    seat.reward += number
                    record = seat.record
                    record.total += number
                    record.is_rewarded = True
        except (TypeError, ValueError, AttributeError) as error:
            hint = ""
            if isinstance(rewards, Mapping):
                hint = next(filter(None, map(hint_for_vector, rewards.values())), "")
            message = f"rewards are {rewards!r:.200}, expected a number for each agent{hint}"
            raise self.fault(BadRewardError, message) from error
        if not math.isfinite(total):
            raise self.fault(
                BadRewardError, f"rewards are {rewards!r:.200}, expected finite numbers"
            )
        self.total_reward = total
        if unseen:
            self._absent.add_rewards(unseen, self)

    def has_left(self, seat: Seat) -> None:
        """Note that an agent has left its seat while the episode continues."""
        self._absent.left.append(seat)
        exploration = getattr(seat.lane.policy, "exploration", None)
        on_agent_end = getattr(exploration, "on_agent_end", None)
        if on_agent_end is not None:
            on_agent_end(self, seat.agent_id)

    def forget_left(self) -> None:
        """Drop the entries of agents that have left, but for as many as are present, so that memory
        is bounded.
        """
        self._absent.forget_entries()

    def soft_reset(self, episode_id: int) -> None:
        """Continue as the new episode ``episode_id``: length, totals and metrics restart, states
        and bindings stay.
        """
        self.episode_id = episode_id
        self.length = 0
        self.total_reward = 0.0
        self._absent.reset_rewards()
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
        if seat is not None:
            return seat.rows.entry(name)
        return self._lane_for(agent_id).actor.layout.zeros()

    def __repr__(self) -> str:
        return (
            f"MultiAgentEpisode(env {self.env_id!r}, {self.length} steps, reward"
            f" {self.total_reward:g})"
        )
