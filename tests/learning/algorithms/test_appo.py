"""APPO: its loss against the same formulas in NumPy, its plans and its target network."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import entropies
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from aiorl.acting.postprocess import gae
from aiorl.data import columns as c
from aiorl.errors import CheckpointError, ConfigError
from aiorl.learning.algorithms.algorithm import AlgorithmState
from aiorl.learning.algorithms.appo import APPO, APPOConfig
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.impala import IMPALA, IMPALAConfig
from aiorl.learning.algorithms.ppo import PPO, PPOConfig
from aiorl.learning.algorithms.rows import model_columns
from aiorl.learning.algorithms.streaming import judge
from aiorl.learning.losses.vtrace import pg_advantages, vtrace

SHAPE: dict[str, Any] = {
    "env": "x", "seed": 0, "rollout_fragment_length": 8, "num_envs_per_worker": 4, "train_batch_size": 64,
    "sgd_minibatch_size": 64, "num_sgd_iter": 1, "eager": True, "lr": 0.01,
}  # fmt: skip
COEFFICIENTS = {
    "lr": 0.0, "gamma": 0.9, "rho_bar": 1.1, "rho_bar_pg": 0.9, "vf_loss_coeff": 0.7, "entropy_coeff": 0.03,
    "clip_param": 0.1, "kl_coeff": 0.4, "kl_stop": 1.0,
}  # fmt: skip
LENGTH, NUM = 5, 4


def shaken(network: Any, seed: int, size: float) -> None:
    """Move all variables of a network, or of its target, at random."""
    for name, variable in network.variables.items():
        variable.assign(variable + size * tf.random.stateless_normal(variable.shape, [seed, len(name)]))


def judged_by(network: Any, algorithm: APPO) -> APPO:
    """The algorithm, with the weights of a network in its target."""
    for name, variable in algorithm.targets["target"].variables.items():
        variable.assign(network.variables[name])
    return algorithm


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32)], ids=["choice", "box"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vtrace": False, "kl_coeff": 0.4},
        {"lambda_": 0.8, "normalize_advantages": True},
        {"target_worker_clipping": 1.05, "sgd_minibatch_size": 64},
    ],
)
def test_loss_equals_the_formula_in_numpy(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], space: Any, settings: dict[str, Any]
) -> None:
    """Ratios are those of the target network in V-trace, and to the target network in the surrogate."""
    config = APPOConfig(env="x", **settings)
    model, old = make_model(space), make_model(space)
    shaken(old, 5, 0.2)
    shaken(model, 7, 0.1)
    plan = APPO.sample_plan(config)
    x = make_fragment(plan, model, LENGTH, NUM, 3, invalid=True)
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = {name: tf.constant(array) for name, array in buffers.sequences([x], NUM, LENGTH).items()}
    coefficients = {name: tf.constant(value) for name, value in COEFFICIENTS.items()}
    spec = judged_by(old, APPO(config, model)).update_spec()
    assert spec.begin is not None
    total, metrics = spec.loss(spec.begin(batch, coefficients), coefficients)

    def flat(column: Any) -> Any:
        return column.reshape(LENGTH * NUM, *column.shape[2:])

    def judged(network: Any) -> tuple[Any, Any, Any]:
        inputs, values = (output.numpy() for output in network.forward(tf.constant(flat(x[c.OBS]))))
        logp = network.distribution.logp(inputs, flat(x[c.ACTIONS])).reshape(LENGTH, NUM)
        return inputs, logp, values.reshape(LENGTH, NUM)

    (inputs, logp, values), (old_inputs, old_logp, old_values) = judged(model), judged(old)
    valid, mu = x[c.VALID], x[c.ACTION_LOGP]
    log_rhos = np.where(valid, old_logp - mu, 0)
    returns = vtrace(  # itself held against a slow reference by its own test
        *(
            tf.constant(np.asarray(column, np.float32))
            for column in (
                old_values, old.forward(tf.constant(x[c.LAST_OBS]))[1], x[c.REWARDS], x[c.TERMINATEDS],
                x[c.TRUNCATEDS], x[c.BOOTSTRAP_VALUES], log_rhos if config.vtrace else 0 * log_rhos,
            )
        ),
        gamma=0.9, lam=config.lambda_, rho_bar=1.1, rho_bar_pg=0.9, valid=tf.constant(valid.astype(np.float32)),
    )  # fmt: skip
    weighted = pg_advantages(returns.advantages, returns.weights, normalize=config.normalize_advantages)
    vs, advantages = returns.vs.numpy()[valid], weighted.numpy()[valid]
    ratio = (np.minimum(np.exp(mu - old_logp), config.target_worker_clipping) * np.exp(logp - mu))[valid]
    policy_loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages).mean()
    vf_loss = ((values[valid] - vs) ** 2).mean()
    entropy = entropies.entropy(model.distribution, inputs).reshape(LENGTH, NUM)[valid].mean()
    kl = entropies.kl(model.distribution, old_inputs, inputs).reshape(LENGTH, NUM)[valid].mean()
    rhos = np.exp(log_rhos)[valid]
    expected = policy_loss + 0.7 * vf_loss - 0.03 * entropy + 0.4 * kl * (config.kl_coeff > 0)
    assert metrics["policy_loss"].numpy() == pytest.approx(policy_loss, rel=1e-4, abs=1e-5)
    assert metrics["vf_loss"].numpy() == pytest.approx(vf_loss, rel=1e-4)
    assert metrics["entropy"].numpy() == pytest.approx(entropy, rel=1e-4)
    assert metrics["kl"].numpy() == pytest.approx(kl, rel=1e-3, abs=1e-5)
    assert kl > 1e-3
    assert metrics["clip_fraction"].numpy() == pytest.approx((np.abs(ratio - 1) > 0.1).mean(), abs=1e-6)
    assert metrics["mean_rho"].numpy() == pytest.approx(np.minimum(rhos, 1.1).mean(), rel=1e-4)
    assert metrics["clipped_rhos"].numpy() == pytest.approx((rhos > 1.1).mean(), abs=1e-6)
    assert total.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_target_network_judges_no_more_steps_at_a_time_than_a_minibatch_has(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of complete episodes, which are longer than the sequences that a config names."""
    config = APPOConfig(
        env="x", batch_mode="complete_episodes", rollout_fragment_length=4, num_envs_per_worker=1,
        train_batch_size=48, sgd_minibatch_size=24,
    )  # fmt: skip
    model = make_model(spaces.Discrete(3))
    plan = APPO.sample_plan(config)
    buffers = BatchBuffers(model_columns(model, plan.columns))
    batch = buffers.sequences([make_fragment(plan, model, 8, 6, 3)], 6, 8)
    sizes: list[tuple[int, ...]] = []

    def noting(model: Any, columns: Any, weights: Any) -> Any:
        sizes.append(tuple(columns[c.VALID].shape))
        return judge(model, columns, weights)

    monkeypatch.setattr("aiorl.learning.algorithms.appo.judge", noting)
    begin = APPO(config, model).update_spec().begin
    assert begin is not None
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    assert len(begin(tensors, {name: tf.constant(value) for name, value in COEFFICIENTS.items()})["packed"]) == 48
    assert set(sizes) == {(8, 3)}


