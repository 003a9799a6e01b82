"""`python -m aiorl.estimate` judges the policy of a checkpoint on stored episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from saved_runs import save_run

import aiorl
from aiorl.data.sample_batch import SampleBatch
from aiorl.estimate import main
from aiorl.offline.formats import WriteOptions
from aiorl.offline.readers import FileReader, HoldOut, ReaderOptions
from aiorl.offline.registry import format_named


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a CartPole-v1 run, which tests must not change."""
    directory = tmp_path_factory.mktemp("saved")
    save_run(directory, env="CartPole-v1", gamma=0.9)
    return directory


@pytest.fixture(scope="module")
def episodes(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[SampleBatch]:
    """Return episodes of the same policy."""
    data = tmp_path_factory.mktemp("played")
    aiorl.evaluate(run, episodes=12, seed=3, explore=True, output=data, config={"horizon": 30})
    return list(FileReader(str(data), ReaderOptions(epochs=1)))


def write(path: Path, batches: list[SampleBatch]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with format_named("json").create(str(path), WriteOptions()) as file:
        for batch in batches:
            file.write(batch)
    return path


def test_the_command_prints_a_table_and_writes_its_results(
    run: Path, episodes: list[SampleBatch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = [
        piece
        for episode in episodes[:4]
        for piece in (episode.slice(0, 5), episode.slice(5, episode.count))
    ]
    write(tmp_path / "data" / "a.json", cut)
    write(tmp_path / "data" / "b.json", [*episodes[4:], episodes[0].slice(0, 3)])
    found_file = tmp_path / "found.json"
    assert (
        main([str(run), str(tmp_path / "data"), "--bootstrap", "50", "--json", str(found_file)])
        == 0
    )
    output = capsys.readouterr().out
    result = json.loads(found_file.read_text())
    returns = [float((0.9 ** np.arange(episode.count)).sum()) for episode in episodes]
    assert result["V_prev"] == pytest.approx(np.mean(returns))
    assert (result["gamma"], result["num_episodes"], result["rows_left_out"]) == (0.9, 12, 3), (
        "the run's own discount"
    )
    assert list(result["estimates"]) == ["is", "wis", "pdis", "dm", "dr"]
    for name in ("is", "wis", "pdis"):
        estimate = result["estimates"][name]
        assert estimate["episodes"] == pytest.approx(returns, rel=1e-4), "the policy is the same"
        assert estimate["V_gain_est"] == pytest.approx(1.0, rel=1e-4)
        assert estimate["interval"][0] < estimate["V_est"] < estimate["interval"][1]
    assert result["effective_sample_size"] == pytest.approx(12, rel=1e-3)
    table = [line.split() for line in output.splitlines()]
    assert table[0][:2] == ["estimator", "estimate"]
    assert [line[0] for line in table[1:6]] == list(result["estimates"])
    assert f"{result['estimates']['wis']['V_est']:,.4g}" in table[2]


def test_it_judges_on_the_episodes_that_training_did_not_see(
    run: Path, episodes: list[SampleBatch], tmp_path: Path
) -> None:
    data, found_file = write(tmp_path / "a.json", episodes), tmp_path / "found.json"
    options = ["--methods", "is", "--bootstrap", "0", "--json", str(found_file)]
    assert main([str(run), str(data), *options, "--hold-out", "0.4"]) == 0
    judged = json.loads(found_file.read_text())["num_episodes"]
    trained = {
        int(number)
        for batch in FileReader(str(data), ReaderOptions(epochs=1, hold_out=HoldOut(0.4)))
        for number in batch["eps_id"]
    }
    assert 0 < judged == len(episodes) - len(trained)
    assert main([str(run), str(data), *options, "--hold-out", "1"]) == 2


def test_too_many_unreadable_places_are_an_error(
    run: Path, episodes: list[SampleBatch], tmp_path: Path
) -> None:
    data = write(tmp_path / "a.json", episodes)
    with data.open("a") as file:
        file.write("{torn\n" * 2)
    options = ["--methods", "is", "--bootstrap", "0", "--max-corrupt"]
    assert main([str(run), str(data), *options, "2"]) == 0
    assert main([str(run), str(data), *options, "1"]) == 1


def test_methods_discount_clip_and_seed_take_effect(
    run: Path, episodes: list[SampleBatch], tmp_path: Path
) -> None:
    data = str(write(tmp_path / "a.jsonl", episodes))
    options = [
        str(run),
        data,
        *[
            "--methods",
            "pdis,dr",
            "--gamma",
            "0.5",
            "--clip",
            "0.5",
            "--seed",
            "4",
            "--bootstrap",
            "20",
        ],
    ]
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file in files:
        assert main([*options, "--json", str(file), "--cut-is-end", "--raw-observations"]) == 0
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second
    assert set(first["estimates"]) == {"pdis", "dr"}
    assert (first["gamma"], first["clip"], first["seed"], first["clipped_episodes"]) == (
        0.5,
        0.5,
        4,
        12,
    )
    assert first["estimates"]["pdis"]["V_gain_est"] == pytest.approx(0.5, rel=1e-4), (
        "each ratio is the bound"
    )


def test_an_error_takes_one_sentence(
    run: Path, episodes: list[SampleBatch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = episodes[3].copy()
    bad["action_logp"][2] = 0.7
    data = str(write(tmp_path / "bad.json", [episodes[0], bad]))
    for words, status, message in (
        ([data], 1, "'action_logp'"),
        ([str(tmp_path / "none*.json")], 2, "none*.json"),
        ([data, "--policy", "other", "--methods", "dm"], 2, "other"),
        ([data, "--methods", "is,magic"], 2, "['magic']"),
        ([data, "--gamma", "1.5"], 2, "1.5"),
        ([data, "--clip", "0"], 2, "0.0"),
    ):
        assert main([str(run), *words]) == status
        assert message in capsys.readouterr().err
    for words in (["--bootstrap", "x"], ["--gamma", "x"]):
        with pytest.raises(SystemExit, match="2"):
            main([str(run), data, *words])
        assert words[0] in capsys.readouterr().err


def test_judging_loads_no_tensorflow() -> None:
    code = (
        "import sys, aiorl.estimate; assert not {'tensorflow', 'keras', 'onnx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scaled_stored_actions_are_converted_to_those_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "box", env="Pendulum-v1")
    rng = np.random.default_rng(0)

    def episode(number: int) -> SampleBatch:
        ends = np.arange(5) == 4
        return SampleBatch(
            {
                "obs": rng.normal(size=(5, 3)).astype(np.float32),
                "t": np.arange(5),
                "eps_id": np.full(5, number),
                "actions": rng.uniform(-2, 2, (5, 1)).astype(np.float32),
                "dones": ends,
                "terminateds": ends,
                "action_logp": rng.normal(-1.0, 0.1, 5).astype(np.float32),
                "truncateds": ends & False,
                "rewards": rng.normal(size=5).astype(np.float32),
            }
        )

    plain = [episode(number) for number in range(4)]
    scaled = [
        SampleBatch(
            {
                **rows,
                "actions": rows["actions"] / 2,
                "action_logp": rows["action_logp"] + np.log(2.0),
            }
        )
        for rows in plain
    ]
    estimates = []
    for name, batches, options in (
        ("a", plain, []),
        ("b", scaled, ["--actions-in-input-normalized"]),
        ("b", scaled, []),
    ):
        data, out = (
            write(tmp_path / name / f"{name}{len(options)}.json", batches),
            tmp_path / "found.json",
        )
        words = [
            str(tmp_path / "box"),
            str(data),
            "--methods",
            "is",
            "--bootstrap",
            "0",
            "--json",
            str(out),
        ]
        assert main([*words, *options]) == 0
        estimates.append(json.loads(out.read_text())["estimates"]["is"]["V_est"])
        assert ("--actions-in-input-normalized" in capsys.readouterr().err) == (
            name == "b" and not options
        )
    assert estimates[0] == pytest.approx(estimates[1], rel=1e-3, abs=0)
    assert estimates[0] != pytest.approx(estimates[2], rel=1e-3, abs=0)
