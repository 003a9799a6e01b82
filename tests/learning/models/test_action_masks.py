"""Action masks in networks: they are not inputs, but forbid outputs and stop their gradients."""

from __future__ import annotations

import sys
import types

import entropies
import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from masked_env import ACTION_SPACES

from aiorl.acting.distributions import MASKED_LOGIT, make_distribution
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.data import columns as c
from aiorl.data.obs_layout import LaidOutBox, MaskLayout, ObsLayout
from aiorl.errors import PolicyError
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.batch_buffers import PACKED
from aiorl.learning.learner import Learner
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.tf_policy import TFPolicy, learned_tf_policy_class

SMALL = {"fcnet_hiddens": [8], "lstm_cell_size": 4}
MODELS = {
    "mlp": {},
    "shared": {"vf_share_layers": True},
    "lstm": {"use_lstm": True},
    "gru_looking_back": {"use_gru": True, "lstm_use_prev_action_reward": True},
    "custom": {"custom_model": "users_models:one_layer"},
}


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
    def one_layer(obs_shape, num_outputs, model_config):
        assert obs_shape == (3,)
        return keras.Sequential([keras.layers.Input(obs_shape), keras.layers.Dense(num_outputs)])

    monkeypatch.setitem(sys.modules, "users_models", types.SimpleNamespace(one_layer=one_layer))


def masked_model(actions, inner=(3,), dtype="float32", **settings):
    space = ACTION_SPACES[actions]
    layout = ObsLayout(inner, num_mask=MaskLayout(space).size)
    distribution = make_distribution(space)
    return build_model(
        layout.array_shape, dtype, distribution, SMALL | settings, seed=0, layout=layout
    )


def masked_obs(model, *leading, seed=0):
    rng = np.random.default_rng(seed)
    size = model.layout.num_mask
    obs = rng.standard_normal((*leading, *model.obs_shape)).astype(np.float32)
    if model.obs_dtype == "uint8":
        obs = rng.integers(0, 256, (*leading, *model.obs_shape), dtype=np.uint8)
    obs[..., :size] = rng.integers(0, 2, obs[..., :size].shape)
    return obs


def forbidden(model, obs):
    """Return which inputs of the distribution the masks forbid."""
    found = np.zeros((*obs.shape[:-1], model.distribution.num_inputs), bool)
    found[..., model.distribution.choice_inputs] = obs[..., : model.layout.num_mask] == 0
    return found


