"""Graphs from strangers: nothing but weights may come from outside."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper

from aiorl.errors import PolicyError
from aiorl.policy.graph_check import MAX_GRAPH_BYTES, check_graph


def expected(network):
    return {name: (shape, "float32") for name, shape in network.shapes.items()}


def test_a_graph_with_exactly_its_weights_outside_is_accepted(network, recurrent_network):
    check_graph(network.graph(), expected(network))
    check_graph(recurrent_network.graph(), expected(recurrent_network))


@pytest.mark.parametrize("location", ["/etc/passwd", "../../etc/passwd", "*/_ORT_MEM_ADDR_/*", "", "weights2"])
def test_external_data_anywhere_but_at_the_placeholder_is_refused(network, make_external_tensor, location):
    def change(model):
        del model.graph.initializer[1:]
        for name, shape in network.shapes.items():
            model.graph.initializer.append(make_external_tensor(name, shape, location))

    with pytest.raises(PolicyError, match=r"from outside|from b"):
        check_graph(network.graph(change), expected(network))


def test_an_external_tensor_that_is_no_weight_is_refused(network, make_external_tensor):
    graph = network.graph(lambda model: model.graph.initializer.append(make_external_tensor("spy", (4,))))
    with pytest.raises(PolicyError, match="'spy' from outside"):
        check_graph(graph, expected(network))


@pytest.mark.parametrize("mark", ["location_only", "data_only"])
def test_half_declared_external_data_counts_as_external(network, mark):
    def change(model):
        tensor = model.graph.initializer.add(name="spy", dims=[1], data_type=TensorProto.FLOAT)
        if mark == "location_only":
            tensor.data_location = TensorProto.EXTERNAL
        else:
            tensor.external_data.add(key="location", value="/etc/passwd")

    with pytest.raises(PolicyError, match="spy"):
        check_graph(network.graph(change), expected(network))


def test_external_data_in_a_nodes_attribute_is_refused(network, make_external_tensor):
    def change(model):
        constant = helper.make_node("Constant", [], ["spied"])
        attribute = AttributeProto(name="value", type=AttributeProto.TENSOR)
        attribute.t.CopyFrom(make_external_tensor("policy/head/kernel", (4,)))
        constant.attribute.append(attribute)
        model.graph.node.append(constant)

    with pytest.raises(PolicyError, match="only weights"):
        check_graph(network.graph(change), expected(network))


def test_external_data_in_a_subgraph_is_refused_even_under_a_weights_name(network, make_external_tensor):
    def change(model):
        inner = helper.make_graph([], "inner", [], [], [make_external_tensor("policy/head/bias", (4,))])
        node = helper.make_node("If", ["obs"], ["chosen"])
        node.attribute.append(helper.make_attribute("then_branch", inner))
        model.graph.node.append(node)

    with pytest.raises(PolicyError, match="only weights"):
        check_graph(network.graph(change), expected(network))


def test_endless_nesting_is_refused(network):
    inner = helper.make_graph([], "leaf", [], [])
    for _ in range(20):
        node = helper.make_node("If", ["obs"], ["chosen"])
        node.attribute.append(helper.make_attribute("then_branch", inner))
        inner = helper.make_graph([node], "inner", [], [])

    def change(model):
        node = helper.make_node("If", ["obs"], ["chosen"])
        node.attribute.append(helper.make_attribute("then_branch", inner))
        model.graph.node.append(node)

    with pytest.raises(PolicyError, match="nested"):
        check_graph(network.graph(change), expected(network))


@pytest.mark.parametrize("where", ["graph", "attribute", "attributes"])
def test_sparse_tensors_are_refused(network, where):
    def change(model):
        if where == "graph":
            model.graph.sparse_initializer.add()
            return
        node = model.graph.node.add(op_type="Constant")
        attribute = node.attribute.add(name="value")
        if where == "attribute":
            attribute.sparse_tensor.dims.append(1)
        else:
            attribute.sparse_tensors.add()

    with pytest.raises(PolicyError, match="sparse"):
        check_graph(network.graph(change), expected(network))


def test_operators_from_outside_the_standard_are_refused(network):
    def change(model):
        model.graph.node.append(helper.make_node("EPContext", [], ["x"], domain="com.microsoft"))

    with pytest.raises(PolicyError, match=r"com\.microsoft"):
        check_graph(network.graph(change), expected(network))


@pytest.mark.parametrize("field", ["functions", "training_info"])
def test_functions_and_training_graphs_are_refused(network, field):
    with pytest.raises(PolicyError, match="functions or training"):
        check_graph(network.graph(lambda model: getattr(model, field).add()), expected(network))


def test_a_weight_that_is_missing_or_of_another_kind_is_refused(network, make_external_tensor):
    with pytest.raises(PolicyError, match="no place for the weight 'extra'"):
        check_graph(network.graph(), expected(network) | {"extra": ((1,), "float32")})
    with pytest.raises(PolicyError, match="policy/head/bias"):
        check_graph(network.graph(), expected(network) | {"policy/head/bias": ((5,), "float32")})
    with pytest.raises(PolicyError, match="policy/head/bias"):
        check_graph(network.graph(), expected(network) | {"policy/head/bias": ((4,), "float64")})

    twice = network.graph(lambda model: model.graph.initializer.append(make_external_tensor("policy/head/bias", (4,))))
    with pytest.raises(PolicyError, match="twice"):
        check_graph(twice, expected(network))


def test_a_graph_beyond_the_limit_is_refused_unread():
    with pytest.raises(PolicyError, match=f"at most {MAX_GRAPH_BYTES}"):
        check_graph(bytes(MAX_GRAPH_BYTES + 1), {})


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\x00",
        b"hello world",
        b"\x3a\xff\xff\xff\xff\x0f",  # field 7 claims 4 GiB
        b"\x38\x01",  # field 7 as a number
        b"\x3b",  # a group
        b"\xff" * 20,  # a number without end
        b"\x3a\x02\x0a\x80",  # ends within a number
    ],
    ids=repr,
)
def test_junk_is_a_policy_error(junk):
    with pytest.raises(PolicyError):
        check_graph(junk, {})


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_policy_error(data):
    with pytest.raises(PolicyError):
        check_graph(data, {"weight": ((1,), "float32")})


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_damaged_graph_is_accepted_or_a_policy_error(make_graph, seed):
    graph, weights = make_graph
    rng = np.random.default_rng(seed)
    damaged = bytearray(graph)
    for _ in range(rng.integers(1, 5)):
        damaged[rng.integers(len(damaged))] = rng.integers(256)
    if rng.random() < 0.3:
        del damaged[rng.integers(len(damaged)) :]
    with contextlib.suppress(PolicyError):
        check_graph(bytes(damaged), weights)


@pytest.fixture(scope="module")
def make_graph():
    from onnx import TensorProto as Tensor

    tensor = Tensor(name="w", dims=[2, 3], data_type=Tensor.FLOAT, data_location=Tensor.EXTERNAL)
    tensor.external_data.add(key="location", value="weights")
    graph = helper.make_graph([helper.make_node("Relu", ["w"], ["y"])], "g", [], [], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return model.SerializeToString(), {"w": ((2, 3), "float32")}


def test_the_weights_of_a_continuous_policy_are_found_too(make_network):
    network = make_network(spaces.Box(-1.0, 1.0, (2,)))
    check_graph(network.graph(), expected(network))
