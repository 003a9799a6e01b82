from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.external_env import EpisodeTable
from aiorl.errors import ClosedEpisodeError, ConfigError, EpisodeTimeout


def always() -> bool:
    return True


def never() -> bool:
    return False


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(table: EpisodeTable, episode_id: str, obs, timeout_s: float = 10.0):
    """Ask in a thread; returns a function that waits for the actions or the error."""
    results = []

    def ask() -> None:
        try:
            results.append(table.ask(episode_id, obs, None, timeout_s))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=ask)
    thread.start()

    def result():
        thread.join(20)
        return results[0]

    return result


def test_r155_one_episode_too_many_registers_nothing_and_ending_one_frees_a_place():
    table = EpisodeTable(2)
    table.start("a", True)
    table.start("b", True)
    with pytest.raises(RuntimeError, match="max_concurrent = 2"):
        table.start("c", True)
    with pytest.raises(ClosedEpisodeError, match="unknown"):
        table.end("c", {})
    table.end("a", {"x": 1})
    table.start("c", True)
    with pytest.raises(ConfigError):
        EpisodeTable(0)


def test_r154_an_answer_that_comes_too_late_is_not_taken_for_the_next_one():
    table = EpisodeTable(1)
    table.start("e", True)
    late = asked(table, "e", {"x": 1}, timeout_s=0.3)
    assert table.take(always, None).obs["e"] == {"x": 1}
    assert isinstance(late(), EpisodeTimeout)
    waiting = asked(table, "e", {"x": 2})
    while not table._active["e"].pending:
        threading.Event().wait(0.001)
    table.answer({"e": {"x": "for 1"}})
    assert table._active["e"].answered == 0
    assert table.take(always, None).obs["e"] == {"x": 2}
    table.answer({"e": {"x": "for 2"}})
    assert waiting() == {"x": "for 2"}


def test_r154_what_was_not_polled_in_time_is_withdrawn_and_its_reward_kept():
    table = EpisodeTable(1)
    table.start("e", True)
    table.add_rewards("e", {"x": 2.0}, {}, {"x": True})
    with pytest.raises(EpisodeTimeout, match=r"no action within 0\.01 s") as caught:
        table.ask("e", {"x": 1}, None, 0.01)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.episode_id == "e"
    table.add_rewards("e", {"x": 1.0}, {}, {})
    table.end("e", {"x": 3})
    poll = table.take(always, None)
    assert (poll.obs, poll.rewards) == ({"e": {"x": 3}}, {"e": {"x": 3.0}})
    assert poll.terminateds == {"e": {"x": True, ALL_AGENTS: True}}
    assert table.take(never, None).obs == {}


def test_an_episode_driven_by_two_threads_at_once_is_an_error():
    table = EpisodeTable(1)
    table.start("e", True)
    waiting = asked(table, "e", {"x": 1})
    table.take(always, None)
    with pytest.raises(ClosedEpisodeError, match="two threads"):
        table.ask("e", {"x": 2}, None, 1.0)
    with pytest.raises(ClosedEpisodeError, match="two threads"):
        table.end("e", {"x": 2})
    table.answer({"e": {"x": 5}, "unknown": {}})
    assert waiting() == {"x": 5}


def played(table: EpisodeTable, episode_id: str, *turns) -> None:
    """Publish, poll and answer one set of observations after the other; a set may be given with done flags."""
    for obs in turns:
        obs, *dones = obs if isinstance(obs, tuple) else (obs,)
        table.add_rewards(episode_id, {}, {}, dones[0] if dones else {})
        wait = asked(table, episode_id, obs)
        assert table.take(always, None).obs[episode_id] == obs
        table.answer({episode_id: dict.fromkeys(obs, 0)})
        wait()


@pytest.mark.parametrize(
    ("turns", "last"),
    [
        (({"a": 1}, {"b": 2}, {"a": 3}), {"a": 3, "b": 2}),
        (({"a": 1, "b": 1}, ({"a": 2, "b": 2}, {"a": True})), {"b": 2}),
        (({"a": 1, "b": 1}, ({"a": 2}, {"a": True}), {"b": 3}), {"b": 3}),
        (({"a": 1}, ({"a": 2}, {"a": True})), {}),
    ],
)
def test_r127_a_silent_clients_episode_ends_with_the_latest_observation_of_every_live_agent_and_no_other(turns, last):
    clock = Clock()
    table = EpisodeTable(1, clock)
    table.start("e", True)
    played(table, "e", *turns)
    clock.now = 9.0
    poll = table.take(always, 5.0)
    assert poll.obs["e"] == last
    assert poll.truncateds["e"] == {**dict.fromkeys(last, True), ALL_AGENTS: True}
    assert not any(poll.terminateds["e"].values())


