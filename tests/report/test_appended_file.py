from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiorl.report.appended_file import AppendedFile


@contextmanager
def disk_full_after(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow past `num_bytes`: writes come short, then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
    with disk_full_after(10), pytest.raises(OSError, match=r"written|too large"):
        file.append(b"too long for it\n")
    assert path.read_bytes() == b"first\n"
    file.append(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"
    file.close()
