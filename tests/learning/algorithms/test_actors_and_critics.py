"""SAC, TD3, CQL and IQL: losses against the same formulas in NumPy, and when each network is
trained.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import BOX, CHOICES, START, Case, descents_of
from gymnasium import spaces

from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.exploration import make_exploration
from aiorl.data import columns as c
from aiorl.errors import UnsupportedSpaceError
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.steps import SEEDS, WEIGHTS

ROWS = 6
MASKS = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1], [1, 1, 0]], np.float32)
DDPG = {
    "twin_q": False,
    "policy_delay": 1,
    "target_update_freq": 1,
    "smooth_target_policy": False,
    "noise_type": "ornstein_uhlenbeck",
    "exploration_noise": 0.2,
}
SPACES = pytest.mark.parametrize(("space", "num_mask"), [(BOX, 0), (CHOICES, 0), (CHOICES, 3)])


class Losses:
    """Losses of a minibatch and of its phases, without any step between them.

    Targets differ from the networks that learn. Some stored actions are beyond the bounds and are
    clipped.
    """

    def __init__(self, name: str, space: Any, num_mask: int = 0, **settings: Any) -> None:
        self.case = case = Case(name, space, num_mask=num_mask, **settings)
        for target in case.learner.update_plan.targets.values():
            for index, variable in enumerate(target.variables.values()):
                variable.assign(variable + 0.1 * (index + 1))
        rng, self.num_mask = np.random.default_rng(3), num_mask
        obs, new_obs = rng.normal(size=(2, ROWS, 4)).astype(np.float32)
        if space is BOX:
            self.actions: Any = rng.uniform(BOX.low - 1, BOX.high, (ROWS, 2)).astype(np.float32)
            self.unit = np.clip((self.actions - BOX.low) / (BOX.high - BOX.low) * 2 - 1, -1, 1)
            assert (self.unit == -1).any()
        else:
            self.actions = START + (
                MASKS.argmax(axis=1) if num_mask else rng.integers(0, 3, ROWS)
            ).astype(np.int32)
            self.unit = None
        if num_mask:
            obs, new_obs = (
                np.concatenate([MASKS, obs], axis=1),
                np.concatenate([MASKS[::-1], new_obs], axis=1),
            )
        self.batch = {
            c.OBS: obs,
            c.NEW_OBS: new_obs,
            c.ACTIONS: self.actions,
            SEEDS: np.array([[1, 2], [3, 4]], np.int32),
            c.N_STEP_RETURNS: rng.normal(size=ROWS).astype(np.float32),
            WEIGHTS: rng.random(ROWS).astype(np.float32),
            c.DISCOUNTS: rng.choice([0.0, 0.9], ROWS).astype(np.float32),
        }
        self.legal = MASKS if num_mask else np.ones((ROWS, 3))
        given = {key: tf.constant(x) for key, x in self.batch.items()}
        self.losses: list[float] = []
        for descent in descents_of(case.learner.update_plan.loop.step):
            found, more = descent.loss(given, {})
            given |= more
            self.losses.append(float(found))
        self.given = {key: np.asarray(x) for key, x in given.items()}

    def q(self, prefix: str, obs: Any, actions: Any = None) -> Any:
        """Return values by all critics, layer by layer: [C, B] of given actions, or [C, B, A]."""
        tensors, found = self.case.tensors, []
        obs = obs[:, self.num_mask :]
        inputs = obs if actions is None else np.concatenate([obs, actions], axis=1)
        for index in range(2 if self.case.config.twin_q else 1):
            name = f"{prefix}/critic_{index}"
            hidden = np.tanh(
                inputs @ tensors[f"{name}/dense_0/kernel"] + tensors[f"{name}/dense_0/bias"]
            )
            values = hidden @ tensors[f"{name}/head/kernel"] + tensors[f"{name}/head/bias"]
            found.append(values if actions is None else values[:, 0])
        return np.array(found)

    def q_of_stored(self, prefix: str = "critics") -> Any:
        """Return Q values [C, B] of the stored actions."""
        q = self.q(prefix, self.batch[c.OBS], self.unit)
        return q if self.unit is not None else q[:, np.arange(ROWS), self.actions - START]

    def means(self, prefix: str, obs: Any) -> Any:
        """Return squashed means [B, D] of an actor, layer by layer."""
        tensors = self.case.tensors
        hidden = np.tanh(
            obs @ tensors[f"{prefix}/policy/dense_0/kernel"]
            + tensors[f"{prefix}/policy/dense_0/bias"]
        )
        return np.tanh(
            hidden @ tensors[f"{prefix}/policy/head/kernel"] + tensors[f"{prefix}/policy/head/bias"]
        )

    def drawn(self, obs: Any, seed: Any) -> tuple[Any, Any]:
        """Return the actor's actions in [-1, 1] and their log-densities."""
        inputs = self.case.model.outputs(tf.constant(obs))[0].numpy().astype(np.float64)
        mean, log_std = inputs[:, :2], inputs[:, 2:]
        noise = tf.random.stateless_normal([len(obs), 2], seed).numpy()
        unit = np.tanh(mean + np.exp(log_std) * noise)
        logp = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - unit**2)
        return unit, logp.sum(axis=1)

    def policy(self, obs: Any) -> tuple[Any, Any]:
        """Return probabilities [B, A] of choices and their logarithms, 0 for illegal actions."""
        logits = self.case.model.outputs(tf.constant(obs))[0].numpy().astype(np.float64)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p, np.log(np.where(p > 0, p, 1.0))

    def next_values(self, alpha: float) -> Any:
        """Return the next values [B] of SAC's actor by the target critics."""
        following = self.batch[c.NEW_OBS]
        if self.unit is not None:
            actions, logp = self.drawn(following, self.batch[SEEDS][0])
            return self.q("target/critics", following, actions).min(axis=0) - alpha * logp
        p, log_p = self.policy(following)
        return (p * (self.q("target/critics", following).min(axis=0) - alpha * log_p)).sum(axis=1)

    def check_critics(self, next_values: Any, penalty: Any = 0.0) -> None:
        """Compare the critics' loss and the errors of rows."""
        targets = self.batch[c.N_STEP_RETURNS] + self.batch[c.DISCOUNTS] * next_values
        errors = self.q_of_stored() - targets
        losses = (0.5 * errors**2 + penalty).sum(axis=0)
        assert self.losses[0] == pytest.approx((losses * self.batch[WEIGHTS]).mean(), rel=1e-4)
        np.testing.assert_allclose(self.given[c.PRIORITIES], np.abs(errors).mean(axis=0), rtol=1e-3)


