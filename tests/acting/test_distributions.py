"""NumPy distributions against formulas written out in Python, and against what is sampled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.acting.distributions import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    MASKED_LOGIT,
    Bernoulli,
    Categorical,
    DiagGaussian,
    Greedy,
    MultiCategorical,
    SquashedGaussian,
    TwoClassCategorical,
    make_distribution,
    make_named_distribution,
)
from aiorl.data.obs_layout import MaskLayout
from aiorl.errors import ConfigError, PolicyError, UnsupportedSpaceError

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
SPACES = [
    (spaces.Discrete(2), False),
    (spaces.Discrete(2, start=5), False),
    (spaces.Discrete(1), False),
    (spaces.Discrete(7, start=-3), False),
    (spaces.MultiDiscrete([3, 2, 4]), False),
    (spaces.MultiDiscrete(np.array([[3, 3], [3, 3]]), start=np.array([[0, 1], [2, 3]])), False),
    (spaces.MultiBinary(3), False),
    (spaces.MultiBinary((2, 2)), False),
    (BOX, False),
    (BOX, True),
    (spaces.Box(-1.0, 1.0, (2, 2), np.float64), False),
    (spaces.Box(-1.0, 1.0, (), np.float32), True),
]


def inputs_of(distribution, rows=5, seed=0, scale=1.5):
    return (scale * np.random.default_rng(seed).standard_normal((rows, distribution.num_inputs))).astype(np.float32)


@pytest.mark.parametrize(("space", "squash"), SPACES, ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_actions_belong_to_their_space_in_dtype_and_shape(space, squash, rows):
    distribution = make_distribution(space, squash=squash)
    rng = np.random.default_rng(1)
    inputs = inputs_of(distribution, rows)
    noise = distribution.draw_noise(rng, 3, rows)
    assert noise.dtype == np.float32
    assert noise.shape == (3, rows, distribution.noise_size)
    actions, logp = distribution.sample_with_logp(inputs, noise[0])
    for batch in (actions, distribution.deterministic(inputs), distribution.sample(inputs, rng)):
        assert batch.dtype == space.dtype
        assert batch.shape == (rows, *space.shape)
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) or squash:
            assert all(space.contains(np.asarray(action)) for action in batch)
    for figure in (logp, distribution.entropy(inputs), distribution.kl(inputs, inputs)):
        assert figure.dtype == np.float32
        assert figure.shape == (rows,)


@pytest.mark.parametrize(("space", "squash"), SPACES, ids=str)
def test_the_same_noise_gives_the_same_bits(space, squash):
    distribution = make_distribution(space, squash=squash)
    inputs = inputs_of(distribution)
    noise = [distribution.draw_noise(np.random.default_rng(7), 5) for _ in range(2)]
    np.testing.assert_array_equal(*noise)
    first, second = (distribution.sample_with_logp(inputs, drawn) for drawn in noise)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize(("space", "squash"), SPACES, ids=str)
def test_logp_of_a_sample_is_the_one_it_came_with(space, squash):
    distribution = make_distribution(space, squash=squash)
    inputs = inputs_of(distribution, rows=200)
    untouched = inputs.copy()
    actions, logp = distribution.sample_with_logp(inputs, distribution.draw_noise(np.random.default_rng(2), 200))
    np.testing.assert_allclose(distribution.logp(inputs, actions), logp, rtol=1e-4, atol=2e-4)
    np.testing.assert_array_equal(inputs, untouched)


@pytest.mark.parametrize(("space", "squash"), SPACES, ids=str)
def test_kl_is_0_to_itself_and_positive_to_another(space, squash):
    distribution = make_distribution(space, squash=squash)
    inputs, other = inputs_of(distribution), inputs_of(distribution, seed=1)
    np.testing.assert_allclose(distribution.kl(inputs, inputs), 0.0, atol=1e-6)
    if distribution.num_inputs > 1:
        assert (distribution.kl(inputs, other) > 1e-3).all()


def probabilities(logits):
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6), st.integers(0, 2**32 - 1), st.integers(-4, 4))
def test_categorical_agrees_with_plain_python(logits, seed, start):
    distribution = make_distribution(spaces.Discrete(len(logits), start=start))
    other = list(np.random.default_rng(seed).standard_normal(len(logits)))
    p, q = probabilities(logits), probabilities(other)
    rows = np.array([logits] * len(logits), np.float32)
    actions = np.arange(start, start + len(logits))
    np.testing.assert_allclose(distribution.logp(rows, actions), np.log(p), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(rows)[0], -sum(x * math.log(x) for x in p), rtol=1e-4, atol=1e-5)
    others = np.array([other], np.float32)
    expected = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    np.testing.assert_allclose(distribution.kl(rows[:1], others)[0], expected, rtol=1e-4, atol=1e-5)
    assert distribution.deterministic(rows)[0] == start + int(np.argmax(rows[0]))


@pytest.mark.parametrize("actions", [2, 3, 5])
def test_categorical_samples_come_as_often_as_they_should(actions):
    distribution = make_distribution(spaces.Discrete(actions))
    logits = inputs_of(distribution, rows=1, seed=actions)
    rows = 200_000
    drawn = distribution.sample(np.repeat(logits, rows, axis=0), np.random.default_rng(0))
    share = np.bincount(drawn, minlength=actions) / rows
    np.testing.assert_allclose(share, probabilities(logits[0].tolist()), atol=5 * 0.5 / math.sqrt(rows))


@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.Discrete(3), spaces.MultiDiscrete([2, 3])], ids=str)
def test_extreme_logits_stay_finite_and_choose_the_certain_action(space):
    distribution = make_distribution(space)
    inputs = np.full((2, distribution.num_inputs), -1e4, np.float32)
    inputs[:, 1] = 1e4
    if isinstance(space, spaces.MultiDiscrete):
        inputs[:, 4] = 1e4
    actions, logp = distribution.sample_with_logp(inputs, distribution.draw_noise(np.random.default_rng(0), 2))
    np.testing.assert_array_equal(actions, distribution.deterministic(inputs))
    np.testing.assert_allclose(logp, 0.0, atol=1e-6)
    np.testing.assert_allclose(distribution.entropy(inputs), 0.0, atol=1e-6)
    unlikely = np.zeros((2, *distribution.action_shape), np.int64)
    assert np.isfinite(distribution.logp(inputs, unlikely)).all()


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=9),
    uniform=st.one_of(st.floats(0, 1, width=32, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-24])),
)
def test_inversion_chooses_an_action_that_has_probability_for_every_uniform_number(logits, uniform):
    distribution = make_distribution(spaces.Discrete(len(logits)))
    rows = np.array([logits], np.float32)
    actions, logp = distribution.sample_with_logp(rows, np.array([[uniform]], np.float32))
    assert 0 <= actions[0] < len(logits)
    assert np.exp(rows[0, actions[0]] - rows.max()) > 0
    assert np.isfinite(logp[0])


def test_a_masked_action_is_never_chosen():
    distribution = make_distribution(spaces.Discrete(3))
    inputs = np.array([[0.0, -np.inf, 0.0]] * 1000, np.float32)
    actions, logp = distribution.sample_with_logp(inputs, distribution.draw_noise(np.random.default_rng(0), 1000))
    assert set(actions) == {0, 2}
    np.testing.assert_allclose(logp, math.log(0.5), rtol=1e-6)


def test_two_classes_give_the_numbers_of_the_general_case():
    space = spaces.Discrete(2, start=3)
    fast, general = make_distribution(space), Categorical(space)
    assert isinstance(fast, TwoClassCategorical)
    inputs = inputs_of(fast, rows=100, scale=4.0)
    actions, logp = fast.sample_with_logp(inputs, fast.draw_noise(np.random.default_rng(0), 100))
    assert set(actions) == {3, 4}
    np.testing.assert_allclose(logp, general.logp(inputs, actions), rtol=1e-5, atol=1e-6)


def test_multi_categorical_is_the_sum_of_its_components():
    space = spaces.MultiDiscrete([3, 2, 4], start=[0, 1, 2])
    distribution = make_distribution(space)
    inputs, other = inputs_of(distribution), inputs_of(distribution, seed=1)
    actions, logp = distribution.sample_with_logp(inputs, distribution.draw_noise(np.random.default_rng(0), 5))
    parts = [Categorical(spaces.Discrete(int(n), start=s)) for n, s in zip([3, 2, 4], [0, 1, 2], strict=True)]
    cuts = [slice(0, 3), slice(3, 5), slice(5, 9)]

    def total(method):
        return sum(method(part, cut, column) for column, (part, cut) in enumerate(zip(parts, cuts, strict=True)))

    np.testing.assert_allclose(logp, total(lambda p, cut, i: p.logp(inputs[:, cut], actions[:, i])), rtol=1e-5)
    np.testing.assert_allclose(
        distribution.entropy(inputs), total(lambda p, cut, i: p.entropy(inputs[:, cut])), rtol=1e-5
    )
    np.testing.assert_allclose(
        distribution.kl(inputs, other), total(lambda p, cut, i: p.kl(inputs[:, cut], other[:, cut])), rtol=1e-5
    )
    best = np.stack([p.deterministic(inputs[:, cut]) for p, cut in zip(parts, cuts, strict=True)], axis=1)
    np.testing.assert_array_equal(distribution.deterministic(inputs), best)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_diagonal_gaussian_agrees_with_plain_python(seed):
    distribution = make_distribution(spaces.Box(-1.0, 1.0, (3,)))
    inputs, other = inputs_of(distribution, 1, seed), inputs_of(distribution, 1, seed + 1)
    actions = np.random.default_rng(seed).standard_normal((1, 3)).astype(np.float32)
    logp = entropy = kl = 0.0
    for i in range(3):
        mean, std = float(inputs[0, i]), math.exp(min(float(inputs[0, 3 + i]), LOG_STD_MAX))
        mean2, std2 = float(other[0, i]), math.exp(min(float(other[0, 3 + i]), LOG_STD_MAX))
        logp -= 0.5 * ((float(actions[0, i]) - mean) / std) ** 2 + math.log(std * math.sqrt(2 * math.pi))
        entropy += 0.5 * math.log(2 * math.pi * math.e * std**2)
        kl += math.log(std2 / std) + (std**2 + (mean - mean2) ** 2) / (2 * std2**2) - 0.5
    np.testing.assert_allclose(distribution.logp(inputs, actions)[0], logp, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(distribution.entropy(inputs)[0], entropy, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distribution.kl(inputs, other)[0], kl, rtol=1e-4, atol=1e-4)


def test_gaussian_samples_have_the_mean_and_deviation_they_should():
    distribution = make_distribution(spaces.Box(-1.0, 1.0, (2,)))
    inputs = np.array([[1.0, -2.0, math.log(0.5), math.log(3.0)]] * 100_000, np.float32)
    drawn = distribution.sample(inputs, np.random.default_rng(0))
    np.testing.assert_allclose(drawn.mean(axis=0), [1.0, -2.0], atol=0.05)
    np.testing.assert_allclose(drawn.std(axis=0), [0.5, 3.0], rtol=0.02)


@pytest.mark.parametrize("squash", [False, True])
def test_deviations_are_clamped_on_both_sides(squash):
    distribution = make_distribution(spaces.Box(-1.0, 1.0, (1,)), squash=squash)
    for given_log_std, clamped in ((-500.0, LOG_STD_MIN), (500.0, LOG_STD_MAX)):
        inputs, limits = (np.array([[0.3, value]], np.float32) for value in (given_log_std, clamped))
        noise = np.array([[0.7]], np.float32)
        for mine, theirs in zip(
            distribution.sample_with_logp(inputs, noise), distribution.sample_with_logp(limits, noise), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        assert np.isfinite(distribution.entropy(inputs)).all()


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-0.4, 0.5), (1.5, -0.5)])
def test_squashed_density_integrates_to_1_and_its_entropy_is_the_integral(mean, log_std):
    space = spaces.Box(-3.0, 1.0, (1,))
    distribution = make_distribution(space, squash=True)
    # a fine grid in u = atanh(y), mapped to actions: dense where the density is steep
    u = np.linspace(-9.0, 9.0, 200_001)
    actions = (-3.0 + 4.0 * (np.tanh(u) + 1.0) / 2.0)[:, None]
    inside = (actions[:, 0] > -3.0 + 1e-5) & (actions[:, 0] < 1.0 - 1e-5)
    inputs = np.repeat(np.array([[mean, log_std]], np.float32), len(u), axis=0)
    logp = distribution.logp(inputs, actions)[inside].astype(np.float64)
    width = np.gradient(actions[inside, 0])
    assert (np.exp(logp) * width).sum() == pytest.approx(1.0, abs=2e-3)
    entropy = -(np.exp(logp) * logp * width).sum()
    assert distribution.entropy(inputs[:1])[0] == pytest.approx(entropy, abs=5e-3)


def test_squashed_actions_keep_their_bounds_and_a_finite_density_far_out():
    distribution = make_distribution(BOX, squash=True)
    for mean in (-1e4, -30.0, 30.0, 1e4):
        inputs = np.array([[mean, mean, 0.0, 0.0]], np.float32)
        actions, logp = distribution.sample_with_logp(inputs, np.zeros((1, 2), np.float32))
        assert BOX.contains(actions[0])
        assert np.isfinite(logp).all()
        np.testing.assert_array_equal(distribution.logp(inputs, actions), logp)
    for bound in (BOX.low, BOX.high, BOX.high + 1.0):
        assert np.isfinite(distribution.logp(inputs, bound[None])).all()


def test_squashed_logp_near_a_bound_agrees_with_exact_arithmetic():
    distribution = make_distribution(spaces.Box(0.0, 1.0, (1,)), squash=True)
    action = np.float32(1e-5)
    p = float(action)
    u = 0.5 * (math.log(p) - math.log1p(-p))
    expected = -0.5 * (u + 4.0) ** 2 - 0.5 * math.log(2 * math.pi) - math.log(2 * p * (1 - p))
    inputs = np.array([[-4.0, 0.0]], np.float32)
    assert distribution.logp(inputs, np.array([[action]]))[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("log_std", [-4.0, 0.0, 2.0])
@pytest.mark.parametrize("mean", [0.0, 0.5, -6.0])
def test_the_entropy_of_squashed_actions_is_exact_for_all_deviations(mean, log_std):
    distribution = make_distribution(spaces.Box(-3.0, 1.0, (1,)), squash=True)
    z = np.linspace(-10.0, 10.0, 200_001)
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    u = np.abs(mean + math.exp(log_std) * z)
    slope = 2.0 * (math.log(2.0) - u - np.log1p(np.exp(-2.0 * u))) + math.log(2.0)
    expected = 0.5 * math.log(2.0 * math.pi * math.e) + log_std + (density * slope).sum() * (z[1] - z[0])
    found = distribution.entropy(np.array([[mean, log_std]], np.float32))[0]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("space", "squash"),
    [
        (spaces.Box(0, 10, (2,), np.int32), False),
        (spaces.Box(-np.inf, 1.0, (1,)), True),
        (spaces.Tuple([spaces.Box(0, 10, (2,), np.int32)]), False),
        (spaces.Text(2), False),
    ],
    ids=str,
)
def test_a_space_without_a_distribution_is_named_in_the_error(space, squash):
    with pytest.raises(UnsupportedSpaceError, match="not supported; supported here"):
        make_distribution(space, squash=squash)


def test_a_squashed_component_without_room_is_refused():
    with pytest.raises(ConfigError, match="without room"):
        make_distribution(spaces.Box(np.zeros(2), np.array([1.0, 0.0]), dtype=np.float64), squash=True)


@pytest.mark.parametrize("start", [0, -3])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (5, 64)])
def test_log_probabilities_asked_for_later_are_those_of_sampling_to_the_bit(start, shape):
    """H3: in lockstep they are computed once a fragment."""
    distribution = TwoClassCategorical(spaces.Discrete(2, start=start))
    assert distribution.logp_is_apart
    rng = np.random.default_rng(0)
    inputs = (10 * rng.standard_normal((*shape, 2))).astype(np.float32)
    noise = distribution.draw_noise(rng, *shape)
    actions, again = np.zeros((2, *shape), np.int64)
    logp = np.zeros(shape, np.float32)
    for t in range(shape[0]):
        distribution.sample_into(inputs[t], noise[t], actions[t], logp[t])
        distribution.choose_into(inputs[t], noise[t], again[t])
    np.testing.assert_array_equal(actions, again)
    later = distribution.logp(inputs.reshape(-1, 2), actions.reshape(-1))
    np.testing.assert_array_equal(logp, later.reshape(shape))


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(3)], ids=str)
def test_actions_alone_are_those_of_sampling(space):
    distribution = make_distribution(space)
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((6, distribution.num_inputs)).astype(np.float32)
    noise = distribution.draw_noise(rng, 6)
    alone = np.zeros((6, *distribution.action_shape), distribution.action_dtype)
    distribution.choose_into(inputs, noise, alone)
    np.testing.assert_array_equal(alone, distribution.sample_with_logp(inputs, noise)[0])


@pytest.mark.parametrize(
    "kind", [Categorical, TwoClassCategorical, MultiCategorical, Bernoulli, DiagGaussian, SquashedGaussian]
)
def test_a_distribution_over_a_space_of_another_kind_is_refused(kind):
    with pytest.raises(UnsupportedSpaceError):
        kind(spaces.Text(2))


def test_two_classes_are_not_three():
    with pytest.raises(UnsupportedSpaceError):
        TwoClassCategorical(spaces.Discrete(3))


def test_distributions_are_made_by_name():
    assert isinstance(make_named_distribution("squashed_gaussian", BOX), SquashedGaussian)
    assert isinstance(make_named_distribution("categorical", spaces.Discrete(2)), TwoClassCategorical)
    with pytest.raises(PolicyError, match="known: bernoulli, categorical"):
        make_named_distribution("beta", BOX)


def test_the_greedy_action_is_certain_and_the_others_never_come():
    greedy = Greedy(spaces.Discrete(3, start=2))
    inputs = np.array([[1.0, 3.0, 2.0], [4.0, MASKED_LOGIT, 4.0]], np.float32)
    actions, logp = greedy.sample_with_logp(inputs, greedy.draw_noise(np.random.default_rng(0), 2))
    assert (actions.tolist(), logp.tolist()) == ([3, 2], [0.0, 0.0])
    assert greedy.logp(inputs, np.array([2, 2])).tolist() == [np.float32(MASKED_LOGIT), 0.0]
    assert greedy.probabilities(inputs).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert greedy.entropy(inputs).tolist() == [0.0, 0.0]
    assert greedy.kl(inputs, inputs[::-1]).tolist() == [-np.float32(MASKED_LOGIT)] * 2
    assert greedy.kl(inputs, inputs).tolist() == [0.0, 0.0]


def test_bits_by_numpys_own_formulas():
    """A bit is 1 with the probability 1 / (1 + exp(-logit)), each on its own."""
    distribution = make_distribution(spaces.MultiBinary(3))
    inputs, other = inputs_of(distribution, 200), inputs_of(distribution, 200, seed=1)
    p, q = (1 / (1 + np.exp(-logits.astype(np.float64))) for logits in (inputs, other))
    actions = distribution.sample(inputs, np.random.default_rng(2))
    wanted = np.where(actions == 1, np.log(p), np.log(1 - p)).sum(axis=1)
    np.testing.assert_allclose(distribution.logp(inputs, actions), wanted, rtol=1e-5, atol=1e-5)
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).sum(axis=1)
    np.testing.assert_allclose(distribution.entropy(inputs), entropy, rtol=1e-5, atol=1e-5)
    kl = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(axis=1)
    np.testing.assert_allclose(distribution.kl(inputs, other), kl, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(distribution.deterministic(inputs), (p > 0.5).astype(np.int8))


def test_bits_are_drawn_as_often_as_numpys_bernoulli_draws_them():
    distribution = make_distribution(spaces.MultiBinary(2))
    inputs = np.tile(np.array([[1.5, -0.7]], np.float32), (50_000, 1))
    actions, logp = distribution.sample_with_logp(inputs, distribution.draw_noise(np.random.default_rng(0), 50_000))
    drawn = np.random.default_rng(1).binomial(1, 1 / (1 + np.exp(-inputs.astype(np.float64))))
    np.testing.assert_allclose(actions.mean(axis=0), drawn.mean(axis=0), atol=0.01)
    np.testing.assert_array_equal(logp, distribution.logp(inputs, actions))


MASKED = [
    spaces.Discrete(2),
    spaces.Discrete(5, start=3),
    spaces.MultiDiscrete([3, 2, 4]),
    spaces.MultiBinary(4),
    spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 2])]),
]


def legal_probabilities(leaf, inputs):
    """Of each alternative of each choice, in float64 and without what is forbidden: [choices][alternatives]."""
    allowed = inputs > 0.5 * MASKED_LOGIT
    if isinstance(leaf, spaces.MultiBinary):
        return [[1 - p, p] for p in np.where(allowed, 1 / (1 + np.exp(-np.where(allowed, inputs, 0.0))), 0.0)]
    sizes = [leaf.n] if isinstance(leaf, spaces.Discrete) else leaf.nvec.tolist()
    result, start = [], 0
    for size in sizes:
        weights = np.where(allowed, np.exp(np.where(allowed, inputs, 0.0)), 0.0)[start : start + size]
        result.append((weights / weights.sum()).tolist())
        start += size
    return result


@pytest.mark.parametrize("space", MASKED, ids=str)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_what_is_forbidden_is_never_drawn_and_counts_for_nothing(space, seed):
    distribution = make_distribution(space)
    rng = np.random.default_rng(seed)
    rows = 40
    inputs, other = (rng.standard_normal((2, rows, distribution.num_inputs)) * 2).astype(np.float32)
    # the same mask in all rows, with one legal alternative of each choice at least
    allowed = MaskLayout(space).from_rows([mask_of(space, rng)])[0] > 0
    forbidden = distribution.choice_inputs[~allowed]
    inputs[:, forbidden] = other[:, forbidden] = MASKED_LOGIT
    actions, logp = distribution.sample_with_logp(inputs, distribution.draw_noise(rng, rows))
    entropy, kl = distribution.entropy(inputs), distribution.kl(inputs, other)
    mode = distribution.deterministic(inputs)
    parts = getattr(distribution, "parts", None)
    leaves = (
        [(space, slice(None), slice(None))]
        if parts is None
        else [(part.distribution.action_space, part.inputs, part.actions) for part in parts]
    )
    for row in range(rows):
        wanted = {"logp": 0.0, "entropy": 0.0, "kl": 0.0}
        for leaf, own_inputs, own_actions in leaves:
            given_inputs, given_other = inputs[row, own_inputs], other[row, own_inputs]
            if isinstance(leaf, spaces.Box):
                box = make_distribution(leaf)
                wanted["logp"] += box.logp(given_inputs[None], actions[row, own_actions][None])[0]
                wanted["entropy"] += box.entropy(given_inputs[None])[0]
                wanted["kl"] += box.kl(given_inputs[None], given_other[None])[0]
                continue
            start = np.ravel(getattr(leaf, "start", 0))
            chosen = np.ravel(np.atleast_1d(actions[row])[own_actions]).astype(int) - start
            best = np.ravel(np.atleast_1d(mode[row])[own_actions]).astype(int) - start
            for choice, p in enumerate(legal_probabilities(leaf, given_inputs.astype(np.float64))):
                q = legal_probabilities(leaf, given_other.astype(np.float64))[choice]
                assert p[chosen[choice]] > 0
                assert p[best[choice]] > 0
                wanted["logp"] += np.log(p[chosen[choice]])
                wanted["entropy"] -= sum(x * np.log(x) for x in p if x)
                wanted["kl"] += sum(x * np.log(x / y) for x, y in zip(p, q, strict=True) if x)
        np.testing.assert_allclose([logp[row], entropy[row], kl[row]], list(wanted.values()), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(distribution.logp(inputs, actions), logp, rtol=1e-4, atol=1e-4)


def mask_of(space, rng):
    """A random mask, as one array for each leaf, with at least one legal alternative of each choice."""
    if isinstance(space, spaces.Tuple):
        return tuple(mask_of(part, rng) for part in space.spaces if not isinstance(part, spaces.Box))
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, space.shape)
    masks = []
    for size in [space.n] if isinstance(space, spaces.Discrete) else space.nvec:
        mask = rng.integers(0, 2, size)
        mask[rng.integers(size)] = 1
        masks.append(mask)
    return np.concatenate(masks)


@pytest.mark.parametrize(
    ("space", "only"), [(spaces.Discrete(2), [1]), (spaces.Discrete(4), [2]), (spaces.MultiDiscrete([2, 3]), [0, 4])]
)
def test_entropy_of_the_only_legal_action_is_exactly_nothing(space, only):
    distribution = make_distribution(space)
    inputs = np.full((2, distribution.num_inputs), MASKED_LOGIT, np.float32)
    inputs[:, only] = [[0.3], [-7.0]]
    assert distribution.entropy(inputs).tolist() == [0, 0]
    assert distribution.logp(inputs, distribution.deterministic(inputs)).tolist() == [0, 0]


def test_entropy_of_bits_that_are_all_forbidden_is_exactly_nothing():
    distribution = make_distribution(spaces.MultiBinary(3))
    inputs = np.full((2, 3), MASKED_LOGIT, np.float32)
    assert distribution.entropy(inputs).tolist() == [0, 0]
    assert distribution.logp(inputs, np.zeros((2, 3), np.int8)).tolist() == [0, 0]
    assert distribution.kl(inputs, inputs).tolist() == [0, 0]
