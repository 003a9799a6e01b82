"""The compiled update against a plain NumPy loop; it is traced once and never leaves non-finite
numbers.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from full_disk import disk_full_after
from quick_adam import keras_step, quick_step

from aiorl.errors import ConfigError
from aiorl.learning.compiled import CompiledUpdate
from aiorl.learning.steps import (
    STEPS_BEFORE,
    Loss,
    chain,
    descend,
    drawn,
    epochs,
    every,
    minibatches,
    of_policy,
)

RNG = np.random.default_rng(1)
X = RNG.normal(size=(12, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5]) + 0.3).astype(np.float32)
BATCH = {"x": X, "y": Y}
ORDER = (
    np.stack([RNG.permutation(12).reshape(3, 4) for _ in range(2)]).reshape(6, 4).astype(np.int32)
)


def squared_error(w: tf.Variable, b: tf.Variable) -> Loss:
    def loss(minibatch: dict[str, Any], knobs: dict[str, Any]) -> Any:
        errors = tf.linalg.matvec(minibatch["x"], w) + b - minibatch["y"]
        mse = tf.reduce_mean(tf.square(errors))
        return knobs["scale"] * mse, {"mse": mse}

    return loss


def update_of(
    loss: Any,
    variables: Any,
    optimizer: Any,
    *,
    knobs: Any = ("lr",),
    grad_clip: float | None = None,
    xla: Any = "auto",
    num_epochs: int = 1,
    **options: Any,
) -> CompiledUpdate:
    step = descend(variables, loss, optimizer, clip=grad_clip)
    return CompiledUpdate(epochs(num_epochs, minibatches(4, step), **options), knobs, xla=xla)


def make(xla: Any = "on", **options: Any) -> tuple[CompiledUpdate, Any, Any]:
    w, b = tf.Variable([0.5, 0.0, 0.0]), tf.Variable(0.0)
    optimizer = keras.optimizers.SGD(0.1)
    loss = squared_error(w, b)
    return (
        update_of(loss, [w, b], optimizer, knobs=("lr", "scale"), xla=xla, **options),
        w,
        b,
    )


def call(update: CompiledUpdate, batch: Any, knobs: Any, max_steps: int = 6) -> Any:
    """Return the metrics, and whether the update was held."""
    result = update(batch, ORDER, knobs, max_steps=max_steps)
    return result.metrics, result.is_kept


def plain_loop(
    lr: float, scale: float, clip: float | None, steps: int = 6
) -> tuple[Any, float, float]:
    w, b, errors = np.array([0.5, 0.0, 0.0]), 0.0, []
    for rows in ORDER[:steps]:
        error = X[rows] @ w + b - Y[rows]
        errors.append(np.mean(error**2))
        gw, gb = scale * 2 * X[rows].T @ error / 4, scale * 2 * error.mean()
        norm = np.sqrt((gw**2).sum() + gb**2)
        factor = 1.0 if clip is None else min(1.0, clip / norm)
        w, b = w - lr * factor * gw, b - lr * factor * gb
    return w, b, float(np.mean(errors))


@pytest.mark.parametrize(("xla", "clip"), [("on", 0.5), ("off", None)])
def test_runs_all_minibatches_in_the_given_order(xla: str, clip: float | None) -> None:
    update, w, b = make(xla, grad_clip=clip)
    metrics, held = call(update, BATCH, {"lr": 0.05, "scale": 2.0})
    expected_w, expected_b, expected_error = plain_loop(0.05, 2.0, clip)
    np.testing.assert_allclose(w.numpy(), expected_w, rtol=1e-5)
    assert b.numpy() == pytest.approx(expected_b, rel=1e-4)
    assert held
    assert metrics["mse"] == pytest.approx(expected_error, rel=1e-5)
    assert metrics["loss"] == pytest.approx(2.0 * metrics["mse"], rel=1e-5)
    assert metrics["num_sgd_steps"] == 6


@pytest.mark.parametrize(("xla", "row"), [("on", 11), ("off", 0)])
def test_a_non_finite_number_leaves_weights_and_optimiser_unchanged(xla: str, row: int) -> None:
    """Even if some minibatches before it were finite."""
    w, b = tf.Variable([0.5, 0.0, 0.0]), tf.Variable(0.0)
    optimizer = keras.optimizers.Adam(0.1)
    loss = squared_error(w, b)
    update = update_of(loss, [w, b], optimizer, knobs=("lr", "scale"), grad_clip=1.0, xla=xla)
    knobs = {"lr": 0.1, "scale": 1.0}
    call(update, BATCH, knobs)
    before = [variable.numpy() for variable in (w, b, *update.optimizer_variables)]
    y = Y.copy()
    y[ORDER[2, 0] if row else ORDER[0, 0]] = np.nan
    _, held = call(update, {"x": X, "y": y}, knobs)
    after = [variable.numpy() for variable in (w, b, *update.optimizer_variables)]
    assert not held
    assert all(np.array_equal(x, z) for x, z in zip(before, after, strict=True))
    _, held = call(update, BATCH, knobs)
    assert held


def test_a_finite_loss_with_an_overflowing_gradient_is_skipped() -> None:
    update, w, _ = make("off")
    _, held = call(update, {"x": X * 1e15, "y": Y}, {"lr": 0.1, "scale": 1e6})
    assert not held
    np.testing.assert_array_equal(w.numpy(), [0.5, 0.0, 0.0])


def test_ends_after_the_first_minibatch_above_the_limit() -> None:
    for limit, steps in ((0.0, 1), (1e9, 6)):
        update, w, _ = make("off", stop_when=("mse", limit))
        metrics, held = call(update, BATCH, {"lr": 0.05, "scale": 1.0})
        assert held
        assert metrics["num_sgd_steps"] == steps
        np.testing.assert_allclose(
            w.numpy(), plain_loop(0.05, 1.0, None, steps=steps)[0], rtol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("xla", ["on", "off"])
def test_a_metric_of_the_last_epoch_is_the_mean_over_its_minibatches_only(xla: str) -> None:
    """Two epochs of three minibatches: errors 4 to 6, or only the fourth if the update ends after
    it.
    """
    means = [plain_loop(-0.1, 1.0, None, steps=steps)[2] for steps in range(1, 7)]
    errors = [
        (n + 1) * mean - n * before
        for n, (mean, before) in enumerate(zip(means, [0.0, *means], strict=False))
    ]
    assert max(errors[:3]) < errors[3], (
        "errors rise, so that the fourth can be the first above a limit"
    )
    limit = (max(errors[:3]) + errors[3]) / 2
    last: Any = {"num_epochs": 2, "last_epoch_of": "mse"}
    update, *_ = make(xla, **last)
    metrics, _ = call(update, BATCH, {"lr": -0.1, "scale": 1.0})
    assert metrics["mse"] == pytest.approx(means[5], rel=1e-4)
    assert metrics["mse_last_epoch"] == pytest.approx(np.mean(errors[3:]), rel=1e-4)
    update, *_ = make(xla, **last, stop_when=("mse", limit))
    metrics, _ = call(update, BATCH, {"lr": -0.1, "scale": 1.0})
    assert metrics["num_sgd_steps"] == 4
    assert metrics["mse_last_epoch"] == pytest.approx(errors[3], rel=1e-4)


def test_auto_takes_xla_for_dense_layers_and_a_plain_graph_for_convolutions(caplog: Any) -> None:
    dense, _, _ = make("auto")
    assert dense.mode == "xla"
    kernel = tf.Variable(tf.zeros([3, 3, 1, 2]))
    convolutional = update_of(
        lambda columns, knobs: (tf.reduce_sum(kernel) * knobs["lr"], {}),
        [kernel],
        keras.optimizers.SGD(0.1),
    )
    assert convolutional.mode == "graph"
    with caplog.at_level(logging.INFO):
        convolutional.warm_up(BATCH, ORDER)
    assert " graph " in caplog.text


def uncompilable(xla: Any) -> CompiledUpdate:
    """Use strings, which XLA doesn't have."""
    w = tf.Variable([1.0])

    def loss(minibatch: dict[str, Any], coefficients: dict[str, Any]) -> Any:
        length = tf.strings.length(tf.strings.as_string(minibatch["y"][0]))
        return tf.reduce_sum(w) * coefficients["lr"] * tf.cast(length, tf.float32), {}

    return update_of(loss, [w], keras.optimizers.SGD(0.1), xla=xla)


