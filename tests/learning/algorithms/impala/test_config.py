"""IMPALA's settings: which don't go together, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.errors import ConfigError
from aiorl.learning.algorithms.impala import IMPALAConfig


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


def test_every_key_says_what_it_means() -> None:
    assert all(field.description for field in IMPALAConfig.model_fields.values())
