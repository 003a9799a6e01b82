"""The whole of the general path in one thread: rows, cuts, horizons, resets, metrics."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_settings import sampler_settings

from aiorl.acting.filters import MeanStdFilter, NoFilter
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.env.base_env import FinishedGame
from aiorl.errors import ConfigError, EnvError, PolicyError
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.testing.scripted_env import RecordingPolicy, Scene, ScriptedEnv, scenes
from benchmarks.acting_mlp import make_onnx_policy, mlp_weights

ROW_COLUMNS = {
    "t",
    "eps_id",
    "agent_index",
    "obs",
    "new_obs",
    "actions",
    "rewards",
    "prev_actions",
    "prev_rewards",
    "terminateds",
    "truncateds",
    "dones",
    "infos",
}


def single(*lengths, end="terminate", **more) -> ScriptedEnv:
    """One environment with episodes of these lengths."""
    return ScriptedEnv({0: [scenes(length, episode=n, end=end) for n, length in enumerate(lengths)]}, **more)


def ob(*numbers):
    return np.array(numbers, np.float32)


class Spec:
    def __init__(self, limit):
        self.spec = type("S", (), {"max_episode_steps": limit})()


# --- rows ---


def test_rows_have_every_column_and_the_policys_own(make_sampler):
    """R96."""
    batch = make_sampler(single(3)).get_data()
    assert set(batch) == ROW_COLUMNS | {"score"}
    assert all(len(column) == 3 for column in batch.values())
    assert batch["rewards"].dtype == batch["prev_rewards"].dtype == np.float32
    assert batch["dones"].dtype == np.bool_
    assert batch["eps_id"].dtype == np.int64


def test_r102_rows_around_suppressed_ones_are_trajectories_of_their_own(make_sampler):
    """R102, R106: the value behind a piece is that of its own last new_obs, not that of the next recorded row."""
    policy = make_onnx_policy(3, spaces.Discrete(2), 2, mlp_weights(3, 2))
    policy.config.update(postprocess="gae", postprocess_params={"gamma": 0.5, "lam": 0.0})
    script = scenes(8)
    for step in (3, 4, 6):
        script[step] = Scene(script[step].obs, script[step].rewards, infos={"agent0": {"training_enabled": False}})
    seen = []

    class Note(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, original_batches, **kwargs):
            seen.append(postprocessed_batch["t"].tolist())

    batch = make_sampler(ScriptedEnv({0: [script]}), policy, callbacks=Note()).get_data()
    assert seen == [[0, 1], [4], [6, 7]]
    assert batch["t"].tolist() == [0, 1, 4, 6, 7]
    values = np.where(batch["terminateds"], 0.0, policy.values(batch["new_obs"]))
    np.testing.assert_allclose(batch["value_targets"], batch["rewards"] + 0.5 * values, rtol=1e-5)


@pytest.mark.parametrize(
    ("clip", "expected"), [(True, [1, 1, 1]), (2.5, [1, 2, 2.5]), (None, [1, 2, 3]), (False, [1, 2, 3])]
)
def test_rewards_are_clipped_before_postprocessing_but_not_in_metrics(make_sampler, clip, expected):
    """R103."""
    policy = RecordingPolicy()
    sampler = make_sampler(single(3), policy, clip_rewards=clip)
    assert sampler.get_data()["rewards"].tolist() == expected
    assert policy.postprocessed[0][0]["rewards"].tolist() == expected
    assert sampler.get_metrics()[0].episode_reward == 6.0


# --- cuts ---


def test_packed_batches_have_exactly_the_fragment_length_and_span_episodes(make_sampler):
    """R58, R104, R107."""
    sampler = make_sampler(single(3, 5), length=4)
    batches = [sampler.get_data() for _ in range(4)]
    assert [batch.count for batch in batches] == [4, 4, 4, 4]
    joined = SampleBatch.concat(batches)
    assert joined["t"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4]
    assert [len(list(group)) for _, group in itertools.groupby(joined["eps_id"])] == [3, 5, 3, 5]


def test_without_packing_there_is_one_batch_per_episode_never_cut(make_sampler):
    """R60, R105."""
    sampler = make_sampler(single(7, 1, 30))
    assert [sampler.get_data().count for _ in range(3)] == [7, 1, 30]


def test_packed_rows_of_a_finished_episode_stay_in_a_builder_that_is_used_again(make_sampler):
    """R108."""
    builders = []

    class Note(DefaultCallbacks):
        def on_episode_start(self, *, episode, **kwargs):
            builders.append((episode.batch_builder, episode.batch_builder.total()))

    sampler = make_sampler(single(3), length=5, callbacks=Note())
    sampler.get_data()
    assert builders[0][0] is builders[1][0]
    assert [total for _, total in builders] == [0, 3]


# --- metrics ---


def test_metrics_are_there_once_the_batch_is_and_are_drained(make_sampler):
    """R76, R77, R91, R93."""
    sampler = make_sampler(single(3))
    sampler.get_data()
    (metrics,) = sampler.get_metrics()
    assert metrics.episode_length == 3
    assert metrics.episode_reward == 6.0
    assert metrics.agent_rewards == {("agent0", "default_policy"): 6.0}
    assert metrics._fields == (
        "episode_length",
        "episode_reward",
        "agent_rewards",
        "custom_metrics",
        "perf_stats",
        "hist_data",
    )
    assert set(metrics.perf_stats) == {"mean_env_wait_ms", "mean_processing_ms", "mean_inference_ms"}
    assert sampler.get_metrics() == []


def test_totals_count_rewards_of_agents_that_are_not_observed(make_sampler):
    """R92, R129: such a reward goes to the agent's next row, once."""
    script = [
        Scene({"a": ob(0, 0, 0), "b": ob(0, 0, 1)}),
        Scene({"a": ob(0, 1, 0)}, {"a": 1.0, "b": 10.0, "c": 1000.0}),
        Scene({"a": ob(0, 2, 0)}, {"b": 20.0}),
        Scene({"a": ob(0, 3, 0), "b": ob(0, 3, 1)}, {"a": 3.0, "b": 30.0}, {"__all__": True}),
    ]
    sampler = make_sampler(ScriptedEnv({0: [script]}), callbacks=None)
    batch = sampler.get_data()
    rows = {index: batch.take(batch["agent_index"] == index) for index in (0, 1)}
    assert rows[0]["rewards"].tolist() == [1, 0, 3]
    assert rows[1]["rewards"].tolist() == [60]
    assert rows[1]["t"].tolist() == [2]
    assert rows[1]["actions"].tolist() == [1], "the action of its previous observation"
    (metrics,) = sampler.get_metrics()
    assert metrics.episode_reward == 1064.0
    default = "default_policy"
    assert metrics.agent_rewards == {("a", default): 4.0, ("b", default): 60.0, ("c", default): 1000.0}


