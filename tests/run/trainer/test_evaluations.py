"""Evaluations of a run: their times, settings, processes, and the checkpoint kept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import aiorl
from aiorl.config.parts import RunParts
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.run.env_changes import EnvChanges
from aiorl.run.evaluations import BEST, Evaluations

SMALL: dict[
    str, Any
] = {  # defined here: evaluation processes import this module and can't find tests/support
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "train_batch_size": 64,
    "sgd_minibatch_size": 64,
    "num_sgd_iter": 1,
    "eager": True,
    "seed": 1,
    "model": {"fcnet_hiddens": [8]},
    "compilation_cache": "off",
    "lr": 0.01,
}


class SmallEnv(gymnasium.Env[Any, Any]):
    """Environment that takes length, reward and failures from its config."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self, length: int = 4, reward: float = 1.0, fails: bool = False, noise: float = 0.0
    ) -> None:
        self.length, self.reward, self.fails = length, reward, fails
        self.noise = noise

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.fails:
            raise ValueError("fails on purpose")
        self.t += 1
        reward = self.reward + self.noise * self.np_random.random()
        return (
            np.full(2, self.t / self.length, np.float32),
            reward,
            self.t == self.length,
            False,
            {},
        )


ENV = f"{__name__}:SmallEnv"


class Noting(aiorl.PPOTrainer):
    """Trainer that notes its evaluations."""

    before: tuple[int, ...] = ()

    def _before_evaluate(self) -> None:
        self.before += (self.iteration,)


def test_r177_complete_episodes_are_played_at_setup_and_every_interval(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "env": ENV,
        "run_dir": str(tmp_path / "run"),
        "evaluation_interval": 2,
        "evaluation_num_episodes": 3,
        "evaluation_config": {"env_config": {"length": 7, "reward": 2.0}},
    }
    with Noting(settings) as trainer:
        results = [trainer.train() for _ in range(4)]
    assert trainer.before == (0, 2, 4)
    found = [result.get("evaluation") for result in results]
    assert [each and each["training_iteration"] for each in found] == [0, 2, None, 4]
    for each in (found[0], found[1], found[3]):
        assert (
            each["episodes_this_iter"],
            each["episode_len_mean"],
            each["episode_reward_mean"],
        ) == (3, 7, 14)
        assert each["explore"] is False
    assert len({each["seed"] for each in found if each}) == 3
    assert all(result["episode_len_mean"] == 4 for result in results)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "result.jsonl").read_text().splitlines()
    ]
    assert [line.get("evaluation") for line in lines] == found


