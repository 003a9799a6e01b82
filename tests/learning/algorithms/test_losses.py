"""Losses of algorithms without a replay, against the same formulas in NumPy."""

from __future__ import annotations

from typing import Any

import entropies
import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import BOX, CHOICES, Case, loss_of_batch, make_model

from aiorl.data import columns as c
from aiorl.data.layout import to_training_arrays
from aiorl.learning.algorithms.impala import IMPALA, IMPALAConfig
from aiorl.learning.batch_buffers import BatchBuffers
from aiorl.learning.learner import Learner
from aiorl.learning.losses.vtrace import pg_advantages, vtrace
from aiorl.learning.rows import model_columns

LENGTH, NUM = 5, 4
COEFFICIENTS = {
    "lr": 0.0,
    "entropy_coeff": 0.03,
    "clip_param": 0.1,
    "vf_clip_param": 0.2,
    "kl_coeff": 0.4,
    "advantage_scale": 2.0,
}
CUTS = {"vtrace_clip_rho_threshold": 1.1, "vtrace_clip_pg_rho_threshold": 0.9}


def tensors(arrays: dict[str, Any]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in arrays.items()}


def shake(network: Any, seed: int, size: float = 0.1) -> None:
    """Move all variables of a network randomly."""
    for name, variable in network.variables.items():
        variable.assign(
            variable + size * tf.random.stateless_normal(variable.shape, [seed, len(name)])
        )


def forward(model: Any, obs: Any) -> tuple[Any, Any]:
    inputs, values = model.forward(tf.constant(obs))
    return inputs.numpy(), values.numpy()


def surrogate(ratio: Any, advantages: Any) -> float:
    return float(-np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages).mean())


