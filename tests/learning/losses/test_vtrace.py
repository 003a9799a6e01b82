"""V-trace and IMPACT's ratio against slow references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from aiorl.acting.postprocess import gae
from aiorl.learning.losses.vtrace import impact_log_ratio, pg_advantages, vtrace

F32 = NDArray[np.float32]


def example(
    seed: int,
    *,
    length: int = 7,
    num: int = 5,
    ends: float = 0.2,
    invalid: bool = True,
    on_policy: bool = False,
) -> dict[str, F32]:
    """Make random inputs; some ends are followed by a row that is not a transition, as in NEXT_STEP
    environments.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> F32:
        return rng.normal(size=shape).astype(np.float32)

    terminateds = (rng.random((length, num)) < ends).astype(np.float32)
    truncateds = (rng.random((length, num)) < ends).astype(np.float32)
    valid = np.ones((length, num), np.float32)
    if invalid:
        done = np.maximum(terminateds, truncateds)
        for t in range(1, length):
            valid[t] = np.where((done[t - 1] > 0) & (valid[t - 1] > 0), 0.0, 1.0)
        terminateds *= valid
        truncateds *= valid
    return {
        "values": normal(length, num),
        "last_values": normal(num),
        "rewards": normal(length, num) * valid,
        "terminateds": terminateds,
        "truncateds": truncateds,
        "bootstrap_values": np.where(truncateds > 0, normal(length, num), 0).astype(np.float32),
        "log_rhos": np.zeros((length, num), np.float32) if on_policy else normal(length, num),
        "valid": valid,
    }


def reference(
    x: dict[str, F32], gamma: float, lam: float, rho: float, rho_pg: float, c: float
) -> tuple[Any, Any]:
    """Compute the paper's definition, a sum of products for every row."""
    length, num = x["values"].shape
    vs, advantages = np.zeros((length, num)), np.zeros((length, num))

    def following(of: Any, t: int, n: int) -> float:
        if x["terminateds"][t, n]:
            return 0.0
        if x["truncateds"][t, n]:
            return float(x["bootstrap_values"][t, n])
        return float(x["last_values"][n] if t == length - 1 else of[t + 1, n])

    for n in range(num):
        for s in range(length):
            vs[s, n] = x["values"][s, n]
            weight = 1.0
            for t in range(s, length):
                if not x["valid"][t, n]:
                    break
                ratio = np.exp(x["log_rhos"][t, n])
                delta = (
                    x["rewards"][t, n] + gamma * following(x["values"], t, n) - x["values"][t, n]
                )
                vs[s, n] += weight * min(rho, ratio) * delta
                if x["terminateds"][t, n] or x["truncateds"][t, n]:
                    break
                weight *= gamma * lam * min(c, ratio)
    for n in range(num):
        for t in range(length):
            if x["valid"][t, n]:
                ratio = min(rho_pg, np.exp(x["log_rhos"][t, n]))
                target = x["rewards"][t, n] + gamma * following(
                    lam * vs + (1 - lam) * x["values"], t, n
                )
                advantages[t, n] = ratio * (target - x["values"][t, n])
    return vs, advantages


def run(
    x: dict[str, F32], *, compiled: bool = False, normalize: bool = False, **settings: float
) -> tuple[F32, F32]:
    def call(inputs: dict[str, tf.Tensor]) -> Any:
        returns = vtrace(**inputs, **settings)
        return returns.vs, pg_advantages(returns.advantages, returns.weights, normalize=normalize)

    function = tf.function(call, jit_compile=True, autograph=False) if compiled else call
    vs, advantages = function({name: tf.constant(column) for name, column in x.items()})
    return vs.numpy(), advantages.numpy()


