"""64x64 tanh actor and critic for CartPole, as an acting graph and in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from aiorl.acting.acting_graph import ActingSpec, ArraySpec
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.data.spaces import space_to_dict

__all__ = ["NumpyActor", "make_acting_graph", "make_onnx_policy", "mlp_weights"]

F32 = NDArray[np.float32]


def mlp_weights(inputs: int, outputs: int, *, hidden: int = 64, seed: int = 0) -> dict[str, F32]:
    """Return the weights of two towers (``pi``, ``vf``), each with two tanh layers and a linear
    one.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, F32] = {}
    for tower, last in (("pi", outputs), ("vf", 1)):
        sizes = (inputs, hidden, hidden, last)
        for layer in range(3):
            scale = (0.01 if tower == "pi" and layer == 2 else 1.0) / np.sqrt(sizes[layer])
            shape = (sizes[layer], sizes[layer + 1])
            weights[f"{tower}_w{layer}"] = (rng.standard_normal(shape) * scale).astype(np.float32)
            weights[f"{tower}_b{layer}"] = np.zeros(sizes[layer + 1], np.float32)
    return weights


def make_onnx_policy(
    inputs: int, action_space: Any, outputs: int, weights: dict[str, F32]
) -> OnnxPolicy:
    """Return the network as a policy that ONNX Runtime runs."""
    policy = OnnxPolicy(*make_acting_graph(inputs, action_space, outputs, weights))
    policy.set_weights(weights)
    return policy


def make_acting_graph(
    inputs: int, action_space: Any, outputs: int, weights: dict[str, F32]
) -> tuple[bytes, ActingSpec]:
    """Return the network as an acting graph with external weights, and its spec."""
    nodes = []
    for tower in ("pi", "vf"):
        previous = "obs"
        for layer in range(3):
            product, total = f"{tower}_product{layer}", f"{tower}_sum{layer}"
            nodes.append(helper.make_node("MatMul", [previous, f"{tower}_w{layer}"], [product]))
            output = "dist_inputs" if (tower, layer) == ("pi", 2) else total
            nodes.append(helper.make_node("Add", [product, f"{tower}_b{layer}"], [output]))
            previous = output
            if layer < 2:
                previous = f"{tower}_tanh{layer}"
                nodes.append(helper.make_node("Tanh", [total], [previous]))
    nodes.append(helper.make_node("Squeeze", ["vf_sum2", "squeeze_axes"], ["vf"]))
    axes = helper.make_tensor("squeeze_axes", TensorProto.INT64, [1], [1])
    initializers = [axes]
    for name, weight in weights.items():
        tensor = TensorProto()
        tensor.name, tensor.data_type, tensor.data_location = (
            name,
            TensorProto.FLOAT,
            TensorProto.EXTERNAL,
        )
        tensor.dims.extend(weight.shape)
        for key, value in (
            ("location", "weights"),
            ("offset", "0"),
            ("length", str(weight.nbytes)),
        ):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
        initializers.append(tensor)
    graph = helper.make_graph(
        nodes,
        "actor_critic",
        [helper.make_tensor_value_info("obs", TensorProto.FLOAT, ["N", inputs])],
        [
            helper.make_tensor_value_info("dist_inputs", TensorProto.FLOAT, ["N", outputs]),
            helper.make_tensor_value_info("vf", TensorProto.FLOAT, ["N"]),
        ],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    spec = ActingSpec(
        obs_shape=(inputs,),
        obs_dtype="float32",
        state_shapes=(),
        num_dist_inputs=outputs,
        distribution="categorical",
        action_space=space_to_dict(action_space),
        weights=tuple(ArraySpec(name, weight.shape, "float32") for name, weight in weights.items()),
    )
    return model.SerializeToString(), spec


class NumpyActor:
    """The same network in plain NumPy."""

    def __init__(self, weights: dict[str, F32]) -> None:
        """Keep the weights as tuples, so that a step needs no lookup by name."""
        self._pi = [(weights[f"pi_w{layer}"], weights[f"pi_b{layer}"]) for layer in range(3)]
        self._vf = [(weights[f"vf_w{layer}"], weights[f"vf_b{layer}"]) for layer in range(3)]

    def __call__(self, obs: F32) -> tuple[F32, F32]:
        """Return logits [N, A] and values [N]."""
        return self._tower(obs, self._pi), self._tower(obs, self._vf)[:, 0]

    @staticmethod
    def _tower(x: F32, layers: list[tuple[F32, F32]]) -> F32:
        (w0, b0), (w1, b1), (w2, b2) = layers
        hidden: F32 = np.tanh(np.tanh(x @ w0 + b0) @ w1 + b1)
        return hidden @ w2 + b2
