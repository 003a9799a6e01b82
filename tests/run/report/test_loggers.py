from __future__ import annotations

import csv
import json
import logging
import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import disk_full_after
from hypothesis import HealthCheck, given, settings, strategies as st

from aiorl.errors import ConfigError
from aiorl.run.report.loggers import (
    CSV_FILE,
    JSONL_FILE,
    JsonlLogger,
    Loggers,
    open_loggers,
    read_results,
)


def result(iteration: int, **more: Any) -> dict[str, Any]:
    return {
        "training_iteration": iteration,
        "timesteps_total": iteration * 10,
        "timestamp": 1.0,
        **more,
    }


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def both(directory: Path) -> Loggers:
    """Open result.jsonl and progress.csv, which is made from it."""
    return open_loggers(directory, tensorboard=False)


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is no strict JSON")


def test_a_line_of_jsonl_is_strict_json_for_any_result(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / JSONL_FILE)
    logger.write(
        result(
            1,
            nan=math.nan,
            inf=-math.inf,
            a=np.array([1.0, np.nan]),
            n=np.float32(2.5),
            i=np.int64(3),
            b=np.bool_(True),
            t=(1, 2),
            o=Path("x"),
            d={1: {"deep": math.nan}},
        )
    )
    logger.close()
    read = json.loads((tmp_path / JSONL_FILE).read_text(), parse_constant=reject_constant)
    assert read == {
        "training_iteration": 1,
        "timesteps_total": 10,
        "timestamp": 1.0,
        "nan": None,
        "inf": None,
        "a": [1.0, None],
        "n": 2.5,
        "i": 3,
        "b": True,
        "t": [1, 2],
        "o": "x",
        "d": {"1": {"deep": None}},
    }


def test_csv_keeps_its_columns_and_leaves_lists_out(tmp_path: Path) -> None:
    logger = both(tmp_path)
    logger.write(result(1, reward=math.nan, name='a "b", c', lag={"min": 0, "max": 2}, hist=[1, 2]))
    logger.write({"lag": {"max": 3}, "reward": 1.5, "training_iteration": 2})
    logger.close()
    one, two = rows_of(tmp_path / CSV_FILE)
    assert list(one) == [
        "training_iteration",
        "timesteps_total",
        "timestamp",
        "reward",
        "name",
        "lag/min",
        "lag/max",
    ]
    assert (one["reward"], one["name"], one["lag/max"]) == ("", 'a "b", c', "2")
    assert (two["reward"], two["lag/min"], two["lag/max"], two["training_iteration"]) == (
        "1.5",
        "",
        "3",
        "2",
    )


def test_a_resumed_run_continues_after_its_checkpoint_and_without_a_damaged_last_line(
    tmp_path: Path,
) -> None:
    with closing(open_loggers(tmp_path, tensorboard=False)) as loggers:
        for iteration in range(1, 6):
            loggers.write(result(iteration, run="first"))
    for name in (JSONL_FILE, CSV_FILE):
        with (tmp_path / name).open("a") as file:
            file.write('{"training_iteration": 6, "lo')
    for number, after in ((2, None), (3, 3)):
        with closing(open_loggers(tmp_path, resume_iteration=after, tensorboard=False)) as loggers:
            kept = [(row["training_iteration"], row["run"]) for row in read_results(tmp_path)]
            loggers.write(result(kept[-1][0] + 1, run=f"{number}"))
        wanted = [*kept, (kept[-1][0] + 1, f"{number}")]
        assert kept == [(iteration, "first") for iteration in range(1, (after or 5) + 1)]
        assert [(row["training_iteration"], row["run"]) for row in read_results(tmp_path)] == wanted
        assert [
            (int(row["training_iteration"]), row["run"]) for row in rows_of(tmp_path / CSV_FILE)
        ] == wanted


def test_files_of_absurd_size_are_named_and_a_resumed_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_loggers(tmp_path, tensorboard=False)) as loggers:
        loggers.write(result(1))
    for name in (JSONL_FILE, CSV_FILE):
        with (tmp_path / name).open("r+b") as file:
            file.truncate(1 << 40)  # a sparse file
    with caplog.at_level(logging.WARNING, "aiorl"):
        assert [row["training_iteration"] for row in read_results(tmp_path)] == [1]
        with closing(open_loggers(tmp_path, resume_iteration=1, tensorboard=False)) as loggers:
            loggers.write(result(2))
    assert [row["training_iteration"] for row in read_results(tmp_path)] == [1, 2]
    assert [row["training_iteration"] for row in rows_of(tmp_path / CSV_FILE)] == ["1", "2"]
    assert JSONL_FILE in caplog.text


def test_of_very_many_results_some_are_read_evenly(tmp_path: Path) -> None:
    line = '{"training_iteration":%d,"text":"' + "x" * 1000 + '"}\n'
    (tmp_path / JSONL_FILE).write_text(
        "".join(line % number for number in range(1, 40_001)) + '{"training_iter'
    )
    read = [row["training_iteration"] for row in read_results(tmp_path)]
    assert read[0] == 1
    assert read[-1] > 39_900
    assert 900 < len(read) < 1100
    assert read == sorted(set(read))
    assert max(np.diff(read)) < 100