@SPACES
def test_losses_of_sac_equal_the_formulas(space: Any, num_mask: int) -> None:
    """Densities are of actions scaled to [-1, 1]; expectations and the target entropy are over
    legal choices.
    """
    it = Losses("sac", space, num_mask, initial_alpha=0.5)
    it.check_critics(it.next_values(0.5))
    obs, (_, actor, alpha) = it.batch[c.OBS], it.losses
    if space is BOX:
        actions, logp = it.drawn(obs, it.batch[SEEDS][1])
        assert actor == pytest.approx(
            (0.5 * logp - it.q("critics", obs, actions).min(axis=0)).mean(), rel=1e-4
        )
        assert alpha == pytest.approx(-np.log(0.5) * (logp - 2).mean(), rel=1e-4)
        assert it.given["entropy"] == pytest.approx(-logp.mean(), rel=1e-4)
        return
    p, log_p = it.policy(obs)
    q, entropy = it.q("critics", obs).min(axis=0), -(p * log_p).sum(axis=1)
    assert actor == pytest.approx((p * (0.5 * log_p - q)).sum(axis=1).mean(), rel=1e-4)
    target = 0.98 * np.log(it.legal.sum(axis=1))
    assert alpha == pytest.approx((np.log(0.5) * (entropy - target)).mean(), rel=1e-4)
    assert it.given["entropy"] == pytest.approx(entropy.mean(), rel=1e-4)


@pytest.mark.parametrize("settings", [{"target_noise": 0.4, "target_noise_clip": 0.3}, DDPG])
def test_losses_of_td3_equal_the_formulas(settings: dict[str, Any]) -> None:
    it = Losses("td3", BOX, **settings)
    next_actions = it.means("target/actor", it.batch[c.NEW_OBS])
    if settings is not DDPG:
        noise = 0.4 * tf.random.stateless_normal([ROWS, 2], it.batch[SEEDS][0]).numpy()
        assert (np.abs(noise) > 0.3).any()
        next_actions = np.clip(next_actions + np.clip(noise, -0.3, 0.3), -1, 1)
    it.check_critics(it.q("target/critics", it.batch[c.NEW_OBS], next_actions).min(axis=0))
    q = it.q("critics", it.batch[c.OBS], it.means("weights", it.batch[c.OBS]))
    assert it.losses[1] == pytest.approx(-q[0].mean(), rel=1e-4)


