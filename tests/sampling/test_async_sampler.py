"""Sampling in a separate thread: order, limits, end and errors."""

from __future__ import annotations

import inspect
import threading
import time

import pytest
from processes import wait_until
from scripted_env import RecordingPolicy, ScriptedEnv, scenes

from aiorl.acting.filters import ConcurrentMeanStdFilter, MeanStdFilter
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError, SamplerDied, SampleTimeout
from aiorl.sampling.async_sampler import MAX_BATCHES_AHEAD, AsyncSampler
from aiorl.sampling.callbacks import DefaultCallbacks

re_raised = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def single(length=2):
    return ScriptedEnv({0: [scenes(length)]})


def batches_made(policy):
    return policy.postprocessed


class Breaks(DefaultCallbacks):
    """Hooks that raise at the start of the given episode, counted from 1."""

    def __init__(self, at):
        self.left = at

    def on_episode_start(self, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError("on purpose")


def test_at_most_five_finished_batches_wait(make_async):
    """R69."""
    policy = RecordingPolicy()
    sampler = make_async(single(), policy)
    sampler.start()
    wait_until(lambda: batches_made(policy) == MAX_BATCHES_AHEAD + 1)
    threading.Event().wait(0.05)
    assert batches_made(policy) == MAX_BATCHES_AHEAD + 1, "five in the queue, one in hand"
    sampler.get_data()
    wait_until(lambda: batches_made(policy) == MAX_BATCHES_AHEAD + 2)


def test_a_filter_that_threads_must_not_share_fails_the_assertion(make_async):
    """R70."""
    with pytest.raises(AssertionError, match="MeanStdFilter"):
        make_async(single(), filters={"default_policy": MeanStdFilter((3,))})
    make_async(single(), filters={"default_policy": ConcurrentMeanStdFilter((3,))})


@re_raised
def test_an_error_surfaces_after_the_batches_that_were_finished_before(make_async):
    """R71, R72."""
    sampler = make_async(single(), callbacks=Breaks(at=4))
    sampler.start()
    for _ in range(3):
        assert sampler.get_data().count == 2, "the last one was finished in the same turn"
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        sampler.get_data()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(SamplerDied) as caught:
            sampler.get_data()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert isinstance(caught.value, RuntimeError)
        assert time.monotonic() - began < 1.0
    wait_until(lambda: not sampler.is_alive)


def test_waiting_for_data_ends_with_a_timeout_or_a_stop(make_async):
    """R73."""
    blocked, release = threading.Event(), threading.Event()
    env = single()
    plain = env.poll
    env.poll = lambda: blocked.set() or (release.wait(10) and plain())
    sampler = make_async(env, timeout_s=0.05)
    assert inspect.signature(AsyncSampler).parameters["timeout_s"].default == 600.0
    sampler.start()
    with pytest.raises(TimeoutError) as caught:
        sampler.get_data()
    assert isinstance(caught.value, SampleTimeout)
    blocked.wait(5)
    timer = threading.Timer(0.1, sampler.stop, [0.0])
    timer.start()
    with pytest.raises(SamplerDied):  # a stop also ends the wait while the environment blocks
        sampler.get_data(timeout_s=5.0)
    assert sampler.is_alive
    timer.join()
    release.set()


def test_stop_ends_the_thread_even_while_the_queue_is_full(make_async):
    """R74."""
    policy = RecordingPolicy()
    sampler = make_async(single(), policy)
    sampler.start()
    wait_until(lambda: batches_made(policy) == MAX_BATCHES_AHEAD + 1)
    assert sampler.stop()
    wait_until(lambda: not sampler.is_alive)
    assert [sampler.get_data().count for _ in range(MAX_BATCHES_AHEAD)] == [2] * MAX_BATCHES_AHEAD
    with pytest.raises(SamplerDied):
        sampler.get_data()


def test_a_blackholed_sampler_gives_metrics_but_neither_batches_nor_extra_batches(make_async):
    """R75."""

    class Add(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.add_extra_batch(SampleBatch())

    sampler = make_async(single(), blackhole_outputs=True, callbacks=Add(), timeout_s=0.05)
    sampler.start()
    metrics = []
    wait_until(lambda: metrics.extend(sampler.get_metrics()) or len(metrics) > 20)
    assert {m.episode_reward for m in metrics} == {3.0}
    assert sampler.get_extra_batches() == []
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        sampler.get_data(timeout_s=10.0)
    assert caught.value.key == "input_evaluation"
    assert time.monotonic() - began < 5.0, "it does not wait for batches that cannot come"


@re_raised
def test_the_error_that_ended_a_blackholed_sampler_is_raised_with_its_metrics(make_async):
    """R75: errors usually come with batches, which no one reads here."""
    sampler = make_async(single(), blackhole_outputs=True, callbacks=Breaks(at=4))
    sampler.start()
    wait_until(lambda: not sampler.is_alive)
    assert len(sampler.get_metrics()) == 3
    for _ in range(2):
        with pytest.raises(SamplerDied) as caught:
            sampler.get_metrics()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@re_raised
def test_an_exit_in_the_sampling_thread_is_reported_to_a_waiting_thread(make_async):
    """R71: any exception; this one would silently end a thread, or the whole process that waits for
    data.
    """

    class Exits(RecordingPolicy):
        def compute_actions(self, *args, **kwargs):
            raise SystemExit(3)

    sampler = make_async(single(), Exits())
    sampler.start()
    for _ in range(2):
        with pytest.raises(SamplerDied) as caught:
            sampler.get_data(timeout_s=5.0)
        assert isinstance(caught.value.__cause__, SystemExit)


@re_raised
@pytest.mark.parametrize("is_async", [False, True])
def test_outputs_that_a_turn_finished_before_its_error_are_handed_out_first(
    make_async, make_sampler, is_async
):
    """R71, R77: an episode's own reset fails; its batch, metrics and extra batches are still
    returned.
    """
    extra = SampleBatch()

    class Add(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.add_extra_batch(extra)

    env = single(3)
    env.try_reset = lambda env_id: 1 / 0
    sampler = (make_async if is_async else make_sampler)(env, callbacks=Add())
    if is_async:
        sampler.start()
    assert sampler.get_data().count == 3
    with pytest.raises(ZeroDivisionError):
        sampler.get_data()
    assert [metrics.episode_length for metrics in sampler.get_metrics()] == [3]
    assert sampler.get_extra_batches() == [extra]
    with pytest.raises(SamplerDied) as caught:
        sampler.get_data()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_pause_begins_between_two_turns_and_blocks_them(make_async):
    """R79: weights are set while no observations are processed and no policy is evaluated."""
    inside = threading.Event()

    class Careful(RecordingPolicy):
        def compute_actions(self, *args, **kwargs):
            inside.set()
            before = self.weights
            threading.Event().wait(0.001)
            assert self.weights == before
            inside.clear()
            return super().compute_actions(*args, **kwargs)

    policy = Careful()
    sampler = make_async(single(), policy, blackhole_outputs=True)
    sampler.start()
    for number in range(30):
        with sampler.paused():
            assert not inside.is_set()
            policy.weights = float(number)
    wait_until(lambda: policy.calls and policy.calls[-1][1] == 29.0)
