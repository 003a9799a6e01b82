"""A league: fixed opponents join a run and leave it while it trains, with worker processes and
without.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from small_runs import SMALL

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.errors import ConfigError, UnknownPolicyError
from aiorl.run.evaluation import evaluate
from examples import league


class Duel(aiorl.MultiAgentEnv):
    """Agents "left" and "right" for eight rounds; both see the number of the round."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Discrete(3)
    rounds = 8

    def __init__(self, config: Any = None) -> None:
        self.round = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.round = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.round += 1
        reward = float(actions["left"] == actions["right"])
        ends = {"__all__": self.round == self.rounds}
        return self._observe(), {"left": reward, "right": -reward}, ends, {"__all__": False}, {}

    def _observe(self) -> dict[str, Any]:
        return {name: np.full(2, self.round, np.float32) for name in ("left", "right")}


class LongDuel(Duel):
    """Episodes that last for more than one iteration."""

    rounds = 50


def newest(agent_id: Any, episode: Any, worker: Any) -> str:
    """Map the right to the opponent that comes last in the alphabet."""
    return "learner" if agent_id == "left" else max(worker.policy_map.keys() - {"learner"})


class League(aiorl.DefaultCallbacks):
    """Adds a copy of the learner after each iteration, and removes the one before the last."""

    def on_train_result(self, *, trainer: Any, result: Any, **kwargs: Any) -> None:
        number = result["training_iteration"]
        trainer.add_policy(f"opponent_{number}", like="learner")
        if number > 2:
            trainer.remove_policy(f"opponent_{number - 2}")


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    agents = {
        "policies": {"learner": None, "opponent_0": None},
        "policy_mapping_fn": newest,
        "policies_to_train": ["learner"],
    }
    return {
        **SMALL,
        "env": Duel,
        "observation_filter": "MeanStdFilter",
        "run_dir": str(directory / "run"),
        "multiagent": agents,
        **changes,
    }


def assert_same(weights: Any, other: Any) -> None:
    assert weights.keys() == other.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


ALONE = pytest.param(0, id="alone")
WITH_A_WORKER = pytest.param(1, id="with a worker", marks=pytest.mark.slow)
WAYS = pytest.mark.parametrize("num_workers", [ALONE, WITH_A_WORKER])


@pytest.mark.rest_slow
@pytest.mark.parametrize("num_workers", [0, 1], ids=["alone", "with a worker"])
def test_a_copy_of_the_learner_joins_acts_stays_as_it_is_and_leaves(
    tmp_path: Path, num_workers: int
) -> None:
    with aiorl.PPOConfig(**settings(tmp_path, num_workers=num_workers)).build() as trainer:
        result = trainer.train()
        assert result["policy_reward_mean"].keys() == {"learner", "opponent_0"}
        copy = trainer.get_weights(["learner"])["learner"]
        trainer.add_policy("opponent_1", like="learner")
        assert trainer.get_weights().keys() == {"learner", "opponent_0", "opponent_1"}
        results = [trainer.train() for _ in range(3)]
        assert_same(trainer.get_weights(["opponent_1"])["opponent_1"], copy)
        # episodes of the last hundred, of which the newest are against the copy
        assert "opponent_1" in results[-1]["policy_reward_mean"]
        assert trainer.compute_action(np.zeros(2), policy_id="opponent_1") in range(3)
        local = trainer.workers.local_worker()
        assert local.policy_map.keys() == {"learner", "opponent_0", "opponent_1"}
        assert_same(local.get_weights(["opponent_1"])["opponent_1"], copy)
        assert trainer.policy_ids == ["learner", "opponent_0", "opponent_1"]
        trainer.remove_policy("opponent_1")
        assert trainer.policy_ids == ["learner", "opponent_0"]
        assert trainer.get_weights().keys() == {"learner", "opponent_0"}
        trainer.train()
        with pytest.raises(UnknownPolicyError):
            trainer.compute_action(np.zeros(2), policy_id="opponent_1")
        for _ in range(2):
            result = trainer.train()
        assert result["policy_reward_mean"].keys() == {"learner", "opponent_0"}


