"""Running observation filters with statistics that can be merged exactly across workers.

A filter holds two statistics: the one it normalises with, and a *delta* of all samples since the
last delta was taken. Deltas are sent under increasing sequence numbers. The learner merges each one
once, and publishes the merged state with the highest number merged per worker. A worker that adopts
a published state adds everything that the learner has not acknowledged: deltas in flight, and the
buffer. As a result, no sample is counted twice or lost, in any order of messages. Source of the
merge: Chan, Golub, LeVeque 1983, pairwise combination.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike, NDArray

from aiorl.acting.postprocess import discounted_sums
from aiorl.data.columns import F32, F64, Array, Bools, all_finite
from aiorl.data.obs_layout import LaidOutBox, ObsLayout, layout_of
from aiorl.errors import BatchError, CheckpointError, ConfigError, UnsendableError, nearest

Arrays = Mapping[str, Array]
FilterState = dict[str, Array]
"""``n`` [] int64, ``mean`` and ``m2`` float64 of the filter's shape; empty for NoFilter."""

EPSILON = 1e-8

_MAX_COUNT = 1 << 53
"""Limit of a statistic's sample count: float64 represents all counts up to it exactly."""


class RunningStat:
    """Count, mean and sum of squared deviations of all samples pushed, element-wise in float64."""

    __slots__ = ("m2", "mean", "n")

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Start with no samples."""
        self.n = 0
        self.mean = np.zeros(shape, np.float64)
        self.m2 = np.zeros(shape, np.float64)

    def push(self, batch: Array) -> None:
        """Add samples ``[B, *shape]``."""
        self.merge_moments(*_moments(batch))

    def merge_moments(self, n: int, mean: F64, m2: F64 | float) -> None:
        """Add n samples given by their moments."""
        if n == 0:
            return
        if self.n == 0:
            self.n = n
            self.mean = mean.copy()
            self.m2 = np.zeros_like(self.m2) + m2
            return
        total = self.n + n
        difference = mean - self.mean
        spread = self.m2
        if type(m2) is not float or m2 != 0.0:  # the m2 of one sample is 0.0, not an array
            spread = spread + m2
        self.m2 = spread + difference * difference * (self.n * n / total)
        self.mean = self.mean + difference * (n / total)
        self.n = total

    def merge(self, other: RunningStat) -> None:
        """Add all samples of another statistic."""
        self.merge_moments(other.n, other.mean, other.m2)

    @property
    def var(self) -> F64:
        """Variance with ddof 1; ones for fewer than two samples."""
        return self.m2 / (self.n - 1) if self.n > 1 else np.ones_like(self.m2)

    @property
    def std(self) -> F64:
        """Standard deviation with ddof 1; ones for fewer than two samples."""
        return np.sqrt(self.var)

    def copy(self) -> RunningStat:
        """Return an independent statistic of the same samples."""
        other = RunningStat(self.mean.shape)
        other.n = self.n
        other.mean = self.mean.copy()
        other.m2 = self.m2.copy()
        return other

    def to_state(self) -> FilterState:
        """Return the statistic as arrays, for the wire and for checkpoints."""
        return {"n": np.asarray(self.n, np.int64), "mean": self.mean.copy(), "m2": self.m2.copy()}

    @classmethod
    def from_state(cls, state: Arrays, shape: tuple[int, ...]) -> RunningStat:
        """Return the statistic in a result of ``to_state``.

        Raises:
            BatchError: when an entry is missing, not finite or not of the filter's shape.
        """
        stat = cls(shape)
        for name in ("mean", "m2"):
            if name not in state:
                raise BatchError(f"filter {name}", f"finite numbers of shape {shape}", "nothing")
            array = np.asarray(state[name])
            if array.shape != shape or not all_finite(array):
                raise BatchError(
                    f"filter {name}",
                    f"finite numbers of shape {shape}",
                    f"shape {array.shape}, finite {all_finite(array)}",
                )
            setattr(stat, name, array.astype(np.float64))
        count = np.asarray(state.get("n", -1))
        if count.size != 1 or not 0 <= count.item() <= _MAX_COUNT or (stat.m2 < 0).any():
            raise BatchError(
                "filter n, m2", "a count up to 2**53 and squared deviations >= 0", state.get("n")
            )
        stat.n = int(count.item())
        return stat


def _moments(batch: Array) -> tuple[int, F64, F64 | float]:
    """Return count, mean and sum of squared deviations of samples ``[B, ...]``."""
    count = len(batch)
    if count == 1:
        return 1, batch[0].astype(np.float64), 0.0
    samples = batch.astype(np.float64)
    mean: F64 = np.add.reduce(samples, axis=0) / max(count, 1)
    samples -= mean
    np.square(samples, out=samples)
    return count, mean, np.add.reduce(samples, axis=0)


class ObservationFilter:
    """Interface of observation filters, with the methods of one that has no statistics.

    Attributes:
        is_concurrent: True if several threads can use it together.
        is_identity: True if it returns observations unchanged.
        is_frozen: True if no sample changes its statistics; False by default.
        shape: shape of one observation; meaningless for an identity.
    """

    is_concurrent = True
    is_identity = True
    is_frozen = False
    shape: tuple[int, ...] = ()

    def output_dtype(self, dtype: DTypeLike) -> np.dtype[Any]:
        """Return the dtype of filtered observations, the input of policies and models, for a dtype
        of observations.

        Samplers, graphs and models must agree on this dtype, so only this method defines it.
        """
        return np.dtype(dtype) if self.is_identity else np.dtype(np.float32)

    def output_space(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        """Return the space of filtered observations, the input of policies, for a space of
        preprocessed ones.
        """
        if self.is_identity:
            return space
        layout = layout_of(space)
        if layout.array_shape != self.shape:
            layout = ObsLayout(self.shape)
        return LaidOutBox(-np.inf, np.inf, self.output_layout(layout), np.float32)

    def output_layout(self, layout: ObsLayout) -> ObsLayout:
        """Return the layout of filtered observations for a layout of preprocessed ones."""
        return layout if self.is_identity else dataclasses.replace(layout, is_filtered=True)

    def __call__(self, obs: Array, update: bool = True) -> Array:
        """Return filtered observations; with ``update``, they also enter the statistics.

        Args:
            obs: one sample of the filter's shape, or a batch ``[B, *shape]``.
            update: False leaves the statistics unchanged.

        Raises:
            ValueError: for any other shape.
        """
        return obs

    def learn(self, obs: Array) -> None:
        """Add a batch ``[B, *shape]`` to the statistics, unless they are frozen."""

    def filter_in_order(self, obs: Array) -> Array:
        """Filter a batch ``[B, *shape]`` as by one call per row, in order: later rows do not affect
        earlier ones.
        """
        return obs

    def take_delta(self, sequence: int | None = None) -> FilterState:
        """Return the statistics of all samples since the last call; they are now in flight under a
        sequence number.

        Args:
            sequence: number under which the delta is sent, larger than every one before; None = one
                more than the last.

        Raises:
            ValueError: when the sequence number does not increase.
        """
        return {}

    def merge_delta(self, delta: Arrays) -> None:
        """Add another filter's delta to the statistics, but not to this filter's own delta (for the
        learner).
        """

    def adopt(self, state: Arrays, acked_sequence: int) -> None:
        """Set statistics = published state + deltas in flight above ``acked_sequence`` + buffer."""

    def acknowledge(self, acked_sequence: int) -> None:
        """Forget deltas in flight up to ``acked_sequence``; for filters that keep their own
        statistics.
        """

    def restore(self, state: Arrays) -> None:
        """Replace everything by a saved state; pending deltas and those in flight are forgotten.

        Raises:
            BatchError: when the state belongs to another kind of filter, has another shape, or is
                not finite; the filter then stays unchanged.
        """
        if state:
            raise BatchError(
                "filter state", "none, because observations are not filtered", sorted(state)
            )

    def state(self) -> FilterState:
        """Return the statistics, without the buffer, to publish or save."""
        return {}

    def as_serializable(self) -> ObservationFilter:
        """Return a plain copy without a lock, or the filter itself if it has no state."""
        return self

    def copy(self) -> ObservationFilter:
        """Return an independent filter in the same state, or the filter itself if it has none."""
        return self

    def clear_buffer(self) -> None:
        """Forget the delta, but keep the statistics."""

    def sync(self, other: ObservationFilter) -> None:
        """Adopt another filter's statistics without its buffer, and keep this filter's unsent delta
        on top.
        """

    def apply_changes(self, other: ObservationFilter, with_buffer: bool = False) -> None:
        """Merge another filter's delta into the statistics; with the flag, it also becomes this
        filter's own delta.
        """


class NoFilter(ObservationFilter):
    """Observations without any change."""


class MeanStdFilter(ObservationFilter):
    """Observations minus their running mean, divided by their running standard deviation,
    element-wise, float32.

    Attributes:
        shape: shape of one observation.
        clip: outputs are limited to ``[-clip, clip]``; None = no limit.
        num_kept: number of entries at the start of a flat observation, for example an action mask,
            that stay unchanged and enter no statistic.
    """

    is_concurrent = False
    is_identity = False

    def __init__(
        self, shape: tuple[int, ...], clip: float | None = None, *, num_kept: int = 0
    ) -> None:
        """Start with no samples."""
        self.shape = tuple(shape)
        self.clip = clip
        self.num_kept = num_kept
        self._stat_shape = (self.shape[0] - num_kept,) if num_kept else self.shape
        self._stat = RunningStat(self._stat_shape)
        self._buffer = RunningStat(self._stat_shape)
        self._in_flight: dict[int, RunningStat] = {}
        self._last_sequence = 0
        self._scale: F64 | None = None
        # a lock that can be taken twice: some methods call others that take it
        self._lock = threading.RLock() if self.is_concurrent else contextlib.nullcontext()

    @property
    def count(self) -> int:
        """Number of samples in the statistics."""
        return self._stat.n

    @property
    def buffer_count(self) -> int:
        """Number of samples in the delta not taken yet."""
        return self._buffer.n

    def affine(self) -> tuple[F64, F64]:
        """Return mean and factor of the filter's shape; it currently computes ``(obs - mean) *
        factor``.
        """
        with self._lock:  # mean and deviation of the same samples
            mean = self._stat.mean
            scale = 1.0 / (self._stat.std + EPSILON)
        if not self.num_kept:
            return mean, scale
        return (
            np.concatenate([np.zeros(self.num_kept), mean]),
            np.concatenate([np.ones(self.num_kept), scale]),
        )

    def __call__(self, obs: Array, update: bool = True) -> F32:
        """See `ObservationFilter.__call__`."""
        if not isinstance(obs, np.ndarray):
            raise ValueError(
                f"observation is a {type(obs).__name__}, expected an array of shape {self.shape} or"
                " a batch of it"
            )
        if obs.shape == self.shape:
            single: F32 = self._filter_batch(obs[None], update)[0]
            return single
        if obs.shape[1:] != self.shape:
            raise ValueError(
                f"observation has shape {obs.shape}, expected {self.shape} or a batch of it"
            )
        return self._filter_batch(obs, update)

    def _filter_batch(self, obs: Array, update: bool) -> F32:
        batch = self._filtered_part(obs)
        with self._lock:
            if update:
                self._learn(batch)
            if self._scale is None:
                self._scale = 1.0 / (self._stat.std + EPSILON)
            out = ((batch - self._stat.mean) * self._scale).astype(np.float32)
        return self._clip_and_join(out, obs)

    def learn(self, obs: Array) -> None:
        """See `ObservationFilter.learn`."""
        with self._lock:
            self._learn(self._filtered_part(obs))

    def _learn(self, batch: Array) -> None:
        if not self.is_frozen:
            moments = _moments(batch)
            self._stat.merge_moments(*moments)
            self._buffer.merge_moments(*moments)
            self._scale = None

    def _filtered_part(self, obs: Array) -> Array:
        """Return the part of observations [B, *shape] that is filtered."""
        return obs[:, self.num_kept :] if self.num_kept else obs

    def _clip_and_join(self, out: F32, obs: Array) -> F32:
        """Clip filtered numbers, and prepend the kept entries of observations [B, *shape]."""
        if self.clip is not None:
            np.clip(out, -self.clip, self.clip, out=out)
        if not self.num_kept:
            return out
        return np.concatenate([obs[:, : self.num_kept].astype(np.float32), out], axis=1)

    def filter_in_order(self, obs: Array) -> F32:
        """See `ObservationFilter.filter_in_order`."""
        with self._lock:
            before = self._stat
            if len(obs) < 2 or self.is_frozen:
                return self(obs)
            if before.n == 0:
                return np.concatenate([self(row[None]) for row in obs])
            batch = self._filtered_part(obs)
            # Welford 1962 for all rows together, relative to the mean before them
            total = before.n + len(obs)
            counts = np.arange(before.n + 1.0, total + 1.0).reshape(-1, *(1,) * len(self.shape))
            samples = batch - before.mean
            means = np.add.accumulate(samples, axis=0) / counts
            rest = samples - means
            degrees = counts - 1.0
            squares = rest * rest * (counts / degrees)
            m2 = before.m2 + np.add.accumulate(squares, axis=0)
            std = np.sqrt(m2 / degrees)
            out: F32 = (rest / (std + EPSILON)).astype(np.float32)
            self._buffer.merge_moments(*_moments(batch))
            before.n = total
            before.mean = before.mean + means[-1]
            before.m2 = m2[-1].copy()
            self._scale = None
        return self._clip_and_join(out, obs)

    def take_delta(self, sequence: int | None = None) -> FilterState:
        """See `ObservationFilter.take_delta`."""
        with self._lock:
            if sequence is None:
                sequence = self._last_sequence + 1
            if sequence <= self._last_sequence:
                raise ValueError(f"delta sequence {sequence} does not follow {self._last_sequence}")
            self._last_sequence = sequence
            delta = self._buffer
            self._buffer = RunningStat(self._stat_shape)
            if delta.n:
                self._in_flight[sequence] = delta
            return delta.to_state()

    def merge_delta(self, delta: Arrays) -> None:
        """See `ObservationFilter.merge_delta`.

        Raises:
            BatchError: when the delta does not fit the filter's shape or is not finite.
        """
        other = RunningStat.from_state(delta, self._stat_shape)
        with self._lock:
            merged = self._stat.copy()
            with np.errstate(over="ignore", invalid="ignore"):
                merged.merge(other)
            is_finite = all_finite(merged.mean) and all_finite(merged.m2)
            # no filter could adopt a state that is not finite, so a delta that leads to one is
            # refused
            if merged.n > _MAX_COUNT or not is_finite:
                raise BatchError(
                    "filter delta", "numbers that keep the statistics finite", "an overflow"
                )
            self._stat = merged
            self._scale = None

    def adopt(self, state: Arrays, acked_sequence: int) -> None:
        """See `ObservationFilter.adopt`. The caller must adopt states in the order of their
        versions.

        Raises:
            BatchError: when the state does not fit the filter's shape or is not finite.
        """
        stat = RunningStat.from_state(state, self._stat_shape)
        with self._lock:
            self.acknowledge(acked_sequence)
            for pending in self._in_flight.values():
                stat.merge(pending)
            stat.merge(self._buffer)
            self._stat = stat
            self._scale = None

    def acknowledge(self, acked_sequence: int) -> None:
        """See `ObservationFilter.acknowledge`."""
        with self._lock:
            for sequence in [*self._in_flight]:
                if sequence <= acked_sequence:
                    del self._in_flight[sequence]

    def restore(self, state: Arrays) -> None:
        """See `ObservationFilter.restore`."""
        stat = RunningStat.from_state(state, self._stat_shape)
        with self._lock:
            self._in_flight.clear()
            self._buffer = RunningStat(self._stat_shape)
            self._stat = stat
            self._scale = None

    def state(self) -> FilterState:
        """See `ObservationFilter.state`."""
        with self._lock:
            return self._stat.to_state()

    def delta(self) -> FilterState:
        """Return the pending delta without taking it."""
        with self._lock:
            return self._buffer.to_state()

    def as_serializable(self) -> MeanStdFilter:
        """See `ObservationFilter.as_serializable`."""
        return self._copy_into(MeanStdFilter(self.shape, self.clip, num_kept=self.num_kept))

    def copy(self) -> MeanStdFilter:
        """See `ObservationFilter.copy`."""
        return self._copy_into(type(self)(self.shape, self.clip, num_kept=self.num_kept))

    def _copy_into(self, other: MeanStdFilter) -> MeanStdFilter:
        with self._lock:
            other._stat = self._stat.copy()
            other._buffer = self._buffer.copy()
            other._in_flight = {sequence: stat.copy() for sequence, stat in self._in_flight.items()}
            other._last_sequence = self._last_sequence
        return other

    def clear_buffer(self) -> None:
        """See `ObservationFilter.clear_buffer`."""
        with self._lock:
            self._buffer = RunningStat(self._stat_shape)

    def sync(self, other: ObservationFilter) -> None:
        """See `ObservationFilter.sync`."""
        stat = self._plain_copy(other)._stat
        with self._lock:
            stat.merge(self._buffer)
            self._stat = stat
            self._scale = None

    def apply_changes(self, other: ObservationFilter, with_buffer: bool = False) -> None:
        """See `ObservationFilter.apply_changes`."""
        delta = self._plain_copy(other)._buffer
        with self._lock:
            self._stat.merge(delta)
            if with_buffer:
                self._buffer = delta
            self._scale = None

    def _plain_copy(self, other: ObservationFilter) -> MeanStdFilter:
        """Return a copy of a filter of the same shape, which no other thread changes."""
        if (
            not isinstance(other, MeanStdFilter)
            or other.shape != self.shape
            or other.num_kept != self.num_kept
        ):
            raise ValueError(f"expected a MeanStdFilter of shape {self.shape}, got {other!r}")
        return other.as_serializable()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(shape={self.shape}, n={self._stat.n},"
            f" buffered={self._buffer.n})"
        )


class ConcurrentMeanStdFilter(MeanStdFilter):
    """MeanStdFilter that several threads can use together."""

    is_concurrent = True


class LearningFilter(ObservationFilter):
    """Identity on observations that another filter learns from; the observations are filtered
    later.
    """

    is_identity = False

    def __init__(self, learner: ObservationFilter) -> None:
        """Let the filter `learner` learn from all observations."""
        self._learner = learner
        self.shape = learner.shape
        self.is_concurrent = learner.is_concurrent

    def __call__(self, obs: Array, update: bool = True) -> Array:
        """See `ObservationFilter.__call__`."""
        if update:
            self._learner.learn(obs[None] if obs.shape == self.shape else obs)
        return obs.astype(np.float32, copy=False)

    def filter_in_order(self, obs: Array) -> Array:
        """See `ObservationFilter.filter_in_order`."""
        self._learner.filter_in_order(obs)
        return obs.astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Observation filter as ``(obs - centre) * scale - shift``, all of the shape of an observation,
    float32.

    The mean of a float64 filter is split into the centre and a rest, which is subtracted after
    scaling. The result is as precise as the filter, and graph optimisers cannot merge the two
    parts.
    """

    centre: F32
    scale: F32
    shift: F32

    def __call__(self, obs: Array) -> F32:
        """Return filtered observations [..., *shape]."""
        return (obs - self.centre) * self.scale - self.shift

    @classmethod
    def of(cls, obs_filter: MeanStdFilter) -> Self:
        """Return the normalisation of a filter with its current statistics; kept entries stay
        unchanged.
        """
        mean, scale = obs_filter.affine()
        centre = mean.astype(np.float32)
        shift = (mean - centre) * scale
        return cls(centre, scale.astype(np.float32), shift.astype(np.float32))


