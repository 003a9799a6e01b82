"""IMPALA and A3C: settings, plans, and the loss against the same formula in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import entropies
import numpy as np
import pytest
import tensorflow as tf

from aiorl.data import columns as c
from aiorl.data.layout import laid_out
from aiorl.errors import ConfigError, InternalError
from aiorl.learning.algorithms.a2c import A2C, A2CConfig
from aiorl.learning.algorithms.a3c import A3C, A3CConfig
from aiorl.learning.algorithms.appo import APPO
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.bc import BCConfig
from aiorl.learning.algorithms.impala import IMPALA, IMPALAConfig
from aiorl.learning.algorithms.marwil import MARWILConfig
from aiorl.learning.algorithms.pg import PGConfig
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.algorithms.rows import model_columns
from aiorl.learning.losses.vtrace import pg_advantages, vtrace


def test_defaults_go_together() -> None:
    IMPALAConfig.from_mapping({"env": "CartPole-v1"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train_batch_size": 4000, "rollout_fragment_length": 64}, "train_batch_size"),
        ({"sgd_minibatch_size": 100, "rollout_fragment_length": 64}, "sgd_minibatch_size"),
        ({"sgd_minibatch_size": 8192, "train_batch_size": 4096}, "sgd_minibatch_size"),
        ({"lr_schedule": [[10, 1e-3], [5, 1e-4]]}, "lr_schedule"),
        ({"vtrace_clip_rho_threshold": 0}, "vtrace_clip_rho_threshold"),
        ({"vtrace": False, "vtrace_clip_rho_threshold": 2.0}, "vtrace_clip_rho_threshold"),
        ({"vtrace": False, "vtrace_clip_pg_rho_threshold": 2.0}, "vtrace_clip_pg_rho_threshold"),
        ({"opt_type": "sgd"}, "opt_type"),
        ({"max_policy_lag": -1}, "max_policy_lag"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        IMPALAConfig.from_mapping({"env": "CartPole-v1", **settings})
    assert caught.value.key == key


SHAPE: dict[str, Any] = {"env": "x", "rollout_fragment_length": 8, "num_envs_per_worker": 4, "train_batch_size": 64}


def test_wants_leases_topped_up_with_a_bound_on_policy_lag() -> None:
    config = IMPALAConfig.from_mapping({**SHAPE, "outstanding_fragments_per_worker": 5, "max_policy_lag": 7})
    plan = IMPALA.lease_plan(config)
    assert (plan.mode, plan.fragments_per_batch) == ("streaming", 2)
    assert (plan.outstanding_per_worker, plan.max_policy_lag) == (5, 7)


def test_weights_go_out_after_each_update_or_as_set() -> None:
    assert IMPALA.lease_plan(IMPALAConfig.from_mapping(SHAPE)).publish_every == 1
    settings = {**SHAPE, "broadcast_updates": 4, "broadcast_interval_ms": 20}
    plan = IMPALA.lease_plan(IMPALAConfig.from_mapping(settings))
    assert (plan.publish_every, plan.publish_interval_s) == (4, 0.02)


def test_asks_workers_for_raw_transitions() -> None:
    plan = IMPALA.sample_plan(IMPALAConfig.from_mapping(SHAPE))
    assert plan.postprocess == "none"
    assert c.ADVANTAGES not in plan.columns
    assert {c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES} <= set(plan.columns)
    assert plan.of_sequences == (c.LAST_OBS,)
    recurrent = IMPALA.sample_plan(IMPALAConfig.from_mapping({**SHAPE, "model": {"use_gru": True}}))
    assert recurrent.of_sequences == (c.LAST_OBS, c.state_in(0), c.state_in(1))


def test_refuses_another_algorithms_config() -> None:
    with pytest.raises(InternalError, match="PPOConfig"):
        IMPALA.lease_plan(PPOConfig())


@pytest.mark.parametrize(("minibatch", "sequences"), [(None, 4), (64, 1), (4096, 64)])
def test_minibatches_are_whole_sequences(make_model: Any, minibatch: int | None, sequences: int) -> None:
    config = IMPALAConfig(train_batch_size=4096, rollout_fragment_length=64, sgd_minibatch_size=minibatch)
    assert IMPALA(config, make_model()).minibatch_size == sequences


@pytest.mark.parametrize(("kl_stop", "steps"), [(None, 12), (1e-9, 1)])
def test_an_update_ends_once_the_policy_is_too_far_from_those_that_sampled(
    make_model: Any, make_fragment: Any, kl_stop: float | None, steps: int
) -> None:
    settings = {**SHAPE, "num_sgd_iter": 3, "sgd_minibatch_size": 16, "kl_stop": kl_stop, "eager": True}
    config = IMPALAConfig.from_mapping(settings)
    algorithm = IMPALA(config, make_model())
    fragments = [make_fragment(IMPALA.sample_plan(config), algorithm.model, 8, 4, seed) for seed in range(2)]
    result = algorithm.update(algorithm.make_batch(fragments), 0)
    assert result.metrics["num_sgd_steps"] == steps
    assert result.metrics["kl"] > 1e-9


@pytest.mark.parametrize(("kind", "wanted"), [(IMPALA, "algo: appo"), (APPO, "kl_stop")])
def test_a_policy_far_from_those_that_sampled_is_warned_of_once(
    make_model: Any, make_fragment: Any, caplog: pytest.LogCaptureFixture, kind: Any, wanted: str
) -> None:
    config = kind.config_class.from_mapping({**SHAPE, "num_sgd_iter": 1, "sgd_minibatch_size": 64, "eager": True})
    algorithm = kind(config, make_model())
    for behaviour_logp in (-0.7, 3.0, 3.0):
        fragment = make_fragment(kind.sample_plan(config), algorithm.model, 8, 4)
        fragment[c.ACTION_LOGP] = np.full_like(fragment[c.ACTION_LOGP], behaviour_logp)
        algorithm.update(algorithm.make_batch([fragment, fragment]), 0)
        said = [record.getMessage() for record in caplog.records if record.name.startswith("aiorl")]
        assert len(said) == (behaviour_logp > 0)
    (warning,) = said
    for key in ("mean_rho", "num_sgd_iter", "max_policy_lag", wanted):
        assert key in warning


@pytest.mark.parametrize("opt_type", ["adam", "rmsprop"])
def test_takes_the_optimiser_that_was_asked_for(make_model: Any, make_fragment: Any, opt_type: str) -> None:
    own = {"momentum": 0.5} if opt_type == "rmsprop" else {}
    config = IMPALAConfig.from_mapping({**SHAPE, "opt_type": opt_type, "eager": True, **own})
    model = make_model()
    algorithm = IMPALA(config, model)
    assert type(algorithm.compiled.optimizer).__name__.lower() == opt_type
    fragments = [make_fragment(IMPALA.sample_plan(config), model, 8, 4, seed) for seed in range(2)]
    assert not algorithm.update(algorithm.make_batch(fragments), 0).skipped


COEFFICIENTS = {
    "lr": 0.0, "gamma": 0.9, "rho_bar": 1.1, "rho_bar_pg": 0.9, "vf_loss_coeff": 0.7, "entropy_coeff": 0.03,
    "kl_stop": 1.0,
}  # fmt: skip
LENGTH, NUM = 5, 4


@pytest.mark.parametrize("settings", [{}, {"vtrace": False}, {"lambda_": 0.8}, {"normalize_advantages": True}])
def test_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], settings: dict[str, Any]
) -> None:
    config = IMPALAConfig(env="x", **settings)
    model = make_model()
    for name, variable in model.variables.items():
        variable.assign(variable + 0.1 * tf.random.stateless_normal(variable.shape, [7, len(name)]))
    plan = IMPALA.sample_plan(config)
    x = make_fragment(plan, model, LENGTH, NUM, 3, invalid=True)
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = {name: tf.constant(array) for name, array in buffers.sequences([x], NUM, LENGTH).items()}
    coefficients = {name: tf.constant(value) for name, value in COEFFICIENTS.items()}
    total, metrics = IMPALA(config, model).update_spec().loss(batch, coefficients)

    def flat(column: Any) -> Any:
        return column.reshape(LENGTH * NUM, *column.shape[2:])

    inputs, values = (output.numpy() for output in model.forward(tf.constant(flat(x[c.OBS]))))
    values = values.reshape(LENGTH, NUM)
    logp = model.distribution.logp(inputs, flat(x[c.ACTIONS])).reshape(LENGTH, NUM)
    valid = x[c.VALID]
    log_rhos = np.where(valid, logp - x[c.ACTION_LOGP], 0).astype(np.float32)
    returns = vtrace(  # itself held against a slow reference by its own test
        *(
            tf.constant(np.asarray(column, np.float32))
            for column in (
                values, model.forward(tf.constant(x[c.LAST_OBS]))[1], x[c.REWARDS], x[c.TERMINATEDS],
                x[c.TRUNCATEDS], x[c.BOOTSTRAP_VALUES], log_rhos if config.vtrace else 0 * log_rhos,
            )
        ),
        gamma=0.9, lam=config.lambda_, rho_bar=1.1, rho_bar_pg=0.9, valid=tf.constant(valid.astype(np.float32)),
    )  # fmt: skip
    weighted = pg_advantages(returns.advantages, returns.weights, normalize=config.normalize_advantages)
    vs, advantages = returns.vs.numpy()[valid], weighted.numpy()[valid]
    policy_loss = -(logp[valid] * advantages).mean()
    vf_loss = ((values[valid] - vs) ** 2).mean()
    entropy = entropies.entropy(model.distribution, inputs).reshape(LENGTH, NUM)[valid].mean()
    rhos = np.exp(log_rhos)[valid]
    assert metrics["policy_loss"].numpy() == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["vf_loss"].numpy() == pytest.approx(vf_loss, rel=1e-4)
    assert metrics["entropy"].numpy() == pytest.approx(entropy, rel=1e-4)
    assert metrics["kl"].numpy() == pytest.approx((rhos - 1 - np.log(rhos)).mean(), rel=1e-3)
    assert metrics["mean_rho"].numpy() == pytest.approx(np.minimum(rhos, 1.1).mean(), rel=1e-4)
    assert metrics["clipped_rhos"].numpy() == pytest.approx((rhos > 1.1).mean(), abs=1e-6)
    assert total.numpy() == pytest.approx(policy_loss + 0.7 * vf_loss - 0.03 * entropy, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("cell", ["use_lstm", "use_gru"])
def test_a_cell_that_sees_rewards_sees_those_of_the_environment_where_scaled_ones_are_learned_from(
    make_model: Callable[..., Any], cell: str
) -> None:
    """Two steps with rewards 4 and -2, scaled 0.5 and -0.25: targets are vs_1 = -0.25 + 0.9 V, vs_0 = 0.5 + 0.9 vs_1.

    V is the value of the last observation, by a cell that sees -2 there.
    """
    settings = {cell: True, "vf_share_layers": True, "lstm_use_prev_action_reward": True}
    config = IMPALAConfig(env="x", normalize_rewards=True, vtrace=False, model=settings)
    model = make_model(**settings)
    obs = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    actions, rewards = np.array([1, 0, 1], np.int32), np.array([0, 4, -2], np.float32)
    flags = dict.fromkeys((c.TERMINATEDS, c.TRUNCATEDS), np.zeros(2, np.bool_))
    states = {c.state_in(index): np.zeros((2, *shape), np.float32) for index, shape in enumerate(model.state_shapes)}
    zeros = np.zeros(2, np.float32)
    rows = {
        c.EPS_ID: np.zeros(2, np.int64), c.AGENT_INDEX: np.zeros(2, np.int32), c.OBS: obs[:2], c.NEW_OBS: obs[1:],
        c.ACTIONS: actions[1:], c.PREV_ACTIONS: actions[:2], c.REWARDS: rewards[1:], c.PREV_REWARDS: rewards[:2],
        c.SCALED_REWARDS: rewards[1:] / 8, c.ACTION_LOGP: zeros, c.BOOTSTRAP_VALUES: zeros, **flags, **states,
    }  # fmt: skip
    plan = dataclasses.replace(IMPALA.sample_plan(config), return_discount=0.9)
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = buffers.sequences([laid_out(rows, plan, 2)], 1, 2)
    coefficients = {name: tf.constant(value) for name, value in COEFFICIENTS.items()}
    loss = IMPALA(config, model).update_spec().loss
    _, metrics = loss({name: tf.constant(array) for name, array in batch.items()}, coefficients)

    state = [component[:1] for component in states.values()]
    values = []
    for t in range(3):
        _, value, state = model.forward_step(obs[t : t + 1], state, actions[t : t + 1], rewards[t : t + 1])
        values.append(float(value[0]))
    later = -0.25 + 0.9 * values[2]
    expected = ((values[0] - (0.5 + 0.9 * later)) ** 2 + (values[1] - later) ** 2) / 2
    assert metrics["vf_loss"].numpy() == pytest.approx(expected, rel=1e-5)


def test_streams_gradients_of_workers_and_takes_a_step_with_each() -> None:
    config = A3CConfig(env="x", max_policy_lag=7)
    plan = A3C.lease_plan(config)
    assert (plan.mode, plan.fragments_per_batch, plan.outstanding_per_worker) == ("streaming", 1, 2)
    assert plan.max_policy_lag == 7
    assert A3C.gradients_from_workers(config)
    assert not A3C.gradients_from_workers(A3CConfig(env="x", gradients="learner"))
    assert A3C.sample_plan(config) == A2C.sample_plan(A2CConfig(env="x"))


@pytest.mark.parametrize(
    "config",
    [
        lambda: A2CConfig(gradients="workers"),
        lambda: PGConfig(gradients="workers"),
        lambda: BCConfig(gradients="workers", sgd_minibatch_size=2048),
    ],
)
def test_whatever_takes_one_step_on_a_batch_may_have_gradients_of_workers(config: Any) -> None:
    assert config().gradients == "workers"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: PPOConfig(gradients="workers"), "ppo needs them on the learner: it takes several steps"),
        (lambda: MARWILConfig(gradients="workers"), "marwil needs them on the learner: each update moves the scale"),
        (lambda: A3CConfig(num_sgd_iter=3), "passed over 3 times in minibatches of 128 of its 128 env steps.*1 and"),
        (lambda: A2CConfig(gradients="workers", sgd_minibatch_size=64), "in minibatches of 64 of its 256 env steps"),
    ],
)
def test_more_than_one_step_on_a_batch_is_refused_with_what_would_do(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        config()
    assert caught.value.key == "gradients"
    assert "gradients: learner" in caught.value.hint
