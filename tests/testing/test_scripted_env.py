from __future__ import annotations

import numpy as np
import pytest

from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN
from aiorl.errors import EnvError
from aiorl.testing.scripted_env import RecordingPolicy, Scene, ScriptedEnv, scenes


def test_scenes_are_played_in_order_for_those_that_were_acted_on():
    """R163: in the first poll rewards are None and flags False."""
    env = ScriptedEnv({0: [scenes(2)], 1: [scenes(2)]}, ready=lambda poll, env_id: env_id == 0 or poll > 0)
    first = env.poll()
    assert first.rewards == {0: {"agent0": None}}
    assert first.dones == {0: {"agent0": False, ALL_AGENTS: False}}
    env.send_actions({0: {"agent0": 5}})
    second = env.poll()
    assert second.obs.keys() == {0, 1}
    assert second.rewards[0] == {"agent0": 1.0}
    env.send_actions({0: {}, 1: {}})
    assert env.poll().terminateds[0][ALL_AGENTS]
    assert env.sent == [{0: {"agent0": 5}}, {0: {}, 1: {}}]


@pytest.mark.parametrize("reset", ["inline", "async", "unsupported"])
def test_resets_come_in_the_way_asked_for(reset):
    env = ScriptedEnv({0: [scenes(1), scenes(1, episode=1)]}, reset=reset)
    env.poll()
    env.send_actions({0: {}})
    env.poll()
    result = env.try_reset(0)
    if reset == "inline":
        assert result["agent0"].tolist() == [1, 0, 0]
        return
    assert result == (ASYNC_RESET_RETURN if reset == "async" else None)
    (obs,) = env.poll().obs.values()
    assert obs["agent0"].tolist() == [1, 0, 0]


def test_a_fault_ends_the_episode_and_the_next_one_follows():
    fault = EnvError("env", "broken")
    env = ScriptedEnv({0: [[Scene({}, fault=fault)], scenes(1, episode=1)]})
    poll = env.poll()
    assert poll.faults == {0: fault}
    assert poll.obs == {}
    assert env.poll().obs[0]["agent0"].tolist() == [1, 0, 0]
    env.stop()
    assert env.stopped


def test_the_recording_policy_counts():
    policy = RecordingPolicy(recurrent=True)
    state = [np.stack([policy.get_initial_state()[0]] * 2)]
    for start in (0, 2):
        actions, state, extras = policy.compute_actions(np.ones((2, 3), np.float32), state)
        assert actions.tolist() == [start, start + 1]
        assert extras["score"].tolist() == [3.0, 3.0]
    assert state[0].tolist() == [[1.0], [1.0]]
    assert len(policy.calls) == 2
