"""Acting graph of a model: an ONNX network without its weights, for workers without TensorFlow.

tf2onnx converts a tf.function of observations, states and all weights, so that the weights are
inputs of the graph. Each weight input is then declared an initialiser with external data, which a
worker supplies by name (`aiorl.acting.acting_graph`). Before the result is returned, it is run once
and compared with the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from aiorl.acting.acting_graph import (
    DIST_INPUTS_OUTPUT,
    NOISE_INPUT,
    OBS_INPUT,
    PREV_ACTIONS_INPUT,
    PREV_REWARDS_INPUT,
    VF_OUTPUT,
    WEIGHTS_LOCATION,
    ActingGraph,
    ActingSpec,
    ArraySpec,
    Previous,
)
from aiorl.data.columns import Array, Columns
from aiorl.data.spaces import space_to_dict
from aiorl.errors import ExportError, PolicyError
from aiorl.learning.models.actor_critic import ActorCritic

logger = logging.getLogger(__name__)

_OPSET = 17
_TOLERANCE = 1e-4


def export_acting_graph(model: ActorCritic) -> tuple[bytes, ActingSpec]:
    """Return the serialised acting graph of the model, and its description.

    The graph doesn't contain the weights, which `model.get_weights` returns.

    Raises:
        ExportError: tf2onnx or ONNX Runtime doesn't support a part of the model, or the graph's
            outputs differ from the model's.
    """
    spec = make_acting_spec(model)
    converted, constants = _convert(model, spec)
    graph = _to_external_weights(converted, constants, spec)
    _check_against_model(model, graph, spec)
    return graph, spec


def describe_policy(
    model: ActorCritic, model_config: Mapping[str, Any] | None
) -> tuple[bytes, dict[str, Any]]:
    """Return the data that a worker needs to act with a model (`aiorl.acting.graph_policy`), except
    the weights.

    Args:
        model: model to act with.
        model_config: settings for `build_model`; None for a model that only its algorithm can
            build.

    Returns:
        The acting graph and its description. For a model without an acting graph, the graph is
        empty and the description makes workers run the model in TensorFlow, which is slower; a
        warning gives the reason.

    Raises:
        ExportError: it has no acting graph and workers can't build the model either.
    """
    try:
        graph, spec = export_acting_graph(model)
    except ExportError as error:
        if model_config is None:
            raise
        logger.warning(
            "The model can't act without TensorFlow, so every worker needs TensorFlow and acts more"
            " slowly: %s",
            error,
        )
        return b"", make_acting_spec(model).to_dict() | {"tf_model": dict(model_config)}
    return graph, spec.to_dict()


def make_acting_spec(model: ActorCritic) -> ActingSpec:
    """Return the description of a model's acting graph."""
    weights = [
        ArraySpec(name, tuple(variable.shape), variable.dtype.name)
        for name, variable in model.variables.items()
    ]
    return ActingSpec(
        obs_shape=model.obs_shape,
        obs_dtype=model.obs_dtype,
        state_shapes=model.state_shapes,
        num_dist_inputs=model.distribution.num_inputs,
        distribution=model.distribution.name,
        action_space=space_to_dict(model.distribution.action_space),
        weights=tuple(weights),
        prev_action=_prev_action(model),
        num_features=model.distribution.num_features,
        noise_size=model.noise_size,
    )


def acting_signature(spec: ActingSpec) -> list[tf.TensorSpec]:
    """Return the inputs of an acting graph except the weights: observations, previous steps if
    needed, states.
    """
    signature = [tf.TensorSpec((None, *spec.obs_shape), spec.obs_dtype, name=OBS_INPUT)]
    if spec.prev_action is not None:
        prev = spec.prev_action
        signature.append(tf.TensorSpec((None, *prev.shape), prev.dtype, name=PREV_ACTIONS_INPUT))
        signature.append(tf.TensorSpec((None,), tf.float32, name=PREV_REWARDS_INPUT))
    for name, shape in zip(spec.state_inputs, spec.state_shapes, strict=True):
        signature.append(tf.TensorSpec((None, *shape), tf.float32, name=name))
    return signature


def _prev_action(model: ActorCritic) -> ArraySpec | None:
    if not model.uses_previous_step:
        return None
    kind = model.distribution
    dtype = "int64" if kind.action_dtype.kind in "iub" else "float32"
    return ArraySpec(PREV_ACTIONS_INPUT, kind.action_shape, dtype)


