from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from stored_rows import assert_equal_batches, cartpole_rows, read_once, write

from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.offline.commands import main
from aiorl.offline.estimators import ROUNDING

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
    assert f"{path}: json, 2 batches, 13 rows" in out
    assert "Box of (4,) float32, seen -" in out
    assert "Discrete(2), as far as seen" in out
    assert "2 ended, 1 cut by the end of the file" in out
    assert "returns         5 on average, 5 to 5" in out
    logp = np.exp(batch["action_logp"][:13])
    assert f"of the actions taken {logp.min():.3g} to {logp.max():.3g}" in out
    assert "new_obs float32[4]" in out


def test_inspect_names_unreadable_places_and_continues(tmp_path, run):
    path = write(tmp_path / "a.json", cartpole_rows(), cartpole_rows())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\x1b[2J\n" + lines[0] + lines[1][:50])
    write(tmp_path / "b.parquet", cartpole_rows(2))
    (tmp_path / "c.json.gz").write_bytes(b"nothing of the kind")
    status, out, _ = run("inspect", tmp_path)
    assert status == 1
    assert "unreadable      2 places:" in out
    assert "line 1: not JSON" in out
    assert "line 3: the last line is cut short" in out
    assert "b.parquet: parquet, 1 batch, 10 rows" in out
    assert "c.json.gz: the file is damaged" in out
    assert "\x1b" not in out


def test_inspect_separates_policies_and_shows_what_is_not_recorded(tmp_path, run):
    rows = SampleBatch(obs=np.zeros((2, 3), np.float32), actions=np.zeros((2, 2), np.float32))
    path = write(tmp_path / "a.json", MultiAgentBatch({"left": cartpole_rows(), "right": rows}, 15))
    status, out, _ = run("inspect", path)
    assert status == 0
    assert "policy left: 15 rows" in out
    assert "policy right: 2 rows" in out
    assert "unknown: there is no column eps_id" in out
    assert "importance sampling needs action_prob or action_logp" in out


def test_episodes_are_assembled_across_batches_and_environments(tmp_path, run):
    """Fragments of two environments alternate, as a sampler writes them."""
    first, second = cartpole_rows(1, 6), cartpole_rows(1, 6, first=1)
    turns = [SampleBatch.concat([first.slice(at, at + 3), second.slice(at, at + 3)]) for at in (0, 3)]
    _, out, _ = run("inspect", write(tmp_path / "a.json", *turns))
    assert "2 ended\n" in out
    assert "lengths         6 on average, 6 to 6" in out


def test_validate_finds_no_fault_in_files_of_a_sampler(tmp_path, run):
    write(tmp_path / "a.json", cartpole_rows(), cartpole_rows(4, first=3))
    write(tmp_path / "b.parquet", cartpole_rows())
    empty = np.zeros((3, 0), np.float32)
    write(tmp_path / "c.json", SampleBatch(obs=empty, new_obs=empty, eps_id=np.zeros(3, int)))
    assert run("validate", tmp_path) == (0, "3 files checked: all fits\n", "")
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
        (broken(obs=(3, np.nan)), "row 4: obs holds a number that is not finite"),
        (broken(rewards=(0, np.inf)), "row 1: rewards holds a number that is not finite"),
        (broken(action_logp=(9, 0.7)), "row 10: action_logp is above 0"),
        (broken(action_logp=(9, -np.inf)), "row 10: action_logp is not finite"),
        (broken(dones=(4, False)), "row 5: dones is not terminateds or truncateds"),
        (broken(t=(7, 0)), "row 8: t is not that of the previous row plus 1 (and 1 more rows)"),
        (broken(obs=(7, 3.0)), "row 8: obs is not new_obs of the previous row"),
        (broken(dones=(2, True), terminateds=(2, True)), "row 3: the episode is done here, but continues"),
        (SampleBatch(cartpole_rows(), action_prob=np.linspace(0, 1, 15)), "row 1: action_prob is not in (0, 1]"),
        (with_densities(np.linspace(0, 4, 15)), "row 1: action_prob is not above 0 and finite"),
    ],
)
def test_validate_names_the_row_that_does_not_fit(tmp_path, run, batch, fault):
    for suffix, place in ((".json", "line 2"), (".parquet", "row group 1")):
        batches = [cartpole_rows(), batch] if suffix == ".json" else [batch]
        path = write(tmp_path / f"a{suffix}", *batches)
        status, out, _ = run("validate", path)
        assert status == 1
        assert f"{path}, {place}, {fault}" in out
        assert "1 file checked: " in out


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
    assert f"{path}, line 2: column 't' is missing, in line 1 rows of () int32" in out
    assert "line 2: column 'extra' is rows of () float32, in line 1 missing" in out
    assert "line 2: column 'obs' is rows of (4,) float64, in line 1 rows of (4,) float32" in out
    assert "line 3" not in out


def test_validate_limits_the_faults_shown_and_counts_all(tmp_path, run):
    path = tmp_path / "a.json"
    path.write_text("x\n" * 50)
    status, out, _ = run("validate", path, "--max-shown", 3)
    assert status == 1
    assert out.count("not JSON") == 3
    assert "and 47 faults more" in out
    assert "1 file checked: 50 faults" in out


