"""A policy as one ONNX file: its acting graph with the weights inside, and the steps around it.

Composed of the bytes in the checkpoint, by NumPy alone: neither TensorFlow nor onnx is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from aiorl.acting.acting_graph import DIST_INPUTS_OUTPUT, OBS_INPUT, ArraySpec
from aiorl.acting.graph_check import DTYPES, to_canonical_graph
from aiorl.acting.onnx_wire import Message, read_model, write_model
from aiorl.errors import ExportError
from aiorl.run.export.form import PolicyForm
from aiorl.run.export.steps import choose_action, normalise

__all__ = ["open_onnx", "to_onnx"]

Array = NDArray[Any]

_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
_PREFIX = "aiorl/"
_WIDE = _PREFIX + DIST_INPUTS_OUTPUT
_ROWS = "N"
_MAX_WEIGHT_BYTES = (2 << 30) - (64 << 20)
"""A file of Protocol Buffers has at most 2 GiB."""
_ORT_ERRORS = 3  # log severity


def to_onnx(form: PolicyForm) -> bytes:
    """The whole policy as a serialised ONNX model.

    Raises: ExportError if its network has no acting graph, or its weights are too large for one file.
    """
    spec = form.spec
    if not form.graph:
        raise ExportError(
            "this network has no ONNX form, as the log of its run said when it began; savedmodel and keras may do"
        )
    if spec.num_weight_bytes > _MAX_WEIGHT_BYTES:
        raise ExportError(f"{spec.num_weight_bytes:,} bytes of weights don't fit into one ONNX file, which has 2 GiB")
    model = read_model(to_canonical_graph(form.graph, {item.name: (item.shape, item.dtype) for item in spec.weights}))
    network = model["graph"]
    weights = form.weights
    initializers = [_tensor(item["name"], weights[item["name"]]) if "external_data" in item else item
                    for item in network.get("initializer", [])]  # fmt: skip
    before = _Nodes("before")
    if form.normalisation is not None:
        _rename(network["node"], {OBS_INPUT: normalise(before, OBS_INPUT, form.normalisation)})
    after = _Nodes("after")
    if spec.num_features:  # what only exploration reads comes behind the inputs of the distribution
        _rename(network["node"], {DIST_INPUTS_OUTPUT: _WIDE}, of_outputs=True)
        after.name_output(after.columns(_WIDE, 0, spec.num_dist_inputs), DIST_INPUTS_OUTPUT)
    for part in form.actions:
        after.name_output(choose_action(after, DIST_INPUTS_OUTPUT, part), part.output.name)
    graph = {
        "node": [*before.nodes, *network["node"], *after.nodes],
        "name": "policy",
        "initializer": [*initializers, *before.constants, *after.constants],
        "input": _value_infos(form.inputs),
        "output": _value_infos(form.outputs),
    }
    return write_model({**model, "producer_name": b"aiorl", "graph": graph})


def open_onnx(path: Path) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """A function from inputs to outputs, both by name, that runs a file.

    Raises: ExportError if ONNX Runtime refuses it.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _ORT_ERRORS
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # onnxruntime's own exceptions have no common base but this
        raise ExportError(f"ONNX Runtime can't load what was written: {error!s:.500}") from error
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    return run


class _Nodes:
    """Writes nodes and constants; a tensor is its name. See `aiorl.run.export.steps.Operations`."""

    def __init__(self, name: str) -> None:
        self.nodes: list[Message] = []
        self.constants: list[Message] = []
        self._prefix = f"{_PREFIX}{name}/"

    def name_output(self, tensor: str, name: str) -> None:
        """Give a tensor a name that the graph's outputs have."""
        self.nodes.append({"op_type": "Identity", "input": [tensor], "output": [name]})

    def add(self, tensor: str, constant: Array) -> str:
        return self._node("Add", tensor, self._constant(constant))

    def subtract(self, tensor: str, constant: Array) -> str:
        return self._node("Sub", tensor, self._constant(constant))

    def multiply(self, tensor: str, constant: Array) -> str:
        return self._node("Mul", tensor, self._constant(constant))

    def minimum(self, tensor: str, constant: Array) -> str:
        return self._node("Min", tensor, self._constant(constant))

    def maximum(self, tensor: str, constant: Array) -> str:
        return self._node("Max", tensor, self._constant(constant))

    def tanh(self, tensor: str) -> str:
        return self._node("Tanh", tensor)

    def is_positive(self, tensor: str) -> str:
        return self._node("Greater", tensor, self._constant(np.zeros((), np.float32)))

    def argmax(self, tensor: str) -> str:
        return self._node("ArgMax", tensor, axis=-1, keepdims=0)

    def columns(self, tensor: str, start: int, stop: int) -> str:
        edges = (self._constant(np.array([edge], np.int64)) for edge in (start, stop, 1))
        return self._node("Slice", tensor, *edges)

    def take(self, tensor: str, columns: NDArray[np.int64], fill: float) -> str:
        widths, value = self._constant(np.array([0, 0, 0, 1], np.int64)), self._constant(np.array(fill, np.float32))
        return self._node("Gather", self._node("Pad", tensor, widths, value), self._constant(columns), axis=1)

    def reshape(self, tensor: str, shape: Sequence[int]) -> str:
        return self._node("Reshape", tensor, self._constant(np.array([-1, *shape], np.int64)))

    def cast(self, tensor: str, dtype: str) -> str:
        return self._node("Cast", tensor, to=_NUMBERS[dtype])

    def _node(self, operator: str, *inputs: str, **attributes: int) -> str:
        name = f"{self._prefix}{operator}_{len(self.nodes)}"
        self.nodes.append({
            "name": name, "op_type": operator, "input": list(inputs), "output": [name],
            "attribute": [{"name": key, "type": 2, "i": value} for key, value in attributes.items()],
        })  # fmt: skip
        return name

    def _constant(self, array: Array) -> str:
        name = f"{self._prefix}constant_{len(self.constants)}"
        self.constants.append(_tensor(name, array))
        return name


def _tensor(name: str, array: Array) -> Message:
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return {
        "name": name,
        "dims": list(array.shape),
        "data_type": _NUMBERS[array.dtype.name],
        "raw_data": little.tobytes(),
    }


def _value_infos(specs: Iterable[ArraySpec]) -> list[Message]:
    return [
        {
            "name": spec.name,
            "type": {
                "tensor_type": {
                    "elem_type": _NUMBERS[spec.dtype],
                    "shape": {"dim": [{"dim_param": _ROWS}, *({"dim_value": size} for size in spec.shape)]},
                }
            },
        }
        for spec in specs
    ]


def _rename(nodes: Iterable[Message], renamed: Mapping[str, str], *, of_outputs: bool = False) -> None:
    """Rename what nodes take, those of inner graphs included, and perhaps what they give."""
    for node in nodes:
        for names in ("input", "output") if of_outputs else ("input",):
            node[names] = [renamed.get(name, name) for name in node.get(names, [])]
        for attribute in node.get("attribute", []):
            _rename(attribute.get("g", {}).get("node", []), renamed, of_outputs=of_outputs)
