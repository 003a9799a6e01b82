"""`RolloutWorker.sample`, in one process, over every kind of environment."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import PlainPolicy

from aiorl.data.sample_batch import SampleBatch
from aiorl.env.wrapping import STATS_FILE
from aiorl.errors import ConfigError
from aiorl.offline.estimators import OffPolicyEstimate
from aiorl.offline.io import InputReader, OutputWriter
from aiorl.sampling.async_sampler import AsyncSampler
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.testing.envs import CountingEnv

ACTIONS = spaces.Discrete(2)


class Stored(InputReader):
    """Reader of batches of the given sizes."""

    def __init__(self, *sizes, episodes=None, tape=None):
        self.sizes, self.tape = itertools.cycle(sizes), tape if tape is not None else []
        self.numbers = itertools.count()

    def next(self):
        count, number = next(self.sizes), next(self.numbers)
        self.tape.append(("read", number))
        return SampleBatch(
            obs=np.full((count, 3), number, np.float32),
            new_obs=np.full((count, 3), number + 1, np.float32),
            actions=np.zeros(count, np.int64),
            rewards=np.ones(count, np.float32),
            action_prob=np.full(count, 0.5, np.float32),
            eps_id=np.full(count, number),
        )


# --- size of batches ---


def test_truncated_batches_take_at_most_one_sampler_batch_per_environment(make_worker):
    """R59: even if there are fewer rows than the target; and it reads no more than needed."""
    for sizes, rows, reads in (((2,), 6, 3), ((25, 5), 30, 2)):
        reader = Stored(*sizes)
        worker = make_worker(
            num_envs=3, rollout_fragment_length=10, input_creator=lambda context, own=reader: own
        )
        assert worker.sample().count == rows
        assert len(reader.tape) == reads


# --- order of calls ---


class TapedCallbacks(DefaultCallbacks):
    tape: list

    def on_sample_end(self, *, worker, samples, **kwargs):
        self.tape.append(("callback", samples.count, worker.last_batch))
        samples["rewards"][:] = 9.0


class TapedWriter(OutputWriter):
    def __init__(self, tape):
        self.tape, self.batches = tape, []

    def write(self, batch):
        self.batches.append(batch)
        self.tape.append(("write", batch.count, float(batch["rewards"][0]), sorted(batch.packed)))


class TapedPolicy(PlainPolicy):
    tape: list

    def compute_log_likelihoods(self, actions, obs, states, prev_actions, prev_rewards):
        self.tape.append(("estimate", len(obs)))
        return np.full(len(obs), np.log(0.25))


@pytest.mark.parametrize(("mode", "kind"), [(True, "rows"), ("bulk", "bulk"), ("each row", "rows")])
def test_a_batch_passes_all_stages_in_order(make_worker, mode, kind):
    """R61, R62, R63, R64, R65, R66."""
    tape = []
    TapedCallbacks.tape = TapedPolicy.tape = tape
    writer = TapedWriter(tape)
    worker = make_worker(
        policy=TapedPolicy,
        num_envs=2,
        rollout_fragment_length=3,
        callbacks=TapedCallbacks,
        input_creator=lambda context: Stored(3, tape=tape),
        output_creator=lambda context: writer,
        input_evaluation=["is"],
        compress_observations=mode,
        fake_sampler=True,
        policy_config={"gamma": 1.0},
    )
    batch = worker.sample()
    assert tape == [
        ("read", 0),
        ("read", 1),
        ("callback", 6, None),
        ("write", 6, 9.0, []),
        ("estimate", 3),
        ("estimate", 3),
    ]
    assert batch["rewards"].tolist() == [9.0] * 6, "the caller sees the callback's change"
    estimates = worker.get_metrics()
    assert [name for name, _ in estimates] == ["is", "is"]
    assert estimates[0].metrics["V_prev"] == 27.0, "and the estimators see it"
    assert batch.packed == {"obs", "new_obs"}
    assert batch.slice(0, 1).packed == ({"obs", "new_obs"} if kind == "rows" else set())
    assert writer.batches[0].packed == frozenset(), "the written batch is unchanged"
    for name in batch:
        np.testing.assert_array_equal(batch[name], writer.batches[0][name])
    assert worker.last_batch is batch
    before = list(tape)
    assert worker.sample() is batch
    assert worker.sample() is batch
    assert tape == before, "no read, callback, write or estimate"


class ExtraCallbacks(DefaultCallbacks):
    def on_episode_end(self, *, episode, **kwargs):
        rows = {name: np.zeros((1, 3), np.float32) for name in ("obs", "new_obs")}
        episode.user_data["extra"] = True
        names = (
            "actions",
            "rewards",
            "prev_actions",
            "prev_rewards",
            "dones",
            "terminateds",
            "truncateds",
        )
        rows |= {name: np.zeros(1) for name in (*names, "t", "eps_id", "agent_index")}
        episode.add_extra_batch(
            SampleBatch({**rows, "infos": np.array([{}], object), "rewards": np.array([-1.0])})
        )


def test_extra_batches_are_concatenated_and_counted(make_worker):
    """R67."""
    worker = make_worker(
        lambda context: CountingEnv(3),
        batch_mode="complete_episodes",
        rollout_fragment_length=8,
        callbacks=ExtraCallbacks,
    )
    batch = worker.sample()
    assert batch["rewards"].tolist() == [1, 2, 3, -1] * 2


def test_metrics_of_episodes_come_before_those_of_estimators(make_worker):
    """R36, R77, R192: with simulation, the environment is sampled for metrics only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TapedPolicy, "tape", [], raising=False)
        worker = make_worker(
            lambda context: CountingEnv(3),
            TapedPolicy,
            input_creator=lambda context: Stored(4),
            input_evaluation=["simulation", "wis", "is"],
            rollout_fragment_length=4,
        )
        assert isinstance(worker.sampler, AsyncSampler)
        assert worker.sample()["rewards"].tolist() == [1.0] * 4, "stored rows"
        estimates, episodes = [], []
        deadline = time.monotonic() + 20
        # More episodes than fit into a queue of batches that no one reads.
        while len(episodes) < 20 and time.monotonic() < deadline:
            for metrics in worker.get_metrics():
                (estimates if isinstance(metrics, OffPolicyEstimate) else episodes).append(metrics)
        assert [name for name, _ in estimates] == ["is", "wis"]
        assert {(found.episode_length, found.episode_reward) for found in episodes} == {(3, 6.0)}
        assert len(episodes) >= 20
        worker.stop()


