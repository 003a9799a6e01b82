"""One result for each training iteration: episodes smoothed, counters, rates, lags and the ledger.

Averages over episodes follow one rule: all episodes that ended in the iteration, and if those are fewer
than `metrics_smoothing_episodes`, the newest earlier ones too; NaN when none has ended yet. Rewards by policy (one
value for each agent and episode) and custom metrics follow it too, each name for itself. Apart from them stands
`episode_reward_mean_last_100`, the mean return of the last 100 finished episodes in order of arrival: the one that
a run is stopped by, since it means the same however many episodes an iteration brings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.metrics import MAX_NAMES, EpisodeColumns

__all__ = ["STOP_WINDOW", "Progress", "Results"]

STOP_WINDOW = 100
"""Finished episodes that the stop criterion looks at."""

_KINDS = ("mean", "min", "max")
_MAX_HIST = 1000
_PERF_KEYS = ("env_wait_time", "processing_time", "inference_time")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the learner stands at the end of an iteration; counters are totals of the run.

    Attributes:
        env_steps_sampled: env steps that reached the learner.
        env_steps_trained: env steps that were trained on.
        agent_steps_sampled: the same as env_steps_sampled with one agent per environment.
        updates: updates done; the policy version is their number.
        updates_skipped: updates whose loss or gradients were not finite, so that weights stayed.
        num_healthy_workers: workers that are there and sample.
        ledger: env steps by where they are; the sum of all but "sampled" is "sampled".
        transport: gauges such as queue depths, taken over as they are.
        bytes_in: bytes received from workers.
        bytes_out: bytes sent to workers.
        learner: metrics of the algorithm, such as its losses.
        perf: CPU and memory use, if the run wants it.
    """

    env_steps_sampled: int
    env_steps_trained: int
    agent_steps_sampled: int = 0
    updates: int = 0
    updates_skipped: int = 0
    num_healthy_workers: int = 0
    ledger: Mapping[str, Any] = field(default_factory=dict)
    transport: Mapping[str, float] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    learner: Mapping[str, float] = field(default_factory=dict)
    perf: Mapping[str, float] | None = None


