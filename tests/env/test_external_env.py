from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aiorl.acting.policy import Policy
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.data.actions import ActionLayout
from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.checks import action_fault
from aiorl.env.env_maker import to_base_env
from aiorl.env.external_env import EpisodeTable, ExternalBaseEnv, ExternalEnv, ExternalMultiAgentEnv
from aiorl.errors import (
    BadObservationError,
    BadRewardError,
    ClosedEpisodeError,
    ConfigError,
    EnvContractError,
    EpisodeTimeout,
    SamplerDied,
    UnsupportedEnvError,
)

SPACES = (spaces.Discrete(100), spaces.Discrete(100))


class Driven(ExternalEnv):
    """Environment that runs a function and then waits until the test lets it finish."""

    action_timeout_s = 20.0

    def __init__(self, drive, env_spaces=SPACES, **settings):
        super().__init__(*env_spaces, **settings)
        self.drive = drive

    def run(self):
        self.drive(self)


class MultiDriven(ExternalMultiAgentEnv):
    action_timeout_s = 20.0

    def __init__(self, drive, env_spaces=SPACES):
        super().__init__(*env_spaces)
        self.drive = drive

    def run(self):
        self.drive(self)


def drain(base: ExternalBaseEnv, act=lambda env_id, obs: {agent: 0 for agent in obs}) -> list:
    """Poll until run() has ended, and answer each poll with ``act``. Return the polls."""
    polls = []
    while True:
        try:
            poll = base.poll()
        except SamplerDied:
            return polls
        polls.append(poll)
        base.send_actions(
            {
                env_id: act(env_id, obs)
                for env_id, obs in poll.obs.items()
                if not poll.dones[env_id][ALL_AGENTS]
            }
        )


def left(env):
    """Return publications that have not been polled."""
    return env._episodes.take(lambda: False, None)


def test_r148_r150_r151_r159_actions_come_from_the_policy_and_rewards_add_up_until_the_next_observation():
    """A number can be an id."""
    got = []

    def drive(env):
        got.append(env.start_episode(1))
        env.log_returns(1, 100.0)
        got.append(env.get_action(1, 1))
        env.log_returns(1, 1.0)
        env.log_returns(1, 2.5)
        got.append(env.log_action(1, 2, 42))
        got.append(env.get_action(1, 3))
        env.log_returns(1, 4.0)
        env.end_episode(1, 4)

    polls = drain(ExternalBaseEnv(Driven(drive)), lambda env_id, obs: {AGENT: obs[AGENT] * 10})
    assert got == [1, 10, None, 30]
    assert [poll.obs[1][AGENT] for poll in polls] == [1, 2, 3, 4]
    assert [poll.rewards[1][AGENT] for poll in polls] == [100.0, 3.5, 0.0, 4.0]
    assert [poll.dones[1][ALL_AGENTS] for poll in polls] == [False, False, False, True]
    assert [poll.off_policy_actions for poll in polls] == [{}, {1: {AGENT: 42}}, {}, {}]


def test_r152_r153_an_info_stays_until_it_is_replaced_and_the_callers_dict_is_not_changed():
    mine = {"x": 1}

    def drive(env):
        env.start_episode("e", training_enabled=False)
        env.get_action("e", 0)
        env.log_returns("e", 0.0, mine)
        env.get_action("e", 1)
        env.log_returns("e", 0.0)
        env.get_action("e", 2)
        env.log_returns("e", 0.0, {"y": 2})
        env.end_episode("e", 3)

    infos = [poll.infos["e"][AGENT] for poll in drain(ExternalBaseEnv(Driven(drive)))]
    off = {"training_enabled": False}
    assert infos == [off, {"x": 1, **off}, {"x": 1, **off}, {"y": 2, **off}]
    assert mine == {"x": 1}


def test_r148_r149_each_misuse_of_an_id_is_a_value_error_that_names_it():
    env = Driven(lambda env: None)
    env.start_episode("e")
    with pytest.raises(ClosedEpisodeError, match="'e'"):
        env.start_episode("e")
    env.end_episode("e", 0)
    with pytest.raises(ClosedEpisodeError, match="'e'"):
        env.start_episode("e")
    for episode_id in ("e", "f"):
        for call in (
            lambda name: env.get_action(name, 0),
            lambda name: env.log_action(name, 0, 0),
            lambda name: env.log_returns(name, 0.0),
            lambda name: env.end_episode(name, 0),
        ):
            with pytest.raises(ClosedEpisodeError) as caught:
                call(episode_id)
            assert caught.value.episode_id == episode_id
            assert (caught.value.state == "unknown") == (episode_id == "f")
    for call in (
        env.start_episode,
        lambda name: env.get_action(name, 0),
        lambda name: env.log_returns(name, 0.0),
    ):
        with pytest.raises(EnvContractError, match=r"\['e'\]"):
            call(["e"])


