"""Importance sampling and doubly robust estimation, with numbers worked out by hand and with
general properties.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from aiorl.offline.estimators import Ratios, Trajectories, bootstrap_means, interval_of

EXACT = {"rel": 1e-9, "abs": 1e-9}


def of(rewards, lengths, gamma=0.5):
    return Trajectories(np.array(rewards, np.float64), np.array(lengths), gamma)


def two_episodes(**options):
    """Return three steps with ratios 2, 1/4, 3 (so p = 2, 1/2, 3/2), then one with ratio 4 (O2)."""
    return Ratios(of([1.0, 4.0, 8.0, 3.0], [3, 1]), np.log([2.0, 0.25, 3.0, 4.0]), **options)


def test_ordinary_and_per_decision_values_match_hand_worked_numbers():
    """O2: G = 1 + 2 + 2 = 5 and 3."""
    ratios = two_episodes()
    assert ratios.of.returns == pytest.approx([5.0, 3.0], **EXACT)
    assert ratios.ratios == pytest.approx([2.0, 0.5, 1.5, 4.0], **EXACT)
    assert ratios.ordinary() == pytest.approx([1.5 * 5, 4 * 3], **EXACT)
    assert ratios.per_decision() == pytest.approx([2 + 0.5 * 2 + 1.5 * 2, 12], **EXACT)


def test_a_weighted_value_counts_episodes_that_have_ended_with_their_last_ratio():
    """O2: means 6/2, then (1/2 + 4)/2 and (3/2 + 4)/2."""
    ratios = two_episodes()
    weights = [2 / 3, 0.5 / 2.25, 1.5 / 2.75, 4 / 3]
    assert ratios.weights() == pytest.approx(weights, **EXACT)
    assert ratios.weighted() == pytest.approx([2 / 3 + 2 * weights[1] + 2 * weights[2], 4], **EXACT)


def test_doubly_robust_values_match_hand_worked_numbers():
    """O2: terms r + g V' - Q of 1+.5*2-1, 4+.5*4-3, 8-5 and 3-2, on V = 6 and 7."""
    q, v, v_next = np.array([1.0, 3, 5, 2]), np.array([6.0, 2, 4, 7]), np.array([2.0, 4, 0, 0])
    values = two_episodes().doubly_robust(q, v, v_next)
    assert values == pytest.approx([6 + 2 * 1 + 0.5 * 0.5 * 3 + 0.25 * 1.5 * 3, 7 + 4 * 1], **EXACT)


def test_the_effective_sample_size_is_kishs_and_clipped_ratios_are_counted():
    """O2: last ratios 3/2 and 4."""
    ratios = two_episodes()
    assert ratios.effective_sample_size == pytest.approx(5.5**2 / (1.5**2 + 16), **EXACT)
    assert (ratios.num_clipped_episodes, ratios.is_clipped.sum()) == (0, 0)
    clipped = two_episodes(clip=1.0)
    assert clipped.ratios == pytest.approx([1, 0.5, 1, 1], **EXACT)
    assert clipped.is_clipped.tolist() == [True, False, True, True]
    assert clipped.num_clipped_episodes == 2
    assert two_episodes(clip=4.0).num_clipped_episodes == 0, (
        "a ratio equal to the limit is not above it"
    )


def test_infinite_ratios_and_ratios_of_zero_stay_finite():
    hot = Ratios(of([1.0, 1.0], [2]), np.array([600.0, 600.0]))
    assert np.isfinite(hot.ordinary()).all()
    assert (hot.effective_sample_size, hot.num_clipped_episodes) == (pytest.approx(1.0), 1)
    cold = Ratios(of([1.0, 1.0, 1.0], [2, 1]), np.array([0.0, -np.inf, -np.inf]))
    assert cold.per_decision().tolist() == [1.0, 0.0]
    assert cold.effective_sample_size == 0.0
    assert cold.weighted() == pytest.approx([2.0, 0.0])
    assert np.isfinite(cold.bootstrap_weighted(50, 1)).all()


lengths = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@st.composite
def ratios(draw, clip=None):
    episode_lengths = draw(lengths)
    numbers = st.floats(-3, 3)
    rows = sum(episode_lengths)
    rewards = draw(st.lists(numbers, min_size=rows, max_size=rows))
    logs = draw(st.lists(numbers, min_size=rows, max_size=rows))
    return Ratios(
        of(rewards, episode_lengths, draw(st.floats(0.1, 1.0))), np.array(logs), clip=clip
    )


