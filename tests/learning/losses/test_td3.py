"""TD3: hand-worked numbers, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from finite_differences import check_gradients

from aiorl.learning.losses.critics import (
    clipped_double_q_targets,
    critic_losses,
    deterministic_actor_losses,
    smoothed_actions,
)


def test_noise_is_clipped_and_then_the_action() -> None:
    found = smoothed_actions(
        tf.constant([[0.0, 0.0, 0.9, -0.9]]), tf.constant([[0.3, -2.0, 2.0, -0.3]]), noise_clip=0.5
    )
    np.testing.assert_allclose(found, [[0.3, -0.5, 1.0, -1.0]])


def test_bounds_may_differ_for_each_number_of_an_action() -> None:
    found = smoothed_actions(
        tf.constant([[0.0, 1.9]]), tf.constant([[-1.0, 1.0]]), noise_clip=0.5,
        low=tf.constant([-0.25, -2.0]), high=tf.constant([0.25, 2.0]),
    )  # fmt: skip
    np.testing.assert_allclose(found, [[-0.25, 2.0]])


@pytest.mark.parametrize("compiled", [False, True])
def test_targets_take_the_lower_of_the_critics(compiled: bool) -> None:
    def call(rewards: Any, discounts: Any, next_q: Any) -> Any:
        return clipped_double_q_targets(rewards, discounts, next_q)

    function = tf.function(call, jit_compile=True) if compiled else call
    next_q = tf.constant([[2.0, 8.0, 5.0], [4.0, 6.0, 5.0]])
    found = function(tf.constant([1.0, 1.0, 1.0]), tf.constant([0.5, 0.5, 0.0]), next_q)
    assert found.numpy().tolist() == [2.0, 4.0, 1.0]


def test_one_critic_is_ddpg() -> None:
    found = clipped_double_q_targets(tf.constant([1.0]), tf.constant([0.5]), tf.constant([[3.0]]))
    assert found.numpy().tolist() == [2.5]


def test_losses() -> None:
    q, targets = tf.constant([[1.0, 2.0], [4.0, 2.0]]), tf.constant([2.0, 5.0])
    assert critic_losses(q, targets).numpy().tolist() == [1.0 + 4.0, 9.0 + 9.0]
    assert deterministic_actor_losses(q[0]).numpy().tolist() == [-1.0, -2.0]


def test_gradients_are_those_of_finite_differences_and_targets_have_none() -> None:
    rng = np.random.default_rng(0)
    noise = tf.constant(rng.normal(size=(5, 1)))

    def critics(q: Any, next_q: Any, actions: Any) -> Any:
        smoothed = smoothed_actions(actions, noise, noise_clip=0.1)
        targets = clipped_double_q_targets(
            tf.ones(5, tf.float64), tf.ones(5, tf.float64), next_q + tf.transpose(smoothed)
        )
        return critic_losses(q, targets)

    inputs = {"q": rng.normal(size=(2, 5)), "next_q": rng.normal(size=(2, 5)), "actions": rng.normal(size=(5, 1))}
    check_gradients(critics, inputs, without=("next_q", "actions"))

    def actor(actions: Any) -> Any:
        return deterministic_actor_losses(tf.reduce_sum(tf.sin(actions), axis=1))  # through a critic

    check_gradients(actor, {"actions": rng.normal(size=(5, 2))})
