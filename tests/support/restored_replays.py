"""Algorithms with a replay, saved and restored as a checkpoint does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from aiorl.learning.algorithms.algorithm import AlgorithmState
from aiorl.learning.algorithms.replay_algorithm import ReplayAlgorithm

__all__ = ["assert_goes_on_to_the_bit", "saved"]


def saved(algorithm: ReplayAlgorithm[Any]) -> tuple[AlgorithmState, dict[str, Any], list[Any]]:
    """Its state, and the values and pieces of what it has stored; values go through JSON."""
    state, held = algorithm.get_state(), algorithm.hold_experience()
    assert held is not None
    pieces = [(name, first, rows.copy()) for name, first, rows in held.pieces()]
    through_json = AlgorithmState(state.tensors, json.loads(json.dumps(state.values)))
    return through_json, json.loads(json.dumps(held.values)), pieces


def assert_goes_on_to_the_bit(
    first: ReplayAlgorithm[Any], second: ReplayAlgorithm[Any], train: Callable[[Any], object]
) -> None:
    """Restore the second from the first; trained alike, they stay equal in all that a checkpoint holds."""
    state, values, pieces = saved(first)
    second.set_state(state)
    second.restore_experience(values, pieces)
    train(first)
    train(second)
    one, other = first.get_state(), second.get_state()
    assert one.values == other.values
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor, other.tensors[name], name)
