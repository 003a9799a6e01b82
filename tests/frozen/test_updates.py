"""Updates do what they did when they were recorded, bit for bit on the machine that recorded them.

On another processor, or with another TensorFlow, arithmetic rounds otherwise; numbers are then
compared within a tolerance. After a change that is meant to change updates, run
`python tests/frozen/updates.py digest`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import pytest
from costs import by_cost
from quick_adam import keras_step

PATH = Path(__file__).with_name("updates.py")
RECORDED: dict[str, Any] = json.loads(PATH.with_suffix(".json").read_text(encoding="utf-8"))
QUICK = {"impala", "dqn"}
VARIANTS = {
    "appo-gru",
    "bc-lstm",
    "cql-box",
    "iql-discrete",
    "ppo-box",
    "ppo-lstm",
    "ppo-noise",
    "ppo-penalty",
    "sac-discrete",
    "sac-noise",
}
"""Further forms of an algorithm whose parts other names have, too."""


@pytest.fixture(scope="module")
def updates() -> ModuleType:
    """Return the module that records updates."""
    spec = importlib.util.spec_from_file_location("frozen_updates", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", by_cost(RECORDED["variants"], quick=QUICK, nightly=VARIANTS))
def test_updates_are_those_recorded(
    updates: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # other tests have a quicker Adam, which rounds otherwise
    monkeypatch.setattr(keras.optimizers.Adam, "_backend_update_step", keras_step)
    expected = RECORDED["variants"][name]
    found = updates.digest_of(updates.run(name, compiled=False))
    assert found["figures"] == pytest.approx(expected["figures"], rel=1e-3, abs=1e-5)
    if updates.machine() == RECORDED["machine"]:
        assert found["sha256"] == expected["sha256"]


def test_every_variant_is_recorded(updates: ModuleType) -> None:
    assert set(RECORDED["variants"]) == set(updates.VARIANTS)
