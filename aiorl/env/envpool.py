"""EnvPool's environments by name: ``envpool:TASK``; a pool of C++ threads steps all copies (extra
``envpool``).

``env_config`` takes the arguments of ``envpool.make``, such as ``num_threads``, and two settings of
aiorl. With ``async: true``, copies do not wait for each other: each turn takes the first
``batch_size`` copies that are ready, by default half of them. EnvPool's pictures are [channels,
height, width]; here their channels come last.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from aiorl.data.columns import DEFAULT_AGENT_ID, Array
from aiorl.env.base_env import (
    ASYNC_RESET_RETURN,
    BaseEnv,
    ByAgent,
    Poll,
    add_step,
    env_seeds,
    opening_poll,
)
from aiorl.env.checks import ObservationCheck, as_reward, raise_env_fault
from aiorl.env.native_vector_env import NativeVectorEnv, split_infos
from aiorl.env.registry import EnvContext, unknown_env
from aiorl.errors import ConfigError, nearest
from aiorl.process.imports import needed_by

_MAX_SEED = (1 << 31) - 1


def envpool_creator(name: str) -> Callable[[EnvContext], EnvPoolEnv | AsyncEnvPoolEnv]:
    """Return the function that makes the environments of ``envpool:TASK``.

    Raises:
        UnknownEnvError: EnvPool has no such task.
        ConfigError: EnvPool is not installed.
    """
    with (
        needed_by(f"environment {name!r}", "EnvPool", "envpool", key="env", value=name),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        module = importlib.import_module("envpool")
    task = name.removeprefix("envpool:")
    tasks = module.list_all_envs()
    if task not in tasks:
        raise unknown_env(
            name,
            f": EnvPool has no task {task!r}",
            part=task,
            valid=tasks,
            otherwise="envpool.list_all_envs() lists the tasks.",
        )

    def create(context: EnvContext) -> EnvPoolEnv | AsyncEnvPoolEnv:
        settings = dict(context)
        is_async = settings.pop("async", False)
        least = context.num_envs
        hint = "Set env_config.async: true as well, or leave batch_size out."
        if is_async:
            settings.setdefault("batch_size", max(1, context.num_envs // 2))
            least = 1
            hint = ""
        size = settings.get("batch_size", context.num_envs)
        if not least <= size <= context.num_envs:
            raise ConfigError(
                f"batch_size is {size!r}, expected {least} to {context.num_envs}, the number of"
                " environments.",
                key="env_config.batch_size",
                value=size,
                hint=hint,
            )
        pool = _Pool(module, task, context.num_envs, settings)
        if is_async:
            return AsyncEnvPoolEnv(pool, name)
        return EnvPoolEnv(pool, name)

    return create


class _Pool:
    """EnvPool's object, which is made at the first reset because its seeds are arguments of its
    constructor.
    """

    metadata: Mapping[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        module: ModuleType,
        task: str,
        num_envs: int,
        settings: Mapping[str, Any],
    ) -> None:
        self._module = module
        self._task = task
        self.settings = {**settings, "num_envs": num_envs}
        self.num_envs = num_envs
        self.config = self._checked_config()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # EnvPool's bounds lose precision as float32
            spec = module.make_spec(task, **self.settings)
            space = spec.gymnasium_observation_space
            self.single_action_space = spec.gymnasium_action_space
        self.action_space = self.single_action_space
        self.is_picture = (
            isinstance(space, spaces.Box)
            and space.dtype == np.uint8
            and len(space.shape) == 3
            and space.shape[0] < space.shape[2]
        )
        if self.is_picture:
            space = spaces.Box(0, 255, (*space.shape[1:], space.shape[0]), np.uint8)
        self.single_observation_space: spaces.Space[Any] = space
        self.made: Any = None

    def _checked_config(self) -> dict[str, Any]:
        """Return all settings of the task with their values."""
        defaults: dict[str, Any] = self._module.make_spec(self._task).config._asdict()
        for name, value in self.settings.items():
            if name not in defaults or name in ("seed", "env_seed"):
                hint = "Give the run a seed." if "seed" in name else nearest(name, defaults).strip()
                raise ConfigError(
                    f"EnvPool's {self._task} has no setting {name!r} that you can set.",
                    key=f"env_config.{name}",
                    value=value,
                    hint=hint,
                )
        config = {**defaults, **self.settings}
        if config["max_num_players"] > 1:
            raise ConfigError(
                f"EnvPool's {self._task} has several players, which is not supported.", key="env"
            )
        return config

    def make(self, seeds: Sequence[int] | None) -> Any:
        """Make the pool with a seed for each copy; None draws fresh seeds."""
        if seeds is None:
            seeds = np.random.SeedSequence().generate_state(self.num_envs).tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = {**self.settings, "seed": [seed & _MAX_SEED for seed in seeds]}
            self.made = self._module.make_gymnasium(self._task, **settings)
            # The first reads make the spaces and warn.
            _ = (self.made.observation_space, self.made.action_space)
        return self.made

    @property
    def objects(self) -> list[Any]:
        """EnvPool's object, once it is made."""
        return [] if self.made is None else [self.made]

    def laid_out(self, obs: Any) -> Any:
        """Return observations in the layout of the space."""
        return np.moveaxis(obs, 1, -1) if self.is_picture else obs

    def step(self, actions: Array) -> tuple[Any, ...]:
        """Step every copy."""
        obs, *rest = self.made.step(actions)
        return self.laid_out(obs), *rest

    def close(self) -> None:
        """Stop the pool's threads."""
        if self.made is not None:
            self.made.close()
            self.made = None