class Exclusive(PlainPolicy):
    """Policy that detects when two threads evaluate it at the same time."""

    is_inside, clashes = False, 0

    def enter(self, numbers):
        Exclusive.clashes += self.is_inside
        self.is_inside = True
        time.sleep(0.001)
        self.is_inside = False
        return numbers

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        return self.enter(np.zeros(len(obs), np.int64)), [], {}

    def compute_log_likelihoods(self, actions, *args):
        return self.enter(np.full(len(actions), -1.0))


def test_estimators_and_the_sampler_do_not_evaluate_a_policy_at_the_same_time(make_worker):
    """R36."""
    Exclusive.clashes = 0
    worker = make_worker(
        policy=Exclusive,
        input_creator=lambda context: Stored(4),
        input_evaluation=["simulation", "is"],
        rollout_fragment_length=4,
    )
    for _ in range(50):
        worker.sample()
    assert Exclusive.clashes == 0


def test_batches_read_before_an_error_are_kept_for_the_next_call(make_worker):
    """R7: also when the sampler is interrupted between two turns."""
    worker = make_worker(lambda context: CountingEnv(50), num_envs=2, rollout_fragment_length=5)

    class Interruption(Exception):
        pass

    turns = itertools.count()

    def interrupt():
        if next(turns) == 5:
            raise Interruption

    worker.on_turn = interrupt
    with pytest.raises(Interruption):
        worker.sample()
    batch = worker.sample()
    assert batch["t"].tolist() == [0, 1, 2, 3, 4] * 2
    assert worker.sample()["t"].tolist() == [5, 6, 7, 8, 9] * 2


def test_a_callback_that_raises_loses_no_batch(make_worker):
    """R7, R62."""
    left = [1, 0]

    class Fails(DefaultCallbacks):
        def on_sample_end(self, *, samples, **kwargs):
            1 / (1 - left.pop(0)) if left else None

    worker = make_worker(
        lambda context: CountingEnv(50), num_envs=2, rollout_fragment_length=3, callbacks=Fails
    )
    with pytest.raises(ZeroDivisionError):
        worker.sample()
    assert worker.sample()["t"].tolist() == [0, 1, 2] * 2
    assert worker.sample()["t"].tolist() == [3, 4, 5] * 2


@pytest.mark.parametrize("junk", [None, {"obs": np.zeros((2, 3))}])
def test_a_reader_that_returns_no_batch_is_named_and_can_be_read_again(make_worker, junk):
    class Junk(Stored):
        def next(self):
            return junk if next(self.numbers) == 0 else super().next()

    worker = make_worker(input_creator=lambda context: Junk(4), rollout_fragment_length=4)
    with pytest.raises(ConfigError, match=f"Junk.*{type(junk).__name__}.*SampleBatch"):
        worker.sample()
    assert worker.sample().count == 4


def test_a_reader_of_the_samplers_batches_is_refused_immediately_if_simulation_drops_them(
    make_worker,
):
    """R36, R75: no batch would ever come."""

    class Around(InputReader):
        def __init__(self, context):
            self.reader = context.default_sampler_input()

        def next(self):
            return self.reader.next()

    worker = make_worker(input_creator=Around, input_evaluation=["simulation"])
    with pytest.raises(ConfigError) as caught:
        worker.sample()
    assert caught.value.key == "input_evaluation"


# --- as a stream ---


def test_batches_are_available_as_an_asynchronous_iterator(make_worker):
    """SPEC 2.2 step 3."""
    worker = make_worker(lambda context: CountingEnv(50), rollout_fragment_length=5)

    async def take(count):
        starts = []
        async for batch in worker.samples:
            starts.append(int(batch["t"][0]))
            if len(starts) == count:
                return starts

    assert asyncio.run(take(3)) == [0, 5, 10]
    assert next(worker.samples)["t"][0] == 15


# --- kinds of environments ---


def test_environments_in_their_own_processes_are_sampled(make_worker, tmp_path):
    """R161, R164, R20, R26, R29: they are monitored and seeded there; the one made for its spaces
    is not.
    """
    worker = make_worker(
        CountingEnv,
        env_config={"length": 3},
        remote_worker_envs=True,
        num_envs=2,
        batch_mode="complete_episodes",
        rollout_fragment_length=6,
        seed=1,
        monitor_path=str(tmp_path),
    )
    assert type(worker.env) is CountingEnv
    for _ in range(3):
        batch = worker.sample()
        assert batch["t"].tolist() == [0, 1, 2] * 4
    assert len(worker.async_env.pids) == 2
    assert worker.foreach_env(lambda env: env) == [worker.async_env]
    worker.stop()
    lines = [len((folder / STATS_FILE).read_text().splitlines()) for folder in tmp_path.iterdir()]
    assert sum(lines) >= 12
    assert len(lines) == 2
