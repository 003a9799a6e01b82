"""Policies loaded from a checkpoint act like the trained network, without TensorFlow and
environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import onnxruntime as ort
import pytest
from export_worlds import BOX, FOUR, SMALL_FRAMES, TORQUE, Shown, sequential
from gymnasium import spaces
from saved_runs import save_run

import aiorl
from aiorl.acting import acting_state
from aiorl.acting.acting_state import ActingState, SavedRun
from aiorl.acting.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from aiorl.data.nested_codec import pack, unpack
from aiorl.env.registry import register_env
from aiorl.errors import BatchError, CheckpointError, ConfigError, PolicyError, UnknownPolicyError
from aiorl.serving.models import Models

DEFAULT = aiorl.DEFAULT_POLICY_ID


PARTS = spaces.Dict({"position": BOX, "room": spaces.Discrete(3)})

WORLDS: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], dict[str, Any]]] = {
    "box": (BOX, FOUR, {}),
    "filtered": (BOX, TORQUE, {"observation_filter": "MeanStdFilter"}),
    "filtered when drawn": (BOX, FOUR, {"algo": "dqn", "observation_filter": "MeanStdFilter"}),
    "frames": (SMALL_FRAMES, FOUR, {"model": {"conv_filters": [[4, 3, 2]]}}),
    "parts": (PARTS, FOUR, {"observation_filter": "MeanStdFilter"}),
    "looks back": (
        BOX,
        FOUR,
        {"model": {"use_gru": True, "lstm_cell_size": 8, "lstm_use_prev_action_reward": True}},
    ),
    "custom": (BOX, FOUR, {"model": {"custom_model": "users_models:sequential"}}),
}


def inputs_of(world: str, observations: list[Any]) -> np.ndarray[Any, Any]:
    """Compute the network's input by hand."""
    if world == "parts":
        observations = [[*obs["position"], *np.eye(3)[obs["room"]]] for obs in observations]
    return np.asarray(observations, np.uint8 if world == "frames" else np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of CartPole-v1; read-only."""
    directory = tmp_path_factory.mktemp("saved")
    save_run(directory, env="CartPole-v1")
    return directory


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a recurrent policy; read-only."""
    directory = tmp_path_factory.mktemp("recurrent")
    register_env("shown", lambda context: Shown(BOX, FOUR))
    save_run(directory, env="shown", model={"use_lstm": True, "lstm_cell_size": 8})
    return directory


@pytest.mark.rest_slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_loaded_policy_acts_like_the_trained_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: str
) -> None:
    monkeypatch.setitem(sys.modules, "users_models", types.SimpleNamespace(sequential=sequential))
    observation_space, action_space, settings = WORLDS[world]
    register_env("shown", lambda context: Shown(observation_space, action_space))
    observation_space.seed(1)
    inputs = inputs_of(world, [observation_space.sample() for _ in range(20)])
    is_filtered = "observation_filter" in settings
    learning = save_run(
        tmp_path, {DEFAULT: inputs} if is_filtered else None, env="shown", **settings
    )
    model = learning.group.learners[DEFAULT].model

    policy = aiorl.load_policy(tmp_path)
    assert (policy.observation_space, policy.action_space) == (observation_space, action_space)
    assert (policy.env, policy.env_steps) == ("shown", 1400)
    assert policy.is_recurrent is ("gru" in str(settings))

    observations = [observation_space.sample() for _ in range(4)]
    state, prev = policy.get_initial_state(), ()
    if "look" in world:
        prev = (np.array([2]), np.array([0.5], np.float32))
    for obs in observations:
        network_input = inputs_of(world, [obs])
        if is_filtered:
            network_input = (
                (network_input - inputs.mean(0)) / (inputs.std(0, ddof=1) + 1e-8)
            ).astype(np.float32)
        dist_inputs, values, state_out = model.forward_step(
            network_input, [component[None] for component in state], *prev
        )
        before = {"prev_action": 2, "prev_reward": 0.5} if prev else {}
        action, after, beside = policy.compute_single_action(obs, state, **before, full_fetch=True)
        np.testing.assert_allclose(
            beside["action_dist_inputs"], dist_inputs.numpy()[0], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(beside["vf_preds"], values.numpy()[0], rtol=1e-4, atol=1e-5)
        if action_space is FOUR:
            assert action == int(np.argmax(dist_inputs.numpy()[0]))
        else:
            np.testing.assert_allclose(
                action, np.clip(0.1 * dist_inputs.numpy()[0, :2], -0.1, 0.1), rtol=1e-4
            )
        for ours, theirs in zip(after, state_out, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy()[0], rtol=1e-4, atol=1e-5)
        state = after

    actions, _, _ = policy.compute_actions(observations)
    single_actions = [policy.compute_single_action(obs) for obs in observations]
    # a matrix of rows rounds differently from one row
    np.testing.assert_allclose(actions, single_actions, rtol=1e-5)


class Noted(Shown):
    """Environment of random observations that notes each observation, the action for it, and the
    reward.
    """

    steps: list[tuple[Any, Any, float]]

    def __init__(self, *env_spaces: Any) -> None:
        super().__init__(*env_spaces)
        self.steps = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.shown, info = super().reset(seed=seed, options=options)
        return self.shown, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        reward = 0.25 * len(self.steps)
        self.steps.append((self.shown, action, reward))
        self.shown = self.observation_space.sample()
        return self.shown, reward, len(self.steps) == 8, False, {}


@pytest.fixture(scope="module")
def uses_previous_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[Any, Any, float]]]:
    """Run directory of a policy that looks back at clipped actions, and the steps of an evaluation;
    read-only.
    """
    directory = tmp_path_factory.mktemp("uses_previous_step")
    envs: list[Noted] = []

    def make(context: Any) -> Noted:
        envs.append(Noted(BOX, TORQUE))
        return envs[-1]

    register_env("noted", make)
    save_run(
        directory,
        env="noted",
        model={"use_lstm": True, "lstm_cell_size": 8, "lstm_use_prev_action_reward": True},
    )
    aiorl.evaluate(directory, episodes=1, seed=3)
    return directory, next(env.steps for env in reversed(envs) if env.steps)


