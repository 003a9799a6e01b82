"""FrameStore: observations of which each frame is kept once.

An observation is a stack of K frames. It goes on from the one before it in its environment if it repeats all but the
oldest of these, and then adds one frame to the store; else it adds all that are not alike side by side, as they are at
an episode's start. The observation after a fragment's last row is the first one of its environment's next fragment,
where it is recognised by its contents, whoever sends that.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.errors import BatchError
from aiorl.replay.ring import Ring
from aiorl.wire.frame_stacks import goes_on

__all__ = ["FrameStore", "Observed", "observed"]

Array = NDArray[Any]
I64 = NDArray[np.int64]

_MAX_LAST = 1 << 14
_RECENT = 16
"""A fragment shares frames with the one before it only if these are among the newest of so many parts: rows are
dropped in order, and those that share with an old one would go with it."""


class Observed(NamedTuple):
    """Observations of a fragment, each once.

    Attributes:
        obs: [T, N, ...], before each step.
        last: [N, ...], after the last one.
        final_index: [M, 2] (t, n) of rows which another observation followed than the next row's.
        final_obs: [M, ...], what followed those.
    """

    obs: Array
    last: Array
    final_index: I64
    final_obs: Array


def observed(arrays: Mapping[str, Array]) -> Observed:
    """Return the observations of a fragment that is checked, however it keeps them."""
    obs = arrays[c.OBS]
    if c.NEW_OBS in arrays:
        following = arrays[c.NEW_OBS]
        differs = np.zeros(obs.shape[:2], np.bool_)
        for after, before, row in zip(following[:-1], obs[1:], differs, strict=False):
            row[:] = (after != before).reshape(len(row), -1).any(axis=1)
        return Observed(obs, following[-1], np.argwhere(differs), following[differs])
    index = arrays.get(c.FINAL_INDEX)
    if index is None:
        return Observed(obs, arrays[c.LAST_OBS], np.zeros((0, 2), np.int64), obs[:0, 0])
    return Observed(obs, arrays[c.LAST_OBS], index.astype(np.int64), arrays[c.FINAL_OBS])


class FrameStore:
    """Frames of observations, the newest of them.

    Attributes:
        ring: the frames, [F].
    """

    def __init__(self, frames: Array, stack: int) -> None:
        """Take the memory.

        Args:
            frames: [F] records of one field, ``frame``.
            stack: frames of an observation.
        """
        self.ring = Ring(frames)
        self._frames: Array = frames["frame"]
        self._flat = self._frames.reshape(len(frames), -1)
        self._stack = stack
        self._last: OrderedDict[int, I64] = OrderedDict()

    def insert(self, seen: Observed, make_room: Callable[[int], None]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Store the observations of a fragment.

        Args:
            seen: the observations.
            make_room: called with a frame's number before those with lower ones are written over.
        Returns: numbers of the frames of each row's observation and of the one that followed it, [T, N, K] both.

        Raises:
            BatchError: they have more frames than the store.
        """
        length, num_envs = seen.obs.shape[:2]
        sites, finals, follows, final_follows = self._compared(seen)
        times, envs = seen.final_index[:, 0], seen.final_index[:, 1]
        first = self._known(sites[0])
        most = self._most_frames(follows, final_follows)
        if most > self.ring.capacity:
            raise BatchError(c.OBS, f"at most {self.ring.capacity} frames in a fragment", most)
        make_room(self.ring.written + most - self.ring.capacity)
        follows[0] = first.min(axis=1) >= max(0, self.ring.written + most - self.ring.capacity)

        numbers = np.empty((length + 1, num_envs, self._stack), np.int64)
        for step, (site, is_next) in enumerate(zip(sites, follows, strict=True)):
            if step:
                numbers[step, is_next, :-1] = numbers[step - 1, is_next, 1:]
                numbers[step, is_next, -1] = self._write(site[is_next, self._stack - 1 :: self._stack])
            else:
                numbers[step] = first
            for env in np.flatnonzero(~is_next):
                numbers[step, env] = self._write_whole(site[env])
        following = numbers[1:].copy()
        for t, n, final, is_next in zip(times, envs, finals, final_follows, strict=True):
            if is_next:
                following[t, n, :-1] = numbers[t, n, 1:]
                following[t, n, -1:] = self._write(final[None, self._stack - 1 :: self._stack])
            else:
                following[t, n] = self._write_whole(final)
        self._remember(sites[-1], numbers[-1])
        return numbers[:-1], following

    def most_rows(self) -> int:
        """Rows of a fragment, of one step at least, that there are frames for whatever was observed.

        A row takes a whole stack for its observation, and another where its episode ended; the last step's rows take
        one more for what followed them.
        """
        return self.ring.capacity // (3 * self._stack)

    def num_needed(self, seen: Observed) -> int:
        """Frames that the observations of a fragment take at most."""
        return self._most_frames(*self._compared(seen)[2:])

    def slots(self, numbers: I64) -> NDArray[np.int32]:
        """Slots in which frames lie."""
        return (numbers % self.ring.capacity).astype(np.int32)

    def read(self, slots: NDArray[np.int32], out: Array) -> None:
        """Put stacks together.

        Args:
            slots: [B, K].
            out: [B, ...], of the observations' shape, C-contiguous.
        """
        if self._stack == 1:
            np.take(self._flat, slots[:, 0], axis=0, out=out.reshape(len(out), self._flat.shape[1]), mode="clip")
            return
        flat = out.reshape(len(out), self._flat.shape[1], self._stack)
        for place in range(self._stack):
            flat[..., place] = self._flat.take(slots[:, place], axis=0)

    def last(self) -> I64:
        """Numbers of the frames [M, K] of the observations that fragments ended with, the latest ones."""
        return np.array([*self._last.values()], np.int64).reshape(-1, self._stack)

    def set_last(self, last: Array) -> None:
        """Go on from what `last` gave.

        Raises:
            ValueError: it is something else.
        """
        if last.ndim != 2 or last.shape[1] != self._stack or last.dtype != np.int64:
            raise ValueError(f"last observations are {last.dtype} {last.shape}")
        if ((last < 0) | (last >= self.ring.written)).any():
            raise ValueError("last observations have frames that never were")
        self._last.clear()
        self._remember(self._stored(last), last)

    def _compared(self, seen: Observed) -> tuple[list[Array], Array, NDArray[np.bool_], NDArray[np.bool_]]:
        """Observations of a fragment one by one, and which of them go on from the one before.

        Returns: T + 1 arrays [N, P * K] and which of these go on, [T + 1, N]; the final ones are [M, P * K] and [M].
        """
        length, num_envs = seen.obs.shape[:2]
        sites = [row.reshape(num_envs, -1) for row in (*seen.obs, seen.last)]
        follows = np.zeros((length + 1, num_envs), np.bool_)
        for before, after, row in zip(sites[:-1], sites[1:], follows[1:], strict=True):
            row[:] = self._goes_on(before, after)
        finals = seen.final_obs.reshape(len(seen.final_index), sites[0].shape[1])
        before_finals = np.array([sites[t][n] for t, n in seen.final_index]).reshape(finals.shape)
        return sites, finals, follows, self._goes_on(before_finals, finals)

    def _most_frames(self, *follows: NDArray[np.bool_]) -> int:
        """Frames of as many observations: one of those that go on, a stack of the others."""
        return sum(int(np.count_nonzero(each) + np.count_nonzero(~each) * self._stack) for each in follows)

    def _goes_on(self, before: Array, after: Array) -> NDArray[np.bool_]:
        return np.ones(len(before), np.bool_) if self._stack == 1 else goes_on(before, after, self._stack)

    def _known(self, stacks: Array) -> I64:
        """Numbers of the frames [N, K] of observations that a fragment ended with not long ago, -1 of others."""
        known = np.full((len(stacks), self._stack), -1)
        oldest = max(self.ring.oldest, self.ring.written - self.ring.capacity // _RECENT)
        for stack, numbers in zip(stacks, known, strict=True):
            found = self._last.get(_key(stack))
            if found is not None and found.min() >= oldest and np.array_equal(self._stored(found[None])[0], stack):
                numbers[:] = found
        return known

    def _remember(self, stacks: Array, numbers: I64) -> None:
        for stack, own in zip(stacks, numbers, strict=True):
            self._last[_key(stack)] = own.copy()
            self._last.move_to_end(_key(stack))
        while len(self._last) > _MAX_LAST:
            self._last.popitem(last=False)

    def _stored(self, numbers: I64) -> Array:
        """The stacks [N, P * K] of frames [N, K]."""
        stacks = np.empty((len(numbers), self._flat.shape[1] * self._stack), self._flat.dtype)
        self.read(self.slots(numbers), stacks)
        return stacks

    def _write_whole(self, stack: Array) -> I64:
        """Store the frames [K] of one observation, those that are alike side by side once."""
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
    """A number by which an observation is looked up; it is compared then."""
    return zlib.crc32(np.ascontiguousarray(stack).data)
