"""Policies that don't learn: nothing of them changes, whatever they see."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from small_runs import SMALL

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.acting.filters import MeanStdFilter
from aiorl.errors import ConfigError
from aiorl.run.core import Publisher

SEEN = [np.array([x], np.float32) for x in np.linspace(480.0, 560.0, 41)]


class Pair(aiorl.MultiAgentEnv):
    """Agents "a" and "b" for six steps; what they observe is a shared number that drifts by the
    class's shift.
    """

    observation_space = spaces.Box(-1e9, 1e9, (1,), np.float32)
    action_space = spaces.Discrete(4)
    shift: ClassVar[float] = 0.0

    def __init__(self, config: Any = None) -> None:
        self._rng = np.random.default_rng(0)

    def _observe(self) -> dict[str, Any]:
        return {
            name: self._rng.normal(500.0 + Pair.shift, 3.0, 1).astype(np.float32) for name in "ab"
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        ends = {"__all__": self.t == 6}
        return self._observe(), dict.fromkeys("ab", 1.0), ends, {"__all__": False}, {}


def policy_of(agent_id: Any, **others: Any) -> str:
    return f"p{agent_id}"


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    agents = {
        "policies": {"pa": {}, "pb": {}},
        "policy_mapping_fn": policy_of,
        **more.pop("multiagent", {}),
    }
    return {
        **SMALL,
        "env": Pair,
        "observation_filter": "MeanStdFilter",
        "run_dir": str(directory),
        "multiagent": agents,
        **more,
    }


def state_of(checkpoint: Any, policy_id: str) -> dict[str, Any]:
    found = find_checkpoint(checkpoint)
    return {**found.under(f"algorithm/{policy_id}/weights/"), **found.filter_state(policy_id)}


def test_neither_weights_nor_filter_of_a_fixed_policy_change_in_a_run_or_after_a_restore(
    tmp_path: Path,
) -> None:
    Pair.shift = 0.0
    with aiorl.PPOConfig(**settings(tmp_path / "both")).build() as trainer:
        trainer.train()
        begins = trainer.save(tmp_path / "begins")
    fixed = {"policies_to_train": ["pb"]}
    Pair.shift = 40.0
    with aiorl.PPOConfig(
        **settings(tmp_path / "one", init_from=str(begins), multiagent=fixed)
    ).build() as trainer:
        first = [trainer.compute_action(x, policy_id="pa", explore=False) for x in SEEN]
        trainer.train()
        assert [trainer.compute_action(x, policy_id="pa", explore=False) for x in SEEN] == first
        middle = trainer.save(tmp_path / "middle")
    with aiorl.Trainer.restore(middle, run_dir=str(tmp_path / "two"), env=Pair) as trainer:
        trainer.train()
        assert [trainer.compute_action(x, policy_id="pa", explore=False) for x in SEEN] == first
        ends = trainer.save(tmp_path / "ends")
    before = state_of(begins, "pa")
    for later in (middle, ends):
        for name, array in state_of(later, "pa").items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert state_of(ends, "pb")["n"] > state_of(begins, "pb")["n"]


def test_exploration_of_a_fixed_policy_stands_where_its_training_ended(tmp_path: Path) -> None:
    explored = {"exploration": {"type": "EpsilonGreedy", "epsilon": [[0, 1.0], [64, 0.0]]}}
    Pair.shift = 0.0
    with aiorl.PPOConfig(**settings(tmp_path / "both", **explored)).build() as trainer:
        trainer.train()
        begins = trainer.save(tmp_path / "begins")
        sampled = find_checkpoint(begins).meta["counters"]["env_steps_sampled"]
    fixed = {"policies_to_train": ["pb"]}
    with aiorl.PPOConfig(
        **settings(tmp_path / "one", init_from=str(begins), multiagent=fixed, **explored)
    ).build() as trainer:
        for _ in range(2):
            trainer.train()
        assert trainer.get_policy("pa").global_timestep == sampled
        assert trainer.get_policy("pb").global_timestep != sampled
        ends = trainer.save(tmp_path / "ends")
    assert aiorl.load_policy(ends, "pa").policy.global_timestep == sampled


def test_a_delta_for_the_filter_of_a_fixed_policy_is_left_out() -> None:
    fixed, learns = MeanStdFilter((1,)), MeanStdFilter((1,))
    fixed.is_frozen = True
    other = MeanStdFilter((1,))
    other(np.ones((3, 1), np.float32))
    delta = other.take_delta()
    Publisher({"fixed": fixed, "learns": learns}).merge_deltas(
        "a", 1, {"fixed": delta, "learns": delta}
    )
    assert (fixed.count, learns.count) == (0, 3)


def test_a_rollout_worker_leaves_the_filters_of_policies_that_it_does_not_train() -> None:
    space = Pair.observation_space
    worker = aiorl.RolloutWorker(
        lambda context: Pair(),
        {name: (Still, space, Pair.action_space, {}) for name in ("pa", "pb")},
        policy_mapping_fn=policy_of,
        policies_to_train=["pb"],
        observation_filter="MeanStdFilter",
        rollout_fragment_length=12,
    )
    try:
        worker.sample()
        assert [worker.filters[name].count > 0 for name in ("pa", "pb")] == [False, True]
    finally:
        worker.stop()


class Still(aiorl.Policy):
    """Always takes action 0."""

    def compute_actions(self, obs_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return np.zeros(len(obs_batch), np.int64), [], {}


def test_a_fixed_policy_of_a_new_run_takes_another_ones_state_and_explores_no_more(
    tmp_path: Path,
) -> None:
    Pair.shift = 0.0
    more: dict[str, Any] = {
        "multiagent": {"policies_to_train": ["pb"]},
        "exploration": {"type": "EpsilonGreedy", "epsilon": [[0, 1.0], [1, 0.0]]},
    }
    with aiorl.PPOConfig(**settings(tmp_path / "run", **more)).build() as trainer:
        trainer.train()
        with pytest.raises(ConfigError) as caught:
            trainer.set_weights({"pa": trainer.get_weights(["pb"])["pb"]})
        assert "set_policy_state" in str(caught.value)
        trainer.set_policy_state(trainer.get_policy_state("pb"), "pa")
        trainer.train()
        best = {trainer.compute_action(obs, policy_id="pb") for obs in SEEN[:1]}
        actions = {trainer.compute_action(SEEN[0], policy_id="pa", explore=True) for _ in range(20)}
    assert actions == best


class Signed(aiorl.Policy):
    """Acts by the sign of its first preprocessed number, and counts its calls in its state."""

    def get_initial_state(self) -> list[Any]:
        return [np.zeros(1, np.float32)]

    def compute_actions(self, obs: Any, states: Any = (), *args: Any, **kwargs: Any) -> Any:
        return (obs[:, 0] > 0).astype(int), [states[0] + 1], {"first": obs[:, 0]}


def test_a_policy_of_the_users_class_takes_observations_as_the_environment_has_them(
    tmp_path: Path,
) -> None:
    agents = {
        "policies": {"left": None, "right": {"class": Signed}},
        "policy_mapping_fn": "general_runs:side",
        "policies_to_train": ["left"],
    }
    config = {**SMALL, "env": "general_runs:Poles", "run_dir": str(tmp_path / "run")}
    with aiorl.PPOTrainer({**config, "multiagent": agents}) as trainer:
        learner = trainer.train()["learner"]
        for sign in (-1.0, 1.0):
            assert trainer.compute_action(np.full(4, sign), policy_id="right") == (sign > 0)
        _, state, outputs = trainer.compute_action(
            np.full(4, 0.5), [np.full(1, 6.0)], policy_id="right"
        )
    assert (state[0].tolist(), outputs["first"]) == ([7.0], 0.5)
    assert learner["left"]["kl"] == learner["left/kl"]


def test_results_and_modules_name_the_counterparts_of_other_libraries(tmp_path: Path) -> None:
    config = {**SMALL, "env": "CartPole-v1", "run_dir": str(tmp_path / "run")}
    with aiorl.PPOTrainer(config) as trainer:
        result = trainer.train()
    with pytest.raises(KeyError, match="learner"):
        result["info"]
    with pytest.raises(KeyError, match="absent"):
        result["absent"]
    with pytest.raises(AttributeError, match="custom_model"):
        _ = aiorl.TFModelV2
