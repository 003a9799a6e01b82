"""Scaling of rewards: they are divided by the running deviation of the discounted return, not centred.

The statistic is a filter like those of observations, so it is exchanged, published and saved as these are. Source:
Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, section 3; VecNormalize of Stable-Baselines3 does the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.observation.filters import EPSILON, ConcurrentMeanStdFilter
from aiorl.data.discounted import discounted_sums

__all__ = ["ReturnFilter", "RewardScaler", "returns_of"]

F32 = NDArray[np.float32]

_CLIP = 10.0
_MAX_CARRIED = 1 << 16
"""Trajectories whose return is remembered until they go on; some are broken off and never do."""


def returns_of(policy_id: str) -> str:
    """Name, among the filters by policy id, of the statistic of a policy's returns; no policy has a slash in its id."""
    return f"{policy_id}/returns"


class ReturnFilter(ConcurrentMeanStdFilter):
    """Running statistic of discounted returns."""

    def __init__(self, shape: tuple[int, ...] = (1,), clip: float | None = _CLIP, *, num_kept: int = 0) -> None:
        """Start with no samples; the arguments are those of every filter."""
        super().__init__(shape, clip, num_kept=num_kept)

    def scale(self, returns: NDArray[np.float64]) -> float:
        """Take returns [B] in, unless the statistic is frozen; return what rewards are multiplied with then."""
        with self._lock:
            if len(returns) and not self.is_frozen:
                self(returns[:, None])
            n, m2 = self._stat.n, float(self._stat.m2[0])
        return 1.0 / float(np.sqrt((m2 / n if n else 1.0) + EPSILON))


class RewardScaler:
    """Scales the rewards of one sampler's trajectories, and remembers the returns of those that go on.

    All rewards of a call are scaled alike, by the statistic that has taken their returns in. Returns begin anew with
    each episode.
    """

    def __init__(self, returns: ReturnFilter, discount: float) -> None:
        """Take the statistic, and the discount of a return per step."""
        self._returns = returns
        self._discount = discount
        self._by_env: NDArray[np.float64] | None = None
        self._by_key: dict[Hashable, float] = {}

    def of_envs(self, rewards: F32, dones: NDArray[np.bool_], valid: NDArray[np.bool_] | None = None) -> F32:
        """Scale the next steps of all environments.

        Args:
            rewards: [T, N] float32.
            dones: [T, N], where an episode ends.
            valid: [T, N], False where a row is no transition; None = all are.
        Returns: [T, N] float32.
        """
        own = rewards.astype(np.float64)
        if valid is not None:
            own[~valid] = 0.0
        if self._by_env is not None:
            own[0] += self._discount * self._by_env
        returns = self._sums(own, dones)
        self._by_env = np.where(dones[-1], 0.0, returns[-1])
        return self._scaled(rewards, returns.reshape(-1) if valid is None else returns[valid])

    def of_trajectories(
        self, rewards: F32, ends: NDArray[np.int64], is_over: NDArray[np.bool_], keys: Sequence[Hashable]
    ) -> F32:
        """Scale trajectories that lie one behind the other.

        Args:
            rewards: [B] float32.
            ends: [K] behind the last row of each.
            is_over: [K] no more of it follows.
            keys: [K] what tells whose trajectory goes on later.
        Returns: [B] float32.
        """
        own = rewards.astype(np.float64)
        cut = np.zeros((len(own), 1), np.bool_)
        cut[ends - 1] = True
        sums = np.empty_like(own)
        first = 0
        for end, over, key in zip(ends.tolist(), is_over.tolist(), keys, strict=True):
            own[first] += self._discount * self._by_key.pop(key, 0.0)
            sums[first:end] = self._sums(own[first:end, None], cut[first:end])[:, 0]
            if not over:
                self._by_key[key] = float(sums[end - 1])
            first = end
        while len(self._by_key) > _MAX_CARRIED:
            del self._by_key[next(iter(self._by_key))]
        return self._scaled(rewards, sums)

    def _sums(self, rewards: NDArray[np.float64], dones: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Discounted sums [T, N] of what came until each step, from the beginning of its episode."""
        decay = np.empty_like(rewards)
        decay[0] = 0.0
        decay[1:] = np.where(dones[:-1], 0.0, self._discount)
        sums: NDArray[np.float64] = discounted_sums(rewards[::-1].copy(), decay[::-1])[::-1]
        return sums

    def _scaled(self, rewards: F32, returns: NDArray[Any]) -> F32:
        scaled: F32 = (rewards * self._returns.scale(returns)).astype(np.float32)
        return np.clip(scaled, -_CLIP, _CLIP, out=scaled)
