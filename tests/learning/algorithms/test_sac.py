"""SAC: its losses against the same formulas in NumPy, its own state, and what workers get of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from restored_replays import assert_goes_on_to_the_bit

from aiorl.acting.acting_graph import ActingGraph
from aiorl.data import columns as c
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError, UnsupportedSpaceError
from aiorl.learning.algorithms.actor_replay import SEEDS
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.algorithms.sac import SAC, SACConfig
from aiorl.learning.models.critics import Actor
from aiorl.learning.models.export import export_acting_graph

NUM_OBS, NUM_ACTIONS, START = 4, 3, 5
BOX = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
CHOICES = spaces.Discrete(NUM_ACTIONS, start=START)


def make_config(**settings: Any) -> SACConfig:
    small = {
        "env": "E", "seed": 7, "model": {"fcnet_hiddens": [8], "fcnet_activation": "tanh"}, "num_envs_per_worker": 2,
        "rollout_fragment_length": 4,
        "train_batch_size": 4, "training_intensity": 3, "learning_starts": 16, "replay_capacity": 64, "lr": 0.01,
        "initial_alpha": 0.5, "eager": True,  # the few minibatches here are over before they would be compiled
    }  # fmt: skip
    return SACConfig(**{**small, **settings})


def make(config: SACConfig, space: spaces.Space[Any], num_mask: int = 0) -> SAC:
    layout = ObsLayout((NUM_OBS,), num_mask=num_mask)
    model = SAC.build_model(config, Observations(layout.array_shape, "float32", layout), space, 1)
    return SAC(config, model)


def make_fragment(number: int, space: spaces.Space[Any], length: int = 4, num_envs: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    shape = (length, num_envs)
    if isinstance(space, spaces.Box):
        actions: Any = rng.uniform(space.low, space.high, (*shape, 2)).astype(np.float32)
    else:
        actions = START + rng.integers(0, NUM_ACTIONS, shape)
    return {
        c.OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.ACTIONS: actions,
        c.N_STEP_RETURNS: rng.normal(size=shape).astype(np.float32),
        c.DISCOUNTS: rng.choice([0.0, 0.9], shape).astype(np.float32),
    }


def feed(algorithm: SAC, numbers: Any, space: spaces.Space[Any] = BOX) -> list[Any]:
    return [algorithm.update(algorithm.make_batch([make_fragment(n, space)]), 8 * n) for n in numbers]


def minibatch_of(space: spaces.Space[Any], num_mask: int = 0) -> dict[str, Any]:
    batch = {name: array[:, 0] for name, array in make_fragment(3, space, 6, 1).items()}
    if num_mask:
        masks = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1], [1, 1, 0]], np.float32)
        batch[c.OBS] = np.concatenate([masks, batch[c.OBS]], axis=1)
        batch[c.NEW_OBS] = np.concatenate([masks[::-1], batch[c.NEW_OBS]], axis=1)
        batch[c.ACTIONS] = START + masks.argmax(axis=1)
    if isinstance(space, spaces.Discrete):
        batch[c.ACTIONS] = batch[c.ACTIONS].astype(np.int32)
    return {
        **batch,
        WEIGHTS: np.random.default_rng(4).random(6).astype(np.float32),
        SEEDS: np.array([[1, 2], [3, 4]], np.int32),
    }


def values_of(algorithm: SAC, prefix: str, obs: Any, actions: Any = None) -> Any:
    """Both critics, layer by layer: [2, B] or [2, B, A]."""
    tensors, found = algorithm.get_state().tensors, []
    inputs = obs if actions is None else np.concatenate([obs, actions], axis=1)
    for name in ("critic_0", "critic_1"):
        kernel, bias = (tensors[f"{prefix}/{name}/dense_0/{part}"] for part in ("kernel", "bias"))
        hidden = np.tanh(inputs @ kernel + bias)
        values = hidden @ tensors[f"{prefix}/{name}/head/kernel"] + tensors[f"{prefix}/{name}/head/bias"]
        found.append(values if actions is None else values[:, 0])
    return np.array(found)


def drawn(algorithm: SAC, obs: Any, seed: Any) -> tuple[Any, Any]:
    """Actions in [-1, 1] by the actor, and their log-densities."""
    inputs = algorithm.actor.outputs(tf.constant(obs))[0].numpy().astype(np.float64)
    mean, log_std = inputs[:, :2], inputs[:, 2:]
    noise = tf.random.stateless_normal([len(obs), 2], seed).numpy()
    unit = np.tanh(mean + np.exp(log_std) * noise)
    logp = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - unit**2)
    return unit, logp.sum(axis=1)


def losses_of(algorithm: SAC, batch: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Of the spec and of its phases, one after the other, without any step between."""
    spec = algorithm.update_spec()
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    first, given = spec.loss(tensors, {})
    further = []
    for phase in spec.phases:
        loss, more = phase.loss({**tensors, **given}, {})
        given = {**given, **more}
        further.append(float(loss))
    return (float(first), given), further