def check(
    found: tuple[Any, dict[str, Any]], wanted: dict[str, float], penalty: float = 0.0
) -> None:
    """Compare a loss with its parts; missing parts count as 0."""
    total, metrics = found
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-3, abs=1e-5), name
    expected = (
        wanted["policy_loss"]
        + 0.7 * wanted.get("vf_loss", 0.0)
        - 0.03 * wanted["entropy"]
        + penalty
    )
    assert float(total) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "settings", "space"),
    [
        ("ppo", {}, CHOICES),
        ("ppo", {"vf_clip_param": 0.2}, BOX),
        ("ppo", {"kl_coeff": 0.4, "vf_clip_param": 0.2, "normalize_advantages": False}, CHOICES),
        ("ppo", {"kl_coeff": 0.4, "normalize_advantages": False}, BOX),
        ("a2c", {}, CHOICES),
        ("a2c", {"normalize_advantages": True}, BOX),
        ("pg", {}, CHOICES),
        ("pg", {"normalize_advantages": True}, BOX),
        ("bc", {}, CHOICES),
        ("bc", {}, BOX),
        ("marwil", {"max_weight": 1.3, "beta": 1.5}, CHOICES),
        ("marwil", {"max_weight": 1.3, "beta": 1.5}, BOX),
    ],
)
def test_losses_of_rows_equal_the_formulas(name: str, settings: dict[str, Any], space: Any) -> None:
    """Some rows are padding, which counts nothing."""
    own = {} if name in ("pg", "bc") else {"vf_loss_coeff": 0.7}
    case = Case(name, space, **own, **settings)
    config, kind = case.config, case.model.distribution
    shake(case.model, 7)
    x = case.fragment(3, LENGTH, NUM, invalid=True)
    batch = case.learner.feed.buffers.rows([x], LENGTH * NUM)
    found = loss_of_batch(case.learner, tensors(batch), tensors(COEFFICIENTS))

    keep = x[c.VALID].reshape(-1)
    row = {key: column.reshape(len(keep), *column.shape[2:])[keep] for key, column in x.items()}
    inputs, values = forward(case.model, row[c.OBS])
    logp, advantages, penalty = kind.logp(inputs, row[c.ACTIONS]), row.get(c.ADVANTAGES), 0.0
    wanted = {"entropy": entropies.entropy(kind, inputs).mean()}
    if name == "pg":
        wanted["mean_return"] = advantages.mean()
    if config.normalize_advantages and advantages is not None:
        advantages = (advantages - advantages.mean()) / advantages.std()
    if c.VALUE_TARGETS in row:
        errors = row[c.VALUE_TARGETS] - values
        wanted["vf_loss"] = np.square(errors).mean()
    if name == "ppo":
        log_ratio = logp - row[c.ACTION_LOGP]
        ratio = np.exp(log_ratio)
        wanted |= {
            "policy_loss": surrogate(ratio, advantages),
            "clip_fraction": (np.abs(ratio - 1) > 0.1).mean(),
        }
        wanted["kl"] = (ratio - 1 - log_ratio).mean()
        if config.kl_coeff:
            wanted["kl"] = entropies.kl(kind, row[c.ACTION_DIST_INPUTS], inputs).mean()
            penalty = 0.4 * wanted["kl"]
        if config.clips_values:
            moved = row[c.VF_PREDS] + np.clip(values - row[c.VF_PREDS], -0.2, 0.2)
            clipped = np.square(moved - row[c.VALUE_TARGETS])
            wanted["vf_loss"] = np.maximum(np.square(errors), clipped).mean()
    elif name == "marwil":
        weights = np.minimum(np.exp(1.5 * errors / 2.0), 1.3)
        wanted |= {"mean_weight": weights.mean(), "policy_loss": -(weights * logp).mean()}
    else:
        wanted["policy_loss"] = -(logp * (1.0 if advantages is None else advantages)).mean()
    check(found, wanted, penalty)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "settings", "space"),
    [
        ("impala", CUTS, CHOICES),
        ("impala", {"vtrace": False}, BOX),
        ("impala", {**CUTS, "lambda_": 0.8, "normalize_advantages": True}, BOX),
        ("appo", CUTS, CHOICES),
        ("appo", {"vtrace": False, "kl_coeff": 0.4}, CHOICES),
        ("appo", {**CUTS, "kl_coeff": 0.4}, BOX),
        ("appo", {**CUTS, "lambda_": 0.8, "normalize_advantages": True}, BOX),
        ("appo", {**CUTS, "target_worker_clipping": 1.05}, CHOICES),
    ],
)
def test_losses_with_vtrace_equal_the_formulas(
    name: str, settings: dict[str, Any], space: Any
) -> None:
    """In APPO, V-trace uses the ratios of the target network, and the surrogate uses ratios to the
    target network.
    """
    case = Case(name, space, gamma=0.9, vf_loss_coeff=0.7, **settings)
    config, model, kind = case.config, case.model, case.model.distribution
    old = case.model
    if name == "appo":
        old = Case(name, space).model
        shake(old, 5, 0.2)
        for key, variable in case.learner.update_plan.targets["target"].variables.items():
            variable.assign(old.variables[key])
    shake(model, 7)
    x = case.fragment(3, LENGTH, NUM, invalid=True)
    batch = tensors(case.learner.feed.buffers.sequences([x], NUM, LENGTH))
    found = loss_of_batch(case.learner, batch, tensors(COEFFICIENTS))

    def flat(column: Any) -> Any:
        return column.reshape(LENGTH * NUM, *column.shape[2:])

    def judged(network: Any) -> tuple[Any, Any, Any]:
        inputs, values = forward(network, flat(x[c.OBS]))
        return (
            inputs,
            kind.logp(inputs, flat(x[c.ACTIONS])).reshape(LENGTH, NUM),
            values.reshape(LENGTH, NUM),
        )

    (inputs, logp, values), (old_inputs, old_logp, old_values) = judged(model), judged(old)
    valid, mu = x[c.VALID], x[c.ACTION_LOGP]
    log_rhos = np.where(valid, old_logp - mu, 0)
    columns = [
        old_values,
        forward(old, x[c.LAST_OBS])[1],
        x[c.REWARDS],
        x[c.TERMINATEDS],
        x[c.TRUNCATEDS],
        x[c.BOOTSTRAP_VALUES],
        log_rhos if config.vtrace else 0 * log_rhos,
    ]
    returns = vtrace(  # compared with a slow reference in its own test
        *(tf.constant(np.asarray(column, np.float32)) for column in columns),
        gamma=0.9,
        lam=config.lambda_,
        rho_bar=(rho_bar := config.vtrace_clip_rho_threshold),
        rho_bar_pg=config.vtrace_clip_pg_rho_threshold,
        valid=tf.constant(valid.astype(np.float32)),
    )
    weighted = pg_advantages(
        returns.advantages, returns.weights, normalize=config.normalize_advantages
    )
    advantages, rhos = weighted.numpy()[valid], np.exp(log_rhos)[valid]
    wanted = {
        "vf_loss": np.square(values - returns.vs.numpy())[valid].mean(),
        "entropy": entropies.entropy(kind, inputs)[flat(valid)].mean(),
        "mean_rho": np.minimum(rhos, rho_bar).mean(),
        "clipped_rhos": (rhos > rho_bar).mean(),
    }
    if name == "impala":
        wanted |= {
            "policy_loss": -(logp[valid] * advantages).mean(),
            "kl": (rhos - 1 - np.log(rhos)).mean(),
        }
        check(found, wanted)
        return
    ratio = (np.minimum(np.exp(mu - old_logp), config.target_worker_clipping) * np.exp(logp - mu))[
        valid
    ]
    wanted |= {
        "policy_loss": surrogate(ratio, advantages),
        "clip_fraction": (np.abs(ratio - 1) > 0.1).mean(),
    }
    wanted["kl"] = entropies.kl(kind, old_inputs, inputs)[flat(valid)].mean()
    assert wanted["kl"] > 1e-3
    check(found, wanted, 0.4 * wanted["kl"] * (config.kl_coeff > 0))


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "cell"),
    [("ppo", "use_gru"), ("a2c", "use_lstm"), ("pg", "use_gru"), ("bc", "use_gru")],
)
def test_sequences_give_the_same_loss_in_any_order_each_with_its_own_state(
    name: str, cell: str
) -> None:
    more = {"postprocess_inputs": True} if name == "bc" else {}
    case = Case(name, model={cell: True}, **more)
    batch = case.learner.feed.buffers.sequences(
        [case.fragment(3, LENGTH, NUM, invalid=True)], NUM, LENGTH
    )

    def of(order: list[int], **others: list[int]) -> float:
        ordered = {key: tf.gather(array, others.get(key, order)) for key, array in batch.items()}
        return float(loss_of_batch(case.learner, ordered, tensors(COEFFICIENTS))[0])

    in_order = of([0, 1, 2, 3])
    assert in_order == pytest.approx(of([2, 0, 3, 1]), rel=1e-5)
    assert in_order != pytest.approx(of([0, 1, 2, 3], **{c.state_in(0): [1, 2, 3, 0]}), rel=1e-5)