def step(model, obs):
    state = [tf.zeros((len(obs), *shape)) for shape in model.state_shapes]
    prev = (
        np.zeros((len(obs), *model.distribution.action_shape), np.int64),
        np.zeros(len(obs), np.float32),
    )
    return model.forward_step(obs, state, *(prev if model.uses_previous_step else ()))


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        *(("mlp", actions) for actions in ACTION_SPACES),
        *((name, "tuple") for name in MODELS if name != "mlp"),
    ],
)
def test_the_mask_forbids_outputs_and_is_not_an_input(name, actions):
    model = masked_model(actions, **MODELS[name])
    obs = masked_obs(model, 6)
    inputs, values, _ = step(model, obs)
    everything = obs.copy()
    everything[:, : model.layout.num_mask] = 1
    free_inputs, free_values, _ = step(model, everything)
    is_forbidden = forbidden(model, obs)
    assert is_forbidden.any()
    np.testing.assert_array_equal(inputs.numpy()[is_forbidden], np.float32(MASKED_LOGIT))
    np.testing.assert_allclose(
        inputs.numpy()[~is_forbidden], free_inputs.numpy()[~is_forbidden], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(values, free_values, rtol=1e-5, atol=1e-6)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("actions", "name", "inner", "dtype"),
    [
        ("discrete", "mlp", (3,), "float32"),
        ("dict", "gru_looking_back", (3,), "float32"),
        ("discrete", "custom", (3,), "float32"),
        ("tuple", "mlp", (12, 12, 1), "uint8"),
    ],
)
def test_a_workers_graph_applies_the_mask_too(actions, name, inner, dtype):
    """Without TensorFlow: the exported graph applies the mask, from the observation's array
    alone.
    """
    model = masked_model(actions, inner, dtype, **MODELS[name])
    graph, spec = export_acting_graph(model)
    space = LaidOutBox(-np.inf, np.inf, model.layout, np.float32) if dtype == "float32" else None
    policy = OnnxPolicy(graph, spec, observation_space=space, seed=0)
    policy.set_weights(model.get_weights())
    obs = masked_obs(model, 50)
    layout = MaskLayout(policy.action_space)
    alive = np.setdiff1d(np.arange(50), layout.rows_without_action(obs[:, : model.layout.num_mask]))
    obs = obs[alive]
    result = policy.act(
        obs, policy.initial_state(len(obs)), prev=policy._previous(len(obs), None, None)
    )
    np.testing.assert_array_equal(
        result.columns[c.ACTION_DIST_INPUTS] == np.float32(MASKED_LOGIT), forbidden(model, obs)
    )
    logp = policy.distribution.logp(result.columns[c.ACTION_DIST_INPUTS], result.actions)
    assert (logp > -100).all(), "a forbidden action has a log-probability of -1e30"
    np.testing.assert_allclose(result.columns[c.ACTION_LOGP], logp, rtol=1e-4, atol=1e-5)
    if space is not None:
        assert policy.has_action_mask
        assert len(policy.rows_without_action(obs)) == 0


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("actions", "compiled"), [*((actions, False) for actions in ACTION_SPACES), ("tuple", True)]
)
def test_no_gradient_reaches_forbidden_inputs_and_all_are_finite(actions, compiled):
    """Covers log-probability, entropy and divergence; the numbers equal NumPy's."""
    model = masked_model(actions)
    distribution = to_tf_distribution(model.distribution)
    obs = masked_obs(model, 8)
    masks = obs[:, : model.layout.num_mask]
    for row in MaskLayout(ACTION_SPACES[actions]).rows_without_action(masks):
        masks[row] = 1
    rng = np.random.default_rng(0)
    other = np.where(forbidden(model, obs), np.float32(MASKED_LOGIT), np.float32(0.1))
    raw = rng.standard_normal((8, model.distribution.num_inputs)).astype(np.float32)
    masked = np.where(forbidden(model, obs), np.float32(MASKED_LOGIT), raw)
    chosen = model.distribution.sample(masked, rng)

    def figures(logits):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(logits)
            inputs = model._masked(logits, tf.constant(masks))
            results = (
                distribution.logp(inputs, chosen),
                distribution.entropy(inputs),
                distribution.kl(other, inputs),
            )
        return results, [tape.gradient(result, logits) for result in results]

    function = tf.function(figures, jit_compile=True, autograph=False) if compiled else figures
    results, gradients = function(tf.constant(raw))
    twin = model.distribution
    wanted = (
        twin.logp(masked, chosen),
        entropies.entropy(twin, masked),
        entropies.kl(twin, other, masked),
    )
    for result, expected, gradient in zip(results, wanted, gradients, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        assert np.isfinite(gradient).all()
        assert (gradient.numpy()[forbidden(model, obs)] == 0).all()


SHAPE = {
    "env": "x",
    "seed": 0,
    "rollout_fragment_length": 8,
    "num_envs_per_worker": 4,
    "train_batch_size": 64,
    "eager": True,
}


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {"use_lstm": True}),
        ("impala", {}),
        ("appo", {}),
        pytest.param("ppo", {}, marks=pytest.mark.slow),
        pytest.param("impala", {"use_lstm": True}, marks=pytest.mark.slow),
        pytest.param("appo", {"use_lstm": True}, marks=pytest.mark.slow),
    ],
)
def test_an_update_does_not_change_weights_of_illegal_actions(algo, settings):
    """Even with entropy and divergence in the loss, the head's weights for illegal actions don't
    change.
    """
    never = 3
    model = masked_model("discrete", **settings)
    own = {} if algo == "impala" else {"sgd_minibatch_size": 64, "num_sgd_iter": 1, "kl_coeff": 0.3}
    kind = algorithm_class(algo)
    config = kind.config_class.from_mapping(
        {**SHAPE, **own, "entropy_coeff": 0.1, "lr": 1e-2, "model": settings}
    )
    learner, plan = Learner(kind, config, model), kind.experience(config).sample_plan
    fragments = [legal_fragment(model, plan, seed, never) for seed in range(2)]
    before = model.get_weights()
    batch = learner.make_batch(fragments)
    assert np.isfinite(batch[PACKED]).all()
    result = learner.update(batch, 0)
    assert not result.skipped
    assert all(np.isfinite(value) for value in result.metrics.values())
    after = model.get_weights()
    for name in ("policy/head/kernel", "policy/head/bias"):
        moved = (before[name] != after[name]).reshape(-1, 5).any(axis=0)
        assert moved.tolist() == [index != never for index in range(5)]
    assert 0 < result.metrics["entropy"] < np.log(4)