class Results:
    """Gathers what happens in an iteration and makes its result; keeps what the next ones need.

    Args:
        smoothing_episodes: `metrics_smoothing_episodes`, at least 1.
        now: a monotonic clock in seconds, as in `finish_iteration`.
    """

    def __init__(self, smoothing_episodes: int, now: float) -> None:
        self._smoothing = smoothing_episodes
        self._keep = max(smoothing_episodes, STOP_WINDOW)
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self._rewards: NDArray[np.float64] = np.zeros(0, np.float64)
        self._new_lengths: list[NDArray[Any]] = []
        self._new_rewards: list[NDArray[Any]] = []
        self._policy_rewards = _Windows(smoothing_episodes)
        self._custom = _Windows(smoothing_episodes)
        self._hist = _Windows(_MAX_HIST)
        self._perf: dict[str, float] = {}
        self._lag_min, self._lag_max, self._lag_sum, self._lag_steps = math.inf, -math.inf, 0.0, 0
        self._iteration = 0
        self._episodes_total = 0
        self._time_total_s = 0.0
        self._last_now = now
        self._last = Progress(0, 0)

    @property
    def training_iteration(self) -> int:
        """Iterations finished so far."""
        return self._iteration

    @property
    def episodes_total(self) -> int:
        """Episodes finished so far, those of the running iteration included."""
        return self._episodes_total

    @property
    def time_total_s(self) -> float:
        """Training time up to the last finished iteration, without the pauses between resumed runs."""
        return self._time_total_s

    def add_episodes(self, episodes: EpisodeColumns) -> None:
        """Takes finished episodes, in order of arrival."""
        if len(episodes.lengths):
            self._new_lengths.append(episodes.lengths)
            self._new_rewards.append(episodes.rewards)
            self._episodes_total += len(episodes.lengths)
        self._policy_rewards.add(episodes.policy_rewards)
        self._custom.add(episodes.custom)
        self._hist.add(episodes.hist)

    def add_perf(self, perf: Mapping[str, float]) -> None:
        """Takes a sampler's perf stats of one fragment: iters and seconds, see `PerfStats`."""
        for name, value in perf.items():
            self._perf[name] = self._perf.get(name, 0.0) + value

    def add_lag(self, lag: int, env_steps: int) -> None:
        """Takes the policy lag that `env_steps` trained on have: versions between acting and training."""
        self._lag_min, self._lag_max = min(self._lag_min, lag), max(self._lag_max, lag)
        self._lag_sum += lag * env_steps
        self._lag_steps += env_steps

    def mean_last(self, count: int = STOP_WINDOW) -> float:
        """Mean return of the last `count` finished episodes, or of all if there are fewer; NaN if there are none.

        Args:
            count: at most the larger of 100 and `metrics_smoothing_episodes`.
        """
        newest = self._newest(count)
        return float(newest.mean()) if newest.size else math.nan

    def has_reached(self, stop_return: float) -> bool:
        """Whether 100 episodes have finished and the last 100 reach `stop_return` on average, but for rounding."""
        newest = self._newest(STOP_WINDOW)
        # what float32 sums of rewards lose may not keep a run from its end
        slack = 1e-6 * max(1.0, abs(stop_return))
        return newest.size >= STOP_WINDOW and float(newest.mean()) >= stop_return - slack

    def finish_iteration(self, now: float, progress: Progress, *, timestamp: float = 0.0) -> dict[str, Any]:
        """The result of the iteration that ends now; the next one starts.

        Args:
            now: monotonic clock in seconds, as at construction.
            progress: where the learner stands.
            timestamp: wall clock, seconds since the epoch.
        Returns: a dict of numbers, strings, lists and dicts.
        """
        last, seconds = self._last, max(now - self._last_now, 1e-9)
        self._iteration += 1
        self._time_total_s += now - self._last_now
        last_100 = self.mean_last()
        result: dict[str, Any] = {
            "training_iteration": self._iteration,
            "timesteps_total": progress.env_steps_sampled,
            "timesteps_this_iter": progress.env_steps_sampled - last.env_steps_sampled,
            "env_steps_trained_total": progress.env_steps_trained,
            "agent_steps_total": progress.agent_steps_sampled,
            "episodes_total": self._episodes_total,
            "time_total_s": self._time_total_s,
            "time_this_iter_s": now - self._last_now,
            "timestamp": timestamp,
            **self._take_episodes(),
            "episode_reward_mean_last_100": last_100,
            "sampled_steps_per_s": (progress.env_steps_sampled - last.env_steps_sampled) / seconds,
            "trained_steps_per_s": (progress.env_steps_trained - last.env_steps_trained) / seconds,
            "num_healthy_workers": progress.num_healthy_workers,
            "updates_total": progress.updates,
            "updates_this_iter": progress.updates - last.updates,
            "updates_skipped": progress.updates_skipped,
            "policy_lag": self._take_lag(),
            "ledger": dict(progress.ledger),
            "sampler_perf": self._take_perf(),
            "transport": {
                "bytes_in_per_s": (progress.bytes_in - last.bytes_in) / seconds,
                "bytes_out_per_s": (progress.bytes_out - last.bytes_out) / seconds,
                **progress.transport,
            },
            "learner": dict(progress.learner),
        }
        if progress.perf is not None:
            result["perf"] = dict(progress.perf)
        self._last, self._last_now = progress, now
        return result

    def to_state(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain data fit for JSON."""
        lengths, rewards = self._with_new()
        return {
            "training_iteration": self._iteration,
            "episodes_total": self._episodes_total,
            "time_total_s": self._time_total_s,
            "lengths": lengths[-self._keep :].tolist(),
            "rewards": rewards[-self._keep :].tolist(),
            "policy_rewards": self._policy_rewards.to_state(),
            "custom": self._custom.to_state(),
            "hist": self._hist.to_state(),
        }

    def from_state(self, state: Mapping[str, Any], now: float, progress: Progress) -> None:
        """Goes on where `state` was taken; episodes in it count as earlier ones.

        Args:
            state: what `to_state` gave.
            now: monotonic clock of this process: the first iteration starts here.
            progress: the learner's counters as they were restored, so that rates start from them.
        """
        self._iteration = int(state["training_iteration"])
        self._episodes_total = int(state["episodes_total"])
        self._time_total_s = float(state["time_total_s"])
        self._lengths = np.asarray(state["lengths"], np.int64)
        self._rewards = np.asarray(state["rewards"], np.float64)
        self._new_lengths, self._new_rewards = [], []
        for name, windows in (
            ("policy_rewards", self._policy_rewards), ("custom", self._custom), ("hist", self._hist),
        ):  # fmt: skip
            windows.from_state(state.get(name, {}))
        self._last, self._last_now = progress, now

    def _with_new(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return (
            np.concatenate([self._lengths, *self._new_lengths], dtype=np.int64, casting="unsafe"),
            np.concatenate([self._rewards, *self._new_rewards], dtype=np.float64, casting="unsafe"),
        )

    def _newest(self, count: int) -> NDArray[np.float64]:
        if self._new_rewards and len(self._new_rewards[-1]) >= count:
            return np.asarray(self._new_rewards[-1][-count:], np.float64)
        return self._with_new()[1][-count:]

    def _take_episodes(self) -> dict[str, Any]:
        """The averages over episodes, and the new ones become earlier ones."""
        lengths, rewards = self._with_new()
        num_new = len(lengths) - len(self._lengths)
        window = max(num_new, self._smoothing)
        shown_lengths, shown_rewards = lengths[-window:], rewards[-window:]
        self._lengths, self._rewards = lengths[-self._keep :].copy(), rewards[-self._keep :].copy()
        self._new_lengths, self._new_rewards = [], []
        policy_rewards, custom, hist = self._policy_rewards.take(), self._custom.take(), self._hist.take()
        some = bool(shown_rewards.size)
        return {
            "episodes_this_iter": num_new,
            "episode_reward_mean": float(shown_rewards.mean()) if some else math.nan,
            "episode_reward_min": float(shown_rewards.min()) if some else math.nan,
            "episode_reward_max": float(shown_rewards.max()) if some else math.nan,
            "episode_len_mean": float(shown_lengths.mean()) if some else math.nan,
            **{
                f"policy_reward_{kind}": {
                    name: float(getattr(values, kind)()) for name, values in policy_rewards.items()
                }
                for kind in _KINDS
            },
            "custom_metrics": {
                f"{name}_{kind}": float(getattr(values, kind)()) for name, values in custom.items() for kind in _KINDS
            },
            "hist_stats": {
                **{name: values[-_MAX_HIST:].tolist() for name, values in hist.items()},
                "episode_reward": shown_rewards[-self._smoothing :].tolist(),
                "episode_lengths": shown_lengths[-self._smoothing :].tolist(),
            },
        }

    def _take_lag(self) -> dict[str, float]:
        if not self._lag_steps:
            return {"min": math.nan, "mean": math.nan, "max": math.nan}
        lag = {"min": float(self._lag_min), "mean": self._lag_sum / self._lag_steps, "max": float(self._lag_max)}
        self._lag_min, self._lag_max, self._lag_sum, self._lag_steps = math.inf, -math.inf, 0.0, 0
        return lag

    def _take_perf(self) -> dict[str, float]:
        perf, self._perf = self._perf, {}
        iters = perf.get("iters", 0.0)
        factor = 1000.0 / iters if iters else 0.0
        return {f"mean_{name.removesuffix('_time')}_ms": perf.get(name, 0.0) * factor for name in _PERF_KEYS}


class _Windows:
    """Values by name: those of the running iteration, and the newest earlier ones up to a number."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._earlier: dict[str, NDArray[np.float64]] = {}
        self._new: dict[str, list[NDArray[Any]]] = {}

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        for name, array in values.items():
            is_known = name in self._new or name in self._earlier
            if array.size and (is_known or len({**self._new, **self._earlier}) < MAX_NAMES):
                self._new.setdefault(name, []).append(array)

    def take(self) -> dict[str, NDArray[np.float64]]:
        """All new values and as many earlier ones as are needed for the number wanted; none of the names is empty."""
        num_new = {name: sum(map(len, arrays)) for name, arrays in self._new.items()}
        joined = self._joined()
        self._new = {}
        self._earlier = {name: values[-self._least :].copy() for name, values in joined.items()}
        return {name: values[-max(num_new.get(name, 0), self._least) :] for name, values in sorted(joined.items())}

    def to_state(self) -> dict[str, list[float]]:
        return {name: values[-self._least :].tolist() for name, values in self._joined().items()}

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._earlier = {name: np.asarray(values, np.float64) for name, values in state.items()}
        self._new = {}

    def _joined(self) -> dict[str, NDArray[np.float64]]:
        empty = np.zeros(0, np.float64)
        return {
            name: np.concatenate([self._earlier.get(name, empty), *self._new.get(name, [])], dtype=np.float64)
            for name in {**self._earlier, **self._new}
        }
