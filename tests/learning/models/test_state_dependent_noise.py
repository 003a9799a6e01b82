"""Networks with deviations computed from features (gSDE): equal to NumPy in every form, and trained
as configured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from plain_graph import load_policy

from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.distributions import make_distribution
from aiorl.config.schema import ModelConfig, SDESettings
from aiorl.data import columns as c
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError, ExportError
from aiorl.learning.models import export
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.critics import Actor
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.models.export import describe_policy, export_acting_graph

BOX = spaces.Box(-1.0, 2.0, (2,))
GAUSSIAN = make_distribution(BOX)
FIXED, LEARNT = SDESettings(-1.0, False), SDESettings(-1.0, True)
OBS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def make(noise: SDESettings = FIXED, **config: Any) -> Any:
    model = build_model(
        (3,), "float32", GAUSSIAN, {"fcnet_hiddens": [8], **config}, seed=1, noise=noise
    )
    rng = np.random.default_rng(2)
    for name, variable in model.variables.items():
        variable.assign(rng.normal(-1.0 if name == "policy/log_std" else 0.0, 0.4, variable.shape))
    return model


def by_hand(weights: Any, obs: Any) -> tuple[Any, Any, Any]:
    """Return means [B, A], variances [B, A] and features [B, F], in float64."""
    features = np.tanh(
        obs @ weights["policy/dense_0/kernel"] + weights["policy/dense_0/bias"]
    ).astype(np.float64)
    means = features @ weights["policy/head/kernel"] + weights["policy/head/bias"]
    return means, np.square(features) @ np.exp(2.0 * weights["policy/log_std"]), features


def test_log_probability_entropy_and_divergence_use_the_variances_from_features() -> None:
    model = make()
    inputs, _ = model.forward(OBS)
    means, variances, _ = by_hand(model.get_weights(), OBS)
    actions = np.random.default_rng(3).normal(size=(6, 2)).astype(np.float32)
    wanted = -0.5 * (np.square(actions - means) / variances + np.log(2 * np.pi * variances)).sum(
        axis=1
    )
    entropy = 0.5 * np.log(2 * np.pi * np.e * variances).sum(axis=1)
    kl = 0.5 * (
        variances[:3] / variances[3:] + np.square(means[:3] - means[3:]) / variances[3:] - 1
    ).sum(axis=1)
    kl += 0.5 * np.log(variances[3:] / variances[:3]).sum(axis=1)
    kind = to_tf_distribution(model.distribution)
    np.testing.assert_allclose(kind.entropy(inputs), entropy, rtol=1e-4)
    np.testing.assert_allclose(kind.kl(inputs[:3], inputs[3:]), kl, rtol=1e-3)
    for own, given in ((kind, inputs), (model.distribution, inputs.numpy())):
        np.testing.assert_allclose(own.logp(given, actions), wanted, rtol=1e-4)
    np.testing.assert_allclose(
        model.distribution.deterministic(inputs.numpy()), means, rtol=1e-5, atol=1e-6
    )


def test_samples_of_the_update_have_the_variance_of_the_state() -> None:
    """SAC's reparametrised samples, unsquashed here."""
    model = make()
    rows = np.repeat(OBS[:1], 20_000, axis=0)
    inputs, _ = model.forward(rows)
    actions, _ = to_tf_distribution(model.distribution).sample_with_logp(
        inputs, tf.constant([1, 2])
    )
    means, variances, _ = by_hand(model.get_weights(), OBS[:1])
    np.testing.assert_allclose(
        actions.numpy().mean(axis=0), means[0], atol=4 * np.sqrt(variances.max() / 20_000)
    )
    np.testing.assert_allclose(actions.numpy().var(axis=0), variances[0], rtol=0.05)


