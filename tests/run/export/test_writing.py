"""ONNX exports act like the checkpoint's policy, with only ONNX Runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from export_worlds import (
    BOX,
    MANY,
    WORLDS,
    model_inputs,
    observations_of,
    run_onnx,
    save_new_world,
    save_world,
)
from full_disk import disk_full_after
from gymnasium import spaces
from saved_runs import save_run

import aiorl
from aiorl.acting.checkpoint import load_checkpoint, save_checkpoint
from aiorl.data.spaces import space_from_dict
from aiorl.errors import CheckpointError, ConfigError, ExportError, PolicyError, UnknownPolicyError
from aiorl.export import main
from aiorl.run.export import onnx_form

DEFAULT = aiorl.DEFAULT_POLICY_ID
SLOW = [
    "looks back",
    "returns",
    "values of frames",
    "noise of the state",
    "masked dict",
    "unclipped",
    "images in parts",
    "rooms",
    "free deviations",
    "layers of values",
    "custom features",
    "values with memory",
    "without chance",
    "masked values",
]
"""Worlds whose parts other worlds have, too."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    save_world("filtered", directory)
    return directory


def arrays_of(space: spaces.Space[Any], actions: list[Any]) -> list[np.ndarray[Any, Any]]:
    """Convert N actions from environments to one array [N, ...] per part of the space, depth
    first.
    """
    if isinstance(space, spaces.Tuple):
        return [
            array
            for index, part in enumerate(space.spaces)
            for array in arrays_of(part, [action[index] for action in actions])
        ]
    if isinstance(space, spaces.Dict):
        return [
            array
            for name, part in space.spaces.items()
            for array in arrays_of(part, [action[name] for action in actions])
        ]
    return [np.array(actions, space.dtype)]


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "world",
    [pytest.param(world, marks=pytest.mark.slow) if world in SLOW else world for world in WORLDS],
)
def test_an_exported_policy_acts_as_the_loaded_one_for_any_number_of_observations(
    tmp_path: Path, world: str
) -> None:
    """R183: the file is in the directory given, and its path is returned by format."""
    save_world(world, tmp_path)
    written = aiorl.export_policy(tmp_path, tmp_path / "exported")
    assert written == {"onnx": tmp_path / "exported" / "onnx" / "policy.onnx"}
    onnx.checker.check_model(str(written["onnx"]), full_check=True)
    policy = aiorl.load_policy(tmp_path)
    described = json.loads((written["onnx"].parent / "policy.json").read_text())
    outputs = {output["name"]: output for output in described["outputs"]}
    names = [name for name in outputs if name.startswith("action")]
    before = {
        item["name"]: item for item in described["inputs"] if item["name"].startswith("prev_")
    }
    for rows in (1, 9):
        state = [np.stack([component] * rows) for component in policy.get_initial_state()]
        previous: dict[str, Any] = {}
        for step in range(2):
            observations = observations_of(policy.observation_space, rows, seed=step)
            inputs = {"obs": model_inputs(policy.observation_space, observations)}
            inputs |= {f"state_in_{index}": component for index, component in enumerate(state)}
            if before:
                found = {
                    name: np.zeros((rows, *item["shape"][1:]), item["dtype"])
                    for name, item in before.items()
                }
                if previous:
                    flat = [
                        spaces_row(policy.action_space, action)
                        for action in previous["prev_actions"]
                    ]
                    found["prev_actions"].flat = np.concatenate(flat)
                    found["prev_rewards"] = previous["prev_rewards"]
                inputs |= found
            found = run_onnx(written["onnx"], inputs)
            actions, state, beside = policy.compute_actions(observations, state, **previous)
            assert found.keys() == outputs.keys()
            for name, array in zip(names, arrays_of(policy.action_space, actions), strict=True):
                assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
                np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
                if world != "unclipped":
                    part = space_from_dict(outputs[name]["space"])
                    rows_of = (
                        found[name].tolist() if isinstance(part, spaces.Discrete) else found[name]
                    )
                    assert all(part.contains(row) for row in rows_of)
            np.testing.assert_allclose(
                found["dist_inputs"], beside["action_dist_inputs"], rtol=1e-5, atol=1e-5
            )
            np.testing.assert_allclose(found["vf"], beside["vf_preds"], rtol=1e-5, atol=1e-5)
            for index, component in enumerate(state):
                np.testing.assert_allclose(
                    found[f"state_out_{index}"], component, rtol=1e-5, atol=1e-5
                )
            if before:
                previous = {
                    "prev_actions": actions,
                    "prev_rewards": np.arange(rows, dtype=np.float32),
                }


def spaces_row(space: spaces.Space[Any], action: Any) -> np.ndarray[Any, Any]:
    """Return an action's arrays, flattened one after another."""
    return np.concatenate(
        [array.ravel().astype(np.float64) for array in arrays_of(space, [action])]
    )


