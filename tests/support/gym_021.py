"""A small ``gym`` with the classes and rules of version 0.21, which newer tools cannot install."""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "__init__.py": (
        """
from gym import envs, spaces, wrappers
from gym.core import Env, ObservationWrapper, RewardWrapper, Wrapper
from gym.envs.registration import make, register, spec
__version__ = "0.21.0"
"""
    ),
    "core.py": (
        """
import warnings
class Env:
    metadata = {"render.modes": []}
    reward_range = (-float("inf"), float("inf"))
    spec = None
    action_space = None
    observation_space = None
    def step(self, action):
        raise NotImplementedError
    def reset(self):
        raise NotImplementedError
    def render(self, mode="human"):
        raise NotImplementedError
    def close(self):
        pass
    def seed(self, seed=None):
        warnings.warn(f"Could not seed environment {self}")
    @property
    def unwrapped(self):
        return self
class Wrapper(Env):
    def __init__(self, env):
        self.env = env
        self._action_space = None
        self._observation_space = None
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(f"attempted to get missing private attribute '{name}'")
        return getattr(self.env, name)
    @property
    def spec(self):
        return self.env.spec
    @property
    def metadata(self):
        return self.env.metadata
    @property
    def action_space(self):
        return self.env.action_space if self._action_space is None else self._action_space
    @action_space.setter
    def action_space(self, space):
        self._action_space = space
    @property
    def observation_space(self):
        return self.env.observation_space if self._observation_space is None else self._observation_space
    @observation_space.setter
    def observation_space(self, space):
        self._observation_space = space
    def step(self, action):
        return self.env.step(action)
    def reset(self, **kwargs):
        return self.env.reset(**kwargs)
    def render(self, mode="human", **kwargs):
        return self.env.render(mode, **kwargs)
    def close(self):
        return self.env.close()
    def seed(self, seed=None):
        return self.env.seed(seed)
    @property
    def unwrapped(self):
        return self.env.unwrapped
class ObservationWrapper(Wrapper):
    def reset(self, **kwargs):
        return self.observation(self.env.reset(**kwargs))
    def step(self, action):
        observation, reward, done, info = self.env.step(action)
        return self.observation(observation), reward, done, info
class RewardWrapper(Wrapper):
    def step(self, action):
        observation, reward, done, info = self.env.step(action)
        return observation, self.reward(reward), done, info
"""
    ),
    "spaces/__init__.py": (
        """
from gym.spaces.box import Box
from gym.spaces.dict import Dict
from gym.spaces.discrete import Discrete
from gym.spaces.multi_binary import MultiBinary
from gym.spaces.multi_discrete import MultiDiscrete
from gym.spaces.space import Space
from gym.spaces.tuple import Tuple
"""
    ),
    "spaces/space.py": (
        """
import numpy as np
class Space:
    def __init__(self, shape=None, dtype=None):
        self._shape = None if shape is None else tuple(shape)
        self.dtype = None if dtype is None else np.dtype(dtype)
    @property
    def shape(self):
        return self._shape
    def sample(self):
        raise NotImplementedError
    def contains(self, x):
        raise NotImplementedError
    def seed(self, seed=None):
        return [seed]
"""
    ),
    "spaces/box.py": (
        """
import numpy as np
from gym.spaces.space import Space
class Box(Space):
    def __init__(self, low, high, shape=None, dtype=np.float32):
        shape = np.shape(low) if shape is None else tuple(shape)
        self.low = np.full(shape, low, dtype) if np.isscalar(low) else np.asarray(low, dtype)
        self.high = np.full(shape, high, dtype) if np.isscalar(high) else np.asarray(high, dtype)
        super().__init__(shape, dtype)
"""
    ),
    "spaces/discrete.py": (
        """
from gym.spaces.space import Space
class Discrete(Space):
    def __init__(self, n):
        self.n = int(n)
        super().__init__((), "int64")
"""
    ),
    "spaces/multi_discrete.py": (
        """
import numpy as np
from gym.spaces.space import Space
class MultiDiscrete(Space):
    def __init__(self, nvec, dtype=np.int64):
        self.nvec = np.array(nvec, dtype=dtype)
        super().__init__(self.nvec.shape, dtype)
"""
    ),
    "spaces/multi_binary.py": (
        """
from gym.spaces.space import Space
class MultiBinary(Space):
    def __init__(self, n):
        self.n = n
        super().__init__((n,) if isinstance(n, int) else tuple(n), "int8")
"""
    ),
    "spaces/tuple.py": (
        """
from gym.spaces.space import Space
class Tuple(Space):
    def __init__(self, spaces):
        self.spaces = spaces
        super().__init__()
"""
    ),
    "spaces/dict.py": (
        """
from collections import OrderedDict
from gym.spaces.space import Space
class Dict(Space):
    def __init__(self, spaces=None, **spaces_kwargs):
        spaces = spaces_kwargs if spaces is None else spaces
        if isinstance(spaces, dict) and not isinstance(spaces, OrderedDict):
            spaces = OrderedDict(sorted(spaces.items()))
        self.spaces = OrderedDict(spaces)
        super().__init__()
"""
    ),
    "wrappers/__init__.py": "from gym.wrappers.time_limit import TimeLimit\n",
    "wrappers/time_limit.py": (
        """
from gym.core import Wrapper
class TimeLimit(Wrapper):
    def __init__(self, env, max_episode_steps=None):
        super().__init__(env)
        if max_episode_steps is None and self.env.spec is not None:
            max_episode_steps = env.spec.max_episode_steps
        if self.env.spec is not None:
            self.env.spec.max_episode_steps = max_episode_steps
        self._max_episode_steps = max_episode_steps
        self._elapsed_steps = None
    def step(self, action):
        observation, reward, done, info = self.env.step(action)
        self._elapsed_steps += 1
        if self._elapsed_steps >= self._max_episode_steps:
            info["TimeLimit.truncated"] = not done
            done = True
        return observation, reward, done, info
    def reset(self, **kwargs):
        self._elapsed_steps = 0
        return self.env.reset(**kwargs)
"""
    ),
    "envs/__init__.py": "from gym.envs.registration import registry\n",
    "envs/registration.py": (
        """
import importlib
class EnvSpec:
    def __init__(self, id, entry_point, max_episode_steps=None, kwargs=None):
        self.id, self.entry_point, self.max_episode_steps = id, entry_point, max_episode_steps
        self._kwargs = kwargs or {}
class EnvRegistry:
    def __init__(self):
        self.env_specs = {}
registry = EnvRegistry()
def register(id, **kwargs):
    registry.env_specs[id] = EnvSpec(id, **kwargs)
def spec(path):
    return registry.env_specs[path]
def make(path, **kwargs):
    from gym.wrappers.time_limit import TimeLimit
    made_by = spec(path)
    module, _, name = made_by.entry_point.partition(":")
    env = getattr(importlib.import_module(module), name)(**{**made_by._kwargs, **kwargs})
    env.unwrapped.spec = made_by
    return env if made_by.max_episode_steps is None else TimeLimit(env, max_episode_steps=made_by.max_episode_steps)
"""
    ),
}


def write_gym(folder: Path) -> None:
    """Write the package into a folder, which is to be the first one on the path of a new
    process.
    """
    for name, text in _FILES.items():
        path = folder / "gym" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
