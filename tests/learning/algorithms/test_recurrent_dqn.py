"""Recurrent DQN: its loss over sequences against steps taken one by one, its burn-in, and what is due of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from q_networks import NUM_ACTIONS, NUM_OBS, START, make_model
from restored_replays import assert_goes_on_to_the_bit

from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.data import columns as c
from aiorl.errors import BatchError, ConfigError
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS, replay_spec
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.q_network import QNetwork
from aiorl.learning.replay import spec as memory
from aiorl.learning.replay.sequences import FOLLOWING, TRAINED

LENGTH, BURN_IN, ROWS = 6, 2, 3
LSTM: dict[str, Any] = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 5}
GRU: dict[str, Any] = {"fcnet_hiddens": [8], "use_gru": True, "lstm_cell_size": 5}
LOOKS_BACK = {**LSTM, "lstm_use_prev_action_reward": True}


def make_config(**settings: Any) -> DQNConfig:
    small = {
        "env": "E", "seed": 7, "model": LSTM, "num_envs_per_worker": 2, "rollout_fragment_length": 10,
        "replay_sequence_length": LENGTH, "burn_in": BURN_IN, "n_step": 2, "train_batch_size": 8, "lr": 0.01,
        "training_intensity": 1.2, "learning_starts": 16, "replay_capacity": 64, "target_update_freq": 5, "xla": "off",
    }  # fmt: skip
    return DQNConfig(**{**small, **settings})


def make_minibatch(model: QNetwork, seed: int) -> dict[str, Any]:
    """Three sequences: one whole, one that its episode begins and ends, one cut short behind its burn-in."""
    rng = np.random.default_rng(seed)
    batch = {
        c.OBS: rng.normal(size=(ROWS, LENGTH + 1, NUM_OBS)),
        c.N_STEP_RETURNS: rng.normal(size=(ROWS, LENGTH)),
        c.DISCOUNTS: np.full((ROWS, LENGTH), 0.9),
        TRAINED: np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]]),
        WEIGHTS: rng.random(ROWS),
        c.PREV_REWARDS: rng.normal(size=(ROWS, LENGTH + 1)),
    }
    batch[c.DISCOUNTS][1, 2] = 0.0
    batch |= {c.state_in(index): rng.normal(size=(ROWS, *shape)) for index, shape in enumerate(model.state_shapes)}
    found = {name: array.astype(np.float32) for name, array in batch.items()}
    for name, length in ((c.ACTIONS, LENGTH), (c.PREV_ACTIONS, LENGTH + 1)):
        found[name] = (START + rng.integers(0, NUM_ACTIONS, (ROWS, length))).astype(np.int32)
    found[FOLLOWING] = np.array([[2, 3, 4, 5, 6, 6], [2, 3, 3, 4, 5, 6], [2, 3, 3, 4, 5, 6]], np.int32)
    return found


def make_fragment(number: int, length: int = 10, num_envs: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    shape = (length, num_envs)
    states = -(-length // (LENGTH - BURN_IN))
    return {
        c.OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.ACTIONS: START + rng.integers(0, NUM_ACTIONS, shape),
        c.REWARDS: rng.normal(size=shape).astype(np.float32),
        c.TERMINATEDS: rng.random(shape) < 0.05,
        c.TRUNCATEDS: rng.random(shape) < 0.05,
        **{c.state_in(index): rng.normal(size=(num_envs, states, 5)).astype(np.float32) for index in range(2)},
    }


def feed(algorithm: DQN, numbers: Any) -> list[Any]:
    return [algorithm.update(algorithm.make_batch([make_fragment(number)]), 20 * number) for number in numbers]


def stepped(network: QNetwork, batch: dict[str, Any]) -> Any:
    """Q values [B, L + 1, A], one step after the other as a worker acts."""
    state = [tf.constant(batch[c.state_in(index)]) for index in range(len(network.state_shapes))]
    values = []
    for t in range(LENGTH + 1):
        before = (batch[c.PREV_ACTIONS][:, t], batch[c.PREV_REWARDS][:, t]) if network.looks_back else ()
        q, _, state = network.forward_step(tf.constant(batch[c.OBS][:, t]), state, *map(tf.constant, before))
        values.append(q.numpy())
    return np.stack(values, axis=1)


def rescaled(x: Any) -> Any:
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def unrescaled(y: float) -> float:
    """By bisection, whatever the inverse looks like."""
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rescaled(middle) < y else (low, middle)
    return low


def spec_of(config: DQNConfig, model: QNetwork, other: QNetwork) -> UpdateSpec:
    """The update of a network whose target has the weights of another."""
    algorithm = DQN(config, model)
    for name, variable in algorithm.targets["target"].variables.items():
        variable.assign(other.variables[name])
    return algorithm.update_spec()


def tensors(arrays: dict[str, Any]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"double_q": True, "dueling": True},
        {"double_q": False, "dueling": False, "model": GRU, "prioritized_replay": True, "sequence_priority_eta": 0.5},
        {"double_q": True, "value_rescaling": True, "model": LOOKS_BACK},
    ],
)
def test_loss_equals_that_of_steps_taken_one_by_one(settings: dict[str, Any]) -> None:
    config = make_config(huber_delta=0.5, **settings)
    model, other = make_model(config), make_model(config, seed=2)
    batch = make_minibatch(model, 3)
    total, metrics = spec_of(config, model, other).loss(tensors(batch), {})

    online, target = stepped(model, batch), stepped(other, batch)
    weighted, count, priorities = 0.0, 0, []
    for row in range(ROWS):
        sizes = []
        for t in np.flatnonzero(batch[TRAINED][row]):
            behind = batch[FOLLOWING][row, t]
            chooser = online if config.double_q else target
            following = target[row, behind, chooser[row, behind].argmax()]
            if config.value_rescaling:
                following = unrescaled(following)
            wanted = batch[c.N_STEP_RETURNS][row, t] + batch[c.DISCOUNTS][row, t] * following
            wanted = rescaled(wanted) if config.value_rescaling else wanted
            sizes.append(abs(wanted - online[row, t, batch[c.ACTIONS][row, t] - START]))
            loss = 0.5 * sizes[-1] ** 2 if sizes[-1] <= 0.5 else 0.5 * (sizes[-1] - 0.25)
            weighted, count = weighted + batch[WEIGHTS][row] * loss, count + 1
        eta = config.sequence_priority_eta
        priorities.append(eta * max(sizes) + (1 - eta) * np.mean(sizes))
    assert total.numpy() == pytest.approx(weighted / count, rel=1e-4)
    np.testing.assert_allclose(metrics["rows"].numpy(), priorities, rtol=1e-3, atol=1e-5)


def loss_and_gradients(config: DQNConfig, model: QNetwork, batch: dict[str, Any]) -> tuple[float, list[Any]]:
    with tf.GradientTape() as tape:
        total, _ = spec_of(config, model, model).loss(tensors(batch), {})
    kept = tape.gradient(total, model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return float(total), [gradient.numpy() for gradient in kept]


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_a_burn_in_makes_the_state_and_has_no_gradient(cell: dict[str, Any]) -> None:
    """It is as if the steps behind it were a sequence of their own, which begins in the state that it led to."""
    config = make_config(model=cell)
    model = make_model(config)
    batch = make_minibatch(model, 3)
    batch[TRAINED][1] = batch[TRAINED][0]  # none begins its episode
    total, gradients = loss_and_gradients(config, model, batch)

    state = [tf.constant(batch[c.state_in(index)]) for index in range(len(model.state_shapes))]
    for t in range(BURN_IN):
        _, _, state = model.forward_step(tf.constant(batch[c.OBS][:, t]), state)
    rest = {name: array[:, BURN_IN:] if array.ndim > 1 else array for name, array in batch.items()}
    rest[FOLLOWING] = rest[FOLLOWING] - BURN_IN
    rest |= {c.state_in(index): component.numpy() for index, component in enumerate(state)}
    wanted, wanted_gradients = loss_and_gradients(make_config(model=cell, burn_in=0), model, rest)
    assert total == pytest.approx(wanted, rel=1e-5)
    for mine, theirs in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    _, through_all = loss_and_gradients(make_config(model=cell, burn_in=0), model, batch)
    assert any(not np.allclose(mine, theirs, rtol=1e-3) for mine, theirs in zip(gradients, through_all, strict=True))


def test_what_is_not_trained_on_does_not_count() -> None:
    config = make_config()
    model = make_model(config)
    batch = make_minibatch(model, 3)
    total, gradients = loss_and_gradients(config, model, batch)
    other = make_minibatch(model, 4)
    for name in (c.ACTIONS, c.N_STEP_RETURNS, c.DISCOUNTS):
        batch[name] = np.where(batch[TRAINED] > 0, batch[name], other[name])
    batch[c.OBS][1, 4:] = other[c.OBS][1, 4:]  # behind the observation that followed the last step
    batch[c.OBS][2, 4:] = other[c.OBS][2, 4:]
    same, same_gradients = loss_and_gradients(config, model, batch)
    assert same == pytest.approx(total, rel=1e-6)
    for mine, theirs in zip(same_gradients, gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    batch[c.OBS][0, 0] += 1.0
    assert loss_and_gradients(config, model, batch)[0] != pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("settings", [{}, {"model": GRU, "num_atoms": 7, "dueling": False}])
def test_a_worker_acts_by_the_values_of_the_network_and_hands_on_its_state(settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    model = make_model(config, num_mask=NUM_ACTIONS)
    graph, spec = export_acting_graph(model)
    acting = ActingGraph(graph, spec)
    acting.set_weights(model.get_weights())
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(LENGTH, ROWS, NUM_ACTIONS + NUM_OBS)).astype(np.float32)
    obs[..., :NUM_ACTIONS] = [[1, 1, 1], [0, 1, 1], [1, 0, 0]]
    start = state = [rng.normal(size=(ROWS, 5)).astype(np.float32) for _ in model.state_shapes]
    found = []
    for t in range(LENGTH):
        inputs, values, state = acting.run(obs[t], [component.copy() for component in state])
        found.append(inputs.copy())
        np.testing.assert_allclose(values, inputs.max(axis=1), rtol=1e-6)
    given, _ = model.q_sequence(tf.constant(obs), [tf.constant(component) for component in start])
    if model.atoms is not None:
        given = tf.reduce_sum(tf.nn.softmax(given) * model.atoms, axis=-1)
    wanted = np.where(obs[..., :NUM_ACTIONS] > 0, given.numpy().reshape(LENGTH, ROWS, -1), np.float32(MASKED_LOGIT))
    np.testing.assert_allclose(np.stack(found), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"burn_in": LENGTH}, "burn_in"),
        ({"sequence_overlap": BURN_IN - 1}, "sequence_overlap"),
        ({"sequence_overlap": LENGTH}, "sequence_overlap"),
        ({"replay_sequence_length": 11}, "replay_sequence_length"),
        ({"n_step": LENGTH - BURN_IN + 1}, "n_step"),
        ({"train_batch_size": LENGTH - BURN_IN - 1}, "train_batch_size"),
        ({"batch_mode": "complete_episodes"}, "batch_mode"),
        ({"model": {}}, "replay_sequence_length"),
        ({"model": {}, "replay_sequence_length": None}, "burn_in"),
        ({"num_atoms": 5, "value_rescaling": True}, "value_rescaling"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**settings)
    assert caught.value.key == key


def test_workers_send_rewards_and_states_where_sequences_begin() -> None:
    plan = DQN.sample_plan(make_config(model=LOOKS_BACK, sequence_overlap=3))
    assert (plan.postprocess, plan.state_every) == ("none", 3)
    assert plan.of_sequences == (c.state_in(0), c.state_in(1))
    assert {c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.PREV_ACTIONS, c.PREV_REWARDS} <= set(plan.of_rows)
    assert DQN.trains_on_sequences(make_config())
    whole = make_config(replay_sequence_length=None, burn_in=0, model=GRU, train_batch_size=16)
    assert DQN.sample_plan(whole).state_every == 10
    assert DQN.sample_plan(whole).of_sequences == (c.state_in(0),)


def test_the_replay_says_what_its_sequences_take_and_is_refused_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows are 16 sequences of 4 steps that are trained on, with 2 of burn-in and the observation behind them."""
    config = make_config()
    model = make_model(config)
    spec = replay_spec(config, model)
    floats = 7 * NUM_OBS + 6 + 3 * 6 + 6 + 2 * 5
    assert (spec.capacity, spec.bytes_needed) == (16, 16 * 4 * floats)
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * 4 * floats - 1)
    with pytest.raises(ConfigError, match=f"needs {16 * 4 * floats:,} bytes of memory"):
        DQN.check_room([(config, model)])


