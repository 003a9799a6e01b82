"""The code on docs/exports.md runs unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_runs import save_run

import aiorl

PAGE = Path(__file__).parents[3] / "docs" / "exports.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
ONNX_ONLY = [block for block in BLOCKS if "onnxruntime" in block]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("place")
    save_run(directory / "runs" / "mine", env="CartPole-v1", model={"fcnet_hiddens": [8]})
    return directory


def test_the_page_has_a_block_for_each_format() -> None:
    assert len(BLOCKS) == 6
    assert len(ONNX_ONLY) == 2


def test_the_blocks_that_need_only_onnx_runtime_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    aiorl.export_policy("runs/mine", "exported")
    found: dict[str, Any] = {}
    exec(ONNX_ONLY[0], found)
    assert (found["action"].shape, found["action"].dtype) == ((1,), np.int64)
    save_run(place / "recurrent", env="CartPole-v1", model={"fcnet_hiddens": [8], "use_lstm": True})
    aiorl.export_policy("recurrent", "exported")
    exec(ONNX_ONLY[1], found)
    assert sorted(found["states"]) == [f"state_in_{index}" for index in range(4)]
    assert all(np.abs(state).max() > 0 for state in found["states"].values())


@pytest.mark.slow
def test_every_block_runs_in_turn(place: Path) -> None:
    first, *others = BLOCKS[:5]
    code = "\n".join([first, *(f"{block}\nprint(len(action))" for block in others)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [f"{place}/exported/onnx/policy.onnx", "1", "1", "1", "1"], (
        done.stderr
    )
