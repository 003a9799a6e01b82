"""Settings that can't be honoured are refused when a trainer is built, before TensorFlow is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

import aiorl
from aiorl.errors import ConfigError

SCRIPT = """
import sys
import aiorl

class Corridor:
    pass

{above}
def main():
    {inside}
    try:
        aiorl.PPOConfig(env="crossings", num_workers=1, run_dir=sys.argv[1]).build()
    except aiorl.errors.ConfigError as error:
        print(error.key, "tensorflow" in sys.modules, "__main__" in str(error))

if __name__ == "__main__":
    main()
"""
REGISTER = 'aiorl.register_env("crossings", lambda context: Corridor())'


@pytest.mark.parametrize(
    ("place", "is_named"),
    [("inside", True), pytest.param("above", False, marks=pytest.mark.slow)],
)
def test_a_name_registered_below_the_guard_of_a_script(
    tmp_path: Path, place: str, is_named: bool
) -> None:
    places = {"above": "", "inside": "", place: REGISTER}
    (tmp_path / "train.py").write_text(SCRIPT.format(**places))
    done = subprocess.run(
        [sys.executable, "train.py", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # above, the name is found, and its class is no environment
    assert (done.stdout == "env False True\n") == is_named, done.stderr


class Unseeded(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Discrete(2)

    def reset(self) -> Any:  # type: ignore[override]
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, True, False, {}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"env": Unseeded, "seed": 3}, "seed"),
        ({"env": "CartPole-v1", "use_sde": True}, "use_sde"),
        ({"env": "CartPole-v1", "model": {"free_log_std": True}}, "model.free_log_std"),
    ],
)
def test_what_an_environment_does_not_allow_is_refused(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        aiorl.PPOConfig(**settings, num_workers=1, run_dir=str(tmp_path / "run")).build()
    assert refused.value.key == key
    assert refused.value.hint
    assert not (tmp_path / "run").exists()
