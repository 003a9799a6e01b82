"""What the drivers share: resuming, dying, and the clock."""

from __future__ import annotations

import numpy as np
import pytest
from sampler_settings import sampler_settings

from aiorl.acting.observation.filters import NoFilter
from aiorl.acting.observation.preprocessors import preprocessor_for
from aiorl.data.actions import ActionLayout
from aiorl.errors import EnvError, SamplerDied
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.gate import TurnGate
from aiorl.sampling.iteration import Iteration
from aiorl.sampling.setup import SamplerSetup
from aiorl.sampling.turns import Turns
from aiorl.testing.scripted_env import RecordingPolicy, ScriptedEnv, scenes


def make(env, policy=None, callbacks=None, **more):
    policy = policy or RecordingPolicy()
    setup = SamplerSetup(
        worker=None,
        base_env=env,
        policy_map={"default_policy": policy},
        policy_mapping_fn=None,
        preprocessors={"default_policy": preprocessor_for(policy.observation_space)},
        filters={"default_policy": NoFilter()},
        settings=sampler_settings(),
        callbacks=callbacks or DefaultCallbacks(),
    )
    return Turns(Iteration(setup), **more)


def test_a_turn_acts_first_and_then_polls():
    """R79."""
    env = ScriptedEnv({0: [scenes(5)]})
    on_turn = []
    turns = make(env, on_turn=lambda: on_turn.append(len(env.tape)))
    for _ in range(3):
        turns.advance()
    assert [event[0] for event in env.tape] == ["poll", "send", "poll", "send", "poll"]
    assert on_turn == [0, 1, 3]
    assert turns.perf.iters == 3


def test_five_dicts_of_an_older_base_env_will_do():
    """R161."""
    env = ScriptedEnv({0: [scenes(2)]})
    plain = env.poll

    def poll():
        result = plain()
        return result.obs, result.rewards, result.dones, result.infos, result.off_policy_actions

    env.poll = poll
    turns = make(env)
    metrics, batch = turns.next_output(), turns.next_output()
    assert metrics.episode_length == 2
    assert batch["dones"].tolist() == [False, True]


@pytest.mark.parametrize("error", [EnvError("env", "on purpose"), KeyboardInterrupt("on purpose")])
@pytest.mark.parametrize("where", ["send_actions", "policy", "callback"])
def test_an_error_in_the_middle_of_a_turn_is_final(where, error):
    """R72: Ctrl-C, too, leaves a turn half done; going on would poll what was sent nothing, and maybe wait for ever."""
    env, policy, callbacks = ScriptedEnv({0: [scenes(5)]}), RecordingPolicy(), DefaultCallbacks()

    def fail(*args, **kwargs):
        raise error

    if where == "callback":
        callbacks.on_episode_step = lambda *, episode, **kwargs: episode.length and fail()
    turns = make(env, policy, callbacks)
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


def test_what_a_turn_finished_before_ctrl_c_is_kept_although_that_comes_out_at_once():
    """R71, R77."""
    env = ScriptedEnv({0: [scenes(2)]})

    def interrupted(env_id):
        raise KeyboardInterrupt

    env.try_reset = interrupted
    turns = make(env)
    with pytest.raises(KeyboardInterrupt):
        turns.next_output()
    assert (turns.next_output().episode_length, turns.next_output().count) == (2, 2)
    with pytest.raises(SamplerDied) as caught:
        turns.next_output()
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_a_stopped_one_takes_no_more_turns():
    env = ScriptedEnv({0: [scenes(5)]})
    turns = make(env)
    turns.advance()
    turns.stop()
    for _ in range(2):
        with pytest.raises(SamplerDied, match="stopped"):
            turns.advance()
    assert env.tape == [("poll",)]


class SlowGate(TurnGate):
    def __enter__(self):
        SlowGate.wait()
        super().__enter__()


def test_time_is_booked_where_it_was_spent(monkeypatch):
    """R78."""
    now = [0.0]
    monkeypatch.setattr("aiorl.sampling.turns.time.perf_counter", lambda: now[0])
    env, policy = ScriptedEnv({0: [scenes(50)]}), RecordingPolicy()

    def slow(function, seconds):
        def call(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return call

    env.poll, env.send_actions = slow(env.poll, 1.0), slow(env.send_actions, 10.0)
    policy.compute_actions = slow(policy.compute_actions, 100.0)
    turns = make(env, policy)
    turns._iteration.observe = slow(turns._iteration.observe, 1000.0)
    to_env = turns._iteration._lanes["default_policy"].actor.layout.to_env
    monkeypatch.setattr(ActionLayout, "to_env", lambda layout, column: slow(to_env, 10_000.0)(column))
    turns._gate.__class__ = SlowGate  # waits for others, which is nobody's time
    SlowGate.wait = lambda: now.__setitem__(0, now[0] + 1e5)
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
