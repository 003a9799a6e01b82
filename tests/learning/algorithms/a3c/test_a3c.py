"""A3C: its plans, and its settings against those that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.errors import ConfigError
from aiorl.learning.algorithms.a2c import A2C, A2CConfig
from aiorl.learning.algorithms.a3c import A3C, A3CConfig
from aiorl.learning.algorithms.bc import BCConfig
from aiorl.learning.algorithms.marwil import MARWILConfig
from aiorl.learning.algorithms.pg import PGConfig
from aiorl.learning.algorithms.ppo import PPOConfig


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
