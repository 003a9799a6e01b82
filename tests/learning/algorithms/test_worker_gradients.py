"""Gradients that workers compute: against differences, and against the update that the learner would have made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import entropies
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from aiorl.data import columns as c
from aiorl.data.columns import CULPRIT, GRADIENT_OF, METRICS, NUM_ROWS, gradients_in
from aiorl.errors import BatchError, PolicyError, TrainingDiverged
from aiorl.learning.algorithms.a2c import A2C, A2CConfig
from aiorl.learning.algorithms.compiled_base import MAX_SKIPS_IN_A_ROW
from aiorl.learning.algorithms.impala import IMPALA, IMPALAConfig
from aiorl.learning.algorithms.pg import PG, PGConfig

LENGTH, NUM_ENVS = 6, 4
STEPS = LENGTH * NUM_ENVS
SHAPE = {"env": "x", "num_envs_per_worker": NUM_ENVS, "rollout_fragment_length": LENGTH, "eager": True, "seed": 1}
HEAD = GRADIENT_OF + "policy/head/kernel"


class Both:
    """The learner of gradients, and a worker's algorithm; the fragments, and one that learns of their rows."""

    def __init__(
        self, kind: Any, config: Any, make_model: Any, make_fragment: Any, *, num_fragments: int = 1, **settings: Any
    ) -> None:
        model, options = settings.pop("net", make_model), {**SHAPE, **settings}
        size = {"train_batch_size": STEPS * num_fragments, "sgd_minibatch_size": STEPS * num_fragments}
        self.learner = kind(config(**options, **size, gradients="workers"), model())
        self.of_rows = kind(config(**options, **size), model())
        self.worker = kind(config(**options, train_batch_size=STEPS, sgd_minibatch_size=STEPS), model())
        plan = kind.sample_plan(config(**options, **size))
        self.fragments = [
            make_fragment(plan, self.worker.model, LENGTH, NUM_ENVS, seed, invalid=True)
            for seed in range(num_fragments)
        ]

    def gradients(self) -> list[dict[str, Any]]:
        return [self.worker.compute_gradients(fragment, 0) for fragment in self.fragments]

    def step(self, gradients: list[dict[str, Any]]) -> Any:
        for columns in gradients:
            self.learner.check_fragment(columns)
        return self.learner.update(self.learner.make_batch(gradients), 0)


@pytest.fixture
def both(make_model: Callable[..., Any], make_fragment: Callable[..., Any]) -> Callable[..., Both]:
    def make(kind: Any = A2C, config: Any = A2CConfig, **options: Any) -> Both:
        return Both(kind, config, make_model, make_fragment, **options)

    return make


def of_policy(config: Any) -> Any:
    return lambda **settings: config(**{**settings, "batch_mode": "truncate_episodes"})


@pytest.mark.parametrize(
    ("kind", "config", "num_fragments"),
    [(A2C, A2CConfig, 1), (A2C, A2CConfig, 3), (PG, of_policy(PGConfig), 1), (IMPALA, IMPALAConfig, 3)],
)
def test_a_step_with_gradients_of_workers_is_the_step_with_their_rows(
    both: Callable[..., Both], kind: Any, config: Any, num_fragments: int
) -> None:
    """Fragments with fewer transitions count for less; clipping and Adam's moments are the learner's, step by step."""
    it = both(kind, config, num_fragments=num_fragments, grad_clip=0.1, lr=0.01)
    for _ in range(2):
        expected = it.of_rows.update(it.of_rows.make_batch(it.fragments), 0)
        result = it.step(it.gradients())
        weights = it.learner.get_weights()
        for name, weight in it.of_rows.get_weights().items():
            np.testing.assert_allclose(weights[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)
        assert result.metrics.keys() == expected.metrics.keys()
        for name in ("policy_loss", "loss", "grad_gnorm", "num_sgd_steps", "cur_lr"):
            assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-5), name
        it.worker.model.set_weights(weights)


def test_recurrent_networks_send_gradients_of_whole_sequences(
    both: Callable[..., Both], make_model: Callable[..., Any]
) -> None:
    it = both(num_fragments=2, net=lambda: make_model(use_gru=True), model={"use_gru": True})
    it.of_rows.update(it.of_rows.make_batch(it.fragments), 0)
    assert not it.step(it.gradients()).skipped
    weights = it.learner.get_weights()
    for name, weight in it.of_rows.get_weights().items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)])
