"""Columns under the names of other formats."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from stored_rows import read_once

from aiorl.data import columns as c
from aiorl.offline.column_names import other_columns, with_known_names
from aiorl.offline.commands import main
from aiorl.offline.episodes import trajectories
from aiorl.offline.readers import FileReader, ReaderOptions

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

STEPS = np.tile(np.arange(5), 4)
OBS = np.stack([np.repeat(np.arange(4), 5), STEPS], 1).astype(float)
D4RL = {
    "observations": OBS.tolist(),
    "next_observations": (OBS + np.array([0, 1])).tolist(),
    "actions": np.zeros((20, 2)).tolist(),
    "rewards": np.ones(20).tolist(),
    "terminals": ((STEPS == 4) & (OBS[:, 0] < 2)).tolist(),
    "timeouts": ((STEPS == 4) & (OBS[:, 0] >= 2)).tolist(),
    "infos/action_log_probs": np.zeros(20).tolist(),
}


def write_as(path: Any, form: str, columns: dict[str, list[Any]]) -> str:
    if form == "parquet":
        pq.write_table(pa.table(columns), f"{path}.parquet")
        return f"{path}.parquet"
    rows = [
        {name: values[row] for name, values in columns.items()}
        for row in range(len(columns["actions"]))
    ]
    lines = {"rows": rows, "batch": [columns], "rllib": [{"type": "SampleBatch", **columns}]}[form]
    with open(f"{path}.json", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return f"{path}.json"


@pytest.mark.parametrize("form", ["parquet", "rows", "batch", "rllib"])
def test_columns_of_d4rl_are_read_and_timeouts_are_truncations(
    tmp_path: Any, capsys: Any, form: str
) -> None:
    path = write_as(tmp_path / "a", form, D4RL)
    (batch,) = read_once(path)
    assert {
        "obs",
        "new_obs",
        "actions",
        "rewards",
        "terminateds",
        "truncateds",
        "dones",
        "action_logp",
    } == set(batch)
    np.testing.assert_array_equal(batch["terminateds"], D4RL["terminals"])
    np.testing.assert_array_equal(batch["truncateds"], D4RL["timeouts"])
    assert [part.count for part in trajectories(batch)] == [5] * 4
    assert main(["inspect", path]) == 0
    assert "missing" not in capsys.readouterr().out
    assert main(["validate", path]) == 0


def test_without_next_observations_they_come_from_the_next_row(tmp_path: Any) -> None:
    columns = {name: values for name, values in D4RL.items() if name != "next_observations"}
    path = write_as(tmp_path / "a", "parquet", columns)
    (batch,) = FileReader(path, ReaderOptions(epochs=1, joins_episodes=True, adds_new_obs=True))
    assert batch.count == 5 + 5 + 4 + 4, "what followed a time limit is unknown"
    np.testing.assert_array_equal(batch["new_obs"][:4], OBS[1:5])


def test_a_column_under_its_name_here_is_not_replaced() -> None:
    assert with_known_names({"observations": 1, "obs": 2, "reward": 3}) == {
        "observations": 1,
        "obs": 2,
        "rewards": 3,
    }
    assert with_known_names({"terminals": 1, "terminated": 2}) == {
        "terminateds": 1,
        "terminated": 2,
    }


def test_the_table_names_columns_that_there_are() -> None:
    assert set(other_columns().values()) <= {
        value for name, value in vars(c).items() if name.isupper()
    }


def test_inspect_names_missing_columns_and_similar_ones(tmp_path: Any, capsys: Any) -> None:
    columns = {"obss": OBS.tolist(), "actions": STEPS.tolist(), "rewardz": np.ones(20).tolist()}
    path = write_as(tmp_path / "a", "parquet", columns)
    assert main(["inspect", path]) == 0
    output = capsys.readouterr().out.split("missing", 1)[1]
    assert all(
        name in output for name in ("obs: ", "'obss'", "rewards: ", "'rewardz'", "terminateds: ")
    )
    assert main(["validate", path]) == 1
    assert "'obss'" in capsys.readouterr().out
