"""Graphs of strangers: with loops without an end, too many nodes, or nodes that multiply."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from gymnasium import spaces
from onnx import TensorProto, helper
from plain_graph import make_graph

from aiorl.acting import acting_graph
from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.graph_limits import MAX_NODES, has_loops
from aiorl.errors import PolicyError

LONGEST = 2**63 - 1


def plain() -> tuple[onnx.ModelProto, Any, dict[str, Any]]:
    graph, spec, weights = make_graph(
        (3,), spaces.Discrete(2), recurrent=True, uses_previous_step=True
    )
    return onnx.load_from_string(graph), spec, weights


def with_loop(times: int) -> tuple[bytes, Any, dict[str, Any]]:
    """Return a graph whose value goes through a loop first."""
    model, spec, weights = plain()
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Identity", ["go"], ["go_on"]),
        helper.make_node("Identity", ["before"], ["after"]),
    ]
    inputs = [
        info("turn", TensorProto.INT64, []),
        info("go", TensorProto.BOOL, []),
        info("before", TensorProto.FLOAT, None),
    ]
    body = helper.make_graph(
        nodes,
        "body",
        inputs,
        [info("go_on", TensorProto.BOOL, []), info("after", TensorProto.FLOAT, None)],
    )
    (last,) = [node for node in model.graph.node if "vf" in node.output]
    last.output[0] = "vf_before"
    model.graph.initializer.append(helper.make_tensor("times", TensorProto.INT64, [], [times]))
    model.graph.initializer.append(helper.make_tensor("always", TensorProto.BOOL, [], [True]))
    model.graph.node.append(
        helper.make_node("Loop", ["times", "always", "vf_before"], ["vf"], body=body)
    )
    return model.SerializeToString(), spec, weights


@pytest.mark.parametrize("weights_are_inputs", [True, False])
def test_a_loop_without_an_end_is_refused_and_one_that_ends_is_used(
    monkeypatch: pytest.MonkeyPatch, weights_are_inputs: bool
) -> None:
    if not weights_are_inputs:
        monkeypatch.setattr(acting_graph, "_MAX_INPUT_BYTES", -1)
    graph, spec, weights = with_loop(3)
    acting = ActingGraph(graph, spec)
    acting.set_weights(weights)
    plain_graph = ActingGraph(plain()[0].SerializeToString(), spec)
    plain_graph.set_weights(weights)
    row = (
        np.ones((1, 3), np.float32),
        [np.ones((1, 1), np.float32)],
        (np.ones(1, np.int64), np.ones(1, np.float32)),
    )
    np.testing.assert_array_equal(acting.run(*row)[1], plain_graph.run(*row)[1])
    monkeypatch.setattr(acting_graph, "_LOOPS_WITHIN_S", 0.1)
    graph, spec, weights = with_loop(LONGEST)
    with pytest.raises(PolicyError):
        ActingGraph(graph, spec).set_weights(weights)


def test_only_nodes_that_can_run_others_again_are_loops() -> None:
    model, _, _ = plain()
    assert not has_loops(model.SerializeToString())
    inner = helper.make_graph([helper.make_node("Identity", ["b"], ["c"])], "inner", [], [])
    model.graph.node.append(
        helper.make_node("If", ["always"], ["a"], then_branch=inner, else_branch=inner)
    )
    assert not has_loops(model.SerializeToString())
    nested = helper.make_graph(
        [helper.make_node("Scan", ["b"], ["c"], body=inner)], "nested", [], []
    )
    model.graph.node.append(
        helper.make_node("If", ["always"], ["d"], then_branch=nested, else_branch=inner)
    )
    assert has_loops(model.SerializeToString())


@pytest.mark.parametrize("is_nested", [True, False])
def test_too_many_nodes_are_refused_before_anything_is_loaded(is_nested: bool) -> None:
    model, spec, _ = plain()
    nodes = [helper.make_node("Identity", ["obs"], [f"n{number}"]) for number in range(MAX_NODES)]
    if is_nested:
        branch = helper.make_graph(nodes, "branch", [], [])
        nodes = [helper.make_node("If", ["always"], ["a"], then_branch=branch)]
    model.graph.node.extend(nodes)
    with pytest.raises(PolicyError, match="20,000"):
        ActingGraph(model.SerializeToString(), spec)


def test_functions_are_refused() -> None:
    model, spec, _ = plain()
    node = helper.make_node("Identity", ["x"], ["y"])
    model.functions.append(
        helper.make_function("own", "Twice", ["x"], ["y"], [node], model.opset_import)
    )
    with pytest.raises(PolicyError):
        ActingGraph(model.SerializeToString(), spec)


@pytest.mark.parametrize(
    "content", [b"\x3a", b"\x3a\x05a", b"\x0b", b"\xff" * 20, b"\x3a\x02\x0a\x09"]
)
def test_damaged_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(PolicyError):
        has_loops(content)
