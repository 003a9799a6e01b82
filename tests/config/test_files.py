"""YAML 1.2; files of unknown origin, read within limits; strict JSON."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aiorl.config import files
from aiorl.config.files import open_regular, parse_json, parsed_bytes, read_regular
from aiorl.config.yaml_text import parse_value, read_yaml
from aiorl.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_sets_no_keys_and_small_aliases_and_merges_are_read(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path / "a.yaml", "# nothing\n")) == ({}, {})
    text = "env: E\nenv_config: {a: &a {x: 1}, b: {<<: *a, y: 2}, c: *a}\n"
    read, _ = read_yaml(write(tmp_path / "a.yaml", text))
    assert read["env_config"] == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}}


HOSTILE = {
    "deep list": "a: " + "[" * 1500 + "]" * 1500,
    "deep mapping": "a: " + "{a: " * 50 + "}" * 50,
    "endless": "a: &a [*a]\n",
    "aliases of aliases": "a0: &a0 [x, x]\n"
    + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
    "merges of merges": (
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
    ),
    "an invalid truth value": "lr: !!bool maybe\n",
    "an invalid number": "lr: !!int ''\n",
    "a long number": f"lr: {'9' * 5000}\n",
    "a large file": "#" * (1 << 20) + "\nlr: 1\n",
}


@pytest.mark.rest_slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_yaml_that_would_exhaust_its_reader_is_refused_in_one_sentence(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(ConfigError, match=r"bad\.yaml") as caught:
        read_yaml(write(tmp_path / "bad.yaml", HOSTILE[kind]))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-200", -200),
        ("1e-4", 1e-4),
        ("-1E5", -1e5),
        (".5", 0.5),
        ("3.", 3.0),
        ("0x10", 16),
        ("0", 0),
        ("007", "007"),
        ("1:30", "1:30"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", ""),
        ("[64, 64]", [64, 64]),
        ("{a: 1}", {"a": 1}),
        ("a b", "a b"),
        ("2026-01-01", "2026-01-01"),
        ("*x", "*x"),
        ("[1", "[1"),
        ("gym:CartPole-v1", "gym:CartPole-v1"),
        (".inf", math.inf),
        ("!!bool x", "!!bool x"),
    ],
)
def test_values_follow_yaml_1_2(text: str, value: object) -> None:
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)


def test_a_regular_file_is_read_up_to_the_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, max_bytes=5) == b"12345"
    with pytest.raises(OSError) as caught:
        read_regular(path, max_bytes=4)
    assert caught.value.errno == errno.EFBIG
    (tmp_path / "link").symlink_to(path)  # followed if a user names it; a directory can be a link
    with open_regular(tmp_path / "link", follow=True) as file:
        assert file.read() == b"12345"
    (tmp_path / "directory").symlink_to(tmp_path)
    assert read_regular(tmp_path / "directory" / "file", max_bytes=5) == b"12345"


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (os.mkfifo, errno.EINVAL),
        (os.mkdir, errno.EINVAL),
        (lambda path: path.symlink_to("/etc/hostname"), errno.ELOOP),
        (lambda path: None, errno.ENOENT),
    ],
)
def test_other_files_are_refused_and_closed(
    tmp_path: Path, make: Callable[[Path], object], number: int
) -> None:
    make(tmp_path / "it")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError) as caught:
        read_regular(tmp_path / "it", max_bytes=10)
    assert caught.value.errno == number
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    os.truncate(path, 200 << 30)
    with pytest.raises(OSError) as caught:
        read_regular(path, max_bytes=1 << 40)
    assert caught.value.errno == errno.EFBIG
    path.write_bytes(b"")
    os.truncate(path, 9)
    assert read_regular(path, max_bytes=10) == bytes(9)


def test_a_file_larger_than_the_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SMALL_BYTES", 8)
    monkeypatch.setattr(files, "available_bytes", lambda: 30)
    (tmp_path / "file").write_bytes(b"x" * 16)
    with pytest.raises(OSError) as caught:
        read_regular(tmp_path / "file", max_bytes=100)
    assert caught.value.errno == errno.ENOMEM


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=25)
@given(JSON)
def test_json_values_survive_the_round_trip(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


def test_json_that_takes_much_more_memory_than_bytes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = b"[" + b"[]," * 1000 + b"[]]"
    assert parsed_bytes(content) > 64 * 1000
    monkeypatch.setattr(files, "_MAX_PARSED_BYTES", 64 * 1000)
    with pytest.raises(ValueError):
        parse_json(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b'{"a": 1, "a": 1}',
        b'"\xff"',
        b"\xef\xbb\xbf1",
        b"[" * 33 + b"]" * 33,
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"9" * 5000,
    ],
    ids=lambda content: repr(content[:20]),
)
def test_anything_else_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(content)