@pytest.fixture(scope="module")
def trained() -> tuple[DQN, list[Any]]:
    config = make_config(prioritized_replay=True, training_intensity=4)
    algorithm = DQN(config, make_model(config))
    algorithm.warm_up()
    return algorithm, feed(algorithm, range(8))


def test_minibatches_of_whole_sequences_are_made_as_they_become_due(trained: tuple[DQN, list[Any]]) -> None:
    """Two sequences of four trained steps are a minibatch of eight: 20 rows that come make 10 due at 4 a row."""
    algorithm, results = trained
    assert [result.metrics["num_sgd_steps"] for result in results] == [10] * 8
    assert results[-1].metrics["rows_trained"] == 8 * 10 * 8
    assert results[-1].metrics["training_intensity"] == pytest.approx(4.0)
    assert results[-1].metrics["replay_rows"] == 64
    assert algorithm.compiled.traces == 1
    assert algorithm.compiled.rows is not None
    assert algorithm.compiled.rows.shape == (10, 2)
    drawn = algorithm.replay.sample(2, num_batches=50, beta=1.0)
    assert len(np.unique(drawn.weights)) > 10


def test_the_next_update_after_a_restore_is_equal_to_the_bit(trained: tuple[DQN, list[Any]]) -> None:
    config = make_config(prioritized_replay=True, training_intensity=4)
    second = DQN(config, make_model(config, seed=5))
    assert_goes_on_to_the_bit(trained[0], second, lambda algorithm: feed(algorithm, range(50, 53)))


def test_a_fragment_that_would_spoil_the_replay_is_refused() -> None:
    algorithm = DQN(make_config(), make_model(make_config()))
    fragment = make_fragment(1)
    algorithm.check_fragment(fragment)
    fragment[c.state_in(1)][0, 0] = np.nan
    with pytest.raises(BatchError, match="state_in_1"):
        algorithm.check_fragment(fragment)


def test_rows_that_only_reset_are_neither_stored_nor_counted() -> None:
    algorithm = DQN(make_config(), make_model(make_config()))
    nothing = make_fragment(1) | {c.VALID: np.zeros((10, 2), np.bool_)}
    (result,) = [algorithm.update(algorithm.make_batch([nothing]), 0)]
    assert (result.metrics["rows_stored"], result.metrics["num_sgd_steps"]) == (0, 0)
