"""RLlib's optimizers, with workers in processes of their own.

R254.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optimizer_things import (
    FailingOnceWorker,
    GradientPolicy,
    StatePolicy,
    StepPolicy,
    counting,
    id_and_pid_of,
    index_and_seed_of,
    pid_of,
    timestep_of,
    weight_of,
)
from plain_policies import PlainPolicy, RandomPolicy
from rollout_workers import by_agent

import aiorl
from aiorl.compat.optimizers import (
    AsyncGradientsOptimizer,
    AsyncSamplesOptimizer,
    PolicyOptimizer,
    SyncReplayOptimizer,
    SyncSamplesOptimizer,
)
from aiorl.compat.remote import shutdown
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.compat.worker_set import WorkerSet
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import ActorLost, BatchError, ConfigError, PolicyError, RemoteError
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv

Make = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def end_of_actors() -> Iterator[None]:
    yield
    shutdown()


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes an optimizer of workers of a counting environment."""
    made: list[PolicyOptimizer] = []

    def optimizer(
        kind: type[PolicyOptimizer],
        policy: Any = StepPolicy,
        num_workers: int = 0,
        worker_args: dict[str, Any] | None = None,
        **config: Any,
    ) -> Any:
        args = {
            "env_creator": counting,
            "policy": policy,
            "rollout_fragment_length": 4,
            **(worker_args or {}),
        }
        made.append(kind.make(RolloutWorker, args, num_workers, config))
        return made[-1]

    yield optimizer
    for one in made:
        one.stop()


def learned_counts(optimizer: PolicyOptimizer) -> list[int]:
    notes = optimizer.workers.local_worker().get_policy().notes
    return [note[1] for note in notes if note[0] == "learn"]


def test_workers_sample_with_the_newest_weights_until_a_train_batch_is_whole(make: Make) -> None:
    optimizer = make(SyncSamplesOptimizer, num_workers=2, train_batch_size=9)
    assert optimizer.step() == {"rows": 16, "weight": 1}
    assert optimizer.foreach_worker(weight_of) == [1, 0, 0]
    assert optimizer.step() == {"rows": 16, "weight": 2}
    assert optimizer.foreach_worker(weight_of) == [2, 1, 1]
    assert optimizer.foreach_worker(timestep_of) == [16, 16, 16]
    assert (optimizer.num_steps_sampled, optimizer.num_steps_trained) == (32, 32)
    stats = optimizer.stats()
    assert stats["learner"] == {"rows": 16, "weight": 2}
    assert stats["opt_samples"] == 16
    assert stats["sample_peak_throughput"] > 0 < stats["opt_peak_throughput"]
    assert {"sample_time_ms", "grad_time_ms", "update_time_ms"} <= stats.keys()


def test_a_train_batch_is_learned_from_in_passes_and_minibatches(make: Make) -> None:
    optimizer = make(
        SyncSamplesOptimizer,
        train_batch_size=10,
        num_sgd_iter=2,
        sgd_minibatch_size=8,
        standardize_fields=["rewards"],
    )
    np.random.seed(1)  # draws the order of the rows
    figures = optimizer.step()
    assert learned_counts(optimizer) == [8, 4, 8, 4]
    assert figures["rows"] == 6, "the mean of the last pass"
    policy = optimizer.workers.local_worker().get_policy()
    assert abs(policy.last_learned["rewards"]).max() > 1
    assert optimizer.num_steps_trained == 12
    with pytest.raises(ConfigError, match="num_sgd_iter"):
        SyncSamplesOptimizer(optimizer.workers, num_sgd_iter=0)


def test_policies_that_share_an_environment_have_figures_of_their_own(make: Make) -> None:
    worker = RolloutWorker(
        lambda context: CountingMultiAgentEnv((2, 3)),
        {name: (StepPolicy, *_spaces(), {}) for name in "01"},
        policy_mapping_fn=by_agent,
        policies_to_train=["1"],
        batch_mode="complete_episodes",
    )
    optimizer = SyncSamplesOptimizer(WorkerSet.of(worker))
    assert optimizer.step().keys() == {"1"}
    assert optimizer.stats()["learner"]["1"]["weight"] == 1
    replay = SyncReplayOptimizer(WorkerSet.of(worker), learning_starts=0, train_batch_size=3)
    assert replay.step().keys() == {"1"}
    assert replay.replay_buffers.keys() == {"0", "1"}
    worker.stop()