@pytest.mark.parametrize("invalid", [False, True])
def test_advantages_are_normalised_with_importance_weights(invalid: bool) -> None:
    x = example(8, length=8, invalid=invalid)
    x["log_rhos"][2, 0] = -60.0  # an action that the policy never takes
    _, weighted = run(x, gamma=0.9, rho_bar_pg=0.9)
    _, normalised = run(x, gamma=0.9, rho_bar_pg=0.9, normalize=True)
    rhos = np.where(x["valid"] > 0, np.minimum(0.9, np.exp(x["log_rhos"].astype(np.float64))), 0.0)
    kept = rhos > 1e-20
    advantages, rhos_kept = weighted[kept] / rhos[kept], rhos[kept]
    mean = np.average(advantages, weights=rhos_kept)
    deviation = np.sqrt(np.average((advantages - mean) ** 2, weights=rhos_kept))
    np.testing.assert_allclose(
        normalised[kept], rhos_kept * (advantages - mean) / deviation, rtol=1e-4, atol=1e-5
    )
    assert np.abs(normalised[~kept]).max() < 1e-20
    assert abs(normalised.sum()) < 1e-4


@pytest.mark.parametrize(
    ("length", "compiled", "invalid"),
    [
        *((length, False, invalid) for length in (1, 2, 7, 8) for invalid in (False, True)),
        (7, True, True),
    ],
)
def test_equals_the_slow_reference_with_ends_and_padding_rows(
    length: int, compiled: bool, invalid: bool
) -> None:
    x = example(length, length=length, invalid=invalid)
    vs, advantages = run(
        x, compiled=compiled, gamma=0.9, lam=0.8, rho_bar=1.3, rho_bar_pg=0.9, c_bar=1.1
    )
    expected_vs, expected_advantages = reference(x, 0.9, 0.8, 1.3, 0.9, 1.1)
    np.testing.assert_allclose(vs, expected_vs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(advantages, expected_advantages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("invalid", [False, True])
def test_on_policy_value_targets_and_advantages_are_those_of_gae(lam: float, invalid: bool) -> None:
    """The worker's GAE is an independent oracle: other code, another recursion, NumPy."""
    x = example(11, length=9, num=6, invalid=invalid, on_policy=True)
    expected, targets = gae(
        x["rewards"],
        x["values"],
        x["last_values"],
        x["terminateds"] > 0,
        x["truncateds"] > 0,
        x["bootstrap_values"],
        gamma=0.95,
        lam=lam,
        valid=x["valid"] > 0,
    )
    vs, advantages = run(x, gamma=0.95, lam=lam)
    np.testing.assert_allclose(vs, targets, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)


def test_no_gradient_flows_through_the_targets() -> None:
    x = {name: tf.constant(column) for name, column in example(1).items()}
    with tf.GradientTape() as tape:
        tape.watch(x["values"])
        returns = vtrace(**x, gamma=0.9)
        total = tf.add_n([tf.reduce_sum(column) for column in returns])
    assert tape.gradient(total, x["values"]) is None


@pytest.mark.parametrize("max_ratio", [0.5, 1.0, 2.0, math.inf])
def test_equals_the_product_of_the_paper(max_ratio: float) -> None:
    """min(mu / pi_target, rho) pi / mu, in double precision."""
    rng = np.random.default_rng(0)
    new, target, behaviour = np.log(rng.uniform(1e-4, 1.0, (3, 50)))
    expected = np.minimum(np.exp(behaviour - target), max_ratio) * np.exp(new - behaviour)
    got = impact_log_ratio(
        *(tf.constant(x, tf.float32) for x in (new, target, behaviour)), max_ratio=max_ratio
    )
    np.testing.assert_allclose(np.exp(got.numpy()), expected, rtol=1e-4)


def test_a_gradient_flows_only_to_the_online_policy() -> None:
    logs = [tf.Variable([math.log(p)]) for p in (0.2, 0.1, 0.8)]
    with tf.GradientTape() as tape:
        ratio = tf.exp(impact_log_ratio(*(tf.convert_to_tensor(x) for x in logs)))
    new, target, behaviour = tape.gradient(ratio, logs)
    assert float(new[0]) == pytest.approx(0.5, rel=1e-5)
    assert target is None
    assert behaviour is None
