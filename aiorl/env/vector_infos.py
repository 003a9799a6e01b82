"""Infos of Gymnasium's vector environments: one dict of arrays for all copies, taken apart into a dict for each.

Beside an entry ``key`` stands a mask ``_key`` of the copies that have it; nested dicts are made the same way. A copy
that was reset inside its step has what that step said under ``final_info``, and its reset's infos in their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiorl.env.lockstep import VectorStep

__all__ = ["split_infos", "step_infos", "training_disabled"]

_TRAINING = "training_enabled"
_FINAL_INFO = "final_info"
_OF_THE_STEP = (_FINAL_INFO, "final_obs", "final_observation")


def split_infos(infos: Mapping[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Each copy's own info.

    An entry without a mask is every copy's: one value each if it is an array, list or tuple of that length, else one
    for all.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if isinstance(key, str) and key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        indices = range(num_envs) if mask is None else np.flatnonzero(mask).tolist()
        if isinstance(value, Mapping):
            values: Any = split_infos(value, num_envs)
        elif isinstance(value, np.ndarray) and value.ndim and len(value) == num_envs:
            # copies: the environment may write into its arrays again
            values = value.tolist() if value.ndim == 1 else [np.array(row) for row in value]
        elif isinstance(value, list | tuple) and len(value) == num_envs:
            values = value
        else:
            values = [value] * num_envs
        for index in indices:
            rows[index][key] = values[index]
    return rows


def step_infos(step: VectorStep, num_envs: int) -> list[dict[str, Any]]:
    """What each copy's step said, also where the copy was reset inside that step."""
    infos = step.infos or {}
    of_step = {name for key in _OF_THE_STEP for name in (key, "_" + key)}
    rows = split_infos({key: value for key, value in infos.items() if key not in of_step}, num_envs)
    finals = infos.get(_FINAL_INFO)
    if finals is None or step.final_index is None:
        return rows
    final_rows = split_infos(finals, num_envs) if isinstance(finals, Mapping) else finals
    for index in step.final_index.tolist():
        rows[index] = dict(final_rows[index] or {})
    return rows


def training_disabled(step: VectorStep, num_envs: int) -> list[int]:
    """The copies whose step is not to be trained on: its info has a ``training_enabled`` that is false."""
    infos = step.infos
    if not infos:
        return []
    finals = infos.get(_FINAL_INFO)
    if isinstance(finals, Mapping):
        finals = {key: finals[key] for key in (_TRAINING, "_" + _TRAINING) if key in finals}
    told = {key: infos[key] for key in (_TRAINING, "_" + _TRAINING) if key in infos}
    if finals is not None and (told or len(finals)):
        told[_FINAL_INFO] = finals
    if not told:
        return []
    only = VectorStep(step.obs, step.rewards, step.terminateds, step.truncateds, step.final_index, infos=told)
    rows = step_infos(only, num_envs)
    return [
        index
        for index, info in enumerate(rows)
        if not info.get(_TRAINING, True) and (step.valid is None or step.valid[index])
    ]
