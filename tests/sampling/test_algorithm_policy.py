"""RolloutWorkers whose policy learns like an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.errors import BatchError, PolicyError
from aiorl.learning.algorithms.a2c import A2CConfig
from aiorl.learning.algorithms.dqn import DQNConfig
from aiorl.learning.algorithms.impala import IMPALAConfig
from aiorl.learning.algorithms.pg import PGConfig
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.policy_learning import algorithm_policy

SMALL: dict[str, Any] = {"model": {"fcnet_hiddens": [8]}, "eager": True, "lr": 0.01}

Make = Callable[..., RolloutWorker]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RolloutWorker] = []

    def worker(config: CommonConfig, **settings: Any) -> RolloutWorker:
        made.append(
            RolloutWorker(
                "CartPole-v1",
                algorithm_policy(config),
                **{"rollout_fragment_length": 32, "seed": 1, **settings},
            )
        )
        return made[-1]

    yield worker
    for one in made:
        one.stop()


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(np.array_equal(array, right[name]) for name, array in left.items())


@pytest.mark.parametrize(
    "config",
    [
        A2CConfig(**SMALL),
        IMPALAConfig(**SMALL, rollout_fragment_length=8),
        pytest.param(PGConfig(**SMALL), marks=pytest.mark.slow),
        pytest.param(PPOConfig(**SMALL), marks=pytest.mark.slow),
        pytest.param(
            A2CConfig(
                **{**SMALL, "model": {"fcnet_hiddens": [8], "use_gru": True}},
                rollout_fragment_length=8,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda config: f"{config.algo}{'-gru' * config.model.use_gru}",
)
def test_computing_and_applying_gradients_equals_learning_on_the_batch(
    make: Make, config: CommonConfig
) -> None:
    """The gradients come from the code that trains in a run."""
    worker, twin = make(config), make(config)
    rows = worker.sample()
    before = worker.get_weights()["default_policy"]
    gradients, info = worker.compute_gradients(rows)
    assert info["batch_count"] == info["num_rows"] == rows.count
    assert "loss" in info
    assert gradients.keys() == before.keys()
    assert equal(before, worker.get_weights()["default_policy"])
    assert worker.apply_gradients(gradients)["grad_gnorm"] > 0
    after = worker.get_weights()["default_policy"]
    assert not equal(before, after)
    learned = twin.learn_on_batch(twin.sample())
    assert learned["loss"] == pytest.approx(info["loss"])
    assert "batch_count" not in learned
    for name, weight in twin.get_weights()["default_policy"].items():
        np.testing.assert_allclose(weight, after[name], rtol=1e-5, atol=1e-6)


def test_sampling_and_learning_in_minibatches_moves_the_policy_that_acts(make: Make) -> None:
    worker = make(PPOConfig(**SMALL))
    before = worker.get_weights()["default_policy"]
    info, count = worker.sample_and_learn(32, 2, 16, [c.ADVANTAGES])
    assert count == 32
    assert {"policy_loss", "kl", "loss", "grad_gnorm"} <= info["default_policy"].keys()
    assert not equal(before, worker.get_weights()["default_policy"])
    with pytest.raises(AssertionError, match="32"):
        worker.sample_and_learn(31, 1, 0, [])


def test_a_saved_state_restores_the_optimizer(make: Make) -> None:
    config = A2CConfig(**SMALL)
    first, second = make(config), make(config, seed=2)
    rows = first.sample()
    first.learn_on_batch(rows)
    second.restore(first.save())
    for worker in (first, second):
        worker.learn_on_batch(rows)
    assert equal(first.get_weights()["default_policy"], second.get_weights()["default_policy"])


def test_a_batch_that_cannot_be_learned_from_changes_nothing(make: Make) -> None:
    worker = make(A2CConfig(**SMALL))
    rows = worker.sample()
    before = worker.get_weights()["default_policy"]
    spoiled = rows.copy()
    spoiled[c.ADVANTAGES][3] = np.nan
    with pytest.raises(PolicyError, match=c.ADVANTAGES):
        worker.learn_on_batch(spoiled)
    del spoiled[c.VALUE_TARGETS]
    with pytest.raises(BatchError, match=c.VALUE_TARGETS):
        worker.learn_on_batch(spoiled)
    assert equal(before, worker.get_weights()["default_policy"])
    with pytest.raises(NotImplementedError, match="DQN"):
        algorithm_policy(DQNConfig(model={"use_lstm": True}))