def test_the_filter_in_the_file_is_precise_far_from_zero(tmp_path: Path) -> None:
    """The reference is NumPy in float64, with a mean that float32 can't represent."""
    seen = (np.random.default_rng(0).normal([1000.1, -3e4, 0.0], [1.0, 0.5, 0.0], (50, 3))).astype(
        np.float32
    )
    learning = save_new_world("filtered", tmp_path, seen)
    written = aiorl.export_policy(tmp_path, tmp_path)
    obs = (
        np.random.default_rng(1)
        .normal([1000.1, -3e4, 0.0], [1.0, 0.5, 0.0], (30, 3))
        .astype(np.float32)
    )
    doubles = seen.astype(np.float64)
    filtered = ((obs - doubles.mean(0)) / (doubles.std(0, ddof=1) + 1e-8)).astype(np.float32)
    dist_inputs, values = learning.group.learners[DEFAULT].model.forward(filtered)
    found = run_onnx(written["onnx"], {"obs": obs})
    np.testing.assert_allclose(found["dist_inputs"], dist_inputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["vf"], values, rtol=1e-5, atol=1e-5)


def test_a_file_runs_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORLDS, "many", (BOX, MANY, {"model": {"fcnet_hiddens": [4]}}))
    save_world("many", tmp_path)
    written = aiorl.export_policy(tmp_path, tmp_path)
    described = json.loads((written["onnx"].parent / "policy.json").read_text())
    found = run_onnx(written["onnx"], {"obs": np.zeros((0, 3), np.float32)})
    for output in described["outputs"]:
        array = found[output["name"]]
        assert (array.dtype, array.shape) == (output["dtype"], (0, *output["shape"][1:]))


FAR = spaces.Box(1e8, 1e8 + 4, (2,), np.float64)