class LooksPoliciesUp(aiorl.DefaultCallbacks):
    """Looks up the policies of each episode to its end, and counts the agents of opponent_1 that
    the mapping function can't choose any more.
    """

    def on_postprocess_trajectory(self, *, policy_id: Any, policies: Any, **kwargs: Any) -> None:
        assert policies[policy_id].get_weights()

    def on_episode_end(self, *, worker: Any, policies: Any, episode: Any, **kwargs: Any) -> None:
        policy_ids = [policy_id for _, policy_id in episode.agent_rewards]
        assert all(policies[policy_id].get_weights() for policy_id in policy_ids)
        has_left = "opponent_1" in policy_ids and "opponent_1" not in worker.policy_map
        episode.custom_metrics["has_left"] = float(has_left)


@WAYS
def test_callbacks_look_a_removed_policy_up_until_its_last_episode_has_ended(
    tmp_path: Path, num_workers: int
) -> None:
    changes = {"num_workers": num_workers, "env": LongDuel, "callbacks": LooksPoliciesUp}
    with aiorl.PPOConfig(**settings(tmp_path, **changes)).build() as trainer:
        trainer.train()
        trainer.add_policy("opponent_1", like="learner")
        for _ in range(2):
            trainer.train()
        trainer.remove_policy("opponent_1")
        results = [trainer.train() for _ in range(4)]
        assert max(result["custom_metrics"]["has_left_max"] for result in results) == 1.0
        if not num_workers:
            with pytest.raises(UnknownPolicyError):
                trainer.workers.local_worker().policy_map["opponent_1"]


@pytest.mark.slow
@WAYS
def test_a_checkpoint_has_the_opponents_that_joined_and_a_resumed_run_continues_with_them(
    tmp_path: Path, num_workers: int
) -> None:
    with aiorl.PPOConfig(**settings(tmp_path, num_workers=num_workers)).build() as trainer:
        trainer.train()
        trainer.add_policy("opponent_1", like="learner")
        trainer.train()
        trainer.add_policy("opponent_2", like="opponent_1")
        trainer.remove_policy("opponent_0")
        weights = trainer.get_weights()
        path = trainer.save()
    meta = find_checkpoint(path).meta
    assert meta["added_policies"] == ["opponent_1", "opponent_2"]
    assert meta["removed_policies"] == ["opponent_0"]
    for policy_id in ("opponent_1", "opponent_2"):
        policy = aiorl.load_policy(path, policy_id)
        assert policy.compute_single_action(np.zeros(2)) in range(3)
    pytest.importorskip("prometheus_client")
    from aiorl.serving.models import Models

    assert Models((path,)).keys() == {"learner", "opponent_1", "opponent_2"}
    played = evaluate(path, episodes=2, seed=1)
    assert played.policy_returns.keys() == {"learner", "opponent_2"}
    with aiorl.Trainer.restore(path, env=Duel, run_dir=str(tmp_path / "again")) as restored:
        for policy_id, arrays in restored.get_weights().items():
            assert_same(arrays, weights[policy_id])
        assert restored.get_weights().keys() == weights.keys()
        filters = restored.workers.local_worker().filters
        # it stands where the learner's stood when the first copy was made
        assert filters["opponent_2"].state()["n"] == filters["opponent_1"].state()["n"] > 0
        assert filters["learner"].state()["n"] > filters["opponent_1"].state()["n"]
        restored.train()
        restored.add_policy("opponent_3", like="learner")
        restored.train()
        second = restored.save()
        assert find_checkpoint(second).meta["added_policies"] == [
            "opponent_1",
            "opponent_2",
            "opponent_3",
        ]
        restored.restore(path)  # in place, to a checkpoint without the last one
        assert restored.get_weights().keys() == weights.keys()


