"""One setting is declared once: the files that adding one touches, counted."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config.schema import CommonConfig, ModelConfig, MultiAgentConfig
from aiorl.config.worker import TransportConfig, WorkerConfig

PACKAGE = Path(__file__).parents[2] / "aiorl"
REFERENCE = set(inspect.signature(RolloutWorker).parameters)
"""Keywords that the reference gives RolloutWorker; they take their defaults from the declarations."""


def test_no_key_is_declared_in_two_places_of_the_config() -> None:
    for config in (CommonConfig, ModelConfig, MultiAgentConfig, TransportConfig):
        for name in config.model_fields:
            if name not in ("model", "multiagent", "env"):  # groups: the workers' part is narrower; env: it is known
                own = [kind for kind in config.__mro__ if name in vars(kind).get("__annotations__", {})]
                assert len(own) == 1, name


def test_one_more_setting_of_samplers_touches_one_file(tmp_path: Path) -> None:
    """A declaration more, in a copy of the package, is an option, is checked, is told to workers and documented."""
    shutil.copytree(PACKAGE, tmp_path / "aiorl", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "aiorl" / "config" / "worker.py"
    text = file.read_text(encoding="utf-8")
    more = '    brand_new: int = key(3, "Something new.", group="Sampling", where="workers", ge=0)\n'
    file.write_text(text.replace("    soft_horizon: bool = ", f"{more}    soft_horizon: bool = ", 1), encoding="utf-8")
    code = """
from aiorl.learning.algorithms.registry import config_class
from aiorl.config.reference import configure_learner
from aiorl.config.layers import dump_yaml
from aiorl.config.reference import config_page
from aiorl.config.worker import WorkerPart
from aiorl.sampling.settings import WorkerSettings

config = configure_learner(["--env", "E", "--algo", "impala", "--brand-new", "4"], config_class)
part = WorkerPart.from_dict(WorkerPart.of(config).to_dict())
assert part.brand_new == 4
assert WorkerSettings(config=part, env_creator="E", policy=None).config.brand_new == 4
assert "brand_new: 4" in dump_yaml(config)
assert "| `brand_new` | `3` | a whole number | W | Something new. |" in config_page()
configure_learner(["--env", "E", "--brand-new", "-1"], config_class)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, text=True,
        stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "--brand-new must be greater than or equal to 0, not -1." in done.stderr


def test_constructor_keywords_take_the_declared_defaults() -> None:
    signature = inspect.signature(RolloutWorker)
    shared = REFERENCE & set(WorkerConfig.model_fields) - {
        "rollout_fragment_length",
        "callbacks",
        "env_config",
        "log_level",
        "input_evaluation",
    }
    assert len(shared) >= 12
    for name in shared:
        assert signature.parameters[name].default == getattr(WorkerConfig(), name), name
