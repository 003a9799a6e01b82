"""ExternalEnv: control inverted. User code asks for actions, or reports those it took, instead of being stepped."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any

from gymnasium import spaces

from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.env.base_env import BaseEnv, Poll
from aiorl.env.checks import NestedCheck
from aiorl.env.external_episodes import EpisodeTable
from aiorl.errors import BadObservationError, ConfigError, SamplerDied

__all__ = ["ACTION_TIMEOUT_S", "ExternalBaseEnv", "ExternalEnv", "ExternalMultiAgentEnv"]

ACTION_TIMEOUT_S = 60.0
"""Longest wait of a client for an action."""


class _ClientDriven:
    """What both forms share: the thread that runs ``run`` and the episodes.

    Attributes:
        action_timeout_s: longest wait for an action; may be set by subclasses.
        idle_timeout_s: episodes of clients that were silent for so long are closed as truncated; None = never.
    """

    action_timeout_s: float = ACTION_TIMEOUT_S
    idle_timeout_s: float | None = None

    def __init__(self, action_space: Any, observation_space: Any, max_concurrent: int = 100) -> None:
        self.action_space = action_space
        self.observation_space = observation_space
        self.error: BaseException | None = None
        self._episodes = EpisodeTable(max_concurrent)
        self._checks: dict[Hashable, NestedCheck] = {}
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def run(self) -> None:
        """The user's loop: start an episode, get or log actions, log returns, end it; in a thread of its own.

        Raises:
            NotImplementedError: a subclass must say what to do.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement run()")

    def start(self) -> None:
        """Start the thread that runs ``run``; once."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether ``run`` is still going on."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for ``run`` to end; returns at once if it was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Release what the environment holds; may be called more than once.

        It is called once the sampler has stopped, and also on an environment that was made only to look at its
        spaces: ``run`` was then never called, so do not count on anything that ``run`` sets up.
        """
        self._episodes.stop()

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Begin an episode.

        Args:
            episode_id: a name of your own; None makes one up.
            training_enabled: False shows the episode in metrics, but makes no rows of it.
        Returns: the id.

        Raises:
            ClosedEpisodeError: the id has been used before (a ValueError).
            RuntimeError: ``max_concurrent`` episodes are unfinished.
        """
        return self._episodes.start(episode_id, training_enabled)

    def _check(self, episode_id: str, obs: Mapping[Any, Any]) -> None:
        """Check observations in the thread of the client that gave them, so that no other episode is disturbed.

        Raises:
            BadObservationError: one does not fit its agent's space, or is not finite.
        """
        by_agent = _by_agent(self.observation_space)
        for agent_id, value in obs.items():
            space = self.observation_space.get(agent_id) if by_agent else self.observation_space
            if not isinstance(space, spaces.Space):
                continue
            key = agent_id if by_agent else None
            check = self._checks.get(key)
            if check is None:
                check = self._checks[key] = NestedCheck(type(self).__name__, space)
            try:
                check.coerce(value, 0, self._episodes.length_of(episode_id))
            except BadObservationError as error:
                agent = "" if agent_id == DEFAULT_AGENT_ID else f", agent {agent_id!r}"
                error.message = f"episode {episode_id!r}{agent}: {error.message}"
                raise

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as error:  # told to whoever polls
            self.error = error
        finally:
            self._episodes.wake()


class ExternalEnv(_ClientDriven):
    """An environment whose single-agent episodes are driven by user code; subclass it and implement ``run``.

    Any number of threads may use it; each episode is driven by one thread at a time.
    """

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """The policy's action for an observation.

        Raises:
            BadObservationError: the observation does not fit the space, or is not finite (a ValueError); nothing was
                published, and the episode goes on.
            ClosedEpisodeError: unknown or finished episode (a ValueError).
            EpisodeTimeout: no action in time (a TimeoutError). The episode goes on; an answer that comes later is
                dropped.
            SamplerDied: nobody polls any more.
        """
        return self._ask(episode_id, observation, None)[DEFAULT_AGENT_ID]

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Report an action that was taken at an observation, whatever the policy would have done.

        The episode's row holds this action, but beside it what the policy gave for its own one: ``action_logp`` is
        the log probability of the action that the policy would have taken, not of this one. Losses that weigh by
        importance ratios learn wrongly from such rows; give those episodes ``training_enabled=False``, or learn from
        them by an algorithm that needs no ``action_logp``.

        Raises:
            BadObservationError, ClosedEpisodeError, EpisodeTimeout, SamplerDied: as ``get_action``.
        """
        self._ask(episode_id, observation, {DEFAULT_AGENT_ID: action})

    def log_returns(self, episode_id: str, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add to the reward of the last action; an info stays in force until replaced.

        Raises:
            BadRewardError: the reward is no finite number (a ValueError); nothing was added.
            ClosedEpisodeError: unknown or finished episode.
        """
        self._episodes.add_rewards(episode_id, {DEFAULT_AGENT_ID: reward}, {DEFAULT_AGENT_ID: info or {}}, {})

    def end_episode(self, episode_id: str, observation: Any) -> None:
        """Finish an episode with its final observation.

        Raises:
            BadObservationError: as ``get_action``; the episode is not ended.
            ClosedEpisodeError: unknown or finished episode.
        """
        self._check(episode_id, {DEFAULT_AGENT_ID: observation})
        self._episodes.end(episode_id, {DEFAULT_AGENT_ID: observation})

    def _ask(self, episode_id: str, observation: Any, off_policy: dict[Any, Any] | None) -> Mapping[Any, Any]:
        self._check(episode_id, {DEFAULT_AGENT_ID: observation})
        return self._episodes.ask(episode_id, {DEFAULT_AGENT_ID: observation}, off_policy, self.action_timeout_s)


class ExternalMultiAgentEnv(_ClientDriven):
    """An environment whose multi-agent episodes are driven by user code; subclass it and implement ``run``."""

    def __init__(self, action_space: Any, observation_space: Any, max_concurrent: int = 100) -> None:
        """Note the spaces.

        Args:
            action_space: of every agent, or a dict by agent id.
            observation_space: likewise.
            max_concurrent: most episodes that may be unfinished at a time.

        Raises:
            ConfigError: both are dicts, but not of the same agents.
        """
        super().__init__(action_space, observation_space, max_concurrent)
        if _by_agent(action_space) and _by_agent(observation_space):
            unpaired = sorted(map(str, set(action_space) ^ set(observation_space)))
            if unpaired:
                raise ConfigError(f"action and observation spaces are not given for the same agents: {unpaired}.")

    def get_action(self, episode_id: str, observation_dict: Mapping[Any, Any]) -> dict[Any, Any]:
        """The policies' actions by agent; see ``ExternalEnv.get_action``."""
        self._check(episode_id, observation_dict)
        return dict(self._episodes.ask(episode_id, observation_dict, None, self.action_timeout_s))

    def log_action(self, episode_id: str, observation_dict: Mapping[Any, Any], action_dict: Mapping[Any, Any]) -> None:
        """Report actions that were taken; see ``ExternalEnv.log_action``."""
        self._check(episode_id, observation_dict)
        self._episodes.ask(episode_id, observation_dict, action_dict, self.action_timeout_s)

    def log_returns(
        self,
        episode_id: str,
        reward_dict: Mapping[Any, float],
        info_dict: Mapping[Any, dict[str, Any]] | None = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        """Add to the agents' rewards; an agent's done flag goes with its next observation, its last.

        Raises:
            BadRewardError: a reward is no finite number (a ValueError); none was added.
            ClosedEpisodeError: unknown or finished episode.
        """
        self._episodes.add_rewards(episode_id, reward_dict, info_dict or {}, multiagent_done_dict or {})

    def end_episode(self, episode_id: str, observation_dict: Mapping[Any, Any]) -> None:
        """Finish an episode with the final observations of the agents still alive."""
        self._check(episode_id, observation_dict)
        self._episodes.end(episode_id, observation_dict)


class ExternalBaseEnv(BaseEnv):
    """An external environment as a BaseEnv; environment ids are episode ids."""

    def __init__(self, env: ExternalEnv | ExternalMultiAgentEnv) -> None:
        """Start the environment's thread."""
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        env.start()

    def poll(self) -> Poll:
        """One published item of each episode that has any; waits for the first.

        Raises:
            SamplerDied: ``run`` has ended, and there is nothing left; an error in it is chained.
        """
        env = self.env
        items = env._episodes.take(env.is_alive, env.idle_timeout_s)
        if not items:
            if env.error is not None:
                raise SamplerDied(f"run() of {type(env).__name__} raised {env.error!r}") from env.error
            raise SamplerDied(f"run() of {type(env).__name__} has ended, or it was stopped")
        return Poll(
            {episode_id: item.obs for episode_id, item in items.items()},
            {episode_id: item.rewards for episode_id, item in items.items()},
            {episode_id: item.dones for episode_id, item in items.items()},
            {episode_id: item.truncateds for episode_id, item in items.items()},
            {episode_id: item.infos for episode_id, item in items.items()},
            {
                episode_id: item.off_policy_actions
                for episode_id, item in items.items()
                if item.off_policy_actions is not None
            },
        )

    def send_actions(self, action_dict: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Answer the waiting clients; episodes that have ended are passed over."""
        self.env._episodes.answer(action_dict)

    def interrupt(self) -> None:
        """Let every client go; what it calls from now on raises SamplerDied."""
        self.env._episodes.stop()

    def stop(self) -> None:
        """Let every client go and close the environment."""
        self.interrupt()
        close = getattr(self.env, "close", None)
        if callable(close):
            close()


def _by_agent(space: Any) -> bool:
    return isinstance(space, Mapping) and not isinstance(space, spaces.Space)
