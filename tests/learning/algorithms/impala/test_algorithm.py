"""IMPALA: its plans, and what is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiorl.data import columns as c
from aiorl.errors import InternalError
from aiorl.learning.algorithms.appo import APPO
from aiorl.learning.algorithms.impala import IMPALA, IMPALAConfig
from aiorl.learning.algorithms.ppo import PPOConfig

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