def test_a_policy_that_looks_back_at_clipped_actions_acts_as_in_an_evaluation(
    uses_previous_step: tuple[Path, list[tuple[Any, Any, float]]],
) -> None:
    directory, steps = uses_previous_step
    played = np.array([action for _, action, _ in steps])
    assert np.isin(played, [TORQUE.low, TORQUE.high]).mean() > 0.3, "many numbers are clipped"
    policy = aiorl.load_policy(directory)
    state, before = policy.get_initial_state(), (None, None)
    assert [component.shape for component in state] == [(8,)] * 4 + [TORQUE.shape]
    for obs, expected, reward in steps:
        action, after, _ = policy.compute_single_action(obs, state, *before)
        np.testing.assert_allclose(action, expected, atol=1e-5)
        rows = [component[None] for component in state]
        previous, last_reward = before
        of_rows = (
            {} if previous is None else {"prev_actions": [previous], "prev_rewards": [last_reward]}
        )
        (batched,), states, _ = policy.compute_actions([obs], rows, **of_rows)
        np.testing.assert_allclose(batched, expected, atol=1e-5)
        np.testing.assert_allclose(states[-1][0], after[-1], atol=1e-5)
        state, before = after, (action, reward)


def test_an_export_that_looks_back_at_its_own_clipped_actions_acts_as_in_an_evaluation(
    uses_previous_step: tuple[Path, list[tuple[Any, Any, float]]], tmp_path: Path
) -> None:
    directory, steps = uses_previous_step
    session = ort.InferenceSession(str(aiorl.export_policy(directory, tmp_path)["onnx"]))
    names = [output.name for output in session.get_outputs()]
    inputs = {
        item.name: np.zeros((1, *item.shape[1:]), np.float32) for item in session.get_inputs()
    }
    for obs, expected, reward in steps:
        inputs["obs"] = obs[None]
        outputs = dict(zip(names, session.run(names, inputs), strict=True))
        np.testing.assert_allclose(outputs["action"][0], expected, atol=1e-5)
        inputs = {
            name: outputs.get(name.replace("_in_", "_out_"), value)
            for name, value in inputs.items()
        }
        inputs["prev_actions"], inputs["prev_rewards"] = (
            outputs["action"],
            np.array([reward], np.float32),
        )
    actor = Models([str(tmp_path)])[DEFAULT].arms[0].actor
    memory, before = [component[None] for component in actor.initial_memory], {}
    for obs, expected, reward in steps:
        actions, memory, _ = actor.compute_actions([obs], memory, **before, explore=False)
        np.testing.assert_allclose(actions[0], expected, atol=1e-5)
        before = {"prev_actions": actions, "prev_rewards": [reward]}


