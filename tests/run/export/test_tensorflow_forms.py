"""Exports to SavedModel, Keras and TFLite act like the checkpoint's policy when opened in the usual
way.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from costs import by_cost
from export_worlds import BOX, WORLDS, model_inputs, observations_of, run_onnx, save_world
from gymnasium import spaces

import aiorl
from aiorl.acting.acting_state import SavedRun
from aiorl.errors import ExportError
from aiorl.learning.models import export

FORMATS = ["onnx", "savedmodel", "keras", "tflite"]
QUICK = ["filtered frames", "values"]
COMBINED = [
    "custom features with memory",
    "filtered",
    "images in parts",
    "layers of values",
    "looks back",
    "masked returns, looks back",
    "masked tuple",
    "masked values",
    "rooms",
    "values of frames",
    "without chance",
]
"""Worlds whose parts stand in others, too."""


def run_savedmodel(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    function = tf.saved_model.load(path).signatures["serving_default"]
    outputs = function(**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}


def run_keras(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    outputs = keras.models.load_model(path)(inputs)
    return {name: np.asarray(value) for name, value in outputs.items()}


def run_tflite(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interpreter's future package
        interpreter = tf.lite.Interpreter(str(path))
    return dict(interpreter.get_signature_runner("serving_default")(**inputs))


RUNNERS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "onnx": run_onnx,
    "savedmodel": run_savedmodel,
    "keras": run_keras,
    "tflite": run_tflite,
}


@pytest.mark.parametrize("world", by_cost(WORLDS, quick=QUICK, nightly=COMBINED))
def test_every_format_acts_as_the_loaded_policy_with_the_same_names(
    tmp_path: Path, world: str
) -> None:
    """R183: each is in its directory, and returned by its format.

    An export draws no random numbers, so training continues identically with and without one;
    Keras may draw some for a user's network.
    """
    save_world(world, tmp_path)
    before = random.getstate(), str(np.random.get_state())
    written = aiorl.export_policy(tmp_path, tmp_path / "out", FORMATS)
    if not world.startswith("custom"):
        assert (random.getstate(), str(np.random.get_state())) == before
    assert {name: path.relative_to(tmp_path / "out") for name, path in written.items()} == {
        "onnx": Path("onnx/policy.onnx"),
        "savedmodel": Path("savedmodel"),
        "keras": Path("keras/policy.keras"),
        "tflite": Path("tflite/policy.tflite"),
    }
    policy = aiorl.load_policy(tmp_path)
    described = json.loads((written["onnx"].parent / "policy.json").read_text())
    for rows in (1, 5):
        inputs = {
            item["name"]: np.zeros((rows, *item["shape"][1:]), item["dtype"])
            for item in described["inputs"]
        }
        inputs["obs"] = model_inputs(
            policy.observation_space, observations_of(policy.observation_space, rows)
        )
        by_onnx = run_onnx(written["onnx"], inputs)  # equal to the policy's; see test_writing
        for name, path in written.items():
            found = RUNNERS[name](path, inputs)
            assert found.keys() == by_onnx.keys()
            for output, value in found.items():
                want = by_onnx[output]
                assert (value.dtype, value.shape) == (want.dtype, want.shape)
                # random weights are large: so are the outputs, which have fewer certain digits
                limit = 3e-5 * max(1.0, np.abs(want[np.abs(want) < 1e30]).max(initial=0.0))
                np.testing.assert_allclose(
                    value, want, rtol=1e-5, atol=limit, err_msg=f"{name}: {output}"
                )


def test_actions_of_a_narrow_range_far_from_zero_need_a_format_with_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = spaces.Box(1e8, 1e8 + 4, (2,), np.float64)
    monkeypatch.setitem(WORLDS, "far", (BOX, far, {"model": {"fcnet_hiddens": [4]}}))
    save_world("far", tmp_path)
    with pytest.raises(ExportError, match=r"tflite: .* float32"):
        aiorl.export_policy(tmp_path, tmp_path / "out", ["tflite"])
    written = aiorl.export_policy(tmp_path, tmp_path / "out", ["onnx", "savedmodel"])
    inputs = {"obs": model_inputs(BOX, observations_of(BOX, 5))}
    by_onnx, by_savedmodel = (RUNNERS[name](written[name], inputs) for name in written)
    np.testing.assert_allclose(by_savedmodel["action"] - 1e8, by_onnx["action"] - 1e8, atol=1e-5)


@pytest.mark.slow
def test_files_are_opened_in_a_process_without_aiorl(tmp_path: Path) -> None:
    """The files contain no class of aiorl and no code that Keras would have to trust."""
    save_world("memory", tmp_path)
    written = aiorl.export_policy(tmp_path, tmp_path / "out", ["keras", "savedmodel"])
    code = f"""
