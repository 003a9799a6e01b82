"""Checks of the values that an environment returns: one cheap test per batch; on failure, a search
for the culprit.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from aiorl.data.actions import ActionLayout
from aiorl.data.columns import NUMBER_KINDS, Array, Bools, all_finite, described_value
from aiorl.data.spaces import SIMPLE_KINDS
from aiorl.errors import (
    BadObservationError,
    BadRewardError,
    BatchError,
    ConfigError,
    EnvContractError,
    EnvError,
    SamplerDied,
    UnsupportedSpaceError,
    described,
)
from aiorl.text import shortened

logger = logging.getLogger(__name__)

SIMPLE_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces whose observations are single arrays."""

StepOf = Callable[[int], int]
"""Function that maps a vector index to the step of that copy in its episode, for messages."""


class ObservationCheck:
    """Check of a batch of observations of one space.

    Attributes:
        shape: shape of one observation.
        dtype: dtype in which observations are stored.
    """

    def __init__(self, env_id: str, space: spaces.Space[Any]) -> None:
        """Derive the checks from a space.

        Raises:
            UnsupportedSpaceError: an observation of the space is not a single array.
        """
        self.env_id = env_id
        self.shape: tuple[int, ...] = tuple(space.shape or ())
        self._low: Array | int | None = None
        self._high: Array | int | None = None
        if isinstance(space, spaces.Box):
            self.dtype = np.dtype(space.dtype)
        elif isinstance(space, spaces.Discrete):
            self.dtype = np.dtype(np.int64)
            self._low = int(space.start)
            self._high = int(space.start + space.n - 1)
        elif isinstance(space, spaces.MultiDiscrete):
            self.dtype = np.dtype(np.int64)
            self._low = space.start
            self._high = space.start + space.nvec - 1
        elif isinstance(space, spaces.MultiBinary):
            self.dtype = np.dtype(np.int8)
            self._low = 0
            self._high = 1
        else:
            raise UnsupportedSpaceError("the observation space", space, SIMPLE_KINDS)
        self._is_float = self.dtype.kind == "f"
        self._bounds = _bounds_of(space)
        self._num_checked = 0

    def coerce(self, obs: Any, index: int, step: int) -> Array:
        """Return one observation as an array of the right shape and dtype.

        Raises:
            BadObservationError: its shape differs, or its values cannot be converted safely.
        """
        return self._array(obs, self.shape, index, step)

    def check_batch_shape(self, obs: Any, num_envs: int) -> Array:
        """Return a whole batch [N, ...] from a vectorised environment as an array.

        Raises:
            BadObservationError: its shape or dtype differs.
        """
        return self._array(obs, (num_envs, *self.shape), 0, 0)

    def _array(self, obs: Any, shape: tuple[int, ...], index: int, step: int) -> Array:
        try:
            array = np.asarray(obs)
        except (ValueError, TypeError) as error:
            raise self._bad(
                f"observation of type {type(obs).__name__} is not an array", index, step
            ) from error
        if array.dtype.kind not in NUMBER_KINDS:
            raise self._bad(
                f"observation is {described_value(obs)}, expected numbers of shape {shape}",
                index,
                step,
            )
        if array.shape != shape:
            raise self._bad(f"observation has shape {array.shape}, expected {shape}", index, step)
        if array.dtype != self.dtype and not _converts(array, self.dtype):
            raise self._bad(
                f"observation has dtype {array.dtype}, expected {self.dtype}", index, step
            )
        return array

    def check_values(
        self,
        obs: Array,
        step_of: StepOf,
        index_of: Callable[[int], int] = lambda row: row,
    ) -> None:
        """Raise an error if a value is not finite or lies outside a discrete space.

        Args:
            obs: [M, ...] observations.
            step_of: maps a row to the step of that copy in its episode.
            index_of: maps a row to a vector index; by default, rows are the copies in order.

        Raises:
            BadObservationError: a value is bad; the error names the first such row.
        """
        if self._bounds is not None:
            self._look_at_bounds(*self._bounds, obs, step_of, index_of)
        if self._is_float:
            if all_finite(obs):
                return
            good = np.isfinite(obs)
            what = "contains NaN or infinity"
        elif self._low is not None and self._high is not None:
            good = (obs >= self._low) & (obs <= self._high)
            if good.all():
                return
            what = f"is outside {self._low} to {self._high}"
        else:
            return
        row = _first_row(~good)
        raise self._bad(f"observation {what}: {_short(obs[row])}", index_of(row), step_of(row))

    def _look_at_bounds(
        self,
        low: Array,
        high: Array,
        obs: Array,
        step_of: StepOf,
        index_of: Callable[[int], int],
    ) -> None:
        """Warn once about an observation outside its Box.

        Only one batch in 17 is checked, to save time. This is a prime number, so that all copies get
        their turn if they are checked one by one.
        """
        self._num_checked += 1
        if self._num_checked % 17 != 1:
            return
        outside = (obs < low) | (obs > high)
        if not outside.any():
            return
        self._bounds = None
        row = _first_row(outside)
        logger.warning(
            "environment %r, copy %d, step %d: an observation is outside the bounds of its Box; it"
            " is used unchanged: %s. Further ones are not reported.",
            self.env_id,
            index_of(row),
            step_of(row),
            _short(obs[row]),
        )

    def _bad(self, message: str, index: int, step: int) -> BadObservationError:
        return BadObservationError(self.env_id, message, vector_index=index, step=step)