def _spaces() -> tuple[Any, Any]:
    env = CountingMultiAgentEnv((2, 3))
    return env.observation_space, env.action_space


def test_each_worker_gets_its_index_and_a_seed_of_its_own(make: Make) -> None:
    optimizer = make(SyncSamplesOptimizer, num_workers=2, worker_args={"seed": 7})
    places = optimizer.foreach_worker_with_index(index_and_seed_of)
    assert places == [(0, 0, 2, 7), (1, 1, 2, 8), (2, 2, 2, 9)]
    pids = optimizer.foreach_worker(pid_of)
    of_policies = optimizer.workers.foreach_policy(id_and_pid_of)
    assert of_policies == [(DEFAULT_POLICY_ID, pid) for pid in pids]
    assert optimizer.workers.foreach_trainable_policy(id_and_pid_of) == of_policies
    with pytest.raises(RemoteError, match="no such thing"):
        optimizer.foreach_worker("optimizer_things:fail_elsewhere")
    with pytest.raises(ConfigError, match="num_workers"):
        make(SyncSamplesOptimizer, num_workers=-1)


def test_workers_of_a_set_draw_actions_of_their_own_from_one_seed() -> None:
    first, second = drawn_actions()
    assert first != second
    assert drawn_actions() == [first, second]


def drawn_actions() -> list[list[int]]:
    """Return the actions of the first batch of two remote workers with the same environment."""
    workers = WorkerSet(
        env_creator=counting,
        policy=RandomPolicy,
        trainer_config={"seed": 7, "rollout_fragment_length": 32},
        num_workers=2,
    )
    batches = aiorl.get([worker.sample.remote() for worker in workers.remote_workers()])
    workers.stop()
    return [batch["actions"].tolist() for batch in batches]


def test_counters_are_saved_and_restored(make: Make) -> None:
    first, second = make(SyncSamplesOptimizer), make(SyncSamplesOptimizer)
    first.step()
    second.restore(first.save())
    assert (second.num_steps_sampled, second.num_steps_trained) == (4, 4)


def test_results_are_means_over_the_episodes_of_all_workers(make: Make) -> None:
    optimizer = make(SyncSamplesOptimizer, num_workers=1, train_batch_size=40)
    assert math.isnan(optimizer.collect_metrics()["episode_reward_mean"])
    optimizer.step()
    first = optimizer.collect_metrics(60, min_history=100)
    assert first["episodes_this_iter"] > 0
    assert first["episode_reward_mean"] > 0 < first["episode_len_mean"]
    assert first["info"]["num_steps_sampled"] == 40
    assert first["sampler_perf"].keys() >= {"mean_inference_ms"}
    again = optimizer.collect_metrics()
    assert again["episodes_this_iter"] == 0
    assert again["episode_reward_mean"] == first["episode_reward_mean"]


def test_metrics_of_workers_without_an_optimizer_are_of_their_new_episodes() -> None:
    workers = WorkerSet(
        env_creator=counting,
        policy=RandomPolicy,
        trainer_config={"rollout_fragment_length": 32},
        num_workers=1,
    )
    local, (remote,) = workers.local_worker(), workers.remote_workers()
    local.sample()
    of_local = aiorl.collect_metrics(local)
    aiorl.get(remote.sample.remote())
    of_remote = aiorl.collect_metrics(remote_workers=[remote])
    assert of_local["episodes_this_iter"] == of_remote["episodes_this_iter"] > 0
    assert of_local["episode_reward_mean"] > 0 < of_local["sampler_perf"]["mean_inference_ms"]
    of_none = aiorl.collect_metrics(local, [remote], timeout_seconds=60)
    assert of_none["episodes_this_iter"] == 0
    assert math.isnan(of_none["episode_reward_mean"])
    workers.stop()


