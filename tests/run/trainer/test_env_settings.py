"""Settings of environments change between two episodes during a run, with worker processes and
without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from small_runs import SMALL

import aiorl
from aiorl.errors import ConfigError, EnvError

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Remade(gymnasium.Env[Any, Any]):
    """Episodes of four steps, each with the level as its reward."""

    action_space = spaces.Discrete(2)
    num_made = 0

    def __init__(self, config: Any) -> None:
        Remade.num_made += 1
        self.observation_space = spaces.Box(-1.0, 1.0, (config.get("width", 2),), np.float32)
        self.level = config.get("level", 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(2, np.float32), float(self.level), self.t == 4, False, {}


class Told(Remade):
    """Takes new settings itself, and never within an episode."""

    def set_env_config(self, config: Any) -> None:
        assert self.t == 4
        self.level = config["level"]


class Pair(aiorl.MultiAgentEnv):
    """Two agents of `Remade`."""

    observation_space = BOX
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.level = config.get("level", 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return {name: np.zeros(2, np.float32) for name in "ab"}, {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        flags = {"__all__": self.t == 4}
        obs = {name: np.zeros(2, np.float32) for name in "ab"}
        rewards = dict.fromkeys("ab", self.level / 2)
        return obs, rewards, flags, {"__all__": False}, {}


class Group(aiorl.VectorEnv):
    """Two environments in one object, which takes settings itself."""

    observation_space = BOX
    action_space = spaces.Discrete(2)
    num_envs = 2

    def __init__(self, config: Any) -> None:
        self.envs = [Told(config), Told(config)]

    def vector_reset(self) -> Any:
        return [env.reset()[0] for env in self.envs]

    def reset_at(self, index: int) -> Any:
        return self.envs[index].reset()[0]

    def vector_step(self, actions: Any) -> Any:
        steps = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        return tuple(zip(*steps, strict=True))


class ToldGroup(Group):
    def set_env_config(self, config: Any) -> None:
        for env in self.envs:
            env.level = config["level"]


def next_level(result: dict[str, Any]) -> dict[str, int] | None:
    """Return the number of the iteration as the level, but for the third."""
    iteration = result["training_iteration"]
    return None if iteration == 3 else {"level": iteration}


def is_no_dict(result: dict[str, Any]) -> Any:
    return ["level"]


def level_of(worker: Any) -> Any:
    return worker.env.level


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        **SMALL,
        "env": Remade,
        "run_dir": str(directory / "run"),
        "metrics_smoothing_episodes": 1,
        "min_iter_time_s": 0,
        **changes,
    }


def returns(trainer: Any, count: int) -> list[float]:
    """Return the maximum of the returns of each of some iterations: old episodes have lower ones."""
    return [trainer.train()["episode_reward_max"] for _ in range(count)]


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("num_workers", "env"),
    [
        (0, Remade),
        (0, Told),
        pytest.param(1, Remade, marks=pytest.mark.slow),
        pytest.param(1, Told, marks=pytest.mark.nightly),
    ],
)
def test_a_function_of_the_result_sets_levels_and_a_restored_run_goes_on_with_them(
    tmp_path: Path, num_workers: int, env: Any
) -> None:
    """R263."""
    config = settings(tmp_path, env=env, num_workers=num_workers, env_config_fn=next_level)
    with aiorl.PPOTrainer(config) as trainer:
        assert returns(trainer, 4) == [0, 4, 8, 8]
        trainer.set_env_config({"level": 9})
        assert trainer.train()["episode_reward_max"] == 36
        trainer.set_env_config({"level": 10})
        assert set(trainer.evaluate(2).returns) == {40}
        path = trainer.save()
    assert set(aiorl.evaluate(path, episodes=2).returns) == {40}
    with aiorl.Trainer.restore(path, run_dir=str(tmp_path / "again")) as restored:
        assert restored.train()["episode_reward_max"] == 40
    with aiorl.PPOTrainer({"resume": str(tmp_path / "run")}) as resumed:
        assert resumed.train()["episode_reward_max"] == 40


def test_workers_that_join_later_have_the_settings_of_that_time(tmp_path: Path) -> None:
    with aiorl.PPOTrainer(settings(tmp_path, num_workers=1)) as trainer:
        trainer.set_env_config({"level": 3})
        trainer.workers.add_workers(1)
        returns(trainer, 2)
        assert trainer.workers.foreach_worker(level_of)[1:] == [3, 3]


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "changes",
    [
        {"env": Pair},
        {"env": ToldGroup, "seed": None},
        {"vectorize": "remote"},
        pytest.param({"remote_worker_envs": True}, marks=pytest.mark.slow),
        pytest.param({"env": Told, "vectorize": "remote"}, marks=pytest.mark.slow),
        pytest.param({"env": Pair, "remote_worker_envs": True}, marks=pytest.mark.slow),
        {"env": Told, "wrappers": ["gymnasium.wrappers:RecordEpisodeStatistics"]},
    ],
    ids=str,
)
def test_every_form_of_environments_takes_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    with aiorl.PPOTrainer(settings(tmp_path, **changes)) as trainer:
        trainer.train()
        trainer.set_env_config({"level": 5})
        assert returns(trainer, 2)[-1] == 20


def test_a_run_of_the_command_line_has_a_curriculum(tmp_path: Path) -> None:
    config = settings(tmp_path, env_config_fn=next_level, stop_timesteps=64 * 3)
    aiorl.train(**config, algo="ppo")
    lines = (tmp_path / "run" / "result.jsonl").read_text().splitlines()
    # settings come with the weights of the next update
    assert [json.loads(line)["episode_reward_max"] for line in lines] == [0, 0, 4]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"env": "CartPole-v1"}, ["CartPole-v1", "vectorize"]),
        ({"env": Group, "seed": None}, ["Group", "set_env_config"]),
    ],
)
def test_environments_that_can_not_change_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    config = settings(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        aiorl.PPOTrainer({**config, "env_config_fn": next_level})
    assert refused.value.key == "env_config_fn"
    assert all(name in str(refused.value) for name in names)
    with aiorl.PPOTrainer(config) as trainer:
        with pytest.raises(ConfigError) as refused:
            trainer.set_env_config({"level": 1})
        assert all(name in str(refused.value) for name in names)


def test_settings_of_another_form_and_functions_that_fail_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        aiorl.PPOTrainer(settings(tmp_path, env_config_fn="small_runs:SMALL"))
    assert refused.value.key == "env_config_fn"
    with aiorl.PPOTrainer(settings(tmp_path, env_config_fn=is_no_dict)) as trainer:
        with pytest.raises(ConfigError) as refused:
            trainer.train()
        assert "level" in str(refused.value)


def test_spaces_can_not_change(tmp_path: Path) -> None:
    with aiorl.PPOTrainer(settings(tmp_path)) as trainer:
        trainer.set_env_config({"width": 3})
        with pytest.raises((ConfigError, EnvError)) as refused:
            trainer.train()
        assert "observation_space" in str(refused.value)


def test_evaluations_by_other_settings_are_not_compared(tmp_path: Path) -> None:
    config = settings(
        tmp_path, evaluation_interval=1, evaluation_num_episodes=1, evaluation_num_workers=0
    )
    with aiorl.PPOTrainer({**config, "env_config": {"level": 2}}) as trainer:
        assert trainer.train()["evaluation"]["episode_reward_mean"] == 8
        trainer.set_env_config({"level": 1})
        assert trainer.train()["evaluation"]["episode_reward_mean"] == 4
    best = json.loads((tmp_path / "run" / "best" / "evaluation.json").read_text())
    assert best["episode_reward_mean"] == 4
    assert len(list((tmp_path / "run").glob("best-*"))) == 1
