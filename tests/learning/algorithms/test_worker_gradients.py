"""Gradients from workers, against finite differences and against the learner's own update."""

from __future__ import annotations

from typing import Any

import entropies
import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import BOX, CHOICES, Case, equal, gradients_of

from aiorl.data import columns as c
from aiorl.data.columns import CULPRIT, GRADIENT_OF, METRICS, NUM_ROWS, gradients_in
from aiorl.errors import BatchError, PolicyError, TrainingDiverged
from aiorl.learning import learner

STEPS = 24
GRU = {"use_gru": True}
HEAD = GRADIENT_OF + "policy/head/kernel"


class Both:
    """Learner of gradients, a worker's algorithm, its fragments, and a learner that gets their
    rows.
    """

    def __init__(
        self, name: str = "a2c", num_fragments: int = 1, space: Any = CHOICES, **settings: Any
    ) -> None:
        size = {
            "train_batch_size": STEPS * num_fragments,
            "sgd_minibatch_size": STEPS * num_fragments,
        }
        settings = {"batch_mode": "truncate_episodes", **settings}
        self.learner = Case(name, space, **{**size, **settings}, gradients="workers")
        self.of_rows = Case(name, space, **{**size, **settings})
        self.worker = Case(
            name, space, **{**settings, "train_batch_size": STEPS, "sgd_minibatch_size": STEPS}
        )
        self.fragments = [self.worker.fragment(seed, invalid=True) for seed in range(num_fragments)]

    def gradients(self) -> list[dict[str, Any]]:
        gradients = gradients_of(self.worker.learner)
        return [gradients.compute(fragment, 0) for fragment in self.fragments]

    def step(self, gradients: list[dict[str, Any]]) -> Any:
        for columns in gradients:
            self.learner.learner.check_fragment(columns)
        return self.learner.update(gradients)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "num_fragments", "model"),
    [
        ("pg", 1, {}),
        ("a2c", 2, {}),
        ("impala", 2, {}),
        pytest.param("a2c", 2, GRU, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_gradients_from_workers_equals_the_step_with_their_rows(
    name: str, num_fragments: int, model: dict[str, Any]
) -> None:
    """Fragments with fewer transitions count less; clipping and Adam's moments are the learner's,
    step by step.
    """
    it = Both(name, num_fragments, grad_clip=0.1, model=model)
    for _ in range(2):
        expected, result = it.of_rows.update(it.fragments), it.step(it.gradients())
        weights = it.learner.learner.get_weights()
        for key, weight in it.of_rows.learner.get_weights().items():
            np.testing.assert_allclose(weights[key], weight, rtol=1e-4, atol=1e-6, err_msg=key)
        assert result.metrics.keys() == expected.metrics.keys()
        if not model:  # with sequences, each fragment has its own mean
            for key in ("policy_loss", "loss", "grad_gnorm", "num_sgd_steps", "cur_lr"):
                assert result.metrics[key] == pytest.approx(
                    expected.metrics[key], rel=1e-3, abs=1e-5
                ), key
        it.worker.model.set_weights(weights)


@pytest.mark.parametrize("space", [CHOICES, BOX])
def test_a_gradient_equals_the_finite_difference_of_the_loss(space: Any) -> None:
    """Central differences of A2C's loss computed in NumPy and float64, for the output layer's
    weights.
    """
    it = Both(space=space)
    (columns,), (fragment,) = it.gradients(), it.fragments
    model, config = it.worker.model, it.worker.config
    keep = fragment[c.VALID].reshape(-1)
    row = {
        name: column.reshape(STEPS, *column.shape[2:])[keep] for name, column in fragment.items()
    }
    assert columns[NUM_ROWS].tolist() == [keep.sum()]

    def loss() -> float:
        inputs, values = (
            output.numpy().astype(np.float64) for output in model.forward(tf.constant(row[c.OBS]))
        )
        policy = -(
            model.distribution.logp(inputs, row[c.ACTIONS]).astype(np.float64) * row[c.ADVANTAGES]
        ).mean()
        wrong = ((values - row[c.VALUE_TARGETS]) ** 2).mean()
        entropy = entropies.entropy(model.distribution, inputs).astype(np.float64).mean()
        return float(policy + config.vf_loss_coeff * wrong - config.entropy_coeff * entropy)

    assert columns[METRICS][-1] == pytest.approx(loss(), rel=1e-4)
    for name in ("policy/head/kernel", "policy/head/bias", "value/head/kernel"):
        variable = model.variables[name]
        before = variable.numpy()
        for index in list(np.ndindex(before.shape))[:4]:
            sides = []
            for sign in (1, -1):
                moved = before.copy()
                moved[index] += sign * 0.02
                variable.assign(moved)
                sides.append(loss())
            variable.assign(before)
            assert columns[GRADIENT_OF + name][index] == pytest.approx(
                (sides[0] - sides[1]) / 0.04, rel=0.02, abs=1e-3
            )


def test_gradients_are_compiled_once_and_change_nothing() -> None:
    case = Case("a2c", eager=False, xla="off", train_batch_size=STEPS, sgd_minibatch_size=STEPS)
    before = case.learner.get_state()
    gradients = gradients_of(case.learner, xla="off")
    gradients.warm_up()
    first, again = (gradients.compute(case.fragment(), 0) for _ in range(2))
    assert gradients.compiled.traces == 1
    assert equal(first, again)
    after = case.learner.get_state()
    assert equal(before.tensors, after.tensors)
    assert before.values == after.values


@pytest.fixture(scope="module")
def both() -> Both:
    """Return learners that no test changes."""
    return Both()


@pytest.fixture(scope="module")
def good(both: Both) -> dict[str, Any]:
    """Return the gradients of a fragment."""
    return both.gradients()[0]


def bad(columns: dict[str, Any], how: str) -> dict[str, Any]:
    column = columns[HEAD].copy()
    match how:
        case "missing":
            return {name: array for name, array in columns.items() if name != HEAD}
        case "of another shape":
            return {**columns, HEAD: column.T.copy()}
        case "of another dtype":
            return {**columns, HEAD: column.astype(np.float64)}
        case "not finite":
            column[0, 0] = np.inf
            return {**columns, HEAD: column}
        case "unknown":
            return {**columns, GRADIENT_OF + "other": column}
        case "of no row":
            return {**columns, NUM_ROWS: np.zeros(1, np.int32)}
        case "of too many rows":
            return {**columns, NUM_ROWS: np.array([2**30], np.int32)}
        case "of metrics too few":
            return {**columns, METRICS: columns[METRICS][1:]}
        case "both good and bad":
            return {**columns, CULPRIT: np.zeros(1, np.int32)}
        case "with a culprit that is none":
            return {NUM_ROWS: columns[NUM_ROWS], CULPRIT: np.array([9], np.int32)}
    raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "column"),
    [
        ("missing", "policy/head/kernel"),
        ("of another shape", "policy/head/kernel"),
        ("of another dtype", "policy/head/kernel"),
        ("not finite", "policy/head/kernel"),
        ("unknown", "other"),
        ("of no row", NUM_ROWS),
        ("of too many rows", NUM_ROWS),
        ("of metrics too few", METRICS),
        ("both good and bad", GRADIENT_OF),
        ("with a culprit that is none", CULPRIT),
    ],
)
def test_gradients_that_do_not_match_the_weights_are_refused_by_name(
    both: Both, good: dict[str, Any], how: str, column: str
) -> None:
    with pytest.raises(BatchError, match=column):
        both.learner.learner.check_fragment(bad(good, how))