_FILTERS: dict[str, type[MeanStdFilter]] = {
    "MeanStdFilter": MeanStdFilter,
    "ConcurrentMeanStdFilter": ConcurrentMeanStdFilter,
}
FILTER_NAMES = ("NoFilter", *_FILTERS)


def make_filter(name: str, shape: tuple[int, ...], num_kept: int = 0) -> ObservationFilter:
    """Make the filter of a name for observations of a shape.

    Args:
        name: one of FILTER_NAMES.
        shape: shape of one observation.
        num_kept: number of entries at the start of a flat observation that stay unchanged.

    Raises:
        ConfigError: when no filter has that name (also a ValueError).
    """
    if name == "NoFilter":
        return NoFilter()
    if name not in _FILTERS:
        raise ConfigError(
            f"observation_filter is {name!r}, expected one of {', '.join(FILTER_NAMES)}.",
            key="observation_filter",
            value=name,
            hint=nearest(str(name), FILTER_NAMES).strip(),
        )
    return _FILTERS[name](shape, num_kept=num_kept)


_MAX_KEPT = 1 << 20
"""Most entries at the start of an observation that a filter from another process leaves unchanged."""


def filter_to_dict(obs_filter: ObservationFilter) -> dict[str, Any]:
    """Return a filter's kind, statistics and pending delta as plain data and arrays, for other
    processes.

    Raises:
        UnsendableError: it is of a kind that has no name.
    """
    if isinstance(obs_filter, NoFilter):
        return {"kind": "NoFilter"}
    kind = type(obs_filter).__name__
    if not isinstance(obs_filter, MeanStdFilter) or _FILTERS.get(kind) is not type(obs_filter):
        raise UnsendableError(
            f"a {kind} can't be sent to another process: send its as_serializable()"
        )
    return {
        "kind": kind,
        "shape": list(obs_filter.shape),
        "clip": obs_filter.clip,
        "num_kept": obs_filter.num_kept,
        "state": obs_filter.state(),
        "delta": obs_filter.delta(),
    }