def test_auto_falls_back_to_a_plain_graph_with_a_warning_if_xla_fails(caplog: Any) -> None:
    update = uncompilable("auto")
    update.warm_up(BATCH, ORDER)
    assert update.mode == "graph"
    assert "WARNING  aiorl.learning" in caplog.text
    assert call(update, BATCH, {"lr": 0.1})[1]


def test_a_full_disk_for_compiled_updates_does_not_end_training(caplog: Any) -> None:
    """TensorFlow reports it as an error of the update."""
    assert "persistent_cache_directory" in os.environ["TF_XLA_FLAGS"], "tests/conftest.py sets it"
    w = tf.Variable([1.0])
    update = update_of(
        lambda columns, knobs: (tf.reduce_sum(w * columns["y"][:1] * knobs["lr"] + 0.17), {}),
        [w],
        keras.optimizers.SGD(0.1),
    )
    with disk_full_after(1 << 13):
        update.warm_up(BATCH, ORDER)
    assert update.mode == "graph"
    assert "WARNING  aiorl.learning" in caplog.text
    assert call(update, BATCH, {"lr": 0.1})[1]


def test_requested_xla_that_fails_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        uncompilable("on").warm_up(BATCH, ORDER)
    assert caught.value.key == "xla"


@pytest.mark.parametrize("xla", ["on", "off"])
def test_steps_of_a_chain_learn_from_earlier_ones_each_at_its_own_rate_and_interval(
    xla: Any,
) -> None:
    """One step follows the variable that has just moved; one is due at every third minibatch,
    counting earlier ones.
    """
    w, follower, rare = tf.Variable(1.0), tf.Variable(0.0), tf.Variable(0.0)

    def loss(minibatch: Any, knobs: Any) -> Any:
        return w * minibatch["x"], {"seen": tf.stack([w + 0.0])}

    def follow(minibatch: Any, knobs: Any) -> Any:
        now = tf.convert_to_tensor(w)
        moved = -follower * (now + minibatch["seen"][0])
        return moved, {"w": now, "w_now": tf.stack([now])}

    def seldom(minibatch: Any, knobs: Any) -> Any:
        now = minibatch["w_now"][0]
        return rare * now - rare * now - rare, {}

    def sgd() -> Any:
        return keras.optimizers.SGD(1.0)

    steps = chain(
        descend([w], loss, sgd()),
        descend([follower], follow, sgd(), name="follower", lr="other_lr"),
        every(3, descend([rare], seldom, sgd(), name="rare")),
    )
    update = CompiledUpdate(drawn(steps, write_back=()), ("lr", "other_lr", STEPS_BEFORE), xla=xla)
    batch = {"x": np.ones(4, np.float32)}
    knobs = {"lr": 0.5, "other_lr": 2.0, STEPS_BEFORE: 1.0}
    result = update(batch, None, knobs, max_steps=1)
    assert result.is_kept
    assert (w.numpy(), follower.numpy(), rare.numpy()) == (0.5, 2.0 * (0.5 + 1.0), 0.0)
    assert result.metrics["follower_grad_gnorm"] == 1.5
    assert result.metrics["w"] == 0.5
    assert "rare_loss" not in result.metrics
    metrics = update(batch, None, {**knobs, STEPS_BEFORE: 2.0}, max_steps=4).metrics
    assert rare.numpy() == 1.0  # at the third and the sixth step, the latter by lr 0.5
    assert metrics["rare_grad_gnorm"] == 1.0
    before = [
        float(variable.numpy()) for variable in (w, follower, rare, *update.optimizer_variables)
    ]
    bad = {"x": np.array([1, 1, 1, np.nan], np.float32)}
    assert not update(bad, None, knobs, max_steps=4).is_kept
    assert [
        float(variable.numpy()) for variable in (w, follower, rare, *update.optimizer_variables)
    ] == before