@pytest.mark.parametrize(
    "config", [{}, {"use_lstm": True, "lstm_cell_size": 4, "vf_share_layers": True}]
)
def test_workers_get_the_shares_of_features_in_the_deviations(config: dict[str, Any]) -> None:
    """Their squares sum to 1; for a network by hand they are phi sigma divided by the deviation."""
    model = make(**config)
    graph, spec = export_acting_graph(model)
    acting = ActingGraph(graph, spec)
    acting.set_weights(model.get_weights())
    features = 4 if model.is_recurrent else 8
    assert (
        (spec.num_dist_inputs, spec.num_features)
        == (model.distribution.num_inputs, features)
        == (4, features)
    )
    state = [np.full((6, *shape), 0.5, np.float32) for shape in spec.state_shapes]
    outputs, _, _ = acting.run(OBS, state)
    inputs, _, _ = model.forward_step(OBS, state)
    np.testing.assert_allclose(outputs[:, :4], inputs, rtol=1e-4, atol=1e-5)
    shares = outputs[:, 4:].reshape(6, features, 2)
    np.testing.assert_allclose(np.square(shares).sum(axis=1), 1.0, rtol=1e-3)
    if not config:
        _, variances, found = by_hand(model.get_weights(), OBS)
        sigma = np.exp(model.get_weights()["policy/log_std"])
        wanted = found[:, :, None] * sigma / np.sqrt(variances)[:, None]
        np.testing.assert_allclose(shares, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("noise", "learns"), [(FIXED, False), (LEARNT, True)])
def test_features_learn_from_the_deviations_only_if_configured(
    noise: SDESettings, learns: bool
) -> None:
    model = make(noise)
    with tf.GradientTape() as tape:
        entropy = tf.reduce_sum(
            to_tf_distribution(model.distribution).entropy(model.forward(OBS)[0])
        )
    names = ["policy/dense_0/kernel", "policy/log_std"]
    of_features, of_deviations = tape.gradient(entropy, [model.variables[name] for name in names])
    assert of_features.numpy().any() == learns
    weights = model.get_weights()
    _, variances, features = by_hand(weights, OBS)
    shares = (
        np.square(features)[:, :, None]
        * np.exp(2.0 * weights["policy/log_std"])
        / variances[:, None]
    )
    np.testing.assert_allclose(of_deviations, shares.sum(axis=0), rtol=1e-3)


def test_it_is_only_for_actions_of_a_box() -> None:
    for space in (spaces.Discrete(3), spaces.Tuple([BOX, spaces.Discrete(2)])):
        with pytest.raises(ConfigError) as caught:
            build_model((3,), "float32", make_distribution(space), {}, noise=FIXED)
        assert caught.value.key == "use_sde"
        config, rng = ModelConfig.of({}), np.random.default_rng(0)
        with pytest.raises(ConfigError, match="use_sde"):
            Actor(ObsLayout((3,)), "float32", make_distribution(space), config, rng, noise=FIXED)


def test_a_custom_network_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(
            (3,), "float32", GAUSSIAN, {"custom_model": "users_models:policy_only"}, noise=FIXED
        )
    assert caught.value.key == "use_sde"
    assert "model.custom_model" in caught.value.hint


def test_a_network_without_onnx_form_explores_the_same_way_in_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"fcnet_hiddens": [8]}
    model = make(**settings)
    in_onnx = describe_policy(model, settings)

    def fail(*_: Any) -> Any:
        raise ExportError("an operator has no ONNX form")

    monkeypatch.setattr(export, "_convert", fail)
    in_tensorflow = describe_policy(model, settings)
    assert in_tensorflow[0] == b""
    found = []
    for graph, description in (in_onnx, in_tensorflow):
        exploration = {"type": "StateDependentNoise", "sample_freq": 2}
        policy = load_policy(graph, description, config={"exploration": exploration}, seed=5)
        policy.set_weights(model.get_weights())
        found.append([policy.compute_actions(OBS) for _ in range(3)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-3, atol=1e-4)
        assert other[2][c.ACTION_DIST_INPUTS].shape == (6, 4)
    assert not np.allclose(found[0][0][0], found[0][2][0], atol=1e-2), "another matrix"