def filter_from_dict(content: Mapping[str, Any]) -> ObservationFilter:
    """Return the filter of a result of `filter_to_dict` from another process.

    Raises:
        BatchError: its statistics are not finite, or not of its shape.
        TypeError: something else is wrong with it.
    """
    kind = content["kind"]
    if kind == "NoFilter":
        return NoFilter()
    shape = tuple(content["shape"])
    num_kept, clip = content["num_kept"], content["clip"]
    if kind not in _FILTERS or not all(type(size) is int for size in (*shape, num_kept)):
        raise TypeError(f"expected one of {', '.join(FILTER_NAMES)} with its shape")
    if clip is not None and type(clip) is not float:
        raise TypeError("expected a number to clip at, or None")
    stat_shape = (shape[0] - num_kept, *shape[1:]) if num_kept else shape
    # before any memory is taken for the shape
    if np.shape(content["state"]["mean"]) != stat_shape or not 0 <= num_kept <= _MAX_KEPT:
        raise TypeError(f"expected statistics of shape {stat_shape}")
    obs_filter = _FILTERS[kind](shape, clip, num_kept=num_kept)
    obs_filter.restore(content["state"])
    obs_filter._buffer = RunningStat.from_state(content["delta"], stat_shape)
    return obs_filter


_CLIP = 10.0
_MAX_CARRIED = 1 << 16
"""Limit of trajectories with a remembered return; some are broken off and never continue."""


