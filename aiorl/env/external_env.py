"""ExternalEnv: user code is in control. It asks for actions, or reports those it took, instead of
being stepped.

One lock serves all episodes, so any number of client threads can drive any number of episodes. Each
episode is driven by one thread at a time. A publication wakes the thread that polls, and an answer
wakes its own client alone: with a common condition, each of 32 clients would wake all others at
each step. A client's mistake is raised in its own thread and never published, because the thread
that polls also serves all other clients.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from gymnasium import spaces

from aiorl.data.actions import ActionLayout
from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.env.base_env import (
    ALL_AGENTS,
    MAX_GONE_AGENTS,
    BaseEnv,
    ByAgent,
    Poll,
    SettingsChange,
    pass_settings,
)
from aiorl.env.checks import NestedCheck, action_fault, as_rewards
from aiorl.env.gym_like import copied
from aiorl.errors import (
    AiorlError,
    BadObservationError,
    ClosedEpisodeError,
    ConfigError,
    EnvContractError,
    EpisodeTimeout,
    SamplerDied,
    UnsupportedEnvError,
    described,
)
from aiorl.text import shortened

OnAnswer = Callable[[ByAgent | AiorlError], None]
"""Function that takes the actions of a publication, or the error in place of them, in the thread
that polls or ends the episode."""
ACTION_TIMEOUT_S = 60.0
"""Longest wait of a client for an action."""


class _ClientDriven:
    """Base of both forms: the thread that runs ``run``, and the episodes.

    Attributes:
        action_space: space of an agent's actions, or a dict by agent id.
        observation_space: space of an agent's observations, or a dict by agent id.
        error: exception that ended ``run``; None if there was none.
        action_timeout_s: longest wait for an action, seconds; subclasses can set it.
        idle_timeout_s: after this many seconds of silence from its client, an episode is closed as
            truncated; None for never. Until then the episode of a lost client counts towards
            ``max_concurrent``: set a timeout if clients can get lost.
    """

    action_timeout_s: float = ACTION_TIMEOUT_S
    idle_timeout_s: float | None = None

    def __init__(
        self,
        action_space: Any,
        observation_space: Any,
        max_concurrent: int = 100,
    ) -> None:
        """Store the spaces.

        Args:
            action_space: space of the actions.
            observation_space: space of the observations.
            max_concurrent: maximum number of unfinished episodes.
        """
        self.action_space = gymnasium_space(action_space)
        self.observation_space = gymnasium_space(observation_space)
        self.error: BaseException | None = None
        self._episodes = EpisodeTable(max_concurrent)
        self._checks: dict[Hashable, NestedCheck] = {}
        self._layouts: dict[Hashable, ActionLayout] = {}
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def run(self) -> None:
        """Run the user's loop in its own thread: start episodes, get or log actions, log returns,
        end episodes.

        Raises:
            NotImplementedError: the subclass does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement run()")

    def start(self) -> None:
        """Start the thread that runs ``run``; call it once.

        Raises:
            ConfigError: it was already started, for example by another worker.
        """
        if self._thread.ident is not None:
            raise ConfigError(
                f"this {type(self).__name__} is already in use by another worker.",
                key="env",
                hint="Have its creator make a new one on each call.",
            )
        self._thread.start()

    def is_alive(self) -> bool:
        """Return True while ``run`` is running."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for ``run`` to end; return immediately if it was never started.

        Args:
            timeout_s: longest wait in seconds; None waits without limit.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Release the environment's resources; can be called more than once.

        It is called when the sampler has stopped, and also for an environment that was made only to
        read its spaces. In that case ``run`` was never called, so do not rely on anything that
        ``run`` sets up.
        """
        if _is_initialised(self):
            self._episodes.stop()

    def start_episode(self, episode_id: Any = None, training_enabled: bool = True) -> Any:
        """Begin an episode.

        Args:
            episode_id: an id of your own: a string, a number or any other hashable value; None
                generates a string. The ids of the last 65,536 completed episodes are refused; older
                ones are forgotten.
            training_enabled: False counts the episode in the metrics, but makes no rows of it.

        Returns:
            The id, to pass to all other methods.

        Raises:
            ClosedEpisodeError: the id is already in use or was used before (a ValueError).
            EnvContractError: the id is not hashable (a ValueError).
            RuntimeError: ``max_concurrent`` episodes are unfinished.
            SamplerDied: the sampler has stopped.
        """
        return self._episodes.start(episode_id, training_enabled)

    def drop_episode(self, episode_id: Any) -> None:
        """End an episode whose client is gone, as truncated after its last observations; ignore an
        unknown one.

        A client that waits for its actions gets a ClosedEpisodeError.

        Args:
            episode_id: id that ``start_episode`` returned.
        """
        self._episodes.cut(episode_id)

    def waits_for(self) -> str:
        """Return for whom the sampler waits now, in plain words; "" while it doesn't.

        It is called in any thread.
        """
        return "the clients of the environment" if self._episodes.is_waiting else ""

    def after_answers(self) -> None:
        """Act on it that waiting clients have their actions now; by default do nothing."""

    def _ask(
        self,
        episode_id: Any,
        obs: ByAgent,
        actions: ByAgent | None = None,
    ) -> ByAgent:
        """Publish observations, with the actions taken for some of them, and wait for the policy's
        actions.
        """
        self._check(episode_id, obs, actions)
        return self._episodes.ask(episode_id, obs, actions, self.action_timeout_s)

    def _check(
        self,
        episode_id: Any,
        obs: ByAgent,
        actions: ByAgent | None = None,
    ) -> None:
        """Check a client's arguments in the client's own thread, so that no other episode is
        disturbed.

        Args:
            episode_id: the episode.
            obs: observations by agent.
            actions: actions taken by some of these agents; None for none.

        Raises:
            BadObservationError: an observation does not fit its agent's space, or is not finite.
            EnvContractError: an argument is not a dict by agent, or has an agent without a space;
                an action does not fit its agent's space, or its agent is not observed.
        """
        step = self._episodes.length_of(episode_id)
        self._check_agents(episode_id, "observations", obs, self.observation_space)
        for agent_id, value in obs.items():
            try:
                key, space = _space_of(agent_id, self.observation_space)
                if key not in self._checks:
                    self._checks[key] = NestedCheck(type(self).__name__, space, may_have_more=False)
                self._checks[key].coerce(value, 0, step)
            except BadObservationError as error:
                error.message = f"{_whose(episode_id, agent_id)}: {error.message}"
                raise
        if actions is None:
            return
        self._check_agents(episode_id, "actions", actions, self.action_space)
        for agent_id, action in actions.items():
            if agent_id not in obs:
                self._refuse(
                    episode_id, f"there is an action of agent {agent_id!r}, but no observation"
                )
            key, space = _space_of(agent_id, self.action_space)
            if not isinstance(space, spaces.Space):
                continue
            if key not in self._layouts:
                self._layouts[key] = ActionLayout(space)
            fault = action_fault(self._layouts[key], action)
            if fault:
                self._refuse(episode_id, fault, agent_id)

    def _log(self, episode_id: Any, rewards: Any, infos: Any, dones: Any) -> None:
        for what, by_agent in (("rewards", rewards), ("infos", infos), ("done flags", dones)):
            self._check_agents(episode_id, what, by_agent, self.observation_space)
        for agent_id, info in infos.items():
            if info is not None and not isinstance(info, Mapping):
                self._refuse(episode_id, f"info is {info!r:.200}, expected a dict", agent_id)
        self._episodes.add_rewards(episode_id, rewards, infos, dones)

    def _check_agents(self, episode_id: Any, what: str, by_agent: Any, space: Any) -> None:
        """Refuse an argument that is not a dict by agent, and unknown agents if there are spaces by
        agent.

        Args:
            episode_id: the episode, for messages.
            what: name of the argument, for messages.
            by_agent: the argument.
            space: common space of all agents, or a dict by agent id.
        """
        if not isinstance(by_agent, Mapping):
            self._refuse(
                episode_id, f"{what} are {by_agent!r:.200}, expected a dict: agent id -> value"
            )
        if ALL_AGENTS in by_agent:
            self._refuse(episode_id, f"{what} have the key {ALL_AGENTS!r}, which is not an agent")
        if not _is_by_agent(space):
            return
        for agent_id in by_agent:
            if agent_id not in space:
                agents = ", ".join(map(repr, space))
                self._refuse(
                    episode_id,
                    f"{what} are of agent {agent_id!r}, but there are only spaces for: {agents}",
                )

    def _refuse(self, episode_id: Any, message: str, agent_id: Any = DEFAULT_AGENT_ID) -> NoReturn:
        step = self._episodes.length_of(episode_id)
        raise EnvContractError(
            type(self).__name__,
            f"{_whose(episode_id, agent_id)}: {message}",
            step=step,
        )

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as error:  # the next poll reports it
            self.error = error
        finally:
            self._episodes.wake()


