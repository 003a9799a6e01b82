"""The live page: what it reads of runs, its answers, and how it looks in a browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import psutil
import pytest

pytest.importorskip("uvicorn")

from browser import browsing, needs_chromium
from forked_module import run_module
from processes import wait_until
from prometheus_client import CollectorRegistry, generate_latest

import aiorl.watch
from aiorl.config.layers import NOTED, load_config, save_config
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.launch.job import Job
from aiorl.learning.algorithms.registry import config_class
from aiorl.status import part_of
from aiorl.watch.metrics import Collector
from aiorl.watch.reading import (
    Run,
    Runs,
    all_settings,
    config_text,
    curves,
    experiments,
    log_entries,
)
from aiorl.web.ports import Ports

MARKUP = "<img src=x onerror=alert(1)>"
LOG = f"""2026-11-27 07:47:01,150 INFO aiorl.run.build: the seed of this run is 7
2026-11-27 07:48:01,150 ERROR aiorl.run.run: worker 1 (there) failed: ValueError: {MARKUP}
    Traceback (most recent call last):
      File "envs.py", line 12, in step
    ValueError: {MARKUP}
"""


def result(number: int, **more: Any) -> dict[str, Any]:
    steps = 100 * number
    return {
        "training_iteration": number,
        "timesteps_total": steps,
        "env_steps_trained_total": steps - 50,
        "time_total_s": number / 2,
        "timestamp": 1.7e9,
        "episode_reward_mean": float(number),
        "episode_reward_min": 0.0,
        "episode_reward_max": 2.0 * number,
        "episode_reward_mean_last_100": float(number),
        "sampled_steps_per_s": 200.0,
        "trained_steps_per_s": 100.0,
        "num_healthy_workers": 1,
        "hist_stats": {"episode_reward": [1.0, 3.0]},
        "policy_lag": {"min": 0.0, "mean": 1.0, "max": 2.0},
        "ledger": {
            "sampled": steps,
            "trained": steps - 50,
            "queued": 50,
            "in_flight": 0,
            "discarded": {},
            "lost": {},
        },
        "learner": {"loss": 1.0 / number},
        **more,
    }


def add(run: Path, *results: dict[str, Any]) -> None:
    with (run / "result.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in results)


def make_run(
    run: Path, num_results: int = 3, *, end: str = "", seed: int = 7, config: str = "lr: 0.1"
) -> Path:
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"algo: ppo\nenv: CartPole-v1\nseed: {seed}\nstop_timesteps: 1000\n{config}\n#   seed:"
        " argument\n"
    )
    address = {"address": "tcp://127.0.0.1:5557", "port": 5557}
    (run / "run.json").write_text(json.dumps({"run_id": "mine", "seed": seed, **address}))
    worker = {
        "slot": 1,
        "host": "there",
        "pid": 12,
        "state": "sampling",
        "env_steps_per_s": 9.0,
        "words": MARKUP,
    }
    learner = {
        "host": "here",
        "pid": 1,
        "state": "waiting for workers",
        "end": end,
        "no_update_s": 0.0,
    }
    (run / "status.json").write_text(
        json.dumps({"run_id": "mine", "learner": learner, "workers": [worker]})
    )
    (run / "log.txt").write_text(LOG)
    add(run, *(result(number + 1) for number in range(num_results)))
    return run


# Reading
# --------------------------------------------------------------------------------------------------


def test_curves_of_a_large_file_are_thinned_and_end_with_the_newest_result(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1000)
    add(run, result(1001, evaluation={"episode_reward_mean": 5.0}), result(1002))
    # the file is read as a whole, and in parts
    for num_points, least, most in (
        (400, 1002, 1002),
        (20, 20, 140),
    ):
        columns, end = curves(run, num_points=num_points)
        steps = columns["timesteps_total"]
        assert least <= len(steps) <= most
        assert (steps[-1], end) == (100_200, (run / "result.jsonl").stat().st_size)
        assert (np.diff(steps) > 0).all()
        assert 5.0 in columns["evaluation/episode_reward_mean"]


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"timesteps_total": "many"}', "[" * 9000, '{"a": "\\ud800"}', "1" * 99_999]
)
def test_damaged_results_are_left_out(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path / "run", 1)
    with (run / "result.jsonl").open("a") as file:
        file.write(f"{line}\n{line}")
    assert curves(run)[0]["timesteps_total"].tolist() == [100]
    assert Run(run).glance()["figures"].get("timesteps_total") in (100, None)


def test_the_newest_result_is_found_behind_lines_of_any_length(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0)
    add(run, result(1, custom=["x" * 300_000]), result(2, custom=["y" * 300_000]))
    assert Run(run).details()["account"]["result"]["timesteps_total"] == 200


def test_entries_of_a_log_are_found_by_level_and_text_with_their_traceback(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert [entry["level"] for entry in log_entries(run / "log.txt")[0]] == ["INFO", "ERROR"]
    (entry,), is_cut = log_entries(run / "log.txt", words="VALUEERROR", level="WARNING")
    assert "Traceback" in entry["more"]
    assert not is_cut
    (run / "worker.txt").write_text("07:48:01 there W slow\n" * 1000)
    entries, is_cut = log_entries(run / "worker.txt")
    assert {entry["level"] for entry in entries} == {"WARNING"}
    assert is_cut


@pytest.mark.parametrize(
    ("end", "num_results", "silent_s", "phase"),
    [
        ("", 3, 0, "training"),
        ("", 0, 0, "starting"),
        ("Done: 9 s have passed.", 3, 0, "ended"),
        ("", 3, 900, "unknown"),
        ("the learner failed", 3, 900, "failed"),
    ],
)
def test_the_phase_of_a_run_is_read_from_its_files(
    tmp_path: Path, end: str, num_results: int, silent_s: int, phase: str
) -> None:
    run = make_run(tmp_path / "run", num_results, end=end)
    for path in run.iterdir():
        os.utime(path, (time.time() - silent_s,) * 2)
    glance = Run(run).glance()
    assert glance["phase"] == phase
    if phase == "failed":
        assert MARKUP in glance["words"]
    if phase == "training":
        assert glance["figures"]["std"] == 1.0
        assert (glance["stops"]["stop_timesteps"], glance["stops"]["stop_return"]) == (1000, None)
        keys = {name for name in CommonConfig.model_fields if name.startswith("stop_")}
        assert keys <= glance["stops"].keys(), "each criterion of a config is on the page"


def test_configs_say_where_their_values_come_from_also_after_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 0.1\nenv_config: {size: 4}")
    given: dict[str, Any] = {"env": "CartPole-v1", "preset": "ppo-cartpole", "seed": 3}
    for changes in (given, {"resume": str(tmp_path), "stop_timesteps": 9}):
        save_config(
            load_config(config_class, file=file if changes is given else None, overrides=changes),
            tmp_path,
        )
        noted = dict(NOTED.findall(config_text(tmp_path)))
        assert (noted["lr"], noted["env_config"]) == (f"{file}, line 1", f"{file}, line 2")
        assert (noted["seed"], noted["num_sgd_iter"]) == ("argument", "preset ppo-cartpole")
        assert not noted.keys() & {"horizon", "model.use_lstm", "resume"}
    assert noted["stop_timesteps"] == "argument"


def test_runs_that_differ_only_in_their_seed_are_one_curve(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_run(tmp_path / f"a{seed}", 20 * seed, seed=seed)
    make_run(tmp_path / "b", 20, config="lr: 0.2")
    make_run(tmp_path / "new", 0)
    runs = [*Runs(tmp_path).find().values()]
    first, second = experiments(runs, "learner/loss", "seconds")
    assert first["runs"] == ["a1", "a2", "a3"]
    assert "lr=0.1" in first["name"]
    assert (second["runs"], second["at"][-1]) == (["b"], 10.0)
    assert first["at"][-1] <= 10.0  # with the first of its runs
    assert experiments(runs, "no such figure", "steps") == []


def test_settings_of_any_size_that_change_again_and_again_take_no_memory(tmp_path: Path) -> None:
    make_run(tmp_path / "large", 20)
    make_run(tmp_path / "other", 20, config="env_config: " + "y" * 100_000)
    config = tmp_path / "large" / "config.yaml"
    runs = Runs(tmp_path)
    tracemalloc.start()
    try:
        for number in range(6):
            config.write_text(f"algo: ppo\nenv: {number}{'x' * 500_000}\n")
            assert {run["name"] for run in runs.glances()} == {"large", "other"}
            assert len(experiments([*runs.find().values()], "learner/loss", "steps")) == 2
        assert tracemalloc.get_traced_memory()[0] < 3 << 20
    finally:
        tracemalloc.stop()
    assert all_settings(config_text(config.parent)).keys() == {"algo", "env"}


# Answers
# --------------------------------------------------------------------------------------------------


@contextmanager
def watching(root: Path, *options: str) -> Iterator[int]:
    """Run `aiorl watch` and yield its port."""
    command = [sys.executable, "-m", "aiorl", "watch", str(root), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)\n", process.stdout.readline())
            assert found is not None
            yield int(found[1])
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


def get(port: int, path: str, **query: str) -> tuple[int, Any, dict[str, str]]:
    headers = {"Range": query.pop("range")} if "range" in query else {}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
        answer = connection.getresponse()
        body, found = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    return answer.status, json.loads(body) if "json" in found["content-type"] else body, found


def test_the_page_and_its_data_are_answered(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/mine", end="Done.")
    film = "data:text/html,film.mp4"  # whose name may not decide its type
    (run / film).parent.mkdir()
    (run / film).write_bytes(bytes(range(100)))
    (tmp_path / "secret.txt").write_text("secret")
    (run / "logs").mkdir()
    (run / "logs/worker-1.txt").symlink_to(tmp_path / "secret.txt")
    with watching(tmp_path / "runs") as port:
        status, page, headers = get(port, "/")
        assert status == 200
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        for name in re.findall(rb'(?:src|href)="([^"#]+)"', page):
            assert get(port, f"/{name.decode()}")[0] == 200
        assert get(port, "/parts.js")[0] == 200
        (found,) = get(port, "/api/runs")[1]["runs"]
        assert (found["name"], found["phase"], found["env"]) == ("mine", "ended", "CartPole-v1")
        details = get(port, "/api/run", run="mine")[1]
        assert details["account"]["workers"][0]["words"] == MARKUP
        assert "Traceback" in details["failures"][0]["more"]
        assert details["films"] == [film]
        columns = get(port, "/api/curves", run="mine")[1]["columns"]
        assert columns["learner/loss"] == pytest.approx([1.0, 0.5, 1 / 3])
        assert get(port, "/api/experiments")[1][0]["runs"] == ["mine"]
        config = get(port, "/api/config", run="mine")[1]
        assert (config["values"]["lr"], config["origins"]) == (0.1, {"seed": "argument"})
        assert len(get(port, "/api/log", run="mine", level="ERROR")[1]["entries"]) == 1
        status, part, headers = get(port, "/api/film", run="mine", name=film, range="bytes=10-19")
        assert (status, part, headers["content-range"]) == (
            206,
            bytes(range(10, 20)),
            "bytes 10-19/100",
        )
        assert headers["content-type"] == "video/mp4"
        assert get(port, "/api/film", run="mine", name=film, range="bytes=100-")[0] == 416
        assert get(port, "/live")[0] == get(port, "/ready")[0] == 200
        assert b'aiorl_env_steps_sampled_total{run="mine"} 300.0' in get(port, "/metrics")[1]
        assert get(port, "/api/log", run="mine", file="logs/worker-1.txt")[1]["entries"] == []
        for path, query in (
            ("/api/run", {"run": ".."}),
            ("/api/log", {"run": "mine", "file": "../../secret.txt"}),
            ("/api/film", {"run": "mine", "name": "log.txt"}),
            ("/api/run", {}),
        ):
            status, answer, _ = get(port, path, **query)
            assert status == 404
            assert answer["error"]
        assert get(port, "/api/events", run="mine", **{"from": "x"})[0] == 400


def metrics_of(root: Path) -> dict[str, float]:
    """Return what Prometheus reads: metric with its labels -> value."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(Runs(root).find().values()))
    text = generate_latest(registry).decode()
    assert re.search("^# HELP aiorl_last_update_age_seconds [A-Z].{20,}$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_alerts_can_be_written_from_the_metrics_alone(tmp_path: Path) -> None:
    """R262: ages, workers lost, failures, restarts, discarded env steps, times and memory."""
    runs = tmp_path / "runs"
    run = make_run(runs / "mine")
    account = json.loads((run / "status.json").read_text())
    account |= {"time": time.time(), "num_workers": 2, "num_joined": 5, "num_lost": 3}
    account |= {"num_failures": 4}
    account["learner"] |= {"began": 1.7e9, "busy": 0.25, "no_update_s": 20.0}
    (run / "status.json").write_text(json.dumps(account))
    ledger = {
        **result(4)["ledger"],
        "discarded": {"too old": 7, "\x1b[31m": 1},
        "lost": {"gone": 9},
    }
    times = {"update_s": 0.5, "wait_for_batch_s": 1.5, "kl": 0.01, "other/kl": 3.0}
    health = {"num_warnings": 1, "warnings": ["w"], "entropy_share": 0.5}
    perf = {"learner_rss_bytes": 4e8, "ram_util_percent": 50.0}
    add(run, result(4, ledger=ledger, learner=times, health=health, perf=perf))
    checkpoint = run / "checkpoints/checkpoint-000004"
    checkpoint.mkdir(parents=True)
    os.utime(checkpoint, (time.time() - 500,) * 2)
    make_run(runs / "over", end="Done.")
    metrics = metrics_of(runs)
    mine = '{run="mine"}'
    assert 20 <= metrics[f"aiorl_last_update_age_seconds{mine}"] < 120
    assert 500 <= metrics[f"aiorl_last_checkpoint_age_seconds{mine}"] < 600
    expected = {
        f"aiorl_workers{mine}": 2,
        f"aiorl_workers_joined_total{mine}": 5,
        f"aiorl_workers_lost_total{mine}": 3,
        f"aiorl_worker_failures_total{mine}": 4,
        f"aiorl_learner_start_time_seconds{mine}": 1.7e9,
        'aiorl_env_steps_discarded_total{reason="too old",run="mine"}': 7,
        'aiorl_env_steps_discarded_total{reason="?[31m",run="mine"}': 1,
        'aiorl_env_steps_lost_total{reason="gone",run="mine"}': 9,
        f"aiorl_update_seconds{mine}": 0.5,
        f"aiorl_wait_for_batch_seconds{mine}": 1.5,
        f"aiorl_learner_busy_ratio{mine}": 0.25,
        f"aiorl_learner_memory_bytes{mine}": 4e8,
        f"aiorl_host_memory_used_ratio{mine}": 0.5,
        f"aiorl_health_warnings{mine}": 1,
        'aiorl_policy_entropy_ratio{policy="default_policy",run="mine"}': 0.5,
        'aiorl_policy_kl{policy="other",run="mine"}': 3,
        f"aiorl_training{mine}": 1,
        'aiorl_training{run="over"}': 0,
        'aiorl_env_steps_sampled_total{run="over"}': 300,
        'aiorl_run_info{algo="ppo",env="CartPole-v1",phase="ended",run="over"}': 1,
    }
    for name, value in expected.items():
        assert metrics.get(name) == value, name
    assert 'aiorl_last_update_age_seconds{run="over"}' not in metrics, "nothing to alert about"
    assert metrics['aiorl_last_change_age_seconds{run="over"}'] < 120


def test_links_are_not_followed_out_of_a_run_or_a_directory_of_runs(tmp_path: Path) -> None:
    other = make_run(tmp_path / "elsewhere/other")
    (other / "film.mp4").write_bytes(b"film")
    (other / "worker-1.txt").write_text("07:48:01 there E secret\n")
    run = make_run(tmp_path / "runs/mine")
    (tmp_path / "runs/linked").symlink_to(other)
    (run / "logs").symlink_to(other)
    (run / "films").symlink_to(other)
    (run / "alone.mp4").symlink_to(other / "film.mp4")
    assert list(Runs(tmp_path / "runs").find()) == ["mine"]
    details = Run(run).details()
    assert (details["films"], details["account"]["logs"]) == ([], {})
    assert log_entries(run / "logs/worker-1.txt", inside=run) == ([], False)
    assert "secret" in log_entries(other / "worker-1.txt")[0][0]["text"]
    (tmp_path / "typed").symlink_to(other)
    assert Runs(tmp_path / "typed").is_single, "the user's own word"
    assert Run(tmp_path / "typed").details()["films"] == ["film.mp4"]
    for name in ("logs/worker-1.txt", "../mine/log.txt", str(other / "worker-1.txt")):
        assert part_of(run, name, 0, 9) == (b"", 0)


def test_a_run_is_followed_from_a_place_in_its_results(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with watching(run) as port:
        assert get(port, "/ready")[0] == 200
        end = get(port, "/api/curves", run="run")[1]["end"]
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as client,
            client.makefile("rb") as lines,
        ):
            asked = f"GET /api/events?run=run&from={end} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            client.sendall(asked.encode())

            def data_of(event: str) -> Any:
                while f"event: {event}" not in next(lines).decode():
                    pass
                return json.loads(next(lines).decode().removeprefix("data: "))

            assert data_of("run")["glance"]["phase"] == "training"
            add(run, result(4), result(5))
            assert data_of("results")[0]["timesteps_total"] == 400
            (run / "result.jsonl").write_text("")  # a resumed run
            assert data_of("reload") == {}


def test_a_directory_without_runs_is_shown_and_one_that_is_missing_is_refused(
    tmp_path: Path,
) -> None:
    with watching(tmp_path) as port:
        assert get(port, "/api/runs")[1]["runs"] == []
        assert get(port, "/ready")[0] == 200
        make_run(tmp_path / "later")
        assert [run["name"] for run in get(port, "/api/runs")[1]["runs"]] == ["later"]
    done = run_module("aiorl", ["watch", str(tmp_path / "missing")], {**os.environ})
    assert done.returncode == 2
    assert "is not a directory" in done.stderr


# The page of a run
# --------------------------------------------------------------------------------------------------

SMALL = (
    "--env=CartPole-v1",
    "--num-workers=0",
    "--eager",
    "--train-batch-size=64",
    "--sgd-minibatch-size=64",
    "--rollout-fragment-length=64",
    "--model.fcnet-hiddens=[8]",
)


@pytest.mark.slow
def test_a_learner_has_a_page_that_ends_with_it(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "aiorl",
        "train",
        *SMALL,
        "--run-dir",
        str(tmp_path / "run"),
        "--web",
    ]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as learner:
        try:
            assert learner.stdout is not None
            port = next(
                int(found[1])
                for line in learner.stdout
                if (found := re.search(r"page .*:(\d+)$", line))
            )
            assert get(port, "/live")[0] == 200
            wait_until(lambda: get(port, "/ready")[0] == 200)
            assert b'aiorl_updates_total{run="run"}' in get(port, "/metrics")[1]
            taken = subprocess.run(
                [*command, str(port), "--run-dir", str(tmp_path / "other")], capture_output=True
            )
            assert (taken.returncode, f"web {port} of 127.0.0.1" in taken.stderr.decode()) == (
                2,
                True,
            )
            assert not (tmp_path / "other").exists()
        finally:
            learner.kill()
    wait_until(lambda: is_free(port))


def is_free(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_a_page_that_fails_is_started_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    ports = Ports()
    ports.open(run, page="localhost:0")
    port = int(ports.ways["page"].rpartition(":")[2])
    assert get(port, "/live")[0] == 200
    (process,) = (child for child in psutil.Process().children() if str(run) in child.cmdline())
    process.kill()
    assert get(port, "/ready")[1]["phase"] == "training"
    ports.close()
    assert is_free(port)
    assert (
        Job(run, (), {"web": port})
        .forward("host1")
        .startswith(f"  ssh -L {port}:127.0.0.1:{port} host1")
    )
    with pytest.raises(ConfigError, match=r"web must be PORT or HOST:PORT.*not '0\.0\.0\.0'"):
        Ports().open(run, page="0.0.0.0")


# In a browser
# --------------------------------------------------------------------------------------------------

COLOURS = re.compile(r"--([a-z0-9-]+): (#\w+);")


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_the_contrast_of_wcag_aa() -> None:
    css = (Path(aiorl.watch.__file__).parent / "page" / "page.css").read_text()
    light, dark, *_ = (dict(COLOURS.findall(part)) for part in css.split(":root {")[1:])
    for theme in (light, {**light, **dark}):
        on = {
            "back": ["ink", "soft", "accent", "bad"],
            "panel": ["ink", "soft", "accent", "bad", "warn", "good"],
            "calm-back": ["ink"],
            **{f"{kind}-back": [kind] for kind in ("good", "warn", "bad")},
        }
        pairs = [(back, front, 4.5) for back, fronts in on.items() for front in fronts]
        pairs += [
            ("panel", front, 3.0) for front in ("focus", *(f"c{number}" for number in range(8)))
        ]
        for back, front, least in pairs:
            low, high = sorted(luminance(theme[name]) + 0.05 for name in (back, front))
            assert high / low >= least, (back, front, high / low)


@pytest.mark.slow
@needs_chromium
def test_a_browser_follows_a_run_by_keyboard_and_takes_markup_as_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a <b>run")
    make_run(tmp_path / "runs" / "other", config="lr: 0.2")
    (token := tmp_path / "token").write_text("q" * 32)
    token.chmod(0o600)
    with (
        watching(tmp_path / "runs", f"--token-file={token}") as port,
        browsing(tmp_path / "home", f"http://127.0.0.1:{port}/") as page,
    ):
        page.do("Page.navigate", url=f"http://aiorl:{'q' * 32}@127.0.0.1:{port}/")
        page.wait(
            "document.querySelectorAll('canvas').length === 1 && document.querySelectorAll('tbody"
            " tr').length === 2"
        )
        page.get(
            "[...document.querySelectorAll('tbody a')].find((each) => each.textContent === 'a"
            " <b>run').focus()"
        )
        page.press("Enter")
        page.wait(
            "document.querySelector('h1')?.textContent === 'a <b>run' &&"
            " document.querySelector('canvas')"
        )
        assert page.get("document.querySelector('[role=img]').ariaLabel").startswith(
            "Curve of Return over env steps"
        )
        add(run, result(4, health={"warnings": [MARKUP], "num_warnings": 1, "entropy_share": 0.0}))
        page.wait(f"document.querySelector('.warnings')?.innerText.includes({json.dumps(MARKUP)})")
        page.wait("document.querySelector('.health').innerText.includes('explores no more')")
        page.wait(
            "[...document.querySelectorAll('.tile b')].some((each) => each.textContent === '400')"
        )
        for section, words in (
            ("workers", MARKUP),
            ("log", f"failed: ValueError: {MARKUP}"),
            ("config", "stop_timesteps"),
        ):
            page.get(f"document.querySelector('nav a[href$={section}]').focus()")
            page.press("Enter")
            # the words of one part may stand in the one before it
            page.wait(f"document.querySelector('nav [aria-current]').href.endsWith('{section}')")
            page.wait(f"document.querySelector('main').innerText.includes({json.dumps(words)})")
        assert page.get("document.querySelectorAll('main img, main b.run').length") == 0
        unnamed = (
            "[...document.querySelectorAll('input, select')].filter((each) =>"
            " !each.labels.length).length"
        )
        for width in (400, 1280):
            page.resize(width)
            for where in ("", "/workers", "/log", "/config"):
                page.get(f"location.hash = '#/run/other{where}'")
                page.wait("document.querySelector('h1')?.textContent === 'other'")
                assert page.get("document.documentElement.scrollWidth <= innerWidth")
                assert page.get(unnamed) == 0
        assert page.problems == []
