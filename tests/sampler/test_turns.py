"""What the drivers share: resuming, dying, and the clock."""

from __future__ import annotations

import numpy as np
import pytest

from aiorl.callbacks import DefaultCallbacks
from aiorl.errors import EnvError, SamplerDied
from aiorl.observation.filters import NoFilter
from aiorl.observation.preprocessors import preprocessor_for
from aiorl.sampler.iteration import Iteration
from aiorl.sampler.setup import SamplerSetup
from aiorl.sampler.turns import Turns
from aiorl.testing.scripted_env import RecordingPolicy, ScriptedEnv, scenes


def make(env, policy=None, **more):
    policy = policy or RecordingPolicy()
    setup = SamplerSetup(
        worker=None,
        base_env=env,
        policy_map={"default_policy": policy},
        policy_mapping_fn=None,
        preprocessors={"default_policy": preprocessor_for(policy.observation_space)},
        filters={"default_policy": NoFilter()},
        clip_rewards=None,
        fragment_length=100,
        callbacks=DefaultCallbacks(),
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


@pytest.mark.parametrize("where", ["send_actions", "policy"])
def test_an_error_in_the_middle_of_a_turn_is_final(where):
    env, policy = ScriptedEnv({0: [scenes(5)]}), RecordingPolicy()

    def fail(*args, **kwargs):
        raise EnvError("env", "on purpose")

    if where == "policy":
        policy.compute_actions = fail
    else:
        env.send_actions = fail
    turns = make(env, policy)
    turns.advance()
    with pytest.raises(EnvError, match="on purpose"):
        turns.advance()
    with pytest.raises(SamplerDied) as caught:
        turns.advance()
    assert isinstance(caught.value.__cause__, EnvError)


def test_time_is_booked_where_it_was_spent(monkeypatch):
    """R78."""
    now = [0.0]
    monkeypatch.setattr("aiorl.sampler.turns.time.perf_counter", lambda: now[0])
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
    for _ in range(3):
        turns.advance()
        now[0] += 1e6
    assert (turns.perf.env_wait_time, turns.perf.inference_time, turns.perf.processing_time) == (23.0, 200.0, 3000.0)
    stats = turns.perf.get()
    np.testing.assert_allclose(
        [stats["mean_env_wait_ms"], stats["mean_inference_ms"], stats["mean_processing_ms"]],
        [23_000 / 3, 200_000 / 3, 1_000_000],
    )