@pytest.mark.parametrize(
    "settings",
    [
        {"evaluation_config": {"env_confg": {}}},
        {"evaluation_config": {"num_sgd_iter": 1}},
        {"stop_evaluation_return": 1.0},
    ],
)
def test_r178_evaluation_settings_that_are_unknown_or_change_nothing_are_refused(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig.from_mapping({"env": "CartPole-v1", **settings})
    assert caught.value.key in settings


@pytest.mark.slow
def test_r179_training_is_the_same_with_and_without_evaluations(tmp_path: Path) -> None:
    seen = []
    for name, interval in (("with", 1), ("without", None)):
        settings = {**SMALL, "observation_filter": "MeanStdFilter", "run_dir": str(tmp_path / name)}
        settings |= {"evaluation_interval": interval, "evaluation_num_episodes": 2}
        with aiorl.PPOTrainer(settings, env="CartPole-v1") as trainer:
            results = [trainer.train() for _ in range(3)]
            trainer.evaluate(2)
            weights = trainer.get_weights()["default_policy"]
            statistics = trainer.workers.local_worker().filters["default_policy"].state()
        seen.append((results, weights, statistics))
    (first, weights, statistics), (second, *others) = seen
    for ours, theirs in ((weights, others[0]), (statistics, others[1])):
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    names = (
        "episode_reward_mean",
        "episodes_total",
        "timesteps_total",
        "env_steps_trained_total",
        "ledger",
    )
    assert [[result[name] for name in names] for result in first] == [
        [result[name] for name in names] for result in second
    ]


def test_a_trainers_own_evaluate_follows_evaluation_config_by_default(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "env": ENV,
        "run_dir": str(tmp_path / "run"),
        "evaluation_num_episodes": 2,
        "evaluation_config": {"env_config": {"length": 7}, "explore": True},
    }
    with aiorl.PPOTrainer(settings) as trainer:
        found = trainer.evaluate()
        assert (found.lengths, found.explore, found.checkpoint) == ([7, 7], True, "")
        other = trainer.evaluate(5, seed=3, explore=False, config={"env_config": {"length": 2}})
        assert (other.returns, other.seed, other.explore) == ([2.0] * 5, 3, False)


def test_iterate_ends_when_an_evaluation_is_good_enough(tmp_path: Path) -> None:
    settings = {**SMALL, "env": ENV, "run_dir": str(tmp_path / "run"), "evaluation_interval": 3}
    with aiorl.PPOTrainer(settings) as trainer:
        results = list(trainer.iterate(stop_evaluation_return=4.0, stop_iterations=10))
    assert len(results) == 1  # the evaluation at setup


def test_a_failed_evaluation_is_reported_without_processes_too_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        **SMALL,
        "env": ENV,
        "run_dir": str(tmp_path / "run"),
        "evaluation_interval": 1,
        "evaluation_num_episodes": 1,
        "evaluation_config": {"env_config": {"fails": True}},
    }
    with aiorl.PPOTrainer(settings) as trainer:
        result = trainer.train()
    assert result["training_iteration"] == 1
    assert "evaluation" not in result
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 2
    assert all("fails on purpose" in text for text in said)


# With processes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with aiorl.PPOTrainer({**SMALL, "env": ENV, "run_dir": str(folder / "run")}) as trainer:
        return Path(trainer.save())


@pytest.fixture
def evaluations(tmp_path: Path, saved: Path) -> Callable[..., Any]:
    """Return a function that makes evaluations of a saved policy; `said` collects its messages, and
    `config` can be changed.
    """

    async def save(directory: Path, *, with_experience: bool) -> Path:
        assert not with_experience
        return Path(shutil.copytree(saved, directory / saved.name))

    def make(**settings: Any) -> Any:
        config = PPOConfig.from_mapping(
            {"env": ENV, "evaluation_interval": 1, "seed": 1, **settings}
        )
        made: Any = Evaluations(
            RunParts.of(config).evaluation, tmp_path / "run", lambda text, level: said.append(text)
        )
        made.said = said
        made.config = config
        return made, Training(save)

    said: list[str] = []
    return make


class Training:
    """Fake of a training that never ends."""

    def __init__(self, save: Callable[..., Any]) -> None:
        self.saver = SimpleNamespace(save_last=save)
        self.play = None
        self.learning = SimpleNamespace(env_changes=EnvChanges())
        self.end = SimpleNamespace(has_come=False, before=lambda step: step)
        self.hurry = asyncio.Event()

    async def after(self, evaluations: Any, iteration: int) -> Any:
        """Return the evaluation metrics in an iteration's result."""
        result = {"training_iteration": iteration}
        await evaluations.after_iteration(self, result)
        return result.get("evaluation")


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "aiorl.run.evaluation" in child.cmdline()]


def test_processes_share_episodes_and_stay_until_the_end(
    evaluations: Callable[..., Any], tmp_path: Path
) -> None:
    made, training = evaluations(evaluation_num_workers=2, evaluation_num_episodes=5)

    async def run() -> None:
        assert made.is_beside
        assert await training.after(made, 1) is None
        assert await training.after(made, 2) is None  # the first process continues
        assert "2" in made.said[0]
        await made.finish(training, training.hurry)
        first = await training.after(made, 3)
        assert (
            first["episodes_this_iter"],
            first["episode_reward_mean"],
            first["training_iteration"],
        ) == (5, 4.0, 1)
        pids = {child.pid for child in children()}
        assert len(pids) == 2
        await made.finish(training, training.hurry)
        assert (await training.after(made, 4))["training_iteration"] == 3
        assert {child.pid for child in children()} == pids
        await made.close()

    asyncio.run(run())
    assert not children()
    assert not (tmp_path / "run" / "evaluation").exists()


