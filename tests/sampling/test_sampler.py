"""SyncSampler between two turns: continuation, end, times, pauses, and its setup."""

from __future__ import annotations

import dataclasses
import threading
import weakref

import numpy as np
import pytest
from sampler_settings import sampler_settings
from scripted_env import RecordingPolicy, ScriptedEnv, scenes

from aiorl.data.actions import ActionLayout
from aiorl.env.base_env import BaseEnv
from aiorl.errors import EnvError, SamplerDied
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.iteration import Iteration
from aiorl.sampling.sampler import TurnGate
from aiorl.sampling.settings import SamplerSetup
from aiorl.testing.envs import CountingEnv


def test_a_turn_acts_first_and_then_polls(make_sampler):
    """R79."""
    env = ScriptedEnv({0: [scenes(5)]})
    on_turn = []
    turns = make_sampler(env, on_turn=lambda: on_turn.append(len(env.tape)))
    for _ in range(3):
        turns.advance()
    assert [event[0] for event in env.tape] == ["poll", "send", "poll", "send", "poll"]
    assert on_turn == [0, 1, 3]
    assert turns.perf.iters == 3


def test_five_dicts_of_an_older_base_env_are_accepted(make_sampler):
    """R161."""
    env = ScriptedEnv({0: [scenes(2)]})
    plain = env.poll

    def poll():
        result = plain()
        return result.obs, result.rewards, result.dones, result.infos, result.off_policy_actions

    env.poll = poll
    turns = make_sampler(env)
    batch, metrics = turns.get_data(), turns.get_metrics()
    assert metrics[0].episode_length == 2
    assert batch["dones"].tolist() == [False, True]


@pytest.mark.parametrize("error", [EnvError("env", "on purpose"), KeyboardInterrupt("on purpose")])
@pytest.mark.parametrize("where", ["send_actions", "policy", "callback"])
def test_an_error_in_the_middle_of_a_turn_is_final(make_sampler, where, error):
    """R72: Ctrl-C also leaves a turn unfinished; the next poll would get no actions and could wait
    forever.
    """
    env, policy, callbacks = ScriptedEnv({0: [scenes(5)]}), RecordingPolicy(), DefaultCallbacks()

    def fail(*args, **kwargs):
        raise error

    if where == "callback":
        callbacks.on_episode_step = lambda *, episode, **kwargs: episode.length and fail()
    turns = make_sampler(env, policy, callbacks=callbacks)
    turns.advance()
    if where == "policy":
        policy.compute_actions = fail
    elif where == "send_actions":
        env.send_actions = fail
    with pytest.raises(type(error), match="on purpose"):
        turns.advance()
    polls = env.tape.count(("poll",))
    for _ in range(2):
        with pytest.raises(SamplerDied) as caught:
            turns.advance()
        assert caught.value.__cause__ is error
    assert env.tape.count(("poll",)) == polls


def test_outputs_that_a_turn_finished_before_ctrl_c_are_kept_although_it_is_raised_immediately(
    make_sampler,
):
    """R71, R77."""
    env = ScriptedEnv({0: [scenes(2)]})

    def interrupted(env_id):
        raise KeyboardInterrupt

    env.try_reset = interrupted
    turns = make_sampler(env)
    with pytest.raises(KeyboardInterrupt):
        turns.get_data()
    assert (turns.get_data().count, turns.get_metrics()[0].episode_length) == (2, 2)
    with pytest.raises(SamplerDied) as caught:
        turns.get_data()
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_a_stopped_sampler_takes_no_more_turns(make_sampler):
    env = ScriptedEnv({0: [scenes(5)]})
    turns = make_sampler(env)
    turns.advance()
    turns.stop()
    for _ in range(2):
        with pytest.raises(SamplerDied):
            turns.advance()
    assert env.tape == [("poll",)]


class SlowGate(TurnGate):
    def __enter__(self):
        SlowGate.wait()
        super().__enter__()