@SPACES
def test_losses_of_cql_equal_the_formulas(space: Any, num_mask: int) -> None:
    """For a Box the integral is estimated from actions drawn in three ways, with densities over
    [-1, 1].
    """
    it = Losses("cql", space, num_mask, cql_weight=2.0)
    obs = it.batch[c.OBS]
    if space is BOX:
        seeds = [
            tf.random.experimental.stateless_fold_in(it.batch[SEEDS][0], way) for way in range(3)
        ]
        uniform = tf.random.stateless_uniform([ROWS, 3, 2], seeds[0], -1.0, 1.0).numpy()
        ways = [(uniform, np.full((ROWS, 3), -2 * np.log(2)))]
        for seen, seed in ((obs, seeds[1]), (it.batch[c.NEW_OBS], seeds[2])):
            actions, logp = it.drawn(np.repeat(seen, 3, axis=0), seed)
            ways.append((actions.reshape(ROWS, 3, 2), logp.reshape(ROWS, 3)))
        sums = sum(
            np.exp(it.q("critics", obs, actions[:, at]) - logp[:, at])
            for actions, logp in ways
            for at in range(3)
        )
        gaps = np.log(sums / 9) - it.q_of_stored()
    else:
        gaps = np.log((np.exp(it.q("critics", obs)) * it.legal).sum(axis=2)) - it.q_of_stored()
    it.check_critics(it.next_values(0.0), 2.0 * gaps)
    assert it.given["cql_gap"] == pytest.approx(gaps.mean(), rel=1e-4)


@pytest.mark.parametrize("space", [BOX, CHOICES])
@pytest.mark.parametrize("max_weight", [100.0, 1.05])
def test_losses_of_iql_equal_the_formulas(space: Any, max_weight: float) -> None:
    it = Losses("iql", space, expectile=0.8, beta=2.0, max_weight=max_weight)
    model = it.case.model
    inputs, values = (part.numpy() for part in model.forward(tf.constant(it.batch[c.OBS])))
    it.check_critics(model.forward(tf.constant(it.batch[c.NEW_OBS]))[1].numpy())
    errors = it.q_of_stored("target/critics").min(axis=0) - values
    counts = np.where(errors < 0, 0.2, 0.8)
    assert it.losses[1] == pytest.approx((counts * errors**2 * it.batch[WEIGHTS]).mean(), rel=1e-4)
    weights = np.minimum(np.exp(2.0 * errors), max_weight)
    logp = model.distribution.logp(inputs, it.actions)
    assert it.losses[2] == pytest.approx(-(weights * logp * it.batch[WEIGHTS]).mean(), rel=1e-4)
    assert it.given["mean_weight"] == pytest.approx(weights.mean(), rel=1e-4)


@pytest.mark.rest_slow
@pytest.mark.parametrize("name", ["sac", "td3", "cql", "iql"])
def test_each_loss_trains_its_own_networks_and_targets_follow(name: str) -> None:
    case = Case(name, BOX, **({"target_gap": 1.0} if name == "cql" else {}))
    descents = descents_of(case.learner.update_plan.loop.step)
    parts = [{id(variable) for variable in descent.variables} for descent in descents]
    assert len(set().union(*parts)) == sum(map(len, parts))
    assert {id(variable) for variable in case.model.trainable_variables} <= set().union(*parts)
    before = case.tensors
    metrics = case.train()[-1].metrics
    now = case.tensors
    assert {
        "mean_q",
        "mean_td_error",
        "loss",
        *(f"{descent.name}_loss" for descent in descents[1:]),
    } <= (metrics.keys())
    names = [f"{network}/critic_0/head/kernel" for network in ("critics", "target/critics")]
    moved, followed = (np.abs(now[name] - before[name]).mean() for name in names)
    assert 0 < followed < 0.3 * moved


