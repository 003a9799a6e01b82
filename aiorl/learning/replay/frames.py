"""FrameStore: observations whose frames are each stored once.

An observation is a stack of K frames. It continues the previous one of its environment if it
repeats all but the oldest of its frames; it then adds one frame to the store. Otherwise it adds all
frames that differ from their neighbour, as at an episode's start. The observation after a
trajectory's last row is the first one of the piece that continues it, in the next fragment of its
environment or after other trajectories in the same fragment. There it is recognised by its
contents, whichever worker sends it.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from aiorl.data import columns as c
from aiorl.data.columns import I32, I64, Array, Bools, Columns
from aiorl.data.fragment import continues_stack
from aiorl.errors import BatchError
from aiorl.learning.replay.ring import Ring
from aiorl.learning.replay.spec import RECENT_FRAMES

_RECENT_SHARE = 32
"""A trajectory continues from stored frames only if they are recent: among the newest
`RECENT_FRAMES` plus one in this many of all. Rows are dropped in order, so all rows since an old
frame would go with it. Spare frames make up for that."""


class Observed(NamedTuple):
    """Observations of a fragment, each once.

    Attributes:
        obs: [T, N, ...], before each step.
        last: [N, ...], after the last step.
        final_index: [M, 2] (t, n) of rows whose next observation is not the next row's.
        final_obs: [M, ...], next observations of these rows.
    """

    obs: Array
    last: Array
    final_index: I64
    final_obs: Array


def observed(arrays: Columns, dtype: np.dtype[Any]) -> Observed:
    """Return the observations of a checked fragment in either of its layouts, as numbers of a
    dtype.
    """
    obs = arrays[c.OBS].astype(dtype, copy=False)
    if c.NEW_OBS in arrays:
        following = arrays[c.NEW_OBS].astype(dtype, copy=False)
        differs = np.zeros(obs.shape[:2], np.bool_)
        for after, before, row in zip(following[:-1], obs[1:], differs, strict=False):
            is_other = after != before
            row[:] = is_other.reshape(len(row), -1).any(axis=1)
        return Observed(
            obs=obs,
            last=following[-1],
            final_index=np.argwhere(differs),
            final_obs=following[differs],
        )
    final_index = arrays.get(c.FINAL_INDEX, np.zeros((0, 2)))
    final_obs = arrays.get(c.FINAL_OBS, obs[:0, 0])
    return Observed(
        obs=obs,
        last=arrays[c.LAST_OBS].astype(dtype, copy=False),
        final_index=final_index.astype(np.int64),
        final_obs=final_obs.astype(dtype, copy=False),
    )


class _Compared(NamedTuple):
    """Observations of a fragment as flat stacks, and which of them continue the previous one.

    Attributes:
        stacks: T + 1 arrays [N, P * K], the last one after the last step.
        follows: [T + 1, N], which of them continue the one before.
        finals: [M, P * K], final observations.
        final_follows: [M], which of them continue the observation of their row.
    """

    stacks: list[Array]
    follows: Bools
    finals: Array
    final_follows: Bools

    def most_frames(self, stack: int) -> int:
        """Return the maximum number of frames: one for each observation that continues, a whole
        `stack` for others.
        """
        num_stacks = self.follows.size + self.final_follows.size
        num_following = np.count_nonzero(self.follows) + np.count_nonzero(self.final_follows)
        return int(num_following + (num_stacks - num_following) * stack)


class FrameStore:
    """The newest frames of observations.

    Attributes:
        ring: frames, [F].
        dtype: dtype of the frames.
    """

    def __init__(self, frames: Array, stack: int) -> None:
        """Take over the memory.

        Args:
            frames: [F] records of one field, ``frame``.
            stack: frames of an observation.
        """
        self.ring = Ring(frames)
        self._frames: Array = frames["frame"]
        self.dtype = self._frames.dtype
        self._flat = self._frames.reshape(len(frames), -1)
        self._stack = stack
        self._newest = slice(stack - 1, None, stack)  # numbers of a stack's newest frame
        self._recent = min(RECENT_FRAMES, len(frames) // 4) + len(frames) // _RECENT_SHARE
        self._last: OrderedDict[int, I64] = OrderedDict()

    def insert(self, observations: Observed, make_room: Callable[[int], None]) -> tuple[I64, I64]:
        """Store the observations of a fragment.

        Args:
            observations: observations to store.
            make_room: called with a frame's number before frames with lower numbers are
                overwritten.

        Returns:
            Numbers of the frames of each row's observation and of its next observation, [T, N, K]
            both.

        Raises:
            BatchError: they have more frames than the store.
        """
        compared = self._compared(observations)
        most = compared.most_frames(self._stack)
        if most > self.ring.capacity:
            raise BatchError(c.OBS, f"at most {self.ring.capacity} frames in a fragment", most)
        first_to_stay = self.ring.written + most - self.ring.capacity
        make_room(first_to_stay)
        oldest = max(first_to_stay, self._oldest_recent)

        length, num_envs = observations.obs.shape[:2]
        numbers = np.empty((length + 1, num_envs, self._stack), np.int64)
        final_numbers = np.empty((len(compared.finals), self._stack), np.int64)
        times, envs = observations.final_index.T
        finals_of: dict[int, list[int]] = {}
        for place, time in enumerate(times.tolist()):
            finals_of.setdefault(time, []).append(place)
        for step, stacks in enumerate(compared.stacks):
            is_next = compared.follows[step]
            if step:
                numbers[step, is_next, :-1] = numbers[step - 1, is_next, 1:]
                numbers[step, is_next, -1] = self._write(stacks[is_next, self._newest])
            for env in np.flatnonzero(~is_next):
                numbers[step, env] = self._shared_or_written(stacks[env], oldest)
            for place in finals_of.get(step, ()):
                final = compared.finals[place]
                if compared.final_follows[place]:
                    final_numbers[place, :-1] = numbers[step, envs[place], 1:]
                    final_numbers[place, -1:] = self._write(final[None, self._newest])
                else:
                    final_numbers[place] = self._shared_or_written(final, oldest)
                self._remember(final, final_numbers[place])
        for stack, stack_numbers in zip(compared.stacks[-1], numbers[-1], strict=True):
            self._remember(stack, stack_numbers)
        self._forget()
        following = numbers[1:].copy()
        following[times, envs] = final_numbers
        return numbers[:-1], following

    def most_rows(self) -> int:
        """Return the rows of a fragment, at least one step, for which there are frames whatever was
        observed.

        A row takes a whole stack for its observation, and another if its episode ended. The last
        step's rows take one more for their next observations.
        """
        return self.ring.capacity // (3 * self._stack)

    def num_needed(self, observations: Observed) -> int:
        """Return the maximum number of frames that the observations of a fragment need."""
        return self._compared(observations).most_frames(self._stack)

    def slots(self, numbers: I64) -> I32:
        """Return the slots of frames."""
        return (numbers % self.ring.capacity).astype(np.int32)

    def read(self, slots: I32, out: Array) -> None:
        """Read stacks of frames.

        Args:
            slots: [B, K].
            out: [B, ...], with the shape of the observations, C-contiguous.
        """
        frame_size = self._flat.shape[1]
        if self._stack == 1:
            flat = out.reshape(len(out), frame_size)
            np.take(self._flat, slots[:, 0], axis=0, out=flat, mode="clip")
            return
        stacks = out.reshape(len(out), frame_size, self._stack)
        for place in range(self._stack):
            stacks[..., place] = self._flat.take(slots[:, place], axis=0)

    def last(self) -> I64:
        """Return the frames' numbers [M, K] of the observations from which other trajectories can
        continue.
        """
        last = np.array([*self._last.values()], np.int64).reshape(-1, self._stack)
        is_recent = last[:, 0] >= self._oldest_recent
        return last[is_recent]

    def set_last(self, last: Array) -> None:
        """Restore the numbers that `last` returned."""
        self._last.clear()
        is_recent = last[:, 0] >= self._oldest_recent
        for numbers in last[is_recent]:
            self._remember(self._stored(numbers), numbers)

    def _compared(self, observations: Observed) -> _Compared:
        """Return the observations of a fragment one by one, and which of them continue the previous
        one.

        Single frames repeat nothing: one continues unless the next observation of the previous row
        is another.
        """
        obs, last, final_index, final_obs = observations
        length, num_envs = obs.shape[:2]
        stacks = [row.reshape(num_envs, -1) for row in (*obs, last)]
        follows = np.zeros((length + 1, num_envs), np.bool_)
        for before, after, row in zip(stacks[:-1], stacks[1:], follows[1:], strict=True):
            row[:] = self._goes_on(before, after)
        if self._stack == 1:
            steps, envs = final_index.T
            follows[steps + 1, envs] = False
        finals = final_obs.reshape(len(final_index), stacks[0].shape[1])
        before_finals = np.array([stacks[step][env] for step, env in final_index])
        final_follows = self._goes_on(before_finals.reshape(finals.shape), finals)
        return _Compared(stacks, follows, finals, final_follows)

    def _goes_on(self, before: Array, after: Array) -> Bools:
        if self._stack == 1:
            return np.ones(len(before), np.bool_)
        return continues_stack(before, after, self._stack)

    @property
    def _oldest_recent(self) -> int:
        """Number of the oldest frame from which a trajectory can continue."""
        return max(0, self.ring.written - self._recent)

    def _shared_or_written(self, stack: Array, oldest: int) -> I64:
        """Return the frames' numbers [K] of an observation that continues none in its fragment.

        Args:
            stack: observation; it is stored unless a trajectory recently ended with it.
            oldest: number of the oldest frame that it can share.
        """
        numbers = self._last.get(_key(stack))
        if numbers is None or numbers[0] < oldest:
            return self._write_whole(stack)
        if not np.array_equal(self._stored(numbers), stack):  # another one with the same key
            return self._write_whole(stack)
        return numbers

    def _remember(self, stack: Array, numbers: I64) -> None:
        """Remember an observation with stored frames [K], so that another trajectory can continue
        from it.
        """
        key = _key(stack)
        self._last[key] = numbers.copy()
        self._last.move_to_end(key)

    def _forget(self) -> None:
        """Forget the oldest observations if there are more than recent frames."""
        while self._last:
            numbers = next(iter(self._last.values()))
            if numbers[0] >= self._oldest_recent:
                return
            self._last.popitem(last=False)

    def _stored(self, numbers: I64) -> Array:
        """Return the stack [P * K] of frames [K]."""
        stack: Array = np.empty(self._flat.shape[1] * self._stack, self._flat.dtype)
        self.read(self.slots(numbers[None]), stack[None])
        return stack

    def _write_whole(self, stack: Array) -> I64:
        """Store the frames [K] of one observation; equal neighbours are stored once."""
        frames = np.ascontiguousarray(stack.reshape(-1, self._stack).T)
        is_new = np.ones(self._stack, np.bool_)
        is_new[1:] = (frames[1:] != frames[:-1]).any(axis=1)
        numbers = self._write(frames[is_new])
        return numbers.take(np.cumsum(is_new) - 1)

    def _write(self, frames: Array) -> I64:
        """Store frames [M, P] and return their numbers."""
        first = self.ring.written
        if len(frames):
            for slots, part in self.ring.advance(len(frames)):
                self._flat[slots] = frames[part]
        return np.arange(first, first + len(frames))


def _key(stack: Array) -> int:
    """Return a number by which to look an observation up before comparing it."""
    return zlib.crc32(np.ascontiguousarray(stack).data)