def test_losses_over_a_box_equal_the_formulas_in_numpy() -> None:
    """Also with bounds that are not symmetric: the density is that of the action scaled to [-1, 1]."""
    algorithm, batch = make(make_config(), BOX), minibatch_of(BOX)
    for index, variable in enumerate(algorithm.targets["target/critics"].variables.values()):
        variable.assign(variable + 0.1 * (index + 1))
    (critic, given), (actor, alpha) = losses_of(algorithm, batch)

    next_actions, next_logp = drawn(algorithm, batch[c.NEW_OBS], batch[SEEDS][0])
    next_q = values_of(algorithm, "target/critics", batch[c.NEW_OBS], next_actions).min(axis=0)
    targets = batch[c.N_STEP_RETURNS] + batch[c.DISCOUNTS] * (next_q - 0.5 * next_logp)
    unit = (batch[c.ACTIONS] - BOX.low) / (BOX.high - BOX.low) * 2 - 1
    errors = values_of(algorithm, "critics", batch[c.OBS], unit) - targets
    assert critic == pytest.approx((0.5 * (errors**2).sum(axis=0) * batch[WEIGHTS]).mean(), rel=1e-4)
    np.testing.assert_allclose(given["rows"], np.abs(errors).mean(axis=0), rtol=1e-3)

    actions, logp = drawn(algorithm, batch[c.OBS], batch[SEEDS][1])
    q = values_of(algorithm, "critics", batch[c.OBS], actions).min(axis=0)
    assert actor == pytest.approx((0.5 * logp - q).mean(), rel=1e-4)
    assert alpha == pytest.approx(-np.log(0.5) * (logp - 2).mean(), rel=1e-4)
    assert float(given["entropy"]) == pytest.approx(-logp.mean(), rel=1e-4)


