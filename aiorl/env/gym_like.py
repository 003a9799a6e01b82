"""Calls of environments in any of Gym's dialects: one- or two-value ``reset``, four- or five-value ``step``.

What comes out is always Gymnasium's form: ``(obs, info)`` and ``(obs, reward, terminated, truncated, info)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium

from aiorl.errors import ConfigError, UnsupportedEnvError

__all__ = ["StepResult", "check_gym_like", "check_seedable", "is_gym_like", "reset_env", "seed_env", "to_five_values"]

StepResult = tuple[Any, Any, Any, Any, Any]


def is_gym_like(env: Any) -> bool:
    """Whether it has ``reset``, ``step`` and both spaces."""
    return all(hasattr(env, name) for name in ("reset", "step", "observation_space", "action_space"))


def check_gym_like(env: Any, env_id: str) -> None:
    """Nothing, for a gym-like environment.

    Raises:
        UnsupportedEnvError: anything else.
    """
    if not is_gym_like(env):
        raise UnsupportedEnvError(
            f"environment {env_id!r} made a {type(env).__name__}, which has no reset, step and spaces"
        )


def check_seedable(env: Any, env_id: str) -> None:
    """Nothing, for an environment whose ``reset`` takes a seed or that has a ``seed`` method.

    Raises:
        ConfigError: there is no way to seed it.
    """
    if not _reset_takes_seed(env) and not callable(getattr(env, "seed", None)):
        raise ConfigError(
            f"a seed is given, but environment {env_id!r} ({type(env).__name__}) cannot be seeded:"
            " its reset takes no seed, and it has no method 'seed'.",
            key="seed",
        )


def seed_env(env: Any, seed: int) -> dict[str, int]:
    """Seed an environment; returns the keyword arguments that its next ``reset`` must be given."""
    if _reset_takes_seed(env):
        return {"seed": seed}
    env.seed(seed)
    return {}


def reset_env(env: Any, keywords: Mapping[str, int] | None = None) -> tuple[Any, dict[str, Any]]:
    """Begin an episode: observation and info, whichever form ``reset`` has.

    Args:
        env: any environment.
        keywords: what ``seed_env`` gave; None for none.
    """
    result = env.reset(**keywords) if keywords else env.reset()
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        # An old environment's observation may itself be such a pair.
        space = getattr(env, "observation_space", None)
        old_pair = not isinstance(env, gymnasium.Env) and isinstance(space, gymnasium.spaces.Tuple)
        if not (old_pair and space is not None and space.contains(result)):
            return result
    return result, {}


def to_five_values(result: Any) -> StepResult:
    """Gymnasium's five values, from what ``step`` returned.

    Four values are the old form: ``done`` is a truncation if the info says so (``TimeLimit.truncated``), else a
    terminal state.

    Raises:
        ValueError: some other number of values.
    """
    if len(result) == 5:
        obs, reward, terminated, truncated, info = result
        return obs, reward, terminated, truncated, info
    if len(result) != 4:
        raise ValueError(f"step returned {len(result)} values, expected 5 (or 4, the old form)")
    obs, reward, done, info = result
    cut = bool(done) and bool((info or {}).get("TimeLimit.truncated", False))
    return obs, reward, bool(done) and not cut, cut, info


def _reset_takes_seed(env: Any) -> bool:
    try:
        parameters = inspect.signature(env.reset).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    if "seed" in parameters:
        return True
    passes_on = any(found.kind is found.VAR_KEYWORD for found in parameters.values())
    return passes_on and not callable(getattr(env, "seed", None))
