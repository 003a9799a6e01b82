"""Runs that store their samples, and runs that learn from stored experience."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import record

import aiorl
from aiorl.errors import ConfigError, EndOfData
from aiorl.learning.algorithms.bc import BCConfig
from aiorl.learning.algorithms.cql import CQLConfig
from aiorl.learning.algorithms.iql import IQLConfig
from aiorl.learning.algorithms.marwil import MARWILConfig
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.offline.io import IOContext
from aiorl.offline.readers import FileReader, ReaderOptions
from aiorl.offline.sources import input_creator

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "seed": 3,
    "rollout_fragment_length": 64,
    "num_envs_per_worker": 1,
    "train_batch_size": 256,
    "sgd_minibatch_size": 64,
    "model": {"fcnet_hiddens": [16]},
    "min_iter_time_s": 0,
    "xla": "off",
}
SHORT = {**SMALL, "eager": True, "sgd_minibatch_size": 256, "num_sgd_iter": 1}
"""Settings for few updates, which take less time than to trace one."""


def test_r187_samples_are_stored_and_read_unchanged(tmp_path: Path) -> None:
    with PPOConfig(
        **SHORT, run_dir=str(tmp_path / "run"), output=str(tmp_path / "data")
    ).build() as trainer:
        result = trainer.train()
    batches = list(FileReader(str(tmp_path / "data"), ReaderOptions(epochs=1)))
    assert sum(batch.count for batch in batches) >= result["timesteps_total"] == 256
    first = batches[0]
    assert {"obs", "actions", "rewards", "action_logp", "eps_id"} <= set(first.keys())
    assert first["obs"].shape[1:] == (4,)
    assert first["obs"].dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BCConfig, MARWILConfig])
def test_a_rule_that_balances_the_pole_is_learned_from_its_episodes(
    kind: Any, tmp_path: Path
) -> None:
    rows = record(tmp_path / "data", 20)
    assert rows == 20 * 500
    config = kind(
        **{
            **SMALL,
            "run_dir": str(tmp_path / "run"),
            "input": str(tmp_path / "data"),
            "lr": 1e-2,
            "train_batch_size": 512,
        }
    )
    with config.build() as trainer:
        while trainer.train()["timesteps_total"] < 40_000:
            pass
        result = trainer.train()
        assert math.isnan(result["episode_reward_mean"])  # no steps are sampled
        assert min(trainer.evaluate(episodes=5).returns) >= 475


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "num_steps", "goal"),
    [(8, 4_000, 40), pytest.param(16, 16_000, 300, marks=pytest.mark.nightly)],
)
def test_a_recurrent_model_learns_from_rows_without_states(
    tmp_path: Path, length: int, num_steps: int, goal: float
) -> None:
    """A policy that has not learned has returns of about 20."""
    record(tmp_path / "data", 20)
    model = {
        "fcnet_hiddens": [16],
        "use_lstm": True,
        "lstm_cell_size": 8,
        "lstm_use_prev_action_reward": True,
    }
    files = {"run_dir": str(tmp_path / "run"), "input": str(tmp_path / "data")}
    settings = {**SMALL, **files, "lr": 1e-2, "model": model, "rollout_fragment_length": length}
    config = BCConfig(**settings, postprocess_inputs=True)
    with config.build() as trainer:
        *_, result = trainer.iterate(stop_timesteps=num_steps)
        assert result["learner"]["policy_loss"] < 0.5, "about 0.69 at first"
        assert min(trainer.evaluate(episodes=5).returns) >= goal


@pytest.mark.parametrize("cell", ["use_lstm", "use_gru"])
def test_a_recurrent_model_reports_that_it_must_make_states(cell: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BCConfig(**{**SMALL, "input": "data", "model": {cell: True}})
    assert caught.value.key == "postprocess_inputs"
    assert MARWILConfig(**{**SMALL, "input": "data", "model": {cell: True}}).postprocess_inputs


@pytest.mark.slow
def test_with_half_of_the_rows_random_the_better_ones_are_preferred(tmp_path: Path) -> None:
    rows = record(tmp_path / "data", 10)
    of_chance = record(tmp_path / "data", 250, expert=False)
    assert 0.8 < rows / of_chance < 1.25
    means = []
    for kind, own in ((BCConfig, {}), (MARWILConfig, {"beta": 3.0})):
        settings = {
            **SMALL,
            **own,
            "run_dir": str(tmp_path / kind.__name__),
            "input": str(tmp_path / "data"),
            "lr": 1e-2,
            "train_batch_size": 512,
            "sgd_minibatch_size": 128,
        }
        with kind(**settings, shuffle_buffer_size=32).build() as trainer:
            while trainer.train()["timesteps_total"] < 20_000:
                pass
            means.append(float(np.mean(trainer.evaluate(episodes=10, seed=1).returns)))
    assert means[1] > means[0] + 50


@pytest.mark.parametrize("kind", [BCConfig, IQLConfig])
def test_without_stored_experience_it_says_what_to_give(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(env="CartPole-v1", num_workers=0, run_dir=str(tmp_path / "run")).build()
    assert "--input" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_a_run_reads_from_a_function_named_in_its_config(tmp_path: Path) -> None:
    record(tmp_path / "data", 2)
    _Source.path = str(tmp_path / "data")
    with BCConfig(
        **SHORT, run_dir=str(tmp_path / "run"), input=f"{__name__}:_Source"
    ).build() as trainer:
        assert trainer.train()["timesteps_total"] >= 256


class _Source:
    """Reader of the files at ``path``."""

    path = ""

    def __new__(cls, context: IOContext) -> Any:
        return input_creator(cls.path)(context)


def test_a_file_that_vanishes_costs_its_own_rows_only(tmp_path: Path) -> None:
    record(tmp_path / "data", 3)
    record(tmp_path / "other", 3)
    sources = [str(tmp_path / "data"), str(tmp_path / "other")]
    with BCConfig(**SHORT, run_dir=str(tmp_path / "run"), input=sources).build() as trainer:
        trainer.train()
        for file in (tmp_path / "other").iterdir():
            file.unlink()
        for _ in range(8):
            trainer.train()
        assert trainer.train()["timesteps_total"] >= 10 * 256


@pytest.mark.parametrize("source", ["sampler", {"sampler": 0.5, "data": 0.5}])
def test_passes_over_endless_input_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        BCConfig(**SMALL, input=source, input_epochs=1)
    assert caught.value.key == "input_epochs"


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_training_ends_with_the_last_pass_over_stored_experience(
    tmp_path: Path, num_workers: int
) -> None:
    rows = record(tmp_path / "data", 3)
    settings = {**SHORT, "num_workers": num_workers, "run_dir": str(tmp_path / "run")}
    config = BCConfig(**settings, input=str(tmp_path / "data"), input_epochs=2)
    with config.build() as trainer:
        results = list(trainer.iterate())
        assert 2 * rows - 256 < results[-1]["timesteps_total"] <= 2 * rows, "all full train batches"
        with pytest.raises(EndOfData):
            trainer.train()
        ledger = results[-1]["ledger"]
        assert ledger["sampled"] == ledger["trained"] + ledger["queued"]


REPLAY: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "seed": 3,
    "rollout_fragment_length": 64,
    "train_batch_size": 32,
    "training_intensity": 1,
    "model": {"fcnet_hiddens": [8]},
    "min_iter_time_s": 0,
    "timesteps_per_iteration": 128,
    "eager": True,
    "checkpoint_interval_s": 0,
    "log_sys_usage": False,
    "replay_capacity": 20_000,
}


@pytest.mark.slow
def test_a_replay_stores_each_row_once_and_reports_an_input_that_is_due(tmp_path: Path) -> None:
    """G5: also, a restored trainer continues with its replay and stores no row again."""
    rows = record(tmp_path / "data", 12, expert=False)
    config = IQLConfig(**REPLAY, run_dir=str(tmp_path / "run"), input=str(tmp_path / "data"))
    with config.build() as first:
        found = [result for result, _ in zip(first.iterate(), range(2 * rows // 128), strict=False)]
        begun = [
            result["timesteps_total"] for result in found if result["learner"]["num_sgd_steps"]
        ]
        assert rows <= begun[0] < rows + 256
        last = found[-1]
        assert last["learner"]["replay_rows"] == last["learner"]["rows_stored"] == rows
        due = REPLAY["training_intensity"] * (last["timesteps_total"] - rows)
        trained = last["learner"]["rows_trained"]
        assert due - REPLAY["train_batch_size"] < trained <= due
        assert last["learner"]["training_intensity"] == pytest.approx(trained / due)
        ledger = last["ledger"]
        assert ledger["sampled"] == ledger["trained"] + ledger["queued"] >= 1.5 * rows
        with aiorl.Trainer.restore(
            first.save(tmp_path / "saved"), run_dir=str(tmp_path / "other")
        ) as second:
            for _ in range(rows // 128 + 1):
                result = second.train()
                assert result["learner"]["rows_trained"] > trained
                trained = result["learner"]["rows_trained"]
            assert result["learner"]["rows_stored"] == rows


@pytest.mark.slow
def test_with_a_replay_training_ends_with_the_last_pass(tmp_path: Path) -> None:
    rows = record(tmp_path / "data", 10, expert=False)
    config = IQLConfig(
        **REPLAY, run_dir=str(tmp_path / "run"), input=str(tmp_path / "data"), input_epochs=3
    )
    with config.build() as trainer:
        *_, last = trainer.iterate()
        assert last["timesteps_total"] == 3 * rows
        assert last["learner"]["rows_trained"] == pytest.approx(2 * rows, abs=64)


@pytest.mark.slow
def test_a_replay_stores_a_mixture_in_its_order(tmp_path: Path) -> None:
    record(tmp_path / "one", 10, expert=False)
    record(tmp_path / "two", 2)
    sources = {str(tmp_path / "one"): 0.5, str(tmp_path / "two"): 0.25, "sampler": 0.25}
    config = IQLConfig(**REPLAY, run_dir=str(tmp_path / "run"), input=sources, learning_starts=100)
    with config.build() as trainer:
        for _ in range(4):
            result = trainer.train()
        assert result["learner"]["rows_stored"] == result["timesteps_total"] >= 512
        assert result["learner"]["num_sgd_steps"] > 0


@pytest.mark.slow
def test_each_of_several_policies_learns_from_its_own_stored_rows(tmp_path: Path) -> None:
    several = {
        "env": "examples.multi_agent_cartpole:CartPoles",
        "eager": True,
        "multiagent": {
            "policies": {"even": None, "odd": None},
            "policy_mapping_fn": "examples.multi_agent_cartpole:policy_for",
        },
    }
    data = str(tmp_path / "data")
    with PPOConfig(
        **{**SMALL, **several}, num_sgd_iter=1, run_dir=str(tmp_path / "ppo"), output=data
    ).build() as ppo:
        ppo.train()
    settings = {
        **REPLAY,
        **several,
        "timesteps_per_iteration": 64,
        "training_intensity": 0.5,
        "learning_starts": 64,
    }
    with IQLConfig(**settings, run_dir=str(tmp_path / "run"), input=data).build() as trainer:
        for _ in range(4):
            learner = trainer.train()["learner"]
    assert all(learner[f"{name}/num_sgd_steps"] > 0 for name in ("even", "odd"))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [CQLConfig, IQLConfig])
def test_with_half_of_the_rows_random_values_show_the_better_ones(
    kind: Any, tmp_path: Path
) -> None:
    """Cloning all of them reaches about 300."""
    record(tmp_path / "data", 10)
    record(tmp_path / "data", 250, expert=False)
    settings = {"lr": 1e-3, "training_intensity": 64, "train_batch_size": 128, "eager": False}
    if kind is CQLConfig:
        settings |= {"initial_alpha": 0.1, "alpha_lr": 0, "cql_weight": 1.0}
    model = {"fcnet_hiddens": [64, 64], "fcnet_activation": "relu"}
    own = {
        **REPLAY,
        **settings,
        "model": model,
        "run_dir": str(tmp_path / "run"),
        "input": str(tmp_path / "data"),
    }
    with kind(**own).build() as trainer:
        *_, result = trainer.iterate(stop_timesteps=14_000 if kind is IQLConfig else 40_000)
        assert result["learner"]["replay_rows"] == result["learner"]["rows_stored"] < 12_000
        assert float(np.mean(trainer.evaluate(episodes=10, seed=1).returns)) >= 450