class ExternalEnv(_ClientDriven):
    """Environment whose single-agent episodes are driven by user code; subclass it and implement
    ``run``.

    It is no Thread, unlike RLlib's, and has neither ``start`` nor ``join``: the sampler runs
    ``run`` in a thread. Any number of threads can use it; each episode is driven by one thread at a
    time.
    """

    def get_action(self, episode_id: Any, observation: Any) -> Any:
        """Return the policy's action for an observation.

        Args:
            episode_id: id that ``start_episode`` returned.
            observation: observation in the form of the observation space.

        Raises:
            BadObservationError: the observation does not fit the space, or is not finite (a
                ValueError). It was not published, and the episode continues.
            ClosedEpisodeError: the episode is unknown or finished (a ValueError).
            EnvContractError: the id is not hashable (a ValueError).
            EpisodeTimeout: no action arrived in time (a TimeoutError). The episode continues; a
                late answer is dropped.
            SamplerDied: the sampler has stopped.
        """
        return self._ask(episode_id, {DEFAULT_AGENT_ID: observation})[DEFAULT_AGENT_ID]

    def log_action(self, episode_id: Any, observation: Any, action: Any) -> None:
        """Report an action that was taken for an observation, regardless of the policy.

        The episode's row contains this action, but ``action_logp`` is the log probability of the
        action that the policy would have taken. Losses with importance ratios learn wrongly from
        such rows. Start those episodes with ``training_enabled=False``, or use an algorithm that
        needs no ``action_logp``.

        Args:
            episode_id: id that ``start_episode`` returned.
            observation: observation in the form of the observation space.
            action: action taken, in the form of the action space.

        Raises:
            EnvContractError: the action does not fit the space: its shape or dtype differs, it is
                outside a discrete space, or it is not finite (a ValueError). It was not published,
                and the episode continues.
            BadObservationError: as in ``get_action``.
            ClosedEpisodeError: as in ``get_action``.
            EpisodeTimeout: as in ``get_action``.
            SamplerDied: as in ``get_action``.
        """
        self._ask(episode_id, {DEFAULT_AGENT_ID: observation}, {DEFAULT_AGENT_ID: action})

    def log_returns(
        self,
        episode_id: Any,
        reward: float,
        info: dict[str, Any] | None = None,
    ) -> None:
        """Add to the reward of the last action.

        Args:
            episode_id: id that ``start_episode`` returned.
            reward: number to add.
            info: info dict, which stays in force until it is replaced; None for no change.

        Raises:
            BadRewardError: the reward is not a finite number (a ValueError); it was not added.
            ClosedEpisodeError: the episode is unknown or finished.
            EnvContractError: the info is not a dict (a ValueError); the reward was not added.
        """
        self._log(episode_id, {DEFAULT_AGENT_ID: reward}, {DEFAULT_AGENT_ID: info}, {})

    def end_episode(self, episode_id: Any, observation: Any, *, truncated: bool = False) -> None:
        """End an episode with its final observation.

        Args:
            episode_id: id that ``start_episode`` returned.
            observation: observation after the last action.
            truncated: True if the episode could have gone on, so values are bootstrapped from the
                observation.

        Raises:
            BadObservationError: as in ``get_action``; the episode does not end.
            ClosedEpisodeError: the episode is unknown or finished.
        """
        self._check(episode_id, {DEFAULT_AGENT_ID: observation})
        self._episodes.end(episode_id, {DEFAULT_AGENT_ID: observation}, is_cut=truncated)


