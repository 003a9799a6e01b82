"""Algorithms by name, and that knowing them costs no TensorFlow."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiorl.algorithms.algorithm import Algorithm
from aiorl.algorithms.registry import ALGORITHMS, algorithm_class, config_class
from aiorl.errors import UnknownAlgorithmError


def test_the_nearest_name_is_offered_for_an_unknown_algorithm() -> None:
    with pytest.raises(UnknownAlgorithmError, match="Did you mean 'impala'") as caught:
        config_class("impalla")
    assert caught.value.key == "algo"
    assert "impala, ppo" in str(caught.value)
    with pytest.raises(UnknownAlgorithmError):
        algorithm_class("dqnn")


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_each_algorithm_has_its_class_and_a_config_that_names_it(name: str) -> None:
    found = algorithm_class(name)
    assert issubclass(found, Algorithm)
    assert found.config_class is config_class(name.upper())
    assert config_class(name)().algo == name


def test_plans_are_made_without_tensorflow() -> None:
    """Config and plans are read before TensorFlow, whose import takes seconds, is loaded."""
    code = (
        "import sys\n"
        "from aiorl.algorithms.registry import ALGORITHMS, config_class\n"
        "for name in ALGORITHMS: config_class(name)()\n"
        "assert not {'tensorflow', 'keras', 'onnx'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
