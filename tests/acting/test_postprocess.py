"""GAE compared with numbers computed by hand, and with a slow reference that sums forwards."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.acting.postprocess import (
    gae,
    n_step_priorities,
    returns,
)
from aiorl.data import columns as c


def column(*values, dtype=np.float32):
    return np.array(values, dtype).reshape(-1, 1)


def flags(*values):
    return column(*values, dtype=bool)


def one_env(
    rewards,
    values,
    bootstrap,
    terminated=None,
    truncated=None,
    truncation_values=None,
    valid=None,
    **kw,
):
    """Return the GAE of one environment, as lists."""
    steps = len(rewards)
    advantages, targets = gae(
        column(*rewards),
        column(*values),
        np.array([bootstrap], np.float32),
        flags(*(terminated or [False] * steps)),
        flags(*(truncated or [False] * steps)),
        None if truncation_values is None else column(*truncation_values),
        valid=None if valid is None else flags(*valid),
        **kw,
    )
    assert advantages.dtype == targets.dtype == np.float32
    assert advantages.shape == targets.shape == (steps, 1)
    return advantages[:, 0], targets[:, 0]


def test_without_truncation_values_a_truncation_counts_as_worth_nothing():
    advantages, _ = one_env([3], [1], 7, truncated=[True], gamma=1.0, lam=1)
    np.testing.assert_allclose(advantages, [2.0])


def reference(
    rewards, values, bootstrap, terminated, truncated, truncation_values, valid, gamma, lam
):
    """Sum forwards from each row, row by row, in Python's floats."""
    steps, width = rewards.shape
    advantages = np.zeros((steps, width))
    for n in range(width):
        for start in range(steps):
            weight, total = 1.0, 0.0
            for t in range(start, steps):
                if not valid[t, n]:
                    break
                following = values[t + 1, n] if t + 1 < steps else bootstrap[n]
                if truncated[t, n]:
                    following = truncation_values[t, n]
                if terminated[t, n]:
                    following = 0.0
                total += weight * (
                    float(rewards[t, n]) + gamma * float(following) - float(values[t, n])
                )
                weight *= gamma * lam
                if terminated[t, n] or truncated[t, n]:
                    break
            advantages[start, n] = total
    return advantages


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 12),
    width=st.integers(1, 4),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    masked=st.booleans(),
)
def test_any_fragment_agrees_with_the_forward_sum(seed, steps, width, gamma, lam, masked):
    rng = np.random.default_rng(seed)
    rewards, values, truncation_values = rng.standard_normal((3, steps, width)).astype(np.float32)
    bootstrap = rng.standard_normal(width).astype(np.float32)
    terminated, truncated = rng.random((2, steps, width)) < 0.2
    valid = np.ones((steps, width), bool)
    if masked:  # the row after an end, as in NEXT_STEP environments
        valid[1:] = ~(terminated | truncated)[:-1]
        terminated &= valid
        truncated &= valid
    arguments = (rewards, values, bootstrap, terminated, truncated, truncation_values)
    copies = [item.copy() for item in arguments]
    advantages, targets = gae(*arguments, gamma=gamma, lam=lam, valid=valid if masked else None)
    for item, copy in zip(arguments, copies, strict=True):
        np.testing.assert_array_equal(item, copy)
    np.testing.assert_allclose(
        advantages, reference(*arguments, valid, gamma, lam), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(targets, advantages + values, rtol=1e-5, atol=1e-5)


def test_an_environment_alone_and_among_others_gets_the_same_bits():
    rng = np.random.default_rng(3)
    rewards, values, truncation_values = rng.standard_normal((3, 20, 300)).astype(np.float32)
    bootstrap = rng.standard_normal(300).astype(np.float32)
    terminated, truncated = rng.random((2, 20, 300)) < 0.1
    arguments = (rewards, values, bootstrap, terminated, truncated, truncation_values)
    together, _ = gae(*arguments, gamma=0.99, lam=0.95)
    for n in (0, 1, 255, 256, 299):
        alone, _ = gae(*(item[..., n : n + 1] for item in arguments), gamma=0.99, lam=0.95)
        np.testing.assert_array_equal(alone[:, 0], together[:, n])


def test_returns_are_sums_to_the_end_of_an_episode_or_of_the_fragment():
    # the second row is no transition: 1 + .5*0 (terminated);  2 + .5*(3 + .5*8), truncated;  5, cut
    columns = returns(
        column(1, 99, 2, 3, 8, 5),
        flags(1, 0, 0, 0, 0, 0),
        flags(0, 0, 0, 0, 1, 0),
        gamma=0.5,
        valid=flags(1, 0, 1, 1, 1, 1),
    )
    assert {name: sums[:, 0].tolist() for name, sums in columns.items()} == {
        "advantages": [1, 0, 5.5, 7, 8, 5]
    }


def priorities(
    rewards,
    largest,
    action_values,
    bootstrap,
    terminated=(),
    truncated=(),
    invalid=(),
    finals=None,
    **settings,
):
    """Return the first priorities of one environment as a list; ends and gaps are given by their
    rows.
    """
    steps = range(len(rewards))
    columns = n_step_priorities(
        column(*rewards),
        column(*largest),
        np.array([bootstrap], np.float32),
        flags(*(t in terminated for t in steps)),
        flags(*(t in truncated for t in steps)),
        None if finals is None else column(*finals),
        action_values=column(*action_values),
        valid=flags(*(t not in invalid for t in steps)) if invalid else None,
        **settings,
    )
    assert columns[c.PRIORITIES].dtype == np.float32
    return columns[c.PRIORITIES][:, 0].tolist()


def test_a_first_priority_is_the_size_of_the_n_step_error():
    # |1 + .5*2 + .25*8 - 3|;  |2 + .5*4 + .25*6 - 2|, after the fragment;  |4 + .5*6 - 9|, one step
    # is left
    assert priorities([1, 2, 4], [3, 4, 8], [3, 2, 9], 6, gamma=0.5, n=2) == [1, 3.5, 2]


def test_a_first_priority_bootstraps_from_the_final_observation_unless_terminated():
    # |1 + .5*2 - 3|;  |2 - 2.5|;  |4 + .5*6 - 9|
    assert priorities([1, 2, 4], [3, 4, 8], [3, 2.5, 9], 6, terminated=[1], gamma=0.5, n=2) == [
        1,
        0.5,
        2,
    ]
    # |1 + .5*2 + .25*12 - 3|;  |2 + .5*12 - 2.5|, the final observation's 12 and not the next row's
    # 8
    truncated = {"truncated": [1], "finals": [0, 12, 0], "gamma": 0.5, "n": 2}
    assert priorities([1, 2, 4], [3, 4, 8], [3, 2.5, 9], 6, **truncated) == [2, 5.5, 2]
    assert priorities([1, 2, 4], [3, 4, 8], [3, 2.5, 9], 6, terminated=[1], **truncated) == [
        1,
        0.5,
        2,
    ]


def test_a_row_that_is_no_transition_has_no_priority_and_is_in_none():
    # |1 - 3|;  none;  |4 + .5*6 - 9|
    assert priorities(
        [1, 99, 4], [3, 4, 8], [3, 2, 9], 6, terminated=[0], invalid=[1], gamma=0.5, n=2
    ) == [2, 0, 2]


def test_an_observation_without_a_legal_action_is_worth_nothing_in_a_first_priority():
    result = priorities([1], [3], [3], 0, truncated=[0], finals=[MASKED_LOGIT], gamma=0.5, n=1)
    assert result == [2]