PARTS = [
    b"\n",
    b",",
    b'"',
    b"\0",
    b"\r",
    b"\xff",
    b"a",
    b"2",
    b"training_iteration",
    b'{"training_iteration":2}\n',
    b"{",
    b"[",
    b"training_iteration,a\n",
    b"a,training_iteration\n",
    b"2,1\n",
    b'1,"x\ny"\n',
    b"5,5\n",
    b'{"training_iteration":5}\n',
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(st.sampled_from(PARTS), max_size=12).map(b"".join),
    after=st.sampled_from([None, 0, 2]),
)
def test_for_any_content_a_resumed_run_keeps_the_first_results_and_continues(
    tmp_path: Path, content: bytes, after: int | None
) -> None:
    for name in (JSONL_FILE, CSV_FILE):
        (tmp_path / name).write_bytes(content)
    with closing(open_loggers(tmp_path, resume_iteration=after, tensorboard=False)) as loggers:
        assert content.startswith((tmp_path / JSONL_FILE).read_bytes())
        loggers.write(result(3, new=1))
        assert read_results(tmp_path)[-1]["training_iteration"] == 3
        assert rows_of(tmp_path / CSV_FILE)[-1]["training_iteration"] == "3"


def test_a_result_that_could_not_be_read_back_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Loggers({JSONL_FILE: JsonlLogger(tmp_path / JSONL_FILE)})) as loggers:
        for iteration in (1, 2, 3):
            loggers.write(result(iteration, text="x" * (17 << 20) if iteration == 2 else ""))
    assert [row["training_iteration"] for row in read_results(tmp_path)] == [1, 3]
    assert re.search(r"result\.jsonl .*17,8", caplog.text)


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / JSONL_FILE).write_bytes(
        b'{"a": 1}\n\xff\xfe\n[1]\n{"b"\n' + b"[" * 100_000 + b'\n{"a": 2}\n{"a'
    )
    assert read_results(tmp_path) == [{"a": 1}, {"a": 2}]


def test_a_line_of_too_many_empty_lists_is_skipped(tmp_path: Path) -> None:
    lists = b"[]," * (1 << 18)
    (tmp_path / JSONL_FILE).write_bytes(b'{"a": 1}\n{"a": [%b1]}\n{"a": 2}\n' % lists)
    assert read_results(tmp_path) == [{"a": 1}, {"a": 2}]


def test_the_number_of_columns_is_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / CSV_FILE
    logger = both(tmp_path)
    with caplog.at_level(logging.WARNING, "aiorl"):
        for iteration in range(1, 6):
            logger.write(
                result(iteration, **{f"m{iteration}_{number}": number for number in range(900)})
            )
    logger.close()
    rows = rows_of(path)
    assert len(rows[0]) == 2000
    assert [row["training_iteration"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert (rows[0]["m1_899"], rows[1]["m2_0"]) == ("899", "0")
    assert not caplog.records


def test_names_of_any_characters_are_kept_by_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / CSV_FILE
    names = ["line\u2028sep", "feed\x0cff", 'quo"te', "com,ma", "new\nline"]
    for iteration in (1, 2):
        logger = both(tmp_path)
        logger.write(result(iteration, **dict.fromkeys(names, iteration)))
        logger.write(result(iteration + 10, **{f"later{iteration}\ud800": 1}))
        logger.close()
    rows = rows_of(path)
    assert [row["training_iteration"] for row in rows] == ["1", "11", "2", "12"]
    assert list(rows[0])[-2:] == ["later1\\ud800", "later2\\ud800"], "new columns come last"
    assert [row["later2\\ud800"] for row in rows] == ["", "", "", "1"]
    for name in names:
        assert [row[name] for row in rows] == ["1", "", "2", ""]


def test_a_disk_that_was_full_leaves_no_half_lines_in_any_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        closing(open_loggers(tmp_path, tensorboard=False)) as loggers,
        caplog.at_level(logging.WARNING, "aiorl"),
    ):
        loggers.write(result(1, a=1.0))
        with disk_full_after(60):
            for iteration in range(2, 6):
                loggers.write(result(iteration, a=1.0, **{f"new{iteration}": 1.0}))
        loggers.write(result(6, a=1.0, last=2.0))
    assert [row["training_iteration"] for row in rows_of(tmp_path / CSV_FILE)] == ["1", "6"]
    assert rows_of(tmp_path / CSV_FILE)[1]["last"] == "2.0"
    assert [row["training_iteration"] for row in read_results(tmp_path)] == [1, 6]
    assert [record.levelname for record in caplog.records] == [
        "ERROR",
        "ERROR",
        "WARNING",
        "WARNING",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == [CSV_FILE, JSONL_FILE]


def test_a_run_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        open_loggers(tmp_path / "file")
    assert caught.value.key == "run_dir"
