"""NumPy distributions compared with formulas in plain Python, and with sampled frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings, strategies as st

from aiorl.acting.distributions import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    MASKED_LOGIT,
    Composite,
    Greedy,
    TwoClassCategorical,
    make_distribution,
    make_named_distribution,
)
from aiorl.data.obs_layout import MaskLayout
from aiorl.errors import ConfigError, UnsupportedSpaceError

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
SPACES = [
    (spaces.Discrete(2), False),
    (spaces.Discrete(2, start=5), False),
    (spaces.Discrete(1), False),
    (spaces.Discrete(7, start=-3), False),
    (spaces.MultiDiscrete([3, 2, 4]), False),
    (spaces.MultiDiscrete(np.array([[3, 3], [3, 3]]), start=np.array([[0, 1], [2, 3]])), False),
    (spaces.MultiBinary((2, 2)), False),
    (BOX, False),
    (BOX, True),
    (spaces.Box(-1.0, 1.0, (2, 2), np.float64), False),
    (spaces.Box(-1.0, 1.0, (), np.float32), True),
]
NESTED = [
    (spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([3, 2])]), False),
    (
        spaces.Tuple(
            [spaces.Discrete(4, start=-2), spaces.Box(-1, 1, (2, 2)), spaces.Box(0, 1, ())]
        ),
        False,
    ),
    (spaces.Dict({"b": spaces.Box(-1, 3, (2,)), "a": spaces.Tuple([spaces.Discrete(3)])}), True),
]


def inputs_of(distribution, rows=5, seed=0, scale=1.5):
    return (
        scale * np.random.default_rng(seed).standard_normal((rows, distribution.num_inputs))
    ).astype(np.float32)


@pytest.mark.parametrize(("space", "squash"), [*SPACES, *NESTED], ids=str)
def test_r117_samples_are_actions_of_the_space_and_the_same_for_the_same_noise(space, squash):
    distribution = make_distribution(space, squash=squash)
    inputs = inputs_of(distribution, 200)
    noise = [distribution.draw_noise(np.random.default_rng(7), 3, 200) for _ in range(2)]
    assert (noise[0].dtype, noise[0].shape) == (np.float32, (3, 200, distribution.noise_size))
    untouched = inputs.copy()
    actions, logp = distribution.sample_with_logp(inputs, noise[0][0])
    for batch in (actions, distribution.deterministic(inputs)):
        assert (batch.dtype, batch.shape) == (
            distribution.action_dtype,
            (200, *distribution.action_shape),
        )
        if squash or not any(
            isinstance(leaf, spaces.Box) for leaf in getattr(space, "spaces", [space])
        ):
            rows = (
                distribution.layout.to_env(batch) if isinstance(distribution, Composite) else batch
            )
            assert all(
                space.contains(np.asarray(row) if space.shape is not None else row) for row in rows
            )
    assert (logp.dtype, logp.shape) == (np.float32, (200,))
    np.testing.assert_allclose(distribution.logp(inputs, actions), logp, rtol=1e-4, atol=2e-4)
    np.testing.assert_array_equal(inputs, untouched)
    again = distribution.sample_with_logp(inputs, noise[1][0])
    np.testing.assert_array_equal(again[0], actions)
    np.testing.assert_array_equal(again[1], logp)
    alone = np.zeros_like(actions)
    distribution.choose_into(inputs, noise[0][0], alone)
    np.testing.assert_array_equal(alone, actions)


def probabilities(logits):
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6), st.integers(-4, 4))
def test_categorical_agrees_with_plain_python(logits, start):
    distribution = make_distribution(spaces.Discrete(len(logits), start=start))
    rows = np.array([logits] * len(logits), np.float32)
    actions = np.arange(start, start + len(logits))
    p = probabilities(logits)
    np.testing.assert_allclose(distribution.logp(rows, actions), np.log(p), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distribution.probabilities(rows)[0], p, rtol=1e-6)
    assert distribution.deterministic(rows)[0] == start + int(np.argmax(rows[0]))


@pytest.mark.parametrize("actions", [2, 5])
def test_categorical_samples_have_the_right_frequencies(actions):
    distribution = make_distribution(spaces.Discrete(actions))
    logits = inputs_of(distribution, rows=1, seed=actions)
    rows = 200_000
    drawn = distribution.sample(np.repeat(logits, rows, axis=0), np.random.default_rng(0))
    share = np.bincount(drawn, minlength=actions) / rows
    np.testing.assert_allclose(
        share, probabilities(logits[0].tolist()), atol=5 * 0.5 / math.sqrt(rows)
    )


@given(
    logits=st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=9),
    uniform=st.one_of(
        st.floats(0, 1, width=32, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-24])
    ),
)
def test_inversion_chooses_an_action_that_has_probability_for_every_uniform_number(logits, uniform):
    distribution = make_distribution(spaces.Discrete(len(logits)))
    rows = np.array([logits], np.float32)
    actions, logp = distribution.sample_with_logp(rows, np.array([[uniform]], np.float32))
    assert 0 <= actions[0] < len(logits)
    assert np.exp(rows[0, actions[0]] - rows.max()) > 0
    assert np.isfinite(logp[0])


@pytest.mark.parametrize("start", [0, -3])
@pytest.mark.parametrize("shape", [(1, 1), (5, 64)])
def test_log_probabilities_asked_for_later_are_those_of_sampling_to_the_bit(start, shape):
    """H3: in lockstep they are computed once per fragment."""
    distribution = TwoClassCategorical(spaces.Discrete(2, start=start))
    assert distribution.logp_is_apart
    rng = np.random.default_rng(0)
    inputs = (10 * rng.standard_normal((*shape, 2))).astype(np.float32)
    noise = distribution.draw_noise(rng, *shape)
    actions, logp = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for t in range(shape[0]):
        distribution.sample_into(inputs[t], noise[t], actions[t], logp[t])
    later = distribution.logp(inputs.reshape(-1, 2), actions.reshape(-1))
    np.testing.assert_array_equal(logp, later.reshape(shape))


@given(st.integers(0, 2**32 - 1))
def test_diagonal_gaussian_agrees_with_plain_python(seed):
    distribution = make_distribution(spaces.Box(-1.0, 1.0, (3,)))
    inputs = inputs_of(distribution, 1, seed)
    actions = np.random.default_rng(seed).standard_normal((1, 3)).astype(np.float32)
    logp = 0.0
    for i in range(3):
        mean, std = float(inputs[0, i]), math.exp(min(float(inputs[0, 3 + i]), LOG_STD_MAX))
        logp -= 0.5 * ((float(actions[0, i]) - mean) / std) ** 2 + math.log(
            std * math.sqrt(2 * math.pi)
        )
    np.testing.assert_allclose(distribution.logp(inputs, actions)[0], logp, rtol=1e-4, atol=1e-4)


def test_gaussian_samples_have_the_right_mean_and_deviation():
    distribution = make_distribution(spaces.Box(-1.0, 1.0, (2,)))
    inputs = np.array([[1.0, -2.0, math.log(0.5), math.log(3.0)]] * 100_000, np.float32)
    drawn = distribution.sample(inputs, np.random.default_rng(0))
    np.testing.assert_allclose(drawn.mean(axis=0), [1.0, -2.0], atol=0.05)
    np.testing.assert_allclose(drawn.std(axis=0), [0.5, 3.0], rtol=0.02)


@pytest.mark.parametrize("squash", [False, True])
def test_deviations_are_clamped_on_both_sides(squash):
    distribution = make_distribution(spaces.Box(-1.0, 1.0, (1,)), squash=squash)
    noise = np.array([[0.7]], np.float32)
    for given_log_std, clamped in ((-500.0, LOG_STD_MIN), (500.0, LOG_STD_MAX)):
        inputs, limits = (
            np.array([[0.3, value]], np.float32) for value in (given_log_std, clamped)
        )
        samples = (
            distribution.sample_with_logp(inputs, noise),
            distribution.sample_with_logp(limits, noise),
        )
        for mine, theirs in zip(*samples, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (1.5, -0.5)])
def test_squashed_density_integrates_to_1(mean, log_std):
    distribution = make_distribution(spaces.Box(-3.0, 1.0, (1,)), squash=True)
    # a fine grid in u = atanh(y), mapped to actions: dense where the density is steep
    u = np.linspace(-9.0, 9.0, 200_001)
    actions = (-3.0 + 4.0 * (np.tanh(u) + 1.0) / 2.0)[:, None]
    inside = (actions[:, 0] > -3.0 + 1e-5) & (actions[:, 0] < 1.0 - 1e-5)
    inputs = np.repeat(np.array([[mean, log_std]], np.float32), len(u), axis=0)
    logp = distribution.logp(inputs, actions)[inside].astype(np.float64)
    assert (np.exp(logp) * np.gradient(actions[inside, 0])).sum() == pytest.approx(1.0, abs=2e-3)


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


def test_bits_agree_with_numpys_own():
    """Each bit independently is 1 with probability 1 / (1 + exp(-logit))."""
    distribution = make_distribution(spaces.MultiBinary(2))
    inputs = np.tile(np.array([[1.5, -0.7]], np.float32), (50_000, 1))
    p = 1 / (1 + np.exp(-inputs.astype(np.float64)))
    actions, logp = distribution.sample_with_logp(
        inputs, distribution.draw_noise(np.random.default_rng(0), 50_000)
    )
    np.testing.assert_allclose(actions.mean(axis=0), p[0], atol=0.01)
    expected = np.where(actions == 1, np.log(p), np.log(1 - p)).sum(axis=1)
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(distribution.deterministic(inputs[:1]), [[1, 0]])


def test_the_greedy_action_is_certain_and_the_others_never_occur():
    greedy = Greedy(spaces.Discrete(3, start=2))
    inputs = np.array([[1.0, 3.0, 2.0], [4.0, MASKED_LOGIT, 4.0]], np.float32)
    actions, logp = greedy.sample_with_logp(inputs, greedy.draw_noise(np.random.default_rng(0), 2))
    assert (actions.tolist(), logp.tolist()) == ([3, 2], [0.0, 0.0])
    assert greedy.logp(inputs, np.array([2, 2])).tolist() == [np.float32(MASKED_LOGIT), 0.0]
    assert greedy.probabilities(inputs).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize(("space", "squash"), [SPACES[4], *NESTED], ids=str)
def test_r117_components_are_independent_and_their_log_probabilities_are_added(space, squash):
    distribution = make_distribution(space, squash=squash)
    inputs = inputs_of(distribution)
    noise = distribution.draw_noise(np.random.default_rng(0), 5)
    actions, logp = distribution.sample_with_logp(inputs, noise)
    if isinstance(space, spaces.MultiDiscrete):
        leaves, batches = [spaces.Discrete(int(n)) for n in space.nvec], list(actions.T)
    else:
        leaves, batches = distribution.layout.leaves, distribution.layout.split(actions)
    parts = [make_distribution(leaf, squash=squash) for leaf in leaves]
    ends = np.cumsum([part.num_inputs for part in parts])
    assert ends[-1] == distribution.num_inputs
    cuts = [inputs[:, end - part.num_inputs : end] for end, part in zip(ends, parts, strict=True)]
    total = sum(
        part.logp(cut, batch) for part, cut, batch in zip(parts, cuts, batches, strict=True)
    )
    np.testing.assert_allclose(logp, total, rtol=1e-5, atol=1e-5)
    modes = [part.deterministic(cut).reshape(5, -1) for part, cut in zip(parts, cuts, strict=True)]
    np.testing.assert_array_equal(distribution.deterministic(inputs), np.concatenate(modes, axis=1))
    noise[:, -1] = 0.9 - noise[:, -1]  # noise of the last component
    changed, _ = distribution.sample_with_logp(inputs, noise)
    np.testing.assert_array_equal(changed[:, 0], actions[:, 0])


@pytest.mark.parametrize(
    ("space", "squash", "error"),
    [
        (spaces.Box(0, 10, (2,), np.int32), False, UnsupportedSpaceError),
        (spaces.Box(-np.inf, 1.0, (1,)), True, UnsupportedSpaceError),
        (spaces.Tuple([spaces.Box(0, 10, (2,), np.int32)]), False, UnsupportedSpaceError),
        (spaces.Text(2), False, UnsupportedSpaceError),
        (spaces.Discrete(2**62), False, UnsupportedSpaceError),
        (spaces.MultiDiscrete([2**62, 2**62]), False, UnsupportedSpaceError),  # their sum overflows
        (spaces.MultiDiscrete([2**63 - 1, 2**63 - 1]), False, UnsupportedSpaceError),
        (
            spaces.Tuple([spaces.MultiDiscrete([[2**62, 3], [2**62, 2**62]])]),
            False,
            UnsupportedSpaceError,
        ),
        (spaces.Tuple([]), False, UnsupportedSpaceError),
        (spaces.Dict({"a": spaces.Text(2)}), False, UnsupportedSpaceError),
        (spaces.Box(np.zeros(2), np.array([1.0, 0.0]), dtype=np.float64), True, ConfigError),
    ],
    ids=str,
)
def test_a_space_without_a_distribution_is_refused(space, squash, error):
    with pytest.raises(error):
        make_distribution(space, squash=squash)
    with pytest.raises(UnsupportedSpaceError):
        make_named_distribution("categorical", space)


MASKED = [
    spaces.Discrete(2),
    spaces.Discrete(5, start=3),
    spaces.MultiDiscrete([3, 2, 4]),
    spaces.MultiBinary(4),
    spaces.Tuple(
        [
            spaces.Discrete(3),
            spaces.Box(-1, 1, (2,)),
            spaces.MultiBinary(2),
            spaces.MultiDiscrete([2, 2]),
        ]
    ),
]


def legal_probabilities(leaf, inputs):
    """Return the probability of each alternative of each choice, in float64 and without forbidden
    ones.
    """
    allowed = inputs > 0.5 * MASKED_LOGIT
    if isinstance(leaf, spaces.MultiBinary):
        return [
            [1 - p, p]
            for p in np.where(allowed, 1 / (1 + np.exp(-np.where(allowed, inputs, 0.0))), 0.0)
        ]
    sizes = [leaf.n] if isinstance(leaf, spaces.Discrete) else leaf.nvec.tolist()
    result, start = [], 0
    for size in sizes:
        weights = np.where(allowed, np.exp(np.where(allowed, inputs, 0.0)), 0.0)[
            start : start + size
        ]
        result.append((weights / weights.sum()).tolist())
        start += size
    return result


@pytest.mark.parametrize("space", MASKED, ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_forbidden_actions_are_never_drawn_and_count_for_nothing(space, seed):
    distribution = make_distribution(space)
    rng = np.random.default_rng(seed)
    rows = 40
    inputs = (rng.standard_normal((rows, distribution.num_inputs)) * 2).astype(np.float32)
    # the same mask in all rows, with at least one legal alternative of each choice
    allowed = MaskLayout(space).from_rows([mask_of(space, rng)])[0] > 0
    inputs[:, distribution.choice_inputs[~allowed]] = MASKED_LOGIT
    actions, logp = distribution.sample_with_logp(inputs, distribution.draw_noise(rng, rows))
    mode = distribution.deterministic(inputs)
    leaves = [(space, slice(None), slice(None))]
    if isinstance(distribution, Composite):
        leaves = [
            (part.distribution.action_space, part.inputs, part.actions)
            for part in distribution.parts
        ]
    for row in range(rows):
        expected = 0.0
        for leaf, own_inputs, own_actions in leaves:
            given_inputs = inputs[row, own_inputs]
            if isinstance(leaf, spaces.Box):
                expected += make_distribution(leaf).logp(
                    given_inputs[None], actions[row, own_actions][None]
                )[0]
                continue
            start = np.ravel(getattr(leaf, "start", 0))
            chosen = np.ravel(np.atleast_1d(actions[row])[own_actions]).astype(int) - start
            best = np.ravel(np.atleast_1d(mode[row])[own_actions]).astype(int) - start
            for choice, p in enumerate(legal_probabilities(leaf, given_inputs.astype(np.float64))):
                assert p[chosen[choice]] > 0
                assert p[best[choice]] > 0
                expected += np.log(p[chosen[choice]])
        assert logp[row] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    np.testing.assert_allclose(distribution.logp(inputs, actions), logp, rtol=1e-4, atol=1e-4)


def mask_of(space, rng):
    """A random mask, as one array for each leaf, with at least one legal alternative of each
    choice.
    """
    if isinstance(space, spaces.Tuple):
        return tuple(
            mask_of(part, rng) for part in space.spaces if not isinstance(part, spaces.Box)
        )
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, space.shape)
    masks = []
    for size in [space.n] if isinstance(space, spaces.Discrete) else space.nvec:
        mask = rng.integers(0, 2, size)
        mask[rng.integers(size)] = 1
        masks.append(mask)
    return np.concatenate(masks)


@pytest.mark.parametrize(
    ("space", "only"),
    [
        (spaces.Discrete(2), [1]),
        (spaces.Discrete(4), [2]),
        (spaces.MultiDiscrete([2, 3]), [0, 4]),
        (spaces.MultiBinary(3), []),
    ],
)
def test_the_only_legal_action_is_exactly_certain_however_large_its_logit(space, only):
    distribution = make_distribution(space)
    inputs = np.full((3, distribution.num_inputs), MASKED_LOGIT, np.float32)
    inputs[:, only] = [[0.3], [-7.0], [1e4]]
    actions, logp = distribution.sample_with_logp(
        inputs, distribution.draw_noise(np.random.default_rng(0), 3)
    )
    np.testing.assert_array_equal(actions, distribution.deterministic(inputs))
    assert logp.tolist() == [0, 0, 0]
