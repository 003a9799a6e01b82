"""Sequences through a recurrent model give the same numbers as single steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import make_model

from aiorl.data import columns as c
from aiorl.learning.actor_critic import (
    sequence_forward,
    sequence_forward_with_last,
)


def columns_for(model: Any, length: int, num: int) -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(2)
    valid = np.ones((length, num), np.float32)
    terminateds = (rng.random((length, num)) < 0.3).astype(np.float32)
    valid[1:] -= (rng.random((length - 1, num)) < 0.2).astype(np.float32)
    columns = {
        c.OBS: rng.normal(size=(length, num, *model.obs_shape)).astype(np.float32),
        c.LAST_OBS: rng.normal(size=(num, *model.obs_shape)).astype(np.float32),
        c.TERMINATEDS: terminateds,
        c.TRUNCATEDS: np.zeros((length, num), np.float32),
        c.VALID: valid,
    }
    for index, shape in enumerate(model.state_shapes):
        columns[c.state_in(index)] = rng.normal(size=(num, *shape)).astype(np.float32)
    if model.uses_previous_step:
        columns[c.ACTIONS] = rng.integers(0, 2, (length, num)).astype(np.int32)
        columns[c.REWARDS] = rng.normal(size=(length, num)).astype(np.float32)
        columns[c.PREV_ACTIONS] = rng.integers(0, 2, (length, num)).astype(np.int32)
        columns[c.PREV_REWARDS] = rng.normal(size=(length, num)).astype(np.float32)
    return {name: tf.constant(column) for name, column in columns.items()}


@pytest.mark.parametrize("cell", ["use_lstm", "use_gru"])
def test_a_sequence_gives_the_same_as_single_steps_with_resets(cell: str) -> None:
    model = make_model(**{cell: True})
    columns = columns_for(model, 6, 3)
    dist_inputs, values, last_values = sequence_forward_with_last(model, columns)
    state = [columns[c.state_in(index)] for index in range(len(model.state_shapes))]
    obs = tf.concat([columns[c.OBS], columns[c.LAST_OBS][None]], axis=0)
    for t in range(7):
        if t > 0:
            ended = (columns[c.TERMINATEDS][t - 1] > 0) | (columns[c.VALID][t - 1] <= 0)
            state = [tf.where(ended[:, None], 0.0, component) for component in state]
        step_inputs, step_values, state = model.forward_step(obs[t], state)
        if t < 6:
            np.testing.assert_allclose(dist_inputs[t], step_inputs, atol=1e-6)
            np.testing.assert_allclose(values[t], step_values, atol=1e-6)
        else:
            np.testing.assert_allclose(last_values, step_values, atol=1e-6)
    np.testing.assert_allclose(sequence_forward(model, columns)[1], values, atol=1e-6)


def test_previous_actions_and_rewards_reach_the_cell_even_after_the_last_transition() -> None:
    model = make_model(use_lstm=True, lstm_use_prev_action_reward=True)
    columns = columns_for(model, 5, 2)
    valid = np.ones((5, 2), np.float32)
    valid[3:, 1] = 0  # the second sequence is shorter: row 3 has its last observation
    columns |= {c.VALID: tf.constant(valid), c.TERMINATEDS: tf.zeros((5, 2))}
    dist_inputs, values, last_values = sequence_forward_with_last(model, columns)
    state = [columns[c.state_in(index)] for index in range(len(model.state_shapes))]
    for t in range(5):
        actions, rewards = columns[c.PREV_ACTIONS][t].numpy(), columns[c.PREV_REWARDS][t].numpy()
        if t == 3:
            actions[1], rewards[1] = columns[c.ACTIONS][2, 1], columns[c.REWARDS][2, 1]
        step_inputs, step_values, state = model.forward_step(
            columns[c.OBS][t], state, actions, rewards
        )
        rows = 2 if t < 4 else 1
        np.testing.assert_allclose(dist_inputs[t, :rows], step_inputs[:rows], atol=1e-6)
        np.testing.assert_allclose(values[t, :rows], step_values[:rows], atol=1e-6)
    last = (columns[c.ACTIONS][4], columns[c.REWARDS][4])
    np.testing.assert_allclose(
        last_values[0], model.forward_step(columns[c.LAST_OBS], state, *last)[1][0], atol=1e-6
    )
