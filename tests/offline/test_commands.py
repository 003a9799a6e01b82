from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from stored_rows import assert_equal_batches, cartpole_rows, read_once, write

from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.offline.commands import main
from aiorl.offline.estimators import ROUNDING
from aiorl.offline.readers import StoredEpisodes

pytest.importorskip("pyarrow")


@pytest.fixture
def run(capsys):
    def call(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:
            status = ended.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_inspect_shows_the_contents_of_a_file(tmp_path, run):
    batch = cartpole_rows(3, 5)
    path = write(tmp_path / "a.json", batch.slice(0, 7), batch.slice(7, 13))
    status, out, err = run("inspect", path)
    assert (status, err) == (0, "")
    least, most = (f"{end(np.exp(batch['action_logp'][:13])):.3g}" for end in (np.min, np.max))
    for line in (
        rf"{path}: json, 2 .* 13 ",
        r"\(4,\) float32",
        r"Discrete\(2\)",
        r"episodes +2 \D+ 1 ",
        r"returns +5 \D+ 5 \D+ 5\n",
        rf"probabilities .* {least} .* {most}\n",
        r"new_obs float32\[4\]",
    ):
        assert re.search(line, out)


def test_inspect_names_unreadable_places_and_continues(tmp_path, run):
    path = write(tmp_path / "a.json", cartpole_rows(), cartpole_rows())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\x1b[2J\n" + lines[0] + lines[1][:50])
    write(tmp_path / "b.parquet", cartpole_rows(2))
    (tmp_path / "c.json.gz").write_bytes(b"nothing of the kind")
    status, out, _ = run("inspect", tmp_path)
    assert status == 1
    for line in (
        r"unreadable +2 ",
        f"{path}, line 1: ",
        f"{path}, line 3: ",
        r"b\.parquet: parquet, 1 .* 10 ",
    ):
        assert re.search(line, out)
    assert out.count("c.json.gz: ") == 2, "its summary and its fault"
    assert "\x1b" not in out


def test_inspect_separates_policies_and_shows_what_is_not_recorded(tmp_path, run):
    rows = SampleBatch(obs=np.zeros((2, 3), np.float32), actions=np.zeros((2, 2), np.float32))
    path = write(tmp_path / "a.json", MultiAgentBatch({"left": cartpole_rows(), "right": rows}, 15))
    status, out, _ = run("inspect", path)
    assert status == 0
    for line in (
        "left: 15 ",
        "right: 2 ",
        "episodes .*eps_id",
        "probabilities .*action_prob .*action_logp",
    ):
        assert re.search(line, out)


def test_episodes_are_assembled_across_batches_and_environments(tmp_path, run):
    """Fragments of two environments alternate, as a sampler writes them."""
    first, second = cartpole_rows(1, 6), cartpole_rows(1, 6, first=1)
    turns = [
        SampleBatch.concat([first.slice(at, at + 3), second.slice(at, at + 3)]) for at in (0, 3)
    ]
    _, out, _ = run("inspect", write(tmp_path / "a.json", *turns))
    assert re.search(r"episodes +2 \D+\n", out)
    assert re.search(r"lengths +6 \D+ 6 \D+ 6\n", out)


def test_validate_finds_no_fault_in_files_of_a_sampler(tmp_path, run):
    write(tmp_path / "a.json", cartpole_rows(), cartpole_rows(4, first=3))
    write(tmp_path / "b.parquet", cartpole_rows())
    empty = np.zeros((3, 0), np.float32)
    write(tmp_path / "c.json", SampleBatch(obs=empty, new_obs=empty, eps_id=np.zeros(3, int)))
    status, out, err = run("validate", tmp_path)
    assert (status, out[:2], err) == (0, "3 ", "")
    assert run("inspect", tmp_path)[0] == 0


def broken(**changes):
    batch = cartpole_rows(2, 5)
    for name, (row, value) in changes.items():
        batch[name] = batch[name].copy()
        batch[name][row] = value
    return batch


def with_densities(densities):
    batch = SampleBatch(cartpole_rows(), action_prob=densities)
    batch["actions"] = batch["actions"].astype(np.float32)
    return batch


@pytest.mark.parametrize(
    ("batch", "fault"),
    [
        (broken(obs=(3, np.nan)), "row 4: .*obs "),
        (broken(rewards=(0, np.inf)), "row 1: .*rewards "),
        (broken(action_logp=(9, 0.7)), "row 10: .*action_logp "),
        (broken(action_logp=(9, -np.inf)), "row 10: .*action_logp "),
        (broken(dones=(4, False)), "row 5: "),
        (broken(t=(7, 0)), r"row 8: .*\bt "),
        (broken(obs=(7, 3.0)), "row 8: .*obs .*new_obs "),
        (broken(dones=(2, True), terminateds=(2, True)), "row 3: "),
        (
            SampleBatch(cartpole_rows(), action_prob=np.linspace(0, 1, 15)),
            r"row 1: .*action_prob .*\(0, 1\]",
        ),
        (with_densities(np.linspace(0, 4, 15)), "row 1: .*action_prob .*0 "),
    ],
)
def test_validate_names_the_row_that_does_not_fit(tmp_path, run, batch, fault):
    for suffix, place in ((".json", "line 2"), (".parquet", "row group 1")):
        batches = [cartpole_rows(), batch] if suffix == ".json" else [batch]
        path = write(tmp_path / f"a{suffix}", *batches)
        status, out, _ = run("validate", path)
        assert status == 1
        assert re.search(f"{path}, {place}, {fault}", out)


def test_validate_accepts_the_probabilities_that_estimators_accept(tmp_path, run):
    """Including rounding, and densities of continuous actions, which can be above 1."""
    rounded = cartpole_rows()
    rounded["action_logp"] = np.full(15, 0.9 * ROUNDING, np.float32)
    rounded["action_prob"] = np.exp(rounded["action_logp"])
    for name, batch in (("rounded", rounded), ("densities", with_densities(np.linspace(1, 4, 15)))):
        status, out, _ = run("validate", write(tmp_path / f"{name}.json", batch))
        assert status == 0, out


def test_validate_names_batches_of_another_form(tmp_path, run):
    other = cartpole_rows()
    del other["t"]
    other["extra"] = other["rewards"]
    other["obs"] = other["obs"].astype(np.float64)
    path = write(tmp_path / "a.json", cartpole_rows(), other, MultiAgentBatch({"x": other}, 15))
    status, out, _ = run("validate", path)
    assert status == 1
    for fault in (
        r"'t'.*\(\) int32",
        r"'extra'.*\(\) float32",
        r"'obs'.*\(4,\) float64.*\(4,\) float32",
    ):
        assert re.search(f"{path}, line 2: .*{fault}", out)
    assert "line 3" not in out


def test_validate_limits_the_faults_shown_and_counts_all(tmp_path, run):
    path = tmp_path / "a.json"
    path.write_text("x\n" * 50)
    status, out, _ = run("validate", path, "--max-shown", 3)
    assert status == 1
    assert out.count(f"{path}, line") == 3
    assert re.search(rf"{path}:\D+ 47 .*\n1 .* 50 ", out)


def test_convert_goes_through_every_format_and_back_and_runs_as_a_module(tmp_path, run):
    batch = cartpole_rows()
    path = write(tmp_path / "0.json", batch)
    for number, suffix in enumerate([".parquet", ".json.gz", ".jsonl.lz4", ".parquet", ".json"], 1):
        new = tmp_path / f"{number}{suffix}"
        status, out, err = run("convert", path, "--out", new)
        assert (status, out.startswith(f"{new}: 15 "), err) == (0, True, "")
        path = new
    assert_equal_batches(read_once(path)[0], batch)
    words = [sys.executable, "-m", "aiorl.data", "validate", str(path)]
    completed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout[:2], completed.stderr) == (0, "1 ", "")


def test_convert_writes_a_directory_of_several_files(tmp_path, run):
    files = [write(tmp_path / f"{name}.json", cartpole_rows()) for name in "ab"]
    status, _, err = run("convert", *files, "--out", tmp_path / "new", "--to", "parquet")
    assert (status, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.parquet", "b.parquet"]
    status, _, err = run("convert", *files, "--out", tmp_path / "c.parquet")
    assert status == 2
    assert "aiorl data merge" in err
    (tmp_path / "other").mkdir()
    status, _, err = run(
        "convert",
        files[0],
        write(tmp_path / "other/a.json", cartpole_rows()),
        "--out",
        tmp_path / "x",
    )
    assert status == 2
    assert "'a.json'" in err


def test_convert_to_rllib_and_to_no_compression(tmp_path, run):
    path = write(tmp_path / "a.parquet", cartpole_rows())
    assert run("convert", path, "--out", tmp_path / "r.json", "--to", "rllib")[0] == 0
    assert json.loads((tmp_path / "r.json").read_text())["type"] == "SampleBatch"
    for names in ("none", "obs", "obs,new_obs"):
        assert (
            run("convert", path, "--out", tmp_path / f"{names}.json", "--compress", names)[0] == 0
        )
        assert (tmp_path / f"{names}.json").read_text().count('"lz4"') == {"none": 0, "obs": 1}.get(
            names, 2
        )


def test_convert_to_minari_and_back(tmp_path, run, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    path = write(tmp_path / "a.json", cartpole_rows())
    assert run("convert", path, "--out", "minari:mine-v0")[0] == 0
    assert run("convert", "minari:mine-v0", "--out", tmp_path / "b.parquet")[0] == 0
    np.testing.assert_array_equal(
        read_once(tmp_path / "b.parquet")[0]["obs"], cartpole_rows()["obs"]
    )
    status, _, err = run("convert", path, "--out", "minari:mine-v0")
    assert status == 1
    assert "minari delete" in err
    status, _, err = run("convert", path, "--out", tmp_path / "c", "--to", "minari")
    assert status == 2


def converted_to_minari(tmp_path, run, monkeypatch, *batches):
    """Convert batches, and return the status and the episodes that Minari has."""
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    path = write(tmp_path / "a.json", *batches)
    status, _, _ = run("convert", path, "--out", "minari:mine-v0")
    return status, read_once("minari:mine-v0")


def test_rows_in_any_order_become_whole_episodes_of_minari(tmp_path, run, monkeypatch):
    batch = cartpole_rows(2, 6)
    shuffled = batch.shuffled(np.random.default_rng(0))
    batches = [shuffled.slice(start, start + 4) for start in (0, 4, 8)]
    status, episodes = converted_to_minari(tmp_path, run, monkeypatch, *batches)
    assert status == 0
    by_start = {float(rows["obs"][0, 0]): rows for rows in episodes}
    for expected in batch.split_by_episode():
        rows = by_start.pop(float(expected["obs"][0, 0]))
        for name in ("obs", "new_obs", "actions", "dones", "t"):
            np.testing.assert_array_equal(rows[name], expected[name])
    assert not by_start


@pytest.mark.parametrize("without", [[], ["t"]])
def test_a_row_that_is_left_out_divides_an_episode_of_minari(tmp_path, run, monkeypatch, without):
    batch = broken(rewards=(7, np.nan))
    for name in without:
        del batch[name]
    status, episodes = converted_to_minari(tmp_path, run, monkeypatch, batch)
    assert status == 1
    assert [rows.count for rows in episodes] == [5, 2, 2]
    joined = SampleBatch.concat(episodes)
    for name in ("obs", "new_obs", "actions"):
        np.testing.assert_array_equal(joined[name], np.delete(batch[name], 7, axis=0))
    assert joined["truncateds"].tolist() == [row == 6 for row in range(9)]


def test_merge_keeps_episodes_of_different_files_apart(tmp_path, run):
    batches = [cartpole_rows(3, 4), cartpole_rows(2, 4, first=1, seed=5)]
    files = [
        write(tmp_path / f"{number}.json", batch.slice(0, 6), batch.slice(6, batch.count))
        for number, batch in enumerate(batches)
    ]
    assert run("merge", *files, "--out", tmp_path / "all.parquet")[0] == 0
    merged = SampleBatch.concat(read_once(tmp_path / "all.parquet"))
    assert merged["eps_id"].tolist() == list(np.repeat(np.arange(5), 4))
    np.testing.assert_array_equal(merged["obs"], SampleBatch.concat(batches)["obs"])
    several = write(
        tmp_path / "m.json",
        MultiAgentBatch({"x": cartpole_rows(2, 1), "y": cartpole_rows(2, 1)}, 2),
    )
    assert run("merge", several, files[0], "--out", tmp_path / "all.json")[0] == 0
    first, second, _ = read_once(tmp_path / "all.json")
    assert {name: rows["eps_id"].tolist() for name, rows in first.policy_batches.items()} == {
        "x": [0, 1],
        "y": [0, 1],
    }
    assert second["eps_id"].tolist() == [2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_merge_numbers_episodes_that_had_no_numbers(tmp_path, run, suffix):
    """The first file ends within an episode, which the second one doesn't continue."""
    files = []
    for number, count in enumerate((9, 15)):
        batch = cartpole_rows(3, 5, seed=number).slice(0, count)
        del batch["eps_id"]
        del batch["t"]
        path = write(tmp_path / f"{number}.json", batch.slice(0, 3), batch.slice(3, count))
        files.append(str(path))
    apart = StoredEpisodes(files)
    lengths = [episode.count for _, episode in apart]
    assert run("merge", *files, "--out", tmp_path / f"all{suffix}")[0] == 0
    merged = StoredEpisodes(str(tmp_path / f"all{suffix}"))
    assert [episode.count for _, episode in merged] == lengths == [5, 5, 5, 5]
    assert (merged.num_left_out, apart.num_left_out) == (4, 4)


def test_merge_numbers_batches_that_say_nothing_of_episodes(tmp_path, run):
    """Each is an episode, and so are the rows of each agent in it."""
    batch = SampleBatch(obs=np.arange(4), rewards=np.ones(4), agent_index=[0, 1, 0, 1])
    path = write(tmp_path / "a.json", batch, batch)
    assert run("merge", path, "--out", tmp_path / "all.json")[0] == 0
    merged = SampleBatch.concat(read_once(tmp_path / "all.json"))
    assert merged["obs"].tolist() == [0, 2, 1, 3] * 2
    assert merged["eps_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_unreadable_places_are_left_out_and_no_file_is_overwritten_or_left_incomplete(
    tmp_path, run, command
):
    path = write(tmp_path / "a.json", cartpole_rows(), SampleBatch(obs=np.ones((1, 4), np.float32)))
    before = path.read_bytes()
    status, _, err = run(command, path, "--out", path)
    assert status == 1
    assert str(path) in err
    assert path.read_bytes() == before
    status, _, err = run(command, path, "--out", tmp_path / "b.parquet")
    assert status == 1
    assert "'action_logp'" in err
    empty = write(tmp_path / "empty.json", SampleBatch(obs=np.ones((1, 0), np.float32)))
    assert run(command, empty, "--out", tmp_path / "b.parquet")[0] == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.json", "empty.json"}
    path.write_bytes(before + b"{}\n")
    status, out, err = run(command, path, "--out", tmp_path / "b.json")
    assert (status, out.startswith(f"{tmp_path}/b.json: 16 ")) == (1, True)
    assert f"{path}, line 3" in err


def test_help_has_examples_and_wrong_usage_gets_one_sentence(tmp_path, run):
    for words in (
        ["--help"],
        ["inspect", "--help"],
        ["validate", "-h"],
        ["convert", "--help"],
        ["merge", "--help"],
    ):
        status, out, _ = run(*words)
        assert status == 0
        assert out.count("aiorl data") > 1
    path = write(tmp_path / "a.json", cartpole_rows())
    for words, fact in (
        (["inspct", "x"], "'inspect'"),
        (["inspect"], "FILE"),
        (["convert", "x"], "--out"),
        (["validate", "x", "--max-shown", "0"], "--max-shown"),
        (["inspect", tmp_path / "nothing"], f"{tmp_path}/nothing"),
        (["convert", path, "--out", tmp_path / "b", "--to", "parket"], "'parquet'"),
    ):
        status, out, err = run(*words)
        assert (status, out) == (2, "")
        assert fact in err
    assert run()[0] == 2
    assert run("inspect", write(tmp_path / "a.txt", cartpole_rows(), format_name="json"))[0] == 1


def test_ctrl_c_ends_a_command_with_one_line(tmp_path, run, monkeypatch):
    def interrupted(path, space):
        raise KeyboardInterrupt

    monkeypatch.setattr("aiorl.offline.commands.inspect_file", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    status, _, err = run("inspect", write(tmp_path / "a.json", cartpole_rows()))
    assert (status, err[:7], err.count("\n")) == (130, "aiorl: ", 1)