def test_what_is_learned_does_not_depend_on_the_units_of_actions() -> None:
    """Of -0.1 to 0.1 no density has the entropy of -1 that the temperature would otherwise aim at."""
    small = spaces.Box(np.float32(-0.1), np.float32(0.1), (2,))
    large = spaces.Box(np.float32(-100), np.float32(100), (2,))
    learned = []
    for space in (small, large):
        algorithm = make(make_config(), space)
        fragments = [make_fragment(number, small) for number in range(4)]
        for fragment in fragments:
            fragment[c.ACTIONS] *= space.high / small.high
            algorithm.update(algorithm.make_batch([fragment]), 0)
        learned.append(algorithm.get_state().tensors)
    for name, tensor in learned[0].items():
        np.testing.assert_allclose(learned[1][name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("num_mask", [0, NUM_ACTIONS])
def test_losses_over_choices_equal_the_formulas_in_numpy(num_mask: int) -> None:
    """Expectations go over legal actions, and so does the largest entropy that the temperature goes by."""
    algorithm, batch = make(make_config(), CHOICES, num_mask), minibatch_of(CHOICES, num_mask)
    (critic, given), (actor, alpha) = losses_of(algorithm, batch)

    def policy(obs: Any) -> tuple[Any, Any, Any]:
        logits = algorithm.actor.outputs(tf.constant(obs))[0].numpy().astype(np.float64)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p, np.log(np.where(p > 0, p, 1.0)), obs[:, num_mask:]

    p, log_p, seen = policy(batch[c.NEW_OBS])
    next_values = (p * (values_of(algorithm, "target/critics", seen).min(axis=0) - 0.5 * log_p)).sum(axis=1)
    targets = batch[c.N_STEP_RETURNS] + batch[c.DISCOUNTS] * next_values
    p, log_p, seen = policy(batch[c.OBS])
    q = values_of(algorithm, "critics", seen)
    errors = q[:, np.arange(6), batch[c.ACTIONS] - START] - targets
    assert critic == pytest.approx((0.5 * (errors**2).sum(axis=0) * batch[WEIGHTS]).mean(), rel=1e-4)
    assert actor == pytest.approx((p * (0.5 * log_p - q.min(axis=0))).sum(axis=1).mean(), rel=1e-4)
    entropy = -(p * log_p).sum(axis=1)
    legal = batch[c.OBS][:, :num_mask].sum(axis=1) if num_mask else np.full(6, NUM_ACTIONS)
    assert alpha == pytest.approx((np.log(0.5) * (entropy - 0.98 * np.log(legal))).mean(), rel=1e-4)
    assert float(given["entropy"]) == pytest.approx(entropy.mean(), rel=1e-4)


@pytest.fixture(scope="module")
def trained() -> tuple[SAC, list[Any]]:
    """Compiled by XLA; six fragments of eight rows, the first of which is only stored."""
    algorithm = make(make_config(eager=False, xla="on", prioritized_replay=True), BOX)
    before = algorithm.get_state()
    algorithm.warm_up()
    after = algorithm.get_state()
    assert after.values == before.values
    for name, tensor in after.tensors.items():
        np.testing.assert_array_equal(tensor, before.tensors[name], name)
    return algorithm, feed(algorithm, range(6))


def test_all_learn_in_one_compiled_call_and_targets_follow(trained: tuple[SAC, list[Any]]) -> None:
    algorithm, results = trained
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, *[6] * 5]
    assert algorithm.compiled.traces == 1
    metrics = results[-1].metrics
    assert {"mean_q", "entropy", "actor_loss", "alpha", "alpha_loss", "actor_grad_gnorm"} <= metrics.keys()
    assert metrics["alpha"] < 0.5
    first, now = make(make_config(), BOX).get_state().tensors, algorithm.get_state().tensors
    for name in ("weights/policy/head/kernel", "critics/critic_1/head/kernel", "log_alpha"):
        assert (first[name] != now[name]).all(), name
    online, target = (now[f"{kind}/critic_0/head/kernel"] for kind in ("critics", "target/critics"))
    begin = first["critics/critic_0/head/kernel"]
    assert 0 < np.abs(target - begin).mean() < 0.3 * np.abs(online - begin).mean()


def test_the_next_update_after_a_restore_is_equal_to_the_bit() -> None:
    """G5, with targets, temperature, three optimisers, priorities and random numbers."""
    first, second = (
        make(make_config(prioritized_replay=True, training_intensity=1, seed=seed), BOX) for seed in (7, 8)
    )
    feed(first, range(4))
    assert_goes_on_to_the_bit(first, second, lambda algorithm: feed(algorithm, range(50, 52)))


@pytest.mark.parametrize("space", [BOX, CHOICES])
def test_workers_get_the_actor_alone(space: spaces.Space[Any]) -> None:
    algorithm = make(make_config(), space)
    graph, spec = export_acting_graph(algorithm.actor)
    assert {weight.name.partition("/")[0] for weight in spec.weights} == {"policy"}
    assert algorithm.get_weights().keys() == {weight.name for weight in spec.weights}
    acting = ActingGraph(graph, spec)
    acting.set_weights(algorithm.get_weights())
    inputs, values, _ = acting.run(np.random.default_rng(0).normal(size=(50, NUM_OBS)).astype(np.float32))
    assert not values.any()
    assert all(space.contains(action) for action in algorithm.actor.distribution.deterministic(inputs))


def test_decay_that_a_user_sets_is_for_networks_and_not_for_the_temperature() -> None:
    algorithm = make(make_config(optimizer={"weight_decay": 50.0}, training_intensity=1), BOX)
    feed(algorithm, range(3))
    log_alpha = algorithm.get_state().tensors["log_alpha"]
    assert abs(log_alpha - np.log(0.5)) < 0.1, "decay would bring it to 0, a step of Adam by 0.01"


def test_a_temperature_without_a_learning_rate_stays_and_one_critic_is_enough() -> None:
    algorithm = make(make_config(alpha_lr=0, actor_lr=0.1, twin_q=False, training_intensity=1), BOX)
    results = feed(algorithm, range(3))
    assert results[-1].metrics["alpha"] == pytest.approx(0.5)
    assert not any("critic_1" in name for name in algorithm.get_state().tensors)
    assert algorithm.coefficients(0) == {"lr": 0.01, "actor_lr": 0.1, "alpha_lr": 0, "steps_before": 0}


def test_actions_are_uniform_at_first() -> None:
    assert SAC.acting_settings(make_config(random_timesteps=9)) == {
        "exploration": {"type": "StochasticSampling", "random_timesteps": 9}
    }


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {"use_gru": True}}, "model.use_gru"),
        ({"model": {"free_log_std": True}}, "model.free_log_std"),
        ({"model": {"vf_share_layers": True}}, "model.vf_share_layers"),
        ({"target_entropy": "high"}, "target_entropy"),
        ({"target_entropy": 0.5, "target_entropy_scale": 0.5}, "target_entropy_scale"),
        ({"alpha_lr": 0, "target_entropy": 0.5}, "target_entropy"),
        ({"alpha_lr": 0, "target_entropy_scale": 0.5}, "target_entropy_scale"),
        ({"input": "files/*.json"}, "input"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**settings)
    assert caught.value.key == key


@pytest.mark.parametrize("bound", [np.inf, np.finfo(np.float32).max, 1e38])
def test_a_box_without_bounds_that_actions_could_be_squashed_into_is_refused(bound: float) -> None:
    with pytest.raises(UnsupportedSpaceError, match="bounded on both sides"):
        make(make_config(), spaces.Box(-bound, bound, (2,)))


def test_images_go_through_convolutions_of_each_network() -> None:
    config = make_config()
    layout = ObsLayout((10, 10, 1))
    model = SAC.build_model(config, Observations((10, 10, 1), "uint8", layout), BOX, 1)
    assert isinstance(model, Actor)
    algorithm = SAC(config, model)
    obs = tf.zeros([2, 10, 10, 1], tf.uint8)
    assert algorithm.critics.q(obs, tf.zeros([2, 2])).shape == (2, 2)
    assert "critic_1/conv_0/kernel" in algorithm.critics.variables
