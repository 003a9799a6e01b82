"""Results of training iterations: smoothed episode metrics, counters, rates, lags and the ledger.

Averages cover all episodes that ended in the iteration. If these are fewer than
`metrics_smoothing_episodes`, the newest earlier ones are added; before the first episode has ended,
an average is NaN. The same holds, for each name, for rewards by policy (one value per agent and
episode), custom metrics and off-policy estimates; a name appears when a worker has reported it.
`episode_reward_mean_last_100` is different: it is the mean return of the last 100 finished episodes
in order of arrival. Stop criteria use it, since it does not depend on the episodes per iteration.

Names and numbers come from workers, so everything is limited: the names in a run, the values kept
for each, the values in one result. A name that is not reported for a long time is forgotten, and a
policy that has left the run, after an iteration without an episode of it. The cost of finishing an
iteration does not depend on the number of values received.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from aiorl.config.rllib_file import attribute_hint
from aiorl.data.metrics import MAX_HIST, MAX_NAME, EpisodeColumns, PerfStats

logger = logging.getLogger(__name__)

STOP_WINDOW = 100
"""Number of finished episodes that stop criteria use."""

_KINDS = ("mean", "min", "max")

_MAX_POLICIES = 256  # in a run, over all workers; the same holds for the next three
_MAX_CUSTOM = 300
_MAX_HISTORIES = 50
_MAX_ESTIMATES = 50  # names of an estimator's metric
_MAX_HIST_VALUES = 3000  # of all histories in one result
_FEW = 100  # values that are summed up in Python
# a name is forgotten after the longer time, or after the shorter time and this number of episodes
# without it
_FORGET_S = 1800.0
_FORGET_EARLY_S = 10.0
_FORGET_EPISODES = 1000
_RATE_S = 1.0  # shortest time that rates cover, except at the beginning of a run


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the learner at the end of an iteration; counters are totals of the run.

    Attributes:
        env_steps_sampled: env steps that reached the learner.
        env_steps_trained: env steps trained on.
        agent_steps_sampled: agent steps that reached the learner; with one agent, equal to
            env_steps_sampled.
        updates: number of updates done, which is the policy version.
        updates_skipped: number of updates with a non-finite loss or gradient, which leave the
            weights unchanged.
        num_healthy_workers: number of registered workers that sample.
        ledger: env steps by their state; "sampled" is the sum of all others.
        transport: gauges such as queue depths, copied unchanged.
        bytes_in: bytes received from workers.
        bytes_out: bytes sent to workers.
        learner: metrics of the algorithm, such as its losses.
        perf: CPU and memory use; None if the run does not report it.
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


class Result(dict[str, Any]):
    """Result of an iteration; a name that another library has is refused with a hint."""

    def __missing__(self, name: str) -> Any:
        hint = attribute_hint("result", name) if isinstance(name, str) else ""
        raise KeyError(f"{name}. {hint}" if hint else name)


def by_policy(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics by name, and those of each policy, ``ID/NAME``, also in a dict of its own."""
    nested: dict[str, Any] = dict(metrics)
    for path, value in metrics.items():
        policy_id, slash, name = path.partition("/")
        if slash and policy_id not in metrics:
            nested.setdefault(policy_id, {})[name] = value
    return nested


