"""Policies that have died are named with the likely cause, and healthy ones are not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aiorl import PPOTrainer
from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.run.health import Health, max_entropy

DISCRETE = {"kind": "Discrete", "n": 4, "start": 0, "dtype": "int64"}
SAMPLE = RunParts.of(CommonConfig(env="x")).sample
BOX = {"kind": "Box", "shape": [2], "dtype": "float32", "low": -1.0, "high": 1.0}


class Course:
    """Health of a run that gets results one by one."""

    def __init__(self, returns: dict[str, list[float]] | None = None) -> None:
        self.told: list[str] = []
        self.returns = returns if returns is not None else {}
        self.health = Health(lambda text, level: self.told.append(text), self.returns, SAMPLE)
        self._episodes = 0

    def results(
        self,
        returns: Sequence[float],
        *,
        entropy: float = 1.0,
        kl: float = 0.01,
        num_skipped: int = 0,
        space: dict[str, Any] = DISCRETE,
    ) -> list[str]:
        """Return the warnings of the last of these results."""
        warnings: list[str] = []
        for mean in returns:
            self._episodes += 50
            result = {
                "learner": {"entropy": entropy, "kl": kl, "cur_lr": 3.0},
                "episodes_total": self._episodes,
                "episode_reward_mean_last_100": mean,
                "updates_skipped": num_skipped,
                "updates_this_iter": 4,
            }
            health = self.health.look(result, {"default_policy": [space]})
            warnings = health["warnings"]
            assert health["num_warnings"] == len(warnings)
        return warnings


def test_a_policy_without_entropy_that_wins_nothing_is_named_with_the_learning_rate() -> None:
    course = Course()
    assert course.results([22.0], entropy=1.3) == []
    (warning,) = course.results([15.0, 9.0, 9.2, 9.1], entropy=1e-4)
    assert "lr" in warning
    assert "(now 3)" in warning
    assert course.told == [warning.replace("9.1", "9.2")], "the user sees it once"
    assert course.results([9.0], entropy=0.5) == []


def test_a_policy_that_falls_back_is_named() -> None:
    course = Course()
    course.results([20.0, 120.0, 300.0], entropy=0.7)
    assert course.results([200.0] * 5, entropy=1e-4) == []
    assert course.results([100.0], entropy=1e-4)


@pytest.mark.parametrize("solved", [[20.0, 300.0, *[500.0] * 9], [-200.0, -100.0, *[-80.0] * 9]])
def test_a_solved_task_may_have_no_entropy(solved: list[float]) -> None:
    course = Course()
    assert course.results(solved, entropy=1e-6) == []
    # a resumed run, with the returns of the run before
    assert Course(course.returns).results([solved[-1]] * 9, entropy=1e-6) == []


def test_policies_that_begin_with_the_weights_of_others_are_not_judged_by_their_return() -> None:
    course = Course()
    course.health.knows_start = False
    assert course.results([500.0] * 9, entropy=1e-6) == []
    assert course.returns == {}


def test_an_update_that_changes_a_policy_too_much_is_named_for_a_while() -> None:
    course = Course()
    assert course.results([1.0], space=BOX) == []
    (warning,) = course.results([1.0], kl=154.0, space=BOX)
    assert "154" in warning
    assert "lr" in warning
    assert course.results([1.0] * 5, space=BOX) == [warning]
    assert course.results([1.0] * 30, space=BOX) == []
    assert course.told == [warning]


def test_skipped_updates_are_named_in_the_results_that_have_them() -> None:
    course = Course()
    (warning,) = course.results([1.0], num_skipped=3)
    assert "3 of the newest 4 updates" in warning
    assert course.results([1.0], num_skipped=3) == []
    assert course.told == [], "the user has seen each of them"


@pytest.mark.parametrize(
    ("settings", "episodes", "warns"),
    [
        ({}, 3, True),
        ({}, 4, False),
        ({"horizon": 500}, 0, False),
        ({"input": "stored/*.json"}, 0, False),
    ],
)
def test_a_horizon_is_suggested_once_if_hardly_any_episode_ends(
    settings: dict[str, Any], episodes: int, warns: bool
) -> None:
    told: list[str] = []
    config = CommonConfig(env="x", num_workers=2, num_envs_per_worker=8, **settings)
    health = Health(lambda text, level: told.append(text), {}, RunParts.of(config).sample)
    health.look_at_episodes(47_999, episodes)
    assert told == []
    for env_steps in (48_000, 60_000):
        health.look_at_episodes(env_steps, episodes)
    assert ["--horizon 1000" in text for text in told] == [True] * warns


def test_each_of_several_policies_is_judged_by_its_own_returns() -> None:
    told: list[str] = []
    health = Health(lambda text, level: told.append(text), {}, SAMPLE)
    for _ in range(5):
        result = {
            "learner": {
                "left/entropy": 1e-5,
                "right/entropy": 1e-5,
                "left/cur_lr": 0.5,
                "left/kl": 0.1,
                "right/kl": 7.0,
            },
            "episodes_total": 100,
            "policy_reward_mean": {"left": -1.0, "right": len(told) + 1.0},
            "episode_reward_mean_last_100": 0.0,
            "updates_skipped": 0,
            "updates_this_iter": 1,
        }
        found = health.look(result, {"left": [DISCRETE], "right": [DISCRETE]})
    assert found["left/entropy_share"] == found["right/entropy_share"] < 1e-4
    assert any("'left' has died" in text and "0.5" in text for text in told)
    assert any("'right' has changed" in text for text in told)


@pytest.mark.parametrize(
    ("spaces", "expected"),
    [
        ([DISCRETE], math.log(4)),
        ([{"kind": "MultiDiscrete", "nvec": [[2, 4], [8, 1]]}], math.log(64)),
        ([{"kind": "MultiBinary", "n": [2, 3]}], math.log(64)),
        ([{"kind": "Dict", "spaces": [["a", DISCRETE], ["b", DISCRETE]]}], math.log(16)),
        ([{"kind": "Tuple", "spaces": [DISCRETE, BOX]}], None),
        ([BOX], None),
        ([DISCRETE, {**DISCRETE, "n": 1}], math.log(4) / 2),
        ([], None),
    ],
)
def test_the_largest_entropy_of_a_discrete_space(
    spaces: list[dict[str, Any]], expected: float | None
) -> None:
    assert max_entropy(spaces) == (None if expected is None else pytest.approx(expected))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_names_a_policy_that_a_high_learning_rate_has_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {
        "env": "CartPole-v1",
        "num_workers": 0,
        "num_envs_per_worker": 4,
        "train_batch_size": 512,
        "sgd_minibatch_size": 128,
        "num_sgd_iter": 10,
        "seed": 2,
        "model": {"fcnet_hiddens": [16]},
        "xla": "off",
        "lr": 3.0,
        "run_dir": str(tmp_path / "run"),
    }
    with PPOTrainer(config) as trainer:
        results = [trainer.train() for _ in range(5)]
    assert any("has died" in warning for warning in results[-1]["health"]["warnings"])
    assert results[-1]["health"]["entropy_share"] < 1e-3
    assert caplog.text.count("has died") == 1
    lines = (tmp_path / "run/result.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["health"]["num_warnings"] >= 1
