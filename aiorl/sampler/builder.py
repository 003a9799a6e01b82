"""BatchBuilder: rows of one environment until they are cut, postprocessed by trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiorl.data import columns as c
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, PolicyError
from aiorl.policy.policy import Policy
from aiorl.sampler.episode import MultiAgentEpisode
from aiorl.sampler.track import AgentTrack

__all__ = ["BatchBuilder", "OriginalBatches", "check_trajectory"]

OnPostprocessed = Callable[[MultiAgentEpisode, AgentTrack, SampleBatch, Mapping[Any, tuple[Policy, SampleBatch]]], None]
"""Called with the episode, the agent, its batch and the original batches of all agents by agent id."""


class BatchBuilder:
    """Collects rows, episode after episode, and builds batches of them.

    Attributes:
        count: environment steps since the last batch.
        held: rows held, of all agents.
    """

    def __init__(self, clip_rewards: float, on_postprocessed: OnPostprocessed, *, is_multi_agent: bool = False) -> None:
        """Make an empty builder.

        Args:
            clip_rewards: rewards of rows are limited to ``[-clip_rewards, clip_rewards]``; 0 = not at all.
            on_postprocessed: hook.
            is_multi_agent: there are other policies than the default one; batches then are multi-agent ones, whichever
                policies have rows in them.
        """
        self.count = 0
        self._clip_rewards = clip_rewards
        self._on_postprocessed = on_postprocessed
        self._is_multi_agent = is_multi_agent
        self._pending: list[AgentTrack] = []
        self._done: dict[str, list[SampleBatch]] = {}
        self.held = 0

    def expect_rows(self, track: AgentTrack) -> None:
        """An agent without rows is about to get one."""
        self._pending.append(track)

    def has_pending_agent_data(self) -> bool:
        """There are rows not yet postprocessed."""
        return bool(self._pending)

    def total(self) -> int:
        """Rows held, of all agents."""
        return self.held

    def postprocess(self, episode: MultiAgentEpisode) -> None:
        """Postprocess what each agent did since the last time.

        It is one piece of one episode, or several where rows in between were not recorded: what follows a row's end
        is then not the next row, so each piece is a trajectory of its own.

        Raises:
            BatchError: rows that are not one trajectory (also a ValueError).
            PolicyError: the policy gave back no batch (also a ValueError).
        """
        tracks, self._pending = self._pending, []
        originals = OriginalBatches(tracks, self._clip_rewards)
        several = len(tracks) > 1
        for track in tracks:
            rows = track.rows(self._clip_rewards)
            pieces = track.pieces()
            others: Mapping[Any, Any] = originals.without(track.agent_id) if several else {}
            for first, end in pieces:
                own = rows if len(pieces) == 1 else rows.slice(first, end)
                check_trajectory(own)
                batch = track.lane.policy.postprocess_trajectory(own, others, episode)
                if not isinstance(batch, SampleBatch):
                    raise PolicyError(
                        f"postprocess_trajectory of policy {track.policy_id!r} ({type(track.lane.policy).__name__}) "
                        f"returned {type(batch).__name__}, expected a SampleBatch; return the batch it was given"
                    )
                self._on_postprocessed(episode, track, batch, originals)
                self._done.setdefault(track.policy_id, []).append(batch)
                self.held += batch.count
            self.held -= len(track.starts)
        originals.close()
        for track in tracks:
            track.discard_rows()

    def build(self, episode: MultiAgentEpisode) -> SampleBatch | MultiAgentBatch:
        """All rows as one batch; a plain one if there is only the default policy. The builder is empty afterwards."""
        self.postprocess(episode)
        joined = {policy_id: SampleBatch.concat(batches) for policy_id, batches in self._done.items()}
        batch: SampleBatch | MultiAgentBatch
        if self._is_multi_agent:
            batch = MultiAgentBatch(joined, self.count)
        else:
            batch = MultiAgentBatch.wrap_as_needed(joined, self.count)
        self.count = self.held = 0
        self._done = {}
        return batch

    def discard(self) -> None:
        """Forget everything held."""
        for track in self._pending:
            track.discard_rows()
        self.count = self.held = 0
        self._pending, self._done = [], {}


def check_trajectory(batch: SampleBatch) -> None:
    """Nothing, for rows of one agent in one episode.

    Raises:
        BatchError: a row before the last one is done, or the rows have several episode ids (also a ValueError).
    """
    dones, episode_ids = batch[c.DONES], batch[c.EPS_ID]
    if np.count_nonzero(dones[:-1]):
        inner = int(np.flatnonzero(dones[:-1])[0])
        raise BatchError(c.DONES, "rows of a single trajectory", f"row {inner} of {batch.count} is done")
    if np.count_nonzero(episode_ids[1:] != episode_ids[:-1]):
        raise BatchError(c.EPS_ID, "rows of a single trajectory", f"episodes {np.unique(episode_ids).tolist()}")


class OriginalBatches(Mapping[Any, tuple[Policy, SampleBatch]]):
    """Agent id -> (policy, batch before postprocessing), of the agents that are postprocessed together.

    A batch is made when it is first asked for, with memory of its own: nothing that is done to one agent's
    batch is seen in another's. What was not asked for during postprocessing cannot be had later.
    """

    def __init__(self, tracks: Sequence[AgentTrack], clip_rewards: float) -> None:
        """Cover these agents."""
        self._tracks = {track.agent_id: track for track in tracks}
        self._clip_rewards = clip_rewards
        self._made: dict[Any, tuple[Policy, SampleBatch]] = {}
        self._is_over = False

    def __getitem__(self, agent_id: Any) -> tuple[Policy, SampleBatch]:
        pair = self._made.get(agent_id)
        if pair is None:
            track = self._tracks[agent_id]
            if self._is_over:
                raise RuntimeError("the original batches are there during postprocessing only")
            pair = self._made[agent_id] = (track.lane.policy, track.rows(self._clip_rewards))
        return pair

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tracks)

    def __len__(self) -> int:
        return len(self._tracks)

    def without(self, agent_id: Any) -> Mapping[Any, tuple[Policy, SampleBatch]]:
        """The same batches, but one agent's."""
        return _Without(self, agent_id)

    def close(self) -> None:
        """Postprocessing is over."""
        self._is_over = True


class _Without(Mapping[Any, tuple[Policy, SampleBatch]]):
    """A view of OriginalBatches that leaves one agent out."""

    def __init__(self, originals: OriginalBatches, agent_id: Any) -> None:
        self._originals = originals
        self._agent_id = agent_id

    def __getitem__(self, agent_id: Any) -> tuple[Policy, SampleBatch]:
        if agent_id == self._agent_id:
            raise KeyError(agent_id)
        return self._originals[agent_id]

    def __iter__(self) -> Iterator[Any]:
        return (agent_id for agent_id in self._originals if agent_id != self._agent_id)

    def __len__(self) -> int:
        return len(self._originals) - 1
