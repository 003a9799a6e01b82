"""Files and directories that are replaced as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiorl.process.replaced_file import replaced_directory


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def write_half(path: Path) -> None:
    with replaced_directory(path) as directory:
        assert names(directory) == []
        (directory / "second").write_text("")
        raise KeyboardInterrupt


def test_a_directory_takes_the_place_of_an_older_one_as_a_whole(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with replaced_directory(tmp_path / "a" / "b") as directory:
            (directory / name).write_text("")
            assert not (tmp_path / "a" / "b" / name).exists()
        assert names(tmp_path / "a") == ["b", f"b/{name}"]


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    with replaced_directory(tmp_path / "b") as directory:
        (directory / "first").write_text("")
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "b")
    assert names(tmp_path) == ["b", "b/first"]


def test_leftovers_of_a_killed_writer_are_restored_or_removed(tmp_path: Path) -> None:
    (tmp_path / ".b.old").mkdir()
    (tmp_path / ".b.old" / "first").write_text("")
    (tmp_path / ".b.new").mkdir()
    (tmp_path / ".b.new" / "half").write_text("")
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "b")
    assert names(tmp_path) == ["b", "b/first"]
