"""AgentTrack: what is remembered of one agent between two turns of its episode."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch

if TYPE_CHECKING:
    from aiorl.sampler.episode import MultiAgentEpisode
    from aiorl.sampler.lane import Lane

__all__ = ["AgentTrack"]

Array = NDArray[Any]


class AgentTrack:
    """One agent's place in an episode, and its rows that are not yet postprocessed.

    A row runs from one slot of the policy's store to another: observation, action and what the policy made
    of it come from the first, the next observation from the second.

    Attributes:
        agent_id: the agent.
        policy_id: its policy for this episode.
        index: its number in the episode, by order of appearance.
        episode: the episode.
        env_id: its environment.
        lane: where its policy's observations go.
        incoming: slot of the observation of this turn.
        slot: slot of the latest observation, 0 before there is one.
        acted: slot of the latest evaluation, 0 before there is one.
        fed: slot whose action is shown to the policy as the previous one; 0 where an episode starts.
        state: slot whose recurrent state goes on; 0 = the initial state.
        reward: rewards since the latest observation.
        last_reward: reward of the latest row.
        prev_reward: reward of the row before.
        raw_obs: latest observation as the environment gave it.
        info: latest info.
        done: its own flag said that it is done.
        seen_at: number of the latest turn it was observed in.
        has_rows: a row was recorded in this episode.
        starts: slot in which each row not yet postprocessed starts.
    """

    __slots__ = (
        "_ends",
        "_frozen",
        "_infos",
        "_rewards",
        "_steps",
        "_terminateds",
        "_truncateds",
        "acted",
        "agent_id",
        "done",
        "env_id",
        "episode",
        "fed",
        "has_rows",
        "incoming",
        "index",
        "info",
        "key",
        "lane",
        "last_reward",
        "policy_id",
        "prev_reward",
        "raw_obs",
        "reward",
        "seen_at",
        "slot",
        "starts",
        "state",
    )

    def __init__(self, agent_id: Any, index: int, lane: Lane, episode: MultiAgentEpisode) -> None:
        """Nothing observed yet."""
        self.agent_id = agent_id
        self.policy_id = lane.policy_id
        self.key = (agent_id, lane.policy_id)
        self.index = index
        self.episode = episode
        self.env_id = episode.env_id
        self.lane = lane
        self.incoming = self.slot = self.acted = self.fed = self.state = 0
        self.reward = self.last_reward = self.prev_reward = 0.0
        self.raw_obs: Any = None
        self.info: dict[str, Any] = {}
        self.done = self.has_rows = False
        self.seen_at = 0
        self.discard_rows()
        self._frozen: dict[str, Any] | None = None

    def add_row(self, end: int, reward: float, t: int, terminated: bool, truncated: bool, info: dict[str, Any]) -> None:
        """Record the row from the latest observation to slot ``end``."""
        self.starts.append(self.slot)
        self._ends.append(end)
        self._rewards.append(reward)
        self._steps.append(t)
        self._terminateds.append(terminated)
        self._truncateds.append(truncated)
        self._infos.append(info)
        self.has_rows = True

    def rows(self, clip_rewards: float) -> SampleBatch:
        """The rows as a batch of their own memory.

        Args:
            clip_rewards: rewards are limited to ``[-clip_rewards, clip_rewards]``; 0 = not at all.
        """
        starts, ends = np.array(self.starts, np.int64), np.array(self._ends, np.int64)
        count = len(starts)
        store, lane = self.lane.store, self.lane
        reward_column = np.array(self._rewards, np.float32)
        if clip_rewards:
            np.clip(reward_column, -clip_rewards, clip_rewards, out=reward_column)
        terminateds, truncateds = np.array(self._terminateds, np.bool_), np.array(self._truncateds, np.bool_)
        infos, episode_ids, indices = np.empty(count, np.object_), np.empty(count, np.int64), np.empty(count, np.int32)
        infos[:] = self._infos
        episode_ids.fill(self.episode.episode_id)
        indices.fill(self.index)
        observations = store[c.OBS]
        columns: dict[str, Any] = {
            c.T: np.array(self._steps, np.int32),
            c.EPS_ID: episode_ids,
            c.AGENT_INDEX: indices,
            c.OBS: observations.take(starts, 0),
            c.ACTIONS: store[c.ACTIONS].take(starts, 0),
            c.REWARDS: reward_column,
            c.PREV_ACTIONS: store[c.PREV_ACTIONS].take(starts, 0),
            c.PREV_REWARDS: store[c.PREV_REWARDS].take(starts, 0),
            c.TERMINATEDS: terminateds,
            c.TRUNCATEDS: truncateds,
            c.DONES: terminateds | truncateds,
            c.INFOS: infos,
            c.NEW_OBS: observations.take(ends, 0),
        }
        for name in lane.extra_columns:
            columns[name] = store[name].take(starts, 0)
        return SampleBatch(columns)

    def pieces(self) -> list[tuple[int, int]]:
        """First and behind the last row of each run of rows in which every row starts where the one before ended.

        It is one, unless rows in between were not recorded.
        """
        starts, count = self.starts, len(self.starts)
        if starts[1:] == self._ends[:-1]:
            return [(0, count)]
        cuts = [row for row in range(1, count) if starts[row] != self._ends[row - 1]]
        return list(itertools.pairwise([0, *cuts, count]))

    def discard_rows(self) -> None:
        """Forget the rows not yet postprocessed."""
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._rewards: list[float] = []
        self._steps: list[int] = []
        self._terminateds: list[bool] = []
        self._truncateds: list[bool] = []
        self._infos: list[dict[str, Any]] = []

    def live_slots(self) -> list[int]:
        """Slots still needed."""
        return [*self.starts, *self._ends, self.slot, self.acted, self.fed, self.state]

    def move_slots(self, moved: NDArray[np.int64]) -> None:
        """Follow the store's compaction: old slot -> new slot."""
        self.starts = moved[self.starts].tolist() if self.starts else []
        self._ends = moved[self._ends].tolist() if self._ends else []
        self.slot, self.acted, self.fed, self.state = moved[[self.slot, self.acted, self.fed, self.state]].tolist()

    # --- what callbacks may ask ---

    def entry(self, name: str, slot: int) -> Any:
        """A copy of one entry of the store; after the episode, of what was kept of it."""
        if self._frozen is not None:
            return self._frozen[name]
        return self.lane.store[name][slot].copy()

    def latest_obs(self) -> Array | None:
        """Latest filtered observation."""
        return self.entry(c.OBS, self.slot) if self.slot else None

    def pi_info(self) -> dict[str, Any]:
        """Extra columns of the latest evaluation, empty before any."""
        if not self.acted:
            return {}
        return {name: self.entry(name, self.acted) for name in self.lane.extra_columns}

    def rnn_state(self) -> list[Array]:
        """Recurrent state that goes into the next evaluation."""
        return [self.entry(name, self.state) for name in self.lane.state_columns]

    def freeze(self) -> None:
        """Keep what may be asked of a finished episode; its slots may be forgotten."""
        frozen = {name: self.entry(name, self.acted) for name in (c.ACTIONS, c.PREV_ACTIONS)}
        if self.slot:
            frozen[c.OBS] = self.entry(c.OBS, self.slot)
        if self.acted:
            frozen.update(self.pi_info())
        frozen.update({name: self.entry(name, self.state) for name in self.lane.state_columns})
        self._frozen = frozen
