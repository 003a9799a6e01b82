"""Several policies behind the interface of one: distribution of rows, restored state, names of
metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiorl.errors import BatchError, CheckpointError, TrainingDiverged
from aiorl.learning.algorithm import AlgorithmState, UpdateResult
from aiorl.run.policy_group import PolicyGroup


class FakeAlgorithm:
    """Fake algorithm that adds up its rows and counts its updates."""

    def __init__(
        self,
        name: str,
        tape: list[str] | None = None,
        *,
        skips: bool = False,
        diverges: bool = False,
    ):
        self.name, self.tape, self.skips, self.diverges = (
            name,
            [] if tape is None else tape,
            skips,
            diverges,
        )
        self.weight = np.zeros(2, np.float32)

    def check_fragment(self, columns: Any) -> None:
        if "obs" not in columns:
            raise BatchError("obs", "there", "missing")

    def make_batch(self, fragments: Any) -> dict[str, Any]:
        return {"sum": sum(fragment["obs"].sum() for fragment in fragments)}

    def update(self, batch: Any, env_steps_total: int) -> UpdateResult:
        self.tape.append(f"{self.name} {batch['sum']:g} at {env_steps_total}")
        if self.diverges:
            raise TrainingDiverged("too often")
        self.weight += batch["sum"]
        return UpdateResult({"loss": float(batch["sum"])}, self.skips, "obs" if self.skips else "")

    def warm_up(self) -> None:
        self.tape.append(f"warm {self.name}")

    def get_weights(self) -> dict[str, Any]:
        return {"w": self.weight.copy()}

    def hold_state(self) -> Callable[[], AlgorithmState]:
        state = AlgorithmState({"weights/w": self.weight.copy()}, {"name": self.name})
        return lambda: state

    def set_state(self, state: AlgorithmState) -> None:
        assert state.values["name"] == self.name
        self.weight = state.tensors["weights/w"]


def group(
    *names: str, fixed: dict[str, Any] | None = None, tape: list[str] | None = None, **faults: Any
) -> Any:
    made: dict[str, Any] = {name: FakeAlgorithm(name, tape, **faults) for name in names}
    return PolicyGroup(made, fixed)


def rows(**sums: float) -> dict[str, Any]:
    return {name: {"obs": np.full((1, 1), value)} for name, value in sums.items()}


def test_each_policy_learns_from_its_own_rows_in_the_order_of_ids() -> None:
    tape: list[str] = []
    both = group("b", "a", tape=tape)
    both.warm_up()
    batches = both.make_batch([rows(b=1.0), rows(a=2.0, b=3.0), {}])
    result = both.update(batches, 70)
    assert tape == ["warm a", "warm b", "a 2 at 70", "b 4 at 70"]
    assert result.metrics == {"a/loss": 2.0, "b/loss": 4.0}
    assert {name: weights["w"][0] for name, weights in both.get_weights().items()} == {
        "a": 2.0,
        "b": 4.0,
    }


def test_a_policy_without_rows_in_a_batch_is_left_as_it_is() -> None:
    both = group("a", "b")
    result = both.update(both.make_batch([rows(b=1.0)]), 0)
    assert result.metrics == {"b/loss": 1.0}
    assert not both.get_weights()["a"]["w"].any()
    assert both.update(both.make_batch([{}]), 0) == UpdateResult({})


def test_only_the_weights_that_later_updates_have_changed_are_published() -> None:
    both = group("a", "b", fixed={"c": {"w": np.zeros(1)}})
    assert both.get_weights().keys() == {"a", "b", "c"}
    both.update(both.make_batch([rows(b=1.0)]), 0)
    assert both.get_weights(since=0).keys() == {"b"}
    both.update(both.make_batch([rows(a=1.0)]), 0)
    assert both.get_weights(since=0).keys() == {"a", "b"}
    assert both.get_weights(since=1).keys() == {"a"}


def test_a_skipped_update_is_reported_with_policy_and_column() -> None:
    both = group("a", "b", skips=True)
    result = both.update(both.make_batch([rows(b=1.0)]), 0)
    assert result.skipped
    assert result.bad_column == "b/obs"
    with pytest.raises(TrainingDiverged, match=r"'a'.*too often"):
        group("a", diverges=True).update({"a": {"sum": 0.0}}, 0)


def test_rows_of_policies_that_do_not_learn_and_malformed_ones_are_refused() -> None:
    some = group("a", fixed={"b": {"w": np.zeros(1)}})
    some.check_fragment(rows(a=1.0))
    some.check_fragment({})
    with pytest.raises(BatchError, match="b"):
        some.check_fragment(rows(b=1.0))
    with pytest.raises(BatchError, match="obs"):
        some.check_fragment({"a": {}})


def test_state_returns_to_its_policies_including_fixed_weights() -> None:
    first = group("a", "b", fixed={"c": {"w/x": np.arange(3.0)}})
    first.update(first.make_batch([rows(a=1.0, b=2.0)]), 0)
    state = first.get_state()
    assert set(state.tensors) == {"a/weights/w", "b/weights/w", "c/weights/w/x"}
    second = group("a", "b", fixed={"c": {"w/x": np.zeros(3)}})
    second.set_state(state)
    for name, weights in first.get_weights().items():
        for inner, weight in weights.items():
            np.testing.assert_array_equal(second.get_weights()[name][inner], weight)


@pytest.mark.parametrize(
    "other",
    [
        group("a"),
        group("a", fixed={"b": {"w": np.zeros(2)}, "c": {"w": np.zeros(3)}}),
        group("a", "b", fixed={"c": {"w": np.zeros(4)}}),
    ],
)
def test_a_checkpoint_of_other_policies_is_refused(other: PolicyGroup) -> None:
    state = group("a", "b", fixed={"c": {"w": np.zeros(3)}}).get_state()
    with pytest.raises(CheckpointError):
        other.set_state(state)