def test_a_gradient_is_what_the_loss_changes_by(
    both: Callable[..., Both], make_model: Callable[..., Any], space: Any
) -> None:
    """Central differences of A2C's loss worked out in NumPy and float64, of the outputs' weights."""
    it = both(net=lambda: make_model(space))
    (columns,) = it.gradients()
    (fragment,) = it.fragments
    model, config = it.worker.model, A2CConfig()
    keep = fragment[c.VALID].reshape(-1)
    row = {name: column.reshape(STEPS, *column.shape[2:])[keep] for name, column in fragment.items()}
    assert columns[NUM_ROWS].tolist() == [keep.sum()]

    def loss() -> float:
        inputs, values = (output.numpy().astype(np.float64) for output in model.forward(tf.constant(row[c.OBS])))
        policy = -(model.distribution.logp(inputs, row[c.ACTIONS]).astype(np.float64) * row[c.ADVANTAGES]).mean()
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
            assert columns[GRADIENT_OF + name][index] == pytest.approx((sides[0] - sides[1]) / 0.04, rel=0.02, abs=1e-3)


def test_gradients_are_compiled_once_and_change_nothing(both: Callable[..., Both]) -> None:
    it = both(eager=False, xla="off")
    before = it.worker.get_state()
    it.worker.warm_up_gradients()
    first = it.gradients()[0]
    again = it.gradients()[0]
    assert it.worker._gradient.traces == 1
    assert all(np.array_equal(first[name], again[name]) for name in first)
    after = it.worker.get_state()
    assert all(np.array_equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert before.values == after.values


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
        ("missing", "policy/head/kernel"), ("of another shape", "policy/head/kernel"),
        ("of another dtype", "policy/head/kernel"), ("not finite", "policy/head/kernel"), ("unknown", "other"),
        ("of no row", NUM_ROWS), ("of too many rows", NUM_ROWS), ("of metrics too few", METRICS),
        ("both good and bad", GRADIENT_OF), ("with a culprit that is none", CULPRIT),
    ],
)  # fmt: skip
def test_what_is_no_gradient_of_these_weights_is_refused_by_name(
    both: Callable[..., Both], how: str, column: str
) -> None:
    it = both()
    (columns,) = it.gradients()
    with pytest.raises(BatchError, match=column):
        it.learner.check_fragment(bad(columns, how))
    with pytest.raises(BatchError):
        it.learner.check_fragment(it.fragments[0])  # rows, as of a worker that doesn't know of gradients


def test_a_number_that_is_not_finite_skips_the_step_and_names_the_workers_column(both: Callable[..., Both]) -> None:
    it = both(num_fragments=2)
    before = it.learner.get_state()
    it.fragments[1][c.VALUE_TARGETS][-1, 1] = np.nan
    gradients = it.gradients()
    assert gradients[1].keys() == {NUM_ROWS, CULPRIT}
    result = it.step(gradients)
    assert result.skipped
    assert result.bad_column == c.VALUE_TARGETS
    after = it.learner.get_state()
    assert all(np.array_equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    for _ in range(MAX_SKIPS_IN_A_ROW - 2):
        it.step(gradients)
    with pytest.raises(TrainingDiverged, match=c.VALUE_TARGETS):
        it.step(gradients)


def test_a_fragment_without_a_transition_has_no_gradient(both: Callable[..., Both]) -> None:
    it = both()
    it.fragments[0][c.VALID][:] = False
    assert it.gradients() == [{}]


def test_steps_by_single_gradients_are_the_optimizers_and_refuse_what_they_cannot_take(
    both: Callable[..., Both],
) -> None:
    """As a RolloutWorker's `apply_gradients` takes them; the optimizer's moments are those of the updates."""
    it = both(grad_clip=None, optimizer={"beta_1": 0.0, "beta_2": 0.0}, lr=0.5)
    gradients = gradients_in(it.gradients()[0])
    before = it.worker.get_weights()
    figures = it.worker.apply_gradients(gradients, 0)
    norm = np.sqrt(sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients.values()))
    assert figures == {"grad_gnorm": pytest.approx(norm, rel=1e-5), "cur_lr": 0.5}
    for name, gradient in gradients.items():  # without moments Adam goes by the sign
        large = np.abs(gradient) > 1e-3
        moved = it.worker.get_weights()[name] - before[name]
        np.testing.assert_allclose(moved[large], -0.5 * np.sign(gradient[large]), rtol=0.02)
    before = it.worker.get_weights()
    for refused in ({}, {**gradients, "policy/head/bias": np.full(2, np.nan, np.float32)}):
        with pytest.raises(PolicyError, match="no step was taken"):
            it.worker.apply_gradients(refused, 0)
    assert all(np.array_equal(before[name], weight) for name, weight in it.worker.get_weights().items())