@pytest.mark.parametrize("model", [{}, {"use_gru": True}])
def test_leases_and_columns_are_those_of_impala(model: dict[str, Any]) -> None:
    settings = {**SHAPE, "outstanding_fragments_per_worker": 5, "max_policy_lag": 7, "model": model}
    appo, impala = APPOConfig.from_mapping(settings), IMPALAConfig.from_mapping(settings)
    assert APPO.lease_plan(appo) == IMPALA.lease_plan(impala)
    assert (APPO.lease_plan(appo).mode, APPO.lease_plan(appo).max_policy_lag) == ("streaming", 7)
    assert APPO.sample_plan(appo) == IMPALA.sample_plan(impala)


class Learner:
    """APPO with a small network, trained on made-up fragments."""

    def __init__(self, make_model: Any, make_fragment: Any, **settings: Any) -> None:
        config = APPOConfig.from_mapping({**SHAPE, **settings})
        self.algorithm = APPO(config, make_model(**settings.get("model", {})))
        self.make_fragment, self.plan = make_fragment, APPO.sample_plan(config)

    def train(self, seed: int, *, spoilt: bool = False) -> Any:
        model = self.algorithm.model
        fragments = [self.make_fragment(self.plan, model, 8, 4, 10 * seed + index) for index in range(2)]
        if spoilt:
            fragments[0][c.REWARDS][0, 0] = np.nan
        return self.algorithm.update(self.algorithm.make_batch(fragments), 0)

    def weights(self, prefix: str) -> dict[str, Any]:
        tensors = self.algorithm.get_state().tensors
        return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