@pytest.mark.parametrize("games", [[], [FinishedGame(21.0, 900), FinishedGame(-3.0, 100)]])
def test_real_games_are_reported_instead_of_episodes_with_the_closing_episodes_metrics(make_sampler, games):
    """R124, R125."""

    class Tag(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_metrics["tag"] = 7.0

    env = single(3)
    env.games = list(games)
    sampler = make_sampler(env, callbacks=Tag())
    sampler.get_data()
    metrics = sampler.get_metrics()
    assert [(m.episode_length, m.episode_reward) for m in metrics] == [(g.length, g.reward) for g in games]
    assert all(m.custom_metrics == {"tag": 7.0} for m in metrics)


def test_hand_out_time_belongs_to_no_perf_figure(make_sampler, monkeypatch):
    """R78: the clock stands still inside the turn, but runs while the caller has the batch."""
    now = [0.0]
    monkeypatch.setattr("aiorl.sampling.sampler.time.perf_counter", lambda: now[0])
    sampler = make_sampler(single(2))
    for _ in range(3):
        sampler.get_data()
        now[0] += 100.0
    assert set(sampler.perf.get().values()) == {0.0}


# --- laziness and hand-out ---


def test_nothing_happens_before_the_first_get_data(make_sampler):
    """R68."""
    env = single(3)
    sampler = make_sampler(env)
    assert env.tape == []
    sampler.get_data()
    assert env.tape[0] == ("poll",)


def test_outputs_are_handed_out_before_inference_so_that_new_weights_govern_the_next_action(make_sampler):
    """R79."""
    policy = RecordingPolicy()
    env = single(10)
    sampler = make_sampler(env, policy, length=2)
    for number in range(4):
        policy.weights = float(number)
        sampler.get_data()
        assert env.tape[-1] == ("poll",), "the actions at the observations polled are not chosen yet"
    by_step = {int(call["obs"][0, 1]): call["weights"] for call in policy.calls}
    assert by_step == {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 3.0, 7: 3.0}


def test_on_turn_may_raise_between_turns_and_nothing_is_lost(make_sampler):
    """R79."""
    calls = itertools.count()

    def on_turn():
        if next(calls) in (2, 5):
            raise InterruptedError

    def rows(**more):
        sampler, batches = make_sampler(single(3, 4), length=3, **more), []
        while len(batches) < 4:
            try:
                batches.append(sampler.get_data())
            except InterruptedError:
                batches += []
        return SampleBatch.concat(batches)

    interrupted, plain = rows(on_turn=on_turn), rows()
    for name in ("obs", "actions", "rewards", "new_obs", "t"):
        np.testing.assert_array_equal(interrupted[name], plain[name])


def test_extra_batches_are_drained(make_sampler):
    """R67, R76."""
    extra = SampleBatch({"obs": np.zeros((2, 3))})

    class Add(DefaultCallbacks):
        def on_episode_step(self, *, episode, **kwargs):
            if episode.length == 1:
                episode.add_extra_batch(extra)

    sampler = make_sampler(single(3), callbacks=Add())
    sampler.get_data()
    assert sampler.get_extra_batches() == [extra]
    assert sampler.get_extra_batches() == []


# --- horizon ---


@pytest.mark.parametrize(
    ("horizon", "limit", "expected"),
    [(4, 10, 4), (10, 10, 10), (None, 6, 6), (0, 6, 6), (math.inf, 6, 6), (3, None, 3), (3, "many", 3)],
)
def test_episodes_end_at_the_horizon_or_the_environments_limit(make_sampler, horizon, limit, expected):
    """R80, R81, R82."""
    env = single(50, end="never", unwrapped=[Spec(limit)])
    batch = make_sampler(env, horizon=horizon).get_data()
    assert batch.count == expected
    assert batch["dones"].tolist() == [False] * (expected - 1) + [True]
    assert batch["truncateds"][-1]
    assert not batch["terminateds"].any()
    assert ("reset", 0) in env.tape


@pytest.mark.parametrize("horizon", [11, -1])
def test_a_horizon_above_the_limit_or_below_0_is_refused(make_sampler, horizon):
    """R80."""
    with pytest.raises(ConfigError) as caught:
        make_sampler(single(5, unwrapped=[Spec(10)]), horizon=horizon).get_data()
    assert caught.value.key == "horizon"


@pytest.mark.parametrize("soft", [False, True])
def test_a_real_end_on_the_horizon_step_is_a_real_end(make_sampler, soft):
    """R83."""
    env = single(4)
    batch = make_sampler(env, horizon=4, soft_horizon=soft).get_data()
    assert batch["terminateds"].tolist() == [False, False, False, True]
    assert batch["dones"][-1]
    assert ("reset", 0) in env.tape


def test_soft_horizon_restarts_the_episode_without_a_reset_and_keeps_the_state(make_sampler):
    """R84."""
    env = single(50, end="never")
    policy = RecordingPolicy(recurrent=True)
    sampler = make_sampler(env, policy, horizon=4, soft_horizon=True)
    batches = [sampler.get_data() for _ in range(3)]
    joined = SampleBatch.concat(batches)
    assert not joined["dones"].any()
    assert not joined["terminateds"].any()
    assert not joined["truncateds"].any()
    assert joined["obs"][:, 1].tolist() == list(range(12)), "the environment just goes on"
    assert joined["t"].tolist() == [0, 1, 2, 3] * 3
    assert joined["state_in_0"][:, 0].tolist() == list(range(-1, 11)), "the state goes on, too"
    assert joined["prev_actions"].tolist() == [0, 0, 1, 2, 0, 4, 5, 6, 0, 8, 9, 10]
    assert joined["prev_rewards"].tolist() == [0, 1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 11]
    assert len({batch["eps_id"][0] for batch in batches}) == 3
    assert ("reset", 0) not in env.tape
    metrics = sampler.get_metrics()
    assert [m.episode_length for m in metrics] == [4, 4, 4]
    assert [m.episode_reward for m in metrics] == [10.0, 26.0, 42.0]


def test_soft_horizon_filters_each_observation_once_and_shares_no_builder(make_sampler):
    """R86."""
    seen = []

    class Note(DefaultCallbacks):
        def on_episode_step(self, *, episode, **kwargs):
            seen.append((episode.env_id, id(episode.batch_builder)))

    observation_filter = MeanStdFilter((3,))
    env = ScriptedEnv({n: [scenes(7, episode=n, end=end)] for n, end in enumerate(("never", "terminate"))})
    env._scripts[0] = [scenes(100, end="never")]
    sampler = make_sampler(
        env, horizon=5, soft_horizon=True, callbacks=Note(), filters={"default_policy": observation_filter}
    )
    while len(seen) < 60:
        sampler.get_data()
    polled = sum(1 for event in env.tape if event == ("poll",))
    resets = sum(1 for event in env.tape if event[0] == "reset")
    assert observation_filter.count == 2 * polled + resets
    for one, other in itertools.pairwise(seen):
        if one[0] != other[0]:
            assert one[1] != other[1]


@pytest.mark.parametrize("end", ["terminate", "truncate"])
def test_no_done_at_end_never_records_done(make_sampler, end):
    """R85."""
    env = ScriptedEnv({0: [scenes(3, end=end, agents=("a", "b"))]})
    batch = make_sampler(env, no_done_at_end=True).get_data()
    assert batch.count == 6
    assert not (batch["dones"] | batch["terminateds"] | batch["truncateds"]).any()


# --- resets ---


def test_an_in_line_reset_is_acted_on_in_the_same_turn_with_zero_action_and_reward(make_sampler):
    """R121."""
    env = single(2, 3)
    policy = RecordingPolicy()
    sampler = make_sampler(env, policy)
    sampler.get_data()
    sampler.get_data()
    polls = sum(1 for event in env.tape if event == ("poll",))
    assert len(policy.calls) == polls - 1, "one call per turn, the last one is still to come"
    reset_call = policy.calls[2]
    assert reset_call["obs"].tolist() == [[1, 0, 0]]
    assert reset_call["prev_actions"].tolist() == [0]
    assert reset_call["prev_rewards"].tolist() == [0]


def test_an_asynchronous_reset_opens_the_episode_at_a_later_poll(make_sampler):
    """R122."""
    starts = []

    class Note(DefaultCallbacks):
        def on_episode_start(self, *, base_env, **kwargs):
            starts.append(sum(1 for event in base_env.tape if event == ("poll",)))

    env = single(2, 3, reset="async")
    sampler = make_sampler(env, callbacks=Note())
    assert [sampler.get_data().count for _ in range(2)] == [2, 3]
    assert starts == [1, 4]
    assert 0 not in env.sent[2], "no action for an environment that waits for its reset"


def test_an_environment_that_cannot_be_reset_is_dropped_or_refused_with_a_horizon(make_sampler):
    """R123."""
    env = single(3, 2, reset="unsupported")
    sampler = make_sampler(env)
    assert [sampler.get_data().count for _ in range(2)] == [3, 2]
    assert env.sent[-1].keys() == {"0+"}
    sampler = make_sampler(single(3, reset="unsupported"), horizon=5)
    assert sampler.get_data().count == 3
    with pytest.raises(ValueError, match="cannot be reset"):
        sampler.get_data()


# --- several agents ---


def policy_of(agent):
    return "even" if agent % 2 == 0 else "odd"


def test_one_call_per_policy_covers_all_environments_and_agents_in_order(make_sampler):
    """R110, R111, R112, R133."""
    tape = []
    policies = {name: RecordingPolicy(tape=tape, name=name) for name in ("even", "odd")}
    policies["odd"].global_timestep = 77
    env = ScriptedEnv({n: [scenes(3, episode=n, agents=(0, 1, 2))] for n in range(2)}, tape=tape)
    sampler = make_sampler(env, policies, mapping=policy_of)
    batch = sampler.get_data()
    acts = [event for event in tape if event[0] == "act"]
    assert acts[:2] == [("act", "even", 4), ("act", "odd", 2)]
    call = policies["even"].calls[1]
    assert call["obs"].tolist() == [[0, 1, 0], [0, 1, 2], [1, 1, 0], [1, 1, 2]]
    assert call["prev_actions"].tolist() == [0, 1, 2, 3]
    assert call["prev_rewards"].tolist() == [1, 201, 1, 201]
    assert [episode.env_id for episode in call["episodes"]] == [0, 0, 1, 1]
    assert len(call["infos"]) == 4
    assert call["timestep"] == 0
    assert policies["odd"].calls[0]["timestep"] == 77
    assert isinstance(batch, MultiAgentBatch)
    assert set(batch.policy_batches) == {"even", "odd"}
    assert batch.policy_batches["even"].count == 6
    assert sorted(set(batch.policy_batches["even"]["agent_index"])) == [0, 2]


def test_count_is_environment_steps_and_total_agent_steps(make_sampler):
    """R131, R132."""
    policies = {name: RecordingPolicy() for name in ("even", "odd")}
    env = ScriptedEnv({0: [scenes(10, agents=tuple(range(5)))]})
    sampler = make_sampler(env, policies, mapping=policy_of, length=4)
    batches = [sampler.get_data() for _ in range(3)]
    assert [batch.count for batch in batches] == [4, 4, 4]
    assert [batch.total() for batch in batches] == [20, 20, 20]
    joined = MultiAgentBatch.concat(batches)
    assert (joined.count, joined.total()) == (12, 60)


def test_agents_come_and_go_and_absent_ones_get_no_action(make_sampler):
    """R126, R120, R130."""
    script = [
        Scene({"a": ob(0, 0, 0)}),
        Scene({"b": ob(0, 1, 1)}, {"a": 1.0}),
        Scene({}, {}),
        Scene({"a": ob(0, 3, 0), "b": ob(0, 3, 1)}, {"a": 5.0, "b": 1.0}),
        Scene({"a": ob(0, 4, 0), "b": ob(0, 4, 1), "c": ob(0, 4, 2)}, {}, {"__all__": True}),
    ]
    env = ScriptedEnv({0: [script]})
    batch = make_sampler(env).get_data()
    assert [sorted(actions[0]) for actions in env.sent[:4]] == [["a"], ["b"], [], ["a", "b"]]
    rows = {index: batch.take(batch["agent_index"] == index) for index in (0, 1)}
    assert rows[0]["t"].tolist() == [2, 3]
    assert rows[0]["rewards"].tolist() == [6.0, 0.0]
    assert rows[1]["t"].tolist() == [2, 3]
    assert batch.count == 4, "an agent seen once only has no row"
    assert batch["dones"].sum() == 2


def test_a_done_agent_has_its_final_row_and_no_further_action(make_sampler):
    """R127."""
    script = scenes(3, agents=("a", "b"))
    script[1] = Scene(script[1].obs, script[1].rewards, {"a": True})
    script[2:] = [Scene({"b": s.obs["b"]}, {"b": s.rewards["b"]}, s.terminateds) for s in script[2:]]
    env = ScriptedEnv({0: [script]})
    batch = make_sampler(env).get_data()
    assert [sorted(actions[0]) for actions in env.sent[:3]] == [["a", "b"], ["b"], ["b"]]
    a = batch.take(batch["agent_index"] == 0)
    assert a["terminateds"].tolist() == [True]


def test_a_done_agent_that_returns_is_an_error(make_sampler):
    """R127."""
    script = scenes(3, agents=("a", "b"))
    script[1] = Scene(script[1].obs, script[1].rewards, {"a": True})
    with pytest.raises(ValueError, match="'a' was done and is observed again"):
        make_sampler(ScriptedEnv({0: [script]})).get_data()


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_live_agent_without_final_observation_is_an_error_wherever_rows_are_cut(make_sampler, cut):
    """R95."""
    script = scenes(3, agents=("a", "b"))
    script[3] = Scene({"a": script[3].obs["a"]}, {}, {"__all__": True})
    sampler = make_sampler(ScriptedEnv({0: [script]}), length=cut)
    with pytest.raises(ValueError, match=r"agent 'b'.*no final observation"):
        [sampler.get_data() for _ in range(4)]
    lenient = make_sampler(ScriptedEnv({0: [script]}), no_done_at_end=True)
    assert lenient.get_data().count == 5
    script[3] = Scene({"a": script[3].obs["a"]})
    at_horizon = make_sampler(ScriptedEnv({0: [script]}), horizon=3)
    assert at_horizon.get_data().count == 5


def test_an_unknown_policy_id_is_named(make_sampler):
    """R113."""
    sampler = make_sampler(single(3), mapping=lambda agent: "nobody")
    with pytest.raises(ValueError, match=r"'nobody'.*'default_policy'"):
        sampler.get_data()
    with pytest.raises(ValueError, match="default_policy"):
        make_sampler(single(3), filters={"other": NoFilter()})


def test_observation_fn_sees_polled_and_reset_observations(make_sampler):
    """R134."""
    seen = []

    def observation_fn(agent_obs, worker, base_env, policies, episode):
        seen.append((episode.length, worker, sorted(policies)))
        return {"x": agent_obs["agent0"] + 100, "y": agent_obs["agent0"]}

    sampler = make_sampler(single(2), observation_fn=observation_fn)
    batch = sampler.get_data()
    assert batch.count == 4
    assert batch["obs"][:, 1].tolist() == [100, 101, 0, 1]
    assert [length for length, _, _ in seen] == [0, 1, 2, 0]
    assert seen[0][1:] == ("the worker", ["default_policy"])


def test_observation_fn_must_return_a_dict(make_sampler):
    """R134."""
    with pytest.raises(ValueError, match="observation_fn returned list"):
        make_sampler(single(2), observation_fn=lambda agent_obs, **kwargs: [agent_obs]).get_data()


# --- actions ---


@pytest.mark.parametrize("clip", [True, False])
def test_the_environment_gets_the_clipped_action_and_the_row_the_chosen_one(make_sampler, clip):
    """R118."""
    space = spaces.Box(np.array([-1, -np.inf], np.float32), np.array([1, np.inf], np.float32))
    policy = RecordingPolicy(space, act=lambda obs: np.full((len(obs), 2), 5.0, np.float32))
    env = single(2)
    batch = make_sampler(env, policy, clip_actions=clip).get_data()
    assert batch["actions"].tolist() == [[5, 5], [5, 5]]
    assert env.sent[0][0]["agent0"].tolist() == ([1, 5] if clip else [5, 5])
    env.sent[0][0]["agent0"][:] = 99
    assert batch["actions"].tolist() == [[5, 5], [5, 5]]


def test_tuple_actions_arrive_as_one_component_list_per_agent(make_sampler):
    """R117."""
    space = spaces.Tuple([spaces.Discrete(5), spaces.Box(-1.0, 1.0, (2,), np.float32)])

    def act(obs):
        return [np.arange(len(obs)), np.full((len(obs), 2), 3.0, np.float32)]

    env = ScriptedEnv({0: [scenes(2, agents=("a", "b"))]})
    batch = make_sampler(env, RecordingPolicy(space, act=act)).get_data()
    choice, numbers = env.sent[0][0]["b"]
    assert choice == 1
    assert numbers.tolist() == [1.0, 1.0]
    assert batch["actions"][batch["agent_index"] == 1].tolist() == [[1, 3, 3], [1, 3, 3]]


def test_off_policy_actions_are_recorded_and_extra_columns_stay_the_policys(make_sampler):
    """R119."""
    script = scenes(3)
    script[1] = Scene(script[1].obs, script[1].rewards, off_policy_actions={"agent0": 555})
    env, policy = ScriptedEnv({0: [script]}), RecordingPolicy()
    batch = make_sampler(env, policy).get_data()
    assert batch["actions"].tolist() == [0, 555, 2]
    assert batch["prev_actions"].tolist() == [0, 0, 555]
    assert batch["score"].tolist() == [0, 1, 2]
    assert policy.calls[2]["prev_actions"].tolist() == [555]
    assert env.sent[1][0] == {"agent0": 1}, "the environment may ignore it"


def test_a_policy_with_another_number_of_states_is_refused(make_sampler):
    """R115."""

    class Forgetful(RecordingPolicy):
        def compute_actions(self, *args, **kwargs):
            actions, states, extras = super().compute_actions(*args, **kwargs)
            return actions, [*states, np.zeros(1)], extras

    with pytest.raises(ValueError, match="recurrent states"):
        make_sampler(single(2), Forgetful(recurrent=True)).get_data()


# --- faults ---


def test_a_bad_observation_names_environment_agent_and_step(make_sampler):
    script = scenes(3, agents=("a", "b"))
    script[2] = Scene({"a": script[2].obs["a"], "b": ob(0, np.nan, 0)})
    with pytest.raises(ValueError, match=r"'ScriptedEnv', copy 0.*step 2.*'b'.*NaN"):
        make_sampler(ScriptedEnv({0: [script]})).get_data()
    script[2] = Scene({"a": ob(1, 2), "b": script[1].obs["b"]})
    with pytest.raises(ValueError, match="agent 'a'"):
        make_sampler(ScriptedEnv({0: [script]})).get_data()
    script[2] = Scene(script[1].obs, {"a": math.nan})
    with pytest.raises(ValueError, match="rewards are"):
        make_sampler(ScriptedEnv({0: [script]})).get_data()


def test_after_an_error_of_poll_sampling_goes_on(make_sampler):
    env = single(3)
    plain, failures = env.poll, iter([False, True, False])

    def poll():
        if next(failures, False):
            raise EnvError("env", "flaky")
        return plain()

    env.poll = poll
    sampler = make_sampler(env)
    with pytest.raises(EnvError, match="flaky"):
        sampler.get_data()
    assert sampler.get_data().count == 3


@pytest.mark.parametrize("pack", [True, False])
def test_an_environment_that_broke_down_loses_its_episode_only(make_sampler, pack):
    """Packed: the rows so far stay, as a cut; complete episodes: they are dropped. No metrics either way."""
    broken = [*scenes(9, episode=5)[:4], Scene({}, fault=EnvError("env", "child died"))]
    env = ScriptedEnv({0: [broken, scenes(3, episode=6)], 1: [scenes(20, episode=1)]})
    sampler = make_sampler(env, length=6 if pack else math.inf)
    batches = [sampler.get_data() for _ in range(4)]
    rows = SampleBatch.concat(batches)
    mine = rows.take(rows["obs"][:, 0] >= 5)
    first = [5, 5, 5, 6, 6, 6] if pack else [6, 6, 6]
    assert mine["obs"][: len(first), 0].tolist() == first
    assert all(m.episode_length in (3, 20) for m in sampler.get_metrics())
    for part in mine.split_by_episode():
        assert part["t"].tolist() == list(range(part["t"][0], part["t"][0] + part.count))
        assert part["dones"][-1] == (part["obs"][0, 0] == 6)


# --- anything goes: agents that join, leave and die anywhere, also on the cut ---


@st.composite
def random_episodes(draw):
    episodes = []
    for number in range(draw(st.integers(1, 3))):
        alive, dead, seen = set(), set(), set()
        length = draw(st.integers(1, 8))
        episode = []
        for step in range(length + 1):
            last = step == length
            observed = {a for a in range(4) if a not in dead and draw(st.booleans())}
            if last:
                observed |= seen - dead
            if step == 0 and not observed:
                observed = {0}
            dying = {a for a in observed if not last and step and draw(st.integers(0, 5)) == 0}
            obs = {a: ob(number, step, a) for a in sorted(observed)}
            rewards = {a: float(draw(st.integers(0, 9))) for a in range(4) if step and draw(st.booleans())}
            episode.append(Scene(obs, rewards, {**dict.fromkeys(dying, True), "__all__": last}))
            seen |= observed
            dead |= dying
        alive.clear()
        episodes.append(episode)
    return episodes


@settings(max_examples=80, deadline=None)
@given(episodes=random_episodes(), cut=st.sampled_from([1, 2, 3, 7, math.inf]), envs=st.integers(1, 3))
def test_agents_may_join_leave_and_die_anywhere(episodes, cut, envs):
    """R95, R97, R98, R99, R106, R107, R126, R127, R129, R130, R131: against a plain replay of the script."""
    from aiorl.acting.preprocessors import preprocessor_for
    from aiorl.sampling.callbacks import DefaultCallbacks
    from aiorl.sampling.sampler import SyncSampler
    from aiorl.sampling.settings import SamplerSetup

    policies = {name: RecordingPolicy(recurrent=True) for name in ("even", "odd")}
    env = ScriptedEnv({n: episodes for n in range(envs)})
    space = policies["even"].observation_space
    sampler = SyncSampler(
        SamplerSetup(
            worker=None,
            base_env=env,
            policy_map=policies,
            policy_mapping_fn=policy_of,
            preprocessors=dict.fromkeys(policies, preprocessor_for(space)),
            filters=dict.fromkeys(policies, NoFilter()),
            settings=sampler_settings(cut),
            callbacks=DefaultCallbacks(),
        )
    )
    expected = [row for episode in episodes for row in replay(episode)]
    if not expected:
        return
    batches = [sampler.get_data() for _ in range(8)]
    rows = {}
    for batch in batches:
        assert isinstance(batch, MultiAgentBatch)
        if cut != math.inf:
            assert batch.count >= cut
        for name, part in batch.policy_batches.items():
            for row in part.rows():
                assert policy_of(row["obs"][2]) == name
                rows.setdefault((int(row["eps_id"]), int(row["agent_index"])), []).append(row)
    for of_agent in rows.values():
        agent = of_agent[0]["obs"][2]
        episode = int(of_agent[0]["obs"][0])
        wanted = [row for row in expected if row[0] == episode and row[1] == agent]
        got = [
            (
                int(r["obs"][0]),
                r["obs"][2],
                r["obs"][1],
                r["new_obs"][1],
                float(r["rewards"]),
                bool(r["dones"]),
                int(r["t"]),
            )
            for r in of_agent
        ]
        assert got == wanted[: len(got)]
        for one, other in itertools.pairwise(of_agent):
            np.testing.assert_array_equal(one["new_obs"], other["obs"])
            np.testing.assert_array_equal(one["state_out_0"], other["state_in_0"])
            assert one["actions"] == other["prev_actions"]
            assert one["rewards"] == other["prev_rewards"]


def replay(episode):
    """Rows of a script, agent by agent, straight from the rules: (episode, agent, step, next step, reward, done, t)."""
    rows, last_seen, owed = [], {}, {}
    for step, scene in enumerate(episode):
        for agent, reward in scene.rewards.items():
            owed[agent] = owed.get(agent, 0.0) + reward
        for agent, obs in scene.obs.items():
            done = scene.terminateds.get(agent, False) or scene.terminateds["__all__"]
            if agent in last_seen:
                rows.append((int(obs[0]), agent, last_seen[agent], step, owed.get(agent, 0.0), done, step - 1))
            owed[agent] = 0.0
            last_seen[agent] = step
    return sorted(rows, key=lambda row: (row[1], row[2]))


def test_a_policy_that_gives_no_batch_back_is_named(make_sampler):
    class Forgetful(RecordingPolicy):
        def postprocess_trajectory(self, *args, **kwargs):
            return None

    with pytest.raises(PolicyError, match=r"'default_policy' \(Forgetful\) returned NoneType, expected a SampleBatch"):
        make_sampler(ScriptedEnv({0: [scenes(3)]}), Forgetful()).get_data()