def _convert(model: ActorCritic, spec: ActingSpec) -> tuple[Any, dict[str, Array]]:
    """Return the ONNX model, with weights as inputs ``weight_0``, ``weight_1``, ..., and captured
    constants.
    """
    # slow to import; only learners that export need it
    from tf2onnx import convert

    names = [weight.name for weight in spec.weights]
    num_previous = 0 if spec.prev_action is None else 2
    num_inputs = num_previous + len(spec.state_shapes)

    def act(obs: Any, *rest: Any) -> dict[str, Any]:
        previous = rest[:num_previous]
        state = rest[num_previous:num_inputs]
        weights = rest[len(rest) - len(names) :]
        dist_inputs, values, state_out = model.forward_step(
            obs,
            list(state),
            *previous,
            weights=dict(zip(names, weights, strict=True)),
            for_acting=True,
            noise=rest[num_inputs] if spec.noise_size else None,
        )
        outputs = {DIST_INPUTS_OUTPUT: dist_inputs, VF_OUTPUT: values}
        for index, component in enumerate(state_out):
            outputs[f"state_out_{index}"] = tf.identity(component)
        return outputs

    signature = acting_signature(spec)
    if spec.noise_size:
        signature.append(tf.TensorSpec((None, spec.noise_size), tf.float32, name=NOISE_INPUT))
    for index, weight in enumerate(spec.weights):
        signature.append(tf.TensorSpec(weight.shape, weight.dtype, name=f"weight_{index}"))
    logger = logging.getLogger("tf2onnx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        # without autograph, as for the update; saves a second
        function = tf.function(act, input_signature=signature, autograph=False)
        converted, _ = convert.from_function(function, input_signature=signature, opset=_OPSET)
        # tensors that a custom layer created earlier, captured by the traced function
        captures = function.get_concrete_function().graph.captures
        constants = {
            inner.name: outer.numpy() for outer, inner in captures if outer.dtype != tf.resource
        }
    except Exception as error:
        # custom layers and the converter can raise anything
        raise ExportError(f"the model can't be exported to ONNX: {error!s:.1000}") from error
    finally:
        logger.setLevel(level)
    return converted, constants


def _to_external_weights(converted: Any, constants: Columns, spec: ActingSpec) -> bytes:
    """Return the serialised ONNX model, in which weights are external data and `constants` are part
    of it.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph = converted.graph
    names = {f"weight_{index}": weight.name for index, weight in enumerate(spec.weights)}
    inputs = []
    for item in graph.input:
        if item.name in constants:
            value = np.asarray(constants[item.name])
            graph.initializer.append(numpy_helper.from_array(value, item.name))
        elif item.name not in names:
            inputs.append(item)
    del graph.input[:]
    graph.input.extend(inputs)
    _rename_inputs(graph, names)
    for weight in spec.weights:
        tensor = TensorProto(name=weight.name, dims=weight.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(np.dtype(weight.dtype))
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=WEIGHTS_LOCATION)
        tensor.external_data.add(key="offset", value="0")
        tensor.external_data.add(key="length", value=str(weight.num_bytes))
        graph.initializer.append(tensor)
    if spec.noise_size:  # default for callers without noise; one row for all
        no_noise = np.zeros((1, spec.noise_size), np.float32)
        graph.initializer.append(numpy_helper.from_array(no_noise, NOISE_INPUT))
    serialised: bytes = converted.SerializeToString()
    return serialised


def _rename_inputs(graph: Any, names: dict[str, str]) -> None:
    """Rename inputs of nodes, also of inner graphs; `names` has the new name of each."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name in names:
                node.input[position] = names[name]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename_inputs(inner, names)


def _check_against_model(model: ActorCritic, graph: bytes, spec: ActingSpec) -> None:
    """Run the graph and the model on the same observations; detects missing operators and folded
    weights.
    """
    rng = np.random.default_rng(0)
    obs: Array = rng.standard_normal((3, *spec.obs_shape)).astype(np.float32)
    if spec.obs_dtype == "uint8":
        obs = rng.integers(0, 256, (3, *spec.obs_shape), dtype=np.uint8)
    state = [rng.standard_normal((3, *shape)).astype(np.float32) for shape in spec.state_shapes]
    prev: Previous | None = None
    if spec.prev_action is not None:
        # zeros mean "no previous action" and need not be in the space
        prev_actions = np.ones((3, *spec.prev_action.shape), spec.prev_action.dtype)
        prev_actions[0] = 0
        prev = (prev_actions, np.full(3, 0.5, np.float32))
    noise = rng.standard_normal((3, spec.noise_size), np.float32) if spec.noise_size else None
    dist_inputs, values, state_out = model.forward_step(
        tf.constant(obs),
        list(map(tf.constant, state)),
        *map(tf.constant, prev or ()),
        for_acting=True,
        noise=noise,
    )
    expected = [output.numpy() for output in (dist_inputs, values, *state_out)]
    try:
        acting = ActingGraph(graph, spec)
        acting.set_weights(model.get_weights())
        dist_inputs, values, state_out = acting.run(obs, state, prev, noise=noise)
    except PolicyError as error:
        raise ExportError(f"the model's acting graph doesn't run: {error}") from error
    outputs = (dist_inputs, values, *state_out)
    for name, right, output in zip(spec.output_names, expected, outputs, strict=True):
        is_close = output.shape == right.shape and np.allclose(
            output, right, rtol=_TOLERANCE, atol=_TOLERANCE
        )
        if not is_close:
            raise ExportError(
                f"the acting graph's {name} differs from the model's; it can't act without"
                " TensorFlow"
            )