class NestedCheck:
    """Check of an observation of a Dict or Tuple space, which can be nested.

    Attributes:
        leaf: check of an observation that is a single array; else None.
    """

    def __init__(
        self,
        env_id: str,
        space: spaces.Space[Any],
        *,
        may_have_more: bool = True,
    ) -> None:
        """Derive the checks from a space; spaces of a kind without arrays are not checked.

        Args:
            env_id: name for messages.
            space: the space.
            may_have_more: True drops keys that the Dict space does not have, and warns of them
                once; False refuses them.
        """
        self._env_id = env_id
        self.leaf: ObservationCheck | None = None
        self._kind: type[Any] | None = None
        self._may_have_more = may_have_more
        self._warns_of_more = may_have_more
        parts: Iterable[tuple[Any, spaces.Space[Any]]] = ()
        if isinstance(space, spaces.Dict):
            self._kind = dict
            parts = space.spaces.items()
        elif isinstance(space, spaces.Tuple):
            self._kind = tuple
            parts = enumerate(space.spaces)
        elif isinstance(space, SIMPLE_SPACES):
            self.leaf = ObservationCheck(env_id, space)
        self._parts = {
            key: NestedCheck(env_id, part, may_have_more=may_have_more) for key, part in parts
        }

    def coerce(self, obs: Any, index: int, step: int) -> Any:
        """Return one observation with arrays of the right shapes and dtypes as its leaves.

        Raises:
            BadObservationError: a part is missing, unexpected, of another shape or dtype, or
                contains a bad value.
        """
        if self.leaf is not None:
            array = self.leaf.coerce(obs, index, step)
            self.leaf.check_values(array[None], lambda row: step, lambda row: index)
            if array.dtype == self.leaf.dtype:
                return array
            with np.errstate(over="ignore"):
                converted = array.astype(self.leaf.dtype)
            if converted.dtype.kind == "f" and not all_finite(converted):
                raise self._bad(
                    f"observation has numbers too large for {converted.dtype}: {_short(array)}",
                    index,
                    step,
                )
            return converted
        if self._kind is dict:
            is_whole = isinstance(obs, Mapping) and obs.keys() >= self._parts.keys()
            if not is_whole or (len(obs) > len(self._parts) and not self._may_have_more):
                got = sorted(map(str, obs)) if isinstance(obs, Mapping) else type(obs).__name__
                raise self._bad(
                    f"observation has {got}, expected the keys {list(self._parts)}", index, step
                )
            if self._warns_of_more and len(obs) > len(self._parts):
                self._warn_of_more(obs, index, step)
            return {key: part.coerce(obs[key], index, step) for key, part in self._parts.items()}
        if self._kind is tuple:
            if not isinstance(obs, tuple | list) or len(obs) != len(self._parts):
                raise self._bad(
                    f"observation is {shortened(repr(obs), 200)}, expected {len(self._parts)}"
                    " parts",
                    index,
                    step,
                )
            return tuple(
                part.coerce(value, index, step)
                for part, value in zip(self._parts.values(), obs, strict=True)
            )
        return obs

    def _warn_of_more(self, obs: Mapping[Any, Any], index: int, step: int) -> None:
        self._warns_of_more = False
        undeclared = sorted(map(str, obs.keys() - self._parts.keys()))
        logger.warning(
            "environment %r, copy %d, step %d: an observation has the keys %s, which its Dict space"
            " does not have; policies do not get them. Declare them in the space, or leave them"
            " out. Further ones are not reported.",
            self._env_id,
            index,
            step,
            shortened(repr(undeclared), 200),
        )

    def _bad(self, message: str, index: int, step: int) -> BadObservationError:
        return BadObservationError(self._env_id, message, vector_index=index, step=step)


def action_fault(layout: ActionLayout, action: Any) -> str:
    """Return the fault of an action that comes from a client rather than from a policy; "" if it
    has none.

    Values outside the bounds of a Box are no fault: rows contain such actions of policies, too.
    """
    why = ""
    try:
        with np.errstate(over="ignore"):
            row = layout.to_row(action)
        if all(
            _fits(leaf, batch[0])
            for leaf, batch in zip(layout.leaves, layout.split(row[None]), strict=True)
        ):
            return ""
    except (BatchError, ValueError, TypeError, OverflowError) as error:
        why = f" ({error})"
    return f"action {shortened(repr(action), 200)} does not fit {layout.space}{why}"


def _fits(leaf: spaces.Space[Any], action: Array) -> bool:
    """Return True if an action of the right shape and dtype is finite and, in a discrete space, in
    range.
    """
    if isinstance(leaf, spaces.Box):
        return leaf.dtype.kind != "f" or all_finite(action)
    return leaf.contains(action)


