"""Figures of runs for Prometheus, from which alerts can be written without any other source.

Each figure has a line in a table: its name, what it means, and where it is in the account of a run.
Runs that are over have no ages and rates, so they don't set off alerts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from aiorl.config.files import folders_inside
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.status import Part
from aiorl.text import one_line
from aiorl.watch.reading import OVER, Run

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_MAX_LABELS = 100
_MAX_LABEL = 100
_ACCOUNT: tuple[str, ...] = ()
_LEARNER = ("learner",)
_RESULT = ("result",)
_METRICS = ("result", "learner")


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of a run.

    Attributes:
        name: its name after ``aiorl_``; that of a counter ends with ``_total`` when it is shown.
        help: what it means.
        place: part of the account that has it.
        key: its key in that part.
        is_total: True for a counter, which runs that are over have, too.
        factor: number by which the account's value is multiplied.
    """

    name: str
    help: str
    place: tuple[str, ...]
    key: str
    is_total: bool = False
    factor: float = 1.0


_Row: TypeAlias = tuple[str, str, tuple[str, ...], str]

_TOTALS: tuple[_Row, ...] = (
    ("env_steps_sampled", "Env steps that have reached the learner.", _RESULT, "timesteps_total"),
    ("env_steps_trained", "Env steps trained on.", _RESULT, "env_steps_trained_total"),
    ("updates", "Updates made, which is the version of the policy.", _RESULT, "updates_total"),
    (
        "updates_skipped",
        "Updates without effect, because their loss or gradients were not finite.",
        _RESULT,
        "updates_skipped",
    ),
    ("episodes", "Episodes that have ended.", _RESULT, "episodes_total"),
    (
        "workers_joined",
        "Workers that have joined since the learner was started; one that comes back counts again.",
        _ACCOUNT,
        "num_joined",
    ),
    (
        "workers_lost",
        "Workers that were lost or have failed since the learner was started, not those that left.",
        _ACCOUNT,
        "num_lost",
    ),
    (
        "worker_failures",
        "Errors that workers have reported since the learner was started.",
        _ACCOUNT,
        "num_failures",
    ),
)
_GAUGES: tuple[_Row, ...] = (
    (
        "learner_start_time_seconds",
        "Time at which the learner was started, in seconds since 1970; a restart changes it.",
        _LEARNER,
        "began",
    ),
    ("workers", "Workers that are connected.", _ACCOUNT, "num_workers"),
    (
        "env_steps_sampled_per_second",
        "Env steps that reach the learner per second.",
        _RESULT,
        "sampled_steps_per_s",
    ),
    (
        "env_steps_trained_per_second",
        "Env steps trained on per second.",
        _RESULT,
        "trained_steps_per_s",
    ),
    (
        "episode_return_mean",
        "Mean return of the last 100 episodes.",
        _RESULT,
        "episode_reward_mean_last_100",
    ),
    (
        "policy_lag_mean",
        "Mean number of versions between the policy that acted and the one that was trained.",
        ("result", "policy_lag"),
        "mean",
    ),
    ("update_seconds", "Duration of the newest update.", _METRICS, "update_s"),
    (
        "wait_for_batch_seconds",
        "Time that the learner has waited for the batch of the newest update.",
        _METRICS,
        "wait_for_batch_s",
    ),
    (
        "learner_busy_ratio",
        "Share of its time that the learner spends on updates; near 1, more workers do not help.",
        _LEARNER,
        "busy",
    ),
    (
        "learner_memory_bytes",
        "Resident memory of the learner's process.",
        ("result", "perf"),
        "learner_rss_bytes",
    ),
    (
        "health_warnings",
        "Warnings about the policies in the newest result; the page and result.jsonl have them.",
        ("result", "health"),
        "num_warnings",
    ),
)
_FIGURES = (
    *(_Figure(name, meaning, place, key, is_total=True) for name, meaning, place, key in _TOTALS),
    *(_Figure(name, meaning, place, key) for name, meaning, place, key in _GAUGES),
    _Figure(
        name="host_memory_used_ratio",
        help="Share of the memory of the learner's host that is in use.",
        place=("result", "perf"),
        key="ram_util_percent",
        factor=0.01,
    ),
)


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A figure with a value for each label."""

    name: str
    help: str
    label: str
    values: Callable[[Part], Mapping[str, float]]
    is_total: bool = False


def _by_reason(kind: str) -> Callable[[Part], Mapping[str, float]]:
    def values(account: Part) -> Mapping[str, float]:
        return _numbers(account.part("result").part("ledger").part(kind))

    return values


def _by_policy(name: str, *place: str) -> Callable[[Part], Mapping[str, float]]:
    """Return the function that returns the numbers of this name by policy; with one policy, the
    name stands alone.
    """

    def values(account: Part) -> Mapping[str, float]:
        numbers = _numbers(_part_at(account, place))
        return {
            path.rpartition("/")[0] or DEFAULT_POLICY_ID: value
            for path, value in numbers.items()
            if path.rpartition("/")[2] == name
        }

    return values


LABELLED = (
    _Labelled(
        name="env_steps_discarded",
        help="Env steps that reached the learner and were not trained on, by reason.",
        label="reason",
        values=_by_reason("discarded"),
        is_total=True,
    ),
    _Labelled(
        name="env_steps_lost",
        help="Env steps that were sampled and never reached the learner, by reason.",
        label="reason",
        values=_by_reason("lost"),
        is_total=True,
    ),
    _Labelled(
        name="policy_entropy_ratio",
        help="Entropy of a discrete policy, as a share of the largest one; below 0.001 it explores"
        " no more.",
        label="policy",
        values=_by_policy("entropy_share", "result", "health"),
    ),
    _Labelled(
        name="policy_kl",
        help="Change of a policy by the newest update, a KL divergence in nats; usually below 0.2.",
        label="policy",
        values=_by_policy("kl", *_METRICS),
    ),
)


def _last_update_age_s(run: Run) -> float | None:
    """Return the seconds since the last update: those before the account, and its own age."""
    waited_s = run.account.part("learner").number("no_update_s")
    written = run.account.number("time")
    if waited_s is None or written is None:
        return None
    return waited_s + max(0.0, time.time() - written)


def _last_checkpoint_age_s(run: Run) -> float | None:
    newest = newest_checkpoint(run.path)
    return None if newest is None else max(0.0, time.time() - newest)


def newest_checkpoint(directory: Path) -> float | None:
    """Return when the newest checkpoint of a run was written, in seconds since 1970; None if there
    is none.
    """
    place = directory / "checkpoints"
    if place.is_symlink():
        return None
    names = [name for name in folders_inside(place) if name.startswith("checkpoint-")]
    return max((os.lstat(place / name).st_mtime for name in names), default=None)


_AGES: Mapping[str, tuple[str, Callable[[Run], float | None]]] = {
    "last_update_age_seconds": (
        "Time since the last update, or since updates were compiled.",
        _last_update_age_s,
    ),
    "last_checkpoint_age_seconds": (
        "Time since the newest checkpoint was written.",
        _last_checkpoint_age_s,
    ),
}


class Collector:
    """Collector for a registry of `prometheus_client`.

    Args:
        runs: the runs.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = [*runs]

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of all runs."""
        from prometheus_client.core import GaugeMetricFamily

        phases = [run.glance() for run in self._runs]
        live = [run for run, glance in zip(self._runs, phases, strict=True) if is_live(glance)]
        info = GaugeMetricFamily(
            "aiorl_run_info",
            "1, with facts of the run; its phase is as on the page.",
            labels=["run", "algo", "env", "phase"],
        )
        changed = GaugeMetricFamily(
            "aiorl_last_change_age_seconds",
            "Time since a file of the run has changed, also of a run that is over.",
            labels=["run"],
        )
        training = GaugeMetricFamily(
            "aiorl_training",
            "1 if the run trains; 0 while it starts or waits, and when it is over.",
            labels=["run"],
        )
        for glance in phases:
            name = glance["name"]
            info.add_metric([name, glance["algo"], glance["env"], glance["phase"]], 1.0)
            changed.add_metric([name], max(0.0, time.time() - glance["changed"]))
            training.add_metric([name], float(glance["phase"] == "training"))
        yield from (info, changed, training)
        for figure in _FIGURES:
            yield self._simple(figure, self._runs if figure.is_total else live)
        for labelled in LABELLED:
            yield self._labelled(labelled, self._runs if labelled.is_total else live)
        for age, (meaning, read) in _AGES.items():
            family = GaugeMetricFamily(f"aiorl_{age}", meaning, labels=["run"])
            for run in live:
                value = read(run)
                if value is not None:
                    family.add_metric([run.name], value)
            yield family

    def _simple(self, figure: _Figure, runs: Iterable[Run]) -> Metric:
        family = _family(figure, "run")
        for run in runs:
            value = _part_at(run.account, figure.place).number(figure.key)
            if value is not None:
                family.add_metric([run.name], value * figure.factor)
        return family

    def _labelled(self, figure: _Labelled, runs: Iterable[Run]) -> Metric:
        family = _family(figure, "run", figure.label)
        for run in runs:
            for label, value in figure.values(run.account).items():
                family.add_metric([run.name, label], value)
        return family


def is_live(glance: Mapping[str, Any]) -> bool:
    """Return True if a run is not over."""
    return glance["phase"] not in OVER


def _family(figure: _Figure | _Labelled, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    name = f"aiorl_{figure.name}"
    if figure.is_total:
        return CounterMetricFamily(name, figure.help, labels=labels)
    return GaugeMetricFamily(name, figure.help, labels=labels)


def _part_at(account: Part, place: Iterable[str]) -> Part:
    for name in place:
        account = account.part(name)
    return account


def _numbers(part: Part) -> dict[str, float]:
    """Return the numbers of a part of an account by name, as labels."""
    numbers = dict[str, float]()
    for name in [*part.value][:_MAX_LABELS]:
        value = part.number(name)
        if value is not None:
            numbers[one_line(str(name), _MAX_LABEL)] = value
    return numbers
