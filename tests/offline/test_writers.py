from __future__ import annotations

import errno
import itertools
import re

import pytest
from stored_rows import assert_equal_batches, cartpole_rows, read_once

from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError
from aiorl.offline import json_lines
from aiorl.offline.files import packed
from aiorl.offline.writers import FileWriter


def test_files_roll_over_at_the_limit_and_read_back_equal(tmp_path):
    """R190."""
    writer = FileWriter(str(tmp_path), worker_index=3, max_file_bytes=6000, clock=lambda: 0.0)
    batches = [cartpole_rows(first=number) for number in range(0, 30, 3)]
    for batch in batches:
        writer.write(batch)
    writer.close()
    writer.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 2
    assert all(
        re.fullmatch(r"output-19\d\d-\d\d-\d\d_\d\d-\d\d-\d\d_worker-3_\d\.json", name)
        for name in names
    )
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert all(6000 <= size < 9000 for size in sizes[:-1])
    assert_equal_batches(SampleBatch.concat(read_once(tmp_path)), SampleBatch.concat(batches))


def test_each_batch_can_be_read_right_after_it_is_written(tmp_path):
    writer = FileWriter(str(tmp_path))
    for number in range(3):
        writer.write(cartpole_rows())
        assert len(read_once(tmp_path)) == number + 1
    writer.close()


def test_two_writers_with_the_same_second_and_index_have_separate_files(tmp_path):
    writers = [FileWriter(str(tmp_path), clock=lambda: 0.0) for _ in range(3)]
    for writer, number in itertools.product(writers, range(2)):
        writer.write(cartpole_rows(first=number))
    for writer in writers:
        writer.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert len(read_once(tmp_path)) == 6


def test_batches_without_rows_are_not_written(tmp_path):
    writer = FileWriter(str(tmp_path / "new" / "one"))
    writer.write(SampleBatch())
    writer.close()
    assert list((tmp_path / "new" / "one").iterdir()) == []


def test_an_invalid_output_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=str(tmp_path / "file")):
        FileWriter(str(tmp_path / "file"))


def test_after_a_failed_write_a_new_file_is_started(tmp_path, monkeypatch):
    """A disk that was full for a while leaves a torn line at the end of one file, and no lines
    after it.
    """
    is_full = False

    class File:
        def __init__(self, path, plain):
            self._file = packed(path, plain)
            self.flush = self._file.flush
            self.close = self._file.close

        def write(self, data):
            if not is_full:
                return self._file.write(data)
            self._file.write(bytes(data[:100]))
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json_lines, "packed", File)
    writer = FileWriter(str(tmp_path))
    writer.write(cartpole_rows(first=0))
    is_full = True
    with pytest.raises(OSError, match="No space"):
        writer.write(cartpole_rows(first=3))
    is_full = False
    writer.write(cartpole_rows(first=6))
    writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [int(batch["eps_id"][0]) for batch in read_once(tmp_path)] == [0, 6]