@pytest.mark.slow
def test_a_failed_evaluation_is_reported_and_the_next_one_works(
    evaluations: Callable[..., Any],
) -> None:
    made, training = evaluations(
        evaluation_num_workers=0, evaluation_config={"env_config": {"fails": True}}
    )

    async def run() -> None:
        assert not made.is_beside
        assert await training.after(made, 1) is None
        assert "fails on purpose" in made.said[-1]
        (child,) = children()
        os.kill(child.pid, signal.SIGKILL)
        made.config.evaluation_config["env_config"]["fails"] = False
        assert (await training.after(made, 2))["episode_reward_mean"] == 4
        await made.close()

    asyncio.run(run())


def test_the_best_checkpoint_is_kept_even_after_a_resume(
    evaluations: Callable[..., Any], tmp_path: Path
) -> None:
    best = tmp_path / "run" / BEST

    async def run() -> None:
        made, training = evaluations(evaluation_num_workers=0, evaluation_num_episodes=1)
        made._measure = dict  # the rewards stand for better and worse policies
        rewards = made.config.evaluation_config.setdefault("env_config", {})
        for iteration, reward, kept in [
            (1, float("nan"), None),
            (2, 5.0, 2),
            (3, 4.0, 2),
            (4, 6.0, 4),
        ]:
            rewards["reward"] = reward
            await training.after(made, iteration)
            assert best.exists() == (kept is not None)
            assert (
                kept is None
                or json.loads((best / "evaluation.json").read_text())["training_iteration"] == kept
            )
        await made.close()
        again, training = evaluations(evaluation_num_workers=0, evaluation_num_episodes=1)
        assert np.isnan(again.mean_return)
        again._measure = dict
        again.config.evaluation_config["env_config"] = {"reward": 5.5}
        await training.after(again, 5)
        assert json.loads((best / "evaluation.json").read_text())["training_iteration"] == 4
        await again.close()

    asyncio.run(run())
    assert aiorl.load_policy(best).env == ENV
    assert not [path for path in best.parent.iterdir() if path.name.endswith(".tmp")]


def answer(score: float) -> dict[str, Any]:
    """Return what an evaluation process answers."""
    facts = {"env_steps": 0, "explore": False, "seed": 1}
    return {"returns": [score], "lengths": [4], "policy_returns": {}, "custom_metrics": {}, **facts}


