"""Acting graphs: running, replacing weights, and refusing data that doesn't fit."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import reprlib
import threading
from pathlib import Path

import msgpack
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from aiorl.acting import acting_graph
from aiorl.acting.acting_graph import ActingGraph, ActingSpec, ArraySpec
from aiorl.errors import PolicyError

EXPORTED = sorted(Path(__file__).with_name("graphs").glob("*.onnx"))
"""As made by `aiorl.learning.models.export`."""


def obs_of(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)


def acting_of(network):
    """A graph with weights."""
    acting = ActingGraph(network.graph(), network.spec)
    acting.set_weights(network.weights())
    return acting


@pytest.fixture(params=[True, False], ids=["weights as inputs", "weights in the session"])
def weights_are_inputs(request, monkeypatch):
    """Run the test with the weights of small networks and of larger ones."""
    if not request.param:
        monkeypatch.setattr(acting_graph, "_MAX_INPUT_BYTES", -1)
    return request.param


@pytest.mark.parametrize("rows", [1, 5])
def test_the_graph_returns_the_networks_outputs_for_any_number_of_rows(
    network, rows, weights_are_inputs
):
    acting, weights = ActingGraph(network.graph(), network.spec), network.weights()
    acting.set_weights(weights)
    dist_inputs, values, state_out = acting.run(obs_of(rows))
    expected, expected_values = network.expected(weights, obs_of(rows))
    np.testing.assert_allclose(dist_inputs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values, expected_values, rtol=1e-5, atol=1e-5)
    assert state_out == []
    assert dist_inputs.dtype == values.dtype == np.float32


def test_new_weights_take_effect_and_are_copies(network, weights_are_inputs):
    acting = ActingGraph(network.graph(), network.spec)
    for seed in (1, 2):
        weights = network.weights(seed)
        acting.set_weights(weights)
        expected = network.expected(weights, obs_of(2))[0]
        for array in weights.values():
            array.fill(np.nan)  # the caller's memory is the caller's again
        for _ in range(7):  # memory is bound after some runs
            np.testing.assert_allclose(acting.run(obs_of(2))[0], expected, rtol=1e-5, atol=1e-5)
    strided = {name: np.asfortranarray(array) for name, array in network.weights(2).items()}
    for array in strided.values():
        array.flags.writeable = False
    acting.set_weights(strided)
    np.testing.assert_allclose(acting.run(obs_of(2))[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        acting.get_weights()["policy/head/bias"], network.weights(2)["policy/head/bias"]
    )


@pytest.mark.parametrize("runs_per_weights", [math.inf, 1000, 8])
def test_one_session_serves_all_weights_of_a_dense_network_that_is_small_or_gets_new_ones_often(
    network, weights_are_inputs, runs_per_weights, monkeypatch
):
    sessions = []
    make = ort.InferenceSession
    monkeypatch.setattr(
        ort,
        "InferenceSession",
        lambda *args, **options: sessions.append(1) or make(*args, **options),
    )
    acting = ActingGraph(network.graph(), network.spec, runs_per_weights=runs_per_weights)
    for seed in range(3):
        acting.set_weights(network.weights(seed))
        for _ in range(8):  # the last ones run in bound memory
            got = acting.run(obs_of(4))[0]
            np.testing.assert_allclose(
                got, network.expected(network.weights(seed), obs_of(4))[0], rtol=1e-5, atol=1e-5
            )
    assert len(sessions) == (1 if weights_are_inputs or runs_per_weights == 8 else 3)


def damaged(weights, how):
    changed = dict(weights)
    bias = weights["policy/head/bias"]
    match how:
        case "missing":
            del changed["policy/head/bias"]
        case "unknown":
            changed["policy/spy"] = bias
        case "shape":
            changed["policy/head/bias"] = bias[:-1]
        case "dtype":
            changed["policy/head/bias"] = bias.astype(np.float64)
        case "nan":
            changed["policy/head/bias"] = bias * np.float32(np.nan)
        case "inf":
            changed["policy/head/bias"] = np.full_like(bias, -np.inf)
    return changed


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("missing", "policy/head/bias"),
        ("unknown", "policy/spy"),
        ("shape", "policy/head/bias"),
        ("dtype", "float64"),
        ("nan", "policy/head/bias"),
        ("inf", "policy/head/bias"),
    ],
)
def test_weights_that_dont_fit_are_refused_and_the_old_ones_stay(
    network, how, name, weights_are_inputs
):
    acting, weights = ActingGraph(network.graph(), network.spec), network.weights()
    acting.set_weights(weights)
    with pytest.raises(PolicyError, match=name):
        acting.set_weights(damaged(network.weights(5), how))
    np.testing.assert_allclose(
        acting.run(obs_of(2))[0], network.expected(weights, obs_of(2))[0], rtol=1e-5
    )


def test_running_or_reading_without_weights_says_so(network):
    acting = ActingGraph(network.graph(), network.spec)
    with pytest.raises(PolicyError, match="set_weights"):
        acting.run(obs_of(1))
    with pytest.raises(PolicyError, match="set_weights"):
        acting.get_weights()


@pytest.mark.parametrize(
    "bad", [np.zeros((2, 4), np.float32), np.zeros((2, 3)), np.zeros(3, np.float32)], ids=str
)
def test_observations_that_dont_fit_are_refused(network, bad):
    with pytest.raises(PolicyError, match=re.escape(f"{bad.dtype} {list(bad.shape)}")):
        acting_of(network).run(bad)


@pytest.mark.parametrize(
    "state",
    [[], [np.zeros((2, 2), np.float32)] * 2, [np.zeros((2, 3), np.float32)], [np.zeros((2, 2))]],
    ids=repr,
)
def test_r115_states_that_dont_fit_are_a_value_error(recurrent_network, network, state):
    with pytest.raises(PolicyError) as caught:
        acting_of(recurrent_network).run(obs_of(2), state)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(PolicyError):
        acting_of(network).run(obs_of(2), [np.zeros((2, 2), np.float32)])


@pytest.mark.parametrize("place", ["initializer", "attribute", "inner graph", "hidden tags"])
@pytest.mark.parametrize("location", ["../secret", "ABSOLUTE", "*/_ORT_MEM_ADDR_/*"])
def test_a_graph_from_a_stranger_reads_no_file_and_no_memory(
    network, by_hand, make_external_tensor, tmp_path, monkeypatch, place, location
):
    secret = np.full(12, 42, np.float32)
    (tmp_path / "here").mkdir()
    for directory in (tmp_path, tmp_path / "here"):
        (directory / "secret").write_bytes(secret.tobytes())
    monkeypatch.chdir(tmp_path / "here")
    spy = make_external_tensor(
        "spy", (3, 4), str(tmp_path / "secret") if location == "ABSOLUTE" else location
    )
    if location.startswith("*"):
        spy.external_data[1].value = str(secret.ctypes.data)
    model = network.model()
    model.graph.node[0].input[1] = "spy"  # instead of the kernel
    if place == "attribute":
        model.graph.node.insert(0, helper.make_node("Constant", [], ["spy"], value=spy))
    elif place == "inner graph":
        inner = helper.make_graph(
            [helper.make_node("Identity", ["in"], ["out"])],
            "inner",
            [],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, [3, 4])],
            [spy],
        )
        inner.initializer[0].name = "in"
        model.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
        model.graph.node.insert(
            0, helper.make_node("If", ["yes"], ["spy"], then_branch=inner, else_branch=inner)
        )
    elif place == "initializer":
        model.graph.initializer.append(spy)
    graph = model.SerializeToString()
    if place == "hidden tags":  # tags of five bytes, which only some readers understand
        entries = [
            by_hand.field(1, entry.key.encode()) + by_hand.field(2, entry.value.encode())
            for entry in spy.external_data
        ]
        del spy.external_data[:]
        spy.ClearField("data_location")
        tensor = (
            spy.SerializeToString()
            + b"".join(by_hand.hidden(13, entry) for entry in entries)
            + by_hand.hidden(14, 1)
        )
        graph = by_hand.model(model, by_hand.field(5, tensor))
    acting = ActingGraph(graph, network.spec)
    with pytest.raises(PolicyError):
        acting.set_weights(network.weights())


def test_a_weight_may_have_the_name_of_the_key_for_files(network, weights_are_inputs):
    old, name = "policy/head/kernel", "policy/location/k"
    model = network.model()
    model.graph.node[0].input[1] = next(
        tensor for tensor in model.graph.initializer if tensor.name == old
    ).name = name
    spec = dataclasses.replace(
        network.spec,
        weights=tuple(
            dataclasses.replace(described, name=name) if described.name == old else described
            for described in network.spec.weights
        ),
    )
    weights = network.weights()
    acting = ActingGraph(model.SerializeToString(), spec)
    for _ in range(2):
        acting.set_weights({name if key == old else key: weight for key, weight in weights.items()})
        np.testing.assert_allclose(
            acting.run(obs_of(2))[0], network.expected(weights, obs_of(2))[0], rtol=1e-5
        )
    assert name in acting.get_weights()


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("more", (3,), "float32"),
        ("policy/head/kernel", (4, 4), "float32"),
        ("policy/head/kernel", (3, 4), "float64"),
    ],
)
def test_weights_missing_in_the_graph_are_refused(network, name, shape, dtype, weights_are_inputs):
    other_weights = tuple(weight for weight in network.spec.weights if weight.name != name)
    acting = ActingGraph(
        network.graph(),
        dataclasses.replace(network.spec, weights=(*other_weights, ArraySpec(name, shape, dtype))),
    )
    with pytest.raises(PolicyError):
        acting.set_weights(network.weights() | {name: np.zeros(shape, dtype)})


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x08", bytes(1000), b"ORTM" * 100])
def test_junk_is_a_policy_error(network, junk):
    with pytest.raises(PolicyError):
        ActingGraph(junk, network.spec).set_weights(network.weights())


@pytest.mark.parametrize("path", EXPORTED, ids=lambda path: path.stem)
def test_an_exported_graph_returns_the_same_numbers_as_plain_onnx_runtime(path):
    """Graphs of the catalogue's models, and of users' models with loops and branches."""
    graph = onnx.load(path, load_external_data=False).graph
    rng, weights = np.random.default_rng(0), {}
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            weights[tensor.name] = rng.standard_normal(tuple(tensor.dims)).astype(dtype)
    inputs = {item.name: item.type.tensor_type for item in graph.input}
    feed = {
        name: rng.uniform(0, 2, (3, *(dim.dim_value for dim in kind.shape.dim[1:]))).astype(
            helper.tensor_dtype_to_np_dtype(kind.elem_type)
        )
        for name, kind in inputs.items()
    }
    states = [array for name, array in sorted(feed.items()) if name.startswith("state_in")]
    prev = feed.get("prev_actions")
    options = ort.SessionOptions()
    options.add_external_initializers(
        [*weights], [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    )
    session = ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    spec = ActingSpec(
        feed["obs"].shape[1:],
        feed["obs"].dtype.name,
        tuple(state.shape[1:] for state in states),
        2,
        "categorical",
        {},
        tuple(ArraySpec(name, array.shape, array.dtype.name) for name, array in weights.items()),
        None if prev is None else ArraySpec("prev_actions", prev.shape[1:], prev.dtype.name),
    )
    acting = ActingGraph(path.read_bytes(), spec)
    acting.set_weights(weights)
    expected = session.run(list(spec.output_names), feed)
    dist_inputs, values, state_out = acting.run(
        feed["obs"], states, None if prev is None else (prev, feed["prev_rewards"])
    )
    for got, want in zip((dist_inputs, values, *state_out), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_file_in_onnx_runtimes_own_format_that_is_also_a_valid_graph_is_refused(
    network, by_hand, tmp_path
):
    """The flatbuffer's header looks like a few fields; a harmless graph follows in a part that it
    ignores.
    """
    model = without_weights(network)
    harmless = model.graph.SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    flatbuffer = (tmp_path / "model.ort").read_bytes()

    # the root's position: a number 0 in field 1, then field 1 again in two bytes, with the "O" of
    # "ORTM" as its number; "RT" begins field 10 with 84 bytes
    old_root = int.from_bytes(flatbuffer[:4], "little")
    root = next(root for root in range(0x880008, 0x888008, 0x100) if (root - old_root) % 16 == 0)
    hidden_in = by_hand.field(7, harmless)
    padding = root - old_root - 83 - len(hidden_in) - 5
    rest = by_hand.varint(2 << 3 | 2) + by_hand.varint(padding + len(flatbuffer) - 8)
    graph = (
        root.to_bytes(4, "little")
        + b"ORTM"
        + bytes(83)
        + hidden_in
        + rest
        + bytes(padding)
        + flatbuffer[8:]
    )
    with pytest.raises(PolicyError):
        leaked(graph, dataclasses.replace(network.spec, weights=()))


def without_weights(network):
    """Return the network's model with different numbers."""
    model = network.model()
    del model.graph.initializer[1:]
    for name, shape in network.shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
    return model


