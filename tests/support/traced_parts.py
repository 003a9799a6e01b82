"""Policies, hooks and functions that depend on all their inputs, and record their calls on a
tape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from random_worlds import TAPES, action_of

from aiorl.acting.policy import Policy
from aiorl.data.obs_layout import layout_of
from aiorl.sampling.callbacks import DefaultCallbacks


class EpisodeId(int):
    """Id of an episode on a tape: compared as a name, not as a number."""


class TracedPolicy(Policy):
    """Policy with actions that are a function of all inputs of the row, and independent of the rest
    of the batch.

    Config: ``name``, ``tape``, ``action`` (kind of space), ``recurrent``, ``explores``.
    """

    def __init__(self, observation_space: Any, action_space: Any, config: dict[str, Any]) -> None:
        super().__init__(observation_space, action_space, config)
        self.name, self.kind, self.tape = config["name"], config["action"], TAPES[config["tape"]]
        self.weight = np.zeros(1, np.float32)
        if config["explores"]:
            self.exploration = TracedExploration(self.name, self.tape)

    def get_initial_state(self) -> list[np.ndarray]:
        if not self.config["recurrent"]:
            return []
        return [np.full(1, -1.0, np.float32), np.array([0.5, 2.0], np.float32)]

    def get_weights(self) -> dict[str, np.ndarray]:
        return {"w": self.weight.copy()}

    def set_weights(self, weights: Any) -> None:
        self.weight = np.array(weights["w"], np.float32)

    def compute_actions(
        self,
        obs: np.ndarray,
        state_batches: Any = (),
        prev_action_batch: Any = None,
        prev_reward_batch: Any = None,
        info_batch: Any = None,
        episodes: Any = None,
        timestep: Any = None,
        *,
        explore: bool = True,
    ) -> Any:
        self.tape.calls[self.name].append(sorted(str(episode.env_id) for episode in episodes))
        for episode in dict.fromkeys(episodes):
            rows = sum(other is episode for other in episodes)
            self.tape.events[episode.env_id].append(("act", self.name, rows))
        numbers, sums = [], []
        for row in range(len(obs)):
            hints = (
                info_batch[row].get("hint", 0),
                info_batch[row].get("training_enabled", True),
                timestep,
            )
            given = [
                obs[row],
                *(state[row] for state in state_batches),
                prev_action_batch[row],
                prev_reward_batch[row],
                *hints,
                self.weight,
            ]
            flat = np.concatenate([np.asarray(part, np.float64).ravel() for part in given])
            sums.append(np.dot(flat, 1.0 / np.arange(1, len(flat) + 1)))
            # the odd number keeps rounding errors away from where rounding turns
            numbers.append(int(np.floor(abs(sums[-1]) * 5 + 0.3137)))
        states = [state + np.float32(1.0) for state in state_batches[:1]]
        states += [
            state * np.float32(0.5) + np.array(numbers)[:, None] % 3 for state in state_batches[1:]
        ]
        states = [state.astype(np.float32) for state in states]
        extras = {
            "score": np.array(sums, np.float32),
            "pair": np.array([[number % 3, number % 4] for number in numbers], np.int16),
        }
        _, masks = layout_of(self.observation_space).split(obs)
        if masks is not None:
            legal = [np.flatnonzero(mask) for mask in masks]
            numbers = [
                int(of_row[number % len(of_row)])
                for number, of_row in zip(numbers, legal, strict=True)
            ]
        actions = [action_of(self.kind, number) for number in numbers]
        if self.kind == "tuple":
            return tuple(map(np.stack, zip(*actions, strict=True))), states, extras
        return np.stack(actions), states, extras

    def postprocess_trajectory(
        self, batch: Any, other_agent_batches: Any = None, episode: Any = None
    ) -> Any:
        """Return returns to go, from the last observation on, and the rewards of the others."""
        last = (
            np.float32(0.0)
            if batch["terminateds"][-1]
            else np.asarray(batch["new_obs"][-1], np.float64).sum()
        )
        others = sum(pair[1]["rewards"].sum() for pair in other_agent_batches.values())
        batch["to_go"] = (np.cumsum(batch["rewards"][::-1].astype(np.float64))[::-1] + last).astype(
            np.float32
        )
        batch["others"] = np.full(batch.count, others, np.float32)
        return batch


class TracedExploration:
    """Exploration that records the hooks about episodes."""

    has_memory = False

    def __init__(self, name: str, tape: Any) -> None:
        self.name, self.tape = name, tape

    def on_episode_start(self, *, policy, environment, episode, tf_sess):
        self.tape.events[episode.env_id].append(("explores", self.name))

    def on_episode_end(self, *, policy, environment, episode, tf_sess):
        self.tape.events[episode.env_id].append(("explored", self.name))


def traced_callbacks(tape: Any) -> type[DefaultCallbacks]:
    """Return hooks that record everything accessible in an episode, and add metrics to it."""

    class Traced(DefaultCallbacks):
        def on_episode_start(self, *, worker, base_env, policies, episode, **kwargs):
            tape.events[episode.env_id].append(
                ("start", EpisodeId(episode.episode_id), sorted(policies))
            )
            episode.user_data["steps"] = 0

        def on_episode_step(self, *, worker, base_env, episode, **kwargs):
            builder = episode.batch_builder
            tape.events[episode.env_id].append(
                ("row", builder.count, builder.total(), *asked(episode))
            )
            episode.user_data["steps"] += 1
            episode.custom_metrics["steps"] = episode.user_data["steps"]
            episode.hist_data.setdefault("lengths", []).append(episode.length)

        def on_episode_end(self, *, worker, base_env, policies, episode, **kwargs):
            tape.events[episode.env_id].append(("end", *asked(episode)))
            episode.custom_metrics["total"] = episode.total_reward
            tape.end(episode.env_id)

        def on_postprocess_trajectory(
            self,
            *,
            worker,
            episode,
            agent_id,
            policy_id,
            policies,
            postprocessed_batch,
            original_batches,
            **kwargs,
        ):
            sizes = {
                agent: batch["rewards"].tolist() for agent, (_, batch) in original_batches.items()
            }
            steps = postprocessed_batch["t"].tolist()
            tape.events[episode.env_id].append(("trajectory", agent_id, policy_id, steps, sizes))
            postprocessed_batch["altered"] = postprocessed_batch["rewards"] * 2

        def on_sample_end(self, *, worker, samples, **kwargs):
            assert samples.count > 0

    return Traced


def asked(episode: Any) -> tuple[Any, ...]:
    """Return everything accessible in an episode."""
    agents = {
        agent: (
            episode.policy_for(agent),
            episode.last_observation_for(agent),
            episode.last_raw_obs_for(agent),
            episode.last_info_for(agent),
            episode.last_action_for(agent),
            episode.prev_action_for(agent),
            episode.prev_reward_for(agent),
            episode.rnn_state_for(agent),
            dict(episode.last_pi_info_for(agent)),
        )
        for agent in episode.get_agents()
    }
    known = (
        EpisodeId(episode.episode_id),
        episode.length,
        episode.total_reward,
        dict(episode.agent_rewards),
    )
    return (*known, agents)


def by_number(agent_id: str) -> str:
    """Map even agents to red and odd agents to blue."""
    return ("red", "blue")[int(agent_id[-1]) % 2]


def some_default(agent_id: str) -> str:
    """Map agents 0 and 3 to the default policy."""
    return "default_policy" if agent_id[-1] in "03" else "other"


def doubled(*, agent_obs, worker, base_env, policies, episode):
    """Double numbers, plus one for each step."""
    return {agent: obs * 2 + episode.length for agent, obs in agent_obs.items()}


def shadowed(*, agent_obs, worker, base_env, policies, episode):
    """Show agent 7 the observations of agent 0."""
    return {**agent_obs, "a7": agent_obs["a0"]} if "a0" in agent_obs else agent_obs


def thinned(*, agent_obs, worker, base_env, policies, episode):
    """Show odd agents only at every other step."""
    return {
        agent: obs
        for agent, obs in agent_obs.items()
        if int(agent[-1]) % 2 == 0 or episode.length % 2 == 0
    }