def test_a_cell_sees_the_environments_rewards_even_if_scaled_ones_are_learned_from() -> None:
    """Two steps with rewards 4 and -2, scaled 0.5 and -0.25: targets are vs_1 = -0.25 + 0.9 V, vs_0
    = 0.5 + 0.9 vs_1.

    V is the value of the last observation, by a cell that sees the reward -2 there.
    """
    settings = {"use_gru": True, "vf_share_layers": True, "lstm_use_prev_action_reward": True}
    config = IMPALAConfig(env="x", gamma=0.9, normalize_rewards=True, vtrace=False, model=settings)
    model = make_model(**settings)
    obs = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    actions, rewards = np.array([1, 0, 1], np.int32), np.array([0, 4, -2], np.float32)
    flags = dict.fromkeys((c.TERMINATEDS, c.TRUNCATEDS), np.zeros(2, np.bool_))
    states = {
        c.state_in(index): np.zeros((2, *shape), np.float32)
        for index, shape in enumerate(model.state_shapes)
    }
    zeros = np.zeros(2, np.float32)
    rows = {
        c.EPS_ID: np.zeros(2, np.int64),
        c.AGENT_INDEX: np.zeros(2, np.int32),
        c.OBS: obs[:2],
        c.NEW_OBS: obs[1:],
        c.ACTIONS: actions[1:],
        c.PREV_ACTIONS: actions[:2],
        c.REWARDS: rewards[1:],
        c.PREV_REWARDS: rewards[:2],
        c.SCALED_REWARDS: rewards[1:] / 8,
        c.ACTION_LOGP: zeros,
        c.BOOTSTRAP_VALUES: zeros,
        **flags,
        **states,
    }
    plan = IMPALA.experience(config).sample_plan
    assert plan.return_discount == 0.9
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = buffers.sequences([to_training_arrays(rows, plan, 2)], 1, 2)
    learner = Learner(IMPALA, config, model)
    _, metrics = loss_of_batch(learner, tensors(batch), tensors(COEFFICIENTS))

    state, values = [component[:1] for component in states.values()], []
    for t in range(3):
        _, value, state = model.forward_step(
            obs[t : t + 1], state, actions[t : t + 1], rewards[t : t + 1]
        )
        values.append(float(value[0]))
    later = -0.25 + 0.9 * values[2]
    expected = ((values[0] - (0.5 + 0.9 * later)) ** 2 + (values[1] - later) ** 2) / 2
    assert float(metrics["vf_loss"]) == pytest.approx(expected, rel=1e-5)