def leaked(graph, spec):
    """Return the graph's outputs, if it runs at all."""
    acting = ActingGraph(graph, spec)
    acting.set_weights({})
    return acting.run(np.ones((1, 3), np.float32))[0]


def test_an_operator_that_fails_while_running_is_a_policy_error(network):
    def change(model):
        model.graph.node.insert(0, helper.make_node("Reshape", ["obs", "shape"], ["fixed"]))
        model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [2], [7, 3]))
        model.graph.node[1].input[0] = "fixed"

    acting = ActingGraph(network.graph(change), network.spec)
    acting.set_weights(network.weights())
    with pytest.raises(PolicyError):
        acting.run(obs_of(2))


@pytest.mark.parametrize(
    "change", [{"obs_shape": (4,)}, {"obs_dtype": "uint8"}, {"state_shapes": ((2,),)}]
)
def test_a_description_of_another_graph_is_a_policy_error_at_the_first_run(network, change):
    spec = dataclasses.replace(network.spec, **change)
    acting = ActingGraph(network.graph(), spec)
    acting.set_weights(network.weights())
    obs = np.zeros((2, *spec.obs_shape), spec.obs_dtype)
    with pytest.raises(PolicyError):
        acting.run(obs, [np.zeros((2, *shape), np.float32) for shape in spec.state_shapes])


