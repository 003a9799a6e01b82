"""Graphs from strangers: nothing but weights may come from outside, and only what was understood is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.defs
import onnxruntime as ort
import pytest
from graph_oracle import SMALL_WEIGHTS, check_against_onnx, make_small_graph, weights_of
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from aiorl.acting import graph_check
from aiorl.acting.graph_check import MAX_GRAPH_BYTES, to_canonical_graph
from aiorl.errors import PolicyError

EXPORTED = sorted(Path(__file__).with_name("graphs").glob("*.onnx"))
"""As `aiorl.learning.models.export` makes them: of the catalogue's models, and of users' with loops and branches."""


def expected(network):
    return {name: (shape, "float32") for name, shape in network.shapes.items()}


def test_a_graph_with_exactly_its_weights_outside_is_accepted(network, recurrent_network):
    to_canonical_graph(network.graph(), expected(network))
    to_canonical_graph(recurrent_network.graph(), expected(recurrent_network))


@pytest.mark.parametrize("location", ["/etc/passwd", "../../etc/passwd", "*/_ORT_MEM_ADDR_/*", "", "weights2"])
def test_external_data_anywhere_but_at_the_placeholder_is_refused(network, make_external_tensor, location):
    def change(model):
        del model.graph.initializer[1:]
        for name, shape in network.shapes.items():
            model.graph.initializer.append(make_external_tensor(name, shape, location))

    with pytest.raises(PolicyError, match="from outside"):
        to_canonical_graph(network.graph(change), expected(network))


def test_an_external_tensor_that_is_no_weight_is_refused(network, make_external_tensor):
    graph = network.graph(lambda model: model.graph.initializer.append(make_external_tensor("spy", (4,))))
    with pytest.raises(PolicyError, match="'spy' from outside"):
        to_canonical_graph(graph, expected(network))


@pytest.mark.parametrize("mark", ["location_only", "data_only"])
def test_half_declared_external_data_counts_as_external(network, mark):
    def change(model):
        tensor = model.graph.initializer.add(name="spy", dims=[1], data_type=TensorProto.FLOAT)
        if mark == "location_only":
            tensor.data_location = TensorProto.EXTERNAL
        else:
            tensor.external_data.add(key="location", value="/etc/passwd")

    with pytest.raises(PolicyError, match="spy"):
        to_canonical_graph(network.graph(change), expected(network))


def test_external_data_in_a_nodes_attribute_is_refused(network, make_external_tensor):
    def change(model):
        constant = helper.make_node("Constant", [], ["spied"])
        attribute = AttributeProto(name="value", type=AttributeProto.TENSOR)
        attribute.t.CopyFrom(make_external_tensor("policy/head/kernel", (4,)))
        constant.attribute.append(attribute)
        model.graph.node.append(constant)

    with pytest.raises(PolicyError, match="only weights"):
        to_canonical_graph(network.graph(change), expected(network))


def test_external_data_in_a_subgraph_is_refused_even_under_a_weights_name(network, make_external_tensor):
    def change(model):
        inner = helper.make_graph([], "inner", [], [], [make_external_tensor("policy/head/bias", (4,))])
        node = helper.make_node("If", ["obs"], ["chosen"])
        node.attribute.append(helper.make_attribute("then_branch", inner))
        model.graph.node.append(node)

    with pytest.raises(PolicyError, match="only weights"):
        to_canonical_graph(network.graph(change), expected(network))


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
        to_canonical_graph(network.graph(change), expected(network))


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
        to_canonical_graph(network.graph(change), expected(network))


def test_operators_from_outside_the_standard_are_refused(network):
    def change(model):
        model.graph.node.append(helper.make_node("EPContext", [], ["x"], domain="com.microsoft"))

    with pytest.raises(PolicyError, match=r"com\.microsoft"):
        to_canonical_graph(network.graph(change), expected(network))


@pytest.mark.parametrize("field", ["functions", "training_info"])
def test_functions_and_training_graphs_are_refused(network, field):
    with pytest.raises(PolicyError, match=field):
        to_canonical_graph(network.graph(lambda model: getattr(model, field).add()), expected(network))


def test_a_weight_that_is_missing_or_of_another_kind_is_refused(network, make_external_tensor):
    with pytest.raises(PolicyError, match="no place for the weight 'extra'"):
        to_canonical_graph(network.graph(), expected(network) | {"extra": ((1,), "float32")})
    with pytest.raises(PolicyError, match="policy/head/bias"):
        to_canonical_graph(network.graph(), expected(network) | {"policy/head/bias": ((5,), "float32")})
    with pytest.raises(PolicyError, match="policy/head/bias"):
        to_canonical_graph(network.graph(), expected(network) | {"policy/head/bias": ((4,), "float64")})

    twice = network.graph(lambda model: model.graph.initializer.append(make_external_tensor("policy/head/bias", (4,))))
    with pytest.raises(PolicyError, match="twice"):
        to_canonical_graph(twice, expected(network))


def test_a_graph_beyond_the_limit_is_refused_unread():
    with pytest.raises(PolicyError, match=f"at most {MAX_GRAPH_BYTES}"):
        to_canonical_graph(bytes(MAX_GRAPH_BYTES + 1), {})


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
        to_canonical_graph(junk, {})


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_policy_error(data):
    with pytest.raises(PolicyError):
        to_canonical_graph(data, {"weight": ((1,), "float32")})


def test_the_weights_of_a_continuous_policy_are_found_too(make_network):
    network = make_network(spaces.Box(-1.0, 1.0, (2,)))
    to_canonical_graph(network.graph(), expected(network))


@pytest.mark.parametrize("path", EXPORTED, ids=lambda path: path.stem)
def test_an_exported_graph_written_anew_computes_the_same_bits(path):
    exported = path.read_bytes()
    model = onnx.load_from_string(exported)
    weights = weights_of(model)
    canonical = to_canonical_graph(exported, weights)
    assert to_canonical_graph(canonical, weights) == canonical
    assert onnx.load_from_string(canonical).SerializeToString(deterministic=True) == canonical

    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in weights.items()}
    first, second = (run(graph, arrays) for graph in (exported, canonical))
    assert len(first) == len(second) >= 2
    for mine, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


def run(graph, weights):
    options = ort.SessionOptions()
    values = [ort.OrtValue.ortvalue_from_numpy(weight) for weight in weights.values()]
    options.add_external_initializers(list(weights), values)
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    dtypes = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}
    feed = {
        item.name: rng.uniform(0, 2, (3, *item.shape[1:])).astype(dtypes[item.type]) for item in session.get_inputs()
    }
    return session.run(None, feed)


def test_what_has_no_effect_is_left_out_and_tensors_are_raw(network):
    def change(model):
        model.producer_name = model.doc_string = model.graph.doc_string = model.graph.node[0].doc_string = "\x1b[2J"
        model.model_version, model.domain = 7, "org.example"
        model.metadata_props.add(key="ort_config", value="{}")
        model.graph.node[0].metadata_props.add(key="k", value="v")
        model.graph.node[1].domain = "ai.onnx"
        model.graph.value_info.add(name="product")
        model.opset_import.add(domain="com.microsoft", version=1)

    raw = network.graph(
        lambda model: model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([1]), "axes"))
    )
    assert to_canonical_graph(network.graph(change), expected(network)) == to_canonical_graph(raw, expected(network))


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1.5, -2.0]], np.float32),
        np.array([np.nan, np.inf]),
        np.array([-5, 7], np.int8),
        np.array([200, 7], np.uint8),
        np.array([-(2**31), 7], np.int32),
        np.array([-(2**63), 7], np.int64),
        np.array([True, False]),
        np.array([1.5, -2.0], np.float16),
        np.zeros((0, 3), np.float32),
        np.array(3, np.int64),
    ],
    ids=lambda array: f"{array.dtype}",
)
@pytest.mark.parametrize("raw", [True, False])
def test_a_tensor_keeps_its_numbers_in_whatever_field_they_were(network, array, raw):
    values = array.tobytes() if raw else array.flatten().tolist()
    tensor = helper.make_tensor("more", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, values, raw)
    written = to_canonical_graph(network.graph(lambda model: model.graph.initializer.append(tensor)), expected(network))
    read = onnx.load_from_string(written).graph.initializer[-1]
    assert read.name == "more"
    np.testing.assert_array_equal(numpy_helper.to_array(read), array, strict=True)


@pytest.mark.parametrize(
    "change",
    [
        {"dims": [3]},
        {"dims": [-1]},
        {"dims": [1] * 33},
        {"dims": [1 << 62, 1 << 62]},
        {"data_type": TensorProto.STRING},
        {"data_type": 99},
        {"data_type": TensorProto.BOOL, "dims": [8], "raw_data": b"\2" * 8, "float_data": []},
        {"float_data": [1.0]},
        {"raw_data": b"", "int32_data": [1, 2]},
        {"raw_data": b"", "data_type": TensorProto.UINT8, "int32_data": [1, 256]},
        {"raw_data": b"", "data_type": TensorProto.INT32, "int32_data": []},
    ],
    ids=str,
)
def test_a_tensor_whose_numbers_dont_fit_it_is_refused(network, change):
    fields = {"name": "more", "dims": [2], "data_type": TensorProto.FLOAT, "raw_data": bytes(8)} | change
    graph = network.graph(lambda model: model.graph.initializer.append(TensorProto(**fields)))
    with pytest.raises(PolicyError, match=r"damaged|type"):
        to_canonical_graph(graph, expected(network))


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ({"name": "axis", "i": 1}, "has type 0"),
        ({"name": "axis", "type": AttributeProto.INT}, "no value"),
        ({"name": "axis", "type": AttributeProto.INT, "f": 1.0}, r"holds \['f'\]"),
        ({"name": "axis", "type": AttributeProto.INT, "i": 1, "s": b"x"}, r"holds \['i', 's'\]"),
        ({"name": "axis", "type": AttributeProto.TENSORS}, "has type 9"),
        ({"type": AttributeProto.INT, "i": 1}, "no name"),
        ({"name": "axis", "type": AttributeProto.GRAPH, "g": onnx.GraphProto()}, "a graph in Softmax"),
        ({"name": "axis", "type": AttributeProto.INT, "ref_attr_name": "x"}, "ref_attr_name"),
        ({"name": "twice", "type": AttributeProto.INTS, "ints": [1]}, "attribute of Softmax twice"),
    ],
    ids=str,
)
def test_attributes_that_could_be_read_in_two_ways_are_refused(network, attribute, says):
    def change(model):
        node = helper.make_node("Softmax", ["obs"], ["x"], twice=1)
        node.attribute.append(AttributeProto(**attribute))
        model.graph.node.append(node)

    with pytest.raises(PolicyError, match=says):
        to_canonical_graph(network.graph(change), expected(network))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.graph.initializer[1].ClearField("data_location"), "from outside"),
        (lambda model: model.graph.initializer[1].external_data.add(key="basepath", value="/etc"), "from outside"),
        (lambda model: model.graph.initializer[1].external_data.add(key="location", value="/etc"), "from outside"),
        (lambda model: setattr(model.graph.initializer[1], "raw_data", b"1234"), "from outside"),
        (lambda model: setattr(model.graph.input[0], "name", "axes"), "'axes' twice"),
        (lambda model: setattr(model.graph.initializer[0], "name", ""), "no name"),
        (lambda model: setattr(model.graph.node[0], "name", "a\nb"), "no name"),
        (lambda model: setattr(model.graph.node[0], "op_type", "SequenceEmpty"), "operator 'SequenceEmpty'"),
        (lambda model: setattr(model.graph.node[0], "domain", "ai.onnx.ml"), "operator 'MatMul' of 'ai.onnx.ml'"),
        (lambda model: setattr(model.graph.node[0], "overload", "x"), "overload"),
        (lambda model: model.graph.quantization_annotation.add(), "quantization_annotation"),
        (lambda model: model.graph.input[0].type.sequence_type.SetInParent(), "sequence_type"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 8), "type 8"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", -1), "a size of"),
        (lambda model: setattr(model, "ir_version", 3), "IR version is 3"),
        (lambda model: model.opset_import.pop(), "0 versions"),
        (lambda model: model.opset_import.add(domain="ai.onnx", version=12), "2 versions"),
        (lambda model: setattr(model.opset_import[0], "version", 99), "version is 99"),
        (lambda model: model.ClearField("graph"), "holds no graph"),
    ],
)
def test_what_the_exporter_never_makes_is_refused(network, change, says):
    with pytest.raises(PolicyError, match=says):
        to_canonical_graph(network.graph(change), expected(network))


def test_the_operators_are_the_standards_on_tensors_alone():
    newest = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= graph_check._OPSETS[-1]:
            newest[schema.name] = max(newest.get(schema.name, schema), schema, key=lambda each: each.since_version)
    assert newest.keys() >= graph_check._ALLOWED
    for name in graph_check._ALLOWED:
        assert not newest[name].deprecated
        takes_graphs = any(item.type is onnx.defs.OpSchema.AttrType.GRAPH for item in newest[name].attributes.values())
        assert takes_graphs == (name in graph_check._WITH_GRAPHS)


@pytest.fixture(scope="module")
def small():
    return make_small_graph()


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_changed_graph_is_refused_or_written_as_onnx_reads_it(small, seed):
    rng = np.random.default_rng(seed)
    changed = bytearray(small)
    for _ in range(rng.integers(1, 4)):
        position = rng.integers(1, len(changed))
        match rng.integers(5):
            case 0:
                changed[position] = rng.integers(256)
            case 1:
                changed[position] ^= 1 << rng.integers(8)
            case 2:
                changed[position:position] = rng.bytes(rng.integers(1, 6))
            case 3:
                del changed[position : position + rng.integers(1, 6)]
            case _:
                changed[position:position] = changed[position : position + rng.integers(1, 40)]
    check_against_onnx(bytes(changed), SMALL_WEIGHTS)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_graph_whose_fields_were_changed_is_refused_or_written_as_onnx_reads_it(small, data):
    """Well-formed to the last byte, but saying anything."""
    model = onnx.load_from_string(small)
    for _ in range(data.draw(st.integers(1, 3))):
        message = model
        while True:
            field = data.draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
            if field.message_type is None:
                break
            inner = getattr(message, field.name)
            if field.is_repeated:
                message = inner[data.draw(st.integers(0, len(inner) - 1))] if inner else inner.add()
            else:
                inner.SetInParent()
                message = inner
        value = data.draw(VALUES[field.cpp_type, field.type == field.TYPE_BYTES])
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    check_against_onnx(model.SerializeToString(), SMALL_WEIGHTS)


FIELD = onnx.ModelProto.DESCRIPTOR.fields[0]
WORDS = st.sampled_from(["", "w", "z", "If", "Neg", "ai.onnx", "com.microsoft", "weights", "/etc/passwd", "location"])
VALUES = {
    (FIELD.CPPTYPE_STRING, False): WORDS,
    (FIELD.CPPTYPE_STRING, True): WORDS.map(str.encode),
    (FIELD.CPPTYPE_INT64, False): st.integers(-2, 30) | st.integers(-(2**63), 2**63 - 1),
    (FIELD.CPPTYPE_INT32, False): st.integers(-2, 30),
    (FIELD.CPPTYPE_UINT64, False): st.integers(0, 30),
    (FIELD.CPPTYPE_FLOAT, False): st.floats(width=32),
    (FIELD.CPPTYPE_DOUBLE, False): st.floats(),
    (FIELD.CPPTYPE_ENUM, False): st.integers(0, 1),
}