def test_r157_run_must_be_implemented_and_an_error_in_it_reaches_the_poll():
    env = ExternalEnv(*SPACES)
    with pytest.raises(NotImplementedError, match=r"run\(\)"):
        env.run()
    env.start_episode("e")
    env.end_episode("e", 7)
    base = ExternalBaseEnv(env)
    assert base.poll().obs == {"e": {AGENT: 7}}, "publications before the error come first"
    with pytest.raises(SamplerDied, match="NotImplementedError") as caught:
        base.poll()
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_r123_r158_an_external_env_is_never_reset_and_shows_no_environment_objects():
    base = to_base_env(Driven(lambda env: None))
    assert isinstance(base, ExternalBaseEnv)
    assert base.try_reset("e") is None
    assert base.get_unwrapped() == []


@pytest.mark.parametrize("method", ["interrupt", "stop"])
def test_stopping_ends_waiting_clients_and_polls(method):
    entered = threading.Event()
    errors = []

    def drive(env):
        env.start_episode("e")
        entered.set()
        try:
            env.get_action("e", 0)
        except SamplerDied as error:
            errors.append(error)

    env = Driven(drive)
    base = ExternalBaseEnv(env)
    entered.wait(10)
    getattr(base, method)()
    env.join(10)
    assert len(errors) == 1


def test_r160_the_multi_agent_form_adds_rewards_by_agent_and_fills_in_missing_ones():
    got = []

    def drive(env):
        env.start_episode("e")
        got.append(env.get_action("e", {"a": 1, "b": 2}))
        env.log_returns("e", {"a": 1.0}, {"a": {"x": 1}})
        env.log_returns("e", {"a": 2.0, "c": 5.0}, None, {"b": True})
        env.log_action("e", {"a": 3, "b": 4}, {"a": 9})
        env.end_episode("e", {"a": 5})

    polls = drain(
        ExternalBaseEnv(MultiDriven(drive)),
        lambda env_id, obs: {agent: obs[agent] * 10 for agent in obs},
    )
    assert got == [{"a": 10, "b": 20}]
    assert [poll.rewards["e"] for poll in polls] == [
        {"a": 0.0, "b": 0.0},
        {"a": 3.0, "b": 0.0, "c": 5.0},
        {"a": 0.0},
    ]
    assert [poll.dones["e"] for poll in polls] == [
        {"a": False, "b": False, ALL_AGENTS: False},
        {"a": False, "b": True, ALL_AGENTS: False},
        {"a": False, ALL_AGENTS: True},
    ]
    assert [poll.infos["e"] for poll in polls] == [
        {"a": {}, "b": {}},
        {"a": {"x": 1}, "b": {}},
        {"a": {"x": 1}},
    ]
    assert [poll.off_policy_actions for poll in polls] == [{}, {"e": {"a": 9}}, {}]


def test_r160_spaces_by_agent_must_have_the_same_agents():
    space_of_a, space_of_b = {"a": spaces.Discrete(2)}, {"b": spaces.Discrete(2)}
    ExternalMultiAgentEnv(space_of_a, dict(space_of_a))
    ExternalMultiAgentEnv(space_of_a, spaces.Dict(space_of_b))
    with pytest.raises(ConfigError):
        ExternalMultiAgentEnv(space_of_a, space_of_b)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much"])
def test_a_clients_bad_reward_is_its_own_error_and_adds_nothing(reward):
    env, single = MultiDriven(lambda env: None), Driven(lambda env: None)
    for external, rewards in ((env, {"a": 1.0, "b": reward}), (single, reward)):
        external.start_episode("e")
        with pytest.raises(BadRewardError):
            external.log_returns("e", rewards)
    env.end_episode("e", {"a": 1, "b": 1})
    assert left(env).rewards["e"] == {"a": 0.0, "b": 0.0}
    with pytest.raises(EnvContractError, match="'text'"):
        single.log_returns("e", 1.0, "text")


BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
MIXED = spaces.Dict(
    {"move": spaces.MultiDiscrete([2, 3]), "fire": spaces.MultiBinary(2), "turn": BOX}
)


