"""IQL: its losses against the same formulas in NumPy, its own state, and what workers get of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from restored_replays import assert_goes_on_to_the_bit

from aiorl.data import columns as c
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import ConfigError, UnsupportedSpaceError
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.iql import IQL, IQLConfig
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.models.export import export_acting_graph

NUM_OBS, START = 4, 5
BOX = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
CHOICES = spaces.Discrete(3, start=START)


def make_config(**settings: Any) -> IQLConfig:
    small = {
        "env": "E", "input": "data", "seed": 7, "model": {"fcnet_hiddens": [8], "fcnet_activation": "tanh"},
        "rollout_fragment_length": 8,
        "train_batch_size": 4, "training_intensity": 2, "replay_capacity": 64, "lr": 0.01, "eager": True,
        "learning_starts": 8,
    }  # fmt: skip
    return IQLConfig(**{**small, **settings})


def make(config: IQLConfig, space: spaces.Space[Any]) -> IQL:
    layout = ObsLayout((NUM_OBS,))
    return IQL(config, IQL.build_model(config, Observations((NUM_OBS,), "float32", layout), space, 1))


def make_fragment(number: int, space: spaces.Space[Any], length: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    shape = (length, 1)
    if isinstance(space, spaces.Box):
        actions: Any = rng.uniform(space.low - 1, space.high, (*shape, 2)).astype(np.float32)
    else:
        actions = START + rng.integers(0, 3, shape)
    return {
        c.OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.ACTIONS: actions,
        c.N_STEP_RETURNS: rng.normal(size=shape).astype(np.float32),
        c.DISCOUNTS: rng.choice([0.0, 0.9], shape).astype(np.float32),
        c.PIECE: np.full(shape, number, np.int64),
    }


def feed(algorithm: IQL, numbers: Any, space: spaces.Space[Any] = BOX) -> list[Any]:
    return [algorithm.update(algorithm.make_batch([make_fragment(n, space)]), 8 * n) for n in numbers]


def critics_of(algorithm: IQL, prefix: str, obs: Any, actions: Any = None) -> Any:
    tensors, found = algorithm.get_state().tensors, []
    inputs = obs if actions is None else np.concatenate([obs, actions], axis=1)
    for name in ("critic_0", "critic_1"):
        kernel, bias = (tensors[f"{prefix}/{name}/dense_0/{part}"] for part in ("kernel", "bias"))
        values = np.tanh(inputs @ kernel + bias) @ tensors[f"{prefix}/{name}/head/kernel"]
        values = values + tensors[f"{prefix}/{name}/head/bias"]
        found.append(values if actions is None else values[:, 0])
    return np.array(found)


@pytest.mark.parametrize("space", [BOX, CHOICES])
@pytest.mark.parametrize("max_weight", [100.0, 1.05])
def test_losses_equal_the_formulas_in_numpy(space: spaces.Space[Any], max_weight: float) -> None:
    algorithm = make(make_config(expectile=0.8, beta=2.0, max_weight=max_weight), space)
    for index, variable in enumerate(algorithm.targets["target/critics"].variables.values()):
        variable.assign(variable + 0.1 * (index + 1))
    batch = {name: array[:, 0] for name, array in make_fragment(3, space, 6).items() if name != c.PIECE}
    batch[WEIGHTS] = np.random.default_rng(4).random(6).astype(np.float32)
    unit, at = None, None
    if space is BOX:
        unit = np.clip((batch[c.ACTIONS] - BOX.low) / (BOX.high - BOX.low) * 2 - 1, -1, 1)
    else:
        batch[c.ACTIONS] = batch[c.ACTIONS].astype(np.int32)
        at = (slice(None), np.arange(6), batch[c.ACTIONS] - START)
    inputs, values = (part.numpy() for part in algorithm.model.forward(tf.constant(batch[c.OBS])))
    _, next_values = algorithm.model.forward(tf.constant(batch[c.NEW_OBS]))

    spec = algorithm.update_spec()
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    critic_loss, given = spec.loss(tensors, {})
    tensors |= given
    found = []
    for phase in spec.phases:
        loss, more = phase.loss(tensors, {})
        tensors |= more
        found.append(float(loss))

    targets = batch[c.N_STEP_RETURNS] + batch[c.DISCOUNTS] * next_values.numpy()
    q, target_q = (critics_of(algorithm, name, batch[c.OBS], unit) for name in ("critics", "target/critics"))
    q, target_q = (q, target_q) if at is None else (q[at], target_q[at])
    expected = (0.5 * ((q - targets) ** 2).sum(axis=0) * batch[WEIGHTS]).mean()
    assert float(critic_loss) == pytest.approx(expected, rel=1e-4)
    errors = target_q.min(axis=0) - values
    counts = np.where(errors < 0, 0.2, 0.8)
    assert found[0] == pytest.approx((counts * errors**2 * batch[WEIGHTS]).mean(), rel=1e-4)
    weights = np.minimum(np.exp(2.0 * errors), max_weight)
    logp = algorithm.model.distribution.logp(inputs, batch[c.ACTIONS])
    assert found[1] == pytest.approx(-(weights * logp * batch[WEIGHTS]).mean(), rel=1e-4)
    assert float(tensors["mean_weight"]) == pytest.approx(weights.mean(), rel=1e-4)


def test_each_loss_trains_its_own_network_in_one_compiled_call() -> None:
    algorithm = make(make_config(eager=False, xla="off", model={"fcnet_hiddens": [8], "free_log_std": True}), BOX)
    algorithm.warm_up()
    results = feed(algorithm, range(1, 4))
    assert [result.metrics["num_sgd_steps"] for result in results] == [4, 4, 4]
    assert algorithm.compiled.traces == 1
    assert {"mean_q", "mean_value", "value_loss", "policy_loss", "mean_weight", "entropy"} <= results[-1].metrics.keys()
    names = [{id(variable) for variable in phase.variables} for phase in algorithm.update_spec().phases]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == len(algorithm.model.trainable_variables)


def test_the_next_update_after_a_restore_is_equal_to_the_bit() -> None:
    """G5, with targets and three optimisers."""
    first, second = (make(make_config(training_intensity=0.5, seed=seed), BOX) for seed in (7, 8))
    feed(first, [1, 2, 1])
    assert_goes_on_to_the_bit(first, second, lambda algorithm: feed(algorithm, [2, 4]))


def test_workers_get_policy_and_values_but_no_critics() -> None:
    algorithm = make(make_config(), CHOICES)
    _, spec = export_acting_graph(algorithm.model)
    assert {weight.name.partition("/")[0] for weight in spec.weights} == {"policy", "value"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"expectile": 1.0}, "expectile"),
        ({"model": {"vf_share_layers": True}}, "model.vf_share_layers"),
        ({"postprocess_inputs": False}, "postprocess_inputs"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**settings)
    assert caught.value.key == key


def test_a_box_without_bounds_is_refused() -> None:
    with pytest.raises(UnsupportedSpaceError, match="bounded on both sides"):
        make(make_config(), spaces.Box(-np.inf, np.inf, (2,)))
