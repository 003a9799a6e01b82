"""From a Keras network to a worker's policy: the same numbers, even with new weights."""

from __future__ import annotations

import logging
from typing import get_args

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.distributions import make_distribution
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.config.schema import Activation
from aiorl.errors import ExportError
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.export import export_acting_graph, make_acting_spec

DISCRETE = make_distribution(spaces.Discrete(2))
BOX = spaces.Box(-1.0, 1.0, (2,))
SMALL = {"fcnet_hiddens": [8, 8], "lstm_cell_size": 5}
MODELS = {
    "mlp": ((4,), "float32", DISCRETE, SMALL),
    "scalar": ((), "float32", DISCRETE, SMALL | {"fcnet_activation": "relu"}),
    "matrix": (
        (2, 3),
        "float32",
        make_distribution(spaces.MultiDiscrete([2, 3])),
        SMALL | {"fcnet_activation": "silu"},
    ),
    "linear": ((4,), "float32", DISCRETE, {"fcnet_hiddens": []}),
    "free_log_std": (
        (4,),
        "float32",
        make_distribution(spaces.Box(-1.0, 1.0, (2,))),
        SMALL | {"free_log_std": True, "fcnet_activation": "elu"},
    ),
    "bytes": ((6,), "uint8", DISCRETE, SMALL | {"fcnet_activation": "linear"}),
    "nature": ((84, 84, 4), "uint8", DISCRETE, {"vf_share_layers": True}),
    "two_cnns": (
        (12, 12, 1),
        "uint8",
        DISCRETE,
        SMALL | {"conv_filters": [[4, 3, 2]], "fcnet_activation": "gelu"},
    ),
    "lstm": ((4,), "float32", DISCRETE, SMALL | {"use_lstm": True}),
    "gru": ((4,), "float32", DISCRETE, SMALL | {"use_gru": True, "vf_share_layers": True}),
    "uses_previous_step": (
        (4,),
        "float32",
        make_distribution(
            spaces.Tuple(
                [spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3], start=[4, 1]), BOX]
            )
        ),
        SMALL | {"use_lstm": True, "lstm_use_prev_action_reward": True},
    ),
    "looks_back_at_a_choice": (
        (4,),
        "float32",
        DISCRETE,
        SMALL | {"use_gru": True, "lstm_use_prev_action_reward": True, "vf_share_layers": True},
    ),
    "tuple": (
        (4,),
        "float32",
        make_distribution(spaces.Tuple([spaces.Discrete(3), BOX])),
        SMALL | {"fcnet_activation": "swish"},
    ),
    "looks_back_at_bits": (
        (4,),
        "float32",
        make_distribution(spaces.MultiBinary(3)),
        SMALL | {"use_gru": True, "lstm_use_prev_action_reward": True},
    ),
    "cnn_lstm": (
        (12, 12, 1),
        "uint8",
        DISCRETE,
        SMALL | {"conv_filters": [[4, 3, 2]], "use_lstm": True},
    ),
}


def random_previous(policy, rows, seed=0):
    """Return actions and rewards of the previous step, or None."""
    if policy.spec.prev_action is None:
        return None
    rng = np.random.default_rng(seed)
    policy.action_space.seed(seed)
    actions = np.stack([policy.layout.to_row(policy.action_space.sample()) for _ in range(rows)])
    actions[0] = 0  # as at an episode's start, even if 0 is not an action
    return actions, rng.standard_normal(rows).astype(np.float32)


SLOW = {"nature", "cnn_lstm", "looks_back_at_bits"}
"""Large networks of parts that others have, too."""


