from __future__ import annotations

import threading

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.adapt import to_base_env
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.external_env import ACTION_TIMEOUT_S, ExternalBaseEnv, ExternalEnv, ExternalMultiAgentEnv
from aiorl.errors import (
    BadObservationError,
    BadRewardError,
    ClosedEpisodeError,
    ConfigError,
    EpisodeTimeout,
    SamplerDied,
)

SPACES = (spaces.Discrete(100), spaces.Discrete(100))
VECTORS = (spaces.Discrete(1000), spaces.Box(-np.inf, np.inf, (2,), np.float64))


class Driven(ExternalEnv):
    """Runs a function; waits at its end until told to finish."""

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
    """Polls until run() has ended; answers each with ``act``. Returns the polls."""
    polls = []
    while True:
        try:
            poll = base.poll()
        except SamplerDied:
            return polls
        polls.append(poll)
        base.send_actions(
            {env_id: act(env_id, obs) for env_id, obs in poll.obs.items() if not poll.dones[env_id][ALL_AGENTS]}
        )


def shown(polls, episode_id) -> list:
    """(obs, reward, done, off-policy action) of each item of an episode."""
    return [
        (
            poll.obs[episode_id][AGENT],
            poll.rewards[episode_id][AGENT],
            poll.dones[episode_id][ALL_AGENTS],
            poll.off_policy_actions.get(episode_id, {}).get(AGENT),
        )
        for poll in polls
        if episode_id in poll.obs
    ]


def test_r150_r151_r159_actions_come_from_the_policy_and_rewards_add_up_until_the_next_observation():
    got = []

    def drive(env):
        env.start_episode("e")
        env.log_returns("e", 100.0)
        got.append(env.get_action("e", 1))
        env.log_returns("e", 1.0)
        env.log_returns("e", 2.5)
        got.append(env.log_action("e", 2, 42))
        got.append(env.get_action("e", 3))
        env.log_returns("e", 4.0)
        env.end_episode("e", 4)

    polls = drain(ExternalBaseEnv(Driven(drive)), lambda env_id, obs: {AGENT: obs[AGENT] * 10})
    assert got == [10, None, 30]
    assert shown(polls, "e") == [
        (1, 100.0, False, None),
        (2, 3.5, False, 42),
        (3, 0.0, False, None),
        (4, 4.0, True, None),
    ]
    assert all(list(poll.obs) == ["e"] for poll in polls)


def test_r152_an_info_stays_until_it_is_replaced_and_the_callers_dict_is_not_changed():
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


def test_r153_only_episodes_that_are_not_trained_on_say_so():
    def drive(env):
        for episode_id, training in (("yes", True), ("no", False)):
            env.start_episode(episode_id, training)
            env.end_episode(episode_id, 0)

    infos = {}
    for poll in drain(ExternalBaseEnv(Driven(drive))):
        infos.update(poll.infos)
    assert infos == {"yes": {AGENT: {}}, "no": {AGENT: {"training_enabled": False}}}


def test_r149_each_misuse_of_an_id_is_a_value_error_that_says_which():
    env = Driven(lambda env: None)
    env.start_episode("e")
    with pytest.raises(ValueError, match="'e' is already started"):
        env.start_episode("e")
    env.end_episode("e", 0)
    with pytest.raises(ValueError, match="'e' is already completed"):
        env.start_episode("e")
    for episode_id, text in (("e", "already completed"), ("f", "unknown")):
        for call in (
            lambda name: env.get_action(name, 0),
            lambda name: env.log_action(name, 0, 0),
            lambda name: env.log_returns(name, 0.0),
            lambda name: env.end_episode(name, 0),
        ):
            with pytest.raises(ClosedEpisodeError, match=text):
                call(episode_id)


def test_r154_without_a_sampler_a_wait_ends_in_a_timeout_error():
    assert ExternalEnv.action_timeout_s == ACTION_TIMEOUT_S == 60.0
    env = Driven(lambda env: None)
    env.action_timeout_s = 0.02
    env.start_episode("e")
    with pytest.raises(TimeoutError, match="is the sampler running"):
        env.get_action("e", 0)
    with pytest.raises(EpisodeTimeout):
        env.log_action("e", 0, 0)


def test_r155_the_limit_of_concurrent_episodes_is_the_constructors():
    env = Driven(lambda env: None, max_concurrent=1)
    env.start_episode()
    with pytest.raises(RuntimeError, match="max_concurrent = 1"):
        env.start_episode()


def test_r157_run_must_be_implemented_and_an_error_in_it_reaches_whoever_polls():
    env = ExternalEnv(*SPACES)
    with pytest.raises(NotImplementedError, match=r"run\(\)"):
        env.run()
    base = ExternalBaseEnv(env)
    with pytest.raises(SamplerDied, match="NotImplementedError") as caught:
        base.poll()
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_r157_what_was_published_before_the_error_is_delivered_first():
    def drive(env):
        env.start_episode("e")
        env.end_episode("e", 7)
        raise KeyError("broken")

    env = Driven(drive)
    base = ExternalBaseEnv(env)
    assert base.poll().obs == {"e": {AGENT: 7}}
    with pytest.raises(SamplerDied, match="broken"):
        base.poll()
    env.join(5)
    assert not env.is_alive()