def test_a_policy_looks_back_at_the_action_that_was_taken_if_it_is_not_its_own(
    uses_previous_step: tuple[Path, list[tuple[Any, Any, float]]],
) -> None:
    directory, steps = uses_previous_step
    policy = aiorl.load_policy(directory)
    _, state, _ = policy.compute_single_action(steps[0][0], policy.get_initial_state())
    action_taken = np.array([0.05, -0.02], np.float32)
    action, _, _ = policy.compute_single_action(steps[1][0], state, action_taken, 1.0)
    without_own = [*state[:-1], np.zeros_like(state[-1])]
    expected, _, _ = policy.compute_single_action(steps[1][0], without_own, action_taken, 1.0)
    recurrent_only, _, _ = policy.compute_single_action(steps[1][0], state[:-1], action_taken, 1.0)
    np.testing.assert_array_equal(action, expected)
    np.testing.assert_array_equal(action, recurrent_only)
    with pytest.raises(PolicyError, match=r"\(5,\)"):
        policy.compute_single_action(steps[1][0], [*state[:-1], np.zeros(5)], action_taken, 1.0)


def test_several_policies_are_loaded_by_name_except_one_of_the_users_own_class(
    tmp_path: Path,
) -> None:
    multiagent = {
        "policies": {"left": None, "right": {"class": "general_runs:Pusher"}},
        "policy_mapping_fn": "general_runs:side",
        "policies_to_train": ["left"],
    }
    save_run(tmp_path, env="general_runs:Poles", multiagent=multiagent)
    assert aiorl.load_policy(tmp_path, "left").policy_id == "left"
    with pytest.raises(PolicyError, match="general_runs:Pusher"):
        aiorl.load_policy(tmp_path, "right")
    for unknown in ("absent", None):
        with pytest.raises(UnknownPolicyError, match="'left', 'right'"):
            aiorl.load_policy(tmp_path, unknown)


def test_actions_are_sampled_only_on_request(saved: Path) -> None:
    policy, again = (aiorl.load_policy(saved, seed=3) for _ in range(2))
    obs = np.zeros(4, np.float32)
    assert len({policy.compute_single_action(obs) for _ in range(50)}) == 1
    drawn = [policy.compute_single_action(obs, explore=True) for _ in range(50)]
    assert len(set(drawn)) > 1
    assert [again.compute_single_action(obs, explore=True) for _ in range(50)] == drawn


def test_an_episode_may_begin_with_none_as_its_state(recurrent: Path) -> None:
    policy = aiorl.load_policy(recurrent)
    obs = np.full(3, 0.5, np.float32)
    assert policy.compute_single_action(obs, None) == policy.compute_single_action(obs)
    _, begun, _ = policy.compute_single_action(obs, None, full_fetch=True)
    _, expected, _ = policy.compute_single_action(obs, policy.get_initial_state())
    np.testing.assert_array_equal(begun, expected)
    np.testing.assert_array_equal(policy.compute_actions([obs], None)[1][0][0], expected[0])


def test_observations_and_states_that_do_not_fit_are_refused(recurrent: Path) -> None:
    policy = aiorl.load_policy(recurrent)
    with pytest.raises(BatchError, match="4"):
        policy.compute_single_action(np.zeros(4))
    with pytest.raises(ValueError, match="NaN"):
        policy.compute_single_action(np.full(3, np.nan))
    with pytest.raises(PolicyError, match=r"1 .*4"):
        policy.compute_single_action(np.zeros(3), [np.zeros(8, np.float32)])