def test_gradients_are_applied_as_they_arrive_and_each_worker_gets_new_weights(make: Make) -> None:
    optimizer = make(AsyncGradientsOptimizer, GradientPolicy, num_workers=2, grads_per_step=5)
    assert optimizer.step()["batch_count"] == 4
    assert weight_of(optimizer.workers.local_worker()) == 5
    assert (optimizer.num_steps_sampled, optimizer.num_steps_trained) == (20, 20)
    assert optimizer.stats().keys() >= {"wait_time_ms", "apply_time_ms", "dispatch_time_ms"}
    optimizer.reset(optimizer.workers.remote_workers()[:1])
    assert optimizer.step()["computed_with"] == 9, "with the weights after its gradient before"
    with pytest.raises(ConfigError, match="remote worker"):
        make(AsyncGradientsOptimizer, GradientPolicy)


def test_rows_are_drawn_by_their_errors_after_enough_steps(make: Make) -> None:
    optimizer = make(
        SyncReplayOptimizer,
        learning_starts=8,
        buffer_size=16,
        train_batch_size=64,
        prioritized_replay_alpha=2.0,
        worker_args={"episode_horizon": 4},
    )
    assert [optimizer.step() for _ in range(2)] == [{}, {}]
    assert optimizer.step()["rows"] == 64
    assert optimizer.num_steps_sampled == 12
    assert optimizer.num_steps_trained == 64
    drawn = optimizer.workers.local_worker().get_policy().last_learned
    assert drawn.keys() >= {"obs", "new_obs", "actions", "rewards", "dones", "weights"}
    for _ in range(5):
        optimizer.step()
    drawn = optimizer.workers.local_worker().get_policy().last_learned
    counts = np.bincount(drawn["t"].astype(int), minlength=4)
    assert counts[3] > counts[1]
    assert optimizer.stats().keys() >= {"replay_time_ms", "learner", "opt_samples"}


def test_drawn_rows_can_be_changed_before_they_are_learned_from(make: Make) -> None:
    calls = []

    def change(samples: Any, policies: Any, size: int) -> Any:
        calls.append((list(policies), size))
        samples.policy_batches[DEFAULT_POLICY_ID]["rewards"][:] = 9.0
        return samples

    optimizer = make(
        SyncReplayOptimizer, learning_starts=0, train_batch_size=3, before_learn_on_batch=change
    )
    optimizer.step()
    assert calls == [([DEFAULT_POLICY_ID], 3)]
    assert optimizer.workers.local_worker().get_policy().last_learned["rewards"].tolist() == [9] * 3


def test_rows_of_all_policies_can_be_drawn_at_the_same_positions() -> None:
    worker = RolloutWorker(
        lambda context: CountingMultiAgentEnv((3, 3)),
        {name: (StepPolicy, *_spaces(), {}) for name in "01"},
        policy_mapping_fn=by_agent,
        batch_mode="complete_episodes",
    )
    optimizer = SyncReplayOptimizer(
        WorkerSet.of(worker),
        learning_starts=0,
        train_batch_size=20,
        prioritized_replay=False,
        synchronize_sampling=True,
    )
    optimizer.step()
    one, other = (worker.get_policy(name).last_learned for name in "01")  # type: ignore[union-attr]
    np.testing.assert_array_equal(one["batch_indexes"], other["batch_indexes"])
    worker.stop()
    with pytest.raises(ConfigError, match="prioritized_replay"):
        SyncReplayOptimizer(WorkerSet.of(worker), synchronize_sampling=True)


def test_a_policy_without_errors_or_with_states_is_refused(make: Make) -> None:
    optimizer = make(SyncReplayOptimizer, PlainPolicy, learning_starts=0)
    with pytest.raises(PolicyError, match="td_error"):
        optimizer.step()
    with pytest.raises(BatchError, match="state_in_0"):
        make(SyncReplayOptimizer, StatePolicy).step()


