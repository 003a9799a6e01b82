"""CQL: its losses against the same formulas in NumPy, the weight that it learns, what it does with what is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from restored_replays import assert_goes_on_to_the_bit

from aiorl.data import columns as c
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import BatchError, ConfigError
from aiorl.learning.algorithms.actor_replay import SEEDS
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.cql import CQL, CQLConfig
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.replay import spec

NUM_OBS, NUM_ACTIONS, START = 4, 3, 5
BOX = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
CHOICES = spaces.Discrete(NUM_ACTIONS, start=START)


def make_config(**settings: Any) -> CQLConfig:
    small = {
        "env": "E", "input": "data", "seed": 7, "model": {"fcnet_hiddens": [8], "fcnet_activation": "tanh"},
        "rollout_fragment_length": 8,
        "train_batch_size": 4, "training_intensity": 0.5, "replay_capacity": 64, "lr": 0.01, "cql_actions": 3,
        "initial_alpha": 0.5, "cql_weight": 2.0, "eager": True,
    }  # fmt: skip
    return CQLConfig(**{**small, **settings})


def make(config: CQLConfig, space: spaces.Space[Any], num_mask: int = 0) -> CQL:
    layout = ObsLayout((NUM_OBS,), num_mask=num_mask)
    model = CQL.build_model(config, Observations(layout.array_shape, "float32", layout), space, 1)
    return CQL(config, model)


def make_fragment(number: int, space: spaces.Space[Any] = BOX, length: int = 8, piece: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    shape = (length, 1)
    if isinstance(space, spaces.Box):
        actions: Any = rng.uniform(space.low - 1, space.high, (*shape, 2)).astype(np.float32)  # some beyond the bounds
    else:
        actions = START + rng.integers(0, NUM_ACTIONS, shape)
    return {
        c.OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.ACTIONS: actions,
        c.N_STEP_RETURNS: rng.normal(size=shape).astype(np.float32),
        c.DISCOUNTS: rng.choice([0.0, 0.9], shape).astype(np.float32),
        c.PIECE: np.full(shape, piece, np.int64),
    }


def feed(algorithm: CQL, pieces: Any, space: spaces.Space[Any] = BOX) -> list[Any]:
    return [
        algorithm.update(algorithm.make_batch([make_fragment(n, space, piece=n)]), 8 * at)
        for at, n in enumerate(pieces)
    ]


def minibatch_of(space: spaces.Space[Any], num_mask: int = 0) -> dict[str, Any]:
    batch = {name: array[:, 0] for name, array in make_fragment(3, space, 6).items() if name != c.PIECE}
    if num_mask:
        masks = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1], [1, 1, 0]], np.float32)
        batch[c.OBS] = np.concatenate([masks, batch[c.OBS]], axis=1)
        batch[c.NEW_OBS] = np.concatenate([masks[::-1], batch[c.NEW_OBS]], axis=1)
        batch[c.ACTIONS] = START + masks.argmax(axis=1)
    if isinstance(space, spaces.Discrete):
        batch[c.ACTIONS] = batch[c.ACTIONS].astype(np.int32)
    weights = np.random.default_rng(4).random(6).astype(np.float32)
    return {**batch, WEIGHTS: weights, SEEDS: np.array([[1, 2], [3, 4]], np.int32)}


def values_of(algorithm: CQL, prefix: str, obs: Any, actions: Any = None) -> Any:
    """Both critics, layer by layer: [2, B] or [2, B, A]."""
    tensors, found = algorithm.get_state().tensors, []
    inputs = obs if actions is None else np.concatenate([obs, actions], axis=1)
    for name in ("critic_0", "critic_1"):
        kernel, bias = (tensors[f"{prefix}/{name}/dense_0/{part}"] for part in ("kernel", "bias"))
        values = np.tanh(inputs @ kernel + bias) @ tensors[f"{prefix}/{name}/head/kernel"]
        values = values + tensors[f"{prefix}/{name}/head/bias"]
        found.append(values if actions is None else values[:, 0])
    return np.array(found)


def drawn(algorithm: CQL, obs: Any, seed: Any) -> tuple[Any, Any]:
    """Actions in [-1, 1] by the actor, and log-densities over these."""
    inputs = algorithm.actor.outputs(tf.constant(obs))[0].numpy().astype(np.float64)
    mean, log_std = inputs[:, :2], inputs[:, 2:]
    noise = tf.random.stateless_normal([len(obs), 2], seed).numpy()
    unit = np.tanh(mean + np.exp(log_std) * noise)
    logp = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - unit**2)
    return unit, logp.sum(axis=1)


def critic_loss(algorithm: CQL, batch: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    loss, given = algorithm.update_spec().loss({name: tf.constant(array) for name, array in batch.items()}, {})
    return float(loss), given


def test_the_loss_over_a_box_equals_the_formula_in_numpy() -> None:
    """Densities are over [-1, 1], whatever the bounds; stored actions beyond these count as on them."""
    algorithm, batch = make(make_config(), BOX), minibatch_of(BOX)
    loss, given = critic_loss(algorithm, batch)
    next_actions, _ = drawn(algorithm, batch[c.NEW_OBS], batch[SEEDS][0])
    next_q = values_of(algorithm, "target/critics", batch[c.NEW_OBS], next_actions).min(axis=0)
    targets = batch[c.N_STEP_RETURNS] + batch[c.DISCOUNTS] * next_q  # without entropy
    unit = np.clip((batch[c.ACTIONS] - BOX.low) / (BOX.high - BOX.low) * 2 - 1, -1, 1)
    assert (unit == -1).any()
    q = values_of(algorithm, "critics", batch[c.OBS], unit)

    seeds = [tf.random.experimental.stateless_fold_in(batch[SEEDS][0], way) for way in range(3)]
    ways = [(tf.random.stateless_uniform([6, 3, 2], seeds[0], -1.0, 1.0).numpy(), np.full((6, 3), -2 * np.log(2)))]
    for seen, seed in ((batch[c.OBS], seeds[1]), (batch[c.NEW_OBS], seeds[2])):
        actions, logp = drawn(algorithm, np.repeat(seen, 3, axis=0), seed)
        ways.append((actions.reshape(6, 3, 2), logp.reshape(6, 3)))
    sums = np.zeros((2, 6))
    for actions, logp in ways:
        for at in range(3):
            sums += np.exp(values_of(algorithm, "critics", batch[c.OBS], actions[:, at])) / np.exp(logp[:, at])
    gaps = np.log(sums / 9) - q
    losses = (0.5 * (q - targets) ** 2 + 2.0 * gaps).sum(axis=0)
    assert loss == pytest.approx((losses * batch[WEIGHTS]).mean(), rel=1e-4)
    assert float(given["cql_gap"]) == pytest.approx(gaps.mean(), rel=1e-4)


@pytest.mark.parametrize("num_mask", [0, NUM_ACTIONS])
def test_the_loss_over_choices_equals_the_formula_in_numpy(num_mask: int) -> None:
    algorithm, batch = make(make_config(), CHOICES, num_mask), minibatch_of(CHOICES, num_mask)
    loss, given = critic_loss(algorithm, batch)
    logits = algorithm.actor.outputs(tf.constant(batch[c.NEW_OBS]))[0].numpy().astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    seen, following = batch[c.OBS][:, num_mask:], batch[c.NEW_OBS][:, num_mask:]
    next_values = (p * values_of(algorithm, "target/critics", following).min(axis=0)).sum(axis=1)
    targets = batch[c.N_STEP_RETURNS] + batch[c.DISCOUNTS] * next_values
    values = values_of(algorithm, "critics", seen)
    q = values[:, np.arange(6), batch[c.ACTIONS] - START]
    legal = batch[c.OBS][:, :num_mask] if num_mask else np.ones((6, NUM_ACTIONS))
    gaps = np.log((np.exp(values) * legal).sum(axis=2)) - q
    losses = (0.5 * (q - targets) ** 2 + 2.0 * gaps).sum(axis=0)
    assert loss == pytest.approx((losses * batch[WEIGHTS]).mean(), rel=1e-4)
    assert float(given["cql_gap"]) == pytest.approx(gaps.mean(), rel=1e-4)


def test_with_a_target_the_weight_is_learned_in_the_same_compiled_call() -> None:
    """Nothing is traced anew, whatever came; gaps are above their target, so it rises."""
    algorithm = make(make_config(target_gap=-100.0, training_intensity=2, eager=False, xla="off"), BOX)
    algorithm.warm_up()
    results = feed(algorithm, [1, 2, 3, 1, 2, 3])
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, 0, 0, 4, 4, 4]
    assert algorithm.compiled.traces == 1
    assert results[-1].metrics["cql_weight"] > 2.0
    assert algorithm.get_state().tensors["log_cql_weight"] > np.log(2.05)


def test_the_learned_weight_comes_down_again_from_its_bound() -> None:
    """Gaps are below their target, so it falls, although it is beyond the bound."""
    algorithm = make(make_config(target_gap=1e6, cql_weight=1e7, training_intensity=2), BOX)
    before = algorithm.get_state().tensors["log_cql_weight"]
    (result,) = feed(algorithm, [1, 1])[-1:]
    assert result.metrics["cql_weight"] == pytest.approx(1e6)
    assert algorithm.get_state().tensors["log_cql_weight"] < before


def test_each_piece_is_stored_once_and_training_begins_when_one_is_read_again() -> None:
    """Minibatches are due by what is read again, so the training intensity holds."""
    algorithm = make(make_config(), BOX)
    results = feed(algorithm, [1, 2, 3, 2, 1, 3, 3])
    assert [result.metrics["replay_rows"] for result in results] == [8, 16, 24, 24, 24, 24, 24]
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, 0, 0, 1, 1, 1, 1]
    assert results[-1].metrics["training_intensity"] == pytest.approx(0.5)
    assert results[-1].metrics["rows_evicted"] == 0


def test_so_many_rows_read_make_as_many_minibatches_due_if_one_worker_reads_its_share_sooner() -> None:
    """G7: one of two has read pieces 1 and 2 twice before the other has brought 3 and 4."""
    sooner, evenly = (make(make_config(), BOX) for _ in range(2))
    results = feed(sooner, [1, 2, 1, 2, 3, 4, 3, 4])
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, 0, 1, 1, 0, 0, 1, 1]
    last = feed(evenly, [1, 2, 3, 4, 1, 2, 3, 4])[-1]
    assert results[-1].metrics["rows_trained"] == last.metrics["rows_trained"] == 16


def test_what_does_not_fit_into_the_replay_is_stored_again_and_again() -> None:
    """Training begins when the replay is full."""
    algorithm = make(make_config(replay_capacity=16), BOX)
    results = feed(algorithm, [1, 2, 3, 1, 2, 3])
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, 1, 1, 1, 1, 1]
    assert [result.metrics["rows_stored"] for result in results] == [8, 16, 24, 32, 40, 48]


def test_a_replay_that_is_full_of_images_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that follow no other have two images each, so that there is no room for all rows; training begins then."""
    monkeypatch.setattr(spec, "_SPARE_FRAMES", 0)
    monkeypatch.setattr(spec, "RECENT_FRAMES", 0)
    config, shape = make_config(model={"conv_filters": [[2, [4, 4], 4]], "fcnet_hiddens": [4]}), (4, 4, 2)
    seen = Observations(shape, "uint8", ObsLayout(shape))
    algorithm = CQL(config, CQL.build_model(config, seen, CHOICES, 1))
    for number in 2 * list(range(1, 41)):
        images = np.full((1, 1, *shape), number, np.uint8)
        fragment = {**make_fragment(number, CHOICES, piece=number, length=1), c.OBS: images, c.NEW_OBS: images + 100}
        result = algorithm.update(algorithm.make_batch([fragment]), 0)
    assert result.metrics["rows_evicted"] > 0
    assert result.metrics["rows_trained"] == pytest.approx(0.5 * 48, abs=4), "32 rows have room"


