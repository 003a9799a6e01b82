"""RLlib's newer JSON lines, with a row in each line."""

from __future__ import annotations

import json

import numpy as np

from aiorl.errors import DataError
from aiorl.offline.formats import Share
from aiorl.offline.registry import format_of


def row(episode, t, **columns):
    return {
        "eps_id": episode,
        "agent_id": "0",
        "obs": [float(t), 1.0],
        "new_obs": [t + 1.0, 1.0],
        "actions": t % 2,
        "rewards": 1.0,
        "terminateds": t == 2,
        "truncateds": False,
        "infos": {},
        "t": t,
        **columns,
    }


def read(path, lines, share=None):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(format_of(str(path)).read(str(path), *(() if share is None else (share,))))


def test_rows_of_an_episode_become_a_batch(tmp_path):
    lines = [row(episode, t) for episode in ("ab12", "cd34", "ab12") for t in range(3)]
    loaded = read(tmp_path / "rows.jsonl", lines)
    assert [stored.place for stored in loaded] == ["line 1", "line 4", "line 7"]
    first, second, third = (stored.batch for stored in loaded)
    np.testing.assert_array_equal(first["obs"], np.array([[0, 1], [1, 1], [2, 1]], np.float32))
    assert (first["actions"].tolist(), first["actions"].dtype.kind) == ([0, 1, 0], "i")
    assert first["terminateds"].tolist() == [False, False, True]
    assert first["dones"].tolist() == [False, False, True]
    assert first["eps_id"].tolist() == third["eps_id"].tolist() != second["eps_id"].tolist()
    assert not first.keys() & {"agent_id", "infos"}
    of_two = [read(tmp_path / "rows.jsonl", lines, Share(index, 2)) for index in range(2)]
    assert [[stored.place for stored in share] for share in of_two] == [
        ["line 1", "line 7"],
        ["line 4"],
    ]


def test_rows_that_do_not_fit_are_named_and_the_others_are_read(tmp_path):
    lines = [row(1, 0), row(1, 1, obs=[1.0]), row(2, 0), {"eps_id": 3, "obs": [0.0, 1.0]}]
    loaded = read(tmp_path / "rows.json", lines)
    assert isinstance(loaded[0], DataError)
    assert loaded[0].place == "line 1"
    assert [getattr(stored, "place", None) for stored in loaded[1:]] == ["line 3", "line 4"]


def test_a_damaged_line_is_reported_by_one_of_the_readers_that_share_a_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(
            [
                json.dumps(row(1, 0)),
                "{damaged",
                json.dumps(row(1, 1)),
                json.dumps(row(2, 0)),
                "{damaged",
            ]
        )
    )
    path = str(tmp_path / "rows.jsonl")
    loaded = [
        stored for index in range(3) for stored in format_of(path).read(path, Share(index, 3))
    ]
    assert sorted(error.place for error in loaded if isinstance(error, DataError)) == [
        "line 2",
        "line 5",
    ]