@pytest.mark.parametrize("settings", [{}, {"normalize_actions": False}, {"clip_actions": False}])
def test_actions_of_a_narrow_range_far_from_zero_are_those_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Float32 has one number in this range."""
    monkeypatch.setitem(WORLDS, "far", (BOX, FAR, {"model": {"fcnet_hiddens": [4]}, **settings}))
    save_world("far", tmp_path)
    written = aiorl.export_policy(tmp_path, tmp_path)
    policy = aiorl.load_policy(tmp_path)
    observations = observations_of(BOX, 9)
    expected, _, _ = policy.compute_actions(observations, [])
    found = run_onnx(written["onnx"], {"obs": model_inputs(BOX, observations)})
    np.testing.assert_allclose(found["action"] - 1e8, np.array(expected) - 1e8, atol=1e-5)


def test_differences_of_actions_count_by_their_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORLDS, "far", (BOX, FAR, {"model": {"fcnet_hiddens": [4]}}))
    save_world("far", tmp_path)
    write = onnx_form.write_onnx

    def write_shifted(form: Any, path: Path) -> Any:
        run = write(form, path)

        def run_shifted(inputs: Any) -> Any:
            found = run(inputs)
            return found | {"action": found["action"] + 0.01}

        return run_shifted

    monkeypatch.setattr(onnx_form, "write_onnx", write_shifted)
    with pytest.raises(ExportError, match=r"onnx: .* action differs by 0\.005, .* 1e-05"):
        aiorl.export_policy(tmp_path, tmp_path / "out")


def test_the_json_file_describes_inputs_outputs_and_origin(tmp_path: Path) -> None:
    save_world("memory", tmp_path)
    aiorl.export_policy(tmp_path, tmp_path / "out")
    text = (tmp_path / "out" / "onnx" / "policy.json").read_text()
    described = json.loads(text)
    assert str(tmp_path) not in text
    assert space_from_dict(described["observation_space"]) == BOX
    assert space_from_dict(described["action_space"]) == spaces.Discrete(2, start=3)
    assert [(item["name"], item["dtype"], item["shape"]) for item in described["inputs"]] == [
        ("obs", "float32", [None, 3]),
        *((f"state_in_{index}", "float32", [None, 5]) for index in range(4)),
    ]
    action = described["outputs"][0]
    assert (action["name"], action["dtype"], action["shape"], action["path"]) == (
        "action",
        "int64",
        [None],
        [],
    )
    assert all(item["meaning"] for item in described["inputs"] + described["outputs"])
    assert described["observation_filter"] == {"name": "MeanStdFilter", "count": 20}
    expected = {
        "format": "onnx",
        "file": "policy.onnx",
        "policy_id": DEFAULT,
        "algo": "ppo",
        "env": "world",
    }
    expected |= {"env_steps": 1400, "checkpoint": "checkpoint-000007", "run_id": "ab"}
    assert {name: described[name] for name in expected} == expected
    assert described["versions"]["aiorl"] == aiorl.__version__
    assert 0 <= described["checked"]["difference"] <= 1e-5


def test_weights_are_in_the_file_and_an_export_needs_neither_tensorflow_nor_the_environment(
    tmp_path: Path,
) -> None:
    save_world("memory", tmp_path / "run")
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["tensorflow", "keras", "tf2onnx", "pygame"]))
import aiorl
print(*aiorl.export_policy({str(tmp_path / "run")!r}, {str(tmp_path / "out")!r}).values())
try:
    aiorl.export_policy({str(tmp_path / "run")!r}, {str(tmp_path / "out")!r}, ["keras"])
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    path, refusal = done.stdout.splitlines()
    assert not onnx.external_data_helper.uses_external_data(onnx.load(path).graph.initializer[0])
    assert "tensorflow, keras" in refusal
    assert sorted(item.name for item in (tmp_path / "out").iterdir()) == ["onnx"]


def test_a_file_that_is_not_the_policy_is_not_put_in_place(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = aiorl.export_policy(run, tmp_path)["onnx"].read_bytes()
    write = onnx_form.write_onnx
    broken: dict[str, Any] = {
        "dist_inputs": lambda found: (
            found | {"dist_inputs": found["dist_inputs"] + np.float32(1e-4)}
        ),
        "action": lambda found: found | {"action": found["action"] + np.float32(1e-3)},
        "{'action'": lambda found: {"vf": found["vf"]},
        "there is no file": _fail,
    }
    for value, change in broken.items():

        def write_changed(form: Any, path: Path, change: Any = change) -> Any:
            run = write(form, path)
            return lambda inputs: change(run(inputs))

        monkeypatch.setattr(onnx_form, "write_onnx", write_changed)
        with pytest.raises(ExportError, match=f"'{DEFAULT}' .*onnx: .*{value}"):
            aiorl.export_policy(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]
    assert (tmp_path / "onnx" / "policy.onnx").read_bytes() == first


def _fail(found: Any) -> Any:
    raise OSError("there is no file")


def test_two_equally_likely_actions_do_not_count_as_a_difference(tmp_path: Path) -> None:
    save_world("box", tmp_path)
    found = load_checkpoint(tmp_path / "checkpoints" / "checkpoint-000007")
    head = {f"algorithm/{DEFAULT}/weights/policy/head/{name}" for name in ("kernel", "bias")}
    tensors = {name: array * 0 if name in head else array for name, array in found.tensors.items()}
    assert head <= tensors.keys()
    path = save_checkpoint(tmp_path / "other", 7, tensors, found.meta)
    written = aiorl.export_policy(path, tmp_path / "out")
    assert run_onnx(written["onnx"], {"obs": np.ones((2, 3), np.float32)})["action"].tolist() == [
        0,
        0,
    ]


def test_a_full_disk_leaves_the_earlier_export(run: Path, tmp_path: Path) -> None:
    aiorl.export_policy(run, tmp_path)
    before = (tmp_path / "onnx" / "policy.onnx").read_bytes()
    with disk_full_after(2000), pytest.raises(ConfigError) as caught:
        aiorl.export_policy(run, tmp_path)
    assert (caught.value.key, caught.value.value) == ("directory", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]
    assert (tmp_path / "onnx" / "policy.onnx").read_bytes() == before


def test_a_directory_with_other_content_is_not_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"policy\.json"):
        aiorl.export_policy(run, tmp_path)
    assert (tmp_path / "onnx" / "mine.txt").read_text() == "mine"


def test_several_policies_are_exported_by_name_and_those_of_the_users_own_are_refused(
    tmp_path: Path,
) -> None:
    multiagent = {
        "policies": {"left": None, "right": {"class": "general_runs:Pusher"}},
        "policy_mapping_fn": "general_runs:side",
        "policies_to_train": ["left"],
    }
    save_run(tmp_path, env="general_runs:Poles", multiagent=multiagent)
    written = aiorl.export_policy(tmp_path, tmp_path / "out", policy_id="left")
    assert json.loads((written["onnx"].parent / "policy.json").read_text())["policy_id"] == "left"
    with pytest.raises(PolicyError, match="general_runs:Pusher"):
        aiorl.export_policy(tmp_path, tmp_path / "out", policy_id="right")
    with pytest.raises(UnknownPolicyError, match="'left', 'right'"):
        aiorl.export_policy(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="nowhere"):
        aiorl.export_policy(tmp_path / "nowhere", tmp_path / "out")


def test_the_command_writes_each_format_and_names_the_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [str(run), "--formats", "onnx", "--out", str(tmp_path / "a" / "b"), "--policy", DEFAULT]
        )
        == 0
    )
    assert f"{tmp_path}/a/b/onnx/policy.onnx\n" in capsys.readouterr().out
    assert (tmp_path / "a" / "b" / "onnx" / "policy.onnx").is_file()