def test_a_policy_is_found_by_every_path_into_its_run_and_the_newest_undamaged_one_is_used(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    directory = tmp_path / "run" / "checkpoints"
    first = directory / "checkpoint-000007"
    for path in (tmp_path / "run", directory, first, str(first)):
        assert aiorl.load_policy(path).path == first
    checkpoint = load_checkpoint(first)
    save_checkpoint(directory, 9, checkpoint.tensors, checkpoint.meta)
    assert aiorl.load_policy(directory).path == directory / "checkpoint-000009"
    (directory / "checkpoint-000009" / "tensors.safetensors").write_bytes(b"damaged")
    assert aiorl.load_policy(tmp_path / "run").path == first
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors"):
        aiorl.load_policy(directory / "checkpoint-000009")


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_path_to_no_checkpoint_says_what_was_expected(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint-\*"):
        aiorl.load_policy(tmp_path / path)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("acting"),
        lambda tensors: tensors.update(acting=tensors["acting"][:-3]),
        lambda tensors: tensors.update(acting=np.zeros(9, np.uint8)),
        lambda tensors: tensors.pop(next(name for name in tensors if "/weights/" in name)),
    ],
)
def test_a_checkpoint_that_makes_no_sense_is_refused(
    saved: Path, tmp_path: Path, change: Any
) -> None:
    checkpoint = load_checkpoint(saved / "checkpoints" / "checkpoint-000007")
    tensors = dict(checkpoint.tensors)
    change(tensors)
    path = save_checkpoint(tmp_path / "other", 7, tensors, checkpoint.meta)
    with pytest.raises(CheckpointError, match=str(path)):
        aiorl.load_policy(path)


def test_secrets_of_a_run_are_not_in_its_checkpoints(tmp_path: Path) -> None:
    save_run(
        tmp_path,
        env="CartPole-v1",
        extra_python_environs_for_worker={"HUB_TOKEN": "hush-1"},
        extra_python_environs_for_driver={"DB_PASSWORD": "hush-2"},
    )
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"hush" not in written
    assert b"HUB_TOKEN" in written


