"""ExternalEnv: control inverted. User code asks for actions, or reports those it took, instead of being stepped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from gymnasium import spaces

from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.env.base_env import ALL_AGENTS, BaseEnv, Poll
from aiorl.env.checks import ActionCheck, NestedCheck
from aiorl.env.external_episodes import EpisodeTable
from aiorl.errors import BadObservationError, ConfigError, EnvContractError, SamplerDied, UnsupportedEnvError

__all__ = ["ACTION_TIMEOUT_S", "ExternalBaseEnv", "ExternalEnv", "ExternalMultiAgentEnv"]

Check = TypeVar("Check")

ACTION_TIMEOUT_S = 60.0
"""Longest wait of a client for an action."""


class _ClientDriven:
    """What both forms share: the thread that runs ``run`` and the episodes.

    Attributes:
        action_timeout_s: longest wait for an action; may be set by subclasses.
        idle_timeout_s: episodes of clients that were silent for so long are closed as truncated; None = never.
            Until it is closed, the episode of a client that is gone counts towards ``max_concurrent``: set it where
            clients may be lost.
    """

    action_timeout_s: float = ACTION_TIMEOUT_S
    idle_timeout_s: float | None = None

    def __init__(self, action_space: Any, observation_space: Any, max_concurrent: int = 100) -> None:
        self.action_space = action_space
        self.observation_space = observation_space
        self.error: BaseException | None = None
        self._episodes = EpisodeTable(max_concurrent)
        self._checks = _Checks(lambda space: NestedCheck(type(self).__name__, space, may_have_more=False))
        self._action_checks = _Checks(ActionCheck)
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def run(self) -> None:
        """The user's loop: start an episode, get or log actions, log returns, end it; in a thread of its own.

        Raises:
            NotImplementedError: a subclass must say what to do.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement run()")

    def start(self) -> None:
        """Start the thread that runs ``run``; once.

        Raises:
            ConfigError: it was started before, such as by another worker.
        """
        if self._thread.ident is not None:
            raise ConfigError(
                f"this {type(self).__name__} drives itself already, for another worker.",
                key="env",
                hint="Have its creator make a new one at each call.",
            )
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
        if _is_initialised(self):
            self._episodes.stop()

    def start_episode(self, episode_id: Any = None, training_enabled: bool = True) -> Any:
        """Begin an episode.

        Args:
            episode_id: a name of your own, a string, number or anything else hashable; None makes up a string. Ids
                of the last 65,536 episodes that ended are refused, older ones are forgotten.
            training_enabled: False shows the episode in metrics, but makes no rows of it.
        Returns: the id, which all other methods want as it is.

        Raises:
            ClosedEpisodeError: the id has been used before (a ValueError).
            ConfigError: the id is not hashable (a ValueError).
            RuntimeError: ``max_concurrent`` episodes are unfinished.
            SamplerDied: nobody polls any more.
        """
        return self._episodes.start(episode_id, training_enabled)

    def _check(self, episode_id: Any, obs: Mapping[Any, Any], actions: Mapping[Any, Any] | None = None) -> None:
        """Check what a client gives in the client's own thread, so that no other episode is disturbed.

        Args:
            episode_id: the episode.
            obs: observations by agent.
            actions: actions that were taken at some of them; None for none.

        Raises:
            BadObservationError: one does not fit its agent's space, or is not finite.
            EnvContractError: what should be by agent is not, or is of an agent that has no space; an action does not
                fit its agent's space, or was taken by an agent that is not observed.
        """
        step = self._episodes.length_of(episode_id)
        self._check_agents(episode_id, "observations", obs, self.observation_space)
        for agent_id, value in obs.items():
            try:
                if check := self._checks.of(agent_id, self.observation_space):
                    check.coerce(value, 0, step)
            except BadObservationError as error:
                error.message = f"{_whose(episode_id, agent_id)}: {error.message}"
                raise
        if actions is None:
            return
        self._check_agents(episode_id, "actions", actions, self.action_space)
        for agent_id, action in actions.items():
            if agent_id not in obs:
                self._refuse(episode_id, f"there is an action of agent {agent_id!r}, but no observation of it")
            own = self._action_checks.of(agent_id, self.action_space)
            if own and (fault := own.fault_of(action)):
                self._refuse(episode_id, fault, agent_id)

    def _check_agents(self, episode_id: Any, what: str, by_agent: Any, known: Any = None) -> None:
        """Refuse anything but a dict by agent, and unknown agents where the agents are listed."""
        if not isinstance(by_agent, Mapping):
            self._refuse(episode_id, f"{what} are {by_agent!r:.200}, expected a dict: agent id -> value")
        if ALL_AGENTS in by_agent:
            self._refuse(episode_id, f"{what} have the key {ALL_AGENTS!r}, which is no agent")
        if _by_agent(known) and (unknown := [agent_id for agent_id in by_agent if agent_id not in known]):
            agents = ", ".join(map(repr, known))
            self._refuse(episode_id, f"{what} are of agent {unknown[0]!r}, but spaces are given for: {agents}")

    def _refuse(self, episode_id: Any, message: str, agent_id: Any = DEFAULT_AGENT_ID) -> NoReturn:
        step = self._episodes.length_of(episode_id)
        raise EnvContractError(type(self).__name__, f"{_whose(episode_id, agent_id)}: {message}", step=step)

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as error:  # told to whoever polls
            self.error = error
        finally:
            self._episodes.wake()


