"""DQN: its loss of rows against the formula in NumPy, and its loss of sequences against single
steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import NUM_OBS, START, Case, descents_of, shapes_written

from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.data import columns as c
from aiorl.errors import BatchError
from aiorl.learning.algorithms.dqn import DQN
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.replay.sequences import FOLLOWING, TRAINED
from aiorl.learning.steps import WEIGHTS

NUM_ACTIONS = 3
VARIANTS: list[dict[str, Any]] = [
    {"double_q": False, "dueling": False},
    {"double_q": True, "dueling": True, "dueling_hiddens": [6]},
    {"double_q": True, "dueling": True, "num_atoms": 11, "v_min": -3.0, "v_max": 4.0},
]
LENGTH, BURN_IN, ROWS = 6, 2, 3
LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 5}
GRU: dict[str, Any] = {"use_gru": True, "lstm_cell_size": 5}
LOOKS_BACK = {**LSTM, "lstm_use_prev_action_reward": True}
SEQUENCES: dict[str, Any] = {
    "model": LSTM,
    "rollout_fragment_length": 10,
    "replay_sequence_length": LENGTH,
    "burn_in": BURN_IN,
    "n_step": 2,
    "train_batch_size": 8,
    "training_intensity": 1.2,
    "learning_starts": 16,
    "prioritized_replay": False,
}


def loss_of(case: Case, other: Any, batch: dict[str, Any]) -> Any:
    """Return the loss and its metrics, with the weights of another network in the target."""
    for name, variable in case.learner.update_plan.targets["target"].variables.items():
        variable.assign(other.variables[name])
    (descent,) = descents_of(case.learner.update_plan.loop.step)
    return descent.loss({name: tf.constant(array) for name, array in batch.items()}, {})


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def project(returns: Any, discounts: Any, probabilities: Any, atoms: Any) -> Any:
    """Project by algorithm 1 of Bellemare et al., one atom at a time."""
    out, step = np.zeros_like(probabilities), atoms[1] - atoms[0]
    for row in range(len(returns)):
        for atom, share in zip(atoms, probabilities[row], strict=True):
            place = (
                np.clip(returns[row] + discounts[row] * atom, atoms[0], atoms[-1]) - atoms[0]
            ) / step
            low, high = int(np.floor(place)), int(np.ceil(place))
            if low == high:
                out[row, low] += share
            else:
                out[row, low] += share * (high - place)
                out[row, high] += share * (place - low)
    return out


@pytest.mark.parametrize("settings", VARIANTS)
def test_loss_of_rows_equals_the_formula_in_numpy(settings: dict[str, Any]) -> None:
    delta = {} if "num_atoms" in settings else {"huber_delta": 0.5}
    case, other = Case("dqn", **delta, **settings), Case("dqn", net_seed=2, **settings).model
    fragment = case.fragment(3, ROWS, 2)
    batch = {name: array.reshape(6, *array.shape[2:]) for name, array in fragment.items()}
    batch[c.ACTIONS] = batch[c.ACTIONS].astype(np.int32)
    batch[WEIGHTS] = np.random.default_rng(3).random(6).astype(np.float32)
    total, given = loss_of(case, other, batch)

    def values(network: Any, obs: Any) -> Any:
        return network.q(tf.constant(obs))[0].numpy()

    rows, actions = np.arange(6), batch[c.ACTIONS] - START
    now, then = values(case.model, batch[c.OBS]), values(other, batch[c.NEW_OBS])
    chooser = values(case.model, batch[c.NEW_OBS]) if case.config.double_q else then
    returns, discounts = batch[c.N_STEP_RETURNS], batch[c.DISCOUNTS]
    if (atoms := case.model.atoms) is None:
        errors = returns + discounts * then[rows, chooser.argmax(axis=1)] - now[rows, actions]
        size = np.abs(errors)
        losses, priorities = np.where(size <= 0.5, 0.5 * size**2, 0.5 * (size - 0.25)), size
    else:
        best = (softmax(chooser) * atoms).sum(axis=-1).argmax(axis=1)
        wanted = project(returns, discounts, softmax(then[rows, best]), atoms)
        losses = -(wanted * np.log(softmax(now[rows, actions]))).sum(axis=-1)
        priorities = losses + (wanted * np.log(np.maximum(wanted, 1e-30))).sum(axis=-1)
    assert total.numpy() == pytest.approx((losses * batch[WEIGHTS]).mean(), rel=1e-4)
    np.testing.assert_allclose(given[c.PRIORITIES].numpy(), priorities, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_worker_acts_by_the_values_of_the_network_and_never_takes_a_masked_action(
    settings: dict[str, Any],
) -> None:
    model = Case("dqn", num_mask=NUM_ACTIONS, **settings).model
    graph, spec = export_acting_graph(model)
    assert spec.distribution == "greedy"
    acting = ActingGraph(graph, spec)
    acting.set_weights(model.get_weights())
    obs = np.random.default_rng(0).normal(size=(5, NUM_ACTIONS + NUM_OBS)).astype(np.float32)
    obs[:, :NUM_ACTIONS] = [[1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 1]]
    inputs, values, _ = acting.run(obs)
    is_masked = obs[:, :NUM_ACTIONS] == 0
    assert (inputs[is_masked] == np.float32(MASKED_LOGIT)).all()
    assert (np.abs(inputs[~is_masked]) < 10).all()
    np.testing.assert_allclose(values, inputs.max(axis=1), rtol=1e-6)
    actions = model.distribution.deterministic(inputs)
    assert not is_masked[np.arange(5), actions - START].any()


def test_streams_after_convolutions_are_relu_like_the_convolutions() -> None:
    """Wang et al. 2016; fcnet_activation is for networks without convolutions."""
    model = Case("dqn", obs_shape=(10, 10, 1), dueling_hiddens=[6]).model
    obs, weights = (
        np.random.default_rng(0).integers(0, 256, (3, 10, 10, 1), np.uint8),
        model.get_weights(),
    )
    features = model._branches[0].step(obs, None, [])[0].numpy()
    streams = [
        np.maximum(
            features @ weights[f"{name}/dense_0/kernel"] + weights[f"{name}/dense_0/bias"], 0.0
        )
        @ weights[f"{name}/head/kernel"]
        + weights[f"{name}/head/bias"]
        for name in ("value", "advantage")
    ]
    expected = streams[0] + streams[1] - streams[1].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(model.q(obs)[0].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_workers_explore_by_a_schedule_or_each_with_its_own_share() -> None:
    own = DQN.acting_settings(Case("dqn", epsilon_schedule=[[0, 0.5], [9, 0.1]]).config)
    assert own == {"exploration": {"type": "EpsilonGreedy", "epsilon": [[0, 0.5], [9, 0.1]]}}
    own = DQN.acting_settings(Case("dqn", per_worker_epsilon=True, num_workers=2).config)
    assert own == {"exploration": {"type": "PerWorkerEpsilonGreedy"}}


def make_minibatch(model: Any, seed: int) -> dict[str, Any]:
    """Make three sequences: a whole one, one that is a whole episode, and one cut short after its
    burn-in.
    """
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
    batch |= {
        c.state_in(index): rng.normal(size=(ROWS, *shape))
        for index, shape in enumerate(model.state_shapes)
    }
    found = {name: array.astype(np.float32) for name, array in batch.items()}
    for name, length in ((c.ACTIONS, LENGTH), (c.PREV_ACTIONS, LENGTH + 1)):
        found[name] = (START + rng.integers(0, NUM_ACTIONS, (ROWS, length))).astype(np.int32)
    found[FOLLOWING] = np.array(
        [[2, 3, 4, 5, 6, 6], [2, 3, 3, 4, 5, 6], [2, 3, 3, 4, 5, 6]], np.int32
    )
    return found


def stepped(network: Any, batch: dict[str, Any]) -> Any:
    """Return Q values [B, L + 1, A], one step after the other, as a worker acts."""
    state = [tf.constant(batch[c.state_in(index)]) for index in range(len(network.state_shapes))]
    values = []
    for t in range(LENGTH + 1):
        before = (
            (batch[c.PREV_ACTIONS][:, t], batch[c.PREV_REWARDS][:, t])
            if network.uses_previous_step
            else ()
        )
        q, _, state = network.forward_step(
            tf.constant(batch[c.OBS][:, t]), state, *map(tf.constant, before)
        )
        values.append(q.numpy())
    return np.stack(values, axis=1)


def rescaled(x: Any) -> Any:
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def unrescaled(y: float) -> float:
    """Invert by bisection, independently of the formula of the inverse."""
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rescaled(middle) < y else (low, middle)
    return low


@pytest.mark.parametrize(
    "settings",
    [
        {"double_q": True, "dueling": True},
        {
            "double_q": False,
            "dueling": False,
            "model": GRU,
            "prioritized_replay": True,
            "sequence_priority_eta": 0.5,
        },
        {"double_q": True, "value_rescaling": True, "model": LOOKS_BACK},
    ],
)
def test_loss_of_sequences_equals_that_of_single_steps(settings: dict[str, Any]) -> None:
    case, other = (
        Case("dqn", net_seed=seed, **{**SEQUENCES, "huber_delta": 0.5, **settings})
        for seed in (1, 2)
    )
    config, batch = case.config, make_minibatch(case.model, 3)
    total, metrics = loss_of(case, other.model, batch)

    online, target = stepped(case.model, batch), stepped(other.model, batch)
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
    np.testing.assert_allclose(metrics[c.PRIORITIES].numpy(), priorities, rtol=1e-3, atol=1e-5)


def loss_and_gradients(case: Case, batch: dict[str, Any]) -> tuple[float, list[Any]]:
    with tf.GradientTape() as tape:
        total, _ = loss_of(case, case.model, batch)
    kept = tape.gradient(
        total, case.model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return float(total), [gradient.numpy() for gradient in kept]


def test_a_burn_in_updates_the_state_and_has_no_gradient() -> None:
    """The steps after it are like a sequence of their own, which begins in the state after the
    burn-in.
    """
    case, without = (Case("dqn", **{**SEQUENCES, "burn_in": burn_in}) for burn_in in (BURN_IN, 0))
    model = case.model
    without.model.set_weights(model.get_weights())
    batch = make_minibatch(model, 3)
    batch[TRAINED][1] = batch[TRAINED][0]  # no sequence begins its episode
    total, gradients = loss_and_gradients(case, batch)

    state = [tf.constant(batch[c.state_in(index)]) for index in range(len(model.state_shapes))]
    for t in range(BURN_IN):
        _, _, state = model.forward_step(tf.constant(batch[c.OBS][:, t]), state)
    rest = {name: array[:, BURN_IN:] if array.ndim > 1 else array for name, array in batch.items()}
    rest[FOLLOWING] = rest[FOLLOWING] - BURN_IN
    rest |= {c.state_in(index): component.numpy() for index, component in enumerate(state)}
    wanted, wanted_gradients = loss_and_gradients(without, rest)
    assert total == pytest.approx(wanted, rel=1e-5)
    for mine, theirs in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    _, through_all = loss_and_gradients(without, batch)
    assert any(
        not np.allclose(mine, theirs, rtol=1e-3)
        for mine, theirs in zip(gradients, through_all, strict=True)
    )


def test_untrained_steps_do_not_count() -> None:
    case = Case("dqn", **SEQUENCES)
    batch, other = make_minibatch(case.model, 3), make_minibatch(case.model, 4)
    total, gradients = loss_and_gradients(case, batch)
    for name in (c.ACTIONS, c.N_STEP_RETURNS, c.DISCOUNTS):
        batch[name] = np.where(batch[TRAINED] > 0, batch[name], other[name])
    batch[c.OBS][1, 4:] = other[c.OBS][1, 4:]  # after the observation that followed the last step
    batch[c.OBS][2, 4:] = other[c.OBS][2, 4:]
    same, same_gradients = loss_and_gradients(case, batch)
    assert same == pytest.approx(total, rel=1e-6)
    for mine, theirs in zip(same_gradients, gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    batch[c.OBS][0, 0] += 1.0
    assert loss_and_gradients(case, batch)[0] != pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("settings", [{}, {"model": GRU, "num_atoms": 7, "dueling": False}])
def test_a_worker_acts_by_the_values_of_the_network_and_keeps_its_state(
    settings: dict[str, Any],
) -> None:
    model = Case("dqn", num_mask=NUM_ACTIONS, **{**SEQUENCES, **settings}).model
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
    wanted = np.where(
        obs[..., :NUM_ACTIONS] > 0,
        given.numpy().reshape(LENGTH, ROWS, -1),
        np.float32(MASKED_LOGIT),
    )
    np.testing.assert_allclose(np.stack(found), wanted, rtol=1e-4, atol=1e-5)


def test_workers_send_rewards_and_the_states_at_the_start_of_sequences() -> None:
    plan = Case("dqn", **{**SEQUENCES, "model": LOOKS_BACK, "sequence_overlap": 3}).plan
    assert (plan.postprocess, plan.state_every) == ("none", 3)
    assert plan.of_sequences == (c.state_in(0), c.state_in(1))
    assert {c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.PREV_ACTIONS, c.PREV_REWARDS} <= set(
        plan.of_rows
    )
    whole = {
        **SEQUENCES,
        "replay_sequence_length": None,
        "burn_in": 0,
        "model": GRU,
        "train_batch_size": 16,
    }
    plan = Case("dqn", **whole).plan
    assert (plan.state_every, plan.of_sequences) == (10, (c.state_in(0),))
    assert Case("dqn", **SEQUENCES).plan.of_sequences


@pytest.mark.slow
def test_due_minibatches_of_whole_sequences_share_one_compilation_also_after_a_restore() -> None:
    """Two sequences of four trained steps make a minibatch of eight: 20 new rows make 10 due at an
    intensity of 4.
    """
    settings = {
        **SEQUENCES,
        "prioritized_replay": True,
        "training_intensity": 4,
        "eager": False,
        "xla": "off",
    }
    case, second = (Case("dqn", **settings, net_seed=seed) for seed in (1, 5))
    case.learner.warm_up()
    written = shapes_written(case.learner)
    results = case.train(*range(8))
    assert [result.metrics["num_sgd_steps"] for result in results] == [10] * 8
    assert results[-1].metrics["rows_trained"] == 8 * 10 * 8
    assert results[-1].metrics["training_intensity"] == pytest.approx(4.0)
    assert results[-1].metrics["replay_rows"] == 64
    assert case.learner.compiled.traces == 1
    assert set(written) == {(10, 2)}
    assert len(np.unique(case.learner.feed.replay.sample(2, num_batches=50, beta=1.0).weights)) > 10
    second.restore(*case.saved())
    for one in (case, second):
        one.train(50, 51)
    for name, tensor in case.tensors.items():
        np.testing.assert_array_equal(second.tensors[name], tensor, name)


def test_bad_fragments_are_refused_and_rows_that_only_reset_are_not_stored() -> None:
    case = Case("dqn", **SEQUENCES)
    fragment = case.fragment()
    case.learner.check_fragment(fragment)
    result = case.update([{**fragment, c.VALID: np.zeros((10, 2), np.bool_)}])
    assert (result.metrics["rows_stored"], result.metrics["num_sgd_steps"]) == (0, 0)
    fragment[c.state_in(1)][0, 0] = np.nan
    with pytest.raises(BatchError, match="state_in_1"):
        case.learner.check_fragment(fragment)