def check_states(
    filters: Mapping[str, ObservationFilter],
    states: Mapping[str, Arrays],
    where: object,
) -> None:
    """Check that each filter can continue from its state, without changing any.

    A policy has learned from filtered observations or from plain ones, and is useless with the
    other kind.

    Args:
        filters: filters by name.
        states: states of these filters, and possibly of others.
        where: source of the states, for errors.

    Raises:
        CheckpointError: when a state belongs to another kind of filter, or to other observations.
    """
    for name, obs_filter in filters.items():
        state = states[name]
        if bool(state) == obs_filter.is_identity:
            raise CheckpointError(
                where,
                f"policy {name!r} was saved {'with' if state else 'without'} statistics of"
                f" observations, but its filter here is a {type(obs_filter).__name__}; use the"
                " observation_filter it was saved with",
            )
        try:
            obs_filter.copy().restore(state)
        except BatchError as error:
            raise CheckpointError(
                where, f"the filter of policy {name!r} does not fit here: {error}"
            ) from error


def returns_of(policy_id: str) -> str:
    """Return the name of a policy's return statistic among the filters; no policy id contains a
    slash.
    """
    return f"{policy_id}/returns"


class ReturnFilter(ConcurrentMeanStdFilter):
    """Running statistic of discounted returns."""

    def __init__(
        self, shape: tuple[int, ...] = (1,), clip: float | None = _CLIP, *, num_kept: int = 0
    ) -> None:
        """Start with no samples; arguments as for every filter."""
        super().__init__(shape, clip, num_kept=num_kept)

    def scale(self, returns: F64) -> float:
        """Add returns [B], unless the statistic is frozen, and return the resulting factor for
        rewards.
        """
        with self._lock:
            if len(returns) and not self.is_frozen:
                self(returns[:, None])
            n = self._stat.n
            m2 = float(self._stat.m2[0])
        # ddof 0, unlike the statistics of observations
        variance = m2 / n if n else 1.0
        return 1.0 / float(np.sqrt(variance + EPSILON))


