"""Algorithms by name, which are known without loading TensorFlow."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import aiorl
from aiorl import algorithms as parts
from aiorl.config import deep_update
from aiorl.config.rllib_file import other_names
from aiorl.config.yaml_text import parse_value
from aiorl.errors import ConfigError, UnknownAlgorithmError
from aiorl.learning.algorithm import Algorithm, experience_of
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import algorithm_class, config_class


def test_the_nearest_name_is_offered_for_an_unknown_algorithm() -> None:
    with pytest.raises(UnknownAlgorithmError, match="'impala'") as caught:
        config_class("impalla")
    assert caught.value.key == "algo"
    assert ", ".join(sorted(ALGORITHMS)) in str(caught.value)
    with pytest.raises(UnknownAlgorithmError):
        algorithm_class("dqnn")


OTHER_ALGORITHMS = other_names()["algorithms"]


@pytest.mark.parametrize("name", sorted(OTHER_ALGORITHMS))
def test_a_name_from_the_literature_is_refused_with_the_matching_algorithm_and_settings(
    name: str,
) -> None:
    with pytest.raises(UnknownAlgorithmError) as caught:
        config_class(name.upper())
    assert caught.value.value == name.upper()
    assert OTHER_ALGORITHMS[name] in caught.value.hint
    assert name not in ALGORITHMS
    algo, _, text = OTHER_ALGORITHMS[name].partition(";")[0].partition(" with ")
    settings: dict[str, Any] = {}
    for dotted, value in parse_value(f"{{{text}}}").items():
        for part in reversed(dotted.split(".")):
            value = {part: value}
        settings = deep_update(settings, value)
    config_class(algo)(**settings)


def test_ddpg_is_td3_without_its_additions() -> None:
    with pytest.raises(UnknownAlgorithmError, match=r"td3 .*twin_q: false, policy_delay: 1,"):
        config_class("ddpg")
    readme = Path(__file__).parents[3] / "docs" / "algorithms" / "td3.md"
    _, _, settings = OTHER_ALGORITHMS["ddpg"].partition(" with ")
    assert f"is `{settings}`" in " ".join(readme.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_only_offline_algorithms_require_stored_experience(name: str) -> None:
    config = config_class(name)(env="CartPole-v1")
    refused = pytest.raises(ConfigError, check=lambda error: error.key == "input")
    assert config.is_offline == (name in {"bc", "cql", "iql", "marwil"})
    with refused if config.is_offline else nullcontext():
        experience_of(algorithm_class(name), config).lease_plan()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_each_algorithm_has_its_class_and_a_config_that_names_it(name: str) -> None:
    found = algorithm_class(name)
    assert issubclass(found, Algorithm)
    assert found.config_class is config_class(name.upper())
    assert config_class(name)().algo == name
    kind = ALGORITHMS[name]
    assert getattr(aiorl, f"{kind}Config") is found.config_class
    assert getattr(aiorl, f"{kind}Trainer")._name == name
    assert (Path(__file__).parents[3] / "docs" / "algorithms" / f"{name}.md").is_file()


MINE = """
from aiorl.learning.algorithm import Algorithm
from aiorl.learning.algorithms.pg import PG
from aiorl.learning.algorithms.pg import PGConfig
from aiorl.config.key import changed

class MineConfig(PGConfig):
    algo: str = changed(PGConfig, "algo", "my_algorithms:Mine")

class Mine(PG):
    config_class = MineConfig

class Renamed(PG):
    config_class = PGConfig

class Bare(PG):
    config_class = dict

class Unfinished(Algorithm):
    config_class = MineConfig

class Learnless(Algorithm):
    config_class = MineConfig
    experience = PG.experience
"""


@pytest.fixture
def my_algorithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_algorithms.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_algorithms", raising=False)


def test_a_custom_algorithm_is_named_by_its_import_path(my_algorithms: None) -> None:
    found = algorithm_class("my_algorithms:Mine")
    assert (found.__name__, found.config_class) == ("Mine", config_class("my_algorithms:Mine"))
    config = config_class("my_algorithms:Mine").from_mapping(
        {"algo": "my_algorithms:Mine", "env": "CartPole-v1"}
    )
    assert config_class(config.algo) is type(config)
    assert type(config)(algo="my_algorithms:Mine", lr=0.5).lr == 0.5


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("my_algorithms:Mime", "'Mine'"),
        ("my_algorithm:Mine", "PYTHONPATH"),
        ("my_algorithms:changed", "aiorl.algorithms.Algorithm"),
        ("my_algorithms:MineConfig", "aiorl.algorithms.Algorithm"),
        ("my_algorithms:Renamed", "PGConfig.algo .*'pg'.*\"my_algorithms:Renamed\""),
        ("my_algorithms:Bare", "config_class"),
        ("my_algorithms:Unfinished", r"without experience and update.*docs/new_algorithm\.md"),
        ("my_algorithms:Learnless", r"without update.*docs/new_algorithm\.md"),
    ],
)
def test_a_path_that_names_no_algorithm_is_refused(
    my_algorithms: None, path: str, fact: str
) -> None:
    with pytest.raises(ConfigError, match=fact) as caught:
        config_class(path)
    assert caught.value.key == "algo"


def test_former_names_of_parts_are_refused_with_those_of_today() -> None:
    page = (Path(__file__).parents[3] / "docs" / "upgrades.md").read_text(encoding="utf-8")
    for name, now in parts._FORMER.items():
        with pytest.raises(ImportError, match=rf"no {name} any more: .*docs/upgrades\.md"):
            getattr(parts, name)
        assert f"`{name}`" in page
        assert any(new in now for new in parts.__all__)
    with pytest.raises(ImportError, match="use on_policy"):
        exec("from aiorl.algorithms import OnPolicy", {})
    with pytest.raises(AttributeError, match="'Onpolicy'"):
        _ = parts.Onpolicy
    assert not hasattr(parts, "__wrapped__")
