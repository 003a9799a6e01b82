"""Comparison of gradients with central differences, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def check_gradients(
    loss: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    without: tuple[str, ...] = (),
    step: float = 1e-5,
) -> None:
    """Compare the gradient of the sum of a loss, with respect to each input, with central
    differences.

    Args:
        loss: function of the inputs by name.
        inputs: float64 arrays or numbers.
        without: inputs that no gradient may flow to.
        step: step size of the differences.
    """
    arrays = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    tensors = {name: tf.constant(array) for name, array in arrays.items()}
    with tf.GradientTape() as tape:
        tape.watch(list(tensors.values()))
        total = tf.reduce_sum(loss(**tensors))
    found = tape.gradient(total, tensors)
    for name, array in arrays.items():
        if name in without:
            assert found[name] is None or not np.any(found[name]), name
            continue
        expected = np.zeros(array.size)
        for at in range(array.size):
            sides = []
            for sign in (1.0, -1.0):
                moved = array.reshape(-1).copy()
                moved[at] += sign * step
                changed = {**tensors, name: tf.constant(moved.reshape(array.shape))}
                sides.append(float(tf.reduce_sum(loss(**changed))))
            expected[at] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(
            found[name], expected.reshape(array.shape), rtol=1e-5, atol=1e-7, err_msg=name
        )
