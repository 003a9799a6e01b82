"""The whole general sampler in one thread: rows, cuts, horizons, resets, metrics."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from gymnasium import spaces
from scripted_env import RecordingPolicy, Scene, ScriptedEnv, scenes

from aiorl.acting.filters import NoFilter
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.base_env import FinishedGame
from aiorl.errors import BadObservationError, BadRewardError, ConfigError, EnvError, PolicyError
from aiorl.sampling.callbacks import DefaultCallbacks
from benchmarks.acting_mlp import make_onnx_policy, mlp_weights


def single(*lengths, ends=True, **more) -> ScriptedEnv:
    """Return one environment with episodes of these lengths."""
    return ScriptedEnv(
        {0: [scenes(length, episode=n, ends=ends) for n, length in enumerate(lengths)]}, **more
    )


def ob(*numbers):
    return np.array(numbers, np.float32)


class Spec:
    def __init__(self, limit):
        self.spec = type("S", (), {"max_episode_steps": limit})()


# --- rows ---


def test_r102_rows_around_suppressed_ones_are_separate_trajectories(make_sampler):
    """R102, R106: the value after a piece is that of its own last new_obs, not that of the next
    recorded row.
    """
    policy = make_onnx_policy(3, spaces.Discrete(2), 2, mlp_weights(3, 2))
    policy.config.update(postprocess="gae", postprocess_params={"gamma": 0.5, "lam": 0.0})
    script = scenes(8)
    for step in (3, 4, 6):
        script[step] = Scene(
            script[step].obs, script[step].rewards, infos={"agent0": {"training_enabled": False}}
        )
    seen = []

    class Note(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, original_batches, **kwargs):
            seen.append(postprocessed_batch["t"].tolist())

    batch = make_sampler(ScriptedEnv({0: [script]}), policy, callbacks=Note()).get_data()
    assert seen == [[0, 1], [4], [6, 7]]
    assert batch["t"].tolist() == [0, 1, 4, 6, 7]
    values = np.where(batch["terminateds"], 0.0, policy.values(batch["new_obs"]))
    np.testing.assert_allclose(batch["value_targets"], batch["rewards"] + 0.5 * values, rtol=1e-5)


# --- metrics ---


def test_metrics_are_available_with_the_batch_and_are_drained(make_sampler):
    """R76, R77, R91, R93."""
    sampler = make_sampler(single(3))
    sampler.get_data()
    (metrics,) = sampler.get_metrics()
    assert metrics.episode_length == 3
    assert metrics.episode_reward == 6.0
    assert metrics.agent_rewards == {("agent0", "default_policy"): 6.0}
    assert set(metrics.perf_stats) == {
        "mean_env_wait_ms",
        "mean_processing_ms",
        "mean_inference_ms",
    }
    assert sampler.get_metrics() == []


def test_only_the_newest_metrics_wait_for_a_caller_that_never_asks(make_sampler, monkeypatch):
    monkeypatch.setattr("aiorl.sampling.sampler.MAX_EPISODES", 2)
    sampler = make_sampler(single(3))
    for _ in range(5):
        sampler.get_data()
    assert [metrics.episode_length for metrics in sampler.get_metrics()] == [3, 3]


@pytest.mark.parametrize("games", [[], [FinishedGame(21.0, 900), FinishedGame(-3.0, 100)]])
def test_real_games_are_reported_instead_of_episodes_with_the_closing_episodes_metrics(
    make_sampler, games
):
    """R124, R125."""

    class Tag(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_metrics["tag"] = 7.0

    env = single(3)
    env.games = list(games)
    sampler = make_sampler(env, callbacks=Tag())
    sampler.get_data()
    metrics = sampler.get_metrics()
    assert [(m.episode_length, m.episode_reward) for m in metrics] == [
        (g.length, g.reward) for g in games
    ]
    assert all(m.custom_metrics == {"tag": 7.0} for m in metrics)


# --- laziness and hand-out ---


def test_outputs_are_handed_out_before_inference_so_that_new_weights_govern_the_next_action(
    make_sampler,
):
    """R68, R79."""
    policy = RecordingPolicy()
    env = single(10)
    sampler = make_sampler(env, policy, length=2)
    assert env.tape == []
    for number in range(4):
        policy.weights = float(number)
        sampler.get_data()
        assert env.tape[-1] == ("poll",), (
            "the actions at the observations polled are not chosen yet"
        )
    by_step = {int(obs[0, 1]): weights for obs, weights in policy.calls}
    assert by_step == {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 3.0, 7: 3.0}


def test_on_turn_can_raise_between_turns_without_a_loss(make_sampler):
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


# --- horizon ---


@pytest.mark.parametrize(
    ("horizon", "limit", "expected"),
    [(4, 10, 4), (None, 6, 6), (0, 6, 6), (math.inf, 6, 6), (3, "many", 3)],
)
def test_episodes_end_at_the_horizon_or_the_environments_limit(
    make_sampler, horizon, limit, expected
):
    """R80, R81, R82."""
    env = single(50, ends=False, unwrapped=[Spec(limit)])
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


def test_an_agents_last_action_is_remembered_through_any_number_of_soft_resets(make_sampler):
    """R84: even if its episode continues without it and the table grows in the meantime."""
    script = [
        Scene({"a": ob(0, 0, 0), "b": ob(0, 0, 0)}),
        *(Scene({"a": ob(0, step, 0)}) for step in range(1, 41)),
    ]
    callbacks, seen = DefaultCallbacks(), []
    callbacks.on_episode_step = lambda *, episode, **kwargs: seen.append(
        (int(episode.last_action_for("b")), int(episode.prev_action_for("b")))
    )
    policy = RecordingPolicy(act=lambda obs: np.full(len(obs), 2))
    sampler = make_sampler(
        ScriptedEnv({0: [script]}),
        policy,
        callbacks=callbacks,
        horizon=1,
        soft_horizon=True,
        no_done_at_end=True,
    )
    for _ in range(39):
        sampler.get_data()
    assert len(seen) == 39
    assert set(seen) == {(2, 0)}


# --- resets ---


def test_an_environment_that_cannot_be_reset_is_dropped_or_refused_with_a_horizon(make_sampler):
    """R123."""
    env = single(3, 2, can_be_reset=False)
    sampler = make_sampler(env)
    assert [sampler.get_data().count for _ in range(2)] == [3, 2]
    assert env.sent[-1].keys() == {"0+"}
    sampler = make_sampler(single(3, can_be_reset=False), horizon=5)
    assert sampler.get_data().count == 3
    with pytest.raises(ValueError, match="horizon"):
        sampler.get_data()


# --- several agents ---


def test_an_unknown_policy_id_is_named(make_sampler):
    """R113."""
    sampler = make_sampler(single(3), mapping=lambda agent: "unknown")
    with pytest.raises(ValueError, match=r"'unknown'.*'default_policy'"):
        sampler.get_data()
    with pytest.raises(ValueError, match="default_policy"):
        make_sampler(single(3), filters={"other": NoFilter()})


def test_observation_fn_must_return_a_dict(make_sampler):
    """R134."""
    with pytest.raises(ValueError, match=r"observation_fn.*list"):
        make_sampler(single(2), observation_fn=lambda agent_obs, **kwargs: [agent_obs]).get_data()


# --- actions ---


def test_a_policy_with_another_number_of_states_is_refused(make_sampler):
    """R115."""

    class Forgetful(RecordingPolicy):
        def compute_actions(self, *args, **kwargs):
            actions, states, extras = super().compute_actions(*args, **kwargs)
            return actions, [*states, np.zeros(1)], extras

    with pytest.raises(ValueError, match="'default_policy'"):
        make_sampler(single(2), Forgetful(recurrent=True)).get_data()


# --- faults ---


def test_a_bad_observation_names_environment_agent_and_step(make_sampler):
    script = scenes(3, agents=("a", "b"))
    script[2] = Scene({"a": script[2].obs["a"], "b": ob(0, np.nan, 0)})
    with pytest.raises(BadObservationError, match=r"'b'.*NaN") as caught:
        make_sampler(ScriptedEnv({0: [script]})).get_data()
    assert (caught.value.env_id, caught.value.vector_index, caught.value.step) == (
        "ScriptedEnv",
        0,
        2,
    )
    script[2] = Scene({"a": ob(1, 2), "b": script[1].obs["b"]})
    with pytest.raises(BadObservationError, match="'a'"):
        make_sampler(ScriptedEnv({0: [script]})).get_data()
    script[2] = Scene(script[1].obs, {"a": math.nan})
    with pytest.raises(BadRewardError):
        make_sampler(ScriptedEnv({0: [script]})).get_data()


def test_sampling_continues_after_an_error_of_poll(make_sampler):
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


def test_a_policy_that_returns_no_batch_is_named(make_sampler):
    class Forgetful(RecordingPolicy):
        def postprocess_trajectory(self, *args, **kwargs):
            return None

    with pytest.raises(PolicyError, match=r"'default_policy' \(Forgetful\).*NoneType.*SampleBatch"):
        make_sampler(ScriptedEnv({0: [scenes(3)]}), Forgetful()).get_data()