def random_obs(model, rows, seed=0):
    rng = np.random.default_rng(seed)
    if model.obs_dtype == "uint8":
        return rng.integers(0, 256, (rows, *model.obs_shape), dtype=np.uint8)
    return rng.standard_normal((rows, *model.obs_shape)).astype(np.float32)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS],
)
def test_a_worker_acts_with_the_models_numbers_before_and_after_new_weights(name):
    model = build_model(*MODELS[name], seed=0)
    graph, spec = export_acting_graph(model)
    assert len(graph) < 32_000  # no weight is in it
    policy = OnnxPolicy(graph, ActingSpec.from_dict(spec.to_dict()))
    rng = np.random.default_rng(5)
    for turn in range(2):
        policy.set_weights(model.get_weights())
        for rows in (1, 6):
            obs = random_obs(model, rows, seed=turn)
            state = [
                rng.standard_normal((rows, *shape)).astype(np.float32)
                for shape in model.state_shapes
            ]
            prev = random_previous(policy, rows, seed=turn)
            wanted_inputs, wanted_values, wanted_state = model.forward_step(
                obs, [tf.constant(s) for s in state], *(prev or ())
            )
            dist_inputs, values, state_out = policy.graph.run(obs, state, prev)
            np.testing.assert_allclose(dist_inputs, wanted_inputs, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(values, wanted_values, rtol=1e-4, atol=1e-5)
            for mine, theirs in zip(state_out, wanted_state, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        # every weight must count: new ones for all, zero biases included
        noise = {
            k: w + 0.1 * rng.standard_normal(w.shape).astype(np.float32)
            for k, w in model.get_weights().items()
        }
        model.set_weights(noise)


def test_every_activation_of_the_config_is_that_of_a_network_here():
    used = {settings.get("fcnet_activation", "tanh") for *_, settings in MODELS.values()}
    assert used == set(get_args(Activation))


@pytest.mark.rest_slow
@pytest.mark.parametrize("name", ["lstm", "uses_previous_step", "looks_back_at_a_choice"])
def test_a_sequence_for_learning_equals_the_steps_of_acting(name):
    model = build_model(*MODELS[name], seed=0)
    policy = OnnxPolicy(*export_acting_graph(model))
    policy.set_weights(model.get_weights())
    steps, rows = 4, 3
    obs = np.random.default_rng(0).standard_normal((steps, rows, 4)).astype(np.float32)
    resets = np.random.default_rng(1).random((steps, rows)) < 0.2
    start = [item + np.float32(0.3) for item in policy.initial_state(rows)]
    previous = []
    if model.uses_previous_step:
        pairs = [random_previous(policy, rows, seed=t) for t in range(steps)]
        previous = [np.stack(column) for column in zip(*pairs, strict=True)]
    # XLA for the most complex model
    compiled = tf.function(model.forward_sequence, jit_compile=True, autograph=False)
    evaluate = compiled if name == "uses_previous_step" else model.forward_sequence
    dist_inputs, values = evaluate(
        tf.constant(obs),
        [tf.constant(item) for item in start],
        tf.constant(resets),
        *map(tf.constant, previous),
    )
    state = start
    for t in range(steps):
        for component in state:
            component[resets[t]] = 0.0
        acted_inputs, acted_values, state = policy.graph.run(
            obs[t], state, pairs[t] if previous else None
        )
        np.testing.assert_allclose(dist_inputs[t], acted_inputs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(values[t], acted_values, rtol=1e-5, atol=1e-5)


def test_the_description_lists_every_weight_in_the_models_order():
    model = build_model(*MODELS["mlp"], seed=0)
    spec = make_acting_spec(model)
    assert [weight.name for weight in spec.weights] == list(model.variables)
    assert spec.weights[0].shape == (4, 8)
    assert spec.distribution == "categorical"
    assert spec.num_dist_inputs == 2


class _Changed:
    """Model whose step has changed; everything else is the wrapped model's."""

    def __init__(self, model, step):
        self._model, self._step = model, step

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward_step(self, obs, state, **options):
        return self._step(*self._model.forward_step(obs, state, **options))


def test_an_operator_without_onnx_form_is_an_export_error_with_the_reason():
    def step(dist_inputs, values, state):
        return dist_inputs, tf.numpy_function(lambda x: x, [values], tf.float32), state

    with pytest.raises(ExportError):
        export_acting_graph(_Changed(build_model(*MODELS["mlp"]), step))


def test_a_graph_with_other_numbers_than_the_models_is_an_export_error():
    calls = []

    def step(dist_inputs, values, state):
        calls.append(1)  # traced first, then compared with the graph
        return dist_inputs, values + float(len(calls)), state

    with pytest.raises(ExportError, match="vf"):
        export_acting_graph(_Changed(build_model(*MODELS["mlp"]), step))


def test_exporting_does_not_change_logging():
    logger = logging.getLogger("tf2onnx")
    level = logger.level
    export_acting_graph(build_model(*MODELS["mlp"]))
    assert logger.level == level
