"""Hand-built ONNX graphs, so that these tests need no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from gymnasium import spaces
from onnx import TensorProto, helper

from aiorl.acting.acting_graph import ActingSpec, ArraySpec
from aiorl.acting.distributions import make_distribution
from aiorl.data.spaces import space_to_dict

OBS_SIZE = 3
STATE_SIZE = 2


def external_tensor(
    name: str, shape: tuple[int, ...], location: str = "weights", dtype: int = TensorProto.FLOAT
) -> TensorProto:
    """Return an initialiser with external data."""
    tensor = TensorProto(name=name, dims=shape, data_type=dtype, data_location=TensorProto.EXTERNAL)
    size = 4 * int(np.prod(shape))
    for key, value in (("location", location), ("offset", "0"), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)
    return tensor


class LinearNetwork:
    """Build dist_inputs = obs W + b, vf = sum(dist_inputs), and with state: state_out =
    tanh(state_in + obs U).
    """

    def __init__(
        self, action_space: spaces.Space[Any], *, recurrent: bool = False, squash: bool = False
    ) -> None:
        distribution = make_distribution(action_space, squash=squash)
        self.outputs = distribution.num_inputs
        self.shapes: dict[str, tuple[int, ...]] = {
            "policy/head/kernel": (OBS_SIZE, self.outputs),
            "policy/head/bias": (self.outputs,),
        }
        if recurrent:
            self.shapes["policy/cell/kernel"] = (OBS_SIZE, STATE_SIZE)
        self.recurrent = recurrent
        self.spec = ActingSpec(
            obs_shape=(OBS_SIZE,),
            obs_dtype="float32",
            state_shapes=((STATE_SIZE,),) if recurrent else (),
            num_dist_inputs=self.outputs,
            distribution=distribution.name,
            action_space=space_to_dict(action_space),
            weights=tuple(ArraySpec(name, shape, "float32") for name, shape in self.shapes.items()),
        )

    def model(self) -> onnx.ModelProto:
        nodes = [
            helper.make_node("MatMul", ["obs", "policy/head/kernel"], ["product"]),
            helper.make_node("Add", ["product", "policy/head/bias"], ["dist_inputs"]),
            helper.make_node("ReduceSum", ["dist_inputs", "axes"], ["vf"], keepdims=0),
        ]
        inputs = [helper.make_tensor_value_info("obs", TensorProto.FLOAT, ["n", OBS_SIZE])]
        outputs = [
            helper.make_tensor_value_info("dist_inputs", TensorProto.FLOAT, ["n", self.outputs]),
            helper.make_tensor_value_info("vf", TensorProto.FLOAT, ["n"]),
        ]
        if self.recurrent:
            nodes += [
                helper.make_node("MatMul", ["obs", "policy/cell/kernel"], ["change"]),
                helper.make_node("Add", ["change", "state_in_0"], ["summed"]),
                helper.make_node("Tanh", ["summed"], ["state_out_0"]),
            ]
            inputs.append(
                helper.make_tensor_value_info("state_in_0", TensorProto.FLOAT, ["n", STATE_SIZE])
            )
            outputs.append(
                helper.make_tensor_value_info("state_out_0", TensorProto.FLOAT, ["n", STATE_SIZE])
            )
        initializers = [helper.make_tensor("axes", TensorProto.INT64, [1], [1])]
        initializers += [external_tensor(name, shape) for name, shape in self.shapes.items()]
        graph = helper.make_graph(nodes, "linear", inputs, outputs, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def graph(self, change: Callable[[onnx.ModelProto], None] | None = None) -> bytes:
        model = self.model()
        if change is not None:
            change(model)
        return model.SerializeToString()

    def weights(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in self.shapes.items()
        }

    def expected(
        self, weights: Mapping[str, np.ndarray], obs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        dist_inputs = obs @ weights["policy/head/kernel"] + weights["policy/head/bias"]
        return dist_inputs, dist_inputs.sum(axis=1)


@pytest.fixture
def make_network() -> type[LinearNetwork]:
    return LinearNetwork


@pytest.fixture
def network() -> LinearNetwork:
    return LinearNetwork(spaces.Discrete(4))


@pytest.fixture
def recurrent_network() -> LinearNetwork:
    return LinearNetwork(spaces.Discrete(4), recurrent=True)


@pytest.fixture
def make_external_tensor() -> Callable[..., TensorProto]:
    return external_tensor


class GraphBytes:
    """Protocol Buffers written by hand, for messages that no library would write."""

    @staticmethod
    def varint(number: int) -> bytes:
        written = bytearray()
        while number >= 0x80:
            written.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes([*written, number])

    @classmethod
    def field(cls, number: int, content: bytes) -> bytes:
        return cls.varint(number << 3 | 2) + cls.varint(len(content)) + content

    @classmethod
    def hidden(cls, number: int, value: bytes | int) -> bytes:
        """Return a field with a tag that ONNX Runtime's protobuf reads modulo 2^32."""
        if isinstance(value, int):
            return cls.varint(1 << 32 | number << 3) + cls.varint(value)
        return cls.varint(1 << 32 | number << 3 | 2) + cls.varint(len(value)) + value

    @classmethod
    def model(cls, model: onnx.ModelProto, *more_of_graph: bytes) -> bytes:
        """Return the model with raw fields at the end of its graph."""
        graph = model.graph.SerializeToString() + b"".join(more_of_graph)
        model.ClearField("graph")
        return cls.field(7, graph) + model.SerializeToString()


@pytest.fixture
def by_hand() -> type[GraphBytes]:
    return GraphBytes
