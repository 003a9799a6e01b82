"""N-step returns: numbers computed by hand, and a slow reference that walks forwards from every
row.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from aiorl.acting.postprocess import n_step, n_step_new_obs
from aiorl.data import columns as c
from aiorl.data.fragment import check_n_steps
from aiorl.errors import BatchError


def column(*values, dtype=np.float32):
    return np.array(values, dtype).reshape(-1, 1)


@st.composite
def fragments(draw):
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = draw(st.sampled_from([0.0, 0.2, 0.6]))
    terminateds, truncateds = rng.random(shape) < ends, rng.random(shape) < ends
    valid = rng.random(shape) >= draw(st.sampled_from([0.0, 0.3]))
    rewards = rng.normal(size=shape).astype(np.float32)
    return rewards, terminateds, truncateds, valid


def slow(rewards, terminateds, truncateds, valid, gamma, n):
    """Compute returns, discounts and steps by definition: row by row, step by step."""
    returns, discounts, steps = (
        np.zeros(rewards.shape),
        np.zeros(rewards.shape),
        np.ones(rewards.shape, int),
    )
    for t, env in np.argwhere(valid):
        last = t
        while (
            last + 1 < t + n
            and last + 1 < len(rewards)
            and not terminateds[last, env]
            and not truncateds[last, env]
            and valid[last + 1, env]
        ):
            last += 1
        steps[t, env] = last - t + 1
        returns[t, env] = sum(gamma**i * float(rewards[t + i, env]) for i in range(steps[t, env]))
        discounts[t, env] = 0.0 if terminateds[last, env] else gamma ** steps[t, env]
    return returns, discounts, steps


@settings(max_examples=80)
@given(fragments(), st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_equals_a_walk_over_every_row(fragment, n, gamma):
    rewards, terminateds, truncateds, valid = fragment
    targets = n_step(rewards, terminateds, truncateds, gamma=gamma, n=n, valid=valid)
    for column, expected in zip(targets, slow(*fragment, gamma, n), strict=True):
        np.testing.assert_allclose(column, expected, rtol=1e-5, atol=1e-6)
    if valid.all():
        plain = n_step(rewards, terminateds, truncateds, gamma=gamma, n=n)
        assert all((column == other).all() for column, other in zip(targets, plain, strict=True))


def test_the_observation_after_the_steps_is_that_of_their_last_row():
    obs = np.array([[0.0], [1.0], [10.0], [11.0]], np.float32)[:, :, None]
    arrays = {
        c.OBS: obs,
        c.LAST_OBS: np.array([[12.0]], np.float32),
        c.FINAL_INDEX: np.array([[1, 0]], np.int32),
        c.FINAL_OBS: np.array([[2.0]], np.float32),
    }
    assert n_step_new_obs(arrays)[:, 0, 0].tolist() == [1, 2, 11, 12]
    arrays[c.N_STEPS] = column(2, 1, 2, 1, dtype=np.int32)
    assert n_step_new_obs(arrays)[:, 0, 0].tolist() == [2, 2, 12, 12]


def test_steps_that_lead_out_of_the_fragment_are_refused():
    for steps in ([1, 2], [0, 1], [-1, 1], [3, 1]):
        with pytest.raises(BatchError, match="n_steps"):
            check_n_steps(column(*steps, dtype=np.int32), (2, 1))
    with pytest.raises(BatchError, match="float32"):
        check_n_steps(column(1, 1), (2, 1))
    check_n_steps(column(2, 1, dtype=np.int32), (2, 1))