class Results:
    """Collector of an iteration's metrics that makes its result, and keeps earlier values for the
    next ones.

    Args:
        smoothing_episodes: `metrics_smoothing_episodes`, at least 1.
        now: time of a monotonic clock in seconds, as in `finish_iteration`.

    Attributes:
        training_iteration: number of iterations finished.
        episodes_total: number of episodes finished, including those of the current iteration.
        time_total_s: training time up to the last finished iteration, without pauses between
            resumed runs.
        courses: name of each learner -> its first and best mean return; see `aiorl.run.health`.
    """

    def __init__(self, smoothing_episodes: int, now: float) -> None:
        self._smoothing = smoothing_episodes
        self._keep = max(smoothing_episodes, STOP_WINDOW)
        self._lengths = _Window(smoothing_episodes, self._keep)
        self._rewards = _Window(smoothing_episodes, self._keep)

        def smoothed() -> _Window:
            return _Window(smoothing_episodes, smoothing_episodes)

        silent = max(_FORGET_EPISODES, 10 * smoothing_episodes)
        # by names of episodes' columns, which checkpoints use, too
        self._windows = {
            "policy_rewards": _Windows(
                "the reward of policy",
                smoothed,
                max_names=_MAX_POLICIES,
                min_silent_episodes=silent,
            ),
            "custom": _Windows(
                "custom metric",
                smoothed,
                max_names=_MAX_CUSTOM,
                min_silent_episodes=silent,
            ),
            "hist": _Windows(
                "history",
                lambda: _Window(1, MAX_HIST),
                max_names=_MAX_HISTORIES,
                min_silent_episodes=silent,
            ),
            "estimates": _Windows(
                "estimate",
                smoothed,
                max_names=_MAX_ESTIMATES,
                min_silent_episodes=silent,
            ),
        }
        self._perf = PerfStats()
        self._lag = _Totals()
        self.training_iteration = 0
        self.episodes_total = 0
        self.time_total_s = 0.0
        self.courses: dict[str, list[float]] = {}
        self._last_now = now
        self._last = Progress(0, 0)
        # beginning of work, then ends of iterations, from the last one that is at least _RATE_S old
        self._before = deque([(now, self._last)])

    def begin_rates(self, now: float) -> None:
        """Measure rates from now, which leaves the start-up out, but no step of the current
        iteration.

        Args:
            now: time of the monotonic clock, seconds.
        """
        self._before = deque([(now, self._last)])

    def leave_out_pause(self, now: float) -> None:
        """Begin the iteration now: the time since the end of the last one was a pause in
        training.
        """
        pause_s = now - self._last_now
        # work can have begun during the pause
        self._before = deque((min(at + pause_s, now), progress) for at, progress in self._before)
        self._last_now = now

    def add_episodes(self, episodes: EpisodeColumns) -> None:
        """Add finished episodes, in order of arrival."""
        if len(episodes.lengths):
            self._lengths.add(episodes.lengths)
            self._rewards.add(episodes.rewards)
            self.episodes_total += len(episodes.lengths)
        for name, windows in self._windows.items():
            windows.add(getattr(episodes, name))

    def policies_removed(self, policy_ids: Set[str]) -> None:
        """Leave policies out of the results from the first iteration that has no episode with them.

        Args:
            policy_ids: ids of policies that have left the run.
        """
        self._windows["policy_rewards"].leaving |= policy_ids

    def add_perf(self, perf: Mapping[str, float]) -> None:
        """Add a sampler's performance figures for one fragment, as in `PerfStats`: iterations and
        seconds.
        """
        self._perf.add(perf)

    def add_lag(self, lag: int, env_steps: int) -> None:
        """Add the policy lag of `env_steps` trained on: the number of versions between acting and
        training.
        """
        self._lag.add(env_steps, total=lag * env_steps, least=lag, most=lag)

    def mean_last(self) -> float:
        """Return the mean return of the last 100 finished episodes, or of all if there are fewer;
        NaN if there are none.
        """
        return _mean(self._rewards.newest(STOP_WINDOW))

    @property
    def newest_return(self) -> float:
        """Mean return of the last 100 episodes; NaN before 100 episodes have finished."""
        returns = self._rewards.newest(STOP_WINDOW)
        return _mean(returns) if returns.size >= STOP_WINDOW else math.nan

    def finish_iteration(
        self, now: float, progress: Progress, *, timestamp: float = 0.0
    ) -> dict[str, Any]:
        """End the iteration, return its result, and begin the next one.

        Args:
            now: time of the monotonic clock in seconds, as at construction.
            progress: progress of the learner.
            timestamp: wall-clock time, seconds since the epoch.

        Returns:
            Dict of numbers, strings, lists and dicts.
        """
        last = self._last
        rate = self._rates(now, progress)
        self.training_iteration += 1
        self.time_total_s += now - self._last_now
        result = Result(
            {
                "training_iteration": self.training_iteration,
                "timesteps_total": progress.env_steps_sampled,
                "timesteps_this_iter": progress.env_steps_sampled - last.env_steps_sampled,
                "env_steps_trained_total": progress.env_steps_trained,
                "agent_steps_total": progress.agent_steps_sampled,
                "episodes_total": self.episodes_total,
                "time_total_s": self.time_total_s,
                "time_this_iter_s": now - self._last_now,
                "timestamp": timestamp,
                **self.take_episodes(now),
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
                "metrics_left_out": sum(windows.num_left_out for windows in self._windows.values()),
                "transport": {
                    "bytes_in_per_s": rate("bytes_in"),
                    "bytes_out_per_s": rate("bytes_out"),
                    **progress.transport,
                },
                "learner": by_policy(progress.learner),
            }
        )
        if progress.perf is not None:
            result["perf"] = dict(progress.perf)
        self._perf = PerfStats()
        self._last = progress
        self._last_now = now
        self._before.append((now, progress))
        return result

    def _rates(self, now: float, progress: Progress) -> Callable[[str], float]:
        """Return a function from a counter of `Progress` to its growth per second, over at least
        the last second.

        An iteration can take only a few milliseconds, especially the last one of a run. Its own
        rate means little.
        """
        while len(self._before) > 1 and now - self._before[1][0] >= _RATE_S:
            self._before.popleft()
        began, earlier = self._before[0]
        seconds = max(now - began, 1e-9)
        return lambda name: float((getattr(progress, name) - getattr(earlier, name)) / seconds)

    def to_state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain data for JSON."""
        return {
            "training_iteration": self.training_iteration,
            "episodes_total": self.episodes_total,
            "time_total_s": self.time_total_s,
            "courses": self.courses,
            "lengths": self._lengths.newest(self._keep).astype(np.int64).tolist(),
            "rewards": self._rewards.newest(self._keep).tolist(),
            "policy_rewards": self._windows["policy_rewards"].to_state(self._smoothing),
            "custom": self._windows["custom"].to_state(self._smoothing),
            "hist": self._windows["hist"].to_state(self._hist_share()),
            "estimates": self._windows["estimates"].to_state(self._smoothing),
        }

    def from_state(self, state: Mapping[str, Any], now: float, progress: Progress) -> None:
        """Restore `state`; its episodes count as earlier ones.

        Args:
            state: a state from `to_state`.
            now: time of this process's monotonic clock, seconds; the first iteration starts here.
            progress: the learner's restored counters, from which rates start.
        """
        self.training_iteration = int(state["training_iteration"])
        self.episodes_total = int(state["episodes_total"])
        self.time_total_s = float(state["time_total_s"])
        for name, (first, best) in state.get("courses", {}).items():
            self.courses[name] = [float(first), float(best)]
        self._lengths.restore(np.asarray(state["lengths"], np.float64))
        self._rewards.restore(np.asarray(state["rewards"], np.float64))
        for name, windows in self._windows.items():
            windows.from_state(state.get(name, {}), now, self.episodes_total)
        self._last = progress
        self._last_now = now
        self.begin_rates(now)

    def _hist_share(self) -> int:
        """Return the number of values per history in a result and in a checkpoint."""
        return min(MAX_HIST, _MAX_HIST_VALUES // max(1, len(self._windows["hist"].items())))

    def take_episodes(self, now: float) -> dict[str, Any]:
        """Return the averages over episodes, and count the new episodes as earlier ones from now
        on.
        """
        num_new = self._rewards.take()
        self._lengths.take()
        for windows in self._windows.values():
            windows.take(now, self.episodes_total)
        mean, least, most = self._rewards.summary
        lengths = self._lengths.newest(self._smoothing)
        by_policy = self._windows["policy_rewards"].items()
        return {
            "episodes_this_iter": num_new,
            "episode_reward_mean": mean,
            "episode_reward_min": least,
            "episode_reward_max": most,
            "episode_len_mean": self._lengths.summary[0],
            **{
                f"policy_reward_{kind}": {
                    policy_id: window.summary[place] for policy_id, window in by_policy
                }
                for place, kind in enumerate(_KINDS)
            },
            "custom_metrics": {
                f"{name}_{kind}": value
                for name, window in self._windows["custom"].items()
                for kind, value in zip(_KINDS, window.summary, strict=True)
            },
            "off_policy_estimator": self._mean_estimates(),
            "hist_stats": {
                **self._windows["hist"].to_state(self._hist_share()),
                "episode_reward": self._rewards.newest(self._smoothing).tolist(),
                "episode_lengths": lengths.astype(np.int64).tolist(),
            },
        }

    def _mean_estimates(self) -> dict[str, dict[str, float]]:
        """Return means over episodes: estimator -> metric -> mean."""
        means: dict[str, dict[str, float]] = {}
        for name, window in self._windows["estimates"].items():
            estimator, _, metric = name.partition("/")
            means.setdefault(estimator, {})[metric] = window.summary[0]
        return means

    def _take_lag(self) -> dict[str, float]:
        """Return the policy lag of the iteration, and begin a new one."""
        mean, least, most = self._lag.summary()
        self._lag = _Totals()
        return {"min": float(least), "mean": mean, "max": float(most)}


def _sum(values: NDArray[Any]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):  # a peer can send arbitrarily large numbers
        return float(values.sum(dtype=np.float64))


def _mean(values: NDArray[np.float64]) -> float:
    return _sum(values) / values.size if values.size else math.nan


@dataclass(slots=True)
class _Totals:
    """Number, sum, minimum and maximum of values, which are not stored themselves."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, count: int, *, total: float, least: float, most: float) -> None:
        """Add several values by their number, sum, minimum and maximum."""
        self.count += count
        self.total += total
        self.least = min(self.least, least)
        self.most = max(self.most, most)

    def summary(self) -> tuple[float, float, float]:
        """Return mean, minimum and maximum; NaN without values."""
        if not self.count:
            return math.nan, math.nan, math.nan
        return self.total / self.count, self.least, self.most


