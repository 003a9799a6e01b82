"""Action masks that environments put into their infos, brought into the observations.

PettingZoo's environments get this by themselves. A Gymnasium environment does where it is asked for, since its mask
may mean something else than what is legal: in Taxi, for instance, what would change anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from aiorl.data.obs_layout import ACTION_MASK, MaskLayout
from aiorl.env.registry import EnvContext, resolve_env


class InfoMask:
    """Puts the mask of an info beside an observation.

    Attributes:
        space: of observations with a mask.
    """

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Take the spaces of an environment or an agent.

        Raises:
            UnsupportedSpaceError: a space that no action can be of.
        """
        self._layout = MaskLayout(action_space)
        mask_space = spaces.Box(0, 1, (self._layout.size,), np.uint8)
        self.space = spaces.Dict({"observation": observation_space, ACTION_MASK: mask_space})

    def __call__(self, obs: Any, info: Mapping[str, Any]) -> dict[str, Any]:
        """The observation with its mask; an info without one allows everything.

        Raises:
            BatchError: a mask that is none of the action space (a ValueError).
        """
        mask = info.get(ACTION_MASK)
        if mask is None:
            return {"observation": obs, ACTION_MASK: np.ones(self._layout.size, np.uint8)}
        return {"observation": obs, ACTION_MASK: self._layout.from_rows([mask])[0]}


class MaskFromInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium environment whose ``info["action_mask"]`` says which actions are legal.

    In a config: ``env: aiorl.env.action_mask:MaskFromInfo`` with ``env_config: {env: Taxi-v4}``.
    """

    def __init__(self, env: gymnasium.Env[Any, Any] | str, **settings: Any) -> None:
        """Wrap an environment, or the one of a name (see `registry`), made with these settings."""
        super().__init__(resolve_env(env)(EnvContext(settings)) if isinstance(env, str) else env)
        self._mask = InfoMask(self.env.observation_space, self.env.action_space)
        self.observation_space = self._mask.space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See gymnasium.Env."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._mask(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See gymnasium.Env."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._mask(obs, info), reward, terminated, truncated, info
