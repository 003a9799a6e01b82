"""ForbiddingEnv: an environment that shows action masks, and refuses forbidden actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Mask = NDArray[np.int8]

ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(5, start=2),
    "multi_discrete": spaces.MultiDiscrete([3, 2, 4]),
    "multi_binary": spaces.MultiBinary(4),
    "tuple": spaces.Tuple(
        [spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)]
    ),
    "dict": spaces.Dict({"b": spaces.MultiDiscrete([2, 3]), "a": spaces.Discrete(4)}),
}


class ForbiddingEnv(gymnasium.Env[Any, Any]):
    """An environment with a new random mask at each step; a forbidden action raises RuntimeError.

    Small numbers are rewarded, so that there is something to learn. The mask of an episode's last
    observation is all zeros, as there are no more choices.
    """

    def __init__(
        self,
        actions: str = "discrete",
        length: int = 8,
        stuck_at: int = -1,
        joined: bool = False,
        in_info: bool = False,
    ) -> None:
        """Make one copy.

        Args:
            actions: the action space, a key of ACTION_SPACES.
            length: steps of an episode.
            stuck_at: step at which the mask forbids everything; -1 = none.
            joined: the mask is one array, instead of a mask for each part of the action.
            in_info: the mask is in the info instead of the observation.
        """
        self.action_space = ACTION_SPACES[actions]
        self._joined = joined
        self._in_info = in_info
        self._length = length
        self._stuck_at = stuck_at
        self._step = 0
        self._masks: list[Mask] = []
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space: spaces.Space[Any] = vector
        if not in_info:
            mask_space = _space_of(self._form(lambda size, is_bits: np.ones(size, np.int8)))
            self.observation_space = spaces.Dict({"observation": vector, "action_mask": mask_space})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._step = 0
        return self._show()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Check the action, and draw the next mask."""
        numbers = list(_choices(self.action_space, action))
        for number, mask in zip(numbers, self._masks, strict=True):
            if not mask[number]:
                raise RuntimeError(
                    f"action {action!r} is forbidden by {[mask.tolist() for mask in self._masks]}"
                )
        self._step += 1
        obs, info = self._show()
        return obs, -float(sum(numbers)), self._step >= self._length, False, info

    def _show(self) -> tuple[Any, dict[str, Any]]:
        self._masks = []
        mask = self._form(self._draw)
        obs = np.array([self._step, self._masks[0].argmax(), 1.0], np.float32)
        return (
            (obs, {"action_mask": mask})
            if self._in_info
            else ({"observation": obs, "action_mask": mask}, {})
        )

    def _draw(self, size: int, is_bits: bool) -> Mask:
        mask: Mask = self.np_random.integers(0, 2, size, dtype=np.int8)
        if not is_bits:
            mask[self.np_random.integers(size)] = 1
        if self._step in (self._stuck_at, self._length):
            mask[:] = 0
        self._masks += [np.array([1, bit], np.int8) for bit in mask] if is_bits else [mask]
        return mask

    def _form(self, make: Callable[[int, bool], Mask]) -> Any:
        nested = _nested(self.action_space, make)
        return np.concatenate(list(_flat(nested))) if self._joined else nested


def _nested(space: spaces.Space[Any], make: Callable[[int, bool], Mask]) -> Any:
    """Return a mask in the form of an action space; parts without choices have none."""
    match space:
        case spaces.Discrete():
            return make(int(space.n), False)
        case spaces.MultiBinary():
            return make(int(space.shape[0]), True)
        case spaces.MultiDiscrete():
            return tuple(make(int(size), False) for size in space.nvec)
        case spaces.Tuple():
            return tuple(
                _nested(part, make) for part in space.spaces if not isinstance(part, spaces.Box)
            )
        case spaces.Dict():
            return {name: _nested(part, make) for name, part in space.spaces.items()}
    raise TypeError(space)


def _flat(nested: Any) -> Iterator[Mask]:
    if isinstance(nested, np.ndarray):
        yield nested
        return
    for part in nested.values() if isinstance(nested, dict) else nested:
        yield from _flat(part)


def _space_of(mask: Any) -> spaces.Space[Any]:
    if isinstance(mask, dict):
        return spaces.Dict({name: _space_of(part) for name, part in mask.items()})
    if isinstance(mask, tuple):
        return spaces.Tuple([_space_of(part) for part in mask])
    return spaces.Box(0, 1, mask.shape, np.int8)


def _choices(space: spaces.Space[Any], action: Any) -> Iterator[int]:
    """Return the number of each choice of an action, from 0."""
    match space:
        case spaces.Discrete():
            yield int(action) - int(space.start)
        case spaces.MultiBinary() | spaces.MultiDiscrete():
            yield from (int(number) for number in action)
        case spaces.Tuple():
            for part, own in zip(space.spaces, action, strict=True):
                yield from _choices(part, own)
        case spaces.Dict():
            for name, part in space.spaces.items():
                yield from _choices(part, action[name])
