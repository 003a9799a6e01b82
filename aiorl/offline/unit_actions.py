"""Actions of a bounded Box that are stored scaled to [-1, 1], as RLlib stores them since its version 1.4.

Files don't tell: a user says so by ``actions_in_input_normalized``, RLlib's name for it. Where nobody says so, and all
stored actions of a wider Box lie within [-1, 1], a warning does.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.errors import ConfigError
from aiorl.offline.estimators import ACTION_PROB

NORMALIZED = "actions_in_input_normalized"

_ENOUGH = 1000
"""Rows that a guess takes: chance keeps no policy so long within a part of its space."""

_log = logging.getLogger(__name__)


class UnitActions:
    """Brings stored rows from scaled actions to those of the environment."""

    def __init__(self, space: spaces.Space[Any] | None) -> None:
        """Take the action space.

        Raises:
            ConfigError: it is no Box of floats with bounds (also a ValueError).
        """
        if not _is_bounded(space):
            raise ConfigError(
                f"{NORMALIZED} is for actions of a bounded Box; the action space is {space}.", key=NORMALIZED,
                value=True, hint="Leave it out.",
            )  # fmt: skip
        assert isinstance(space, spaces.Box)
        self._low, self._half = space.low.astype(np.float64), 0.5 * (space.high.astype(np.float64) - space.low)
        self._dtype = space.dtype
        self._log_half = float(np.log(self._half).sum())

    def restore(self, rows: SampleBatch) -> None:
        """Scale actions, and with them the densities of those taken. Actions beyond [-1, 1] count as on its edge."""
        for name in (c.ACTIONS, c.PREV_ACTIONS):
            if name in rows:
                unit = np.clip(np.asarray(rows[name], np.float64), -1.0, 1.0)
                rows[name] = (self._low + (unit + 1.0) * self._half).astype(self._dtype)
        if c.ACTION_LOGP in rows:
            rows[c.ACTION_LOGP] = (rows[c.ACTION_LOGP] - self._log_half).astype(np.float32)
        if ACTION_PROB in rows:
            rows[ACTION_PROB] = (rows[ACTION_PROB] * np.exp(-self._log_half)).astype(np.float32)


class UnitGuess:
    """Looks at stored rows, and guesses whether their actions are scaled."""

    def __init__(self, space: spaces.Space[Any] | None, *, warns: bool = True) -> None:
        """Take the action space.

        Args:
            space: the policy's.
            warns: whether to log a warning once the first rows seem to be scaled, and to look no further.
        """
        self._space, self._warns = space, warns
        self._rows, self._is_wider = 0, False

    @property
    def seem_scaled(self) -> bool:
        """Return whether the actions of all rows so far seem to be scaled."""
        return self._rows > 0 and not self._is_wider

    def look(self, rows: SampleBatch) -> None:
        """Look at more rows, unless it has seen enough."""
        if self._is_wider or c.ACTIONS not in rows or (self._warns and self._rows >= _ENOUGH):
            return
        actions: NDArray[Any] = np.asarray(rows[c.ACTIONS])
        if not actions.size or actions.dtype.kind != "f":
            return
        self._rows += len(actions)
        self._is_wider = not seem_scaled(self._space, float(actions.min()), float(actions.max()))
        if self._warns and self._rows >= _ENOUGH and self.seem_scaled:
            _log.warning(
                "the first %d stored actions lie within [-1, 1], and the action space is %s: they seem to be scaled, "
                "as RLlib stores them. If they are, set %s: true", self._rows, self._space, NORMALIZED,
            )  # fmt: skip


def seem_scaled(space: spaces.Space[Any] | None, low: float, high: float) -> bool:
    """Return whether a space reaches beyond [-1, 1], and actions from `low` to `high` don't."""
    if not _is_bounded(space):
        return False
    assert isinstance(space, spaces.Box)
    return bool(low >= -1.0 and high <= 1.0 and ((space.low < -1.0) | (space.high > 1.0)).any())


def action_space_of(env: str) -> spaces.Space[Any] | None:
    """Return the action space of an environment by its name; None where it says none.

    Raises:
        ConfigError: there is no such environment (also a ValueError).
    """
    with contextlib.closing(resolve_env(env)(EnvContext({}, worker_index=0))) as made:
        return getattr(made, "action_space", None)


def _is_bounded(space: spaces.Space[Any] | None) -> bool:
    return isinstance(space, spaces.Box) and space.dtype.kind == "f" and space.is_bounded()