def test_a_server_that_follows_a_run_drops_the_policies_that_left_it(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from aiorl.serving.models import Models
    from aiorl.serving.service import Service
    from aiorl.web.app import Refusal

    async def follow(policy_ids: set[str]) -> None:
        following = asyncio.create_task(models.follow())
        async with asyncio.timeout(60):
            while models.keys() != policy_ids:
                await asyncio.sleep(0.05)
        following.cancel()

    with aiorl.PPOConfig(**settings(tmp_path)).build() as trainer:
        trainer.train()
        trainer.add_policy("opponent_1", like="learner")
        trainer.save()
        models = Models((str(tmp_path / "run"),), follow="newest")
        service = Service(models)
        sessions = {
            policy_id: service.open({"policy": policy_id})["session"]
            for policy_id in ("learner", "opponent_1")
        }
        trainer.remove_policy("opponent_1")
        trainer.train()
        trainer.save()
    asyncio.run(follow({"learner", "opponent_0"}))
    assert service.end({"session": sessions["learner"]})["steps"] == 0
    for refused in (
        lambda: service.end({"session": sessions["opponent_1"]}),
        lambda: service.open({"policy": "opponent_1"}),
    ):
        with pytest.raises(Refusal) as caught:
            refused()
        assert caught.value.status == 404


def test_a_resumed_run_refuses_the_ids_of_removed_policies(tmp_path: Path) -> None:
    with aiorl.PPOConfig(**settings(tmp_path)).build() as trainer:
        trainer.train()
        trainer.add_policy("opponent_1", like="learner")
        trainer.remove_policy("opponent_1")
        path = trainer.save()
    with aiorl.Trainer.restore(path, env=Duel, run_dir=str(tmp_path / "again")) as restored:
        with pytest.raises(ConfigError) as caught:
            restored.add_policy("opponent_1", like="learner")
        assert caught.value.value == "opponent_1"
        restored.train()
        path = restored.save()
    assert find_checkpoint(path).meta["removed_policies"] == ["opponent_1"]


class AddsTwo(aiorl.DefaultCallbacks):
    """After the first iteration, adds a policy with weights of its own, and a copy of it."""

    def on_train_result(self, *, trainer: Any, result: Any, **kwargs: Any) -> None:
        if result["training_iteration"] == 1:
            weights = trainer.training.learning.group.get_weights()["learner"]
            ones = {name: np.ones_like(array) for name, array in weights.items()}
            trainer.add_policy("opponent_1", like="learner", weights=ones)
            trainer.add_policy("opponent_2", like="opponent_1")
            trainer.add_policy("opponent_3", like="learner")
            trainer.add_policy("opponent_4", like="opponent_3")


def test_a_policy_can_be_like_one_that_joins_at_the_same_time(tmp_path: Path) -> None:
    result = aiorl.train(**settings(tmp_path, stop_timesteps=192), algo="ppo", callbacks=AddsTwo)
    stored = find_checkpoint(result["checkpoint"])
    weights = [stored.under(f"algorithm/opponent_{number}/weights/") for number in range(1, 5)]
    assert all((array == 1.0).all() for array in weights[0].values())
    assert_same(weights[1], weights[0])
    assert_same(weights[3], weights[2])
    assert any((array != 1.0).any() for array in weights[2].values())


@WAYS
def test_callbacks_of_a_whole_run_let_policies_join_and_leave(
    tmp_path: Path, num_workers: int
) -> None:
    result = aiorl.train(
        **settings(tmp_path, num_workers=num_workers, stop_timesteps=256),
        algo="ppo",
        callbacks=League,
    )
    last = result["training_iteration"]
    assert last > 2
    stored = find_checkpoint(result["checkpoint"])
    policy_ids = {name.split("/")[1] for name in stored.tensors if name.startswith("algorithm/")}
    assert policy_ids == {"learner", "opponent_0", f"opponent_{last}", f"opponent_{last - 1}"}


@pytest.mark.slow
def test_a_resumed_league_removes_the_opponents_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(league, "EVERY", 1)
    monkeypatch.setattr(league, "NUM_OPPONENTS", 2)
    played = {
        **settings(tmp_path, env=league.RockPaperScissors, callbacks=league.League),
        "multiagent": {**settings(tmp_path)["multiagent"], "policy_mapping_fn": league.policy_for},
        "algo": "ppo",
    }
    del played["run_dir"]
    run = str(tmp_path / "run")
    first = aiorl.train(**played, run_dir=run, stop_timesteps=256)
    result = aiorl.train(**played, resume=run, stop_timesteps=512)
    last = result["training_iteration"]
    assert last - 2 >= first["training_iteration"] > 2
    stored = find_checkpoint(result["checkpoint"])
    policy_ids = {name.split("/")[1] for name in stored.tensors if name.startswith("algorithm/")}
    assert policy_ids == {"learner", "opponent_0", f"opponent_{last - 1}", f"opponent_{last}"}


def test_policies_that_would_not_work_are_refused_by_name(tmp_path: Path) -> None:
    with aiorl.PPOConfig(**settings(tmp_path)).build() as trainer:
        weights = trainer.get_weights(["learner"])["learner"]
        trainer.add_policy("opponent_1", like="learner", weights=weights)
        for policy_id in ("learner", "opponent_1"):
            with pytest.raises(ConfigError) as caught:
                trainer.add_policy(policy_id, like="learner")
            assert caught.value.value == policy_id
        for policy_id in ("", "a/b", "x" * 101, 5, None, ["a"]):
            with pytest.raises(ConfigError) as caught:
                trainer.add_policy(policy_id, like="learner")
            assert caught.value.key == "multiagent.policies"
        with pytest.raises(UnknownPolicyError) as unknown:
            trainer.add_policy("opponent_2", like="lerner")
        assert unknown.value.policy_id == "lerner"
        for policy_id in (None, ["learner"]):
            with pytest.raises(UnknownPolicyError):
                trainer.add_policy("opponent_2", like=policy_id)
            with pytest.raises(UnknownPolicyError):
                trainer.remove_policy(policy_id)
        name, array = next(iter(weights.items()))
        for wrong in (
            {name: array},
            {**weights, name: array[..., :1]},
            {**weights, name: array * np.nan},
        ):
            with pytest.raises(ConfigError) as caught:
                trainer.add_policy("opponent_2", like="learner", weights=wrong)
            assert "opponent_2" in str(caught.value)
        for wrong_array in ("abc", None, [[1], [1, 2]], array * 1j, array.astype(object)):
            with pytest.raises(ConfigError) as caught:
                trainer.add_policy(
                    "opponent_2", like="learner", weights={**weights, name: wrong_array}
                )
            assert "opponent_2" in caught.value.message
            assert name in caught.value.message
        with pytest.raises(ConfigError) as caught:
            trainer.remove_policy("learner")
        assert caught.value.value == "learner"
        with pytest.raises(UnknownPolicyError):
            trainer.remove_policy("opponent_2")
        trainer.remove_policy("opponent_1")
        with pytest.raises(ConfigError) as caught:
            trainer.add_policy("opponent_1", like="learner")
        assert caught.value.value == "opponent_1"
        assert trainer.get_weights().keys() == {"learner", "opponent_0"}


def always(agent_id: Any) -> str:
    """Map each agent to a policy of its own."""
    return "learner" if agent_id == "left" else "opponent_0"


@pytest.mark.parametrize(
    "mapping", [always, {"left": "learner", "right": "opponent_0"}], ids=["function", "table"]
)
def test_a_policy_that_agents_are_mapped_to_can_not_leave(tmp_path: Path, mapping: Any) -> None:
    agents = {**settings(tmp_path)["multiagent"], "policy_mapping_fn": mapping}

    class Named(Duel):
        observation_spaces = dict.fromkeys(("left", "right"), Duel.observation_space)
        action_spaces = dict.fromkeys(("left", "right"), Duel.action_space)

    with aiorl.PPOConfig(**settings(tmp_path, env=Named, multiagent=agents)).build() as trainer:
        with pytest.raises(ConfigError) as caught:
            trainer.remove_policy("opponent_0")
        assert caught.value.value == "opponent_0"
        if isinstance(mapping, dict):
            with pytest.raises(ConfigError) as caught:
                trainer.add_policy("opponent_1", like="learner")
            assert caught.value.key == "multiagent.policy_mapping_fn"


def test_a_run_of_one_policy_has_no_place_for_another(tmp_path: Path) -> None:
    single = {**SMALL, "env": "CartPole-v1", "run_dir": str(tmp_path / "run")}
    with aiorl.PPOConfig(**single).build() as trainer:
        with pytest.raises(ConfigError) as caught:
            trainer.add_policy("opponent", like="default_policy")
        assert caught.value.key == "multiagent.policy_mapping_fn"
