from __future__ import annotations

import os
import subprocess
import sys

import pytest

import aiorl


@pytest.mark.parametrize("name", [*aiorl.__all__, "TFPolicy"])
def test_every_public_name_can_be_imported_and_is_listed(name: str) -> None:
    assert getattr(aiorl, name) is not None
    assert name in dir(aiorl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = aiorl.nonsense


def test_everything_can_be_imported_at_once_without_tensorflow() -> None:
    """R1: this works even if TensorFlow is not installed."""
    code = "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None; from aiorl import *; RolloutWorker"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_aiorl_loads_few_modules() -> None:
    code = "import sys, aiorl; print([m for m in ('numpy', 'gymnasium', 'zmq', 'tensorflow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


def test_configs_are_made_without_tensorflow() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; from aiorl import IMPALAConfig, PPOConfig; PPOConfig(env='E')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_aiorl_silences_tensorflow_unless_the_user_configures_it() -> None:
    code = "import os, aiorl; print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    for given, found in ((None, "3"), ("0", "0")):
        env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
        env |= {} if given is None else {"TF_CPP_MIN_LOG_LEVEL": given}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == found
