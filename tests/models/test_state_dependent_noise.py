"""Networks whose features make up the deviations (gSDE): equal to NumPy in every form, and what learns from what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from aiorl.algorithms.actor_network import Actor
from aiorl.config.parts import ModelConfig, SDESettings
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError
from aiorl.models.catalog import build_model
from aiorl.models.distributions import to_tf_distribution
from aiorl.models.export import export_acting_graph
from aiorl.policy.acting_graph import ActingGraph
from aiorl.policy.distributions import make_distribution

BOX = spaces.Box(-1.0, 2.0, (2,))
GAUSSIAN = make_distribution(BOX)
FIXED, LEARNT = SDESettings(-1.0, False), SDESettings(-1.0, True)
OBS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def make(noise: SDESettings = FIXED, **config: Any) -> Any:
    model = build_model((3,), "float32", GAUSSIAN, {"fcnet_hiddens": [8], **config}, seed=1, noise=noise)
    rng = np.random.default_rng(2)
    for name, variable in model.variables.items():
        variable.assign(rng.normal(-1.0 if name == "policy/log_std" else 0.0, 0.4, variable.shape))
    return model


def by_hand(weights: Any, obs: Any) -> tuple[Any, Any, Any]:
    """Means [B, A], variances [B, A] and features [B, F], in float64."""
    features = np.tanh(obs @ weights["policy/dense_0/kernel"] + weights["policy/dense_0/bias"]).astype(np.float64)
    means = features @ weights["policy/head/kernel"] + weights["policy/head/bias"]
    return means, np.square(features) @ np.exp(2.0 * weights["policy/log_std"]), features


def test_log_probability_entropy_and_divergence_are_those_of_the_variances_that_features_make_up() -> None:
    model = make()
    inputs, _ = model.forward(OBS)
    means, variances, _ = by_hand(model.get_weights(), OBS)
    actions = np.random.default_rng(3).normal(size=(6, 2)).astype(np.float32)
    wanted = -0.5 * (np.square(actions - means) / variances + np.log(2 * np.pi * variances)).sum(axis=1)
    entropy = 0.5 * np.log(2 * np.pi * np.e * variances).sum(axis=1)
    kl = 0.5 * (variances[:3] / variances[3:] + np.square(means[:3] - means[3:]) / variances[3:] - 1).sum(axis=1)
    kl += 0.5 * np.log(variances[3:] / variances[:3]).sum(axis=1)
    for kind, given in ((to_tf_distribution(model.distribution), inputs), (model.distribution, inputs.numpy())):
        np.testing.assert_allclose(kind.logp(given, actions), wanted, rtol=1e-4)
        np.testing.assert_allclose(kind.entropy(given), entropy, rtol=1e-4)
        np.testing.assert_allclose(kind.kl(given[:3], given[3:]), kl, rtol=1e-3)
        np.testing.assert_allclose(kind.deterministic(given), means, rtol=1e-5, atol=1e-6)


def test_a_draw_of_the_update_has_the_variance_of_the_state() -> None:
    """SAC's reparametrised samples, unsquashed here."""
    model = make()
    rows = np.repeat(OBS[:1], 20_000, axis=0)
    inputs, _ = model.forward(rows)
    actions, _ = to_tf_distribution(model.distribution).sample_with_logp(inputs, tf.constant([1, 2]))
    means, variances, _ = by_hand(model.get_weights(), OBS[:1])
    np.testing.assert_allclose(actions.numpy().mean(axis=0), means[0], atol=4 * np.sqrt(variances.max() / 20_000))
    np.testing.assert_allclose(actions.numpy().var(axis=0), variances[0], rtol=0.05)


@pytest.mark.parametrize("config", [{}, {"vf_share_layers": True}, {"use_lstm": True, "lstm_cell_size": 4}])
def test_workers_get_the_shares_of_features_in_the_deviations(config: dict[str, Any]) -> None:
    """Their squares sum to 1; for a network by hand they are phi sigma over the deviation."""
    model = make(**config)
    graph, spec = export_acting_graph(model)
    acting = ActingGraph(graph, spec)
    acting.set_weights(model.get_weights())
    features = 4 if model.is_recurrent else 8
    assert spec.num_dist_inputs == model.distribution.num_inputs == (2 + features) * 2
    state = [np.full((6, *shape), 0.5, np.float32) for shape in spec.state_shapes]
    inputs, _, _ = acting.run(OBS, state)
    shares = inputs[:, 4:].reshape(6, features, 2)
    np.testing.assert_allclose(np.square(shares).sum(axis=1), 1.0, rtol=1e-3)
    if not config:
        _, variances, found = by_hand(model.get_weights(), OBS)
        sigma = np.exp(model.get_weights()["policy/log_std"])
        wanted = found[:, :, None] * sigma / np.sqrt(variances)[:, None]
        np.testing.assert_allclose(shares, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("noise", "learns"), [(FIXED, False), (LEARNT, True)])
def test_features_learn_from_the_deviations_only_where_they_are_to(noise: SDESettings, learns: bool) -> None:
    model = make(noise)
    with tf.GradientTape() as tape:
        entropy = tf.reduce_sum(to_tf_distribution(model.distribution).entropy(model.forward(OBS)[0]))
    names = ["policy/dense_0/kernel", "policy/log_std"]
    of_features, of_deviations = tape.gradient(entropy, [model.variables[name] for name in names])
    assert of_features.numpy().any() == learns
    weights = model.get_weights()
    _, variances, features = by_hand(weights, OBS)
    shares = np.square(features)[:, :, None] * np.exp(2.0 * weights["policy/log_std"]) / variances[:, None]
    np.testing.assert_allclose(of_deviations, shares.sum(axis=0), rtol=1e-3)


def test_it_is_for_actions_of_a_box_alone() -> None:
    for space in (spaces.Discrete(3), spaces.Tuple([BOX, spaces.Discrete(2)])):
        with pytest.raises(ConfigError, match="use_sde is for actions of a Box") as caught:
            build_model((3,), "float32", make_distribution(space), {}, noise=FIXED)
        assert caught.value.key == "use_sde"
        config, rng = ModelConfig.of({}), np.random.default_rng(0)
        with pytest.raises(ConfigError, match="use_sde is for actions of a Box"):
            Actor(ObsLayout((3,)), "float32", make_distribution(space), config, rng, noise=FIXED)
