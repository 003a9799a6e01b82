"""What a resumed run takes of a checkpoint, and when it refuses to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import CheckpointError
from aiorl.learner.checkpoint import Checkpoint
from aiorl.learner.state import RunState
from aiorl.observation.filters import MeanStdFilter, make_filter


class Group:
    """Notes whether its state was set."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def set_state(self, state: Any) -> None:
        self.states.append(state)


def learning(name: str) -> Any:
    return SimpleNamespace(group=Group(), filters={DEFAULT_POLICY_ID: make_filter(name, (2,))})


def checkpoint(**filter_state: Any) -> Checkpoint:
    tensors = {f"filter/{DEFAULT_POLICY_ID}/{name}": np.asarray(array) for name, array in filter_state.items()}
    return Checkpoint(Path("there"), 1, {"algorithm/w": np.ones(2), **tensors}, {"algorithm": {}}, ())


def seen() -> dict[str, Any]:
    own = MeanStdFilter((2,))
    own(np.array([[1.0, 2.0], [3.0, 6.0]]))
    return own.state()


@pytest.mark.parametrize("name", ["MeanStdFilter", "ConcurrentMeanStdFilter"])
def test_statistics_go_on_also_in_the_filter_for_several_threads(name: str) -> None:
    run = learning(name)
    RunState.apply(checkpoint(**seen()), run)
    (state,) = run.group.states
    assert set(state.tensors) == {"w"}
    for part, array in run.filters[DEFAULT_POLICY_ID].state().items():
        np.testing.assert_array_equal(array, seen()[part])


def test_a_run_without_filter_goes_on_without_one() -> None:
    run = learning("NoFilter")
    RunState.apply(checkpoint(), run)
    assert run.group.states


@pytest.mark.parametrize(
    ("name", "state", "said"),
    [
        ("NoFilter", seen(), "resume with the filter it was trained with, such as 'MeanStdFilter', or start a new run"),
        ("MeanStdFilter", {}, "resume with observation_filter 'NoFilter', or start a new run"),
        ("MeanStdFilter", {**seen(), "mean": np.zeros(3)}, "statistics of policy 'default_policy' do not fit this run"),
        ("MeanStdFilter", {"n": np.array(2)}, "statistics of policy 'default_policy' do not fit this run"),
    ],
)
def test_another_filter_is_refused_before_anything_is_changed(name: str, state: dict[str, Any], said: str) -> None:
    run = learning(name)
    with pytest.raises(CheckpointError, match=said):
        RunState.apply(checkpoint(**state), run)
    assert not run.group.states
    assert getattr(run.filters[DEFAULT_POLICY_ID], "count", 0) == 0
