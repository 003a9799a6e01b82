"""Trainers as a program uses them, without worker processes; with workers:
test_trainer_with_workers.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file
from small_runs import SMALL, Played, raising

import aiorl
from aiorl.errors import (
    AiorlError,
    CheckpointError,
    ConfigError,
    EnvError,
    MemoryQuotaError,
    UnknownPolicyError,
    WorkerError,
)
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.run.policy_group import PolicyGroup
from aiorl.run.report.loggers import read_results

TRACED = {"eager": False, "xla": "off", "sgd_minibatch_size": 32, "num_sgd_iter": 2}

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a trainer after two iterations, with a filter; it traces its update, and tests must
    not change it.
    """
    folder = tmp_path_factory.mktemp("shared")
    settings = {
        **SMALL,
        **TRACED,
        "run_dir": str(folder / "run"),
        "observation_filter": "MeanStdFilter",
    }
    with aiorl.PPOTrainer(settings, env="CartPole-v1") as trainer:
        trainer.train()
        trainer.train()
        yield trainer


# Construction


def test_r172_an_environment_is_a_gymnasium_id_a_registered_name_or_a_class_and_the_argument_wins(
    make: Make, played: type[Played]
) -> None:
    assert make("Acrobot-v1", env="CartPole-v1").config.env == "Acrobot-v1"
    aiorl.register_env("my-counting", lambda context: Played())
    assert make("my-counting").train()["episode_len_mean"] == 4
    assert make(played).train()["episode_len_mean"] == 4


def test_r172_a_class_that_only_this_process_knows_works_without_workers_and_is_refused_with_them(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Own(Played):
        pass

    assert make(Own).train()["episode_len_mean"] == 4
    config = PPOConfig(env=Own, **SMALL)
    for change in (lambda: make(Own, num_workers=1), lambda: config.updated({"num_workers": 1})):
        with pytest.raises(ConfigError) as caught:
            change()
        assert caught.value.key == "env"
    for given in (config, config.updated({"run_dir": str(tmp_path / "updated")})):
        with given.build() as trainer:
            assert trainer.train()["episode_len_mean"] == 4


@pytest.mark.parametrize("env", [None, 5, "NoSuchEnv-v0"])
def test_r172_anything_else_is_a_value_error_and_nothing_is_made(
    make: Make, env: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(env)
    assert caught.value.key == "env"
    assert not list(tmp_path.iterdir())


def test_r173_the_run_directory_is_new_and_named_by_algorithm_environment_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        aiorl.PPOTrainer(SMALL, env="CartPole-v1") as one,
        aiorl.PPOTrainer(SMALL, env="CartPole-v1") as two,
    ):
        names = [Path(trainer.logdir).name for trainer in (one, two)]
    assert len({*names}) == 2
    for name in names:
        assert re.match(r"ppo_CartPole-v1_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", name)


def test_a_class_without_algorithm_or_init_is_a_clear_error(tmp_path: Path) -> None:
    class Unfinished(aiorl.Trainer):
        _name = "mine"
        _default_config = PPOConfig

    with pytest.raises(NotImplementedError, match="PPOTrainer"):
        aiorl.Trainer({"env": "CartPole-v1"})
    with pytest.raises(NotImplementedError, match="_init"):
        Unfinished({"env": "CartPole-v1", "algo": "mine", "run_dir": str(tmp_path / "run")})


def test_a_config_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"impala.*PPOTrainer"):
        aiorl.PPOTrainer({"algo": "impala"}, env="CartPole-v1")


def test_r171_with_common_config_replaces_whole_sub_dicts_and_does_not_change_the_defaults() -> (
    None
):
    before = PPOConfig().to_dict()
    changed = aiorl.PPOTrainer.with_common_config(
        {"lr": 1.0, "env_config": {"a": 1}, "model": {"use_lstm": True}}
    )
    assert (changed["lr"], changed["env_config"], changed["model"]) == (
        1.0,
        {"a": 1},
        {"use_lstm": True},
    )
    assert PPOConfig().to_dict() == before


# Training


def test_r185_min_iter_time_s_and_timesteps_per_iteration_lengthen_calls_only(make: Make) -> None:
    result = make(timesteps_per_iteration=200).train()
    assert result["updates_this_iter"] == 4
    began = time.monotonic()
    assert make(min_iter_time_s=0.2).train()["time_this_iter_s"] >= 0.2
    assert time.monotonic() - began >= 0.2