def mixed(move=(1, 2), turn=(0.5, 0.5)) -> dict:
    return {"move": np.array(move), "fire": np.array([0, 1]), "turn": np.array(turn)}


@pytest.mark.parametrize(
    ("space", "action"),
    [
        *((spaces.Discrete(2), action) for action in (7, 1.5, [0], "left", None, np.nan)),
        (spaces.Discrete(2, start=5), 0),
        *((BOX, action) for action in ([np.inf, 0.0], [1e300, 0.0], [0.0], [[1.0], [1.0, 2.0]])),
        (MIXED, mixed(move=(2, 0))),
        (MIXED, mixed(turn=(np.nan, 0))),
        (MIXED, {**mixed(), "more": 0}),
    ],
)
def test_r150_r156_an_action_outside_the_space_is_its_clients_error_and_makes_no_row(space, action):
    env = Driven(lambda env: None, (space, SPACES[1]))
    env.start_episode("e")
    with pytest.raises(EnvContractError, match=r"'Driven'.*'e'") as caught:
        env.log_action("e", 1, action)
    assert isinstance(caught.value, ValueError)
    env.end_episode("e", 2)
    assert left(env).obs["e"] == {AGENT: 2}, "the wrong action must not be published"


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(2), True),
        (spaces.Discrete(2, start=5), np.int64(6)),
        (BOX, [5.0, -5.0]),
        (MIXED, mixed()),
    ],
)
def test_r150_actions_that_rows_can_hold_are_accepted_even_outside_a_boxs_bounds(space, action):
    assert action_fault(ActionLayout(space), action) == ""


@pytest.mark.parametrize(
    ("space", "bad"),
    [
        (BOX, np.zeros(3)),
        (BOX, [0.0, np.nan]),
        (BOX, ["a", "b"]),
        (BOX, None),
        (BOX, np.array([1e300, 0.0])),
        (spaces.Tuple([BOX]), (np.array([1e300, 0.0]),)),
        (spaces.Dict({"x": BOX}), {"x": [0.0, 0.0], "y": 3}),
    ],
)
def test_r156_a_clients_bad_observation_is_its_own_error_and_nothing_is_published(space, bad):
    env = Driven(lambda env: None, (SPACES[0], space))
    env.start_episode("e")
    for call in (env.get_action, lambda name, obs: env.log_action(name, obs, 0), env.end_episode):
        with pytest.raises(BadObservationError, match="'e'") as error:
            call("e", bad)
        assert error.value.env_id == "Driven"
    assert not left(env).obs


def test_the_last_nested_observation_is_kept_although_the_client_reuses_its_arrays():
    reused = np.full(2, 0.5, np.float32)
    env = Driven(lambda env: None, (SPACES[0], spaces.Dict({"pair": spaces.Tuple([BOX])})))
    env.start_episode("e")
    env.end_episode("e", {"pair": (reused,)})
    reused[:] = 99
    assert left(env).obs["e"][AGENT]["pair"][0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda env: env.get_action("e", 1), "1"),
        (lambda env: env.end_episode("e", [1]), r"\[1\]"),
        (lambda env: env.get_action("e", {ALL_AGENTS: 1}), "'__all__'"),
        (lambda env: env.get_action("e", {"c": 1}), "'c'.*'a', 'b'"),
        (lambda env: env.log_action("e", {"a": 1}, {"b": 0}), "'b'"),
        (lambda env: env.log_action("e", {"a": 1}, {"c": 0}), "'c'"),
        (lambda env: env.log_action("e", {"a": 1}, {"a": 100}), "'a'.*100.*Discrete"),
        (lambda env: env.log_action("e", {"a": 1}, [0]), r"\[0\]"),
        (lambda env: env.log_returns("e", 1.0), "1.0"),
        (lambda env: env.log_returns("e", {"c": 1.0}), "'c'"),
        (lambda env: env.log_returns("e", {}, {"a": "text"}), "'a'.*'text'"),
        (lambda env: env.log_returns("e", {}, None, True), "True"),
        (lambda env: env.log_returns("e", {}, None, {"c": True}), "'c'"),
        (lambda env: env.log_returns("e", {"a": 1.0}, None, {ALL_AGENTS: True}), "end_episode"),
    ],
)
def test_r160_arguments_that_are_not_by_agent_are_refused_and_nothing_is_published(call, value):
    by_agent = dict.fromkeys("ab", SPACES[0])
    env = MultiDriven(lambda env: None, (by_agent, by_agent))
    env.start_episode("e")
    with pytest.raises(EnvContractError, match=value):
        call(env)
    env.log_returns("e", {}, None, {ALL_AGENTS: False})
    env.end_episode("e", {"a": 1})
    poll = left(env)
    assert (poll.obs, poll.rewards) == ({"e": {"a": 1}}, {"e": {"a": 0.0}})