import sys
sys.modules["aiorl"] = None
import keras, numpy as np, tensorflow as tf
inputs = {{"obs": np.ones((2, 3), np.float32), **{{f"state_in_{{i}}": np.zeros((2, 5), np.float32) for i in range(4)}}}}
print(keras.models.load_model({str(written["keras"])!r})(inputs)["action"].numpy())
print(tf.saved_model.load({str(written["savedmodel"])!r}).signatures["serving_default"](**inputs)["action"].numpy())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    by_keras, by_savedmodel = done.stdout.splitlines()
    assert by_keras == by_savedmodel
    assert json.loads(by_keras.replace(" ", ", ")) in ([3, 3], [4, 4])


class Bits(keras.layers.Layer):
    """Layer of a user's own with an operation that TFLite doesn't have."""

    def call(self, inputs: Any) -> Any:
        return tf.cast(tf.bitwise.bitwise_and(tf.cast(8.0 * inputs, tf.int32), 5), tf.float32)


def unusual(obs_shape: Any, num_outputs: int, model_config: Any) -> Any:
    return keras.Sequential(
        [keras.layers.Input(obs_shape), Bits(), keras.layers.Dense(num_outputs)]
    )


def test_a_network_that_a_format_cannot_hold_is_refused_with_the_reason_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users_models", sys.modules[__name__])

    def fail(*_: Any) -> Any:
        raise ExportError("an operator has no ONNX form")

    monkeypatch.setattr(export, "_convert", fail)
    settings = {"model": {"fcnet_hiddens": [8], "custom_model": "users_models:unusual"}}
    monkeypatch.setitem(WORLDS, "box", (*WORLDS["box"][:2], settings))
    save_world("box", tmp_path)
    for name, value in {"onnx": "ONNX", "tflite": "BitwiseAnd", "keras": "Bits"}.items():
        with pytest.raises(ExportError, match=rf"{name}.*{value}"):
            aiorl.export_policy(
                tmp_path, tmp_path / "out", ["savedmodel", name] if name == "onnx" else [name]
            )
    assert list((tmp_path / "out").iterdir()) == []
    written = aiorl.export_policy(tmp_path, tmp_path / "out", ["savedmodel"])
    policy = aiorl.load_policy(tmp_path)
    obs = np.ones(3, np.float32)
    found = run_savedmodel(written["savedmodel"], {"obs": obs[None]})
    assert found["action"].tolist() == [policy.compute_single_action(obs)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the directory of a world; do not change it."""

    @functools.cache
    def directory_of(world: str) -> Path:
        directory = tmp_path_factory.mktemp("saved")
        save_world(world, directory)
        return directory

    return directory_of


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("world", "given", "value"),
    [
        ("returns", {"v_min": None}, "v_min, v_max"),
        ("returns", {"v_min": -3.5}, "dist_inputs"),
        ("returns", {"model": {"fcnet_hiddens": [8], "use_lstm": True}}, "q/dense_0/kernel'"),
        ("returns", {"model": {"conv_filters": [[4, 3, 2]]}}, "conv_filters"),
        (
            "filtered frames",
            {"model": {"conv_filters": [[4, 3, 1]], "fcnet_hiddens": [8]}},
            "shape",
        ),
    ],
)
def test_a_network_that_the_settings_do_not_describe_has_only_onnx(
    saved: Callable[[str], Path], tmp_path: Path, world: str, given: dict[str, Any], value: str
) -> None:
    """An algorithm of a user's own can build such a network."""
    run = SavedRun.open(saved(world))
    settings: Any = run.acting.part.policies[aiorl.DEFAULT_POLICY_ID].config
    settings.update(given)
    with pytest.raises(ExportError, match=f"keras.*{value}"):
        aiorl.export_policy(run, tmp_path / "out", ["keras"])  # the basis of the other formats
    assert aiorl.export_policy(run, tmp_path / "out").keys() == {"onnx"}