@given(ratios())
def test_an_equal_policy_has_the_return_of_the_episodes(drawn):
    same = Ratios(drawn.of, np.zeros(len(drawn.ratios)))
    for values in (same.ordinary(), same.per_decision(), same.weighted()):
        np.testing.assert_allclose(values, drawn.of.returns, rtol=1e-9, atol=1e-9)
    assert same.effective_sample_size == pytest.approx(len(drawn.of))


@given(ratios())
def test_weights_of_a_step_and_of_finished_episodes_add_up_to_the_number_of_episodes(drawn):
    played, weights = drawn.of, drawn.weights()
    for step in range(int(played.lengths.max())):
        at = played.steps == step
        if not at.any():
            continue
        mean = (drawn.ratios[at] / weights[at])[0]
        ended = drawn.last[played.lengths <= step].sum() / mean
        assert weights[at].sum() + ended == pytest.approx(len(played))


@given(ratios())
def test_without_a_model_doubly_robust_is_per_decision_and_the_sample_size_is_bounded(drawn):
    nothing = np.zeros(len(drawn.ratios))
    np.testing.assert_allclose(
        drawn.doubly_robust(nothing, nothing, nothing), drawn.per_decision(), atol=1e-9
    )
    assert 1 - 1e-9 <= drawn.effective_sample_size <= len(drawn.of) + 1e-9


@given(ratios())
def test_an_exact_model_of_a_deterministic_world_leaves_no_variance(drawn):
    """Q is the reward plus the next value, so the terms weighted by ratios are 0."""
    played = drawn.of
    v = np.zeros(len(played.rewards))
    for start, length in zip(played.starts, played.lengths, strict=True):
        for row in reversed(range(start, start + length)):
            v[row] = played.rewards[row] + (
                played.gamma * v[row + 1] if row + 1 < start + length else 0.0
            )
    v_next = np.where(np.append(played.steps[1:], 0) > 0, np.append(v[1:], 0.0), 0.0)
    np.testing.assert_allclose(drawn.doubly_robust(v, v, v_next), played.returns, atol=1e-9)


def test_a_bootstrap_equals_a_plain_loop_and_repeats_for_a_seed(monkeypatch):
    rng = np.random.default_rng(4)
    episode_lengths = rng.integers(1, 6, 40)
    sampled = Ratios(
        of(rng.normal(1, 1, episode_lengths.sum()), episode_lengths, 0.9),
        rng.normal(0, 0.3, episode_lengths.sum()),
    )
    # so that tables have several blocks
    monkeypatch.setattr("aiorl.offline.estimators.MAX_BLOCK", 120)
    estimates = sampled.bootstrap_weighted(300, 7)
    np.testing.assert_array_equal(estimates, sampled.bootstrap_weighted(300, 7))
    assert not np.array_equal(estimates, sampled.bootstrap_weighted(300, 8))
    drawn, at_once, plain = np.random.default_rng(7), 3, []
    for _ in range(300 // at_once):
        for picked in drawn.integers(40, size=(at_once, 40)):
            rows = [
                np.arange(sampled.of.starts[i], sampled.of.starts[i] + episode_lengths[i])
                for i in picked
            ]
            log = np.concatenate(
                [
                    np.diff(np.log(sampled.ratios[rows_of_episode]), prepend=0.0)
                    for rows_of_episode in rows
                ]
            )
            part = Ratios(
                of(sampled.of.rewards[np.concatenate(rows)], episode_lengths[picked], 0.9), log
            )
            plain.append(part.weighted().mean())
    np.testing.assert_allclose(estimates, plain, rtol=1e-9)


def test_the_interval_of_a_mean_matches_its_standard_error():
    values = np.random.default_rng(0).normal(5.0, 2.0, 400)
    low, high = interval_of(bootstrap_means(values, 4000, 1))
    assert low == pytest.approx(values.mean() - 1.96 * values.std() / 20, abs=0.02)
    assert high == pytest.approx(values.mean() + 1.96 * values.std() / 20, abs=0.02)
