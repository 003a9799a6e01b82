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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.fragment import continues_stack
from aiorl.errors import BatchError
from aiorl.learning.replay.ring import Ring
from aiorl.learning.replay.spec import RECENT_FRAMES

Array = NDArray[Any]
I64 = NDArray[np.int64]

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


def observed(arrays: Mapping[str, Array], dtype: np.dtype[Any]) -> Observed:
    """Return the observations of a checked fragment in either of its layouts, as numbers of a
    dtype.
    """
    obs = arrays[c.OBS].astype(dtype, copy=False)
    if c.NEW_OBS in arrays:
        following = arrays[c.NEW_OBS].astype(dtype, copy=False)
        differs = np.zeros(obs.shape[:2], np.bool_)
        for after, before, row in zip(following[:-1], obs[1:], differs, strict=False):
            row[:] = (after != before).reshape(len(row), -1).any(axis=1)
        return Observed(obs, following[-1], np.argwhere(differs), following[differs])
    index = arrays.get(c.FINAL_INDEX, np.zeros((0, 2))).astype(np.int64)
    last = arrays[c.LAST_OBS]
    final = arrays.get(c.FINAL_OBS, obs[:0, 0])
    return Observed(obs, last.astype(dtype, copy=False), index, final.astype(dtype, copy=False))


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
        self._recent = min(RECENT_FRAMES, len(frames) // 4) + len(frames) // _RECENT_SHARE
        self._last: OrderedDict[int, I64] = OrderedDict()

    def insert(
        self, seen: Observed, make_room: Callable[[int], None]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Store the observations of a fragment.

        Args:
            seen: observations to store.
            make_room: called with a frame's number before frames with lower numbers are
                overwritten.

        Returns:
            Numbers of the frames of each row's observation and of its next observation, [T, N, K]
            both.

        Raises:
            BatchError: they have more frames than the store.
        """
        length, num_envs = seen.obs.shape[:2]
        sites, finals, follows, final_follows = self._compared(seen)
        most = self._most_frames(follows, final_follows)
        if most > self.ring.capacity:
            raise BatchError(c.OBS, f"at most {self.ring.capacity} frames in a fragment", most)
        first_kept = self.ring.written + most - self.ring.capacity
        make_room(first_kept)
        oldest = max(first_kept, self._oldest_recent)

        numbers = np.empty((length + 1, num_envs, self._stack), np.int64)
        final_numbers = np.empty((len(finals), self._stack), np.int64)
        times = seen.final_index[:, 0]
        envs = seen.final_index[:, 1]
        finals_of: dict[int, list[int]] = {}
        for place, time in enumerate(times.tolist()):
            finals_of.setdefault(time, []).append(place)
        for step, (site, is_next) in enumerate(zip(sites, follows, strict=True)):
            if step:
                numbers[step, is_next, :-1] = numbers[step - 1, is_next, 1:]
                numbers[step, is_next, -1] = self._write(
                    site[is_next, self._stack - 1 :: self._stack]
                )
            for env in np.flatnonzero(~is_next):
                numbers[step, env] = self._known_or_written(site[env], oldest)
            for place in finals_of.get(step, ()):
                if final_follows[place]:
                    final_numbers[place, :-1] = numbers[step, envs[place], 1:]
                    final_numbers[place, -1:] = self._write(
                        finals[place][None, self._stack - 1 :: self._stack]
                    )
                else:
                    final_numbers[place] = self._known_or_written(finals[place], oldest)
                self._remember(finals[place], final_numbers[place])
        for stack, own in zip(sites[-1], numbers[-1], strict=True):
            self._remember(stack, own)
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

    def num_needed(self, seen: Observed) -> int:
        """Return the maximum number of frames that the observations of a fragment need."""
        return self._most_frames(*self._compared(seen)[2:])

    def slots(self, numbers: I64) -> NDArray[np.int32]:
        """Return the slots of frames."""
        return (numbers % self.ring.capacity).astype(np.int32)

    def read(self, slots: NDArray[np.int32], out: Array) -> None:
        """Read stacks of frames.

        Args:
            slots: [B, K].
            out: [B, ...], with the shape of the observations, C-contiguous.
        """
        if self._stack == 1:
            np.take(
                self._flat,
                slots[:, 0],
                axis=0,
                out=out.reshape(len(out), self._flat.shape[1]),
                mode="clip",
            )
            return
        flat = out.reshape(len(out), self._flat.shape[1], self._stack)
        for place in range(self._stack):
            flat[..., place] = self._flat.take(slots[:, place], axis=0)

    def last(self) -> I64:
        """Return the frames' numbers [M, K] of the observations from which other trajectories can
        continue.
        """
        last = np.array([*self._last.values()], np.int64).reshape(-1, self._stack)
        return last[last[:, 0] >= self._oldest_recent]

    def set_last(self, last: Array) -> None:
        """Restore the numbers that `last` returned."""
        self._last.clear()
        for own in last[last[:, 0] >= self._oldest_recent]:
            self._remember(self._stored(own), own)

    def _compared(
        self, seen: Observed
    ) -> tuple[list[Array], Array, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the observations of a fragment one by one, and which of them continue the previous
        one.

        Returns:
            T + 1 arrays [N, P * K] and whether they continue, [T + 1, N]; likewise for final
            observations, [M, P * K] and [M]. Single frames repeat nothing: one continues unless the
            next observation of the previous row is another.
        """
        length, num_envs = seen.obs.shape[:2]
        sites = [row.reshape(num_envs, -1) for row in (*seen.obs, seen.last)]
        follows = np.zeros((length + 1, num_envs), np.bool_)
        for before, after, row in zip(sites[:-1], sites[1:], follows[1:], strict=True):
            row[:] = self._goes_on(before, after)
        if self._stack == 1:
            follows[seen.final_index[:, 0] + 1, seen.final_index[:, 1]] = False
        finals = seen.final_obs.reshape(len(seen.final_index), sites[0].shape[1])
        before_finals = np.array([sites[t][n] for t, n in seen.final_index]).reshape(finals.shape)
        return sites, finals, follows, self._goes_on(before_finals, finals)

    def _most_frames(self, *follows: NDArray[np.bool_]) -> int:
        """Return the maximum number of frames: one for each observation that continues, a whole
        stack for others.
        """
        return sum(
            int(np.count_nonzero(each) + np.count_nonzero(~each) * self._stack) for each in follows
        )

    def _goes_on(self, before: Array, after: Array) -> NDArray[np.bool_]:
        return (
            np.ones(len(before), np.bool_)
            if self._stack == 1
            else continues_stack(before, after, self._stack)
        )

    @property
    def _oldest_recent(self) -> int:
        """Number of the oldest frame from which a trajectory can continue."""
        return max(0, self.ring.written - self._recent)

    def _known_or_written(self, stack: Array, oldest: int) -> I64:
        """Return the frames' numbers [K] of an observation that continues none in its fragment.

        Args:
            stack: observation; it is stored unless a trajectory recently ended with it.
            oldest: number of the oldest frame that it can share.
        """
        found = self._last.get(_key(stack))
        if found is not None and found[0] >= oldest and np.array_equal(self._stored(found), stack):
            return found
        return self._write_whole(stack)

    def _remember(self, stack: Array, numbers: I64) -> None:
        """Remember an observation with stored frames [K], so that another trajectory can continue
        from it.
        """
        key = _key(stack)
        self._last[key] = numbers.copy()
        self._last.move_to_end(key)

    def _forget(self) -> None:
        """Forget the oldest observations if there are more than recent frames."""
        while self._last and next(iter(self._last.values()))[0] < self._oldest_recent:
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