def test_tensors_of_earlier_steps_replace_a_policys_own_columns() -> None:
    w, v = tf.Variable(1.0), tf.Variable(1.0)

    def shared(minibatch: Any, knobs: Any) -> Any:
        return w - w, {"returns": minibatch["left"]["returns"] + minibatch["right"]["returns"]}

    def own(minibatch: Any, knobs: Any) -> Any:
        return v * tf.reduce_mean(minibatch["returns"]), {}

    of_left = of_policy("left", descend([v], own, keras.optimizers.SGD()))
    step = chain(descend([w], shared, keras.optimizers.SGD()), of_left)
    update = CompiledUpdate(epochs(1, minibatches(4, step)), ["lr"], xla="off")
    batch = {
        name: {"returns": np.full(4, value, np.float32)}
        for name, value in (("left", 2.0), ("right", 3.0))
    }
    order = np.arange(4, dtype=np.int32)[None]
    assert update(batch, order, {"lr": 0.0}, max_steps=1).metrics["left/loss"] == 5.0


@pytest.mark.parametrize("options", [{}, {"beta_1": 0.5, "epsilon": 1e-3}, {"amsgrad": True}])
def test_steps_of_the_quick_adam_are_those_of_keras(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for step in (keras_step, quick_step):
        monkeypatch.setattr(keras.optimizers.Adam, "_backend_update_step", step)
        variable, optimizer = tf.Variable([1.0, -2.0, 3.0]), keras.optimizers.Adam(0.1, **options)
        optimizer.build([variable])
        for gradient in X[:4]:
            optimizer.apply([tf.constant(gradient)], [variable])
        found.append([np.asarray(each) for each in (variable, *optimizer.variables)])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4)
