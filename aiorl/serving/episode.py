"""Rows that are recorded of an episode of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import Array
from aiorl.data.sample_batch import SampleBatch

if TYPE_CHECKING:
    from prometheus_client import Counter  # which workers of clients do without

_ROW_BYTES = 500  # of the objects around the arrays


class EpisodeCounts(Protocol):
    """Counts that all episodes of a `Recorder` add to.

    Attributes:
        episodes: counts ended episodes by policy and by what became of them.
        num_bytes: memory of the episodes that have not ended.
    """

    episodes: Counter
    num_bytes: int


class Episode:
    """Rows of an episode.

    Attributes:
        policy: name of its policy.
        num_bytes: their memory.
    """

    def __init__(self, counts: EpisodeCounts, policy: str) -> None:
        """Begin without rows; they are counted in `counts`."""
        self.policy = policy
        self.num_bytes = 0
        self._counts = counts
        self._rows: list[tuple[Array, Array, float, float]] = []

    def add(self, obs: Array, action: Array, reward: float, logp: float) -> None:
        """Add a row: the policy's input [...], the action [...], the reward before it, and the
        log-probability.
        """
        self._rows.append((obs, action, reward, logp))
        size = obs.nbytes + action.nbytes + _ROW_BYTES
        self.num_bytes += size
        self._counts.num_bytes += size

    def end(self, fate: str) -> None:
        """Count it, and give its memory back."""
        self._counts.episodes.labels(self.policy, fate).inc()
        self._counts.num_bytes -= self.num_bytes

    def batch(self, number: int, last: Array, reward: float, is_truncated: bool) -> SampleBatch:
        """Return its rows [B, ...].

        Args:
            number: the episode's number, for ``eps_id``.
            last: the policy's input [...] after the last row.
            reward: the reward after the last row.
            is_truncated: True if the episode could have gone further.
        """
        observations, actions, rewards, logp = zip(*self._rows, strict=True)
        size = len(actions)
        obs = np.stack([*observations, last])
        is_last = np.arange(size) == size - 1
        batch = SampleBatch(
            {
                c.T: np.arange(size, dtype=np.int32),
                c.EPS_ID: np.full(size, number),
                c.AGENT_INDEX: np.zeros(size, int),
                c.OBS: obs[:-1],
                c.NEW_OBS: obs[1:],
                c.ACTIONS: np.stack(actions),
                c.REWARDS: np.array([*rewards[1:], reward], np.float32),
                c.DONES: is_last,
                c.TERMINATEDS: is_last & (not is_truncated),
                c.TRUNCATEDS: is_last & is_truncated,
            }
        )
        if np.isfinite(logp).all():
            batch[c.ACTION_LOGP] = np.array(logp, np.float32)
        return batch