def test_workers_sample_while_batches_are_learned_from(make: Make) -> None:
    optimizer = make(
        AsyncSamplesOptimizer,
        num_workers=2,
        train_batch_size=8,
        rollout_fragment_length=4,
        max_sample_requests_in_flight_per_worker=2,
        learner_queue_size=16,
    )
    while optimizer.num_steps_trained < 40:
        optimizer.step()
    assert optimizer.num_steps_sampled == optimizer.num_steps_trained
    assert set(learned_counts(optimizer)) == {8}
    stats = optimizer.stats()
    assert stats["num_weight_syncs"] >= 10
    assert stats["train_throughput"] > 0
    assert stats["learner"]["rows"] == 8
    assert max(optimizer.foreach_worker(weight_of)[1:]) >= 1
    with pytest.raises(TypeError, match="learning_rate"):
        AsyncSamplesOptimizer(optimizer.workers, learning_rate=1)


def test_batches_are_learned_from_again_in_passes_and_from_replay(make: Make) -> None:
    optimizer = make(
        AsyncSamplesOptimizer,
        num_workers=1,
        train_batch_size=4,
        rollout_fragment_length=4,
        num_sgd_iter=3,
        minibatch_buffer_size=2,
        replay_buffer_num_slots=10,
        replay_proportion=4.0,
    )
    while optimizer.num_steps_sampled < 200:
        optimizer.step()
    assert optimizer.num_steps_trained == 3 * (optimizer.num_steps_sampled // 8 * 8)
    assert 0.7 < optimizer.stats()["num_steps_replayed"] / optimizer.num_steps_sampled < 0.9
    with pytest.raises(ConfigError, match="replay_buffer_num_slots"):
        make(AsyncSamplesOptimizer, num_workers=1, replay_proportion=1.0)


@pytest.mark.parametrize(
    "kind",
    [
        SyncSamplesOptimizer,
        pytest.param(SyncReplayOptimizer, marks=pytest.mark.slow),
        pytest.param(AsyncGradientsOptimizer, marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_after_a_worker_was_lost(make: Make, kind: type[PolicyOptimizer]) -> None:
    optimizer = make(kind, GradientPolicy, num_workers=2)
    lost, left = optimizer.workers.remote_workers()
    optimizer.step()
    sampled = optimizer.num_steps_sampled
    os.kill(aiorl.get(lost.apply.remote(pid_of)), signal.SIGKILL)
    with pytest.raises(ActorLost):
        step_on(optimizer)
    optimizer.reset([left])
    optimizer.step()
    assert optimizer.num_steps_sampled > sampled


def step_on(optimizer: PolicyOptimizer) -> None:
    while True:
        optimizer.step()


def test_asynchronous_sampling_goes_on_after_a_worker_was_lost(make: Make) -> None:
    optimizer = make(AsyncSamplesOptimizer, num_workers=2, train_batch_size=4)
    lost, left = optimizer.workers.remote_workers()
    os.kill(aiorl.get(lost.apply.remote(pid_of)), signal.SIGKILL)
    with pytest.raises(ActorLost):
        step_on(optimizer)
    optimizer.reset([left])
    trained = optimizer.num_steps_trained
    while optimizer.num_steps_trained < trained + 20:
        optimizer.step()


@pytest.mark.parametrize(("failing", "error"), [("exits", ActorLost), ("raises", RemoteError)])
def test_a_worker_that_failed_and_lives_again_samples_again(
    tmp_path: Path, failing: str, error: type[Exception]
) -> None:
    """R254."""
    optimizer = AsyncSamplesOptimizer.make(
        FailingOnceWorker,
        {
            "env_creator": counting,
            "policy": StepPolicy,
            "policy_config": {"marker": str(tmp_path / "failed"), "failing": failing},
            "rollout_fragment_length": 4,
        },
        num_workers=1,
        optimizer_config={"train_batch_size": 4},
        evaluator_resources={"max_restarts": 1},
    )
    with pytest.raises(error):
        optimizer.step()
    while optimizer.num_steps_trained < 20:
        with contextlib.suppress(error):  # of the other call that was under way
            optimizer.step()
    optimizer.stop()


def test_the_end_of_an_optimizer_ends_the_workers_that_it_made(make: Make) -> None:
    optimizer = make(SyncSamplesOptimizer, num_workers=1)
    (worker,) = optimizer.workers.remote_workers()
    pid = aiorl.get(worker.apply.remote(pid_of))
    optimizer.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
