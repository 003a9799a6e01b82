"""Contract of every algorithm: it learns, compiles once, resumes bit for bit and survives bad
rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from algorithm_cases import OF_FRAGMENTS, WITH_REPLAY, Case, equal
from gymnasium import spaces

from aiorl.acting.acting_graph import ActingGraph
from aiorl.data import columns as c
from aiorl.errors import BatchError, CheckpointError, InternalError, TrainingDiverged
from aiorl.learning import learner
from aiorl.learning.algorithm import AlgorithmState, experience_of
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.models.export import export_acting_graph

ALL = pytest.mark.parametrize("name", ALGORITHMS)
FORMS = pytest.mark.parametrize("name", ["ppo", "impala", "dqn", "iql"])
"""One case for each form of experience: rows, sequences, a replay, and stored experience."""
KINDS = pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "td3"])
"""One case for each kind of network and update."""


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    """Return the case of this name in its initial state."""
    name = request.getfixturevalue("name")
    if name not in cases:
        cases[name] = Case(name)
        cases[name].beginning = cases[name].learner.get_state()  # type: ignore[attr-defined]
    cases[name].learner.set_state(cases[name].beginning)  # type: ignore[attr-defined]
    return cases[name]


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """Return the cases by name, built once."""
    return {}


@pytest.mark.rest_slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_warming_up_changes_nothing_and_all_batches_share_one_compilation(name: str) -> None:
    case = Case(name, eager=False, xla="off", lr_schedule=[[0, 1e-2], [100, 1e-3]])
    before = case.learner.get_state()
    case.learner.warm_up()
    after = case.learner.get_state()
    assert equal(before.tensors, after.tensors)
    assert before.values == after.values
    smaller = case.fragments(1, invalid=True)[-1:]
    for fragments in (case.fragments(0), smaller):
        result = case.update(fragments)
        assert not result.skipped
        assert all(np.isfinite(value) for value in result.metrics.values())
    assert not equal(before.tensors, case.tensors)
    assert any(
        (before.tensors[name] != case.tensors[name]).any()
        for name in before.tensors
        if "weights/" in name
    )
    assert case.learner.compiled.traces == 1


@pytest.mark.rest_slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_continues_like_an_uninterrupted_one(name: str) -> None:
    """G5; random numbers, optimisers, targets, coefficients and stored experience are restored,
    too.
    """
    # the target network is due in the update after the checkpoint
    more = {"target_update_freq": 3 if name in WITH_REPLAY else 2}
    more = more if name in (*WITH_REPLAY, "appo") else {}
    through, resumed = (Case(name, **more, seed=seed, net_seed=seed) for seed in (1, 2))
    through.train(0)
    assert not equal(through.tensors, resumed.tensors)
    resumed.restore(*through.saved())
    wanted, found = through.train(1), resumed.train(1)
    assert [result.metrics for result in found] == [result.metrics for result in wanted]
    assert equal(through.tensors, resumed.tensors)
    assert through.learner.get_state().values == resumed.learner.get_state().values


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_state_that_does_not_fit_is_refused_before_any_change(name: str, case: Case) -> None:
    before = case.learner.get_state()
    kernel = next(tensor for tensor in before.tensors if tensor.startswith("weights/"))
    others = {key: tensor for key, tensor in before.tensors.items() if key != kernel}
    wide = {**others, kernel: before.tensors[kernel].astype(np.float64)}
    without_rng = {key: value for key, value in before.values.items() if key != "rng"}
    damaged = [
        Case(name, model={"fcnet_hiddens": [5]}).learner.get_state(),
        AlgorithmState(before.tensors, without_rng),
        AlgorithmState(wide, before.values),
        AlgorithmState(others, before.values),
    ]
    for state in damaged:
        with pytest.raises(CheckpointError):
            case.learner.set_state(state)
    assert equal(before.tensors, case.tensors)


@pytest.mark.parametrize("name", ["sac"])
def test_a_held_state_is_not_changed_by_later_updates(name: str, case: Case) -> None:
    """SAC has every kind of state: networks, targets, optimisers, a multiplier and a replay."""
    case.train(1)
    held, copied = case.learner.hold_state(), case.learner.get_state()
    case.train(2)
    assert equal(held().tensors, copied.tensors)
    assert held().values == copied.values
    assert not equal(case.tensors, copied.tensors)


@pytest.mark.parametrize("name", ["appo", "dqn", "td3"])
def test_targets_of_the_model_take_over_weights_set_from_elsewhere(name: str, case: Case) -> None:
    state = case.learner.get_state()
    moved = {
        name: tensor + 1 if name.startswith("weights/") else tensor
        for name, tensor in state.tensors.items()
    }
    case.learner.set_state(AlgorithmState(moved, state.values))
    case.learner.weights_replaced()
    (target,) = (
        target
        for target in case.learner.update_plan.targets.values()
        if target.network is case.model
    )
    assert equal(
        {name: x.numpy() for name, x in target.variables.items()}, case.learner.get_weights()
    )


@FORMS
def test_columns_that_do_not_fit_are_refused_by_name(name: str, case: Case) -> None:
    fragment = case.fragments()[0]
    case.learner.check_fragment(fragment)
    obs = fragment[c.OBS]
    for column, array in (
        (c.OBS, obs[..., :-1]),
        (c.ACTIONS, None),
        (c.ACTIONS, np.full(obs.shape[:2], "a")),
        ("junk", np.zeros(1)),
        (c.VALID, np.ones(obs.shape[:2], np.int8)),
    ):
        damaged = {key: x for key, x in {**fragment, column: array}.items() if x is not None}
        with pytest.raises(BatchError, match=column):
            case.learner.check_fragment(damaged)


@pytest.mark.parametrize("name", ["dqn", "iql"])
def test_non_finite_numbers_are_never_stored(name: str, case: Case) -> None:
    for column in (c.OBS, c.N_STEP_RETURNS):
        fragment = case.fragment()
        fragment[column][1, 0] = np.nan
        with pytest.raises(BatchError, match=column):
            case.learner.check_fragment(fragment)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("ppo", c.ACTION_LOGP),
        ("impala", c.REWARDS),
        ("appo", c.OBS),
    ],
)
def test_non_finite_numbers_skip_the_update(name: str, column: str, case: Case) -> None:
    """PPO has rows, IMPALA sequences, and APPO prepares its train batch."""
    case.train(0)
    before = case.tensors
    fragments = case.fragments(1)
    fragments[1][column][2, 1] = np.nan
    result = case.update(fragments)
    assert (result.skipped, result.bad_column, result.metrics["updates_skipped"]) == (
        True,
        column,
        1.0,
    )
    assert equal(before, case.tensors)


@pytest.mark.parametrize("name", ["bc"])
def test_too_many_skipped_updates_in_a_row_end_training(
    name: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "MAX_SKIPS_IN_A_ROW", 3)
    fragments = case.fragments(1)
    fragments[1][c.OBS][2, 1] = np.nan
    case.update(fragments)
    (result,) = case.train(2)
    assert (result.skipped, result.metrics["updates_skipped"]) == (False, 1.0)
    for _ in range(2):
        case.update(fragments)
    with pytest.raises(TrainingDiverged, match=c.OBS):
        case.update(fragments)
    assert all(np.isfinite(weight).all() for weight in case.learner.get_weights().values())


@pytest.mark.rest_slow
@pytest.mark.parametrize("name", WITH_REPLAY)
def test_a_non_finite_update_leaves_weights_targets_and_optimisers_unchanged(name: str) -> None:
    case = Case(name, lr=1e38, target_update_freq=1, learning_starts=16)
    case.train(0)
    before = case.tensors
    (result,) = case.train(1)
    assert (result.skipped, result.bad_column, result.metrics["updates_skipped"]) == (True, "", 1)
    for key, tensor in before.items():
        if tensor.shape or tensor.dtype.kind != "f" or "log" in key:  # all but learning rates
            np.testing.assert_array_equal(case.tensors[key], tensor, key)


@pytest.mark.rest_slow
@pytest.mark.parametrize("name", OF_FRAGMENTS)
def test_rows_that_are_not_transitions_teach_nothing_whatever_they_contain(
    name: str, case: Case
) -> None:
    weights = []
    for noise in (0.0, 5.0):
        case.learner.set_state(case.beginning)  # type: ignore[attr-defined]
        fragments = case.fragments(invalid=True)
        for fragment in fragments:
            invalid = ~fragment[c.VALID]
            assert invalid.any()
            for column in {
                c.TERMINATEDS,
                c.TRUNCATEDS,
            } & fragment.keys():  # no episode continues across such a row
                fragment[column] &= fragment[c.VALID]
                fragment[column][:-1] |= invalid[1:]
            for column in {
                c.ACTION_LOGP,
                c.ADVANTAGES,
                c.VALUE_TARGETS,
                c.REWARDS,
                c.OBS,
            } & fragment.keys():
                fragment[column][invalid] += noise
        case.update(fragments)
        weights.append(case.learner.get_weights())
    for key, weight in weights[0].items():
        np.testing.assert_allclose(weight, weights[1][key], rtol=1e-5, atol=1e-7)


@pytest.mark.rest_slow
@KINDS
def test_a_worker_gets_a_graph_of_only_the_model_with_the_same_numbers(
    name: str, case: Case
) -> None:
    case.train(0)
    graph, spec = export_acting_graph(case.model)
    weights = case.learner.get_weights()
    assert weights.keys() == {weight.name for weight in spec.weights}
    parts = {"ppo": {"policy", "value"}, "dqn": {"q", "advantage", "value"}}
    assert {weight.partition("/")[0] for weight in weights} == parts.get(name, {"policy"})
    acting = ActingGraph(graph, spec)
    acting.set_weights(weights)
    obs = np.random.default_rng(0).normal(size=(50, *case.model.obs_shape)).astype(np.float32)
    inputs, values, _ = acting.run(obs)
    for found, wanted in zip((inputs, values), case.model.forward(obs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    kind = case.model.distribution
    assert all(kind.action_space.contains(action) for action in kind.deterministic(inputs))


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "space"),
    [
        *((name, spaces.MultiDiscrete([2, 3])) for name in ("ppo", "impala")),
        *((name, spaces.Box(-1.0, 1.0, (), np.float64)) for name in ("ppo", "sac", "td3", "iql")),
        ("sac", spaces.Box(-2.0, 2.0, (2,), np.float32)),
        pytest.param("cql", spaces.Box(-2.0, 2.0, (2,), np.float32), marks=pytest.mark.slow),
    ],
)
def test_learns_with_every_kind_of_action(name: str, space: Any) -> None:
    (result,) = Case(name, space).train()
    assert not result.skipped
    assert result.metrics["num_sgd_steps"] == 2


@ALL
def test_a_config_of_another_algorithm_is_refused(name: str) -> None:
    other = config_class("bc" if name == "ppo" else "ppo")(env="x")
    with pytest.raises(InternalError, match=type(other).__name__):
        experience_of(algorithm_class(name), other)
