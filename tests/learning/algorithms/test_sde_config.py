"""Settings of noise of the state (gSDE): who takes them, and what workers are told."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import ALGORITHMS, algorithm_class, config_class

WITH_IT = ("a2c", "a3c", "appo", "impala", "pg", "ppo", "sac")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_algorithms_that_explore_a_box_by_a_gaussian_take_it_and_others_refuse_it_by_name(algo: str) -> None:
    kind = config_class(algo)
    if algo in WITH_IT:
        assert kind.from_mapping({"use_sde": True}).state_dependent_noise is not None
        assert kind.from_mapping({}).state_dependent_noise is None
        return
    with pytest.raises(ConfigError) as caught:
        kind.from_mapping({"use_sde": True})
    assert caught.value.key == "use_sde"


@pytest.mark.parametrize("algo", WITH_IT)
def test_workers_are_told_how_long_a_matrix_lasts(algo: str) -> None:
    """-1: as long as a fragment."""
    kind = algorithm_class(algo)
    for given, steps in ((-1, kind.config_class().rollout_fragment_length), (3, 3)):
        told = kind.acting_settings(kind.config_class(use_sde=True, sde_sample_freq=given))["exploration"]
        assert (told["type"], told["sample_freq"]) == ("StateDependentNoise", steps)
    assert "StateDependentNoise" not in str(kind.acting_settings(kind.config_class()))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"sde_sample_freq": 4}, "sde_sample_freq"),
        ({"sde_initial_log_std": -1.0}, "sde_initial_log_std"),
        ({"use_sde": True, "sde_sample_freq": 0}, "sde_sample_freq"),
        ({"use_sde": True, "model": {"free_log_std": True}}, "model.free_log_std"),
        ({"use_sde": True, "model": {"custom_model": "a:b"}}, "model.custom_model"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_class("ppo").from_mapping(settings)
    assert caught.value.key == key