def test_rows_of_a_worker_that_sends_no_gradients_are_refused(both: Both) -> None:
    with pytest.raises(BatchError):
        both.learner.learner.check_fragment(both.fragments[0])


def test_a_non_finite_number_skips_the_step_and_names_the_workers_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner, "MAX_SKIPS_IN_A_ROW", 3)
    it = Both(num_fragments=2)
    before = it.learner.tensors
    it.fragments[1][c.VALUE_TARGETS][-1, 1] = np.nan
    gradients = it.gradients()
    assert gradients[1].keys() == {NUM_ROWS, CULPRIT}
    result = it.step(gradients)
    assert (result.skipped, result.bad_column) == (True, c.VALUE_TARGETS)
    assert equal(before, it.learner.tensors)
    it.step(gradients)
    with pytest.raises(TrainingDiverged, match=c.VALUE_TARGETS):
        it.step(gradients)


def test_a_fragment_without_a_transition_has_no_gradient(both: Both) -> None:
    blank = {**both.fragments[0], c.VALID: np.zeros_like(both.fragments[0][c.VALID])}
    assert gradients_of(both.worker.learner).compute(blank, 0) == {}


def test_single_gradients_make_steps_of_the_optimizer_and_invalid_ones_are_refused() -> None:
    """As with a RolloutWorker's `apply_gradients`; the optimizer's moments are those of the
    updates.
    """
    it = Both(grad_clip=None, optimizer={"beta_1": 0.0, "beta_2": 0.0}, lr=0.5)
    gradients, worker = gradients_in(it.gradients()[0]), it.worker.learner
    before = worker.get_weights()
    steps = gradients_of(worker)
    figures = steps.apply(gradients, 0)
    norm = np.sqrt(
        sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients.values())
    )
    assert figures == {"grad_gnorm": pytest.approx(norm, rel=1e-5), "cur_lr": 0.5}
    for name, gradient in gradients.items():  # without moments, Adam uses only the sign
        large = np.abs(gradient) > 1e-3
        moved = worker.get_weights()[name] - before[name]
        np.testing.assert_allclose(moved[large], -0.5 * np.sign(gradient[large]), rtol=0.02)
    before = worker.get_weights()
    for refused in ({}, {**gradients, "policy/head/bias": np.full(3, np.nan, np.float32)}):
        with pytest.raises(PolicyError):
            steps.apply(refused, 0)
    assert equal(before, worker.get_weights())
