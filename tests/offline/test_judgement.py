"""Five estimators, compared with exact values of a world with a small number of trajectories."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from gymnasium import spaces
from layered_world import NEW, OLD, play, table_policy, true_q, true_value, value_of

from aiorl.acting.policy import Policy
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import BatchError, ConfigError, PolicyError
from aiorl.offline.estimators import Ratios, Trajectories
from aiorl.offline.estimators.judgement import METHODS, judge

GAMMA = Fraction(4, 5)


class Coin(Policy):
    """Policy that takes action 1 with the observation as probability."""

    def __init__(self):
        super().__init__(spaces.Box(0, 1, (1,)), spaces.Discrete(2), {})

    def compute_actions(self, obs, state_batches=(), *args, **kwargs):
        raise NotImplementedError

    def compute_log_likelihoods(
        self, actions, obs, state_batches, prev_action_batch, prev_reward_batch
    ):
        return np.log(np.where(actions == 1, obs[:, 0], 1 - obs[:, 0]))


def test_estimates_equal_the_sum_over_all_trajectories_within_three_standard_errors():
    """O2: 10 data sets of 300 episodes."""
    rng = np.random.default_rng(1)
    judgements = [
        judge(table_policy(NEW), play(OLD, 300, rng), gamma=0.8, num_resamples=0, seed=number)
        for number in range(10)
    ]
    truth = float(true_value(NEW, GAMMA))
    assert abs(truth - float(true_value(OLD, GAMMA))) > 0.3, "the policies have different returns"
    for name in METHODS:
        values = np.array([judgement.estimates[name].value for judgement in judgements])
        error = values.std(ddof=1) / np.sqrt(len(values))
        assert abs(values.mean() - truth) < 3 * error, name
        assert error < 0.15, name
    v_prev = np.array([judgement.v_prev for judgement in judgements])
    assert abs(v_prev.mean() - float(true_value(OLD, GAMMA))) < 3 * v_prev.std(ddof=1) / np.sqrt(
        len(v_prev)
    )
    spread = {
        name: np.std([judgement.estimates[name].value for judgement in judgements])
        for name in METHODS
    }
    assert spread["dr"] < spread["pdis"] < spread["is"], "each reduces the variance further"


def test_with_an_exact_q_the_spread_of_doubly_robust_is_that_of_the_world():
    """O2: with Q in closed form, only the randomness of the world is left, weighted with ratios."""
    episodes = play(OLD, 4000, np.random.default_rng(3))
    q = true_q(NEW, GAMMA)
    states = np.concatenate([episode["obs"].argmax(1) for episode in episodes])
    actions, rewards, logp = (
        np.concatenate([episode[name] for episode in episodes])
        for name in ("actions", "rewards", "action_logp")
    )
    of = Trajectories(
        rewards.astype(np.float64), np.array([episode.count for episode in episodes]), 0.8
    )
    new = np.log(
        [float(NEW[s] if a == 0 else 1 - NEW[s]) for s, a in zip(states, actions, strict=True)]
    )
    ratios = Ratios(of, new - logp)
    v = np.array([float(value_of(NEW, q, state)) for state in states])
    last = np.append(of.steps[1:] == 0, True)
    values = ratios.doubly_robust(
        np.array([float(q[pair]) for pair in zip(states.tolist(), actions.tolist(), strict=True)]),
        v,
        np.where(last, 0.0, np.append(v[1:], 0.0)),
    )
    error = values.std() / np.sqrt(len(values))
    assert abs(values.mean() - float(true_value(NEW, GAMMA))) < 3 * error
    assert values.std() < ratios.per_decision().std()


def test_a_fitted_q_is_exact_if_states_can_be_distinguished():
    episodes = play(OLD, 2000, np.random.default_rng(5))
    judgement = judge(table_policy(OLD), episodes, methods=["dm"], gamma=0.8, num_resamples=0)
    assert judgement.fitted_q is not None
    assert judgement.fitted_q.has_converged
    assert judgement.estimates["dm"].value == pytest.approx(judgement.v_prev, abs=0.02), (
        "the same policy"
    )
    assert judgement.effective_sample_size is None, "there are no ratios"


def test_equal_seeds_give_equal_numbers_and_intervals_contain_the_truth():
    episodes = play(OLD, 300, np.random.default_rng(6))
    first, same, other = (
        judge(table_policy(NEW), episodes, gamma=0.8, num_resamples=200, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first.to_dict() == same.to_dict()
    assert first.to_dict() != other.to_dict()
    truth = float(true_value(NEW, GAMMA))
    for name in ("is", "wis", "pdis", "dr"):
        low, high = first.estimates[name].interval
        assert low < truth < high, name
        assert low < first.estimates[name].value < high, name
    assert first.v_prev_interval[0] < first.v_prev < first.v_prev_interval[1]


def test_impossible_and_missing_probabilities_are_refused_with_their_rows():
    episodes = play(OLD, 5, np.random.default_rng(9))
    episodes[3]["action_logp"] = episodes[3]["action_logp"].copy()
    episodes[3]["action_logp"][0] = np.nan
    with pytest.raises(BatchError, match=r"'action_logp'.* 0: nan .*3"):
        judge(table_policy(NEW), episodes)
    for episode in episodes:
        del episode["action_logp"]
    with pytest.raises(BatchError, match="action_prob"):
        judge(table_policy(NEW), episodes)
    assert (
        judge(table_policy(NEW), episodes, methods=["dm"]).estimates["dm"].interval is not None
    ), "dm needs no probabilities"


def test_actions_and_observations_of_other_spaces_are_refused():
    episodes = play(OLD, 3, np.random.default_rng(2))
    episodes[1]["actions"] = episodes[1]["actions"] - 1
    with pytest.raises(BatchError, match=r"Discrete\(2\).*: -1.* 1"):
        judge(table_policy(NEW), episodes)
    wide = play(OLD, 1, np.random.default_rng(2))
    wide[0]["obs"] = wide[0]["obs"][:, :3]
    with pytest.raises(BatchError, match=r"\(5,\)"):
        judge(table_policy(NEW), wide)
    undefined = play(OLD, 1, np.random.default_rng(2))
    undefined[0]["obs"] = undefined[0]["obs"] * np.nan
    with pytest.raises(BatchError, match="obs"):
        judge(table_policy(NEW), undefined)


def test_invalid_arguments_are_refused():
    policy, episodes = table_policy(NEW), play(OLD, 3, np.random.default_rng(2))
    invalid = {"methods": [["magic"], []], "gamma": [1.5], "clip": [0.0], "num_resamples": [-1]}
    for name, value in ((name, value) for name, values in invalid.items() for value in values):
        with pytest.raises(ConfigError) as caught:
            judge(policy, episodes, **{name: value})
        assert caught.value.key == {"num_resamples": "bootstrap"}.get(name, name)
    with pytest.raises(ConfigError):
        judge(policy, [])
    with pytest.raises(BatchError, match="MultiAgentBatch"):
        judge(policy, [MultiAgentBatch({"a": episodes[0]}, 1)])


def test_values_continue_after_a_cut_unless_it_counts_as_an_end():
    """A reward of 1 forever, cut after three steps: 1 / (1 - 0.5) with the value after the cut,
    1.75 without.
    """
    still = np.tile(np.eye(5, dtype=np.float32)[0], (3, 1))
    columns = {
        "obs": still,
        "new_obs": still,
        "rewards": np.ones(3, np.float32),
        "action_logp": np.log([0.5, 0.5, 0.5]),
        "terminateds": np.zeros(3, bool),
        "dones": np.arange(3) == 2,
    }
    all_ways = list(itertools.product((0, 1), repeat=3))  # equally likely
    episodes = [SampleBatch(columns, actions=np.array(actions)) for actions in all_ways * 10]
    policy = table_policy(OLD)
    on = judge(policy, episodes, gamma=0.5, num_resamples=0)
    assert on.estimates["dm"].value == pytest.approx(2.0, abs=1e-3)
    assert on.estimates["dr"].value == pytest.approx(2.0, abs=1e-3)
    assert on.v_prev == 1.75
    assert on.estimates["is"].value == pytest.approx(1.75)
    end = judge(policy, episodes, gamma=0.5, num_resamples=0, cut_is_end=True)
    assert 1.0 < end.estimates["dm"].value < 1.75, (
        "after a third of the equal states, the value is 0"
    )
    assert end.estimates["dr"].value == pytest.approx(1.75, abs=0.05)
    with pytest.raises(ConfigError, match="gamma"):
        judge(policy, episodes, gamma=1.0)
    assert judge(policy, episodes, gamma=1.0, cut_is_end=True).estimates[
        "is"
    ].value == pytest.approx(3.0)
    for episode in episodes:
        del episode["new_obs"]
    with pytest.raises(BatchError, match="new_obs"):
        judge(policy, episodes, gamma=0.5)
    assert judge(policy, episodes, gamma=0.5, cut_is_end=True).num_episodes == 80


def test_a_users_own_policy_is_judged_by_its_likelihoods_but_not_by_a_model():
    episode = SampleBatch(
        obs=np.array([[0.5], [0.25]]),
        actions=np.ones(2, np.int64),
        rewards=np.array([1.0, 4.0]),
        action_prob=np.array([0.25, 0.5]),
        dones=np.array([False, True]),
    )
    judgement = judge(Coin(), [episode], methods=["is", "pdis"], gamma=0.5)
    assert judgement.estimates["pdis"].value == pytest.approx(4.0)
    assert judgement.estimates["is"].value == pytest.approx(3.0)
    with pytest.raises(PolicyError, match="Coin"):
        judge(Coin(), [episode], methods=["dm"])