@pytest.fixture
def learner(make_model: Callable[..., Any], make_fragment: Callable[..., Any]) -> Callable[..., Learner]:
    return lambda **settings: Learner(make_model, make_fragment, **settings)


def equal(x: dict[str, Any], y: dict[str, Any]) -> bool:
    return x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("every", [1, 3])
def test_the_target_network_is_the_one_of_so_many_updates_ago(learner: Callable[..., Learner], every: int) -> None:
    it = learner(target_update_freq=every)
    seen = [it.weights("weights/")]
    for number in range(1, 7):
        assert not it.train(number).skipped
        seen.append(it.weights("weights/"))
        assert not equal(seen[-1], seen[-2])
        assert equal(it.weights("target/"), seen[number - number % every])


@pytest.mark.parametrize("size", [16, 24, 5])
def test_minibatches_are_rows_of_any_sequence_and_each_epoch_visits_every_transition_once(
    learner: Callable[..., Learner], size: int
) -> None:
    it = learner(sgd_minibatch_size=size, num_sgd_iter=2)
    fragments = [it.make_fragment(it.plan, it.algorithm.model, 8, 4, seed, invalid=True) for seed in range(2)]
    batch = it.algorithm.make_batch(fragments)
    order, num_minibatches = it.algorithm._order(batch)
    (transitions,) = np.nonzero(it.algorithm.buffers.column(batch, c.VALID).ravel())
    assert num_minibatches == 2 * -(-len(transitions) // size)
    for epoch in order[:num_minibatches].reshape(2, -1):
        np.testing.assert_array_equal(np.sort(epoch[: len(transitions)]), transitions)
        assert set(epoch) <= set(transitions)
    assert len({row // 8 for row in order[0]}) > 2, "of several sequences"
    assert it.algorithm.update(batch, 0).metrics["num_sgd_steps"] == num_minibatches


def test_minibatches_of_recurrent_networks_are_whole_sequences(learner: Callable[..., Learner]) -> None:
    it = learner(sgd_minibatch_size=16, model={"use_gru": True})
    fragments = [it.make_fragment(it.plan, it.algorithm.model, 8, 4, seed) for seed in range(2)]
    order, _ = it.algorithm._order(it.algorithm.make_batch(fragments))
    assert order.shape == (4, 2)
    assert set(order.ravel()) == set(range(8))


def test_an_update_that_is_skipped_moves_the_target_network_neither(learner: Callable[..., Learner]) -> None:
    it = learner(target_update_freq=2)
    it.train(1)
    before = it.algorithm.get_state().tensors
    assert it.train(2, spoilt=True).bad_column == c.REWARDS
    assert equal(it.algorithm.get_state().tensors, before)
    it.train(3)
    assert equal(it.weights("target/"), it.weights("weights/"))


@pytest.mark.parametrize("model", [{}, pytest.param({"use_lstm": True}, marks=pytest.mark.slow)])
def test_restored_between_two_of_its_moves_it_learns_bit_by_bit_the_same(
    learner: Callable[..., Learner], model: dict[str, Any]
) -> None:
    """And not the same where the target network is another one, so that this would be seen."""
    settings = {"target_update_freq": 3, "kl_coeff": 0.3, "sgd_minibatch_size": 32, "model": model}
    first = learner(**settings)
    first.train(1)
    first.train(2)
    state = first.algorithm.get_state()
    stored = AlgorithmState(state.tensors, json.loads(json.dumps(state.values)))
    again, astray = learner(**settings, seed=9), learner(**settings, seed=9)
    for it in (again, astray):
        it.algorithm.set_state(stored)
    astray.algorithm.weights_replaced()
    for seed in (3, 4):
        wanted = first.train(seed)
        assert again.train(seed).metrics == wanted.metrics
        astray.train(seed)
        assert equal(again.algorithm.get_state().tensors, first.algorithm.get_state().tensors)
    assert not equal(astray.weights("weights/"), first.weights("weights/"))


def test_a_state_without_target_network_is_refused(learner: Callable[..., Learner]) -> None:
    it = learner()
    state = it.algorithm.get_state()
    kept = {name: array for name, array in state.tensors.items() if not name.startswith("target/")}
    with pytest.raises(CheckpointError, match="target/"):
        it.algorithm.set_state(AlgorithmState(kept, state.values))


def test_weights_of_another_origin_are_the_target_networks_too(learner: Callable[..., Learner]) -> None:
    it, other = learner(target_update_freq=5), learner(target_update_freq=5)
    other.train(1)
    it.algorithm.model.set_weights(other.algorithm.get_weights())
    it.algorithm.weights_replaced()
    assert equal(it.weights("target/"), other.weights("weights/"))


@pytest.mark.parametrize(("target", "factor"), [(1e-6, 1.5), (1e6, 0.5)])
def test_the_penalty_adapts_as_in_ppo(learner: Callable[..., Learner], target: float, factor: float) -> None:
    it = learner(kl_coeff=0.2, kl_target=target, target_update_freq=9)
    it.train(1)  # of one step, before which the policy is the target network's
    metrics = it.train(2).metrics
    assert metrics["kl"] > 1e-5
    assert metrics["cur_kl_coeff"] == pytest.approx(0.1)
    assert it.algorithm.coefficients(0)["kl_coeff"] == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train_batch_size": 4000, "rollout_fragment_length": 64, "num_envs_per_worker": 32}, "train_batch_size"),
        (
            {"sgd_minibatch_size": 100, "rollout_fragment_length": 64, "model": {"use_lstm": True}},
            "sgd_minibatch_size",
        ),
        ({"clip_param_schedule": [[0, 0.2], [9, 0.0]]}, "clip_param_schedule"),
        ({"target_update_freq": 0}, "target_update_freq"),
        ({"target_worker_clipping": 0}, "target_worker_clipping"),
        ({"max_policy_lag": -1}, "max_policy_lag"),
        ({"vf_clip_param": 1.0}, "vf_clip_param"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        APPOConfig.from_mapping({"env": "CartPole-v1", **settings})
    assert caught.value.key == key


@pytest.mark.parametrize("model", [{}, {"use_gru": True}])
def test_on_what_the_newest_policy_sampled_an_update_is_that_of_ppo(
    make_model: Callable[..., Any], make_fragment: Callable[..., Any], model: dict[str, Any]
) -> None:
    """GAE by the network that sampled, computed by the worker's code, against V-trace by the target network."""
    shared = {**SHAPE, "num_sgd_iter": 4, "gamma": 0.95, "lambda_": 0.8, "lr": 0.05, "model": model}
    shared["normalize_advantages"] = True
    appo = APPO(APPOConfig.from_mapping(shared), make_model(**model))
    ppo = PPO(PPOConfig.from_mapping(shared), make_model(**model))
    raw, ready = [], []
    for seed in range(2):
        x = make_fragment(APPO.sample_plan(APPOConfig.from_mapping(shared)), appo.model, 8, 4, seed)
        columns = {name: tf.constant(array) for name, array in {**x, c.VALID: np.ones((8, 4), np.float32)}.items()}
        for name in (c.TERMINATEDS, c.TRUNCATEDS):
            columns[name] = tf.cast(columns[name], tf.float32)
        seen = judge(appo.model, columns)
        x[c.ACTION_LOGP] = seen.logp.numpy()
        advantages, targets = gae(
            x[c.REWARDS], seen.values.numpy(), seen.last_values.numpy(), x[c.TERMINATEDS], x[c.TRUNCATEDS],
            x[c.BOOTSTRAP_VALUES], gamma=0.95, lam=0.8,
        )  # fmt: skip
        raw.append(x)
        every = {**x, c.ADVANTAGES: advantages, c.VALUE_TARGETS: targets}
        plan = PPO.sample_plan(PPOConfig.from_mapping(shared))
        ready.append({name: every[name] for name in plan.columns})
    found = appo.update(appo.make_batch(raw), 0).metrics
    expected = ppo.update(ppo.make_batch(ready), 0).metrics
    assert found["clip_fraction"] > 0
    for name in ("policy_loss", "vf_loss", "entropy", "clip_fraction", "grad_gnorm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-4), name