class ExternalMultiAgentEnv(_ClientDriven):
    """Environment whose multi-agent episodes are driven by user code; subclass it and implement
    ``run``.
    """

    def __init__(
        self,
        action_space: Any,
        observation_space: Any,
        max_concurrent: int = 100,
    ) -> None:
        """Store the spaces.

        Args:
            action_space: action space of every agent, or a dict by agent id.
            observation_space: observation space of every agent, or a dict by agent id.
            max_concurrent: maximum number of unfinished episodes.

        Raises:
            ConfigError: both are dicts, but with different agents.
        """
        super().__init__(action_space, observation_space, max_concurrent)
        if _is_by_agent(self.action_space) and _is_by_agent(self.observation_space):
            unpaired = sorted(map(str, set(self.action_space) ^ set(self.observation_space)))
            if unpaired:
                raise ConfigError(
                    "action and observation spaces must have the same agents; only one has:"
                    f" {unpaired}."
                )

    def get_action(self, episode_id: Any, observation_dict: ByAgent) -> dict[Any, Any]:
        """Return the policies' actions by agent.

        Args:
            episode_id: id that ``start_episode`` returned.
            observation_dict: agent id -> observation.

        Raises:
            EnvContractError: the observations are not a dict, or have an agent without a space or
                one that was done before (a ValueError). They were not published, and the episode
                continues.
            BadObservationError: as in ``ExternalEnv.get_action``.
            ClosedEpisodeError: as in ``ExternalEnv.get_action``.
            EpisodeTimeout: as in ``ExternalEnv.get_action``.
            SamplerDied: as in ``ExternalEnv.get_action``.
        """
        return dict(self._ask(episode_id, observation_dict))

    def log_action(
        self,
        episode_id: Any,
        observation_dict: ByAgent,
        action_dict: ByAgent,
    ) -> None:
        """Report actions that were taken, regardless of the policies.

        Observed agents without a reported action act by their policies. Losses with importance
        ratios learn wrongly from reported actions, as in ``ExternalEnv.log_action``.

        Args:
            episode_id: id that ``start_episode`` returned.
            observation_dict: agent id -> observation.
            action_dict: agent id -> action taken.

        Raises:
            EnvContractError: an action does not fit its agent's space, its agent is not observed,
                or the observations are wrong as in ``get_action`` (a ValueError). Nothing was
                published; the episode continues.
            BadObservationError: as in ``ExternalEnv.get_action``.
            ClosedEpisodeError: as in ``ExternalEnv.get_action``.
            EpisodeTimeout: as in ``ExternalEnv.get_action``.
            SamplerDied: as in ``ExternalEnv.get_action``.
        """
        self._ask(episode_id, observation_dict, action_dict)

    def log_returns(
        self,
        episode_id: Any,
        reward_dict: Mapping[Any, float],
        info_dict: Mapping[Any, dict[str, Any]] | None = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        """Add to the rewards of the agents' last actions.

        Args:
            episode_id: id that ``start_episode`` returned.
            reward_dict: agent id -> number to add.
            info_dict: agent id -> info dict; None for no change.
            multiagent_done_dict: agent id -> True if the agent's next observation is its last.

        Raises:
            BadRewardError: a reward is not a finite number (a ValueError); no reward was added.
            ClosedEpisodeError: the episode is unknown or finished.
            EnvContractError: an argument is not a dict by agent, or has an agent without a space;
                an info is not a dict; or ``"__all__"`` is done, which is for ``end_episode`` (a
                ValueError). No reward was added.
        """
        dones = multiagent_done_dict or {}
        if isinstance(dones, Mapping) and ALL_AGENTS in dones:
            if dones[ALL_AGENTS]:
                self._refuse(
                    episode_id,
                    f"{ALL_AGENTS!r} is done; call end_episode, which ends the episode for all",
                )
            dones = {
                agent_id: is_done for agent_id, is_done in dones.items() if agent_id != ALL_AGENTS
            }
        self._log(episode_id, reward_dict, info_dict or {}, dones)

    def end_episode(
        self,
        episode_id: Any,
        observation_dict: ByAgent,
        *,
        truncated: bool = False,
    ) -> None:
        """End an episode with the final observations of the agents still alive.

        Args:
            episode_id: id that ``start_episode`` returned.
            observation_dict: agent id -> observation after its last action.
            truncated: as in ``ExternalEnv.end_episode``.

        Raises:
            EnvContractError: an agent that acted and is not done has no final observation, or the
                observations are wrong as in ``get_action`` (a ValueError). The episode does not
                end.
            BadObservationError: as in ``ExternalEnv.get_action``; the episode does not end.
            ClosedEpisodeError: the episode is unknown or finished.
        """
        self._check(episode_id, observation_dict)
        self._episodes.end(episode_id, observation_dict, is_cut=truncated)

    def leave_agents_to_sampler(
        self,
        *,
        observations_rewritten: bool,
        no_done_at_end: bool,
    ) -> None:
        """Relax the rules for agents to suit a worker's settings; the worker calls it before the
        thread starts.

        Args:
            observations_rewritten: the worker's ``observation_fn`` can drop done agents and add
                final observations.
            no_done_at_end: the worker accepts episodes without the final observations of live
                agents.
        """
        if _is_initialised(self):
            self._episodes.done_agents_return = observations_rewritten
            self._episodes.ends_need_obs = not (observations_rewritten or no_done_at_end)


class ExternalBaseEnv(BaseEnv):
    """External environment as a BaseEnv; environment ids are episode ids."""

    def __init__(self, env: ExternalEnv | ExternalMultiAgentEnv) -> None:
        """Start the environment's thread.

        Raises:
            UnsupportedEnvError: the environment's constructor does not call the base class's.
        """
        if not _is_initialised(env):
            raise UnsupportedEnvError(
                f"the constructor of {type(env).__name__} must call super().__init__(action_space,"
                " observation_space)"
            )
        self.env = env
        # The constructor of a subclass may have set others.
        env.observation_space = gymnasium_space(env.observation_space)
        env.action_space = gymnasium_space(env.action_space)
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        env.start()

    def change_settings(self, change: SettingsChange) -> None:
        """See `BaseEnv.change_settings`."""
        pass_settings(self.env, change)

    def poll(self) -> Poll:
        """Wait for a publication and return one of each episode that has any.

        Raises:
            SamplerDied: ``run`` has ended and no publication is left; an error in it is chained.
        """
        env = self.env
        poll = env._episodes.take(env.is_alive, env.idle_timeout_s)
        if not poll.obs:
            if env.error is not None:
                raise SamplerDied(
                    f"run() of {type(env).__name__} raised {described(env.error)}"
                ) from env.error
            raise SamplerDied(f"run() of {type(env).__name__} has ended, or it was stopped")
        return poll

    def send_actions(self, action_dict: Mapping[Any, ByAgent]) -> None:
        """Answer the waiting clients; episodes that have ended are ignored."""
        self.env._episodes.answer(action_dict)
        self.env.after_answers()

    def waits_for(self) -> str:
        """See `BaseEnv.waits_for`."""
        return self.env.waits_for()

    def place_of(self, env_id: Any) -> tuple[str, int]:
        """See `BaseEnv.place_of`; an episode is not a copy, so its index is 0."""
        return f"episode {env_id!r} of {type(self.env).__name__}", 0

    def interrupt(self) -> None:
        """Release every client; its further calls raise SamplerDied."""
        self.env._episodes.stop()

    def stop(self) -> None:
        """Release every client and close the environment."""
        self.interrupt()
        self.env.close()


def _is_initialised(env: _ClientDriven) -> bool:
    return hasattr(env, "_episodes")


def _whose(episode_id: Any, agent_id: Any) -> str:
    agent = "" if agent_id == DEFAULT_AGENT_ID else f", agent {agent_id!r}"
    return f"episode {episode_id!r}{agent}"


def _space_of(agent_id: Any, space: Any) -> tuple[Any, Any]:
    """Return an agent's key and space in a dict of spaces; None and the common space if there is no
    dict.
    """
    return (agent_id, space[agent_id]) if _is_by_agent(space) else (None, space)


def _stopped() -> SamplerDied:
    return SamplerDied("the sampler of this external environment has stopped")


def _check_hashable(episode_id: Any) -> None:
    try:
        hash(episode_id)
    except TypeError as error:
        raise EnvContractError(
            "external",
            f"the episode id {shortened(repr(episode_id), 200)} is not hashable; use a string or a"
            " number",
            step=-1,
        ) from error


def _is_by_agent(space: Any) -> bool:
    return isinstance(space, Mapping) and not isinstance(space, spaces.Space)


_REMEMBERED = 1 << 16
"""Number of ids of ended episodes that are remembered, so that none of them is used twice."""


class _Published(NamedTuple):
    """Publication of an episode, by agent id; its end comes from the client or from the client's
    silence.
    """

    obs: dict[Any, Any]
    off_policy_actions: dict[Any, Any] | None
    is_last: bool = False
    is_cut: bool = False


@dataclass(slots=True, eq=False)
class _Episode:
    """Episode; a publication has no effect on it until it is polled, so it can be withdrawn.

    Attributes:
        pending: publication that has not been polled yet.
        published: number of publications so far; the latest has this number minus 1.
        polled: number of the publication polled last; -1 for none.
        on_answer: takes the actions for the newest publication; None if no client waits.
        asked_at: time of that publication.
        live: latest observation of each agent that is not done.
        acted: agents that were observed at least twice, so there are rows of them.
        gone: agents whose own flag was published, the latest ones, as the keys of a dict.
    """

    training_enabled: bool
    heard_at: float
    pending: _Published | None = None
    published: int = 0
    polled: int = -1
    on_answer: OnAnswer | None = None
    asked_at: float = 0.0
    rewards: dict[Any, float] = field(default_factory=dict)
    dones: dict[Any, bool] = field(default_factory=dict)
    infos: dict[Any, dict[str, Any]] = field(default_factory=dict)
    live: dict[Any, Any] = field(default_factory=dict)
    acted: set[Any] = field(default_factory=set)
    gone: dict[Any, None] = field(default_factory=dict)

    def publish(
        self,
        obs: ByAgent,
        off_policy: ByAgent | None = None,
        **end: bool,
    ) -> None:
        """Copy the arguments for the next poll."""
        self.pending = _Published(copied(obs), copied(off_policy), **end)
        self.published += 1

    def take_on_answer(self) -> OnAnswer | None:
        """Return the function that takes the actions, and stop waiting for them."""
        on_answer = self.on_answer
        self.on_answer = None
        return on_answer

    def add_to(self, poll: Poll, episode_id: Hashable) -> None:
        """Move the pending publication into a poll, with everything logged before it."""
        assert self.pending is not None, "nothing is pending"
        obs, off_policy, is_last, is_cut = self.pending
        infos = {agent_id: dict(self.infos.get(agent_id, {})) for agent_id in obs}
        if not self.training_enabled:
            for info in infos.values():
                info["training_enabled"] = False
        dones = {agent_id: self.dones.pop(agent_id, False) for agent_id in obs}
        done_agents = [agent_id for agent_id in obs if dones[agent_id]]
        dones[ALL_AGENTS] = is_last
        rewards = {**dict.fromkeys(obs, 0.0), **self.rewards}
        truncateds = {key: is_cut and not flag for key, flag in dones.items()}
        poll.add(episode_id, (obs, rewards, dones, truncateds, infos))
        if off_policy is not None:
            poll.off_policy_actions[episode_id] = off_policy
        self.pending = None
        self.rewards = {}
        self.polled = self.published - 1
        self.acted |= self.live.keys() & obs.keys()
        self.live |= obs
        for agent_id in done_agents:
            self.gone[agent_id] = None
            self.acted.discard(agent_id)
            self.infos.pop(agent_id, None)
            del self.live[agent_id]
        while len(self.gone) > max(MAX_GONE_AGENTS, len(self.live)):
            del self.gone[next(iter(self.gone))]


class EpisodeTable:
    """All episodes of one external environment.

    Attributes:
        is_polled: set once the sampler asks for publications, and at the end.
        is_waiting: True while the sampler waits for publications.
        is_stopped: True at the end; all waiting clients are released.
        done_agents_return: True if done agents can be observed again in their episode; the sampler
            handles them.
        ends_need_obs: True if the end of an episode requires an observation of every live agent.

    Invariants: ``active`` episodes are unfinished. ``closing`` ones have ended, but some of their
    publications have not been polled. ``ended`` remembers ids. An active id is in no other table;
    an id in both others timed out.
    """

    def __init__(self, max_concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no episodes.

        Raises:
            ConfigError: ``max_concurrent`` is below 1.
        """
        if max_concurrent < 1:
            raise ConfigError(
                f"max_concurrent is {max_concurrent}, expected at least 1.", key="max_concurrent"
            )
        self.is_polled = threading.Event()
        self.is_waiting = False
        self.done_agents_return = False
        self.ends_need_obs = True
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._changed = threading.Condition()  # the thread that polls waits for it
        self._active: dict[Hashable, _Episode] = {}
        self._closing: dict[Hashable, _Episode] = {}
        self._ended: dict[Hashable, bool] = {}
        """True for an id that timed out; oldest first."""
        self.is_stopped = False

    def start(self, episode_id: Hashable | None, training_enabled: bool) -> Any:
        """Open an episode and return its id.

        Raises:
            ClosedEpisodeError: an episode of that id is unfinished or completed.
            EnvContractError: the id is not hashable.
            RuntimeError: ``max_concurrent`` episodes are unfinished.
            SamplerDied: the sampler has stopped.
        """
        with self._changed:
            self._check_not_stopped()
            if episode_id is None:
                episode_id = uuid.uuid4().hex
            _check_hashable(episode_id)
            if episode_id in self._ended or episode_id in self._closing:
                raise ClosedEpisodeError(episode_id, "already completed")
            if episode_id in self._active:
                raise ClosedEpisodeError(episode_id, "already started")
            if len(self._active) >= self._max_concurrent:
                raise RuntimeError(
                    f"{len(self._active)} episodes are unfinished, the maximum (max_concurrent ="
                    f" {self._max_concurrent}): end some before you start more. If clients got"
                    " lost, set the environment's idle_timeout_s to have their episodes closed"
                )
            self._active[episode_id] = _Episode(training_enabled, self._clock())
            return episode_id

    def add_rewards(
        self,
        episode_id: Hashable,
        rewards: Mapping[Any, float],
        infos: Mapping[Any, dict[str, Any]],
        dones: Mapping[Any, bool],
    ) -> None:
        """Add to the rewards of the next observation; a non-empty info replaces the agent's earlier
        one.

        Raises:
            ClosedEpisodeError: the episode is unknown or ended.
            BadRewardError: a reward is not a finite number.
        """
        with self._changed:
            episode = self._get(episode_id)
            numbers = as_rewards(rewards, str(episode_id), 0, episode.published)
            for agent_id, number in numbers.items():
                episode.rewards[agent_id] = episode.rewards.get(agent_id, 0.0) + number
            episode.infos.update(
                (agent_id, copied(info)) for agent_id, info in infos.items() if info
            )
            episode.dones.update((agent_id, bool(flag)) for agent_id, flag in dones.items())

    def length_of(self, episode_id: Hashable) -> int:
        """Return the number of publications of an episode so far.

        Raises:
            ClosedEpisodeError: the episode is unknown or ended.
            EnvContractError: the id is not hashable.
            EpisodeTimeout: the episode was closed because its client was silent.
            SamplerDied: the sampler has stopped.
        """
        with self._changed:
            return self._get(episode_id).published

    def ask(
        self,
        episode_id: Hashable,
        obs: ByAgent,
        off_policy_actions: ByAgent | None,
        timeout_s: float,
    ) -> ByAgent:
        """Publish observations and wait for the policy's actions.

        Raises:
            ClosedEpisodeError: the episode is unknown or ended, another thread waits for its
                actions, or it was dropped before they came.
            EnvContractError: a done agent is observed again; nothing was published.
            EpisodeTimeout: no action arrived in time. A publication that has not been polled is
                withdrawn; a later answer is dropped.
            SamplerDied: the sampler has stopped.
        """
        answer: queue.SimpleQueue[ByAgent | AiorlError] = queue.SimpleQueue()
        self.submit(episode_id, obs, off_policy_actions, answer.put)
        try:
            actions = answer.get(timeout=timeout_s)
        except queue.Empty:
            self._withdraw(episode_id, answer.put, timeout_s)
            actions = answer.get()  # that of the last moment, or the error
        if isinstance(actions, AiorlError):
            raise actions
        return actions

    def submit(
        self,
        episode_id: Hashable,
        obs: ByAgent,
        off_policy_actions: ByAgent | None,
        on_answer: OnAnswer,
    ) -> None:
        """Publish observations, and have the policy's actions passed to a function.

        Raises:
            ClosedEpisodeError: the episode is unknown or ended, or actions of it are under way.
            EnvContractError: a done agent is observed again; nothing was published.
            SamplerDied: the sampler has stopped.
        """
        with self._changed:
            episode = self._get(episode_id)
            self._check_agents(episode_id, episode, obs)
            episode.publish(obs, off_policy_actions)
            episode.on_answer = on_answer
            episode.asked_at = self._clock()
            self._changed.notify()

    def time_out(self, timeout_s: float) -> None:
        """Withdraw the publications that have waited for actions for longer than `timeout_s`."""
        limit = self._clock() - timeout_s
        with self._changed:
            late = [
                (episode_id, episode.on_answer)
                for episode_id, episode in self._active.items()
                if episode.on_answer is not None and episode.asked_at < limit
            ]
        for episode_id, on_answer in late:
            self._withdraw(episode_id, on_answer, timeout_s)

    def _withdraw(self, episode_id: Hashable, on_answer: OnAnswer, timeout_s: float) -> None:
        """Answer a publication by the error that no action arrived, unless it is answered now."""
        with self._changed:
            episode = self._active.get(episode_id)
            if episode is None or episode.on_answer != on_answer:
                return
            episode.take_on_answer()
            episode.pending = None
            episode.heard_at = self._clock()
        on_answer(EpisodeTimeout(episode_id, timeout_s))

    def end(self, episode_id: Hashable, obs: ByAgent, *, is_cut: bool = False) -> None:
        """Publish the final observations and close the episode, without waiting; `is_cut` makes it
        a truncated one.

        Raises:
            ClosedEpisodeError: the episode is unknown or ended, or another thread waits for its
                actions.
            EnvContractError: a live agent has no final observation, or a done agent has one; the
                episode continues.
        """
        with self._changed:
            episode = self._get(episode_id)
            self._check_agents(episode_id, episode, obs, last=True)
            episode.publish(obs, is_last=not is_cut, is_cut=is_cut)
            self._closing[episode_id] = self._active.pop(episode_id)
            self._changed.notify()

    def cut(self, episode_id: Hashable) -> None:
        """Close an episode as truncated after its last observations; unknown ones are ignored."""
        with self._changed:
            episode = self._active.pop(episode_id, None)
            if episode is None:
                return
            self._ended[episode_id] = True
            if episode.published:
                episode.publish(episode.live, is_cut=True)
                self._closing[episode_id] = episode
            on_answer = episode.take_on_answer()
            self._changed.notify()
        if on_answer is not None:
            on_answer(ClosedEpisodeError(episode_id, "dropped"))

    def take(self, is_alive: Callable[[], bool], idle_timeout_s: float | None) -> Poll:
        """Wait for publications and return one of each episode that has any; empty if no more can
        come.

        Args:
            is_alive: returns True while more can come; called about ten times a second.
            idle_timeout_s: close episodes after this many seconds of silence from their client;
                None = never.
        """
        poll = Poll.empty()
        self.is_polled.set()
        with self._changed:
            while True:
                if idle_timeout_s is not None:
                    self._close_silent(idle_timeout_s)
                for episode_id, episode in [*self._closing.items(), *self._active.items()]:
                    if episode.pending is not None:
                        episode.add_to(poll, episode_id)
                if poll.obs or self.is_stopped or not is_alive():
                    break
                # Nothing announces a client's silence, so it is looked for ten times a second.
                self.is_waiting = True
                self._changed.wait(0.1)
            self.is_waiting = False
            for episode_id, dones in poll.dones.items():
                if dones[ALL_AGENTS]:
                    del self._closing[episode_id]
                    self._ended.setdefault(episode_id, False)
            while len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        return poll

    def answer(self, actions: Mapping[Hashable, ByAgent]) -> None:
        """Give each episode the actions for its last polled publication; ended ones are ignored."""
        answers = []
        with self._changed:
            now = self._clock()
            for episode_id, by_agent in actions.items():
                episode = self._active.get(episode_id)
                # a client that gave up may have published again, which is not polled yet
                if episode is None or episode.polled != episode.published - 1:
                    continue
                on_answer = episode.take_on_answer()
                if on_answer is not None:
                    episode.heard_at = now
                    answers.append((on_answer, by_agent))
        for on_answer, by_agent in answers:
            on_answer(by_agent)

    def stop(self) -> None:
        """Release all waiting threads: the sampler has stopped."""
        self.is_stopped = True
        self.is_polled.set()
        self.wake()
        with self._changed:
            waiting = [episode.take_on_answer() for episode in self._active.values()]
        for on_answer in waiting:
            if on_answer is not None:
                on_answer(_stopped())

    def wake(self) -> None:
        """Make a waiting ``take`` check its conditions again."""
        with self._changed:
            self._changed.notify_all()

    def _get(self, episode_id: Hashable) -> _Episode:
        self._check_not_stopped()
        _check_hashable(episode_id)
        episode = self._active.get(episode_id)
        if episode is None:
            if self._ended.get(episode_id):
                raise EpisodeTimeout(episode_id, None)
            if episode_id in self._closing or episode_id in self._ended:
                raise ClosedEpisodeError(episode_id, "already completed")
            raise ClosedEpisodeError(episode_id, "unknown")
        episode.heard_at = self._clock()
        return episode

    def _check_not_stopped(self) -> None:
        if self.is_stopped:
            raise _stopped()

    def _check_agents(
        self,
        episode_id: Hashable,
        episode: _Episode,
        obs: ByAgent,
        *,
        last: bool = False,
    ) -> None:
        """Raise an error if another thread drives the episode or the observations break a rule of
        the sampler.
        """
        if episode.on_answer is not None:
            raise ClosedEpisodeError(episode_id, "driven by two threads at the same time")
        for agent_id in obs:
            if agent_id in episode.gone and not self.done_agents_return:
                raise EnvContractError(
                    str(episode_id),
                    f"agent {agent_id!r} was done and is observed again in the same episode",
                    step=episode.published,
                )
        if not last or not self.ends_need_obs or not episode.training_enabled:
            return
        for agent_id in episode.live:
            if agent_id in episode.acted and agent_id not in obs:
                raise EnvContractError(
                    str(episode_id),
                    f"the episode cannot end: agent {agent_id!r} is not done and has no final"
                    " observation. Pass end_episode the last observations of all live agents, or"
                    " set no_done_at_end",
                    step=episode.published,
                )

    def _close_silent(self, idle_timeout_s: float) -> None:
        limit = self._clock() - idle_timeout_s
        for episode_id, episode in list(self._active.items()):
            if episode.on_answer is None and episode.heard_at <= limit:
                self.cut(episode_id)