def test_scores_are_only_compared_with_scores_by_the_same_settings(
    evaluations: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([36.0, 12.0, 12.0, 8.0, 4.0, 5.0])

    async def ask(child: Any, request: dict[str, Any]) -> dict[str, Any]:
        return answer(next(scores))

    monkeypatch.setattr("aiorl.run.evaluations._Child.ask", ask)
    best = tmp_path / "run" / BEST
    ways: list[dict[str, Any]] = [
        {"evaluation_config": {"env_config": {"reward": 9.0}}},
        {"evaluation_config": {"env_config": {"reward": 3.0}}},
        {"evaluation_config": {"env_config": {"reward": 3.0}}, "lr": 0.5},  # the same evaluation
        {"env_config": {"reward": 2.0}},
        {"env_config": {"reward": 2.0}, "horizon": 2},
    ]

    async def evaluate(number: int, settings: dict[str, Any]) -> None:
        made, training = evaluations(
            evaluation_num_workers=0, evaluation_num_episodes=1, **settings
        )
        await training.after(made, number)
        await made.close()

    for number, settings in enumerate(ways):
        asyncio.run(evaluate(number, settings))
    files = best.parent.glob(f"{BEST}*/evaluation.json")
    found = {path.parent.name: json.loads(path.read_text())["training_iteration"] for path in files}
    assert found == {"best-0": 0, "best-1": 1, "best-3": 3, "best": 4}
    assert aiorl.load_policy(best.with_name("best-0")).env == ENV
    summary = json.loads((best / "evaluation.json").read_text())
    del summary["measured_with"]
    # an earlier version's
    (best / "evaluation.json").write_text(json.dumps({**summary, "episode_reward_mean": 99.0}))
    asyncio.run(evaluate(9, {}))
    assert json.loads((best / "evaluation.json").read_text())["training_iteration"] == 4


def test_an_evaluation_by_several_processes_can_be_repeated_with_its_seeds(
    evaluations: Callable[..., Any], saved: Path
) -> None:
    manner = {"env_config": {"noise": 1.0}}
    made, training = evaluations(
        evaluation_num_workers=2, evaluation_num_episodes=3, evaluation_config=manner
    )

    async def run() -> Any:
        assert await training.after(made, 1) is None
        await made.finish(training, training.hurry)
        found = await training.after(made, 2)
        await made.close()
        return found

    found = asyncio.run(run())
    assert found["seeds"][0] == found["seed"]
    assert len(set(found["seeds"])) == 2
    shares = zip(found["seeds"], found["episodes_of_seeds"], strict=True)
    returns = [
        aiorl.evaluate(saved, episodes=share, seed=seed, config=manner).returns
        for seed, share in shares
    ]
    played = [value for own in returns for value in own]
    assert len(played) == 3
    assert np.mean(played) == pytest.approx(found["episode_reward_mean"])


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_evaluates_the_policy_that_it_ends_with(tmp_path: Path, processes: int) -> None:
    run = tmp_path / "run"
    aiorl.train(
        ENV,
        config=SMALL,
        run_dir=str(run),
        stop_timesteps=5 * 64,
        evaluation_interval=1000,
        evaluation_num_workers=processes,
        evaluation_num_episodes=1,
        evaluation_config={"explore": True},
    )
    last = [json.loads(line) for line in (run / "result.jsonl").read_text().splitlines()][-1]
    assert last["evaluation"]["training_iteration"] == last["training_iteration"]
    assert last["evaluation"]["env_steps_trained"] == last["env_steps_trained_total"] == 5 * 64
    assert last["evaluation"]["explore"] is True
    assert len(list((run / "checkpoints").iterdir())) == 1


def test_the_end_of_a_trainer_makes_up_for_an_evaluation_that_was_due_while_another_one_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    requests: list[Any] = []

    async def ask(child: Any, request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        loops.append(asyncio.get_running_loop())
        await gate.wait()
        return answer(float(len(requests)))

    monkeypatch.setattr("aiorl.run.evaluations._Child.ask", ask)
    settings = {
        **SMALL,
        "env": ENV,
        "run_dir": str(tmp_path / "run"),
        "evaluation_interval": 1,
        "evaluation_num_workers": 1,
    }
    with aiorl.PPOTrainer(settings) as trainer:
        trainer.train()
        trainer.train()
        assert len(requests) == 1
        loops[0].call_soon_threadsafe(gate.set)
    assert (
        json.loads((tmp_path / "run" / BEST / "evaluation.json").read_text())["training_iteration"]
        == 2
    )
    assert len(requests) == 2


def test_the_end_waits_for_the_last_evaluation(tmp_path: Path) -> None:
    """It plays the final policy, which can be the best."""
    settings = {
        **SMALL,
        "env": ENV,
        "run_dir": str(tmp_path / "run"),
        "evaluation_interval": 2,
        "evaluation_num_workers": 1,
        "evaluation_config": {"env_config": {"length": 3}},
    }
    with Noting(settings) as trainer:
        results = list(trainer.iterate(stop_iterations=2))
    assert trainer.before == (0, 2)
    assert len(results) == 2
    told = [
        result["evaluation"]["training_iteration"] for result in results if "evaluation" in result
    ]
    assert told in ([], [0])  # by a process, during training
    assert (
        json.loads((tmp_path / "run" / BEST / "evaluation.json").read_text())["episode_len_mean"]
        == 3
    )