def test_convert_goes_through_every_format_and_back_and_runs_as_a_module(tmp_path, run):
    batch = cartpole_rows()
    path = write(tmp_path / "0.json", batch)
    for number, suffix in enumerate([".parquet", ".json.gz", ".jsonl.lz4", ".parquet", ".json"], 1):
        new = tmp_path / f"{number}{suffix}"
        assert run("convert", path, "--out", new) == (0, f"{new}: 15 rows\n", "")
        path = new
    assert_equal_batches(read_once(path)[0], batch)
    words = [sys.executable, "-m", "aiorl.data", "validate", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 file checked: all fits\n", "")


def test_convert_writes_a_directory_of_several_files(tmp_path, run):
    files = [write(tmp_path / f"{name}.json", cartpole_rows()) for name in "ab"]
    status, _, err = run("convert", *files, "--out", tmp_path / "new", "--to", "parquet")
    assert (status, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.parquet", "b.parquet"]
    status, _, err = run("convert", *files, "--out", tmp_path / "c.parquet")
    assert status == 2
    assert "aiorl.data merge" in err
    (tmp_path / "other").mkdir()
    status, _, err = run(
        "convert", files[0], write(tmp_path / "other/a.json", cartpole_rows()), "--out", tmp_path / "x"
    )
    assert status == 2
    assert "Several files would become 'a.json'" in err


def test_convert_to_rllib_and_to_no_compression(tmp_path, run):
    path = write(tmp_path / "a.parquet", cartpole_rows())
    assert run("convert", path, "--out", tmp_path / "r.json", "--to", "rllib")[0] == 0
    assert json.loads((tmp_path / "r.json").read_text())["type"] == "SampleBatch"
    for names in ("none", "obs", "obs,new_obs"):
        assert run("convert", path, "--out", tmp_path / f"{names}.json", "--compress", names)[0] == 0
        assert (tmp_path / f"{names}.json").read_text().count('"lz4"') == {"none": 0, "obs": 1}.get(names, 2)


def test_convert_to_minari_and_back(tmp_path, run, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    path = write(tmp_path / "a.json", cartpole_rows())
    assert run("convert", path, "--out", "minari:mine-v0")[0] == 0
    assert run("convert", "minari:mine-v0", "--out", tmp_path / "b.parquet")[0] == 0
    np.testing.assert_array_equal(read_once(tmp_path / "b.parquet")[0]["obs"], cartpole_rows()["obs"])
    status, _, err = run("convert", path, "--out", "minari:mine-v0")
    assert status == 1
    assert "minari delete" in err
    status, _, err = run("convert", path, "--out", tmp_path / "c", "--to", "minari")
    assert status == 2


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
    several = write(tmp_path / "m.json", MultiAgentBatch({"x": cartpole_rows(2, 1), "y": cartpole_rows(2, 1)}, 2))
    assert run("merge", several, files[0], "--out", tmp_path / "all.json")[0] == 0
    first, second, _ = read_once(tmp_path / "all.json")
    assert {name: rows["eps_id"].tolist() for name, rows in first.policy_batches.items()} == {"x": [0, 1], "y": [0, 1]}
    assert second["eps_id"].tolist() == [2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_unreadable_places_are_left_out_and_no_file_is_overwritten_or_left_incomplete(tmp_path, run, command):
    path = write(tmp_path / "a.json", cartpole_rows(), SampleBatch(obs=np.ones((1, 4), np.float32)))
    before = path.read_bytes()
    status, _, err = run(command, path, "--out", path)
    assert status == 1
    assert "the file already exists" in err
    assert path.read_bytes() == before
    status, _, err = run(command, path, "--out", tmp_path / "b.parquet")
    assert status == 1
    assert "same columns" in err
    empty = write(tmp_path / "empty.json", SampleBatch(obs=np.ones((1, 0), np.float32)))
    assert run(command, empty, "--out", tmp_path / "b.parquet")[0] == 1
    assert {found.name for found in tmp_path.iterdir()} == {"a.json", "empty.json"}
    path.write_bytes(before + b"{}\n")
    status, out, err = run(command, path, "--out", tmp_path / "b.json")
    assert (status, out) == (1, f"{tmp_path}/b.json: 16 rows\n")
    assert f"left out: {path}, line 3" in err


def test_help_has_examples_and_wrong_usage_gets_one_sentence(tmp_path, run):
    for words in (["--help"], ["inspect", "--help"], ["validate", "-h"], ["convert", "--help"], ["merge", "--help"]):
        status, out, _ = run(*words)
        assert status == 0
        assert "examples:" in out
        assert "python -m aiorl.data" in out
    path = write(tmp_path / "a.json", cartpole_rows())
    for words, sentence in (
        (["inspct", "x"], "Did you mean 'inspect'?"),
        (["inspect"], "required: FILE"),
        (["convert", "x"], "--out"),
        (["validate", "x", "--max-shown", "0"], "at least 1"),
        (["inspect", tmp_path / "nothing"], "No file of experience matches"),
        (["convert", path, "--out", tmp_path / "b", "--to", "parket"], "'parquet'"),
    ):
        status, out, err = run(*words)
        assert (status, out) == (2, "")
        assert sentence in err
    assert run()[0] == 2
    assert run("inspect", write(tmp_path / "a.txt", cartpole_rows(), format_name="json"))[0] == 1


def test_ctrl_c_ends_a_command_with_a_sentence(tmp_path, run, monkeypatch):
    def interrupted(path, space):
        raise KeyboardInterrupt

    monkeypatch.setattr("aiorl.offline.commands.inspect_file", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    status, _, err = run("inspect", write(tmp_path / "a.json", cartpole_rows()))
    assert (status, err) == (130, "aiorl: ended by Ctrl-C\n")
