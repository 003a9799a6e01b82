from __future__ import annotations

import pytest

from aiorl.env.base_env import ALL_AGENTS, BaseEnv, Poll, as_poll, opening_poll
from aiorl.errors import EnvContractError


def test_dones_are_terminated_or_truncated_and_keep_every_key():
    poll = Poll({}, {}, {0: {"a": True, ALL_AGENTS: False}}, {0: {"b": True, ALL_AGENTS: True}}, {}, {})
    assert poll.dones == {0: {"a": True, "b": True, ALL_AGENTS: True}}


def test_r163_an_opening_poll_has_no_rewards_flags_or_infos():
    poll = opening_poll({"e": {"a": 1, "b": 2}})
    assert poll.obs == {"e": {"a": 1, "b": 2}}
    assert poll.rewards == {"e": {"a": None, "b": None}}
    assert poll.dones == {"e": {"a": False, "b": False, ALL_AGENTS: False}}
    assert poll.infos == {"e": {"a": {}, "b": {}}}
    assert poll.off_policy_actions == {}
    assert poll.terminateds["e"] is not poll.truncateds["e"]


def test_five_dicts_of_a_users_base_env_become_a_poll_with_terminal_dones():
    poll = as_poll(({0: {"a": 1}}, {0: {"a": 2.0}}, {0: {"a": True, ALL_AGENTS: True}}, {0: {}}, {0: {"a": 7}}))
    assert poll.terminateds == {0: {"a": True, ALL_AGENTS: True}}
    assert poll.truncateds == {0: {"a": False, ALL_AGENTS: False}}
    assert poll.dones == poll.terminateds
    assert poll.off_policy_actions == {0: {"a": 7}}
    assert as_poll(poll) is poll
    assert as_poll(tuple(poll)[:6]).infos == {0: {}}


@pytest.mark.parametrize("result", [None, (1, 2, 3), {}, ({}, {}, None, {}, {}), ({}, {}, {}, [], {}, {})])
def test_anything_else_is_no_poll(result):
    with pytest.raises(EnvContractError, match="poll returned"):
        as_poll(result)


class Closing(BaseEnv):
    def __init__(self, envs):
        self.envs = envs

    def poll(self):
        raise NotImplementedError

    def send_actions(self, action_dict):
        raise NotImplementedError

    def get_unwrapped(self):
        return self.envs


def test_by_default_nothing_can_be_reset_no_games_are_counted_and_stop_closes_what_is_unwrapped():
    closed = []

    class Env:
        def close(self):
            closed.append(self)

    env = Env()
    base = Closing([env, object()])
    assert base.try_reset(0) is None
    assert base.take_finished_games() is None
    base.stop()
    assert closed == [env]


def test_an_environment_is_placed_by_its_number_or_its_own_id():
    base = Closing([])
    assert base.place_of(3) == ("Closing", 3)
    assert base.place_of("left") == ("left", 0)
    base._env_id = "maze"
    assert base.place_of(3) == ("maze", 3)
