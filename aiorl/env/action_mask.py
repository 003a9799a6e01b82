"""Action masks moved from the infos of an environment into its observations.

PettingZoo's environments get this automatically. A Gymnasium environment must ask for it, since its
mask does not always mean "legal": in Taxi, for instance, it marks the actions that change anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from aiorl.data.obs_layout import ACTION_MASK, MaskLayout
from aiorl.env.gym_like import GymnasiumEnv, ResetResult, StepResult
from aiorl.env.registry import EnvContext, resolve_env


class InfoMask:
    """Function that adds the mask of an info to an observation.

    Attributes:
        space: space of observations with a mask.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        """Take the spaces of an environment or an agent.

        Raises:
            UnsupportedSpaceError: the action space is of an unsupported kind.
        """
        self._layout = MaskLayout(action_space)
        mask_space = spaces.Box(0, 1, (self._layout.size,), np.uint8)
        self.space = spaces.Dict({"observation": observation_space, ACTION_MASK: mask_space})

    def __call__(self, obs: Any, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the observation with its mask; without a mask in the info, all actions are
        allowed.

        Raises:
            BatchError: the mask does not fit the action space (a ValueError).
        """
        mask = info.get(ACTION_MASK)
        if mask is None:
            return {"observation": obs, ACTION_MASK: np.ones(self._layout.size, np.uint8)}
        return {"observation": obs, ACTION_MASK: self._layout.from_rows([mask])[0]}


class MaskFromInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gymnasium environment with the mask ``info["action_mask"]``, which says which actions are
    legal.

    In a config: ``env: aiorl.env.action_mask:MaskFromInfo`` with ``env_config: {env: Taxi-v4}``.
    """

    def __init__(self, env: GymnasiumEnv | str, **settings: Any) -> None:
        """Wrap an environment, given as an object, or by name (see `registry`) and the settings to
        make it with.
        """
        inner = resolve_env(env)(EnvContext(settings)) if isinstance(env, str) else env
        super().__init__(inner)
        self._mask = InfoMask(self.env.observation_space, self.env.action_space)
        self.observation_space = self._mask.space

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """See gymnasium.Env."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._mask(obs, info), info

    def step(self, action: Any) -> StepResult:
        """See gymnasium.Env."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._mask(obs, info), reward, terminated, truncated, info