def test_acting_loads_neither_tensorflow_nor_an_environment(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoints" / "checkpoint-000007", tmp_path / "checkpoint-000007")
    code = f"""
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = sys.modules["onnx"] = sys.modules["pygame"] = None
import aiorl, numpy
policy = aiorl.load_policy({str(tmp_path / "checkpoint-000007")!r})
action = policy.compute_single_action(numpy.zeros(4, numpy.float32))
print(action, "gymnasium.envs.classic_control" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[1] == "False"


def test_code_named_by_another_users_checkpoint_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_run(tmp_path, env="general_runs:Bits")
    aiorl.load_policy(tmp_path)
    assert "general_runs:Bits" not in caplog.text
    monkeypatch.setattr(os, "getuid", lambda: 123_456)
    aiorl.load_policy(tmp_path)
    assert "env: 'general_runs:Bits'" in caplog.text


def forged(
    saved: Path, directory: Path, change: Callable[[dict[str, Any]], object], number: int = 8
) -> Path:
    """Write an undamaged checkpoint with acting data made up by its author."""
    checkpoint = load_checkpoint(saved / "checkpoints" / "checkpoint-000007")
    content = unpack(checkpoint.tensors["acting"].tobytes())
    packed = change(content) or pack(content)
    tensors = {**checkpoint.tensors, "acting": np.frombuffer(packed, np.uint8)}
    # as in its ledger
    meta = {
        **checkpoint.meta,
        "counters": {**checkpoint.meta["counters"], "env_steps_trained": 0},
    }
    return save_checkpoint(directory, number, tensors, meta)


def test_a_model_named_only_by_a_networks_description_is_shown(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change(content: dict[str, Any]) -> None:
        graph = content["graphs"][DEFAULT]
        graph["graph"], graph["spec"]["tf_model"] = b"", {"custom_model": "their_net:make"}

    path = forged(saved, tmp_path, change)
    monkeypatch.setattr(os, "getuid", lambda: 123_456)
    SavedRun.open(path)
    assert f"graphs.{DEFAULT}.tf_model.custom_model: 'their_net:make'" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_trainer_shows_code_named_by_another_users_checkpoint_before_importing_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_world.py").write_text("raise ValueError('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    foreign_settings = {
        "env": "their_world:Env",
        "extra_python_environs_for_driver": {"AIORL_THEIRS": "1"},
    }
    path = forged(
        saved, tmp_path / "theirs", lambda content: content["config"].update(foreign_settings)
    )
    os.chown(path, 123_456, -1)
    monkeypatch.setenv("AIORL_THEIRS", "0")
    warnings: list[tuple[str, str]] = []
    monkeypatch.setattr(
        acting_state.logger,
        "warning",
        lambda form, text: warnings.append((text, os.environ["AIORL_THEIRS"])),
    )
    with pytest.raises(ConfigError, match="it ran"):
        aiorl.Trainer.restore(path, run_dir=str(tmp_path / "run"))
    texts = [text for text, _ in warnings]
    assert any("env: 'their_world:Env'" in text for text in texts)
    assert any("extra_python_environs_for_driver" in text for text in texts)
    assert [value for _, value in warnings] == ["0"] * len(warnings)
    assert os.environ["AIORL_THEIRS"] == "0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_where_another_users_run_listens_and_writes_is_left_out_and_shown(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {
        "bind": "tcp://0.0.0.0:5557",
        "insecure": True,
        "keys": "/theirs",
        "web": "0.0.0.0:80",
        "output": "/theirs",
        "output_max_file_size": 7,
        "monitor": True,
        "loggers": ["wandb"],
        "init_from": "/theirs",
        "evaluation_config": {"monitor": True, "horizon": 7},
        "gamma": 0.5,
    }

    def change(content: dict[str, Any]) -> None:
        content["config"].update(theirs)
        content["part"].update(output="/theirs", monitor=True, log_dir="/theirs")

    path = forged(saved, tmp_path, change)
    own_state = SavedRun.open(path).acting
    assert (own_state.config["bind"], own_state.part.output) == (theirs["bind"], "/theirs")
    configs: list[Any] = []
    monkeypatch.setattr(
        aiorl.Trainer, "__init__", lambda trainer, config, checkpoint: configs.append(config)
    )
    monkeypatch.setattr(os, "getuid", lambda: 123_456)
    acting = SavedRun.open(path).acting
    assert (acting.config["bind"], acting.part.output) == (
        theirs["bind"],
        "/theirs",
    ), "root wrote it"
    monkeypatch.undo()
    monkeypatch.setattr(
        aiorl.Trainer, "__init__", lambda trainer, config, checkpoint: configs.append(config)
    )
    replacement = tmp_path / "mine"
    shutil.copytree(path, replacement / path.name)
    for file in (path, *path.iterdir()):
        os.chown(file, 123_456, -1)
    check = ActingState.from_checkpoint

    def swapped(read: Checkpoint) -> ActingState:
        if not path.is_symlink():
            path.rename(tmp_path / "former")
            path.symlink_to(replacement / path.name)
        return check(read)

    with monkeypatch.context() as swap:
        swap.setattr(ActingState, "from_checkpoint", swapped)
        acting = SavedRun.open(path).acting
    assert (acting.config.get("bind"), acting.part.output) == (None, None), "their values count"
    path.unlink()
    (tmp_path / "former").rename(path)
    acting = SavedRun.open(path).acting
    assert (acting.part.output, acting.part.monitor, acting.part.log_dir) == (None, False, None)
    assert all(
        f"  {name}: {value!r}" in caplog.text
        for name, value in theirs.items()
        if name in ("bind", "insecure")
    )
    assert "evaluation_config.monitor" in caplog.text
    aiorl.Trainer.restore(path)
    aiorl.Trainer.restore(path, bind="tcp://127.0.0.1:7000")
    first, second = configs
    defaults = type(first)()
    assert first.evaluation_config == {"horizon": 7}
    assert first.gamma == theirs["gamma"]
    for name in theirs.keys() - {"evaluation_config", "gamma"}:
        assert getattr(first, name) == getattr(defaults, name), name
    assert second.bind == "tcp://127.0.0.1:7000"


@pytest.mark.parametrize("kind", ["tuples", "lists"])
def test_a_checkpoint_nested_too_deeply_is_skipped(saved: Path, tmp_path: Path, kind: str) -> None:
    packed = pack([])
    for _ in range(400):
        packed = (
            msgpack.packb(msgpack.ExtType(3, b"\x91" + packed))
            if kind == "tuples"
            else b"\x91" + packed
        )
    directory = tmp_path / "checkpoints"
    forged(saved, directory, lambda content: None, number=7)
    forged(saved, directory, lambda content: packed)
    assert aiorl.load_policy(tmp_path).path.name == "checkpoint-000007"
    # the code is looked up once a checkpoint has been found
    with pytest.raises(ConfigError, match="no_such"):
        aiorl.Trainer.restore(tmp_path, env="no_such:Env", run_dir=str(tmp_path / "run"))