def test_the_episode_of_a_silent_client_is_closed_and_the_others_are_not():
    clock = Clock()
    table = EpisodeTable(3, clock)
    for episode_id in ("dead", "alive", "empty"):
        table.start(episode_id, True)
    for episode_id in ("dead", "alive"):
        played(table, episode_id, {"x": 1})
    clock.now = 4.0
    table.add_rewards("alive", {"x": 1.0}, {}, {})
    clock.now = 8.0
    poll = table.take(always, 5.0)
    assert poll.obs == {"dead": {"x": 1}}
    for episode_id in ("dead", "empty"):
        with pytest.raises(TimeoutError, match="nothing had been heard"):
            table.ask(episode_id, {"x": 1}, None, 1.0)
    with pytest.raises(ClosedEpisodeError, match="already completed"):
        table.start("dead", True)
    table.end("alive", {"x": 2})
    assert table.take(never, 5.0).rewards["alive"] == {"x": 1.0}


def test_r154_what_was_withdrawn_was_not_observed():
    table = EpisodeTable(1)
    table.start("e", True)
    played(table, "e", {"a": 1}, {"a": 2})
    table.add_rewards("e", {}, {}, {"a": True})
    for obs in ({"a": 3, "b": 3}, {"a": 4, "b": 4}):
        with pytest.raises(EpisodeTimeout):
            table.ask("e", obs, None, 0.01)
    table.end("e", {"a": 5})
    assert table.take(never, None).terminateds["e"] == {"a": True, ALL_AGENTS: True}


def test_a_client_that_waits_for_an_action_is_not_silent():
    clock = Clock()
    table = EpisodeTable(1, clock)
    table.start("e", True)
    waiting = asked(table, "e", {"x": 1})
    assert list(table.take(always, 5.0).obs) == ["e"]
    clock.now = 100.0
    assert table.take(never, 5.0).obs == {}
    table.answer({"e": {"x": 7}})
    assert waiting() == {"x": 7}


def test_ids_of_ended_episodes_are_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr("aiorl.env.external_env._REMEMBERED", 3)
    table = EpisodeTable(1)
    for number in range(6):
        table.start(str(number), True)
        table.end(str(number), {"x": 0})
        table.take(never, None)
    assert list(table._ended) == ["3", "4", "5"]


class EpisodeLives(RuleBasedStateMachine):
    """Start, log, end and poll in any order; the model counts rewards by episode."""

    def __init__(self) -> None:
        super().__init__()
        self.table = EpisodeTable(3)
        self.active: dict[str, float] = {}
        self.closing: dict[str, float] = {}
        self.over: set[str] = set()

    ids = st.sampled_from(["a", "b", "c", "d", "e", "f"])

    @rule(episode_id=ids)
    def start(self, episode_id):
        if episode_id in self.active or episode_id in self.closing or episode_id in self.over:
            with pytest.raises(ClosedEpisodeError):
                self.table.start(episode_id, True)
        elif len(self.active) == 3:
            with pytest.raises(RuntimeError):
                self.table.start(episode_id, True)
        else:
            self.table.start(episode_id, True)
            self.active[episode_id] = 0.0

    @rule(episode_id=ids, reward=st.integers(-3, 3))
    def log(self, episode_id, reward):
        if episode_id in self.active:
            self.table.add_rewards(episode_id, {"x": reward}, {}, {})
            self.active[episode_id] += reward
        else:
            with pytest.raises(ClosedEpisodeError):
                self.table.add_rewards(episode_id, {"x": reward}, {}, {})

    @rule(episode_id=ids)
    def end(self, episode_id):
        if episode_id in self.active:
            self.table.end(episode_id, {"x": 0})
            self.closing[episode_id] = self.active.pop(episode_id)
        else:
            with pytest.raises(ClosedEpisodeError):
                self.table.end(episode_id, {"x": 0})

    @precondition(lambda self: self.closing)
    @rule()
    def poll(self):
        poll = self.table.take(never, None)
        assert {episode_id: rewards["x"] for episode_id, rewards in poll.rewards.items()} == self.closing
        assert all(flags[ALL_AGENTS] for flags in poll.terminateds.values())
        self.over |= self.closing.keys()
        self.closing = {}


TestEpisodeLives = EpisodeLives.TestCase
TestEpisodeLives.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
