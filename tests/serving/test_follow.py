"""`aiorl serve --follow`, `--share` and `--record`: newer versions without a gap, and episodes as
stored experience.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from export_worlds import observations_of, save_world
from processes import wait_until
from saved_runs import save_run

import aiorl
from aiorl.acting.actor import Actor
from aiorl.acting.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from aiorl.client import RequestRefused
from aiorl.data import columns as c
from aiorl.errors import ConfigError, PolicyError
from aiorl.offline.readers import StoredEpisodes
from aiorl.process.tasks import new_event_loop
from aiorl.serve import _with_follow_at_the_end, main
from aiorl.serving import record
from aiorl.serving.models import Models
from aiorl.serving.record import Recorder
from aiorl.serving.service import Service
from aiorl.web.access import WebOptions
from aiorl.web.server import WebServer


def save_next(run: Path, number: int, *, folder: str = "checkpoints", keep: int = 3) -> Path:
    """Save another checkpoint of a run, with other weights."""
    old = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    tensors = {
        name: array + np.float32(0.01) if "/weights/" in name else array
        for name, array in old.tensors.items()
    }
    return save_checkpoint(run / folder, number, tensors, old.meta, keep=keep)


class Followed:
    """Service that follows runs, on a port, in a thread."""

    def __init__(self, models: Models, recorder: Recorder | None = None, **settings: Any) -> None:
        self.service = Service(models, recorder=recorder, **settings)
        self.server = WebServer(self.service.app, WebOptions())
        self._loop, self._stop, started = new_event_loop(), asyncio.Event(), threading.Event()

        async def run() -> None:
            task = self._loop.create_task(models.follow())
            async with self.server.running():
                started.set()
                await self._stop.wait()
            task.cancel()
            if recorder is not None:
                await asyncio.to_thread(recorder.close)

        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(run()), daemon=True
        )
        self._thread.start()
        assert started.wait(10)

    def __enter__(self) -> aiorl.PolicyClient:
        self.client = aiorl.PolicyClient(self.server.url)
        return self.client

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()


def version_of(client: aiorl.PolicyClient, **keys: Any) -> str:
    return str(client.ask("act", observation=[0.1, 0.2, 0.3], **keys)["version"])


def test_swaps_under_load_lose_nothing_and_sessions_keep_their_state(tmp_path: Path) -> None:
    save_world("memory", tmp_path)
    models = Models([str(tmp_path)], follow="newest")
    followed = Followed(models)
    seen: list[list[int]] = [[] for _ in range(4)]
    asked, is_over = Counter[int](), threading.Event()

    def ask(index: int) -> None:
        with aiorl.PolicyClient(followed.server.url) as client, client.session() as game:
            while not is_over.is_set():
                answers = [
                    client.submit("act", observation=[0, 0, 0], session=game.id) for _ in range(5)
                ]
                answers += [client.submit("act", observation=[0, 0, 0]) for _ in range(10)]
                asked[index] += len(answers)
                seen[index] += [int(answer.result(20)["version"]) for answer in answers]

    with followed as client, client.session() as game:
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        policy, state = aiorl.load_policy(tmp_path), None
        state = policy.get_initial_state()
        for number in range(8, 11):
            obs = observations_of(policy.observation_space, 1)[0]
            wanted, state, columns = policy.compute_single_action(obs, state, full_fetch=True)
            found = client.ask("act", observation=obs, session=game.id, value=True)
            np.testing.assert_equal(found["action"], wanted)
            assert found["value"] == pytest.approx(columns["vf_preds"], abs=1e-5)
            save_next(tmp_path, number)
            wait_until(lambda number=number: version_of(client) == str(number))
            policy = aiorl.load_policy(tmp_path)
        is_over.set()
        for thread in threads:
            thread.join(20)
        with urllib.request.urlopen(f"{followed.server.url}/metrics", timeout=10) as answer:
            assert 'aiorl_swaps_total{policy="default_policy"} 3.0' in (
                metrics := answer.read().decode()
            )
            assert set(re.findall(r'aiorl_batch_rows_sum{.*version="(\d+)"', metrics)) == {"10"}
    for index, versions in enumerate(seen):
        assert (len(versions), versions[0], versions[-1]) == (asked[index], 7, 10)
        assert versions == sorted(versions), index


def test_a_run_without_checkpoints_is_waited_for_and_damaged_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_world("box", tmp_path / "made")
    run = tmp_path / "run"
    models = Models([str(run)], follow="best")
    followed = Followed(models)

    def is_ready() -> bool:
        try:
            return bool(
                urllib.request.urlopen(f"{followed.server.url}/v2/health/ready", timeout=10).read()
            )
        except urllib.error.HTTPError as error:
            return error.code != 503

    with followed as client:
        assert not is_ready()
        for keys in ({}, {"policy": "x"}):
            with pytest.raises(RequestRefused, match="no checkpoint yet") as caught:
                version_of(client, **keys)
            assert caught.value.status == 503
        (first,) = list_checkpoints(tmp_path / "made" / "checkpoints")
        (run / "best").mkdir(parents=True)
        first.rename(run / "best" / first.name)
        wait_until(is_ready)
        assert version_of(client) == "7"
        with pytest.raises(RequestRefused, match="no policy"):
            version_of(client, policy="x")
        (run / "checkpoints").symlink_to(run / "best")
        damaged = save_next(run, 8, folder="best")
        tensors = (damaged / "tensors.safetensors").read_bytes()
        (damaged / "tensors.safetensors").write_bytes(tensors[:-9])
        wait_until(lambda: "checkpoint-000008" in caplog.text)
        time.sleep(1.2)
        assert version_of(client) == "7"
        assert caplog.text.count("it is not served") == 1
        (damaged / "tensors.safetensors").write_bytes(tensors)  # the copy is complete
        wait_until(lambda: version_of(client) == "8")
        save_world("squashed", tmp_path / "other")
        (other,) = list_checkpoints(tmp_path / "other" / "checkpoints")
        foreign = load_checkpoint(other)
        save_checkpoint(run / "best", 9, foreign.tensors, foreign.meta)
        wait_until(lambda: "can't be served" in caplog.text)
        assert version_of(client) == "8"


def test_requests_are_dealt_to_versions_by_their_share(tmp_path: Path) -> None:
    save_world("box", tmp_path)
    save_next(tmp_path, 8)
    first, second = list_checkpoints(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="--share"):
        Models([f"a={first}", f"a={second}"])
    models = Models([f"a={first}", f"a={second}", f"a={tmp_path}"], share=0.25, follow="newest")
    assert [arm.name for arm in models["a"].arms] == ["7", "8.1", "8.2"]
    with Followed(models) as client:
        found = Counter(version_of(client) for _ in range(400))
        assert found.keys() == {"7", "8.1", "8.2"}
        assert 150 < found["7"] < 250
        for _ in range(8):
            with client.session() as game:
                assert len({version_of(client, session=game.id) for _ in range(5)}) == 1
        save_next(tmp_path, 9)
        wait_until(lambda: version_of(client) == "9.2")
    for targets, fault in (([f"a={first}"] * 3, "no share"), ([f"..={first}"], "name of a model")):
        with pytest.raises(ConfigError, match=fault):
            Models(targets, share=0.5)
    for targets in ([f"{first}"], [str(tmp_path / "later")], [f"a={first}", f"b={second}"]):
        with pytest.raises(ConfigError, match="under one name"):
            Models(targets, share=0.5, follow="newest")
    save_world("squashed", tmp_path / "other")
    with pytest.raises(PolicyError, match="action space"):
        Models([f"a={first}", f"a={tmp_path / 'other'}"], share=0.25)


def play(
    client: aiorl.PolicyClient, policy: aiorl.LoadedPolicy, steps: int, **keys: Any
) -> tuple[Any, list[Any]]:
    """Play an episode, and return its observations and actions."""
    observations = observations_of(policy.observation_space, steps + 1)
    with client.session() as game:
        actions = [game.act(obs, 10.0 * step, **keys) for step, obs in enumerate(observations[:-1])]
        game.end(observations[-1], 10.0 * steps, truncated=True)
    return observations, actions


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "kind", ["box", "memory", "looks back", "parts", "squashed", "filtered frames", "masked dict"]
)
def test_recorded_episodes_are_what_the_estimators_and_bc_read(tmp_path: Path, kind: str) -> None:
    save_world(kind, tmp_path / "run")
    policy = aiorl.load_policy(tmp_path / "run")
    followed = Followed(Models([str(tmp_path / "run")], seed=3), Recorder(tmp_path / "data"))
    with followed as client:
        observations, actions = play(client, policy, 4, explore=True)
        play(client, policy, 3)
    drawn, greedy = [
        episode for _, episode in StoredEpisodes(str(tmp_path / "data" / "default_policy"))
    ]
    np.testing.assert_array_equal(drawn[c.OBS], policy.observe(observations[:-1]))
    np.testing.assert_array_equal(drawn[c.NEW_OBS], policy.observe(observations[1:]))
    np.testing.assert_array_equal(drawn[c.REWARDS], [10, 20, 30, 40])
    assert drawn[c.TRUNCATEDS].tolist() == [False, False, False, True]
    assert not drawn[c.TERMINATEDS].any()
    layout = aiorl.load_policy(tmp_path / "run").policy.layout
    np.testing.assert_array_equal(
        layout.clip(drawn[c.ACTIONS]), np.stack([layout.to_row(one) for one in actions])
    )
    assert c.ACTION_LOGP in drawn
    assert c.ACTION_LOGP not in greedy


def test_episodes_that_are_not_whole_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_world("box", tmp_path / "run")
    policy = aiorl.load_policy(tmp_path / "run")
    recorder = Recorder(tmp_path / "data")
    followed = Followed(Models([str(tmp_path / "run")]), recorder)

    def fates() -> dict[str, float]:
        url = f"{followed.server.url}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = re.findall(
                r'aiorl_recorded_episodes_total{fate="(\w+)",[^}]*} (\S+)', answer.read().decode()
            )
        return {fate: float(count) for fate, count in found}

    with pytest.raises(ConfigError, match="can't be written in"):
        Recorder(Path("/proc/self"))
    with followed as client:
        play(client, policy, 3)
        wait_until(lambda: fates() == {"written": 1})
        with client.session() as game, pytest.raises(RequestRefused, match="below 1e38"):
            game.act([0.1, 0.2, 0.3], reward=1e308)
        with client.session() as game:  # closed without an end
            game.act([0.1, 0.2, 0.3])
        assert fates() == {"written": 1, "dropped": 1}
        with client.session(train=False) as game:
            game.act([0.1, 0.2, 0.3])
            game.end([0.1, 0.2, 0.3])
        with client.session() as game, monkeypatch.context() as patched:
            patched.setattr(record, "MAX_EPISODE_BYTES", 3000)
            for _ in range(10):
                game.act([0.1, 0.2, 0.3])
            game.end([0.1, 0.2, 0.3])
        assert fates() == {"written": 1, "dropped": 2}
        with monkeypatch.context() as patched:
            patched.setattr(
                record.FileWriter,
                "write",
                lambda self, batch: (tmp_path / "none" / "x").write_text(""),
            )
            play(client, policy, 3)
            wait_until(lambda: fates() == {"written": 1, "dropped": 2, "failed": 1})
    assert len(list(StoredEpisodes(str(tmp_path / "data" / "default_policy")))) == 1
    assert recorder.num_bytes == 0


def test_files_of_recorded_episodes_that_are_removed_are_missed_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record, "_PAUSE_S", 0.0)
    save_world("box", tmp_path / "run")
    policy = aiorl.load_policy(tmp_path / "run")
    recorder = Recorder(tmp_path / "data")

    def fates() -> dict[str, float]:
        (family,) = recorder.episodes.collect()
        return {
            one.labels["fate"]: one.value for one in family.samples if one.name.endswith("_total")
        }

    with Followed(Models([str(tmp_path / "run")]), recorder) as client:
        for number, lost in enumerate((tmp_path / "data", tmp_path / "data/default_policy"), 1):
            play(client, policy, 3)
            wait_until(lambda number=number: fates().get("written") == number)
            shutil.rmtree(lost)
            play(client, policy, 3)
            wait_until(lambda number=number: fates().get("failed") == number)
            assert str(tmp_path / "data") in caplog.text
        play(client, policy, 3)
        wait_until(lambda: fates()["written"] == 3)
    assert len(list(StoredEpisodes(str(tmp_path / "data/default_policy")))) == 1


def test_recording_preprocesses_each_observation_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_world("filtered", tmp_path / "run")
    policy = aiorl.load_policy(tmp_path / "run")
    observed, observe = Counter[str](), Actor.observe

    def counting(actor: Actor, observations: Any, **keys: Any) -> Any:
        observed["rows"] += len(observations)
        return observe(actor, observations, **keys)

    with Followed(Models([str(tmp_path / "run")]), Recorder(tmp_path / "data")) as client:
        monkeypatch.setattr(Actor, "observe", counting)
        play(client, policy, 5)
        assert observed["rows"] == 6, "five steps, and the last observation"


def test_a_path_after_follow_is_a_path_and_another_word_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_world("box", tmp_path / "run")
    save_next(tmp_path / "run", 8)
    words = [sys.executable, "-m", "aiorl", "serve", "--follow", "a=run", "b=run", "--port=0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        assert server.stdout is not None
        assert "a 8 (" in server.stdout.readline()
        server.terminate()
    ask: Callable[..., list[str]] = lambda words: _with_follow_at_the_end(words.split())  # noqa: E731
    monkeypatch.chdir(tmp_path)
    Path("b").mkdir()
    assert ask("--follow best runs/mine") == ["runs/mine", "--follow=best"]
    assert ask("a --follow b --port 1") == ["a", "b", "--port", "1", "--follow=newest"]
    assert ask("--follow=best best") == ["--follow=best", "best"]
    with pytest.raises(SystemExit):
        main(["run", "--follow", "oldest"])
    assert "--follow must be one of" in capsys.readouterr().err


@pytest.mark.slow
def test_marwil_and_the_estimators_take_what_a_server_recorded(tmp_path: Path) -> None:
    def aiorl_(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aiorl", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=120
        )

    save_run(tmp_path / "run", env="CartPole-v1")
    command = [sys.executable, "-m", "aiorl", "serve", "run", "--record=data", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        url = re.search(r"http://\S+", server.stdout.readline())[0]
        env = gymnasium.make("CartPole-v1")
        with aiorl.PolicyClient(url) as client, client.session() as game:
            for seed in range(20):
                (obs, _), reward, is_over = env.reset(seed=seed), 0.0, False
                while not is_over:
                    obs, next_reward, terminated, truncated, _ = env.step(
                        game.act(obs, reward, explore=True)
                    )
                    reward, is_over = float(next_reward), terminated or truncated
                game.end(obs, reward, truncated=truncated)
        server.terminate()
        assert server.wait(20) == 0
    aiorl_("estimate", "run", "data/default_policy", "--json=found.json", "--methods=wis")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_episodes"] == 20
    assert found["effective_sample_size"] == pytest.approx(20), "it is the same policy"
    words = (
        "--env=CartPole-v1",
        "--algo=marwil",
        "--input=data/default_policy",
        "--stop-timesteps=2000",
        "--xla=off",
    )
    aiorl_("train", *words, "--run-dir=learned")