def test_r158_several_copies_of_an_external_env_are_refused():
    with pytest.raises(ConfigError, match="drives itself"):
        to_base_env(Driven(lambda env: None), num_envs=2)


def test_r123_r158_an_external_env_is_never_reset_and_shows_no_environment_objects():
    base = to_base_env(Driven(lambda env: None))
    assert isinstance(base, ExternalBaseEnv)
    assert base.try_reset("e") is None
    assert base.get_unwrapped() == []


def test_observations_are_kept_although_the_client_reuses_its_array():
    def drive(env):
        array = np.zeros(2)
        env.start_episode("e")
        for step in range(3):
            array[:] = step
            env.get_action("e", array)
        env.end_episode("e", array)

    polls = drain(ExternalBaseEnv(Driven(drive, VECTORS)))
    assert [poll.obs["e"][AGENT].tolist() for poll in polls] == [[0, 0], [1, 1], [2, 2], [2, 2]]


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


def play(episode: int, ask, log, end, start) -> list:
    """A deterministic client: a third of its actions are its own. Returns the actions it took."""
    rng = np.random.default_rng(episode)
    start(f"episode {episode}")
    taken = []
    for step in range(int(rng.integers(1, 8))):
        obs = np.array([episode, step], np.float64)
        if rng.random() < 0.33:
            taken.append(-step - 1)
            log(f"episode {episode}", obs, taken[-1], True)
        else:
            taken.append(ask(f"episode {episode}", obs))
        for reward in rng.integers(-4, 5, size=int(rng.integers(0, 3))).tolist():
            log(f"episode {episode}", None, reward, False)
    end(f"episode {episode}", np.array([episode, -1.0]))
    return taken


def policy(env_id, obs) -> dict:
    return {AGENT: int(obs[AGENT][0] * 7 + obs[AGENT][1])}


def drive_with(num_threads: int, num_episodes: int):
    """Trajectories and taken actions by episode, from clients in so many threads."""
    taken = {}

    def drive(env):
        def log(name, obs, value, is_action):
            if is_action:
                env.log_action(name, obs, value)
            else:
                env.log_returns(name, value)

        def client(number):
            # A thread keeps all of its episodes open at the same time, as far as their lengths allow.
            for episode in range(number, num_episodes, num_threads):
                taken[episode] = play(episode, env.get_action, log, env.end_episode, env.start_episode)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(num_threads)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()

    polls = drain(ExternalBaseEnv(Driven(drive, VECTORS)), policy)
    trajectories = {
        f"episode {episode}": [
            (obs.tolist(), reward, done, off) for obs, reward, done, off in shown(polls, f"episode {episode}")
        ]
        for episode in range(num_episodes)
    }
    return trajectories, taken, polls


def test_r156_100_interleaved_episodes_from_20_threads_give_what_one_thread_gives():
    one, one_taken, _ = drive_with(1, 100)
    many, many_taken, polls = drive_with(20, 100)
    assert many == one
    assert many_taken == one_taken
    assert any(len(poll.obs) > 1 for poll in polls)
    assert all(len(rows) >= 2 and rows[-1][2] for rows in one.values())


def test_the_episode_of_a_dead_client_ends_without_disturbing_the_others():
    later, alive = [], []

    def drive(env):
        env.start_episode("dead")
        env.get_action("dead", 1)
        while "dead" not in env._episodes._ended or len(alive) < 10:
            name = f"alive {len(alive)}"
            env.start_episode(name)
            env.get_action(name, 1)
            threading.Event().wait(0.01)
            env.end_episode(name, 2)
            alive.append(name)
        try:
            env.get_action("dead", 2)
        except TimeoutError as error:
            later.append(error)

    env = Driven(drive)
    env.idle_timeout_s = 1.0
    polls = drain(ExternalBaseEnv(env))
    assert [rows[:3] for rows in shown(polls, "dead")] == [(1, 0.0, False), (1, 0.0, True)]
    assert [poll.truncateds["dead"][ALL_AGENTS] for poll in polls if "dead" in poll.obs] == [False, True]
    assert all([row[:3] for row in shown(polls, name)] == [(1, 0.0, False), (2, 0.0, True)] for name in alive)
    assert len(later) == 1