def as_reward(reward: Any, env_id: str, index: int, step: int) -> float:
    """Return a reward as a float.

    Raises:
        BadRewardError: the reward is not a finite number.
    """
    try:
        if isinstance(reward, str | bytes):
            raise TypeError("text is not a number, even if it looks like one")
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise BadRewardError(
            env_id,
            f"reward is {reward!r} ({type(reward).__name__}), expected a"
            f" number{hint_for_vector(reward)}",
            vector_index=index,
            step=step,
        ) from error
    if not math.isfinite(number):
        raise BadRewardError(
            env_id,
            f"reward is {number}, expected a finite number",
            vector_index=index,
            step=step,
        )
    return number


def hint_for_vector(reward: Any, num_envs: int = 0) -> str:
    """Return the end of a message about a reward that names the remedy if it is a vector; "" if it
    is none.

    Args:
        reward: the reward, or rewards [N, ...] of several copies.
        num_envs: number of copies N; 0 for the reward of one.
    """
    try:
        shape = np.asarray(reward, np.float64).shape
    except (TypeError, ValueError):
        return ""
    if len(shape) <= bool(num_envs) or not shape[-1]:
        return ""
    wrapper = "[{class: mo_gymnasium.wrappers:LinearReward, kwargs: {weight: [0.5, 0.5]}}]"
    return (
        f". Weigh the parts of a vector of rewards; for a single environment, wrappers: {wrapper}"
        " does it"
    )


def as_rewards(
    rewards: Mapping[Any, Any],
    env_id: str,
    index: int,
    step: int,
) -> Mapping[Any, float]:
    """Return the rewards by agent as floats; None counts as 0.0.

    Raises:
        BadRewardError: a reward is not a finite number.
    """
    total = 0.0
    for reward in rewards.values():
        if type(reward) is not float:
            break
        total += reward
    else:
        if math.isfinite(total):
            return rewards
    return {
        agent_id: 0.0 if reward is None else as_reward(reward, env_id, index, step)
        for agent_id, reward in rewards.items()
    }


def check_rewards(env_id: str, rewards: Array, step_of: StepOf) -> None:
    """Raise an error if a reward is not a finite number.

    Raises:
        BadRewardError: a reward is not finite; the error names the first copy at fault.
    """
    if all_finite(rewards):
        return
    index = _first_row(~np.isfinite(rewards))
    raise BadRewardError(
        env_id,
        f"reward is {rewards[index]}, expected a finite number",
        vector_index=index,
        step=step_of(index),
    )


def check_flags(flags: Iterable[Any], env_id: str, index: int, step: int) -> None:
    """Refuse text as a flag for an episode's end: any text but the empty one would count as true.

    Raises:
        EnvContractError: a flag is text.
    """
    for flag in flags:
        if isinstance(flag, str | bytes):
            raise EnvContractError(
                env_id,
                f"terminated and truncated must be True or False, not text: {flag!r:.50}",
                vector_index=index,
                step=step,
            )


def raise_env_fault(
    env_id: str,
    doing: str,
    error: Exception,
    *,
    index: int,
    step: int,
) -> NoReturn:
    """Raise an EnvError, with traceback, for an exception from the environment's own code.

    Raises:
        EnvError: always, unless the sampler must end; an EnvError is raised unchanged.
        SamplerDied: the given error is one; it is raised unchanged.
        ConfigError: likewise.
    """
    if isinstance(error, EnvError | SamplerDied | ConfigError):
        raise error
    raise EnvError(
        env_id,
        f"{doing} raised {described(error)}",
        vector_index=index,
        step=step,
        traceback_text="".join(traceback.format_exception(error)),
    ) from error


def _converts(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return True if an array can have another dtype without losing more than precision."""
    if np.can_cast(array.dtype, dtype, "same_kind"):
        return True
    if array.dtype.kind not in "iub":
        return False
    if dtype.kind == "f":
        return True
    return dtype.kind in "iub" and bool(np.array_equal(array.astype(dtype), array))


def _bounds_of(space: spaces.Space[Any]) -> tuple[Array, Array] | None:
    """Return the bounds of a Box with a tolerance for rounding, or None if no value can lie outside
    of them.
    """
    if not isinstance(space, spaces.Box) or not space.is_bounded("both"):
        return None
    low = space.low.astype(np.float64)
    high = space.high.astype(np.float64)
    if space.dtype.kind in "iu":
        limits = np.iinfo(space.dtype)
        if (low <= limits.min).all() and (high >= limits.max).all():
            return None
        return low, high
    tolerance_below = 1e-5 * np.maximum(1.0, np.abs(low))
    tolerance_above = 1e-5 * np.maximum(1.0, np.abs(high))
    return low - tolerance_below, high + tolerance_above


def _first_row(flags: Bools) -> int:
    """Return the index of the first row [M, ...] with a true flag."""
    return int(flags.reshape(len(flags), -1).any(axis=1).argmax())


def _short(value: ArrayLike) -> str:
    return shortened(np.array2string(np.asarray(value), threshold=8, edgeitems=3, precision=4), 200)
