"""Export of a policy to one ONNX file: its acting graph with the weights inside, and the steps
around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partialmethod
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from aiorl.acting.acting_graph import (
    DIST_INPUTS_OUTPUT,
    OBS_INPUT,
    PREV_ACTIONS_INPUT,
    ArraySpec,
    without_files,
)
from aiorl.data.columns import Array
from aiorl.errors import ExportError
from aiorl.run.export.check import Runner
from aiorl.run.export.form import (
    PolicyForm,
    actions_before_clipping,
    carry_actions,
    choose_action,
    normalise,
)

_PREFIX = "aiorl/"
_WIDE = _PREFIX + DIST_INPUTS_OUTPUT
_ROWS = "N"
_MAX_WEIGHT_BYTES = (2 << 30) - (64 << 20)
"""Limit on the weights in one file: a Protocol Buffers file has at most 2 GiB."""
_ORT_ERRORS = 3  # log severity


def write_onnx(form: PolicyForm, path: Path) -> Runner:
    """Write an ONNX file that contains the weights, and return a function that runs it.

    Raises:
        ExportError: the network has no acting graph, its weights are too large for one file, or
            ONNX Runtime refuses the file.
    """
    path.write_bytes(_to_onnx(form))
    options = ort.SessionOptions()
    options.log_severity_level = _ORT_ERRORS
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # onnxruntime's exceptions have no narrower common base
        raise ExportError(f"ONNX Runtime can't load the exported file: {error!s:.500}") from error
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _to_onnx(form: PolicyForm) -> bytes:
    """Return the whole policy as a serialised ONNX model."""
    spec = form.spec
    acting_graph = bytes(form.run.acting.graphs[form.parts.policy_id]["graph"])
    if not acting_graph:
        raise ExportError(
            "this network has no ONNX form, as the log at the start of its run says; try savedmodel"
            " or keras"
        )
    if spec.num_weight_bytes > _MAX_WEIGHT_BYTES:
        raise ExportError(
            f"{spec.num_weight_bytes:,} bytes of weights don't fit into one ONNX file of at most"
            " 2 GiB"
        )
    model = ModelProto.FromString(without_files(acting_graph))
    network = model.graph
    weights = {
        without_files(name.encode()).decode(): weight
        for name, weight in form.parts.policy.get_weights().items()
    }
    initializers = [
        numpy_helper.from_array(weights[item.name], item.name) if item.name in weights else item
        for item in network.initializer
    ]
    before = _Nodes("before")
    if form.normalisation is not None:
        _rename(network.node, {OBS_INPUT: normalise(before, OBS_INPUT, form.normalisation)})
    if form.carried is not None:
        previous = actions_before_clipping(
            before,
            PREV_ACTIONS_INPUT,
            form.carried.name,
            form,
        )
        _rename(network.node, {PREV_ACTIONS_INPUT: previous})
    after = _Nodes("after")
    # columns that only exploration reads follow the inputs of the distribution
    if spec.num_features:
        _rename(network.node, {DIST_INPUTS_OUTPUT: _WIDE}, of_outputs=True)
        after.name_output(after.columns(_WIDE, 0, spec.num_dist_inputs), DIST_INPUTS_OUTPUT)
    for part in form.actions:
        after.name_output(choose_action(after, DIST_INPUTS_OUTPUT, part), part.output.name)
    if form.carried_output is not None:
        after.name_output(carry_actions(after, DIST_INPUTS_OUTPUT, form), form.carried_output.name)
    graph = helper.make_graph(
        nodes=[*before.nodes, *network.node, *after.nodes],
        name="policy",
        inputs=_value_infos(form.inputs),
        outputs=_value_infos(form.outputs),
        initializer=[*initializers, *before.constants, *after.constants],
    )
    whole = helper.make_model(
        graph,
        producer_name="aiorl",
        ir_version=model.ir_version,
        opset_imports=model.opset_import,
    )
    return bytes(whole.SerializeToString(deterministic=True))


class _Nodes:
    """Writer of ONNX nodes and constants with the operations of `aiorl.run.export.form`; tensors
    are names.
    """

    def __init__(self, name: str) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._prefix = f"{_PREFIX}{name}/"

    def name_output(self, tensor: str, name: str) -> None:
        """Give a tensor the name of a graph output."""
        self.nodes.append(helper.make_node("Identity", [tensor], [name]))

    def _with_constant(self, operator: str, tensor: str, constant: Array) -> str:
        return self._node(operator, tensor, self._constant(constant))

    add = partialmethod(_with_constant, "Add")
    subtract = partialmethod(_with_constant, "Sub")
    multiply = partialmethod(_with_constant, "Mul")
    minimum = partialmethod(_with_constant, "Min")
    maximum = partialmethod(_with_constant, "Max")

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
        widths = self._constant(np.array([0, 0, 0, 1], np.int64))
        padded = self._node("Pad", tensor, widths, self._constant(np.array(fill, np.float32)))
        return self._node("Gather", padded, self._constant(columns), axis=1)

    def reshape(self, tensor: str, shape: Sequence[int]) -> str:
        return self._node("Reshape", tensor, self._constant(np.array([-1, *shape], np.int64)))

    def where_close(self, first: str, second: str, tolerance: Array, tensor: str) -> str:
        """Return the numbers of a tensor where two others are close, and those of the first of them
        elsewhere.
        """
        difference = self._node("Abs", self._node("Sub", first, second))
        is_close = self._node("LessOrEqual", difference, self._constant(tolerance))
        return self._node("Where", is_close, tensor, first)

    def joined(self, tensors: Sequence[str]) -> str:
        return self._node("Concat", *tensors, axis=1)

    def cast(self, tensor: str, dtype: str) -> str:
        return self._node("Cast", tensor, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def _node(self, operator: str, *inputs: str, **attributes: int) -> str:
        name = f"{self._prefix}{operator}_{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(
                operator,
                inputs,
                outputs=[name],
                name=name,
                **attributes,
            )
        )
        return name

    def _constant(self, array: Array) -> str:
        name = f"{self._prefix}constant_{len(self.constants)}"
        contiguous = np.ascontiguousarray(array).reshape(array.shape)  # it makes scalars 1-D
        self.constants.append(numpy_helper.from_array(contiguous, name))
        return name


def _value_infos(specs: Iterable[ArraySpec]) -> list[ValueInfoProto]:
    return [
        helper.make_tensor_value_info(
            spec.name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), [_ROWS, *spec.shape]
        )
        for spec in specs
    ]


def _rename(
    nodes: Iterable[NodeProto], renamed: Mapping[str, str], *, of_outputs: bool = False
) -> None:
    """Rename the inputs of nodes, and their outputs if asked, including the nodes of inner
    graphs.
    """
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if of_outputs:
            node.output[:] = [renamed.get(name, name) for name in node.output]
        for attribute in node.attribute:
            _rename(attribute.g.node, renamed, of_outputs=of_outputs)