class RewardScaler:
    """Scales the rewards of one sampler's trajectories, and remembers the returns of unfinished
    ones.

    All rewards of a call are scaled by the same factor, from the statistic that already includes
    their returns. Returns start again at 0 with each episode.
    """

    def __init__(self, returns: ReturnFilter, discount: float) -> None:
        """Use a return statistic, and the discount per step."""
        self._returns = returns
        self._discount = discount
        self._by_env: F64 | None = None
        self._by_key: dict[Hashable, float] = {}

    def scale_envs(self, rewards: F32, dones: Bools, valid: Bools | None = None) -> F32:
        """Scale the next steps of all environments.

        Args:
            rewards: [T, N] float32.
            dones: [T, N], True where an episode ends.
            valid: [T, N], False where a row is no transition; None = all are transitions.

        Returns:
            float32 [T, N].
        """
        summands = rewards.astype(np.float64)
        if valid is not None:
            summands[~valid] = 0.0
        if self._by_env is not None:
            summands[0] += self._discount * self._by_env
        returns = self._sums(summands, dones)
        self._by_env = np.where(dones[-1], 0.0, returns[-1])
        return self._scaled(rewards, returns.ravel() if valid is None else returns[valid])

    def scale_trajectories(
        self,
        rewards: F32,
        ends: NDArray[np.int64],
        is_over: Bools,
        keys: Sequence[Hashable],
    ) -> F32:
        """Scale trajectories that lie one after the other.

        Args:
            rewards: [B] float32.
            ends: [K], index after the last row of each trajectory.
            is_over: [K], True if the trajectory does not continue.
            keys: [K], identities under which trajectories continue later.

        Returns:
            float32 [B].
        """
        summands = rewards.astype(np.float64)
        dones = np.zeros((len(rewards), 1), np.bool_)
        dones[ends - 1] = True
        sums = np.empty_like(summands)
        first = 0
        for end, over, key in zip(ends.tolist(), is_over.tolist(), keys, strict=True):
            summands[first] += self._discount * self._by_key.pop(key, 0.0)
            rows = slice(first, end)
            sums[rows] = self._sums(summands[rows, None], dones[rows])[:, 0]
            if not over:
                self._by_key[key] = float(sums[end - 1])
            first = end
        while len(self._by_key) > _MAX_CARRIED:
            del self._by_key[next(iter(self._by_key))]
        return self._scaled(rewards, sums)

    def _sums(self, rewards: F64, dones: Bools) -> F64:
        """Return the discounted sums [T, N] of all rewards up to each step, from the start of its
        episode.
        """
        decay = np.empty_like(rewards)
        decay[0] = 0.0
        decay[1:] = np.where(dones[:-1], 0.0, self._discount)
        sums: F64 = discounted_sums(rewards[::-1].copy(), decay[::-1])[::-1]
        return sums

    def _scaled(self, rewards: F32, returns: Array) -> F32:
        scaled: F32 = (rewards * self._returns.scale(returns)).astype(np.float32)
        return np.clip(scaled, -_CLIP, _CLIP, out=scaled)
