"""What `onnx` reads in a graph, to hold against what `aiorl.acting.graph_check` makes of it."""

from __future__ import annotations

import copy

from onnx import ModelProto, TensorProto, helper

from aiorl.acting import graph_check
from aiorl.acting.graph_check import to_canonical_graph
from aiorl.errors import PolicyError

SMALL_WEIGHTS = {"w": ((2, 3), "float32")}


def make_small_graph():
    """A graph with something of each kind, small enough that a random change often hits what counts."""
    inner = helper.make_graph(
        [helper.make_node("Neg", ["w"], ["n"])], "i", [], [helper.make_tensor_value_info("n", 1, None)]
    )
    branch = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=copy.deepcopy(inner))
    weight = TensorProto(name="w", dims=[2, 3], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="weights")
    constant = helper.make_tensor("k", TensorProto.INT64, [2], [1, -1])
    nodes = [
        branch,
        helper.make_node("Concat", ["w", "z"], ["y"], axis=-1),
        helper.make_node("Elu", ["y"], ["e"], alpha=0.5),
    ]
    inputs = [helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    outputs = [helper.make_tensor_value_info("e", TensorProto.FLOAT, ["n", 6])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight, constant])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def weights_of(model):
    """What the graph takes from outside."""
    return {
        tensor.name: (tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type).name)
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
    }


def check_against_onnx(graph, weights):
    """Refused; or what `onnx` reads in the bytes and in ours is one, and ours holds nothing but what may be."""
    try:
        canonical = to_canonical_graph(graph, weights)
    except PolicyError:
        return
    theirs, ours = ModelProto.FromString(graph), ModelProto.FromString(canonical)
    assert to_canonical_graph(theirs.SerializeToString(deterministic=True), weights) == canonical
    assert ours.SerializeToString(deterministic=True) == canonical
    allowed = {"ir_version", "graph", "opset_import"}
    assert {field.name for field, _ in ours.ListFields()} <= allowed
    assert weights_of(ours) == weights
    check_graph_of(ours.graph, weights)


def check_graph_of(graph, weights):
    assert {field.name for field, _ in graph.ListFields()} <= {"node", "name", "initializer", "input", "output"}
    for tensor in graph.initializer:
        check_tensor_of(tensor, weights)
    for node in graph.node:
        assert node.domain == ""
        assert node.op_type in graph_check._ALLOWED
        for attribute in node.attribute:
            check_tensor_of(attribute.t, {})
            check_graph_of(attribute.g, {})
            assert {field.name for field, _ in attribute.ListFields()} <= {
                "name",
                "type",
                *graph_check._ATTRIBUTES.values(),
            }


def check_tensor_of(tensor, weights):
    if tensor.external_data or tensor.data_location:
        assert tensor.name in weights
        assert tensor.external_data[0].value == "weights"
