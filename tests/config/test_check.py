from __future__ import annotations

from typing import Any

import pytest

from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.pg import PGConfig
from aiorl.learning.algorithms.registry import config_class


@pytest.mark.parametrize(
    ("algo", "values", "hint"),
    [
        ("ppo", {"model": {"fcnet_hiddens": "64,64"}}, "Write it as [64, 64]."),
        ("ppo", {"stop_time_s": "5m"}, "In seconds it is 300."),
        ("ppo", {"model": {"fcnet_hiddens": "wide"}}, ""),
    ],
)
def test_a_list_or_a_time_in_another_form_is_refused_with_the_form_it_has_here(
    algo: str, values: dict[str, Any], hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_class(algo).from_mapping(values)
    assert caught.value.hint == hint


def test_what_a_list_may_hold_is_named_and_the_nearest_of_it_offered() -> None:
    for wrong, hint in (("foo", ""), ("simulatoin", " Did you mean 'simulation'?")):
        with pytest.raises(ConfigError) as caught:
            CommonConfig.from_mapping({"input_evaluation": [wrong]})
        assert str(caught.value) == f"input_evaluation must be a list of is, wis or simulation, not {wrong!r}.{hint}"


@pytest.mark.parametrize(
    ("algo", "name", "hint"),
    [
        ("dqn", "buffer_size", "Here it is called replay_capacity (rows)."),
        ("ppo", "buffer_size", "It is replay_capacity in other algorithms."),
        ("ppo", "batch_size", "Here it is called sgd_minibatch_size (env steps)."),
        ("ppo", "n_steps", "Here it is called rollout_fragment_length (steps)."),
        ("dqn", "n_steps", "Here it is called n_step (steps)."),
        ("td3", "policy_kwargs", "Here it is called model."),
        (
            "dqn",
            "target_network_update_freq",
            "Here it is called target_update_freq (minibatches). RLlib counts env steps",
        ),
        ("ppo", "use_gae", "Advantages always come from GAE."),
        ("ppo", "zzz", "`python -m aiorl.learner --help-config` lists all keys."),
    ],
)
def test_a_key_of_other_libraries_is_refused_with_its_name_in_this_config(algo: str, name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_class(algo).from_mapping({name: 1})
    assert (caught.value.key, caught.value.message) == (name, f"There is no key {name}.")
    assert caught.value.hint.startswith(hint)


def test_a_key_of_other_libraries_inside_model_is_refused_likewise() -> None:
    hints = {
        "net_arch": "Here it is called model.fcnet_hiddens.",
        "custom_options": "Here it is called model. Keys of your own",
        "fcnet_hidden": r"Did you mean 'fcnet_hiddens'\?",
        "mine": "Only a model of your own",
    }
    for name, hint in hints.items():
        with pytest.raises(ConfigError, match=rf"There is no key model.{name}\. {hint}"):
            config_class("ppo")(model={name: [8]})


@pytest.mark.parametrize(
    "name", ["target_kl", "verbose", "exploration_final_eps", "start_steps", "memory_size", "max_steps"]
)
def test_no_key_is_guessed_by_its_spelling_where_the_meaning_is_another(name: str) -> None:
    for algo in ("ppo", "dqn", "sac"):
        with pytest.raises(ConfigError) as caught:
            config_class(algo).from_mapping({name: 1})
        assert caught.value.hint
        assert "Did you mean" not in caught.value.hint


@pytest.mark.parametrize("values", [{"lr": {"grid_search": [1, 2]}}, {"model": {"lr": {"grid_search": [1]}}}])
def test_a_grid_search_is_refused_with_what_searches(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="optuna_sweep") as caught:
        config_class("ppo").from_mapping(values)
    assert caught.value.key.endswith("lr")


def test_a_key_that_an_algorithm_fixes_takes_its_one_value_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        PGConfig(lambda_=0.5)
    assert caught.value.key == "lambda_"
