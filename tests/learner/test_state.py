"""What a resumed run takes of a checkpoint, and when it refuses to."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import CheckpointError
from aiorl.learner.checkpoint import Checkpoint
from aiorl.learner.service import Counters
from aiorl.learner.state import RunState
from aiorl.observation.filters import MeanStdFilter, make_filter
from aiorl.report.results import Results


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


COUNTERS = {
    "env_steps_sampled": 60, "agent_steps_sampled": 60, "env_steps_trained": 40, "updates": 2, "updates_skipped": 0,
}  # fmt: skip
LEDGER = {"sampled": 70, "trained": 40, "queued": 20, "in_flight": 5, "discarded": {"stale": 5}, "lost": {}}


def whole(**changed: Any) -> Checkpoint:
    results = Results(100, 0.0).to_state()
    meta = {"counters": COUNTERS, "ledger": LEDGER, "results": results, "algorithm": {}}
    for dotted, value in changed.items():
        part, _, name = dotted.partition("__")
        meta[part] = {**meta[part], name: value} if name else value
    tensors = {"algorithm/default_policy/weights/w": np.ones(2, np.float32)}
    return Checkpoint(Path("there"), 1, tensors, meta, ())


def test_counters_results_and_ledger_come_back() -> None:
    state = RunState.from_meta(whole())
    assert state.counters == Counters(**COUNTERS)
    assert state.ledger == LEDGER


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"counters": 5}, "makes no sense"),
        ({"counters__updates": "2"}, "'counters.updates' is '2'"),
        ({"counters__updates": -1}, "'counters.updates' is -1"),
        ({"counters__updates": True}, "'counters.updates' is True"),
        ({"counters__updates": 2**70}, "'counters.updates' is"),
        ({"counters__surprise": 1}, "makes no sense"),
        ({"counters__env_steps_trained": 41}, "41 env steps were trained on by its counters, 40 by its ledger"),
        ({"ledger": []}, "lacks what every run has"),
        ({"ledger__sampled": 71}, "the ledger does not balance"),
        ({"ledger__queued": "20"}, "'ledger.queued' is '20'"),
        ({"ledger__lost": {"x": -1}}, "'ledger.lost.x' is -1"),
        ({"ledger__discarded": [5]}, "'ledger.discarded' is"),
        ({"results": {}}, "lacks what every run has"),
        ({"results__training_iteration": "1"}, "'results.training_iteration' is '1'"),
        ({"results__time_total_s": []}, "makes no sense"),
        ({"results__rewards": [[1.0]]}, "'results.rewards' holds what is no number"),
        ({"results__custom": {"x": ["1"]}}, "'results.custom.x' holds what is no number"),
        ({"results__lengths": [2**70]}, "makes no sense"),
        ({"results__hist": [1]}, "makes no sense"),
        ({"algorithm": 7}, "makes no sense"),
    ],
)
def test_meta_that_makes_no_sense_is_refused_before_anything_is_built(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        RunState.from_meta(whole(**changed))


def test_weights_that_are_not_finite_are_refused() -> None:
    found = whole()
    found.tensors["algorithm/default_policy/weights/w"][1] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        RunState.from_meta(found)


def test_a_state_that_the_algorithm_stumbles_over_is_refused_in_one_sentence() -> None:
    run = learning("NoFilter")

    def stumble(state: Any) -> None:
        raise OverflowError("too large")

    run.group.set_state = stumble
    with pytest.raises(CheckpointError, match="makes no sense: OverflowError"):
        RunState.apply(whole(), run)
