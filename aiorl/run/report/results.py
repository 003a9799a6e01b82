"""One result for each training iteration: episodes smoothed, counters, rates, lags and the ledger.

Averages over episodes follow one rule: all episodes that ended in the iteration, and if those are fewer
than `metrics_smoothing_episodes`, the newest earlier ones too; NaN when none has ended yet. Rewards by policy (one
value for each agent and episode), custom metrics and off-policy estimates follow it too, each name for itself; a name
that no worker has told of is not there. Apart from them stands
`episode_reward_mean_last_100`, the mean return of the last 100 finished episodes in order of arrival: the one that
a run is stopped by, since it means the same however many episodes an iteration brings.

Names and numbers come from workers, so all of it is bounded: names of a run, values held of each, values in one
result. A name that is silent for long is forgotten. What an iteration costs does not depend on how many values came.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from aiorl.data.metrics import MAX_HIST, MAX_NAME, EpisodeColumns, PerfStats

logger = logging.getLogger(__name__)

STOP_WINDOW = 100
"""Finished episodes that the stop criterion looks at."""

_KINDS = ("mean", "min", "max")

_MAX_POLICIES = 256  # in a run, over all workers, likewise below
_MAX_CUSTOM = 300
_MAX_HISTORIES = 50
_MAX_ESTIMATES = 50  # names of an estimator's metric
_MAX_HIST_VALUES = 3000  # of all histories in one result
_FEW = 100  # values that are summed up in Python
# A name is forgotten once it is silent for the longer time; for the shorter one, where episodes without it have ended
_FORGET_S, _FORGET_EARLY_S, _FORGET_EPISODES = 1800.0, 10.0, 1000
_RATE_S = 1.0  # rates are over so much time at least, where the run has had that much


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

    Attributes:
        training_iteration: iterations finished so far.
        episodes_total: episodes finished so far, those of the running iteration included.
        time_total_s: training time up to the last finished iteration, without the pauses between resumed runs.
    """

    def __init__(self, smoothing_episodes: int, now: float) -> None:
        self._smoothing = smoothing_episodes
        self._keep = max(smoothing_episodes, STOP_WINDOW)
        self._lengths = _Window(smoothing_episodes, self._keep)
        self._rewards = _Window(smoothing_episodes, self._keep)

        def smoothed() -> _Window:
            return _Window(smoothing_episodes, smoothing_episodes)

        silent = max(_FORGET_EPISODES, 10 * smoothing_episodes)
        self._policy_rewards = _Named("the reward of policy", smoothed, _MAX_POLICIES, silent)
        self._custom = _Named("custom metric", smoothed, _MAX_CUSTOM, silent)
        self._hist = _Named("history", lambda: _Window(1, MAX_HIST), _MAX_HISTORIES, silent)
        self._estimates = _Named("estimate", smoothed, _MAX_ESTIMATES, silent)
        self._perf = PerfStats()
        self._lag_min, self._lag_max, self._lag_sum, self._lag_steps = math.inf, -math.inf, 0.0, 0
        self.training_iteration = 0
        self.episodes_total = 0
        self.time_total_s = 0.0
        self._last_now = now
        self._last = Progress(0, 0)
        # the beginning of work, and ends of iterations, from the last that is _RATE_S old on
        self._before = deque([(now, self._last)])

    def begin_rates(self, now: float, progress: Progress) -> None:
        """Work begins now, after a start-up that is not part of any rate.

        Args:
            now: monotonic clock.
            progress: where the learner stands.
        """
        self._before = deque([(now, progress)])

    def leave_out_pause(self, now: float) -> None:
        """The iteration begins now: since the last one ended, nobody was training."""
        pause_s = now - self._last_now
        # work may have begun within the pause
        self._before = deque((min(at + pause_s, now), progress) for at, progress in self._before)
        self._last_now = now

    def add_episodes(self, episodes: EpisodeColumns) -> None:
        """Takes finished episodes, in order of arrival."""
        if len(episodes.lengths):
            self._lengths.add(episodes.lengths)
            self._rewards.add(episodes.rewards)
            self.episodes_total += len(episodes.lengths)
        self._policy_rewards.add(episodes.policy_rewards)
        self._custom.add(episodes.custom)
        self._hist.add(episodes.hist)
        self._estimates.add(episodes.estimates)

    def add_perf(self, perf: Mapping[str, float]) -> None:
        """Takes a sampler's perf stats of one fragment, those of `PerfStats`: iters and seconds."""
        self._perf.add(perf)

    def add_lag(self, lag: int, env_steps: int) -> None:
        """Takes the policy lag that `env_steps` trained on have: versions between acting and training."""
        self._lag_min, self._lag_max = min(self._lag_min, lag), max(self._lag_max, lag)
        self._lag_sum += lag * env_steps
        self._lag_steps += env_steps

    def mean_last(self) -> float:
        """Mean return of the last 100 finished episodes, or of all if there are fewer; NaN if there are none."""
        return _mean(self._rewards.newest(STOP_WINDOW))

    @property
    def newest_return(self) -> float:
        """Mean return of the last 100 episodes; NaN before as many have finished."""
        return self.mean_last() if self._rewards.newest(STOP_WINDOW).size >= STOP_WINDOW else math.nan

    def finish_iteration(self, now: float, progress: Progress, *, timestamp: float = 0.0) -> dict[str, Any]:
        """The result of the iteration that ends now; the next one starts.

        Args:
            now: monotonic clock in seconds, as at construction.
            progress: where the learner stands.
            timestamp: wall clock, seconds since the epoch.
        Returns: a dict of numbers, strings, lists and dicts.
        """
        last = self._last
        rate = self._rates(now, progress)
        self.training_iteration += 1
        self.time_total_s += now - self._last_now
        result: dict[str, Any] = {
            "training_iteration": self.training_iteration,
            "timesteps_total": progress.env_steps_sampled,
            "timesteps_this_iter": progress.env_steps_sampled - last.env_steps_sampled,
            "env_steps_trained_total": progress.env_steps_trained,
            "agent_steps_total": progress.agent_steps_sampled,
            "episodes_total": self.episodes_total,
            "time_total_s": self.time_total_s,
            "time_this_iter_s": now - self._last_now,
            "timestamp": timestamp,
            **self._take_episodes(now),
            "episode_reward_mean_last_100": self.mean_last(),
            "sampled_steps_per_s": rate("env_steps_sampled"),
            "trained_steps_per_s": rate("env_steps_trained"),
            "num_healthy_workers": progress.num_healthy_workers,
            "updates_total": progress.updates,
            "updates_this_iter": progress.updates - last.updates,
            "updates_skipped": progress.updates_skipped,
            "policy_lag": self._take_lag(),
            "ledger": dict(progress.ledger),
            "sampler_perf": self._perf.get(),
            "metrics_left_out": sum(named.num_left_out for named in self._named()),
            "transport": {
                "bytes_in_per_s": rate("bytes_in"),
                "bytes_out_per_s": rate("bytes_out"),
                **progress.transport,
            },
            "learner": dict(progress.learner),
        }
        if progress.perf is not None:
            result["perf"] = dict(progress.perf)
        self._perf = PerfStats()
        self._last, self._last_now = progress, now
        self._before.append((now, progress))
        return result

    def _rates(self, now: float, progress: Progress) -> Callable[[str], float]:
        """Counter of `Progress` -> what it has grown by in a second, over the last second at least.

        An iteration may take a few milliseconds, the last one of a run above all: what happens in those says nothing.
        """
        while len(self._before) > 1 and now - self._before[1][0] >= _RATE_S:
            self._before.popleft()
        since, then = self._before[0]
        seconds = max(now - since, 1e-9)
        return lambda name: float((getattr(progress, name) - getattr(then, name)) / seconds)

    def to_state(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain data fit for JSON."""
        return {
            "training_iteration": self.training_iteration,
            "episodes_total": self.episodes_total,
            "time_total_s": self.time_total_s,
            "lengths": self._lengths.newest(self._keep).astype(np.int64).tolist(),
            "rewards": self._rewards.newest(self._keep).tolist(),
            "policy_rewards": self._policy_rewards.to_state(self._smoothing),
            "custom": self._custom.to_state(self._smoothing),
            "hist": self._hist.to_state(self._hist_share()),
            "estimates": self._estimates.to_state(self._smoothing),
        }

    def from_state(self, state: Mapping[str, Any], now: float, progress: Progress) -> None:
        """Goes on where `state` was taken; episodes in it count as earlier ones.

        Args:
            state: what `to_state` gave.
            now: monotonic clock of this process: the first iteration starts here.
            progress: the learner's counters as they were restored, so that rates start from them.
        """
        self.training_iteration = int(state["training_iteration"])
        self.episodes_total = int(state["episodes_total"])
        self.time_total_s = float(state["time_total_s"])
        self._lengths.restore(np.asarray(state["lengths"], np.float64))
        self._rewards.restore(np.asarray(state["rewards"], np.float64))
        for name, named in zip(("policy_rewards", "custom", "hist", "estimates"), self._named(), strict=True):
            named.from_state(state.get(name, {}), now, self.episodes_total)
        self._last, self._last_now = progress, now
        self.begin_rates(now, progress)

    def _named(self) -> tuple[_Named, ...]:
        return self._policy_rewards, self._custom, self._hist, self._estimates

    def _hist_share(self) -> int:
        """Values of each history in a result and in a checkpoint."""
        return min(MAX_HIST, _MAX_HIST_VALUES // max(1, len(self._hist.items())))

    def _take_episodes(self, now: float) -> dict[str, Any]:
        """The averages over episodes, and the new ones become earlier ones."""
        num_new = self._rewards.take()
        self._lengths.take()
        for named in self._named():
            named.take(now, self.episodes_total)
        share = self._hist_share()
        mean, least, most = self._rewards.summary
        policy_rewards = [(name, window.summary) for name, window in self._policy_rewards.items()]
        custom = [(name, window.summary) for name, window in self._custom.items()]
        return {
            "episodes_this_iter": num_new,
            "episode_reward_mean": mean,
            "episode_reward_min": least,
            "episode_reward_max": most,
            "episode_len_mean": self._lengths.summary[0],
            **{
                f"policy_reward_{kind}": {name: summary[place] for name, summary in policy_rewards}
                for place, kind in enumerate(_KINDS)
            },
            "custom_metrics": {
                f"{name}_{kind}": value for name, summary in custom for kind, value in zip(_KINDS, summary, strict=True)
            },
            "off_policy_estimator": self._mean_estimates(),
            "hist_stats": {
                **{name: window.newest(share).tolist() for name, window in self._hist.items()},
                "episode_reward": self._rewards.newest(self._smoothing).tolist(),
                "episode_lengths": self._lengths.newest(self._smoothing).astype(np.int64).tolist(),
            },
        }

    def _mean_estimates(self) -> dict[str, dict[str, float]]:
        """Estimator -> metric -> mean over episodes."""
        means: dict[str, dict[str, float]] = {}
        for name, window in self._estimates.items():
            estimator, _, metric = name.partition("/")
            means.setdefault(estimator, {})[metric] = window.summary[0]
        return means

    def _take_lag(self) -> dict[str, float]:
        if not self._lag_steps:
            return {"min": math.nan, "mean": math.nan, "max": math.nan}
        lag = {"min": float(self._lag_min), "mean": self._lag_sum / self._lag_steps, "max": float(self._lag_max)}
        self._lag_min, self._lag_max, self._lag_sum, self._lag_steps = math.inf, -math.inf, 0.0, 0
        return lag


def _sum(values: NDArray[Any]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers as large as a peer likes
        return float(values.sum(dtype=np.float64))


def _mean(values: NDArray[np.float64]) -> float:
    return _sum(values) / values.size if values.size else math.nan


class _Window:
    """The newest values of one series, and mean, least and greatest of those that a result is to show.

    Values of a running iteration are summed up as they come, so that however many there are, ``keep`` are held.

    Attributes:
        summary: mean, least and greatest at the end of the last iteration; NaN without any value.
    """

    def __init__(self, least: int, keep: int) -> None:
        """Start empty.

        Args:
            least: values that a summary takes, if the iteration has fewer and there are earlier ones.
            keep: newest values that are held, at least ``least``.
        """
        self._least, self._keep = least, keep
        self._values = array("d")
        self._num_new, self._sum, self._min, self._max = 0, 0.0, math.inf, -math.inf
        self.summary: tuple[float, float, float] = (math.nan, math.nan, math.nan)
        self._is_wide = False  # it took more than the least values

    def add(self, values: NDArray[Any]) -> None:
        """Take new values, in order, at least one; those that are kept are copied."""
        if values.size > _FEW:
            total, least, most = _sum(values), float(values.min()), float(values.max())
        else:  # as they mostly come
            few = values.tolist()
            total, least, most = sum(few), min(few), max(few)
        self._num_new += values.size
        self._sum, self._min, self._max = self._sum + total, min(self._min, least), max(self._max, most)
        self._values.extend(values[-self._keep :].tolist())
        del self._values[: -self._keep]

    def restore(self, values: NDArray[np.float64]) -> None:
        """Begin with these values, as earlier ones; finite numbers only."""
        finite = values[np.isfinite(values)]
        self._values = array("d", finite[-self._keep :].tobytes())
        self._summarise(self.newest(self._least))

    def newest(self, count: int) -> NDArray[np.float64]:
        """The newest values, at most ``count``, the oldest first; a copy."""
        return np.array(self._values[-count:], np.float64)

    def take(self) -> int:
        """End the iteration; the number of its values."""
        count = self._num_new
        if count > self._least:
            self.summary = (self._sum / count, self._min, self._max)
        elif count or self._is_wide:  # else the last summary still holds
            self._summarise(self.newest(self._least))
        self._is_wide = count > self._least
        self._num_new, self._sum, self._min, self._max = 0, 0.0, math.inf, -math.inf
        return count

    def _summarise(self, values: NDArray[np.float64]) -> None:
        if values.size:
            self.summary = _mean(values), float(values.min()), float(values.max())


class _Named:
    """Windows by name, no more than a number; a name that is not heard of for long is forgotten."""

    def __init__(self, what: str, window: Callable[[], _Window], max_names: int, min_silent_episodes: int) -> None:
        """Start without a name.

        Args:
            what: what a message calls one of them.
            window: makes one.
            max_names: more are left out.
            min_silent_episodes: a name that none of so many episodes had may be forgotten.
        """
        self._what, self._make, self._max_names = what, window, max_names
        self._min_silent_episodes = min_silent_episodes
        self._windows: dict[str, _Window] = {}
        self._heard: dict[str, tuple[float, int]] = {}
        self.num_left_out = 0

    def items(self) -> list[tuple[str, _Window]]:
        """Each name and its window, by name."""
        return sorted(self._windows.items())

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Take values by name."""
        for name, own in values.items():
            window = self._windows.get(name)
            if not own.size:
                continue
            if window is None:
                if len(self._windows) >= self._max_names:
                    if not self.num_left_out:
                        logger.warning(
                            "%s %r is left out: the run has %d of them already; further ones are only counted, as "
                            "metrics_left_out", self._what, name, self._max_names,
                        )  # fmt: skip
                    self.num_left_out += own.size
                    continue
                window = self._windows[name] = self._make()
            window.add(own)

    def take(self, now: float, episodes_total: int) -> None:
        """End the iteration: summaries are up to date, and names that were silent for long are gone."""
        for name, window in list(self._windows.items()):
            if window.take():
                self._heard[name] = now, episodes_total
                continue
            heard_at, heard_episodes = self._heard.setdefault(name, (now, episodes_total))
            silent_s, silent_episodes = now - heard_at, episodes_total - heard_episodes
            if silent_s >= _FORGET_S or (silent_s >= _FORGET_EARLY_S and silent_episodes >= self._min_silent_episodes):
                del self._windows[name], self._heard[name]

    def to_state(self, share: int) -> dict[str, list[float]]:
        """Values by name, of each the newest ``share``."""
        return {name: window.newest(share).tolist() for name, window in self.items()}

    def from_state(self, state: Mapping[str, Any], now: float, episodes_total: int) -> None:
        """Go on from ``to_state``, also from one that was written when there were no bounds."""
        self._windows, self._heard = {}, {}
        for name, values in itertools.islice(state.items(), self._max_names):
            window = self._windows[name[:MAX_NAME]] = self._make()
            window.restore(np.asarray(values, np.float64).reshape(-1))
            self._heard[name[:MAX_NAME]] = now, episodes_total


_SETTLED_S = 0.1
"""The kernel counts CPU time in ticks of 10 ms."""


class SystemUsage:
    """Figures since the last look; one look takes some 0.3 ms and never waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first interval.

        Args:
            clock: seconds, since whenever.
        """
        self._clock = clock
        self._process: psutil.Process | None = None
        self._has_failed = False
        self._measure()  # the first one only starts the interval
        self._found: dict[str, float] = {}
        self._found_at = float("-inf")

    def look(self) -> dict[str, float]:
        """Figures now; within `_SETTLED_S` of the last look those of that, since shares of so short a time say nothing.

        Returns: cpu_util_percent (all cores of the host, 0 to 100, since the last look), ram_util_percent,
            learner_cpu_percent (this process; 100 is one core), learner_rss_bytes; none where they can't be had.
        """
        now = self._clock()
        if now - self._found_at >= _SETTLED_S:
            self._found, self._found_at = self._measure(), now
        return dict(self._found)

    def _measure(self) -> dict[str, float]:
        try:
            process = self._process = self._process or psutil.Process()
            return {
                "cpu_util_percent": psutil.cpu_percent(None),
                "ram_util_percent": psutil.virtual_memory().percent,
                "learner_cpu_percent": process.cpu_percent(None),
                "learner_rss_bytes": float(process.memory_info().rss),
            }
        except Exception as error:  # psutil may find anything in /proc, and no figure is worth a run
            if not self._has_failed:
                self._has_failed = True
                logger.warning("CPU and memory use can't be measured: %s", error or type(error).__name__)
            return {}