def legal_fragment(model, plan, seed, never):
    """Return rows [8, 4] with legal actions; the action `never` is illegal in all."""
    rng = np.random.default_rng(seed)
    shape = (8, 4)
    obs = masked_obs(model, *shape, seed=seed)
    masks = obs[..., :5]
    masks[..., never], masks[..., seed] = 0, 1
    inputs = np.where(forbidden(model, obs), np.float32(MASKED_LOGIT), np.float32(0.0)).reshape(
        32, -1
    )
    actions, logp = model.distribution.sample_with_logp(
        inputs, model.distribution.draw_noise(rng, 32)
    )
    flags = np.zeros(shape, bool)
    known = {
        c.OBS: obs,
        c.ACTIONS: actions.reshape(shape),
        c.ACTION_LOGP: logp.reshape(shape),
        c.TERMINATEDS: flags,
        c.TRUNCATEDS: flags,
        c.ACTION_DIST_INPUTS: inputs.reshape(*shape, -1),
        c.LAST_OBS: obs[0],
        c.BOOTSTRAP_VALUES: np.zeros(shape, np.float32),
    }
    for index, state in enumerate(model.state_shapes):
        known[c.state_in(index)] = np.zeros((4, *state), np.float32)
    return {
        name: known[name] if name in known else rng.standard_normal(shape).astype(np.float32)
        for name in plan.columns
    }


def test_a_custom_policy_that_learns_by_itself_gets_masked_outputs():
    layout = ObsLayout((3,), num_mask=5)
    policy = TFPolicy(
        LaidOutBox(-np.inf, np.inf, layout, np.float32), ACTION_SPACES["discrete"], {"model": SMALL}
    )
    obs = masked_obs(policy.model, 4)
    obs[:, :5] = [0, 1, 0, 0, 0]
    assert policy.compute_actions(obs)[0].tolist() == [3] * 4
    assert policy.compute_single_action(obs[0])[0] == 3
    with pytest.raises(PolicyError):
        policy.compute_single_action(np.zeros(8, np.float32))
    again = learned_tf_policy_class(policy.spec, SMALL)(
        policy.observation_space, policy.action_space, {}
    )
    again.set_weights(policy.get_weights())
    np.testing.assert_array_equal(again.graph.run(obs)[0], policy.graph.run(obs)[0])


def test_a_mask_with_the_wrong_number_of_choices_is_refused():
    with pytest.raises(PolicyError, match=r" 4 .* 5 "):
        build_model(
            (7,),
            "float32",
            make_distribution(spaces.Discrete(5)),
            layout=ObsLayout((3,), num_mask=4),
        )
