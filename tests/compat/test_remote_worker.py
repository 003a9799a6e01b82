"""RolloutWorkers in processes of their own: every method over the handle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import remote_things as things
from gymnasium import spaces
from plain_policies import DEFAULT, VECTOR, PlainPolicy, spec

import aiorl
from aiorl.acting.filters import MeanStdFilter
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import ConfigError, RemoteError, UnsendableError


@pytest.fixture(scope="module", autouse=True)
def end() -> Iterator[None]:
    yield
    aiorl.shutdown()


@pytest.fixture(scope="module")
def worker() -> Any:
    return aiorl.RolloutWorker.as_remote().remote(
        env_creator=things.make_env,
        policy=PlainPolicy,
        rollout_fragment_length=20,
        observation_filter="MeanStdFilter",
    )


def test_r252_a_worker_samples_and_learns_over_its_handle(worker: Any) -> None:
    """R252."""
    batch = aiorl.get(worker.sample.remote())
    assert isinstance(batch, SampleBatch)
    assert batch.count == 20
    other, count = aiorl.get(worker.sample_with_count.remote())
    assert other.count == count == 20
    weights = {DEFAULT: {"w": np.full(1, 5, np.float32)}}
    aiorl.get(worker.set_weights.remote(weights, {"timestep": 9}))
    assert aiorl.get(worker.get_global_vars.remote()) == {"timestep": 9}
    gradients, info = aiorl.get(worker.compute_gradients.remote(batch))
    assert info == {"rows": 20, "batch_count": 20}
    assert aiorl.get(worker.apply_gradients.remote(gradients)) == {"applied": 20.0}
    np.testing.assert_array_equal(aiorl.get(worker.get_weights.remote())[DEFAULT]["w"], [25])
    assert aiorl.get(worker.learn_on_batch.remote(batch))["rows"] == 20
    info, count = aiorl.get(worker.sample_and_learn.remote(20, 2, 10, []))
    assert count == 20
    assert info[DEFAULT]["rows"] == 10
    aiorl.get(worker.set_global_vars.remote({"timestep": 10}))
    assert aiorl.get(worker.get_global_vars.remote()) == {"timestep": 10}


def test_metrics_and_filters_arrive_as_what_they_are(worker: Any) -> None:
    aiorl.get(worker.sample.remote())
    metrics = aiorl.get(worker.get_metrics.remote())
    assert metrics
    assert all(isinstance(episode, RolloutMetrics) for episode in metrics)
    assert list(metrics[0].agent_rewards) == [("agent0", DEFAULT)]
    filters = aiorl.get(worker.get_filters.remote(flush_after=True))
    assert type(filters[DEFAULT]) is MeanStdFilter
    assert filters[DEFAULT].buffer_count == filters[DEFAULT].count > 0
    local = MeanStdFilter((3,))
    local.apply_changes(filters[DEFAULT])
    aiorl.get(worker.sync_filters.remote({DEFAULT: local}))
    again = aiorl.get(worker.get_filters.remote())[DEFAULT]
    assert again.buffer_count == 0
    np.testing.assert_array_equal(again.state()["mean"], local.state()["mean"])


def test_functions_are_sent_by_name(worker: Any) -> None:
    weights = {DEFAULT: {"w": np.full(1, 7, np.float32)}}
    aiorl.get(worker.set_weights.remote(weights))
    assert aiorl.get(worker.apply.remote(things.rows_of, 3)) == 60
    assert aiorl.get(worker.foreach_env.remote("remote_things:spec_of")) == [2]
    assert aiorl.get(worker.for_policy.remote(things.weight_of)) == 7.0
    named = [(DEFAULT, 7.0)]
    assert aiorl.get(worker.foreach_policy.remote(things.name_and_weight)) == named
    path = "remote_things:name_and_weight"
    assert aiorl.get(worker.foreach_trainable_policy.remote(path)) == named
    with pytest.raises(UnsendableError, match=r"lambda.*top level of a module"):
        worker.apply.remote(lambda worker: worker.sample())
    with pytest.raises(RemoteError, match=r"remote_things.*has no 'spec_off'"):
        aiorl.get(worker.foreach_env.remote("remote_things:spec_off"))


def test_a_saved_worker_is_restored_in_another_process(worker: Any) -> None:
    weights = {DEFAULT: {"w": np.full(1, 3, np.float32)}}
    worker.set_weights.remote(weights)
    state = worker.save.remote()
    worker.set_weights.remote({DEFAULT: {"w": np.zeros(1, np.float32)}})
    worker.restore.remote(state)
    np.testing.assert_array_equal(aiorl.get(worker.get_weights.remote())[DEFAULT]["w"], [3])


def test_multi_agent_workers_take_their_classes_and_functions_by_import_path() -> None:
    Remote = aiorl.RolloutWorker.as_remote(num_cpus=2, memory=4 << 30)
    worker = Remote.remote(
        "remote_things:make_pair_env",
        {name: spec(VECTOR, spaces.Discrete(2)) for name in "01"},
        policy_mapping_fn="remote_things:policy_of",
        batch_mode="complete_episodes",
        rollout_fragment_length=3,
    )
    batch = aiorl.get(worker.sample.remote())
    assert isinstance(batch, MultiAgentBatch)
    assert sorted(batch.policy_batches) == ["0", "1"]
    gradients, info = aiorl.get(worker.compute_gradients.remote(batch))
    assert sorted(gradients) == ["0", "1"]
    assert info["batch_count"] == batch.count
    aiorl.get(worker.stop.remote())
    with pytest.raises(RemoteError, match=r"RolloutWorker\.sample raised SamplerDied"):
        aiorl.get(worker.sample.remote())
    aiorl.kill(worker)


def test_a_subclass_of_the_worker_keeps_its_methods() -> None:
    worker = things.OwnWorker.as_remote().remote(
        "aiorl.testing.envs:CountingEnv", PlainPolicy, rollout_fragment_length=4
    )
    assert aiorl.get(worker.twice_the_rows.remote()) == 8
    aiorl.kill(worker)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"num_cpus": -1}, "num_cpus"),
        ({"memory": float("nan")}, "memory"),
        ({"num_gpus": 1}, "num_gpus"),
        ({"resources": {"tpu": 1}}, "resources"),
    ],
)
def test_impossible_limits_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        aiorl.RolloutWorker.as_remote(**options)
    assert error.value.key == key


def test_limits_of_what_is_not_asked_for_are_taken() -> None:
    aiorl.RolloutWorker.as_remote(resources={}, num_gpus=0)
