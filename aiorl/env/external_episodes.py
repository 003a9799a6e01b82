"""Episodes that clients drive: what they have published, and the actions they wait for.

One lock and one condition serve all episodes, so any number of client threads may drive any number of
episodes; a single episode is driven by one thread at a time. Everything is keyed by agent id. What a client does
wrong is raised in its own thread, and nothing of it is published: whoever polls serves all the other clients, too.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.checks import as_rewards
from aiorl.env.copied import copied
from aiorl.errors import ClosedEpisodeError, ConfigError, EnvContractError, EpisodeTimeout, SamplerDied

__all__ = ["EpisodeTable", "Item"]

_REMEMBERED = 1 << 16
"""Ids of ended episodes that are kept, so that none is started twice."""


@dataclass(slots=True, eq=False)
class Item:
    """What one call of a client published.

    Attributes:
        number: position within its episode, from 0; the action for it carries the same number.
        obs, rewards, dones, truncateds, infos: by agent id; the flags also have ALL_AGENTS.
        off_policy_actions: actions the client took itself, or None.
    """

    number: int
    obs: dict[Any, Any]
    rewards: dict[Any, float]
    dones: dict[Any, bool]
    truncateds: dict[Any, bool]
    infos: dict[Any, dict[str, Any]]
    off_policy_actions: dict[Any, Any] | None

    @property
    def is_last(self) -> bool:
        """The episode ends with this item."""
        return self.dones[ALL_AGENTS] or self.truncateds[ALL_AGENTS]


@dataclass(slots=True, eq=False)
class _Episode:
    training_enabled: bool
    heard_at: float
    items: deque[Item] = field(default_factory=deque)
    published: int = 0
    polled: int = -1
    waiting_for: int = -1
    answered: int = -1
    actions: Mapping[Any, Any] = field(default_factory=dict)
    rewards: dict[Any, float] = field(default_factory=dict)
    dones: dict[Any, bool] = field(default_factory=dict)
    infos: dict[Any, dict[str, Any]] = field(default_factory=dict)
    agents: _Agents = field(default_factory=lambda: _Agents({}, frozenset(), frozenset()))


class _Agents(NamedTuple):
    """Agents of an episode, as of one item.

    Attributes:
        live: latest observation of every agent that is not done.
        acted: those of them that were observed at least twice: there are rows of them.
        done: those whose own flag was published.
    """

    live: dict[Any, Any]
    acted: frozenset[Any]
    done: frozenset[Any]


class EpisodeTable:
    """All episodes of one external environment.

    Attributes:
        done_agents_return: agents that are done may be observed again in their episode; whoever polls sees to them.
        ends_need_obs: the end of an episode needs an observation of every live agent.

    Invariants: ``active`` episodes are unfinished; ``closing`` ones were ended, but not all of their items have
    been polled; ``ended`` remembers ids. An active id is in no other table, and one in both others timed out.
    """

    def __init__(self, max_concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no episodes.

        Raises:
            ConfigError: fewer than one episode allowed.
        """
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent is {max_concurrent}, expected at least 1.", key="max_concurrent")
        self.done_agents_return = False
        self.ends_need_obs = True
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._changed = threading.Condition()
        self._active: dict[Hashable, _Episode] = {}
        self._closing: dict[Hashable, _Episode] = {}
        self._ended: dict[Hashable, bool] = {}
        """id -> whether it timed out; oldest first."""
        self._stopped = False

    def start(self, episode_id: Hashable | None, training_enabled: bool) -> Any:
        """Open an episode; returns its id.

        Raises:
            ClosedEpisodeError: an episode of that id was completed or is going on.
            ConfigError: the id is no string, number or other hashable value.
            RuntimeError: ``max_concurrent`` episodes are unfinished.
            SamplerDied: nobody polls any more.
        """
        with self._changed:
            self._check_polled()
            if episode_id is None:
                episode_id = uuid.uuid4().hex
            if not _is_hashable(episode_id):
                raise ConfigError(
                    f"episode_id is {episode_id!r:.200}, expected a string, a number or None.",
                    key="episode_id",
                    value=episode_id,
                )
            if episode_id in self._ended or episode_id in self._closing:
                raise ClosedEpisodeError(episode_id, "already completed")
            if episode_id in self._active:
                raise ClosedEpisodeError(episode_id, "already started")
            if len(self._active) >= self._max_concurrent:
                raise RuntimeError(
                    f"{len(self._active)} episodes are unfinished, and at most max_concurrent ="
                    f" {self._max_concurrent} may be: end some before starting more, and set the environment's"
                    " idle_timeout_s to have those closed whose clients are gone"
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
        """Add to what the next observation will carry; a truthy info replaces the agent's earlier one.

        Raises:
            ClosedEpisodeError: unknown or ended episode.
            BadRewardError: a reward that is no finite number.
        """
        with self._changed:
            episode = self._get(episode_id)
            numbers = as_rewards(rewards, str(episode_id), 0, episode.published)
            for agent_id, number in numbers.items():
                episode.rewards[agent_id] = episode.rewards.get(agent_id, 0.0) + number
            episode.infos.update((agent_id, copied(info)) for agent_id, info in infos.items() if info)
            episode.dones.update((agent_id, bool(done)) for agent_id, done in dones.items())

    def length_of(self, episode_id: Hashable) -> int:
        """Items published of an episode so far.

        Raises:
            ClosedEpisodeError: unknown or ended episode.
            EpisodeTimeout: closed since its client was silent.
            SamplerDied: nobody polls any more.
        """
        with self._changed:
            return self._get(episode_id).published

    def ask(
        self,
        episode_id: Hashable,
        obs: Mapping[Any, Any],
        off_policy_actions: Mapping[Any, Any] | None,
        timeout_s: float,
    ) -> Mapping[Any, Any]:
        """Publish observations and wait for the policy's actions for them.

        Raises:
            ClosedEpisodeError: unknown or ended episode, or one that another thread waits for.
            EnvContractError: an agent that is done is observed again; nothing was published.
            EpisodeTimeout: no action in time; what was published but not polled is withdrawn, and an answer that
                comes later is dropped.
            SamplerDied: nobody polls any more.
        """
        with self._changed:
            episode = self._get(episode_id)
            if episode.waiting_for >= 0:
                raise ClosedEpisodeError(episode_id, "driven by two threads at once")
            self._check_agents(episode_id, episode, obs)
            before = episode.agents
            item = self._publish(episode, obs, off_policy_actions)
            number = episode.waiting_for = item.number
            try:
                self._changed.notify_all()
                deadline = time.monotonic() + timeout_s
                while episode.answered != number:
                    if self._stopped:
                        raise SamplerDied("the sampler of this external environment has stopped")
                    if self._ended.get(episode_id):
                        raise EpisodeTimeout(episode_id, timeout_s)
                    if not self._changed.wait(deadline - time.monotonic()) and episode.answered != number:
                        self._withdraw(episode, item, before)
                        raise EpisodeTimeout(episode_id, timeout_s)
                return episode.actions
            finally:
                episode.waiting_for = -1
                episode.heard_at = self._clock()

    def end(self, episode_id: Hashable, obs: Mapping[Any, Any]) -> None:
        """Publish the final observations and close the episode; doesn't wait.

        Raises:
            ClosedEpisodeError: unknown or ended episode, or another thread waits for its actions.
            EnvContractError: a live agent has no final observation, or one that is done has one; the episode goes on.
        """
        with self._changed:
            episode = self._get(episode_id)
            if episode.waiting_for >= 0:
                raise ClosedEpisodeError(episode_id, "driven by two threads at once")
            self._check_agents(episode_id, episode, obs, last=True)
            self._publish(episode, obs, None, last=True)
            self._closing[episode_id] = self._active.pop(episode_id)
            self._changed.notify_all()

    def take(self, is_alive: Callable[[], bool], idle_timeout_s: float | None) -> dict[Hashable, Item]:
        """Wait for published items; one of each episode that has any.

        Args:
            is_alive: whether more can come; asked about ten times a second.
            idle_timeout_s: close episodes whose client has been silent for so long; None = never.
        Returns: items by episode id; empty if no more can come.
        """
        with self._changed:
            while True:
                if idle_timeout_s is not None:
                    self._close_silent(idle_timeout_s)
                ready = {
                    episode_id: episode.items.popleft()
                    for table in (self._closing, self._active)
                    for episode_id, episode in table.items()
                    if episode.items
                }
                if ready:
                    break
                if self._stopped or not is_alive():
                    return {}
                self._changed.wait(0.1)
            for episode_id, item in ready.items():
                if item.is_last:
                    del self._closing[episode_id]
                    self._ended.setdefault(episode_id, False)
                else:
                    (self._active.get(episode_id) or self._closing[episode_id]).polled = item.number
            while len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            return ready

    def answer(self, actions: Mapping[Hashable, Mapping[Any, Any]]) -> None:
        """Give each episode the actions for what was polled of it last; ended ones are passed over."""
        with self._changed:
            for episode_id, by_agent in actions.items():
                episode = self._active.get(episode_id)
                if episode is not None and episode.polled >= 0:
                    episode.actions = by_agent
                    episode.answered = episode.polled
            self._changed.notify_all()

    def stop(self) -> None:
        """Let every waiting thread go: nobody polls any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Have a waiting ``take`` look again at what it waits for."""
        with self._changed:
            self._changed.notify_all()

    def check_valid(self) -> None:
        """Assert the invariants; for tests."""
        with self._changed:
            over = self._closing.keys() | self._ended.keys()
            if self._active.keys() & over:
                raise AssertionError("an episode is both active and over")
            if any(not self._ended[key] for key in self._closing.keys() & self._ended.keys()):
                raise AssertionError("an episode is over before its last item was polled")
            if len(self._active) > self._max_concurrent:
                raise AssertionError("more episodes than allowed")

    def _get(self, episode_id: Hashable) -> _Episode:
        self._check_polled()
        if not _is_hashable(episode_id):
            raise ClosedEpisodeError(episode_id, "unknown")
        episode = self._active.get(episode_id)
        if episode is None:
            if self._ended.get(episode_id):
                raise EpisodeTimeout(episode_id, None)
            known = episode_id in self._closing or episode_id in self._ended
            raise ClosedEpisodeError(episode_id, "already completed" if known else "unknown")
        episode.heard_at = self._clock()
        return episode

    def _check_polled(self) -> None:
        if self._stopped:
            raise SamplerDied("the sampler of this external environment has stopped")

    def _check_agents(
        self, episode_id: Hashable, episode: _Episode, obs: Mapping[Any, Any], *, last: bool = False
    ) -> None:
        """Raise for observations that would break a rule of multi-agent episodes where they are polled."""
        agents = episode.agents
        back = [] if self.done_agents_return else [agent_id for agent_id in obs if agent_id in agents.done]
        if back:
            message = f"agent {back[0]!r} was done and is observed again in the same episode"
            raise EnvContractError(str(episode_id), message, step=episode.published)
        if last and self.ends_need_obs and episode.training_enabled:
            missing = [agent_id for agent_id in agents.live if agent_id in agents.acted and agent_id not in obs]
            if missing:
                raise EnvContractError(
                    str(episode_id),
                    f"the episode cannot end: agent {missing[0]!r} is not done and has no final observation. Give"
                    " end_episode the last observations of all live agents, or set no_done_at_end",
                    step=episode.published,
                )

    def _publish(
        self,
        episode: _Episode,
        obs: Mapping[Any, Any],
        off_policy: Mapping[Any, Any] | None,
        *,
        last: bool = False,
        cut: bool = False,
    ) -> Item:
        infos = {agent_id: dict(episode.infos.get(agent_id, {})) for agent_id in obs}
        if not episode.training_enabled:
            for info in infos.values():
                info["training_enabled"] = False
        rewards = {**dict.fromkeys(obs, 0.0), **episode.rewards}
        dones = {agent_id: episode.dones.pop(agent_id, False) for agent_id in obs}
        dones[ALL_AGENTS] = last
        item = Item(
            episode.published,
            {agent_id: copied(value) for agent_id, value in obs.items()},
            rewards,
            dones,
            {agent_id: cut and not done for agent_id, done in dones.items()},
            infos,
            None if off_policy is None else {agent_id: copied(action) for agent_id, action in off_policy.items()},
        )
        episode.published += 1
        episode.rewards = {}
        live, acted, gone = episode.agents
        done = [agent_id for agent_id in obs if dones[agent_id]]
        episode.agents = _Agents(
            {agent_id: value for agent_id, value in {**live, **item.obs}.items() if agent_id not in done},
            acted | (live.keys() & obs.keys()),
            gone.union(done) if done else gone,
        )
        episode.items.append(item)
        return item

    def _withdraw(self, episode: _Episode, item: Item, before: _Agents) -> None:
        """Undo a publication that has not been polled."""
        if item not in episode.items:
            return
        episode.items.remove(item)
        episode.agents = before
        for agent_id, reward in item.rewards.items():
            episode.rewards[agent_id] = episode.rewards.get(agent_id, 0.0) + reward
        episode.dones.update((agent_id, True) for agent_id, done in item.dones.items() if done)

    def _close_silent(self, idle_timeout_s: float) -> None:
        limit = self._clock() - idle_timeout_s
        for episode_id, episode in list(self._active.items()):
            if episode.waiting_for >= 0 or episode.heard_at > limit:
                continue
            del self._active[episode_id]
            self._ended[episode_id] = True
            if not episode.published:
                continue
            self._publish(episode, episode.agents.live, None, cut=True)
            self._closing[episode_id] = episode


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