def test_runs_of_equal_size_return_independent_arrays(recurrent_network, weights_are_inputs):
    """After several runs, inputs and outputs are bound."""
    acting, weights = (
        ActingGraph(recurrent_network.graph(), recurrent_network.spec),
        recurrent_network.weights(),
    )
    acting.set_weights(weights)
    sizes = [4] * 8 + [2, 4, 4] + [2] * 8 + [0] * 8 + [4]
    results = [
        acting.run(obs_of(rows, seed), [np.full((rows, 2), 0.1 * seed, np.float32)])
        for seed, rows in enumerate(sizes)
    ]
    out = np.zeros((4, recurrent_network.spec.num_dist_inputs), np.float32), np.zeros(4, np.float32)
    written = acting.run(obs_of(4), [np.zeros((4, 2), np.float32)], out=out)
    assert (written[0] is out[0], written[1] is out[1]) == (True, True), (
        "results are written where they are wanted"
    )
    np.testing.assert_array_equal(out[0], results[0][0])
    for seed, (rows, (_, _, state_out)) in enumerate(zip(sizes, results, strict=True)):
        expected = np.tanh(0.1 * seed + obs_of(rows, seed) @ weights["policy/cell/kernel"])
        np.testing.assert_allclose(state_out[0], expected, rtol=1e-5)
    acting.run(obs_of(4), [np.zeros((4, 2), np.float32)])
    strided = np.repeat(obs_of(4, 7), 2, axis=0)[::2]
    np.testing.assert_array_equal(
        acting.run(strided, [np.zeros((4, 2), np.float32)])[0],
        acting.run(obs_of(4, 7), [np.zeros((4, 2), np.float32)])[0],
    )


