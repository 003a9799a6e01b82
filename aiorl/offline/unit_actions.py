"""Actions of a bounded Box that are stored scaled to [-1, 1], as in RLlib since version 1.4.

Files don't contain this fact: users set ``actions_in_input_normalized``, which is RLlib's name for
it. If it is not set and all stored actions of a wider Box lie within [-1, 1], a warning is logged.
"""

from __future__ import annotations

import contextlib
import logging

import numpy as np
from gymnasium import spaces

from aiorl.data import columns as c
from aiorl.data.actions import Space
from aiorl.data.columns import Array
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.errors import ConfigError
from aiorl.offline.estimators import ACTION_PROB

NORMALIZED = "actions_in_input_normalized"

_ENOUGH = 1000
"""Rows for a guess: it is unlikely that the actions of this many rows stay in a part of their space
by chance."""

_log = logging.getLogger(__name__)


class UnitActions:
    """Conversion of stored rows from scaled actions to actions of the environment."""

    def __init__(self, space: Space | None) -> None:
        """Set the action space.

        Raises:
            ConfigError: it is not a Box of floats with bounds (also a ValueError).
        """
        if not _is_bounded(space):
            raise ConfigError(
                f"{NORMALIZED} is for actions of a bounded Box; the action space is {space}.",
                key=NORMALIZED,
                value=True,
                hint="Leave it out.",
            )
        assert isinstance(space, spaces.Box)
        self._low = space.low.astype(np.float64)
        self._half = 0.5 * (space.high.astype(np.float64) - space.low)
        self._dtype = space.dtype
        self._log_half = float(np.log(self._half).sum())

    def restore(self, rows: SampleBatch) -> None:
        """Scale actions back, and the densities of those taken; actions outside [-1, 1] are clipped
        first.
        """
        for name in (c.ACTIONS, c.PREV_ACTIONS):
            if name in rows:
                unit = np.clip(np.asarray(rows[name], np.float64), -1.0, 1.0)
                rows[name] = (self._low + (unit + 1.0) * self._half).astype(self._dtype)
        if c.ACTION_LOGP in rows:
            rows[c.ACTION_LOGP] = (rows[c.ACTION_LOGP] - self._log_half).astype(np.float32)
        if ACTION_PROB in rows:
            density = rows[ACTION_PROB] * np.exp(-self._log_half)
            rows[ACTION_PROB] = density.astype(np.float32)


class UnitGuess:
    """Guess from stored rows whether their actions are scaled."""

    def __init__(self, space: Space | None, *, warns: bool = True) -> None:
        """Set the action space.

        Args:
            space: the policy's action space.
            warns: True to log a warning once the first rows seem to be scaled, and to ignore
                further rows.
        """
        self._space = space
        self._warns = warns
        self._rows = 0
        self._is_wider = False

    @property
    def seem_scaled(self) -> bool:
        """True if the actions of all rows so far seem to be scaled."""
        return self._rows > 0 and not self._is_wider

    def inspect(self, rows: SampleBatch) -> None:
        """Inspect more rows, unless there were enough."""
        if self._is_wider or c.ACTIONS not in rows or (self._warns and self._rows >= _ENOUGH):
            return
        actions: Array = np.asarray(rows[c.ACTIONS])
        if not actions.size or actions.dtype.kind != "f":
            return
        self._rows += len(actions)
        self._is_wider = not seem_scaled(self._space, float(actions.min()), float(actions.max()))
        if self._warns and self._rows >= _ENOUGH and self.seem_scaled:
            _log.warning(
                "the first %d stored actions lie within [-1, 1], but the action space is %s: they"
                " seem to be scaled, as RLlib stores them. If they are, set %s: true",
                self._rows,
                self._space,
                NORMALIZED,
            )


def seem_scaled(
    space: Space | None,
    low: float,
    high: float,
) -> bool:
    """Return whether a space extends beyond [-1, 1], but actions from `low` to `high` don't."""
    if not _is_bounded(space):
        return False
    assert isinstance(space, spaces.Box)
    is_wider = (space.low < -1.0) | (space.high > 1.0)
    return bool(low >= -1.0 and high <= 1.0 and is_wider.any())


def action_space_of(env: str) -> Space | None:
    """Return the action space of an environment by its name; None if it has none.

    Raises:
        ConfigError: the environment does not exist (also a ValueError).
    """
    create = resolve_env(env)
    with contextlib.closing(create(EnvContext({}, worker_index=0))) as environment:
        return getattr(environment, "action_space", None)


def _is_bounded(space: Space | None) -> bool:
    return isinstance(space, spaces.Box) and space.dtype.kind == "f" and space.is_bounded()
