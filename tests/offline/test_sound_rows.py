"""Rows with missing numbers are named, counted and left out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from stored_rows import cartpole_rows, write

from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import DataError
from aiorl.offline.commands import main
from aiorl.offline.episodes import trajectories
from aiorl.offline.readers import FileReader, ReaderOptions, StoredEpisodes

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ONCE: dict[str, Any] = {"epochs": 1, "shuffle_files": False, "joins_episodes": True}
COUNT = 15
"""Rows of a file: three episodes of five."""


def columns_of(rows: SampleBatch) -> dict[str, list[Any]]:
    names = ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "eps_id", "t")
    return {name: rows[name].tolist() for name in names}


def write_with(path: Any, form: str, name: str, value: Any) -> str:
    """Write rows in a format, with a value in row 7 of a column."""
    columns = columns_of(cartpole_rows())
    if isinstance(columns[name][6], list) and not isinstance(value, list) and value is not None:
        columns[name][6][1] = value
    else:
        columns[name][6] = value
    if form == "parquet":
        pq.write_table(pa.table(columns), f"{path}.parquet")
        return f"{path}.parquet"
    with open(f"{path}.json", "w") as file:
        if form == "rllib":
            file.write(json.dumps({"type": "SampleBatch", **columns}) + "\n")
        else:
            for row in range(COUNT):
                file.write(
                    json.dumps({column: values[row] for column, values in columns.items()}) + "\n"
                )
    return f"{path}.json"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("form", ["parquet", "rllib", "rows"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rewards", None),
        ("rewards", NAN),
        ("rewards", -INF),
        ("rewards", 1e300),
        ("obs", None),
        ("obs", NAN),
        ("new_obs", INF),
        ("actions", None),
        ("terminateds", None),
        ("t", None),
        ("eps_id", None),
    ],
)
def test_a_row_without_a_number_is_named_counted_and_left_out(
    tmp_path: Any, capsys: Any, caplog: Any, name: str, value: Any, form: str
) -> None:
    path = write_with(tmp_path / "a", form, name, value)
    reader = FileReader(path, ReaderOptions(**ONCE))
    batches = list(reader)
    rows = [
        step
        for batch in batches
        for step in zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True)
    ]
    assert sorted(rows) == [(e, t) for e in range(3) for t in range(5) if (e, t) != (1, 1)]
    assert all(np.isfinite(batch[column]).all() for batch in batches for column in batch)
    assert len(reader.unreadable) == 1
    assert f"{path}, " in caplog.text
    place = {"parquet": "row group 1, row 7", "rllib": "line 1, row 7", "rows": "line "}[form]
    for command in ("inspect", "validate"):
        assert main([command, path]) == 1
        output = capsys.readouterr().out
        assert f"{path}, {place}" in output
        assert name in output
        assert (
            "nan" not in output.replace(path, "").lower().split("not finite")[0]
            or command == "validate"
        )


@pytest.mark.parametrize("group_rows", [1, 2, 3, COUNT])
def test_the_rows_around_one_that_is_left_out_are_not_joined(
    tmp_path: Any, group_rows: int
) -> None:
    for number, without in enumerate(([], ["t"], ["t", "eps_id"])):
        columns = columns_of(cartpole_rows())
        columns["rewards"][6] = NAN
        for name in [*without, "new_obs"]:
            del columns[name]
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=group_rows)
        options = ReaderOptions(**ONCE, adds_new_obs=True)
        faults = [
            part
            for batch in FileReader(str(tmp_path / f"{number}.parquet"), options)
            for part in trajectories(batch)
        ]
        obs = np.asarray(columns["obs"], np.float32)
        assert sum(part.count for part in faults) == 5 + 0 + 3 + 5, (
            "row 6 lacks the observation that followed it"
        )
        for part in faults:
            start = int(np.flatnonzero((obs == part["obs"][0]).all(axis=1))[0])
            np.testing.assert_array_equal(part["new_obs"][:-1], obs[start + 1 : start + part.count])


@pytest.mark.parametrize("lines", [1, 3, COUNT])
@pytest.mark.parametrize("alternates", [False, True])
@pytest.mark.parametrize("bad_step", [0, 2, 4])
def test_without_steps_an_episode_that_lacks_a_row_is_no_whole_episode(
    tmp_path: Any, capsys: Any, bad_step: int, alternates: bool, lines: int
) -> None:
    rows = cartpole_rows()
    if alternates:
        rows = rows.take(np.argsort(rows["t"], kind="stable"))
    is_bad = (rows["eps_id"] == 1) & (rows["t"] == bad_step)
    rows["rewards"][is_bad] = NAN
    columns = columns_of(rows)
    del columns["t"]
    path = str(tmp_path / "a.json")
    with open(path, "w") as file:
        for part in np.array_split(np.arange(COUNT), lines):
            values = {name: [column[row] for row in part] for name, column in columns.items()}
            file.write(json.dumps({"type": "SampleBatch", **values}) + "\n")
    stored = StoredEpisodes(path)
    whole = [(episode["eps_id"][0], episode["rewards"].tolist()) for _, episode in stored]
    assert sorted(whole) == [(0, [1.0] * 5), (2, [1.0] * 5)]
    assert (stored.num_corrupt, stored.num_left_out) == (1, 4)
    assert main(["inspect", path]) == 1
    assert "2 ended, 1 without all of their rows" in capsys.readouterr().out


def test_more_bad_rows_than_allowed_end_the_reading(tmp_path: Any) -> None:
    columns = columns_of(cartpole_rows())
    columns["rewards"][3:9] = [None] * 6
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert (
        sum(
            batch.count for batch in FileReader(str(tmp_path), ReaderOptions(**ONCE, max_corrupt=6))
        )
        == 9
    )
    with pytest.raises(DataError, match="row 4"):
        list(FileReader(str(tmp_path), ReaderOptions(**ONCE, max_corrupt=5)))


def test_rows_of_several_policies_are_checked_for_each_policy(tmp_path: Any) -> None:
    bad = cartpole_rows()
    bad["rewards"][6] = NAN
    path = str(write(tmp_path / "a.json", MultiAgentBatch({"x": cartpole_rows(), "y": bad}, COUNT)))
    reader = FileReader(path, ReaderOptions(epochs=1))
    (batch,) = list(reader)
    assert {name: rows.count for name, rows in batch.policy_batches.items()} == {
        "x": COUNT,
        "y": COUNT - 1,
    }
    assert list(reader.unreadable) == [(path, "line 1, policy 'y', row 7")]


def test_a_missing_observation_after_a_terminal_state_has_no_effect(
    tmp_path: Any, capsys: Any
) -> None:
    """Tables that shift their observations by a row have none in the last row of an episode."""
    columns = columns_of(cartpole_rows())
    for row, is_last in enumerate(columns["terminateds"]):
        if is_last:
            columns["new_obs"][row] = None
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    reader = FileReader(str(tmp_path), ReaderOptions(**ONCE))
    (batch,) = list(reader)
    assert (batch.count, reader.unreadable) == (COUNT, {})
    assert np.isfinite(batch["new_obs"]).all()
    assert main(["validate", str(tmp_path)]) == 0
