"""Methods of RolloutWorker; `sample` has its own module."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import DEFAULT, VECTOR, PlainPolicy, spec
from processes import wait_until
from rollout_workers import make_refusing
from scripted_env import ScriptedEnv, scenes

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.env.external_env import ExternalEnv
from aiorl.errors import EnvError, PolicyError, SamplerDied
from aiorl.offline.io import InputReader, OutputWriter
from aiorl.sampling.async_sampler import MAX_BATCHES_AHEAD
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.worker import Worker
from aiorl.testing.envs import CountingEnv

ACTIONS = spaces.Discrete(2)


# --- weights ---


def test_weights_are_returned_for_all_policies_or_those_named(make_pair):
    """R40."""
    worker = make_pair()
    assert {name: found["w"].tolist() for name, found in worker.get_weights().items()} == {
        "0": [0.0],
        "1": [0.0],
    }
    assert list(worker.get_weights(["1"])) == ["1"]
    assert worker.get_weights(["unknown"]) == worker.get_weights([]) == {}
    assert list(worker.get_weights("1")) == ["1"]
    assert worker.get_weights("01") == {}, "a string is one id, not a collection of letters"


def test_weights_are_set_for_the_given_policies_and_global_variables_afterwards(make_pair):
    """R41."""
    worker = make_pair()
    worker.set_weights({"1": {"w": [5.0]}}, {"timestep": 40})
    assert worker.policy_map["0"].notes == [("global_vars", {"timestep": 40})]
    assert worker.policy_map["1"].notes == [("weights", 5.0), ("global_vars", {"timestep": 40})]
    assert worker.policy_map["0"].global_timestep == 40
    worker.set_weights({"0": {"w": [1.0]}}, {})
    assert worker.get_global_vars() == {"timestep": 40}


def test_weights_that_one_policy_refuses_change_none(make_worker):
    """R41."""
    worker = make_refusing(make_worker)
    worker.set_weights({"0": {"w": [1.0]}, "1": {"w": [2.0]}}, {"timestep": 5})
    with pytest.raises(KeyError, match="unknown"):
        worker.set_weights({"0": {"w": [7.0]}, "unknown": {"w": [1.0]}})
    with pytest.raises(PolicyError, match="too large"):
        worker.set_weights({"0": {"w": [7.0]}, "1": {"w": [200.0]}}, {"timestep": 6})
    assert {name: found["w"].tolist() for name, found in worker.get_weights().items()} == {
        "0": [1.0],
        "1": [2.0],
    }
    assert worker.get_global_vars() == {"timestep": 5}


class Slow(PlainPolicy):
    """Policy that detects weights set, or evaluations begun, during an evaluation."""

    clashes = 0
    is_acting = False

    def compute_actions(self, *args, **kwargs):
        self.clashes += self.is_acting
        self.is_acting = True
        threading.Event().wait(0.01)
        self.is_acting = False
        return super().compute_actions(*args, **kwargs)

    def set_weights(self, weights):
        self.clashes += self.is_acting
        super().set_weights(weights)


def test_weights_are_not_set_in_the_middle_of_a_turn_of_a_cancelled_wait(make_worker):
    """R6, R41."""
    worker = make_worker(lambda context: CountingEnv(50), Slow, rollout_fragment_length=20)

    async def cancelled():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(worker.samples), 0.03)
        for number in range(10):
            worker.set_weights({DEFAULT: {"w": [float(number)]}})
        return await anext(worker.samples)

    assert asyncio.run(cancelled())["t"].tolist() == list(range(20))
    assert worker.policy_map[DEFAULT].clashes == 0


def test_two_threads_that_sample_get_different_batches(make_worker):
    """A cancelled wait keeps sampling while another thread calls sample()."""
    worker = make_worker(lambda context: CountingEnv(1000), Slow, rollout_fragment_length=5)
    batches, errors = [], []

    def sample():
        try:
            batches.extend(worker.sample()["t"].tolist() for _ in range(4))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=sample) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert worker.policy_map[DEFAULT].clashes == 0
    assert sorted(step for batch in batches for step in batch) == list(range(40))


@pytest.mark.parametrize("sample_async", [False, True])
def test_callbacks_can_set_weights_while_others_wait_to_set_them(make_worker, sample_async):
    """R6: a callback, which is inside a turn, does not wait."""

    class Callbacks(DefaultCallbacks):
        def on_episode_step(self, *, worker, **kwargs):
            worker.set_weights(worker.get_weights())

    worker = make_worker(sample_async=sample_async, callbacks=Callbacks, rollout_fragment_length=20)
    over = threading.Event()

    def set_weights():
        while not over.is_set():
            worker.set_weights({DEFAULT: {"w": [1.0]}})

    thread = threading.Thread(target=set_weights)
    thread.start()
    try:
        for _ in range(5):
            assert worker.sample().count == 20
    finally:
        over.set()
        thread.join(10)
    assert not thread.is_alive()


def test_every_environment_is_visited_or_the_base_environment_if_it_shows_none(make_worker):
    """R48."""
    worker = make_worker(num_envs=3)
    assert worker.foreach_env(id) == [id(env) for env in worker.async_env.get_unwrapped()]
    assert len(worker.foreach_env(id)) == 3
    base_env = ScriptedEnv({0: [scenes(2)]})
    worker = make_worker(lambda context: base_env, {DEFAULT: spec(VECTOR, ACTIONS)})
    assert worker.foreach_env(lambda env: env) == [base_env]


def test_policies_are_found_by_id_and_visited_and_get_global_variables(make_pair):
    """R49, R50, R52."""
    worker = make_pair(policies_to_train=["1"])
    first, second = worker.policy_map.values()
    assert worker.get_policy("0") is first
    assert worker.get_policy() is None
    assert worker.for_policy(lambda policy: policy, "1") is second
    with pytest.raises(KeyError, match="unknown"):
        worker.for_policy(id, "unknown")
    assert worker.foreach_policy(lambda policy, name: (policy, name)) == [
        (first, "0"),
        (second, "1"),
    ]
    assert worker.foreach_trainable_policy(lambda policy, name: name) == ["1"]
    assert worker.get_global_vars() is None
    worker.set_global_vars({"timestep": 1})
    worker.set_global_vars({"timestep": 2, "lr": 0.5})
    assert worker.get_global_vars() == worker.global_vars == {"timestep": 2, "lr": 0.5}
    for policy in (first, second):
        assert policy.notes == [
            ("global_vars", {"timestep": 1}),
            ("global_vars", {"timestep": 2, "lr": 0.5}),
        ]


# --- the worker itself ---


class Reader(InputReader):
    closed = 0

    def next(self):
        raise NotImplementedError

    def close(self):
        self.closed += 1


class Writer(OutputWriter):
    closed = 0

    def write(self, batch):
        raise NotImplementedError

    close = Reader.close


def test_stopping_ends_sampler_environments_reader_and_writer_and_can_be_repeated(make_worker):
    """R56, R74."""
    base_env = ScriptedEnv({0: [scenes(3)]})
    worker = make_worker(
        lambda context: base_env,
        {DEFAULT: spec(VECTOR, ACTIONS)},
        sample_async=True,
        input_creator=lambda context: Reader(),
        output_creator=lambda context: Writer(),
    )
    assert worker.sampler.is_alive
    worker.stop()
    assert not worker.sampler.is_alive
    assert base_env.stopped
    assert worker.input_reader.closed == worker.output_writer.closed == 1
    worker.stop()


class Waiting(ExternalEnv):
    """Client that asks for one action, and then never again."""

    def __init__(self, *args):
        super().__init__(*args)
        self.over = threading.Event()

    def run(self):
        episode = self.start_episode()
        self.get_action(episode, np.zeros(3, np.float32))
        self.over.wait(60)

    def close(self):
        self.over.set()


@pytest.mark.parametrize("sample_async", [False, True])
def test_an_interrupt_ends_a_wait_for_clients_without_waiting(make_worker, sample_async):
    worker = make_worker(lambda context: Waiting(ACTIONS, VECTOR), sample_async=sample_async)
    timer = threading.Timer(0.1, worker.interrupt)
    timer.start()
    for _ in range(2):
        with pytest.raises(SamplerDied):
            worker.sample()
    timer.join()


@pytest.mark.parametrize("kind", [RolloutWorker, Worker])
def test_a_half_built_worker_is_disposed_of_silently(kind):
    """R56: none of its parts exists; under pytest, an error in __del__ is a failure."""
    worker = kind.__new__(kind)
    worker.stop()
    found = weakref.ref(worker)
    del worker
    gc.collect()
    assert found() is None


class Hungry(DefaultCallbacks):
    """Hooks that ask for the worker at every step."""

    def on_episode_step(self, *, worker, **kwargs):
        assert isinstance(worker, RolloutWorker)


@pytest.mark.parametrize("length", [2, 10**6], ids=["its queue is full", "it is at work"])
def test_disposal_ends_an_asynchronous_samplers_thread(length):
    """R56, R74: neither the callbacks of the thread nor the hook between turns keep its worker
    alive.
    """
    threads = set(threading.enumerate())
    worker = RolloutWorker(
        lambda context: CountingEnv(50),
        PlainPolicy,
        sample_async=True,
        rollout_fragment_length=length,
        callbacks=Hungry,
    )
    (thread,) = set(threading.enumerate()) - threads
    found = weakref.ref(worker)
    if length == 2:
        wait_until(lambda: len(found().sampler._batches) == MAX_BATCHES_AHEAD)
    else:
        wait_until(lambda: found().sampler.perf.iters > 100)
    assert thread.is_alive()
    gc.disable()  # no reference cycle holds the worker: it ends with the turn that uses it
    try:
        del worker
        thread.join(5)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert found() is None


@pytest.mark.parametrize("sample_async", [False, True])
def test_disposal_releases_waiting_clients(sample_async):
    """R56: no one would answer them."""
    refused = threading.Event()

    class Patient(ExternalEnv):
        def run(self):
            episode = self.start_episode()
            try:
                for _ in range(10**6):
                    self.get_action(episode, np.zeros(3, np.float32))
                    time.sleep(0.001)
            except SamplerDied:
                refused.set()

    worker = RolloutWorker(
        lambda context: Patient(ACTIONS, VECTOR), PlainPolicy, sample_async=sample_async
    )
    worker.sample()
    del worker
    gc.collect()
    assert refused.wait(5)


@pytest.mark.parametrize("sample_async", [False, True])
def test_a_stopped_worker_samples_no_more(make_worker, sample_async):
    """R56: it would use closed environments and a closed writer."""
    env, written = CountingEnv(50), []

    class Note(OutputWriter):
        def write(self, batch):
            written.append(batch)

    worker = make_worker(
        lambda context: env,
        sample_async=sample_async,
        rollout_fragment_length=3,
        output_creator=lambda context: Note(),
    )
    worker.sample()
    worker.stop()
    for _ in range(2):
        with pytest.raises(SamplerDied):
            worker.sample()
    assert len(written) == 1


def test_stopping_ends_a_sample_in_another_thread(make_worker):
    """R56: before environments are closed."""
    tape, inside = [], threading.Event()

    class Env(CountingEnv):
        def step(self, action):
            inside.set()
            tape.append("step")
            return super().step(action)

        def close(self):
            tape.append("close")

    worker = make_worker(lambda context: Env(50), rollout_fragment_length=10**7)
    raised = []

    def sample():
        try:
            worker.sample()
        except SamplerDied as error:
            raised.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    assert inside.wait(5)
    worker.stop()
    thread.join(5)
    assert len(raised) == 1
    assert tape.index("close") == len(tape) - 1


class BadClose(CountingEnv):
    def close(self):
        raise OSError("this one cannot be closed")


def test_the_constructors_error_is_raised_even_if_stopping_fails_too(caplog):
    """R56."""
    with pytest.raises(AssertionError, match="output_creator"):
        RolloutWorker(lambda context: BadClose(), PlainPolicy, output_creator=lambda context: None)
    assert "this one cannot be closed" in caplog.text


def test_environments_made_before_one_that_fails_are_closed():
    """R56."""
    made = []

    class Env(CountingEnv):
        def __init__(self, index):
            if index == 2:
                raise ZeroDivisionError("the third")
            super().__init__()
            self.closed = 0
            made.append(self)

        def close(self):
            self.closed += 1

    with pytest.raises(EnvError, match="ZeroDivisionError: the third"):
        RolloutWorker(lambda context: Env(context.vector_index), PlainPolicy, num_envs=3)
    assert [env.closed for env in made] == [1, 1]
