"""Mistakes in an algorithm of one's own are refused in a sentence that says what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import Case

from aiorl.algorithms import (
    DQN,
    Adaptation,
    Learner,
    Schedule,
    Update,
    chain,
    drawn,
    epochs,
    every,
    minibatches,
)
from aiorl.data import columns as c
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.a3c import A3C
from aiorl.learning.algorithms.pg import PG
from aiorl.learning.compiled import CompiledUpdate
from aiorl.learning.steps import WEIGHTS, Loop, descend

BATCH = {"x": np.ones((8, 3), np.float32)}
DRAWN = {WEIGHTS: np.ones((2, 4), np.float32)}
ORDER = np.arange(8, dtype=np.int32).reshape(2, 4)


def step_of(loss: Any, **options: Any) -> Any:
    return descend([tf.Variable(1.0)], loss, keras.optimizers.SGD(), **options)


def zero(minibatch: Any, knobs: Any) -> Any:
    return tf.constant(0.0), {}


def call(loop: Loop, batch: Any = BATCH, order: Any = ORDER) -> dict[str, float]:
    return CompiledUpdate(loop, ["lr"], xla="off")(batch, order, {"lr": 0.1}, max_steps=2).metrics


def passes(step: Any, **options: Any) -> Loop:
    return epochs(1, minibatches(4, step), **options)


@pytest.mark.parametrize(
    ("returned", "fact"),
    [
        (tf.constant(0.0), r"returned <tf\.Tensor.*a pair.*Return \(loss, {}\)"),
        ((tf.constant(0.0), tf.constant(0.0)), "a pair"),
        ((0.0, {}), "a scalar tensor"),
        ((tf.zeros(4), {}), r"of shape \[4\], expected a scalar.*tf\.reduce_mean"),
    ],
)
def test_a_loss_that_is_no_scalar_with_further_tensors_is_refused(returned: Any, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact) as caught:
        call(passes(step_of(lambda minibatch, knobs: returned)))
    assert caught.value.key == "algo"


def test_metrics_of_any_kind_of_number_are_reported() -> None:
    def loss(minibatch: Any, knobs: Any) -> Any:
        numbers = {"python": 0.5, "integer": tf.constant(3), "double": np.float64(0.25)}
        return tf.constant(0.0), {**numbers, "bool": tf.constant(True)}

    metrics = call(passes(step_of(loss)))
    assert [metrics[name] for name in ("python", "integer", "double", "bool")] == [0.5, 3, 0.25, 1]


def test_names_of_knobs_metrics_and_tensors_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="the knob 'actor_lr', but the knobs are 'lr'"):
        call(passes(step_of(zero, lr="actor_lr")))
    for argument, value in (("stop_when", ("kl", 0.1)), ("last_epoch_of", "kl")):
        with pytest.raises(
            ConfigError, match=f"{argument} names .*'kl', but .*'grad_gnorm', 'loss'"
        ):
            call(passes(step_of(zero), **{argument: value}))
    with pytest.raises(
        ConfigError, match=r"'priorities' back .* are none.*per_row.*write_back=\(\)"
    ):
        call(drawn(step_of(zero)), DRAWN, None)


def test_two_steps_that_give_the_same_metric_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the metrics 'grad_gnorm', 'loss'.*name="):
        call(passes(chain(step_of(zero), step_of(zero))))
    metrics = call(passes(chain(step_of(zero), chain(step_of(zero, name="other")))))
    assert {"loss", "other_loss"} <= metrics.keys()


def test_numbers_and_parts_of_loops_are_checked() -> None:
    for period in (0, -1, 2.0):
        with pytest.raises(ConfigError, match="expected a positive integer"):
            every(period, step_of(zero))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a positive integer"):
        epochs(0, minibatches(4, step_of(zero)))
    with pytest.raises(ConfigError, match=r"is a Descent.*Pass minibatches\("):
        epochs(10, step_of(zero))


@pytest.mark.parametrize(
    ("knobs", "fact"),
    [
        ({}, r"without 'lr'.*schedules\(config\)"),
        ({"lr": 1e-3}, r"'lr' of an Update is 0.001, expected a schedule.*Schedule\(value\)"),
    ],
)
def test_knobs_of_an_update_are_schedules_with_a_learning_rate(knobs: Any, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        Update(loop=passes(step_of(zero)), knobs=knobs)


def test_a_loop_of_an_update_is_a_loop() -> None:
    with pytest.raises(ConfigError, match=r"is a Descent, expected a loop.*drawn\(step\)"):
        Update(loop=step_of(zero), knobs={"lr": Schedule(1e-3)})


def learner_of(kind: Any, loop_of: Any, name: str = "", **settings: Any) -> Learner:
    """Return a learner of an algorithm whose update has the loop that `loop_of` makes of its own."""

    class Mine(kind):  # type: ignore[misc]
        @staticmethod
        def update(config: Any, networks: Any) -> Any:
            update = kind.update(config, networks)
            loop = loop_of(update.loop)
            return dataclasses.replace(update, loop=loop) if loop else update.loop

    case = Case(name or kind.config_class().algo, **settings)
    return Learner(Mine, case.config, case.model)


def test_an_update_that_is_a_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Mine\.update returned a Loop, expected an Update"):
        learner_of(PG, lambda loop: None)


def test_a_loop_that_does_not_fit_the_experience_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draws its minibatches, but .*epochs\("):
        learner_of(PG, lambda loop: drawn(loop.step))
    with pytest.raises(ConfigError, match=r"kept in a replay, but .*drawn\(step\)"):
        learner_of(DQN, lambda loop: passes(loop.step))


@pytest.mark.parametrize("column", ["novelty", c.OBS, c.ACTIONS])
def test_only_numbers_of_stored_rows_can_be_written_back(column: str) -> None:
    with pytest.raises(ConfigError, match=f"writes '{column}' back.*n_step_returns, priorities"):
        learner_of(DQN, lambda loop: drawn(loop.step, write_back=(column,)))
    learner_of(DQN, lambda loop: drawn(loop.step, write_back=(c.N_STEP_RETURNS,)))


def test_two_parts_that_save_a_value_of_the_same_name_are_refused() -> None:
    class Counts(Adaptation):
        def state(self) -> dict[str, Any]:
            return {"updates": 3}

    class Mine(PG):
        @staticmethod
        def update(config: Any, networks: Any) -> Update:
            return dataclasses.replace(PG.update(config, networks), adaptations=(Counts(),))

    case = Case("pg")
    with pytest.raises(ConfigError, match="save a value named 'updates'"):
        Learner(Mine, case.config, case.model).get_state()


def test_workers_compute_gradients_of_a_single_descent_only() -> None:
    with pytest.raises(ConfigError, match="one bare descend") as caught:
        learner_of(A3C, lambda loop: passes(chain(loop.step)), gradients="workers")
    assert caught.value.key == "gradients"
