"""Settings of algorithms with an actor and critics: their networks unless set otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.config.key import all_keys
from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.registry import config_class

WITH_CRITICS = pytest.mark.parametrize("algo", ["sac", "td3", "cql", "iql"])


def make(algo: str, **settings: Any) -> CommonConfig:
    return config_class(algo).from_mapping(
        {"env": "E", "input": "data" if algo in ("cql", "iql") else "sampler"} | settings
    )


@WITH_CRITICS
def test_networks_are_two_layers_of_256_relu_units_unless_set_otherwise(algo: str) -> None:
    model = make(algo).model
    assert (model.fcnet_hiddens, model.fcnet_activation) == ((256, 256), "relu")
    model = make(algo, model={"fcnet_activation": "tanh"}).model
    assert (model.fcnet_hiddens, model.fcnet_activation) == ((256, 256), "tanh")
    model = make(algo, model={"fcnet_hiddens": [64, 64]}).model
    assert (model.fcnet_hiddens, model.fcnet_activation) == ((64, 64), "relu")


@WITH_CRITICS
def test_the_reference_shows_these_defaults(algo: str) -> None:
    keys = dict(all_keys(config_class(algo)))
    assert (keys["model.fcnet_hiddens"].default, keys["model.fcnet_activation"].default) == ((256, 256), "relu")


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_networks_of_others_are_as_they_were(algo: str) -> None:
    model = make(algo).model
    assert (model.fcnet_hiddens, model.fcnet_activation) == ((64, 64), "tanh")