class _Checks(Generic[Check]):
    """One check for all agents, or one for each where they have spaces of their own; each is made once."""

    def __init__(self, make: Callable[[spaces.Space[Any]], Check]) -> None:
        self._make = make
        self._made: dict[Hashable, Check] = {}

    def of(self, agent_id: Any, given: Any) -> Check | None:
        """The check of an agent, for its space or the dict of all; None if no space is known."""
        key, space = (agent_id, given[agent_id]) if _by_agent(given) else (None, given)
        if key not in self._made and isinstance(space, spaces.Space):
            self._made[key] = self._make(space)
        return self._made.get(key)


class ExternalEnv(_ClientDriven):
    """An environment whose single-agent episodes are driven by user code; subclass it and implement ``run``.

    Any number of threads may use it; each episode is driven by one thread at a time.
    """

    def get_action(self, episode_id: Any, observation: Any) -> Any:
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

    def log_action(self, episode_id: Any, observation: Any, action: Any) -> None:
        """Report an action that was taken at an observation, whatever the policy would have done.

        The episode's row holds this action, but beside it what the policy gave for its own one: ``action_logp`` is
        the log probability of the action that the policy would have taken, not of this one. Losses that weigh by
        importance ratios learn wrongly from such rows; give those episodes ``training_enabled=False``, or learn from
        them by an algorithm that needs no ``action_logp``.

        Raises:
            EnvContractError: the action does not fit the space: its shape or dtype differ, it is out of range where
                the space is discrete, or not finite (a ValueError); nothing was published, and the episode goes on.
            BadObservationError, ClosedEpisodeError, EpisodeTimeout, SamplerDied: as ``get_action``.
        """
        self._ask(episode_id, observation, {DEFAULT_AGENT_ID: action})

    def log_returns(self, episode_id: Any, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add to the reward of the last action; an info stays in force until replaced.

        Raises:
            BadRewardError: the reward is no finite number (a ValueError); nothing was added.
            ClosedEpisodeError: unknown or finished episode.
            EnvContractError: the info is no dict (a ValueError); nothing was added.
        """
        if info is not None and not isinstance(info, Mapping):
            self._refuse(episode_id, f"info is {info!r:.200}, expected a dict")
        self._episodes.add_rewards(episode_id, {DEFAULT_AGENT_ID: reward}, {DEFAULT_AGENT_ID: info or {}}, {})

    def end_episode(self, episode_id: Any, observation: Any) -> None:
        """Finish an episode with its final observation.

        Raises:
            BadObservationError: as ``get_action``; the episode is not ended.
            ClosedEpisodeError: unknown or finished episode.
        """
        self._check(episode_id, {DEFAULT_AGENT_ID: observation})
        self._episodes.end(episode_id, {DEFAULT_AGENT_ID: observation})

    def _ask(self, episode_id: Any, observation: Any, off_policy: dict[Any, Any] | None) -> Mapping[Any, Any]:
        self._check(episode_id, {DEFAULT_AGENT_ID: observation}, off_policy)
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

    def get_action(self, episode_id: Any, observation_dict: Mapping[Any, Any]) -> dict[Any, Any]:
        """The policies' actions by agent; see ``ExternalEnv.get_action``.

        Raises:
            EnvContractError: observations are no dict, or of an agent that has no space, or of one that was done
                before (a ValueError); nothing was published, and the episode goes on.
            BadObservationError, ClosedEpisodeError, EpisodeTimeout, SamplerDied: as there.
        """
        self._check(episode_id, observation_dict)
        return dict(self._episodes.ask(episode_id, observation_dict, None, self.action_timeout_s))

    def log_action(self, episode_id: Any, observation_dict: Mapping[Any, Any], action_dict: Mapping[Any, Any]) -> None:
        """Report actions that were taken; see ``ExternalEnv.log_action``.

        Agents that are observed, but for which no action is reported, act as their policies would have done.

        Raises:
            EnvContractError: an action does not fit its agent's space, or its agent is not observed; and as
                ``get_action`` (a ValueError). Nothing was published, and the episode goes on.
            BadObservationError, ClosedEpisodeError, EpisodeTimeout, SamplerDied: as there.
        """
        self._check(episode_id, observation_dict, action_dict)
        self._episodes.ask(episode_id, observation_dict, action_dict, self.action_timeout_s)

    def log_returns(
        self,
        episode_id: Any,
        reward_dict: Mapping[Any, float],
        info_dict: Mapping[Any, dict[str, Any]] | None = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        """Add to the agents' rewards; an agent's done flag goes with its next observation, its last.

        Raises:
            BadRewardError: a reward is no finite number (a ValueError); none was added.
            ClosedEpisodeError: unknown or finished episode.
            EnvContractError: one of the three is no dict by agent, or has an agent that has no space; an info is no
                dict; or ``"__all__"`` is said to be done, which ``end_episode`` says (a ValueError). Nothing was
                added.
        """
        infos, dones = info_dict or {}, multiagent_done_dict or {}
        self._check_agents(episode_id, "rewards", reward_dict, self.observation_space)
        self._check_agents(episode_id, "infos", infos, self.observation_space)
        for agent_id, info in infos.items():
            if info is not None and not isinstance(info, Mapping):
                self._refuse(episode_id, f"info is {info!r:.200}, expected a dict", agent_id)
        if isinstance(dones, Mapping) and ALL_AGENTS in dones:
            if dones[ALL_AGENTS]:
                self._refuse(episode_id, f"{ALL_AGENTS!r} is said to be done; call end_episode, which ends it for all")
            dones = {agent_id: done for agent_id, done in dones.items() if agent_id != ALL_AGENTS}
        self._check_agents(episode_id, "done flags", dones, self.observation_space)
        self._episodes.add_rewards(episode_id, reward_dict, infos, dones)

    def end_episode(self, episode_id: Any, observation_dict: Mapping[Any, Any]) -> None:
        """Finish an episode with the final observations of the agents still alive.

        Raises:
            EnvContractError: an agent that acted and is not done has no final observation; and as ``get_action``
                (a ValueError). The episode is not ended.
            BadObservationError, ClosedEpisodeError: as there.
        """
        self._check(episode_id, observation_dict)
        self._episodes.end(episode_id, observation_dict)

    def leave_agents_to_sampler(self, *, observations_rewritten: bool, no_done_at_end: bool) -> None:
        """Relax the rules for agents as a worker's settings ask; called by the worker before the thread starts.

        Args:
            observations_rewritten: its ``observation_fn`` may drop agents that are done, and add final observations.
            no_done_at_end: it takes episodes without the final observations of live agents.
        """
        if _is_initialised(self):
            self._episodes.done_agents_return = observations_rewritten
            self._episodes.ends_need_obs = not (observations_rewritten or no_done_at_end)


class ExternalBaseEnv(BaseEnv):
    """An external environment as a BaseEnv; environment ids are episode ids."""

    def __init__(self, env: ExternalEnv | ExternalMultiAgentEnv) -> None:
        """Start the environment's thread.

        Raises:
            UnsupportedEnvError: the environment's own constructor left out the base class's.
        """
        if not _is_initialised(env):
            raise UnsupportedEnvError(
                f"the constructor of {type(env).__name__} has to call super().__init__(action_space, observation_space)"
            )
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
                what = f"{type(env.error).__name__}: {env.error}"
                raise SamplerDied(f"run() of {type(env).__name__} raised {what}") from env.error
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

    def place_of(self, env_id: Any) -> tuple[str, int]:
        """See BaseEnv; an episode of whatever id is no copy."""
        return f"episode {env_id!r} of {type(self.env).__name__}", 0

    def interrupt(self) -> None:
        """Let every client go; what it calls from now on raises SamplerDied."""
        self.env._episodes.stop()

    def stop(self) -> None:
        """Let every client go and close the environment."""
        self.interrupt()
        self.env.close()


def _is_initialised(env: _ClientDriven) -> bool:
    return hasattr(env, "_episodes")


def _whose(episode_id: Any, agent_id: Any) -> str:
    agent = "" if agent_id == DEFAULT_AGENT_ID else f", agent {agent_id!r}"
    return f"episode {episode_id!r}{agent}"


def _by_agent(space: Any) -> bool:
    return isinstance(space, Mapping) and not isinstance(space, spaces.Space)