class EnvPoolEnv(NativeVectorEnv):
    """Pool whose copies step together."""

    can_cut = True

    def __init__(self, pool: _Pool, env_id: str) -> None:
        """Take over a pool that has not been made yet."""
        self._pool = pool
        super().__init__(
            pool,
            env_id=env_id,
            max_episode_steps=int(pool.config["max_episode_steps"]),
        )

    def limit_episodes(self, horizon: int | None) -> None:
        """See `LockstepEnv.limit_episodes`."""
        super().limit_episodes(horizon)
        self._pool.settings["max_episode_steps"] = self.max_episode_steps

    def _reset_all(self, seeds: Sequence[int] | None) -> Any:
        if seeds is not None or self._pool.made is None:
            self._pool.close()
            self._pool.make(seeds)
        obs, _ = self._pool.made.reset()
        return self._pool.laid_out(obs)

    @property
    def unwrapped(self) -> list[Any]:
        """The pool, once it has been made."""
        return self._pool.objects


class AsyncEnvPoolEnv(BaseEnv):
    """Pool that returns the first copies that are ready at each poll."""

    def __init__(self, pool: _Pool, env_id: str) -> None:
        """Take over a pool that has not been made yet."""
        self._pool = pool
        self._env_id = env_id
        self.num_envs = pool.num_envs
        self.observation_space = pool.single_observation_space
        self.action_space = pool.single_action_space
        self._check = ObservationCheck(env_id, pool.single_observation_space)
        self._seeds: Sequence[int] | None = None
        self._fresh: set[int] = set()
        self._steps = [0] * pool.num_envs

    def seed(self, seed: int) -> None:
        """Seed all copies; call before the first poll."""
        self._seeds = env_seeds(seed, self.num_envs)

    def poll(self) -> Poll:
        """Wait for ``batch_size`` copies and return their results."""
        if self._pool.made is None:
            self._pool.make(self._seeds).async_reset()
            self._fresh.update(range(self.num_envs))
        try:
            obs, rewards, terminateds, truncateds, infos = self._pool.made.recv()
        except Exception as error:
            raise_env_fault(self._env_id, "recv", error, index=0, step=-1)
        ids = infos["env_id"].tolist()
        obs = np.array(self._check.check_batch_shape(self._pool.laid_out(obs), len(ids)))
        self._check.check_values(obs, lambda row: self._steps[ids[row]], ids.__getitem__)
        infos.pop("players", None)  # it belongs to players, not to copies
        rows = split_infos(infos, len(ids))
        opening = [(index, row) for row, index in enumerate(ids) if index in self._fresh]
        poll = opening_poll({index: {DEFAULT_AGENT_ID: obs[row]} for index, row in opening})
        for row, index in enumerate(ids):
            if index in self._fresh:
                self._steps[index] = 0
                continue
            self._steps[index] += 1
            reward = as_reward(rewards[row], self._env_id, index, self._steps[index])
            add_step(
                poll,
                index,
                obs=obs[row],
                reward=reward,
                terminated=bool(terminateds[row]),
                truncated=bool(truncateds[row]),
                info=rows[row],
            )
        self._fresh.difference_update(ids)
        return poll

    def send_actions(self, action_dict: Mapping[Any, ByAgent]) -> None:
        """Start the step of each copy that has an action, without waiting for it."""
        ids = [index for index, by_agent in action_dict.items() if DEFAULT_AGENT_ID in by_agent]
        if not ids:
            return
        actions = np.stack([np.asarray(action_dict[index][DEFAULT_AGENT_ID]) for index in ids])
        self._pool.made.send(actions, np.array(ids, np.int32))

    def try_reset(self, env_id: Any) -> str:
        """Begin a new episode in one copy; its first observation arrives with a later poll."""
        # The public reset would wait for the observation.
        self._pool.made._reset(np.array([env_id], np.int32))
        self._fresh.add(env_id)
        return ASYNC_RESET_RETURN

    def get_unwrapped(self) -> list[Any]:
        """See `BaseEnv.get_unwrapped`."""
        return self._pool.objects

    def stop(self) -> None:
        """Stop the pool's threads."""
        self._pool.close()