def test_r160_the_multi_agent_form_adds_rewards_by_agent_and_fills_in_what_is_missing():
    got = []

    def drive(env):
        env.start_episode("e")
        got.append(env.get_action("e", {"a": 1, "b": 2}))
        env.log_returns("e", {"a": 1.0}, {"a": {"x": 1}})
        env.log_returns("e", {"a": 2.0, "c": 5.0}, None, {"b": True})
        env.log_action("e", {"a": 3, "b": 4}, {"a": 9})
        env.end_episode("e", {"a": 5})

    polls = drain(ExternalBaseEnv(MultiDriven(drive)), lambda env_id, obs: {agent: obs[agent] * 10 for agent in obs})
    assert got == [{"a": 10, "b": 20}]
    assert [poll.rewards["e"] for poll in polls] == [{"a": 0.0, "b": 0.0}, {"a": 3.0, "b": 0.0, "c": 5.0}, {"a": 0.0}]
    assert [poll.dones["e"] for poll in polls] == [
        {"a": False, "b": False, ALL_AGENTS: False},
        {"a": False, "b": True, ALL_AGENTS: False},
        {"a": False, ALL_AGENTS: True},
    ]
    assert [poll.infos["e"] for poll in polls] == [{"a": {}, "b": {}}, {"a": {"x": 1}, "b": {}}, {"a": {"x": 1}}]
    assert [poll.off_policy_actions for poll in polls] == [{}, {"e": {"a": 9}}, {}]


def test_r160_spaces_by_agent_must_be_of_the_same_agents():
    one, other = {"a": spaces.Discrete(2)}, {"b": spaces.Discrete(2)}
    ExternalMultiAgentEnv(one, dict(one))
    ExternalMultiAgentEnv(one, spaces.Dict(other))
    with pytest.raises(ConfigError, match="same agents"):
        ExternalMultiAgentEnv(one, other)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (np.zeros(3), r"shape \(3,\), expected \(2,\)"),
        ([0.0, np.nan], "holds NaN or infinity"),
        (["a", "b"], "dtype <U1, expected float64"),
        (None, r"shape \(\), expected \(2,\)"),
    ],
)
def test_a_clients_bad_observation_is_its_own_error_and_other_episodes_go_on(bad, text):
    good, caught = [0.5, 1.5], []

    def drive(env):
        env.start_episode("good")
        env.start_episode("bad")
        for call in (
            lambda: env.get_action("bad", bad),
            lambda: env.log_action("bad", bad, 0),
            lambda: env.end_episode("bad", bad),
        ):
            with pytest.raises(BadObservationError, match=text) as error:
                call()
            caught.append(str(error.value))
            env.get_action("good", good)
        env.get_action("bad", good)
        env.end_episode("bad", good)
        env.end_episode("good", good)

    env = Driven(drive, VECTORS)
    polls = drain(ExternalBaseEnv(env))
    assert env.error is None
    assert len(shown(polls, "good")) == 4
    assert [row[2] for row in shown(polls, "bad")] == [False, True]
    assert all("Driven" in text and "'bad'" in text for text in caught)


def test_an_agents_bad_observation_is_checked_against_its_own_space_and_publishes_nothing():
    by_agent = {"a": spaces.Discrete(2), "b": VECTORS[1]}
    env = MultiDriven(lambda env: None, (dict.fromkeys(by_agent, SPACES[0]), by_agent))
    env.start_episode("e")
    for call in (
        lambda: env.get_action("e", {"a": 1, "b": [1.0]}),
        lambda: env.log_action("e", {"a": 1, "b": [1.0]}, {"a": 0}),
        lambda: env.end_episode("e", {"a": 1, "b": [1.0]}),
    ):
        with pytest.raises(BadObservationError, match=r"agent 'b'.*shape \(1,\), expected \(2,\)"):
            call()
    with pytest.raises(BadObservationError, match=r"agent 'a'.*outside 0 to 1"):
        env.end_episode("e", {"a": 2})
    env.end_episode("e", {"a": 1, "b": [1.0, 2.0]})
    assert len(env._episodes.take(lambda: False, None)) == 1
    assert not env._episodes.take(lambda: False, None)


def test_an_environment_that_names_no_observation_space_is_not_checked():
    env = MultiDriven(lambda env: None, (None, None))
    env.start_episode("e")
    env.end_episode("e", {"a": "anything"})


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much", None])
def test_a_clients_bad_reward_is_its_own_error_and_adds_nothing(reward):
    env = MultiDriven(lambda env: None)
    env.start_episode("e")
    with pytest.raises(BadRewardError, match="expected a"):
        env.log_returns("e", {"a": 1.0, "b": reward})
    env.end_episode("e", {"a": 1, "b": 1})
    assert env._episodes.take(lambda: False, None)["e"].rewards == {"a": 0.0, "b": 0.0}
    single = Driven(lambda env: None)
    single.start_episode("e")
    with pytest.raises(BadRewardError, match="expected a"):
        single.log_returns("e", reward)


def test_an_environment_that_was_never_started_can_be_joined_and_closed():
    env = Driven(lambda env: None)
    env.join(1)
    env.close()
    env.close()
    with pytest.raises(SamplerDied):
        env.start_episode("e") and env.get_action("e", 0)
