"""Rows belong to the episode and step that they name, wherever they stand in a file."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from stored_rows import cartpole_rows, write

from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import DataError
from aiorl.offline import episodes
from aiorl.offline.commands import main
from aiorl.offline.episodes import episode_order, trajectories
from aiorl.offline.formats import Share
from aiorl.offline.readers import FileReader, ReaderOptions, StepsLeftOut, StoredEpisodes
from aiorl.offline.registry import stored_batches

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TRAINING: dict[str, Any] = {
    "epochs": 1,
    "shuffle_files": False,
    "joins_episodes": True,
    "adds_new_obs": True,
}


def rows_of(episodes: int = 4, length: int = 10, *without: str, **changes: Any) -> SampleBatch:
    """Return whole episodes, sorted, without next observations; the observation is the episode and
    the step.
    """
    episode, step = np.repeat(np.arange(episodes), length), np.tile(np.arange(length), episodes)
    columns = {
        "obs": np.stack([episode, step], 1).astype(np.float32),
        "actions": step % 2,
        "rewards": np.ones(episodes * length, np.float32),
        "terminateds": step == length - 1,
        "truncateds": np.zeros(episodes * length, bool),
        "eps_id": episode + 7,
        "t": step,
        **changes,
    }
    return SampleBatch({name: column for name, column in columns.items() if name not in without})


def orders(rows: SampleBatch) -> dict[str, Any]:
    by_time = np.argsort(rows["t"], kind="stable")
    return {
        "sorted": np.arange(rows.count),
        "by time": by_time,
        "reversed": np.arange(rows.count)[::-1],
        "reversed by time": by_time[::-1],
        "shuffled": np.random.default_rng(3).permutation(rows.count),
    }


def write_as(path: Any, rows: SampleBatch, batch_rows: int, form: str) -> str:
    """Write rows in a format, `batch_rows` in each batch."""
    parts = [rows.slice(at, at + batch_rows) for at in range(0, rows.count, batch_rows)]
    if form == "parquet":
        table = pa.table({name: column.tolist() for name, column in rows.items()})
        pq.write_table(table, f"{path}.parquet", row_group_size=batch_rows)
        return f"{path}.parquet"
    if form == "aiorl":
        return str(write(f"{path}.json", *parts))
    if form == "rllib":
        return str(write(f"{path}.json", *parts, format_name="rllib"))
    with open(f"{path}.json", "w") as file:
        for row in rows.rows():
            values = {name: np.asarray(value).tolist() for name, value in row.items()}
            file.write(json.dumps({**values, "eps_id": f"episode {values['eps_id']}"}) + "\n")
    return f"{path}.json"


def steps_of(path: str, **options: Any) -> list[list[tuple[float, ...]]]:
    """Return the observations of each trajectory that training gets, with the ones that follow
    them.
    """
    loaded = []
    for batch in FileReader(path, ReaderOptions(**{**TRAINING, **options})):
        for part in trajectories(batch):
            loaded.append(
                [
                    (*obs, *new_obs)
                    for obs, new_obs in zip(part["obs"], part["new_obs"], strict=True)
                ]
            )
    return loaded


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "batch_rows", "form"),
    [
        *(
            (name, batch_rows, "rows")
            for name in ("sorted", "by time", "reversed", "reversed by time", "shuffled")
            for batch_rows in (3, 40)
        ),
        # every format yields such batches
        *(("by time", 7, form) for form in ("parquet", "aiorl", "rllib", "rows")),
    ],
)
def test_r241_training_inspection_validation_and_estimators_find_the_same_episodes(
    tmp_path: Any, capsys: Any, name: str, batch_rows: int, form: str
) -> None:
    rows = rows_of()
    path = write_as(tmp_path / "a", rows.take(orders(rows)[name]), batch_rows, form)
    expected = [[(e, t, e, min(t + 1, 9)) for t in range(10)] for e in range(4)]
    assert sorted(steps_of(path)) == expected
    whole = [episode for _, episode in StoredEpisodes(path)]
    assert sorted(episode["obs"].tolist() for episode in whole) == [
        [[e, t] for t in range(10)] for e in range(4)
    ]
    assert main(["inspect", path]) == 0
    output = capsys.readouterr().out
    assert "4 ended\n" in output
    assert "10 on average, 10 to 10" in output
    assert main(["validate", path]) == 0


def test_workers_that_share_a_file_get_each_episode_once(tmp_path: Any) -> None:
    rows = rows_of()
    path = write_as(tmp_path / "a", rows.take(orders(rows)["by time"]), 7, "parquet")
    loaded = [steps for index in range(3) for steps in steps_of(path, share=Share(index, 3))]
    assert sorted(steps[0][0] for steps in loaded) == [0, 1, 2, 3]
    assert sum(map(len, loaded)) == 40


def test_steps_cut_into_batches_keep_the_observations_that_follow_them(tmp_path: Any) -> None:
    path = write_as(tmp_path / "a", rows_of(2, 30), 60, "parquet")
    loaded = [step for steps in steps_of(path, batch_rows=8) for step in steps]
    assert sorted(loaded) == [(e, t, e, min(t + 1, 29)) for e in range(2) for t in range(30)]


@pytest.mark.parametrize(("form", "batch_rows"), [("rows", 1), ("rllib", 4)])
def test_whole_numbers_in_some_batches_and_fractions_in_others_cut_no_episode(
    tmp_path: Any, form: str, batch_rows: int
) -> None:
    rows = rows_of(2)
    rows = rows.take(orders(rows)["by time"])
    # every fourth line has fractions
    rewards = [1 if row % 16 < 12 else 0.5 for row in range(rows.count)]
    rows["rewards"] = np.array(rewards, object)
    path = write_as(tmp_path / "a", rows, batch_rows, form)
    assert sorted(steps_of(path)) == [
        [(e, t, e, min(t + 1, 9)) for t in range(10)] for e in range(2)
    ]
    returns = [episode["rewards"].sum() for _, episode in StoredEpisodes(path)]
    assert sum(returns) == sum(rewards)
    assert len(returns) == 2


def test_a_row_group_with_a_value_missing_after_a_terminal_state_cuts_no_episode(
    tmp_path: Any, capsys: Any
) -> None:
    step = np.arange(10)
    new_obs = np.array([*range(1, 10), None], object)
    rows = rows_of(1, obs=step, new_obs=new_obs)
    path = write_as(tmp_path / "a", rows, 4, "parquet")
    assert main(["inspect", path]) == 0
    assert "1 ended\n" in capsys.readouterr().out
    (batch,) = FileReader(path, ReaderOptions(**TRAINING))
    assert batch["new_obs"].tolist() == [*range(1, 10), 9]


def test_agents_of_an_episode_are_kept_apart_in_batches_of_several_policies(tmp_path: Any) -> None:
    rows = rows_of(2, 6)
    both = SampleBatch.concat([rows, rows])
    both["agent_index"] = np.repeat([0, 1], rows.count)
    by_time = both.take(np.argsort(both["t"], kind="stable"))
    parts = [by_time.slice(at, at + 6) for at in range(0, by_time.count, 6)]
    path = str(write(tmp_path / "a.json", *[MultiAgentBatch({"p": part}, 3) for part in parts]))
    batches = list(FileReader(path, ReaderOptions(**TRAINING)))
    assert sum(batch.count for batch in batches) == 12, "env steps; each has a row of both agents"
    loaded = [part for batch in batches for part in trajectories(batch.policy_batches["p"])]
    assert sorted((int(part["eps_id"][0]), int(part["agent_index"][0])) for part in loaded) == [
        (7, 0),
        (7, 1),
        (8, 0),
        (8, 1),
    ]
    assert {tuple(part["t"]) for part in loaded} == {tuple(range(6))}


def test_a_number_can_name_several_episodes_one_after_the_other(tmp_path: Any) -> None:
    rows = rows_of(3, 5, eps_id=np.zeros(15, int))
    for batch_rows in (4, 15):
        path = write_as(tmp_path / f"{batch_rows}", rows, batch_rows, "parquet")
        assert [steps[0][0] for steps in steps_of(path)] == [0, 1, 2]


@pytest.mark.parametrize("batch_rows", [6, 30])
def test_a_number_for_several_episodes_that_alternate_is_refused_with_its_rows(
    tmp_path: Any, capsys: Any, batch_rows: int
) -> None:
    rows = rows_of(3, 10, eps_id=np.zeros(30, int))
    path = write_as(tmp_path / "a", rows.take(orders(rows)["by time"]), batch_rows, "parquet")
    assert main(["validate", path]) == 1
    assert main(["inspect", path]) == 1
    output = capsys.readouterr().out
    assert f"{path}, row group 1: " in output
    assert "eps_id" in output
    with pytest.raises(DataError) as caught:
        steps_of(path)
    assert path in str(caught.value)


def test_steps_alone_do_not_tell_alternating_episodes_apart(tmp_path: Any) -> None:
    rows = rows_of(4, 10, "eps_id")
    path = write_as(tmp_path / "a", rows.take(orders(rows)["by time"]), 40, "parquet")
    with pytest.raises(DataError, match="row group 1") as caught:
        steps_of(path)
    assert "eps_id" in str(caught.value)


def test_without_numbers_or_steps_rows_count_in_their_order(tmp_path: Any) -> None:
    for number, without in enumerate((("eps_id",), ("t",), ("eps_id", "t"))):
        path = write_as(tmp_path / f"{number}", rows_of(4, 10, *without), 7, "parquet")
        assert [len(steps) for steps in steps_of(path)] == [10] * 4
    rows = rows_of()
    by_time = rows.take(orders(rows)["by time"])
    del by_time["t"]
    path = write_as(tmp_path / "alternating", by_time, 7, "parquet")
    assert sorted(len(steps) for steps in steps_of(path)) == [10] * 4


def test_rows_whose_next_steps_are_in_another_file_are_refused_and_not_left_out_silently(
    tmp_path: Any,
) -> None:
    rows = rows_of(4, 20)
    for parity in (0, 1):
        write_as(
            tmp_path / f"{parity}",
            rows.take(np.flatnonzero(rows["t"] % 2 == parity)),
            40,
            "parquet",
        )
    with pytest.raises(DataError) as caught:
        steps_of(str(tmp_path))
    assert str(tmp_path) in caught.value.path
    assert "t 0" in str(caught.value)


def test_beyond_a_bound_of_memory_open_episodes_are_cut_with_a_warning(
    tmp_path: Any, monkeypatch: Any, caplog: Any
) -> None:
    rows = rows_of(4, 50)
    path = write_as(tmp_path / "a", rows.take(orders(rows)["by time"]), 20, "parquet")
    monkeypatch.setattr(episodes, "MAX_OPEN_BYTES", 1 << 15)
    loaded = steps_of(path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert path in caplog.text
    assert 4 < len(loaded) < 40
    assert all(
        [step[1] for step in steps] == list(range(int(steps[0][1]), int(steps[-1][1]) + 1))
        for steps in loaded
    )


def test_beyond_the_bound_steps_in_reverse_are_refused(tmp_path: Any, monkeypatch: Any) -> None:
    rows = rows_of(4, 50)
    path = write_as(tmp_path / "a", rows.take(orders(rows)["reversed by time"]), 20, "parquet")
    monkeypatch.setattr(episodes, "MAX_OPEN_BYTES", 1 << 15)
    errors = [
        item for item in stored_batches(path, joins_episodes=True) if isinstance(item, DataError)
    ]
    assert {error.path for error in errors} == {path}
    assert errors[0].place.startswith("row group ")


def test_rows_in_order_are_not_copied() -> None:
    assert episode_order(cartpole_rows()) is None
    assert episode_order(rows_of(2, 3, "t", "eps_id")) is None


def test_files_of_a_sampler_keep_their_batches_if_no_episode_is_in_several(tmp_path: Any) -> None:
    path = str(write(tmp_path / "a.json", cartpole_rows(3, 5), cartpole_rows(2, 5, first=3)))
    joined, stored = (list(stored_batches(path, joins_episodes=joins)) for joins in (True, False))
    assert (
        [item.place for item in joined] == [item.place for item in stored] == ["line 1", "line 2"]
    )
    for actual, other in zip(joined, stored, strict=True):
        np.testing.assert_array_equal(actual.batch["obs"], other.batch["obs"])


def test_truncated_episodes_without_numbers_and_next_observations_stay_apart() -> None:
    num_rows = 40
    truncateds = np.zeros(num_rows, bool)
    truncateds[9::10] = True
    rows = SampleBatch(
        {
            "obs": np.arange(num_rows, dtype=np.float32)[:, None],
            "actions": np.zeros(num_rows, np.int64),
            "rewards": np.ones(num_rows, np.float32),
            "terminateds": np.zeros(num_rows, bool),
            "truncateds": truncateds,
            "dones": truncateds.copy(),
        }
    )
    # the last row of each has no next observation and is left out
    completed = StepsLeftOut().with_new_obs(rows, "file")
    assert [part.count for part in trajectories(completed)] == [9, 9, 9, 9]


def test_workers_share_a_file_whose_episodes_span_its_batches(tmp_path: Any) -> None:
    lines = []
    for episode in range(20):
        for half in range(2):
            lines.append(
                {
                    "type": "SampleBatch",
                    "eps_id": [episode] * 10,
                    "t": list(range(10 * half, 10 * half + 10)),
                    "obs": [[float(episode)]] * 10,
                    "actions": [0] * 10,
                    "rewards": [1.0] * 10,
                    "dones": [False] * 9 + [half == 1],
                }
            )
    path = tmp_path / "halves.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = [
        [stored for stored in stored_batches(str(path), Share(slot, 2), joins_episodes=True)]
        for slot in range(2)
    ]
    rows = [sum(stored.batch.count for stored in part) for part in parts]
    assert sum(rows) == 400
    assert min(rows) >= 160