def test_r127_r156_an_agent_that_breaks_a_rule_is_its_clients_error_and_the_episode_continues():
    caught = []

    def drive(env):
        env.start_episode("e")
        env.get_action("e", {"a": 1, "b": 1})
        env.get_action("e", {"a": 2, "b": 2})
        with pytest.raises(EnvContractError, match="'b'") as error:
            env.end_episode("e", {"a": 3})
        caught.append(error.value)
        env.log_returns("e", {}, None, {"a": True})
        env.get_action("e", {"a": 3, "b": 3})
        for call in (env.get_action, env.end_episode):
            with pytest.raises(EnvContractError, match="'a'") as error:
                call("e", {"a": 4, "b": 4})
            caught.append(error.value)
        env.end_episode("e", {"b": 4})

    env = MultiDriven(drive)
    polls = drain(ExternalBaseEnv(env))
    assert env.error is None
    assert len(caught) == 3
    assert [poll.obs["e"] for poll in polls] == [
        {"a": 1, "b": 1},
        {"a": 2, "b": 2},
        {"a": 3, "b": 3},
        {"b": 4},
    ]


def test_the_base_class_constructor_must_be_called():
    class Forgetful(ExternalEnv):
        observation_space, action_space = SPACES

        def __init__(self):
            pass

        def run(self):
            raise AssertionError("never started")

    env = Forgetful()
    env.close()
    with pytest.raises(UnsupportedEnvError, match=r"Forgetful.*super\(\)\.__init__\(action_space"):
        to_base_env(env)


def test_one_environment_cannot_serve_two_workers():
    env = Driven(lambda env: None)
    ExternalBaseEnv(env).stop()
    with pytest.raises(ConfigError, match="Driven"):
        to_base_env(env)


def test_after_the_end_no_episode_can_be_started():
    env = Driven(lambda env: None)
    env.join(1)
    env.close()
    env.close()
    with pytest.raises(SamplerDied):
        env.start_episode("e")


class AlwaysZero(Policy):
    def compute_actions(self, obs_batch, state_batches=(), **rest):
        return np.zeros(len(obs_batch), np.int64), [], {}


def multi_agent_worker(drive, **settings):
    spec = {"only": (AlwaysZero, *reversed(SPACES), {})}
    env = MultiDriven(drive)
    return RolloutWorker(
        env_creator=lambda context: env,
        policy=spec,
        policy_mapping_fn=lambda agent_id: "only",
        rollout_fragment_length=5,
        **settings,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"no_done_at_end": True},
        {"observation_fn": lambda agent_obs, **rest: {"a": agent_obs.get("a", 5)}},
    ],
)
def test_r134_a_client_need_not_give_what_the_sampler_does_not_require(settings):
    def drive(env):
        env.start_episode("e")
        for step in range(5):
            env.get_action("e", {"a": step, "b": step})
        env.end_episode("e", {"a": 5})

    with multi_agent_worker(drive, **settings) as worker:
        assert worker.sample().count == 5
        assert worker.env.error is None


# --- the table of episodes ---


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
    """Ask in a thread; return a function that waits for the actions or the error."""
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
    with pytest.raises(RuntimeError, match="max_concurrent"):
        table.start("c", True)
    with pytest.raises(ClosedEpisodeError, match="'c'"):
        table.end("c", {})
    table.end("a", {"x": 1})
    table.start("c", True)
    with pytest.raises(ConfigError):
        EpisodeTable(0)


def test_r154_a_late_answer_is_not_used_for_the_next_question():
    table = EpisodeTable(1)
    table.start("e", True)
    late = asked(table, "e", {"x": 1}, timeout_s=0.3)
    assert table.take(always, None).obs["e"] == {"x": 1}
    assert isinstance(late(), EpisodeTimeout)
    assert issubclass(EpisodeTimeout, queue.Empty)  # as RLlib's timeouts are
    waiting = asked(table, "e", {"x": 2})
    while table.length_of("e") < 2:
        threading.Event().wait(0.001)
    table.answer({"e": {"x": "for 1"}})
    assert table._active["e"].on_answer is not None
    assert table.take(always, None).obs["e"] == {"x": 2}
    table.answer({"e": {"x": "for 2"}})
    assert waiting() == {"x": "for 2"}