def test_sac_learns_the_same_in_any_units_of_actions() -> None:
    """No density over -0.1 to 0.1 has the target entropy of -1."""
    small, large = (spaces.Box(np.float32(-size), np.float32(size), (2,)) for size in (0.1, 100))
    one, other = Case("sac", small), Case("sac", large)
    (fragment,) = one.fragments()
    assert one.update([fragment]).metrics["num_sgd_steps"] == 2
    other.update([{**fragment, c.ACTIONS: fragment[c.ACTIONS] * 1000}])
    for name, tensor in one.tensors.items():
        np.testing.assert_allclose(other.tensors[name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)


def test_weight_decay_applies_to_networks_and_not_to_the_temperature() -> None:
    case = Case("sac", optimizer={"weight_decay": 50.0}, initial_alpha=0.5)
    assert case.train()[-1].metrics["num_sgd_steps"] == 2
    assert abs(case.tensors["log_alpha"] - np.log(0.5)) < 0.1, (
        "decay would move it to 0, a step of Adam only by 0.01"
    )


def test_a_temperature_without_a_learning_rate_is_constant_and_one_critic_is_enough() -> None:
    case = Case("sac", alpha_lr=0, actor_lr=0.1, twin_q=False, initial_alpha=0.5)
    assert case.train()[-1].metrics["alpha"] == pytest.approx(0.5)
    assert not any("critic_1" in name for name in case.tensors)
    assert case.learner.update_plan.knobs_at(0) == {"lr": 0.01, "actor_lr": 0.1, "alpha_lr": 0}


def test_td3_updates_its_actor_and_targets_only_when_they_are_due() -> None:
    """The optimiser's moments rest too: they would move it further without a gradient."""
    case = Case("td3", training_intensity=0.5, learning_starts=16)  # one minibatch per fragment
    case.train(0)
    moved, before = [], case.tensors
    for number in range(1, 5):
        (result,) = case.train(number)
        after = case.tensors
        moved.append(
            {name.partition("/")[0] for name in after if (after[name] != before[name]).any()}
        )
        assert ("actor_loss" in result.metrics) == (number > 1)
        before = after
    assert [kinds >= {"weights", "target"} for kinds in moved] == [False, True, False, True]
    assert moved[0] == moved[2] == {"critics", "optimizer"}
    case = Case("td3", policy_delay=4, target_update_freq=6)
    assert case.learner.update_plan.loop.step.period == 12


@pytest.mark.parametrize("settings", [{}, DDPG])
def test_workers_of_td3_add_noise_within_the_bounds(settings: dict[str, Any]) -> None:
    case = Case("td3", random_timesteps=5, **settings)
    graph, spec = export_acting_graph(case.model)
    acting = ActingGraph(graph, spec)
    acting.set_weights(case.learner.get_weights())
    inputs, _, _ = acting.run(np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32))
    kind = case.model.distribution
    best = kind.deterministic(inputs)
    np.testing.assert_allclose(kind.sample(inputs, np.random.default_rng(1)), best, atol=1e-5)
    exploration = make_exploration(
        algorithm_class("td3").acting_settings(case.config)["exploration"], kind
    )
    assert exploration is not None
    actions, logp = np.empty((500, 2), np.float32), np.empty(500, np.float32)
    noise = exploration.draw_noise(np.random.default_rng(2), 500)
    exploration.choose_into(inputs, noise, actions, logp, timestep=5)
    assert all(BOX.contains(action) for action in actions)
    np.testing.assert_allclose(
        (actions - best).std(axis=0), 2 * case.config.exploration_noise, rtol=0.15
    )
    exploration.choose_into(inputs, noise, actions, logp, timestep=4)
    assert (actions - best).std() > 0.9


@pytest.mark.parametrize("name", ["sac", "iql"])
def test_actions_are_uniform_at_first(name: str) -> None:
    config = config_class(name)(
        env="x", input="sampler" if name == "sac" else {"sampler": 1}, random_timesteps=9
    )
    told = algorithm_class(name).acting_settings(config)
    assert told == {"exploration": {"type": "StochasticSampling", "random_timesteps": 9}}


def test_the_weight_of_cql_rises_with_gaps_above_their_target_and_comes_down_from_its_bound() -> (
    None
):
    case = Case("cql", BOX, target_gap=-100.0, cql_weight=2.0)
    assert case.train()[-1].metrics["cql_weight"] > 2.0, "a mean over two minibatches"
    case = Case("cql", BOX, target_gap=1e6, cql_weight=1e7)
    before = case.tensors["log_cql_weight"]
    assert case.train(0)[-1].metrics["cql_weight"] == pytest.approx(1e6)
    assert case.tensors["log_cql_weight"] < before


@pytest.mark.parametrize("bound", [np.inf, np.finfo(np.float32).max, 1e38])
@pytest.mark.parametrize("name", ["sac", "iql"])
def test_a_box_without_bounds_is_refused(name: str, bound: float) -> None:
    with pytest.raises(UnsupportedSpaceError):
        Case(name, spaces.Box(-bound, bound, (2,)))


def test_images_go_through_convolutions_of_each_network() -> None:
    case = Case("sac", BOX, obs_shape=(10, 10, 1))
    critics = case.learner.update_plan.targets["target/critics"].network
    assert critics.q(tf.zeros([2, 10, 10, 1], tf.uint8), tf.zeros([2, 2])).shape == (2, 2)
    assert "critic_1/conv_0/kernel" in critics.variables