def test_rows_of_no_piece_are_always_stored_and_enough_at_learning_starts() -> None:
    """As those of a mixture."""
    algorithm = make(make_config(learning_starts=16), BOX)
    results = feed(algorithm, [0, 0, 0])
    assert [result.metrics["rows_stored"] for result in results] == [8, 16, 24]
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, 1, 1]


def test_the_next_update_after_a_restore_is_equal_to_the_bit() -> None:
    """G5, with the weight, and what was read: it is not stored anew."""
    first, second = (make(make_config(target_gap=1.0, seed=seed), BOX) for seed in (7, 8))
    feed(first, [1, 2, 1])
    assert_goes_on_to_the_bit(first, second, lambda algorithm: feed(algorithm, [2, 1, 4]))
    assert len(second.replay) == 24


def test_a_checkpoint_without_the_replay_has_all_of_it_read_again() -> None:
    first, second = (make(make_config(checkpoint_replay=False), BOX) for _ in range(2))
    feed(first, [1, 2, 1])
    second.set_state(first.get_state())
    results = feed(second, [1, 2, 1])
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, 0, 1]
    assert len(second.replay) == 16


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"postprocess_inputs": False}, "postprocess_inputs"),
        ({"shuffle_buffer_size": 3}, "shuffle_buffer_size"),
        ({"learning_starts": 65}, "learning_starts"),
        ({"input_epochs": 1, "input": "files"}, "input_epochs"),
        ({"random_timesteps": 9, "input": "files"}, "random_timesteps"),
        ({"input": {"one": 0.5, "other": 0.5}}, "learning_starts"),
        ({"input": "package.module:Reader"}, "learning_starts"),
        ({"cql_weight": 0}, "cql_weight"),
        ({"cql_weight_lr": 0.1}, "cql_weight_lr"),
        ({"model": {"use_lstm": True}}, "model.use_lstm"),
        ({"model": {"free_log_std": True}}, "model.free_log_std"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**settings)
    assert caught.value.key == key


def test_without_stored_experience_it_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="stored experience") as caught:
        CQL.lease_plan(make_config(input="sampler"))
    assert caught.value.key == "input"
    assert "--input" in str(caught.value.hint)


def test_a_fragment_whose_pieces_do_not_fit_is_refused() -> None:
    algorithm = make(make_config(), BOX)
    fragment = make_fragment(1)
    algorithm.check_fragment(fragment)
    with pytest.raises(BatchError, match="piece"):
        algorithm.check_fragment({**fragment, c.PIECE: fragment[c.PIECE].astype(np.float32)})
