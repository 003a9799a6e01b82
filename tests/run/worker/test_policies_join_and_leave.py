"""Policies that join a worker's sampler with a snapshot, and leave it with another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from units import entry, make_unit, network

from aiorl.config.worker import PolicyPart
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.errors import PolicyError, UnknownPolicyError
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Snapshot
from aiorl.run.added_policy import REMOVED, AddedPolicy
from aiorl.run.worker.sampler_unit import SamplerUnit
from aiorl.sampling.callbacks import DefaultCallbacks

PLAN = SamplePlan(columns=(c.OBS, c.ACTIONS, c.REWARDS))
GRAPH, SPEC, WEIGHTS = network(3)
FIXED = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
LENGTH = 5
"""Steps of an episode, for both agents."""


def newest(agent_id: Any, episode: Any, worker: Any) -> str:
    """Map agent a0 to the learner, a1 to the opponent that comes last in the alphabet."""
    return "learner" if agent_id == "a0" else max(worker.policy_map.keys() - {"learner"})


class Played(DefaultCallbacks):
    """Counts the episodes of each opponent."""

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_metrics[episode.policy_for("a1")] = 1.0


@pytest.fixture
def make() -> Iterator[Callable[..., SamplerUnit]]:
    units: list[SamplerUnit] = []

    def make_one(**settings: Any) -> SamplerUnit:
        policies = {"learner": entry(PLAN), "opponent_0": entry(SamplePlan(), is_trained=False)}
        defaults = {
            "env": "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv",
            "env_config": {"lengths": [LENGTH, LENGTH]},
            "multiagent": {"policy_mapping_fn": newest},
            "num_envs_per_worker": 1,
            "callbacks": Played,
        }
        units.append(make_unit(policies, (GRAPH, SPEC, WEIGHTS), **{**defaults, **settings}))
        return units[-1]

    yield make_one
    for unit in units:
        unit.close()


def packed() -> Any:
    part = PolicyPart(is_trained=False, config={"fixed_timestep": 7})
    return AddedPolicy(part, {"graph": GRAPH, "spec": SPEC.to_dict()}).pack()


def joins(version: int, *names: str, **changes: Any) -> Snapshot:
    """Return a partial snapshot with which opponents join, after its way over the wire."""
    snapshot = Snapshot(
        version,
        dict.fromkeys(names, FIXED),
        {},
        {},
        {"timestep": 0},
        since=version - 1,
        policies=dict.fromkeys(names, packed()),
    )
    frames = encode(snapshot._replace(**changes))
    decoded = decode([memoryview(bytes(frame)) for frame in frames])
    assert isinstance(decoded, Snapshot)
    return decoded


def opponents(unit: SamplerUnit) -> set[str]:
    """Return the opponents of the episodes in the next fragment."""
    episodes = unit.sample().episodes
    return {name.removeprefix("custom/") for name in episodes if name.startswith("custom/")}


def test_a_policy_joins_between_two_steps_and_an_episode_that_runs_keeps_its_own(make: Any) -> None:
    unit = make(rollout_fragment_length=LENGTH - 2)
    assert not opponents(unit), "the first episode runs"
    unit.offer(joins(1, "opponent_1"))
    assert opponents(unit) == {"opponent_0"}
    assert not opponents(unit)
    assert opponents(unit) == {"opponent_1"}
    assert unit.version == 1
    policy = unit.worker.policy_map["opponent_1"]
    assert policy.global_timestep == 7
    for name, array in policy.get_weights().items():
        np.testing.assert_array_equal(array, FIXED[name])
    produced = unit.sample()
    assert produced.batches.keys() == {"learner"}, "rows of a policy that does not learn stay here"


def test_a_policy_that_leaves_plays_its_episode_to_the_end(make: Any) -> None:
    unit = make(rollout_fragment_length=LENGTH - 2)
    unit.offer(joins(1, "opponent_1"))
    assert not opponents(unit)
    unit.offer(joins(2, weights={}, policies={"opponent_1": REMOVED}))
    assert opponents(unit) == {"opponent_1"}
    assert not opponents(unit)
    assert opponents(unit) == {"opponent_0"}
    assert unit.worker.policy_map.keys() == {"learner", "opponent_0"}
    assert unit.worker.filters.keys() == {"learner", "opponent_0"}


def test_a_whole_snapshot_brings_what_was_missed_and_drops_what_it_does_not_have(make: Any) -> None:
    unit = make()
    unit.sample()
    unit.offer(joins(1, "opponent_1"))
    unit.sample()
    whole = joins(9, "opponent_8", "opponent_9", since=-1)
    unit.offer(whole._replace(weights={"learner": WEIGHTS, **whole.weights}))
    unit.sample()
    assert unit.worker.policy_map.keys() == {"learner", "opponent_8", "opponent_9"}
    assert opponents(unit) == {"opponent_9"}


def test_snapshots_that_wait_are_applied_together(make: Any) -> None:
    unit = make()
    unit.sample()
    unit.offer(joins(1, "opponent_1"))
    unit.offer(joins(2, "opponent_2"))
    unit.offer(joins(3, weights={"learner": FIXED}, policies={"opponent_1": REMOVED}))
    unit.sample()
    assert unit.worker.policy_map.keys() == {"learner", "opponent_0", "opponent_2"}
    assert not any(
        array.any() for array in unit.worker.policy_map["learner"].get_weights().values()
    )
    assert unit.version == 3


def test_a_sampler_ahead_in_its_own_thread_acts_with_policies_that_join(make: Any) -> None:
    unit = make(sample_async=True, rollout_fragment_length=LENGTH)
    unit.sample()
    unit.offer(joins(1, "opponent_1"))
    for _ in range(50):
        if opponents(unit) == {"opponent_1"}:
            return
    raise AssertionError("the policy never acted")


def test_mapping_to_a_policy_that_has_left_is_an_error_that_names_it(make: Any) -> None:
    unit = make(multiagent={"policy_mapping_fn": always_the_first})
    unit.offer(joins(1, "opponent_1", policies={"opponent_0": REMOVED, "opponent_1": packed()}))
    with pytest.raises(UnknownPolicyError) as caught:
        unit.sample()
    assert caught.value.policy_id == "opponent_0"


def always_the_first(agent_id: Any) -> str:
    """Map agent a1 to the first opponent, whether or not there is one."""
    return "learner" if agent_id == "a0" else "opponent_0"


@pytest.mark.parametrize(
    "damaged", [b"\x00", b"\x81\xa4part\x01", bytes(packed())[:-40]], ids=["0", "part", "cut"]
)
def test_a_policy_that_makes_no_sense_is_refused(make: Any, damaged: bytes) -> None:
    unit = make()
    unit.sample()
    unit.offer(joins(1, "opponent_1", policies={"opponent_1": np.frombuffer(damaged, np.uint8)}))
    with pytest.raises(PolicyError):
        unit.sample()
