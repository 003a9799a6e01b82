from __future__ import annotations

import math
from pathlib import Path

import pytest

from aiorl.config.files import parse_value, read_yaml


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path / "a.yaml", "# nothing\n")) == ({}, {})


def test_aliases_and_merges_of_moderate_size_are_read(tmp_path: Path) -> None:
    text = "env: E\nenv_config: {a: &a {x: 1}, b: {<<: *a, y: 2}, c: *a}\n"
    read, _ = read_yaml(write(tmp_path / "a.yaml", text))
    assert read["env_config"] == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-200", -200), ("1e-4", 1e-4), ("-1E5", -1e5), (".5", 0.5), ("3.", 3.0), ("0x10", 16), ("0", 0),
        ("007", "007"), ("1:30", "1:30"), ("off", "off"), ("yes", "yes"), ("true", True), ("False", False),
        ("null", None), ("~", None), ("", ""), ("[64, 64]", [64, 64]), ("{a: 1}", {"a": 1}), ("a b", "a b"),
        ("2026-01-01", "2026-01-01"), ("*x", "*x"), ("[1", "[1"), ("gym:CartPole-v1", "gym:CartPole-v1"),
        (".inf", math.inf), ("!!bool x", "!!bool x"),
    ],
)  # fmt: skip
def test_values_are_read_by_the_rules_of_yaml_1_2(text: str, value: object) -> None:
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)