class _Window:
    """Newest values of one series, with mean, minimum and maximum for the results.

    Values of the current iteration are summed on arrival, so that at most ``keep`` values are
    stored.

    Attributes:
        summary: mean, minimum and maximum at the end of the last iteration; NaN before the first
            value.
    """

    def __init__(self, least: int, keep: int) -> None:
        """Start empty.

        Args:
            least: minimum number of values in a summary; earlier values fill up an iteration that
                has fewer.
            keep: number of newest values stored, at least ``least``.
        """
        self._least = least
        self._keep = keep
        self._values = array("d")
        self._new = _Totals()
        self.summary = self._new.summary()
        self._is_wide = False  # True if the summary took more than the least values

    def add(self, values: NDArray[Any]) -> None:
        """Add new values in order, at least one; the values stored are copied."""
        if values.size > _FEW:
            total = _sum(values)
            least = float(values.min())
            most = float(values.max())
        else:  # the usual case
            few = values.tolist()
            total = sum(few)
            least = min(few)
            most = max(few)
        self._new.add(
            values.size,
            total=total,
            least=least,
            most=most,
        )
        self._values.extend(values[-self._keep :].tolist())
        del self._values[: -self._keep]

    def restore(self, values: NDArray[np.float64]) -> None:
        """Start with these values as earlier ones; numbers that are not finite are left out."""
        finite = values[np.isfinite(values)]
        self._values = array("d", finite[-self._keep :].tobytes())
        self._summarise(self.newest(self._least))

    def newest(self, count: int) -> NDArray[np.float64]:
        """Return a copy of the newest values, at most ``count``, oldest first."""
        return np.array(self._values[-count:], np.float64)

    def take(self) -> int:
        """End the iteration, and return the number of its values."""
        count = self._new.count
        if count > self._least:
            self.summary = self._new.summary()
        elif count or self._is_wide:  # otherwise the last summary is still valid
            self._summarise(self.newest(self._least))
        self._is_wide = count > self._least
        self._new = _Totals()
        return count

    def _summarise(self, values: NDArray[np.float64]) -> None:
        if values.size:
            self.summary = _mean(values), float(values.min()), float(values.max())