def test_r185_the_callers_pauses_do_not_count_for_the_time_of_an_iteration(make: Make) -> None:
    trainer = make()
    began = time.monotonic()
    trainer.train()
    time.sleep(0.3)
    result = trainer.train()
    assert result["time_total_s"] <= time.monotonic() - began - 0.3


def test_iterate_ends_at_a_criterion_and_shows_progress_on_request(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make()
    assert len(list(trainer.iterate(stop_iterations=2, progress=True))) == 2
    assert len(re.findall(r"\r\d\d:\d\d  ", capsys.readouterr().out)) == 2
    *earlier, last = [
        result["env_steps_trained_total"] for result in trainer.iterate(stop_timesteps=256)
    ]
    assert max(earlier) < 256 <= last
    assert len(list(trainer.iterate(stop_time_s=0.0))) == 1
    assert capsys.readouterr().out == ""


def test_r174_the_timestep_is_set_before_each_iteration(make: Make) -> None:
    trainer = make()
    before = 0
    for _ in range(3):
        local = trainer.workers.local_worker()
        result = trainer.train()
        assert trainer.global_vars["timestep"] == local.global_vars["timestep"] == before
        before = result["timesteps_total"]


class Hooks(aiorl.DefaultCallbacks):
    """Hooks that change each result by facts of the trainer, and stop the trainer in its second
    iteration.
    """

    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        result["mine"] = {
            "iteration": trainer.iteration,
            "action": int(trainer.compute_action(np.zeros(4))),
        }
        if trainer.iteration == 2:
            trainer.stop()


def test_r180_changes_by_on_train_result_are_returned_and_logged_even_if_it_stops_the_trainer(
    make: Make,
) -> None:
    trainer = make(callbacks=f"{__name__}:Hooks")
    results = list(trainer.iterate(stop_iterations=5))
    assert [result["mine"]["iteration"] for result in results] == [1, 2]
    assert [result["mine"] for result in read_results(Path(trainer.logdir))] == [
        result["mine"] for result in results
    ]
    held = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert not [path for path in held if path.startswith(trainer.logdir)]
    with aiorl.PPOTrainer({"resume": trainer.logdir}) as again:  # no one holds its lock
        assert again.train()["training_iteration"] == 3


def test_a_program_that_changes_its_working_directory_has_a_run_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with aiorl.PPOTrainer({**SMALL, "run_dir": "mine"}, env="CartPole-v1") as trainer:
        os.chdir(elsewhere)
        trainer.train()
        saved = trainer.save()
    assert not list(elsewhere.iterdir())
    assert trainer.logdir == str(tmp_path / "mine")
    assert Path(saved).parent == tmp_path / "mine" / "checkpoints"
    assert (tmp_path / "mine" / "result.jsonl").read_text().count("\n") == 1


def test_variables_of_the_driver_are_set_before_the_environment_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIORL_TEST_OF_DRIVER", raising=False)
    with pytest.raises(ConfigError, match="NoSuch"):
        make("NoSuch-v0", extra_python_environs_for_driver={"AIORL_TEST_OF_DRIVER": "set"})
    assert os.environ.pop("AIORL_TEST_OF_DRIVER") == "set"


def test_a_restored_trainer_takes_secrets_from_the_environment_and_names_missing_ones(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "mine")
    first = make(extra_python_environs_for_worker={"HUB_TOKEN": "mine"})
    path = first.save(tmp_path / "saved")
    with aiorl.Trainer.restore(path, run_dir=str(tmp_path / "again")) as again:
        assert again.config.extra_python_environs_for_worker == {"HUB_TOKEN": "mine"}
        assert os.environ["HUB_TOKEN"] == "mine"
    monkeypatch.delenv("HUB_TOKEN")
    with pytest.raises(ConfigError, match="HUB_TOKEN"):
        aiorl.Trainer.restore(path, run_dir=str(tmp_path / "third"))


def test_changes_of_a_restored_trainer_merge_into_the_groups_of_its_config(
    make: Make, tmp_path: Path
) -> None:
    sizes: list[Any] = []
    aiorl.register_env("sized", lambda context: sizes.append(dict(context)) or Played())
    first = make("sized", env_config={"size": 7, "pay": 2}, lr_schedule=[[0, 0.5], [9999, 0.1]])
    path = first.save(tmp_path / "saved")
    first.stop()
    for name in ("init_from", "preset"):
        with pytest.raises(ConfigError) as caught:
            aiorl.Trainer.restore(path, **{name: str(path)})
        assert caught.value.key == name
    sizes.clear()
    changes = {
        "env_config": {"pay": 3},
        "model": {"initial_log_std": 0.0},
        "lr": 0.125,
        "run_dir": str(tmp_path / "b"),
    }
    with aiorl.Trainer.restore(path, **changes) as again:
        assert again.config.env_config == {"size": 7, "pay": 3}
        assert {(own["size"], own["pay"]) for own in sizes} == {(7, 3)}
        assert again.config.model == first.config.model
        assert (again.config.lr, again.config.lr_schedule) == (0.125, None)


class Tabled(Played):
    """Pays what a table says, which is an object that only this process has."""

    table: np.ndarray[Any, Any]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, *end = super().step(action)
        return observation, float(self.table[0]), *end


def test_an_environment_gets_objects_as_they_are_in_training_evaluations_and_restored_trainers(
    make: Make, tmp_path: Path
) -> None:
    tables: list[Any] = []

    def tabled(context: Any) -> Any:
        tables.append(context["table"])
        env = Tabled()
        env.table = context["table"]
        return env

    table = np.array([2.0])
    trainer = make(
        tabled, env_config={"table": table}, evaluation_interval=1, evaluation_num_episodes=1
    )
    result = trainer.train()
    assert result["episode_reward_mean"] == result["evaluation"]["episode_reward_mean"] == 8.0
    assert trainer.evaluate(1).mean == 8.0
    path = trainer.save(tmp_path / "saved")
    other = np.array([3.0])
    with aiorl.Trainer.restore(path, run_dir=str(tmp_path / "a")) as again:
        assert again.train()["evaluation"]["episode_reward_mean"] == 8.0
    assert all(each is table for each in tables)
    with aiorl.Trainer.restore(
        path, env_config={"table": other}, run_dir=str(tmp_path / "b")
    ) as again:
        assert again.train()["evaluation"]["episode_reward_mean"] == 12.0
    assert aiorl.evaluate(path, episodes=1, config={"env_config": {"table": other}}).mean == 12.0


def test_the_update_after_a_failed_one_uses_a_new_batch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make()
    trainer.train()
    with monkeypatch.context() as patch:
        patch.setattr(PolicyGroup, "update", lambda *batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    result = trainer.train()
    ledger = result["ledger"]
    (discarded,) = ledger["discarded"].values()
    assert ledger["sampled"] == ledger["trained"] + discarded > 2 * 64
    assert trainer._training.core.is_idle


def test_results_go_to_the_callers_logger_if_there_is_one(tmp_path: Path) -> None:
    results: list[Any] = []
    given: list[dict[str, Any]] = []

    def creator(config: dict[str, Any]) -> Any:
        given.append(config)
        return SimpleNamespace(write=results.append, close=lambda: results.append("closed"))

    with aiorl.PPOTrainer(
        {**SMALL, "run_dir": str(tmp_path / "run")}, "CartPole-v1", creator
    ) as trainer:
        result = trainer.train()
    assert results == [result, "closed"]
    assert given[0]["lr"] == 0.01
    assert not (tmp_path / "run" / "result.jsonl").exists()


def test_r193_results_average_over_the_smoothing_window_and_are_nan_without_an_episode(
    make: Make,
) -> None:
    trainer = make("MountainCar-v0")
    assert np.isnan(trainer.train()["episode_reward_mean"])


def test_r195_system_usage_is_in_results_on_request(make: Make) -> None:
    assert {"cpu_util_percent", "ram_util_percent"} <= make().train()["perf"].keys()
    assert "perf" not in make(log_sys_usage=False).train()


# Faults


class Failing(aiorl.Trainer):
    """Trainer with workers that fail a given number of times."""

    _name = "ppo"
    _default_config = PPOConfig
    failures, recovers = 0, True

    def _init(self, config: Any, env_creator: Any) -> None:
        self.tries = 0

    def _train(self) -> dict[str, Any]:
        self.tries += 1
        if self.tries <= self.failures:
            raise WorkerError(1, "the environment broke")
        return {}

    def _recover(self) -> None:
        if not self.recovers:
            super()._recover()


def failing(folder: Path, failures: int, **settings: Any) -> Any:
    trainer = Failing({"run_dir": str(folder / "run"), **settings}, env="CartPole-v1")
    trainer.failures = failures
    return trainer


def test_r175_a_failure_that_is_not_ignored_is_raised_with_a_hint(tmp_path: Path) -> None:
    with failing(tmp_path, 1) as trainer, pytest.raises(WorkerError) as caught:
        trainer.train()
    assert "ignore_worker_failures" in str(caught.value.__notes__)


def test_r176_an_iteration_is_attempted_four_times_or_once_without_a_way_to_recover(
    tmp_path: Path,
) -> None:
    with failing(tmp_path / "a", 3, ignore_worker_failures=True) as trainer:
        assert trainer.train()["training_iteration"] == 1
        assert trainer.tries == 4
    with (
        failing(tmp_path / "b", 9, ignore_worker_failures=True) as trainer,
        pytest.raises(RuntimeError, match="4"),
    ):
        trainer.train()
    assert trainer.tries == 4
    with failing(tmp_path / "c", 1, ignore_worker_failures=True) as trainer:
        trainer.recovers = False
        with pytest.raises(NotImplementedError):
            trainer.train()


def test_an_environments_error_reaches_the_caller_with_its_traceback_and_training_can_continue(
    make: Make, played: type[Played]
) -> None:
    trainer = make(played)
    trainer.train()
    played.at_step[played.steps + 5] = raising(ZeroDivisionError("in my environment"))
    with pytest.raises(EnvError, match="in my environment") as caught:
        trainer.train()
    assert (
        isinstance(caught.value.__cause__, ZeroDivisionError)
        or "ZeroDivisionError" in caught.value.traceback_text
    )
    result = trainer.train()
    assert result["updates_total"] == 2
    assert result["ledger"]["trained"] == 128


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_leaving_the_block_by_an_error_saves_the_last_update(
    make: Make, error: type[BaseException]
) -> None:
    trainer = make()

    def work() -> None:
        with trainer:
            trainer.train()
            raise error

    with pytest.raises(error):
        work()
    assert aiorl.load_policy(trainer.logdir).env_steps == 64


def test_t6_two_trainers_in_one_process_are_independent(make: Make) -> None:
    alone = [make(seed=7).train()["episode_reward_mean"]]
    one, other = make(seed=7), make("Acrobot-v1", seed=8)
    both = [one.train(), other.train(), one.train(), other.train()]
    assert both[0]["episode_reward_mean"] == alone[0]
    assert [result["training_iteration"] for result in both] == [1, 1, 2, 2]
    assert one.get_weights()["default_policy"]["policy/dense_0/kernel"].shape[0] == 4
    assert other.get_weights()["default_policy"]["policy/dense_0/kernel"].shape[0] == 6


def test_r184_the_learners_memory_quota_holds_in_this_process(make: Make) -> None:
    with pytest.raises(MemoryQuotaError) as caught:
        make(memory=1 << 20).train()
    assert caught.value.key == "memory"


# Acting


def test_r181_compute_action_preprocesses_filters_without_update_and_returns_all_on_request(
    shared: Any,
) -> None:
    obs = np.array([0.5, -0.2, 0.1, 0.3])
    local = shared.workers.local_worker()
    state = local.filters["default_policy"].state()
    action, _, beside = shared.compute_action(obs, full_fetch=True)
    assert action == shared.compute_action(obs) == np.argmax(beside["action_dist_inputs"])
    std = np.sqrt(state["m2"] / (state["n"] - 1))
    filtered = np.clip((obs - state["mean"]) / (std + 1e-8), -10, 10).astype(np.float32)
    _, _, want = local.get_policy().compute_actions(filtered[None], [])
    np.testing.assert_allclose(
        beside["action_dist_inputs"], want["action_dist_inputs"][0], rtol=1e-4
    )
    after = shared.workers.local_worker().filters["default_policy"].state()
    assert state["n"] == after["n"] > 0


def test_the_hint_for_many_observations_leads_to_the_same_actions(
    shared: Any, tmp_path: Path
) -> None:
    with pytest.raises(AttributeError, match=r"aiorl\.load_policy\(path\)\.compute_actions takes"):
        _ = shared.compute_actions
    observations = np.random.default_rng(0).uniform(-1.0, 1.0, (100, 4))
    policy = aiorl.load_policy(shared.save(tmp_path))
    actions, _, _ = policy.compute_actions(observations)
    assert [*actions] == [shared.compute_action(observation) for observation in observations]


def test_r181_a_recurrent_state_is_used_and_returned(make: Make) -> None:
    trainer = make(model={"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 4})
    obs = np.array([0.5, -0.2, 0.1, 0.3])
    first = trainer.compute_action(obs, full_fetch=True)
    second = trainer.compute_action(obs, first[1])
    assert len(second) == 3
    assert not np.allclose(
        first[2]["action_dist_inputs"], second[2]["action_dist_inputs"], rtol=1e-6
    )
    again = trainer.compute_action(obs, [np.zeros_like(part) for part in first[1]])
    np.testing.assert_array_equal(again[2]["action_dist_inputs"], first[2]["action_dist_inputs"])
    assert trainer.compute_action(obs, []) == first[0]


def test_a_policys_state_takes_its_filter_along_and_weights_alone_say_that_they_do_not(
    shared: Any, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    other = make(observation_filter="MeanStdFilter", seed=9)
    observations = np.random.default_rng(0).normal(0.0, 1.0, (20, 4))

    def outputs(trainer: Any) -> Any:
        return [
            trainer.compute_action(obs, full_fetch=True)[2]["action_dist_inputs"]
            for obs in observations
        ]

    state = shared.get_policy_state()
    assert state["filter"]["n"] > 0
    other.set_policy_state(state)
    np.testing.assert_allclose(outputs(other), outputs(shared), rtol=1e-6)
    np.testing.assert_equal(other.get_policy_state(), state)
    other.train()
    assert other.get_policy_state()["filter"]["n"] > state["filter"]["n"]  # it continues from there
    assert not [record for record in caplog.records if "set_policy_state" in record.getMessage()]
    for _ in range(2):
        other.set_weights({"default_policy": state["weights"]})
    assert (
        len([record for record in caplog.records if "set_policy_state" in record.getMessage()]) == 1
    )
    kept = other.get_policy_state()
    broken: list[Any] = [
        {"weights": state["weights"]},
        {**state, "filter": {}},
        {**state, "filter": {name: np.zeros(3) for name in state["filter"]}},
        {**state, "weights": {}},
        {**state, "units": {"scaled": np.array(True)}},
    ]
    for wrong in broken:
        with pytest.raises(ConfigError):
            other.set_policy_state(wrong)
    with pytest.raises(UnknownPolicyError):
        other.set_policy_state(state, "absent")
    np.testing.assert_equal(other.get_policy_state(), kept)


def test_new_weights_are_used_and_unsuitable_ones_are_refused(make: Make) -> None:
    trainer = make()
    weights = trainer.get_weights()["default_policy"]
    trainer.set_weights({"default_policy": {name: value * 0 for name, value in weights.items()}})
    assert trainer.compute_action(np.ones(4), full_fetch=True)[2][
        "action_dist_inputs"
    ].tolist() == [0, 0]
    with pytest.raises(ConfigError):
        trainer.set_weights(
            {"default_policy": {**weights, "policy/head/kernel": np.zeros((3, 3), np.float32)}}
        )
    with pytest.raises(ConfigError, match="/policy/dense_0/kernel'"):
        trainer.set_weights({"default_policy": {"policy/head/bias": weights["policy/head/bias"]}})
    for call in (
        trainer.get_policy,
        lambda name: trainer.get_weights([name]),
        lambda name: trainer.set_weights({name: {}}),
    ):
        with pytest.raises(UnknownPolicyError, match="absent"):
            call("absent")


# Saving


def test_r183_exports_land_in_the_named_directories_and_are_returned_by_format(
    shared: Any, tmp_path: Path
) -> None:
    obs = np.array([[0.5, -0.2, 0.1, 0.3]], np.float32)
    written = shared.export_policy_model(tmp_path / "exported", formats=["onnx"])
    assert written == {"onnx": str(tmp_path / "exported" / "onnx" / "policy.onnx")}
    session = onnxruntime.InferenceSession(written["onnx"])
    (action,) = session.run([session.get_outputs()[0].name], {session.get_inputs()[0].name: obs})
    assert action == shared.compute_action(obs[0])
    exported = shared._export_model(["checkpoint", "model"], tmp_path / "both")
    assert exported["model"].startswith(str(tmp_path / "both" / "model"))
    assert exported["checkpoint"] == str(tmp_path / "both" / "checkpoint" / "model.safetensors")
    weights, kept = load_file(exported["checkpoint"]), shared.get_weights()["default_policy"]
    assert weights.keys() == kept.keys()
    assert all(np.array_equal(weights[name], kept[name]) for name in kept)
    with pytest.raises(UnknownPolicyError):
        shared.export_policy_model(tmp_path / "other", "absent")


def test_a_trainer_describes_itself_its_metrics_and_its_resources(shared: Any) -> None:
    said = io.StringIO()
    shared.describe(said)
    assert re.search(r"num_sgd_iter +\w+ +2\n", said.getvalue())
    metrics = shared.collect_metrics()
    assert metrics["episode_reward_mean"] > 0
    assert "training_iteration" not in metrics
    with pytest.raises(NotImplementedError):
        shared.collect_metrics([1])
    request = aiorl.PPOTrainer.default_resource_request(
        {"num_workers": 3, "num_cpus_per_worker": 2}
    )
    assert request.cpu == 1 + 3 * 2
    assert "num_cpus_per_worker" in aiorl.PPOTrainer.resource_help({"num_workers": 3})


def test_r182_a_trainer_restored_from_a_checkpoint_alone_acts_filters_and_learns_as_before(
    shared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    obs = np.array([0.5, -0.2, 0.1, 0.3])
    want = shared.compute_action(obs, full_fetch=True)[2]
    path = shared.save(tmp_path / "saved")
    with aiorl.Trainer.restore(tmp_path / "saved", eager=True) as other:
        assert Path(path).parent == tmp_path / "saved"
        assert isinstance(other, aiorl.PPOTrainer)
        assert other.iteration == shared.iteration == 2
        got = other.compute_action(obs, full_fetch=True)[2]
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
        filters = [
            each.workers.local_worker().filters["default_policy"].state()
            for each in (shared, other)
        ]
        assert filters[0]["n"] == filters[1]["n"] > 0
        np.testing.assert_array_equal(filters[0]["mean"], filters[1]["mean"])
        result = other.train()
    assert result["training_iteration"] == 3
    assert result["ledger"]["trained"] == result["env_steps_trained_total"] > 128


def test_a_missing_checkpoint_or_one_of_another_environment_is_refused(
    make: Make, tmp_path: Path, shared: Any
) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        aiorl.Trainer.restore(tmp_path / "nowhere")
    path = shared.save(tmp_path / "saved")
    with pytest.raises(AiorlError, match="Acrobot"):
        aiorl.PPOTrainer(
            {**SMALL, "run_dir": str(tmp_path / "run")}, env="Acrobot-v1", checkpoint=path
        )
    trainer = make()
    for other in (make("Acrobot-v1"), make(model={"fcnet_hiddens": [9]})):
        with pytest.raises(CheckpointError):
            trainer.restore(other.save())
    assert trainer.train()["training_iteration"] == 1, "the trainer continues as before"


def test_wrong_arguments_are_refused_by_name(shared: Any) -> None:
    refused: dict[str, list[Callable[[], Any]]] = {
        "config": [
            lambda: aiorl.PPOTrainer("CartPole-v1"),
            lambda: aiorl.train("CartPole-v1", config=5),
        ],
        "stop_evaluation_return": [lambda: next(iter(shared.iterate(stop_evaluation_return=1.0)))],
        "": [lambda: shared.set_weights(3), lambda: shared.set_weights({"default_policy": [1.0]})],
        "episodes": [lambda: shared.evaluate("3"), lambda: shared.evaluate(0)],
        "seed": [lambda: shared.evaluate(1, seed="one")],
        "stop_return": [lambda: next(shared.iterate(stop_return="475"))],
    }
    for key, calls in refused.items():
        for call in calls:
            with pytest.raises(ConfigError) as caught:
                call()
            assert caught.value.key == key
    assert shared.get_weights("default_policy").keys() == {"default_policy"}
