from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

from aiorl.errors import ConfigError
from aiorl.process import extras


def test_what_to_type_installs_from_the_clone_that_runs() -> None:
    words = shlex.split(extras.install_command("atari"))
    assert words[:3] == ["pip", "install", "-e"]
    assert Path(words[3].removesuffix("[atari]")) == Path(__file__).parents[2]


def test_what_to_type_keeps_an_aiorl_that_was_installed_from_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "aiorl" / "process" / "extras.py"))
    assert extras.install_command("atari") == "pip install 'aiorl[atari]'"


def test_what_is_needed_and_not_there_is_told_with_who_needs_it() -> None:
    with (
        pytest.raises(ConfigError, match="Parquet needs pyarrow: ") as caught,
        extras.needed_by("Parquet", "pyarrow", "offline", key="input"),
    ):
        importlib.import_module("no_such_module_here")
    assert caught.value.key == "input"
    assert "[offline]" in str(caught.value.hint)


def test_what_is_not_there_is_found_without_importing_it() -> None:
    assert extras.missing(["this", "no_such_module_here", "json"]) == ["no_such_module_here"]