def test_r154_a_publication_not_polled_in_time_is_withdrawn_and_its_reward_kept():
    table = EpisodeTable(1)
    table.start("e", True)
    table.add_rewards("e", {"x": 2.0}, {}, {"x": True})
    with pytest.raises(EpisodeTimeout) as caught:
        table.ask("e", {"x": 1}, None, 0.01)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.episode_id, caught.value.waited_s) == ("e", 0.01)
    table.add_rewards("e", {"x": 1.0}, {}, {})
    table.end("e", {"x": 3})
    poll = table.take(always, None)
    assert (poll.obs, poll.rewards) == ({"e": {"x": 3}}, {"e": {"x": 3.0}})
    assert poll.terminateds == {"e": {"x": True, ALL_AGENTS: True}}
    assert table.take(never, None).obs == {}


def test_an_episode_driven_by_two_threads_is_an_error():
    table = EpisodeTable(1)
    table.start("e", True)
    waiting = asked(table, "e", {"x": 1})
    table.take(always, None)
    with pytest.raises(ClosedEpisodeError):
        table.ask("e", {"x": 2}, None, 1.0)
    with pytest.raises(ClosedEpisodeError):
        table.end("e", {"x": 2})
    table.answer({"e": {"x": 5}, "unknown": {}})
    assert waiting() == {"x": 5}


def played(table: EpisodeTable, episode_id: str, *turns) -> None:
    """Publish, poll and answer sets of observations one after the other; a set can have done
    flags.
    """
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
def test_r127_a_silent_clients_episode_ends_with_the_latest_observations_of_the_live_agents(
    turns, last
):
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
        with pytest.raises(EpisodeTimeout) as caught:
            table.ask(episode_id, {"x": 1}, None, 1.0)
        assert caught.value.waited_s is None
    with pytest.raises(ClosedEpisodeError):
        table.start("dead", True)
    table.end("alive", {"x": 2})
    assert table.take(never, 5.0).rewards["alive"] == {"x": 1.0}


def test_r154_a_withdrawn_observation_was_not_observed():
    table = EpisodeTable(1)
    table.start("e", True)
    played(table, "e", {"a": 1}, {"a": 2})
    table.add_rewards("e", {}, {}, {"a": True})
    for obs in ({"a": 3, "b": 3}, {"a": 4, "b": 4}):
        with pytest.raises(EpisodeTimeout):
            table.ask("e", obs, None, 0.01)
    table.end("e", {"a": 5})
    assert table.take(never, None).terminateds["e"] == {"a": True, ALL_AGENTS: True}


def test_a_client_that_waits_when_its_episode_is_dropped_gets_an_error_and_no_earlier_action():
    errors = []

    def drive(env):
        env.start_episode("e")
        env.get_action("e", 1)
        with pytest.raises(ClosedEpisodeError) as caught:
            env.get_action("e", 2)
        errors.append(caught.value)

    base = ExternalBaseEnv(Driven(drive))
    base.poll()
    base.send_actions({"e": {AGENT: 5}})
    base.poll()
    base.env.drop_episode("e")
    (last,) = drain(base)
    assert last.obs["e"] == {AGENT: 2}
    assert last.truncateds["e"][ALL_AGENTS]
    assert [error.episode_id for error in errors] == ["e"]


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


def test_a_limited_number_of_ended_episode_ids_is_remembered(monkeypatch):
    monkeypatch.setattr("aiorl.env.external_env._REMEMBERED", 3)
    table = EpisodeTable(3)
    for number in range(6):
        table.start(str(number), True)
        table.end(str(number), {"x": 0})
        table.take(never, None)
    for episode_id in ("3", "4", "5"):
        with pytest.raises(ClosedEpisodeError):
            table.start(episode_id, True)
    for episode_id in ("0", "1", "2"):
        table.start(episode_id, True)


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
        assert {
            episode_id: rewards["x"] for episode_id, rewards in poll.rewards.items()
        } == self.closing
        assert all(flags[ALL_AGENTS] for flags in poll.terminateds.values())
        self.over |= self.closing.keys()
        self.closing = {}


TestEpisodeLives = EpisodeLives.TestCase
TestEpisodeLives.settings = settings(max_examples=30, stateful_step_count=25)