def test_two_threads_can_run_at_the_same_time(network, weights_are_inputs):
    acting, weights = ActingGraph(network.graph(), network.spec), network.weights()
    acting.set_weights(weights)
    wrong = []

    def run(seed):
        obs = obs_of(8, seed)
        expected = network.expected(weights, obs)[0]
        wrong.extend(
            got
            for got in (acting.run(obs)[0] for _ in range(100))
            if not np.allclose(got, expected, 1e-4, 1e-4)
        )

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_may_be_swapped_while_another_thread_runs(network, weights_are_inputs):
    acting = ActingGraph(network.graph(), network.spec)
    versions = [network.weights(seed) for seed in range(4)]
    acting.set_weights(versions[0])
    obs = obs_of(8)
    allowed = [network.expected(weights, obs)[0] for weights in versions]
    stop, wrong = threading.Event(), []

    def run():
        while not stop.is_set():
            got = acting.run(obs)[0]
            if not any(np.allclose(got, expected, rtol=1e-4, atol=1e-4) for expected in allowed):
                wrong.append(got)

    thread = threading.Thread(target=run)
    thread.start()
    for turn in range(40):
        acting.set_weights(versions[turn % 4])
    stop.set()
    thread.join()
    assert not wrong


def test_a_spec_survives_msgpack_and_json(recurrent_network):
    spec = recurrent_network.spec
    assert ActingSpec.from_dict(msgpack.unpackb(msgpack.packb(spec.to_dict()))) == spec
    assert ActingSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.output_names == ("dist_inputs", "vf", "state_out_0")
    assert spec.state_inputs == ("state_in_0",)
    assert spec.num_weight_bytes == 4 * (3 * 4 + 4 + 3 * 2)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        *({key: None} for key in ("format", "obs_shape", "weights", "action_space")),
        {"format": functools.reduce(lambda inner, _: [inner], range(2000))},
        {"obs_shape": [-1]},
        {"obs_shape": [1 << 20, 1 << 20]},
        {"obs_shape": 3},
        {"obs_shape": [1] * 9},
        {"obs_dtype": "object"},
        {"obs_dtype": ["float32"]},
        {"num_dist_inputs": "4"},
        {"num_dist_inputs": True},
        {"num_features": -1},
        {"num_features": [1]},
        {"distribution": 3},
        {"distribution": "x" * 1000},
        {"action_space": 3},
        {"state_shapes": [[1]] * 100},
        {"state_shapes": [[1 << 23]] * 3},
        {"weights": [["a", [1], "float32"], ["a", [2], "float32"]]},
        {"weights": [["a", [1], "complex64"]]},
        {"weights": [["a", [1]]]},
        {"weights": [[f"w{index}", [1], "float32"] for index in range(10_001)]},
        {"weights": [[f"w{index}", [1 << 29], "float32"] for index in range(3)]},
    ],
    ids=lambda change: reprlib.repr(change)[:60],
)
def test_a_damaged_description_is_a_policy_error(network, change):
    with pytest.raises(PolicyError) as caught:
        ActingSpec.from_dict(
            {key: of for key, of in (network.spec.to_dict() | change).items() if of is not None}
        )
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def with_previous(network):
    """Add the previous reward to the network's value; a previous action is cast and ignored."""

    def change(model):
        graph = model.graph
        graph.input.append(helper.make_tensor_value_info("prev_actions", TensorProto.INT64, ["n"]))
        graph.input.append(helper.make_tensor_value_info("prev_rewards", TensorProto.FLOAT, ["n"]))
        graph.node[2].output[0] = "sum"
        graph.node.append(
            helper.make_node("Cast", ["prev_actions"], ["chosen"], to=TensorProto.FLOAT)
        )
        graph.node.append(helper.make_node("Add", ["sum", "prev_rewards"], ["half"]))
        graph.node.append(helper.make_node("Add", ["half", "chosen"], ["vf"]))

    spec = dataclasses.replace(network.spec, prev_action=ArraySpec("prev_actions", (), "int64"))
    graph = ActingGraph(network.graph(change), spec)
    graph.set_weights(network.weights())
    return graph


def test_a_graph_that_looks_back_uses_previous_actions_and_rewards(network):
    graph = with_previous(network)
    obs = np.ones((2, 3), np.float32)
    actions, rewards = np.array([2, 0], np.int32), np.array([0.5, -1.0])
    _, values, _ = graph.run(obs, (), (actions, rewards))
    np.testing.assert_allclose(
        values, network.expected(network.weights(), obs)[1] + rewards + actions, rtol=1e-5
    )
    for prev in (None, (actions[:1], rewards), (actions, rewards[:1]), (actions[:, None], rewards)):
        with pytest.raises(PolicyError):
            graph.run(obs, (), prev)
    with pytest.raises(PolicyError):
        acting_of(network).run(obs, (), (actions, rewards))