class _Windows:
    """Windows by name, limited in number; a name that is not reported for a long time is
    forgotten.

    Attributes:
        num_left_out: number of values left out because of the limit.
        leaving: names that are forgotten after an iteration without them.
    """

    def __init__(
        self,
        what: str,
        window: Callable[[], _Window],
        *,
        max_names: int,
        min_silent_episodes: int,
    ) -> None:
        """Start without names.

        Args:
            what: kind of the names, for messages.
            window: function that makes a window.
            max_names: maximum number of names; further ones are left out.
            min_silent_episodes: number of episodes without a name after which it can be forgotten.
        """
        self._what = what
        self._make_window = window
        self._max_names = max_names
        self._min_silent_episodes = min_silent_episodes
        self._windows: dict[str, _Window] = {}
        self._last_reports: dict[str, tuple[float, int]] = {}  # name -> time, episodes in total
        self.leaving: set[str] = set()
        self.num_left_out = 0

    def items(self) -> list[tuple[str, _Window]]:
        """Return each name and its window, sorted by name."""
        return sorted(self._windows.items())

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Add values by name."""
        for name, new_values in values.items():
            if not new_values.size:
                continue
            window = self._windows.get(name)
            if window is None:
                if len(self._windows) >= self._max_names:
                    if not self.num_left_out:
                        logger.warning(
                            "%s %r is left out: the run already has %d of them; further ones are"
                            " only counted, in metrics_left_out",
                            self._what,
                            name,
                            self._max_names,
                        )
                    self.num_left_out += new_values.size
                    continue
                window = self._windows[name] = self._make_window()
            window.add(new_values)

    def take(self, now: float, episodes_total: int) -> None:
        """End the iteration: update summaries, and forget names that have not been reported for a
        long time.
        """
        for name, window in list(self._windows.items()):
            if window.take():
                self._last_reports[name] = now, episodes_total
                continue
            last_now, last_episodes = self._last_reports.setdefault(name, (now, episodes_total))
            silent_s = now - last_now
            silent_episodes = episodes_total - last_episodes
            is_silent = silent_s >= _FORGET_S or (
                silent_s >= _FORGET_EARLY_S and silent_episodes >= self._min_silent_episodes
            )
            if is_silent or name in self.leaving:
                del self._windows[name], self._last_reports[name]

    def to_state(self, share: int) -> dict[str, list[float]]:
        """Return the newest ``share`` values of each name."""
        return {name: window.newest(share).tolist() for name, window in self.items()}

    def from_state(self, state: Mapping[str, Any], now: float, episodes_total: int) -> None:
        """Restore a state of ``to_state``, even one written when the number of names was not
        limited.
        """
        self._windows = {}
        self._last_reports = {}
        for raw_name, values in itertools.islice(state.items(), self._max_names):
            name = raw_name[:MAX_NAME]
            window = self._windows[name] = self._make_window()
            window.restore(np.asarray(values, np.float64).reshape(-1))
            self._last_reports[name] = now, episodes_total


_SETTLED_S = 0.1
"""The kernel counts CPU time in ticks of 10 ms."""


class SystemUsage:
    """CPU and memory use since the last measurement, which takes about 0.3 ms and never waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first interval.

        Args:
            clock: function that returns monotonic seconds.
        """
        self._clock = clock
        self._process: psutil.Process | None = None
        self._has_failed = False
        self._read()  # the first one only starts the interval
        self._figures: dict[str, float] = {}
        self._measured_at = -math.inf

    def measure(self) -> dict[str, float]:
        """Return the current figures; within `_SETTLED_S` of the last measurement, its figures:
        shorter times are too coarse.

        Returns:
            Cpu_util_percent (all cores of the host, 0 to 100, since the last measurement),
            ram_util_percent, learner_cpu_percent (this process; 100 is one core),
            learner_rss_bytes; empty if they can't be measured.
        """
        now = self._clock()
        if now - self._measured_at >= _SETTLED_S:
            self._figures = self._read()
            self._measured_at = now
        return dict(self._figures)

    def _read(self) -> dict[str, float]:
        try:
            process = self._process = self._process or psutil.Process()
            return {
                "cpu_util_percent": psutil.cpu_percent(None),
                "ram_util_percent": psutil.virtual_memory().percent,
                "learner_cpu_percent": process.cpu_percent(None),
                "learner_rss_bytes": float(process.memory_info().rss),
            }
        except Exception as error:  # /proc can contain anything, and figures must not end a run
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "CPU and memory use can't be measured: %s", error or type(error).__name__
                )
            return {}
