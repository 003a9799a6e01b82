"""Files of unknown origin: read within bounds or refused without waiting; JSON without surprises."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.config import files as regular_file
from aiorl.config.files import open_regular, parse_json, parsed_bytes, read_regular


def test_a_regular_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, more than the 4"):
        read_regular(path, max_bytes=4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "no regular file"),
        (os.mkdir, "no regular file"),
        (lambda path: path.symlink_to("/etc/hostname"), "symbolic link"),
        (lambda path: None, "No such file"),
    ],
)
def test_anything_else_is_refused_and_left_open_by_nobody(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "it")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=said):
        read_regular(tmp_path / "it", max_bytes=10)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    os.truncate(path, 200 << 30)
    with pytest.raises(OSError, match="holes"):
        read_regular(path, max_bytes=1 << 40)


def test_a_small_hole_is_read_as_the_zeros_that_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 9)
    assert read_regular(tmp_path / "file", max_bytes=10) == bytes(9)


def test_a_file_larger_than_the_memory_that_is_left_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "_SMALL_BYTES", 8)
    monkeypatch.setattr(regular_file, "available_bytes", lambda: 30)
    (tmp_path / "file").write_bytes(b"x" * 16)
    with pytest.raises(OSError, match="30 bytes of memory are left"):
        read_regular(tmp_path / "file", max_bytes=100)


def test_a_link_is_followed_where_a_user_names_it(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    with open_regular(tmp_path / "link", follow=True) as file:
        assert file.read() == b"x"


def test_a_directory_of_files_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_regular(tmp_path / "link" / "file", max_bytes=10) == b"x"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50)
@given(JSON)
def test_what_json_can_hold_comes_back(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


def test_json_that_takes_much_more_memory_than_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"[" + b"[]," * 1000 + b"[]]"
    assert parsed_bytes(content) > 64 * 1000
    monkeypatch.setattr(regular_file, "_MAX_PARSED_BYTES", 64 * 1000)
    with pytest.raises(ValueError, match="too many values"):
        parse_json(content)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b'{"a": 1, "a": 1}', b'"\xff"', b"\xef\xbb\xbf1",
        b"[" * 33 + b"]" * 33, b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b"9" * 5000,
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_anything_else_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(content)


@given(st.binary())
def test_any_bytes_are_json_or_a_value_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_json(content)