def test_time_is_counted_for_the_right_activity(make_sampler, monkeypatch):
    """R78."""
    now = [0.0]
    monkeypatch.setattr("aiorl.sampling.sampler.time.perf_counter", lambda: now[0])
    env, policy = ScriptedEnv({0: [scenes(50)]}), RecordingPolicy()

    def slow(function, seconds):
        def call(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return call

    env.poll, env.send_actions = slow(env.poll, 1.0), slow(env.send_actions, 10.0)
    policy.compute_actions = slow(policy.compute_actions, 100.0)
    monkeypatch.setattr(Iteration, "observe", slow(Iteration.observe, 1000.0))
    monkeypatch.setattr(ActionLayout, "to_env", slow(ActionLayout.to_env, 10_000.0))
    # waits for other threads, which counts as no activity
    SlowGate.wait = lambda: now.__setitem__(0, now[0] + 1e5)
    monkeypatch.setattr("aiorl.sampling.sampler.TurnGate", SlowGate)
    turns = make_sampler(env, policy)
    for _ in range(3):
        turns.advance()
        now[0] += 1e6
    assert (turns.perf.env_wait_time, turns.perf.inference_time) == (23.0, 200.0)
    assert turns.perf.processing_time == 23_000.0, "observations and results"
    stats = turns.perf.get()
    np.testing.assert_allclose(
        [stats["mean_env_wait_ms"], stats["mean_inference_ms"], stats["mean_processing_ms"]],
        [23_000 / 3, 200_000 / 3, 23_000_000 / 3],
    )


# --- pauses ---


def test_a_pause_waits_for_the_turn_and_the_next_turn_for_the_pause():
    gate, tape = TurnGate(), []
    inside, leave, paused, go_on = (threading.Event() for _ in range(4))

    def turns():
        with gate:
            tape.append("first turn")
            inside.set()
            leave.wait(5)
            tape.append("first turn over")
        with gate:
            tape.append("second turn")

    def pause():
        with gate.pause():
            tape.append("pause")
            paused.set()
            go_on.wait(5)
            tape.append("pause over")

    one = threading.Thread(target=turns)
    one.start()
    inside.wait(5)
    other = threading.Thread(target=pause)
    other.start()
    assert not paused.wait(0.05), "a pause does not begin inside a turn"
    leave.set()
    assert paused.wait(5)
    assert "second turn" not in tape
    go_on.set()
    one.join(5), other.join(5)
    assert tape == ["first turn", "first turn over", "pause", "pause over", "second turn"]


def test_a_pause_requested_in_the_middle_of_a_turn_does_not_wait():
    """A callback sets weights: it must not wait for its own turn, and other turns have not
    begun.
    """
    gate, begun = TurnGate(), threading.Event()

    def pause():
        with gate.pause():
            begun.set()

    other = threading.Thread(target=pause)
    with gate:
        with gate.pause(), gate.pause():
            pass
        other.start()
        assert not begun.wait(0.05), "the turn is still running"
    assert begun.wait(5)
    other.join(5)


def test_a_thread_that_pauses_can_take_turns_while_others_wait():
    gate, entered = TurnGate(), threading.Event()

    def turn():
        with gate:
            entered.set()

    other = threading.Thread(target=turn)
    with gate.pause():
        with gate:
            pass
        other.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)
    other.join(5)


# --- the setup ---


def setup_of(**more):
    given = dict.fromkeys(SamplerSetup.__dataclass_fields__) | {"settings": sampler_settings()}
    return SamplerSetup(**given | more)


def test_an_environment_of_any_kind_is_converted_and_a_base_env_is_not_touched():
    """SPEC 4.1: samplers convert the environment themselves; conversion is idempotent."""
    base_env = ScriptedEnv({})
    assert setup_of(base_env=base_env).base_env is base_env
    assert isinstance(setup_of(base_env=CountingEnv()).base_env, BaseEnv)
    with pytest.raises(ValueError, match="str"):
        setup_of(base_env="CartPole-v1")


def test_a_worker_can_be_a_weak_reference():
    """R56: otherwise the thread of an asynchronous sampler keeps its worker alive."""

    class Worker:
        pass

    worker = Worker()
    strong = setup_of(base_env=ScriptedEnv({}), worker=worker)
    weak = dataclasses.replace(strong, worker=weakref.ref(worker))
    assert strong.get_worker() is weak.get_worker() is worker
    assert (strong.is_abandoned, weak.is_abandoned) == (False, False)
    del worker, strong
    assert weak.is_abandoned
    with pytest.raises(SamplerDied):
        weak.get_worker()
