"""Environments of the old gym package by name: ``gym:ID``, through shimmy (extra ``gym``)."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable
from typing import Any

from aiorl.env.registry import EnvContext, unknown_env
from aiorl.process.imports import needed_by

__all__ = ["old_gym_creator"]


def old_gym_creator(name: str) -> Callable[[EnvContext], Any]:
    """What makes the environment of ``gym:ID``.

    Raises:
        UnknownEnvError: the package has no such environment.
        ConfigError: gym or shimmy is not installed.
    """
    gym_id = name.removeprefix("gym:")
    with (
        needed_by(f"environment {name!r}", "the old gym package", "gym", key="env", value=name),
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),  # it prints a notice there when imported, and warns about NumPy
    ):
        warnings.simplefilter("ignore")
        gym = importlib.import_module("gym")
        compatibility = importlib.import_module("shimmy.openai_gym_compatibility")
    known = list(gym.envs.registry)
    if gym_id not in known:
        otherwise = "Give the id of an environment of the old gym package."
        raise unknown_env(name, wanted=gym_id, known=known, otherwise=otherwise)

    def create(context: EnvContext) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "out of date" notices of the old package
            env = gym.make(gym_id, disable_env_checker=True, **context)
        return compatibility.GymV26CompatibilityV0(env=env)

    return create
