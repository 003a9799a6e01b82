"""Training from clients: the port of a run, and environments whose episodes they play."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

pytest.importorskip("uvicorn")

from forked_module import run_module
from policy_server import post, serving
from processes import free_address, wait_until
from saved_runs import save_run

import aiorl
from aiorl.client import RequestRefused
from aiorl.data.spaces import space_to_dict
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.external_env import ExternalBaseEnv
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.errors import ConfigError, SamplerDied
from aiorl.web.ports import Ports

BOX, ACTIONS = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3)
ROOT = Path(__file__).parents[2]
NEWTONSOFT = Path("/usr/lib/cli/Newtonsoft.Json-5.0/Newtonsoft.Json.dll")
CONFIG = str(ROOT / "examples/external_http.yaml")
TRAIN = [
    sys.executable,
    "-m",
    "aiorl",
    "train",
    "--config",
    CONFIG,
    "--algo",
    "ppo",
    "--client-port",
    "0",
]


class Worker:
    """An environment at a port for clients, and a policy that acts by the number of rows it has
    seen.
    """

    def __init__(self, ports: Ports, **config: Any) -> None:
        one = {"observation_space": space_to_dict(BOX), "action_space": space_to_dict(ACTIONS)}
        self.env = ExternalBaseEnv(
            resolve_env("external")(EnvContext({**one, **config, **ports.gate}))
        )
        self.rows: list[tuple[Any, Any, Any, Any]] = []
        self.ended: list[tuple[bool, bool]] = []
        self._thread = threading.Thread(target=self._act, daemon=True)
        self._thread.start()

    def _act(self) -> None:
        try:
            while True:
                poll = self.env.poll()
                for env_id, obs in poll.obs.items():
                    over = poll.terminateds[env_id][ALL_AGENTS], poll.truncateds[env_id][ALL_AGENTS]
                    taken = poll.off_policy_actions.get(env_id)
                    self.rows.append((obs, poll.rewards[env_id], poll.infos[env_id], taken))
                    if any(over):
                        self.ended.append(over)
                    else:
                        self.env.send_actions(
                            {env_id: {**dict.fromkeys(obs, len(self.rows) % 3), **(taken or {})}}
                        )
        except SamplerDied:
            pass

    def end(self) -> None:
        self.env.stop()
        self._thread.join(10)


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[Ports]:
    (tmp_path / "logs").mkdir()
    made = Ports()
    made.open(tmp_path, clients=0)
    yield made
    made.close()


def client_of(ports: Ports) -> aiorl.PolicyClient:
    return aiorl.PolicyClient(ports.ways["clients"])


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def play_episode(game: Any, env: Any) -> None:
    (obs, _), reward, over = env.reset(), 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(game.act(obs, reward=reward))
        over = terminated or truncated
    game.end(obs, reward=reward, truncated=truncated)


def status_of(call: Any, *args: Any, **keys: Any) -> int:
    with pytest.raises(RequestRefused) as caught:
        call(*args, **keys)
    return caught.value.status


def test_clients_play_episodes_of_an_environment(ports: Ports) -> None:
    worker = Worker(ports)
    with client_of(ports) as client:
        game = client.session()
        assert game.act([0.1, 0.2], reward=9.0) == 1, (
            "there is no step yet that a reward could belong to"
        )
        assert game.act(np.float32([0.3, 0.4]), reward=0.5) == 2
        game.log_action([0.5, 0.6], 1, reward=1.0)
        found = game.end([0.7, 0.8], reward=2.0, truncated=True, info={"won": True})
        assert (found["steps"], found["reward"]) == (3, 3.5)
        game.act([0.0, 0.0])
        game.end([0.0, 0.1])
        game.close()
        assert status_of(game.act, [0.0, 0.0]) == 410
        game = client.session(train=False)
        game.act([0.0, 0.0])
        game.close()
        wait_until(lambda: len(worker.ended) == 3)
    worker.end()
    assert worker.ended == [(False, True), (True, False), (False, True)]
    rewards = [reward["agent0"] for _, reward, _, _ in worker.rows]
    assert rewards == [0.0, 0.5, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert [taken for *_, taken in worker.rows[:4]] == [None, None, {"agent0": 1}, None]
    assert worker.rows[3][2]["agent0"] == {"won": True}
    assert worker.rows[-1][2]["agent0"] == {"training_enabled": False}
    np.testing.assert_array_equal(worker.rows[1][0]["agent0"], np.float32([0.3, 0.4]))


def test_a_wrong_request_is_refused_and_costs_the_episode_nothing(ports: Ports) -> None:
    worker = Worker(ports)
    with client_of(ports) as client:
        game = client.session()
        assert status_of(game.end, [0.0, 0.0]) == 400
        game.act([0.1, 0.2])
        for wrong in (
            [0.1],
            [0.1, float("nan")],
            "text",
            None,
            {"data": b"1234", "dtype": "float32", "shape": [2]},
        ):
            assert status_of(game.act, wrong, reward=5.0) == 400
        for do, wrong in (
            *(("act", {"action": value}) for value in (7, 1.5, "1")),
            *(
                ("act", {"reward": value})
                for value in ("1", None, [1.0], True, float("nan"), 1e308)
            ),
            *(
                ("act", {"info": value})
                for value in ("won", {"x": json.loads("[" * 60 + "]" * 60)})
            ),
            *(
                ("act", wrong)
                for wrong in (
                    {"start": 1},
                    {"obs": 1},
                    {"explore": True},
                    {"dones": {"agent0": True}},
                )
            ),
            ("end", {"truncated": 1}),
        ):
            keys = {"observation": [0.0, 0.0], "reward": 5.0, **wrong}
            assert status_of(client.ask, do, session=game.id, **keys) == 400
        assert (
            status_of(client.ask, "open", train=0)
            == status_of(client.ask, "open", trian=False)
            == 400
        )
        assert status_of(client.ask, "act", session="other", observation=[0.0, 0.0]) == 410
        assert status_of(client.ask, "act", observation=[0.0, 0.0]) == 400
        assert status_of(client.ask, "join") == 503, "no learner has noted its addresses"
        game.act([0.3, 0.4], reward=1.0)
        assert game.end([0.0, 0.0], reward=1.0)["reward"] == 2.0
    assert [reward["agent0"] for _, reward, _, _ in worker.rows] == [0.0, 1.0, 1.0]
    url = ports.ways["clients"].removeprefix("http://")
    connection = http.client.HTTPConnection(url, timeout=20)
    connection.request("POST", "/sessions", "{}")
    session = json.loads(connection.getresponse().read())["session"]
    connection.request("POST", "/act", json.dumps({"session": session, "observation": [0, 1]}))
    assert json.loads(connection.getresponse().read())["action"] in range(3)
    connection.close()
    with connect(f"ws://{url}/workers") as link, pytest.raises(ConnectionClosed):
        link.recv(10)  # it has not the secret of workers
    worker.end()


def test_the_episodes_of_a_lost_worker_are_gone_and_those_of_others_go_on(ports: Ports) -> None:
    workers = [Worker(ports), Worker(ports)]
    with client_of(ports) as client:
        wait_until(lambda: all(one.env.env.link is not None for one in workers))
        time.sleep(0.2)
        games = [client.session() for _ in range(6)]
        for game in games:
            game.act([0.0, 0.0])
        workers[0].end()
        wait_until(lambda: workers[0].env.env.link.close_code is not None)
        found = []
        for game in games:
            try:
                game.act([0.1, 0.1])
                found.append(200)
            except RequestRefused as error:
                found.append(error.status)
        assert sorted(found) == [200] * 3 + [410] * 3, "episodes were dealt evenly"
        client.session().act([0.2, 0.2])
    workers[1].end()


def figures_of(ports: Ports) -> dict[str, float]:
    with urllib.request.urlopen(f"{ports.ways['clients']}/metrics", timeout=20) as answer:
        lines = [
            line.rpartition(" ") for line in answer.read().decode().splitlines() if line[0] != "#"
        ]
    return {name: float(value) for name, _, value in lines}


def test_unanswered_requests_of_sessions_are_limited_together(ports: Ports) -> None:
    one = {"observation_space": space_to_dict(BOX), "action_space": space_to_dict(ACTIONS)}
    env = ExternalBaseEnv(resolve_env("external")(EnvContext({**one, **ports.gate})))
    worker = threading.Thread(target=env.poll, daemon=True)  # with no one who acts
    worker.start()
    with client_of(ports) as client:
        games = [client.session() for _ in range(6)]
        keys = {"observation": [0.0, 0.0], "info": {"text": "x" * 15_000_000}}
        answers = [client.submit("act", session=game.id, **keys) for game in games]
        for refused in answers[4:]:  # 64 MiB for a worker
            assert status_of(refused.result, 20) == 503
        assert not any(answer.done() for answer in answers[:4])
        found = figures_of(ports)
        assert 60_000_000 < found["aiorl_client_port_unanswered_bytes"] < 64 << 20
        assert (found["aiorl_client_port_workers"], found["aiorl_sessions"]) == (1, 6)
        assert found['aiorl_request_seconds_count{path="/ws/act",status="503"}'] == 2
        env.env.close()
        for lost in answers[:4]:
            assert status_of(lost.result, 20) == 410
        assert figures_of(ports)["aiorl_client_port_unanswered_bytes"] == 0
    worker.join(10)


def test_clients_wait_until_the_environment_is_first_asked(ports: Ports) -> None:
    """It is not while the first update is compiled."""
    one = {"observation_space": space_to_dict(BOX), "action_space": space_to_dict(ACTIONS)}
    env = ExternalBaseEnv(resolve_env("external")(EnvContext({**one, **ports.gate})))
    assert env.waits_for() == ""
    url = ports.ways["clients"]
    with client_of(ports) as client:
        assert status_of(client.ask, "open") == 503
        with pytest.raises(HTTPError) as caught:
            urllib.request.urlopen(f"{url}/ready", timeout=20)
        caught.value.close()
        assert caught.value.code == 503

        def sample() -> None:
            with suppress(SamplerDied):
                env.poll()

        worker = threading.Thread(target=sample, daemon=True)
        worker.start()
        client.session()  # it asks again by itself
        wait_until(lambda: env.waits_for() == "clients: 1 session is open")
    env.stop()
    worker.join(10)


def test_agents_have_observations_actions_and_rewards_of_their_own(ports: Ports) -> None:
    agents = {
        "observation_space": {"a": space_to_dict(BOX), "b": space_to_dict(ACTIONS)},
        "action_space": {"a": space_to_dict(ACTIONS), "b": space_to_dict(BOX)},
    }
    worker = Worker(ports, **agents)
    with client_of(ports) as client:
        game = client.session()
        assert status_of(game.act, [0.0, 0.0]) == 400
        assert status_of(game.act, {"c": 1}) == 400
        keys = {"observation": {"a": [0.1, 0.2], "b": 2}, "action": {"a": 1}}
        found = client.ask("act", session=game.id, **keys)["action"]
        assert (found["a"], found.keys()) == (1, {"a", "b"}), "the policies act for the others"
        assert game.act(
            {"a": [0.1, 0.2], "b": 0}, reward={"a": 1.0, "b": 2.0}, dones={"b": True}
        ).keys() == {"a", "b"}
        assert game.end({"a": [0.0, 0.0]}, reward={"a": 4.0})["reward"] == 7.0
    worker.end()
    assert worker.rows[1][1] == {"a": 1.0, "b": 2.0}


def test_the_config_has_spaces_and_a_port() -> None:
    with pytest.raises(ConfigError, match="observation_space"):
        resolve_env("external")(EnvContext({"action_space": space_to_dict(ACTIONS)}))
    with pytest.raises(ConfigError, match="max_concurrent"):
        resolve_env("external")(EnvContext({"max_concurrent": "many"}))
    port, other = free_port(), ["--env", "CartPole-v1", "--client-port", "0"]
    for words in (
        [*TRAIN, "--client-port", "null"],
        [*TRAIN[:4], *other],
        [*TRAIN[:-1], port, "--web", port],
    ):
        found = run_module("aiorl", words[3:], {**os.environ})
        assert (found.returncode, "client_port" in found.stderr) == (2, True)


# A run
# --------------------------------------------------------------------------------------------------


QUICK = ("--xla=off", "--train-batch-size=1024", "--sgd-minibatch-size=256", "--lr=2e-3")
"""Options of PPO for short runs, in which compilation takes longer than the updates."""


class Run:
    """A run that waits for clients."""

    def __init__(self, run_dir: Path, *words: str) -> None:
        command = [*TRAIN, "--num-workers", "2", "--run-dir", str(run_dir), *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=run_dir.parent
        )
        assert self.process.stdout is not None
        self.url = next(
            found[1]
            for line in self.process.stdout
            if (found := re.search(r"play at: (\S+)", line))
        )
        self._reader = threading.Thread(target=self.process.stdout.read)
        self._reader.start()

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("goal", "options"),
    [(40, ("--num-workers=1", *QUICK)), pytest.param(475, (), marks=pytest.mark.nightly)],
)
def test_a_client_in_javascript_trains_cartpole(
    tmp_path: Path, goal: int, options: tuple[str, ...]
) -> None:
    page = (ROOT / "docs/browsers.md").read_text("utf-8")
    (tmp_path / "client.mjs").write_text(page.partition("```javascript\n")[2].partition("```")[0])
    (tmp_path / "game.mjs").write_text((Path(__file__).parent / "cartpole.mjs").read_text())
    run = Run(tmp_path / "run", "--stop-return", str(goal), *options)
    game = subprocess.Popen(["node", str(tmp_path / "game.mjs"), run.url, "8"])
    try:
        assert run.process.wait(240) == 0
        results = [
            json.loads(line) for line in (tmp_path / "run/result.jsonl").read_text().splitlines()
        ]
        assert results[-1]["episode_reward_mean_last_100"] >= goal
        assert game.wait(30) == 0
    finally:
        game.kill()
        run.end()


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mcs") is None or not NEWTONSOFT.exists(),
    reason="mono-mcs or libnewtonsoft-json5.0-cil is not installed",
)
def test_games_in_csharp_are_played_to_their_ends_and_name_a_server_that_is_gone(
    tmp_path: Path,
) -> None:
    program = tmp_path / "CartPole.exe"
    sources = sorted((ROOT / "examples/games").glob("*.cs"))
    compiler = ["mcs", f"-lib:{NEWTONSOFT.parent}", f"-r:{NEWTONSOFT.name}", f"-out:{program}"]
    subprocess.run([*compiler, *sources], check=True, timeout=60)
    save_run(tmp_path, env="CartPole-v1")

    def play(port: int) -> subprocess.CompletedProcess[str]:
        command = ["mono", str(program), f"ws://127.0.0.1:{port}", "6"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    with serving(tmp_path) as port:
        played = play(port)
        assert post(port, "/act", {"observation": [0.0, 0.0, 0.0, 0.0]})["action"] in (0, 1)
    assert (played.returncode, played.stderr) == (0, "")
    steps = [int(line) for line in played.stdout.split()]
    assert len(steps) == 6
    assert all(8 <= count <= 500 for count in steps)
    gone = play(port)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "Unable to connect" in gone.stderr


@pytest.mark.slow
def test_a_run_without_clients_says_so_and_warns_of_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "--algo", "impala", "--xla", "off", "--num-workers", "1")
    log = tmp_path / "run/log.txt"
    with aiorl.PolicyClient(run.url) as client:
        client.session().close()  # the first update is compiled
        wait_until(lambda: "clients: 0 sessions are open" in log.read_text(), 60)
    run.end()
    assert " WARNING " not in log.read_text()


@pytest.mark.slow
def test_clients_go_on_when_workers_are_killed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *QUICK)
    refused: list[int] = []
    played: list[int] = []
    stop = threading.Event()

    def play(client: aiorl.PolicyClient) -> None:
        env = gymnasium.make("CartPole-v1")
        while not stop.is_set():
            try:
                with client.session() as game:  # dealt again, since one worker can be ready later
                    for _ in range(5):
                        play_episode(game, env)
                        played.append(1)
            except RequestRefused as error:
                if error.status not in (410, 503):
                    raise
                if error.status == 410:
                    refused.append(1)
                time.sleep(0.1)

    with aiorl.PolicyClient(run.url) as client:
        players = [threading.Thread(target=play, args=(client,)) for _ in range(8)]
        for player in players:
            player.start()
        wait_until(lambda: len(played) > 40, 60)
        for worker in psutil.Process(run.process.pid).children():
            if "aiorl.worker" in worker.cmdline():  # both, as one could have all sessions
                worker.kill()
        wait_until(lambda: refused)
        before = len(played)
        wait_until(
            lambda: len(played) > before + 40 and (tmp_path / "run/result.jsonl").read_bytes(), 60
        )
        stop.set()
        for player in players:
            player.join(60)
    run.end()
    assert len(refused) <= 8, "open episodes only"
    last = json.loads((tmp_path / "run/result.jsonl").read_text().splitlines()[-1])
    assert last["episodes_total"] > 40


@pytest.mark.slow
def test_a_client_with_local_inference_is_a_worker_of_the_run(tmp_path: Path) -> None:
    options = ("--num-workers", "0", "--bind", free_address(), "--stop-return", "150", *QUICK)
    run = Run(tmp_path / "run", *options)

    def play(client: aiorl.PolicyClient) -> None:
        env = gymnasium.make("CartPole-v1")
        with suppress(RequestRefused, ConnectionError), client.session() as game:
            while True:
                play_episode(game, env)

    with aiorl.PolicyClient(run.url, local=True) as client:
        game = client.session()
        assert (
            status_of(game.act, [0.0, float("nan"), 0.0, 0.0])
            == status_of(game.act, [0.0] * 4, explore=True)
            == 400
        )
        assert client.submit("act", session=game.id, observation=[0.0] * 4).result(20)[
            "action"
        ] in (0, 1)
        with pytest.raises(RuntimeError, match="already"):
            aiorl.PolicyClient(run.url, local=True)
        players = [threading.Thread(target=play, args=(client,)) for _ in range(8)]
        for player in players:
            player.start()
        assert run.process.wait(120) == 0
        for player in players:
            player.join(30)
        with pytest.raises(ConnectionError, match="ended"):
            client.session()
    run.end()
    last = json.loads((tmp_path / "run/result.jsonl").read_text().splitlines()[-1])
    assert last["episode_reward_mean_last_100"] >= 150
    with pytest.raises(ConnectionError):
        aiorl.PolicyClient(run.url, local=True, timeout_s=1)
