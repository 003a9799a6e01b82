"""Policies of acting graphs, and a graph with actions that are a robust function of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from onnx import TensorProto, helper

from aiorl.acting.acting_graph import ActingSpec, ArraySpec
from aiorl.acting.graph_policy import GraphPolicy, learned_policy_class
from aiorl.data.spaces import space_from_dict, space_to_dict

SURE = 1e4
"""Logit of the action taken; all others have 0."""


def make_graph(
    obs_shape: tuple[int, ...],
    actions: spaces.Discrete,
    *,
    recurrent: bool,
    uses_previous_step: bool,
) -> tuple[bytes, ActingSpec, dict[str, np.ndarray]]:
    """Make a graph, its description, and weights.

    With h = obs . w + state + (previous action) / 3 + (previous reward) / 5 + b, the action is
    floor(5 |h| + 0.3137) mod A, the value is h, and the next state is half the previous one plus
    the action.
    """
    size, count = int(np.prod(obs_shape)), int(actions.n)
    nodes, initializers = [], []
    made = iter(range(1000))

    def node(kind: str, *inputs: str, out: str = "", **attributes: object) -> str:
        out = out or f"x{next(made)}"
        nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def constant(values: object, dtype: int = TensorProto.FLOAT) -> str:
        array, name = np.asarray(values), f"k{next(made)}"
        initializers.append(helper.make_tensor(name, dtype, array.shape, array.ravel().tolist()))
        return name

    flat = node("Reshape", "obs", constant([0, -1], TensorProto.INT64))
    h = node("Add", node("MatMul", flat, "w"), "b")  # [N, 1]
    inputs = [("obs", TensorProto.FLOAT, ["N", *obs_shape])]
    if recurrent:
        h = node("Add", h, "state_in_0")
        inputs.append(("state_in_0", TensorProto.FLOAT, ["N", 1]))
    if uses_previous_step:
        axis = constant([1], TensorProto.INT64)
        before = node("Unsqueeze", node("Cast", "prev_actions", to=TensorProto.FLOAT), axis)
        reward = node("Unsqueeze", "prev_rewards", axis)
        h = node("Add", h, node("Div", before, constant(3.0)))
        h = node("Add", h, node("Div", reward, constant(5.0)))
        inputs += [
            ("prev_actions", TensorProto.INT64, ["N"]),
            ("prev_rewards", TensorProto.FLOAT, ["N"]),
        ]
    whole = node("Floor", node("Add", node("Mul", node("Abs", h), constant(5.0)), constant(0.3137)))
    action = node(
        "Mod", node("Cast", whole, to=TensorProto.INT64), constant([count], TensorProto.INT64)
    )
    is_action = node("Equal", action, constant(np.arange(count)[None], TensorProto.INT64))
    node("Mul", node("Cast", is_action, to=TensorProto.FLOAT), constant(SURE), out="dist_inputs")
    node("Squeeze", h, constant([1], TensorProto.INT64), out="vf")
    outputs = [("dist_inputs", TensorProto.FLOAT, ["N", count]), ("vf", TensorProto.FLOAT, ["N"])]
    if recurrent:
        half = node("Mul", "state_in_0", constant(0.5))
        node("Add", half, node("Cast", action, to=TensorProto.FLOAT), out="state_out_0")
        outputs.append(("state_out_0", TensorProto.FLOAT, ["N", 1]))
    weights = {
        "w": (1.0 / np.arange(1, size + 1, dtype=np.float32))[:, None],
        "b": np.full(1, 0.25, np.float32),
    }
    for name, weight in weights.items():
        tensor = TensorProto(
            name=name, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL
        )
        tensor.dims.extend(weight.shape)
        tensor.external_data.add(key="location", value="weights")
        initializers.append(tensor)
    graph = helper.make_graph(
        nodes,
        "plain",
        [helper.make_tensor_value_info(*info) for info in inputs],
        [helper.make_tensor_value_info(*info) for info in outputs],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    spec = ActingSpec(
        obs_shape=obs_shape,
        obs_dtype="float32",
        state_shapes=((1,),) if recurrent else (),
        num_dist_inputs=count,
        distribution="categorical",
        action_space=space_to_dict(actions),
        weights=tuple(ArraySpec(name, weight.shape, "float32") for name, weight in weights.items()),
        prev_action=ArraySpec("prev_actions", (), "int64") if uses_previous_step else None,
    )
    return model.SerializeToString(), spec, weights


def load_policy(
    graph: bytes,
    description: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> GraphPolicy:
    """Make a learner's policy without weights, for preprocessed observations."""
    spec = ActingSpec.from_dict(description)
    kind: Any = learned_policy_class(graph, description)
    policy: GraphPolicy = kind(
        spec.observation_space, space_from_dict(spec.action_space), {**(config or {}), "seed": seed}
    )
    return policy
