from __future__ import annotations

import os
from pathlib import Path

import pytest
from full_disk import disk_full_after

from aiorl.run.report.appended_file import AppendedFile


def test_records_go_behind_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old\n")
    file = AppendedFile(path)
    file.append(b"new\n")
    assert path.read_bytes() == b"old\nnew\n"
    file.close()
    file.close()


def test_a_record_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = AppendedFile(path)
    file.append(b"first\n")
    with disk_full_after(10), pytest.raises(OSError, match="too large"):
        file.append(b"too long for it\n")
    assert path.read_bytes() == b"first\n"
    file.append(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"
    file.close()


def test_a_record_that_cannot_be_taken_off_at_once_is_taken_off_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "f"
    file = AppendedFile(path)
    file.append(b"first\n")
    with monkeypatch.context() as patch, disk_full_after(10):
        patch.setattr(os, "ftruncate", fails)
        for _ in range(2):
            with pytest.raises(OSError, match=r"large|Input"):
                file.append(b"too long for it\n")
    assert path.read_bytes() == b"first\ntoo "
    file.append(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"
    file.close()


def test_others_may_make_the_file_shorter(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = AppendedFile(path)
    file.append(b"x" * 100)
    os.truncate(path, 0)
    with disk_full_after(3), pytest.raises(OSError, match="large"):
        file.append(b"too long\n")
    assert path.read_bytes() == b"", "and no hole"
    file.append(b"new\n")
    assert path.read_bytes() == b"new\n"
    file.close()
