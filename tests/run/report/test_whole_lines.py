from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiorl.run.report import whole_lines as module
from aiorl.run.report.whole_lines import TooLongLine, last_lines, sampled_lines, whole_lines

HERE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@HERE
@given(content=st.lists(st.sampled_from([b"a", b"\n", b"\r", b"bcdefg", b"\xff\0"]), max_size=30).map(b"".join))
def test_lines_from_the_end_are_those_from_the_beginning(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(module, "_BLOCK", 4)
        forwards = list(whole_lines(file))
        assert list(last_lines(file)) == forwards[::-1]
    assert [line for _, line in forwards] == [line + b"\n" for line in content.split(b"\n")[:-1]]
    assert [end for end, _ in forwards] == list(itertools.accumulate(len(line) for _, line in forwards))


@HERE
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=200), half=st.booleans())
def test_a_sample_is_of_whole_lines_in_order_with_the_first_and_the_last(
    sizes: list[int], half: bool, tmp_path: Path
) -> None:
    lines = [b"%d:" % number + b"x" * size + b"\n" for number, size in enumerate(sizes)]
    path = tmp_path / "file"
    path.write_bytes(b"".join(lines) + b"half" * half)
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(module, "_READ_WHOLE_BYTES", 100)
        patch.setattr(module, "_SAMPLES", 10)
        sample = list(sampled_lines(file))
    numbers = [lines.index(line) for line in sample]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, len(lines) - 1)
    assert len(sample) <= 12 or path.stat().st_size <= 100


@pytest.mark.parametrize("read", [whole_lines, last_lines, sampled_lines])
@pytest.mark.parametrize("size", [None, 1 << 40])
def test_a_line_that_is_longer_than_any_may_be_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: object, size: int | None
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2000 + b"\n")
    if size is None:
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    else:
        with path.open("r+b") as file:
            file.truncate(size)  # sparse
    with path.open("rb") as file, pytest.raises(TooLongLine, match="is longer than the 1"):
        list(read(file))  # type: ignore[operator]
