"""Web pages as clients, in chromium: of allowed origins and others, by every way to a policy; and a
reverse proxy before a server.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from browser import Page, browsing, needs_chromium, serving_files
from export_worlds import save_world
from policy_server import serving
from processes import StartedLearner, wait_until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from aiorl.process.imports import python_path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/browser"
OBSERVATION = [0.1, 0.2, 0.3]
ASK = """async (method, url, body, token) => {
    const headers = { "content-type": "application/json" };
    if (token) headers.authorization = `Bearer ${token}`;
    try {
        const response = await fetch(url, { method, headers, body: JSON.stringify(body) });
        return [response.status, await response.json()];
    } catch (error) {
        return [0, {}];
    }
}"""
TALK = """(url, protocols, message) => new Promise((resolve) => {
    const socket = new WebSocket(url, protocols);
    socket.onopen = () => socket.send(JSON.stringify(message));
    socket.onmessage = (answer) => resolve(JSON.parse(answer.data));
    socket.onclose = () => resolve({});
})"""


def call(page: Page, function: str, *arguments: Any) -> Any:
    return page.get(f"({function})({', '.join(map(json.dumps, arguments))})")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run whose observations have three numbers."""
    directory = tmp_path_factory.mktemp("world")
    save_world("box", directory)
    return directory


@pytest.mark.slow
@needs_chromium
def test_pages_of_allowed_origins_use_a_server_and_others_do_not(
    saved: Path, tmp_path: Path
) -> None:
    """R260."""
    (tmp_path / "index.html").write_text("<!doctype html><title>a page</title>")
    with (
        serving_files(tmp_path) as files,
        serving(saved, allow_origins=(f"http://127.0.0.1:{files}",)) as port,
        browsing(tmp_path / "home", "") as page,
    ):
        url = f"http://127.0.0.1:{port}"
        page.do("Page.navigate", url=f"http://127.0.0.1:{files}/")
        page.wait("document.title === 'a page'")
        status, answer = call(page, ASK, "POST", f"{url}/act", {"observation": OBSERVATION})
        assert (status, "action" in answer) == (200, True)
        status, answer = call(page, ASK, "POST", f"{url}/sessions", {})
        assert status == 201
        assert call(page, ASK, "DELETE", f"{url}/sessions/{answer['session']}", {})[0] == 200
        status, answer = call(page, ASK, "POST", f"{url}/act", {"observation": "text"})
        assert (status, "observation" in answer["error"]) == (400, True)
        talked = call(page, TALK, f"ws://127.0.0.1:{port}/ws", [], {"observation": OBSERVATION})
        assert "action" in talked
        page.do("Page.navigate", url=f"http://localhost:{files}/")
        page.wait("location.hostname === 'localhost' && document.title === 'a page'")
        assert call(page, ASK, "POST", f"{url}/act", {"observation": OBSERVATION}) == [0, {}]
        talked = call(page, TALK, f"ws://127.0.0.1:{port}/ws", [], {"observation": OBSERVATION})
        assert talked == {}


@pytest.mark.slow
@needs_chromium
def test_pages_send_a_token_with_requests_and_with_websockets(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html><title>a page</title>")
    with (
        serving_files(tmp_path) as files,
        serving(saved, allow_origins=("*",), token_file=tmp_path / "token") as port,
        browsing(tmp_path / "home", "") as page,
    ):
        token = (tmp_path / "token").read_text().strip()
        page.do("Page.navigate", url=f"http://127.0.0.1:{files}/")
        page.wait("document.title === 'a page'")
        for sent, expected in ((None, 401), ("x" * 20, 401), (token, 200)):
            url = f"http://127.0.0.1:{port}/act"
            assert call(page, ASK, "POST", url, {"observation": OBSERVATION}, sent)[0] == expected
        for protocols, is_answered in (([], False), (["aiorl", f"token.{token}"], True)):
            url = f"ws://127.0.0.1:{port}/ws"
            talked = call(page, TALK, url, protocols, {"observation": OBSERVATION})
            assert ("action" in talked) == is_answered


# The page of the example
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def onnxruntime_web() -> Path:
    """Directory of the version of onnxruntime-web that the page names, installed by npm and kept
    for later tests.
    """
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, and brings onnxruntime-web")
    version = re.findall(r"onnxruntime-web@([\d.]+)/", (EXAMPLE / "index.html").read_text())[0]
    folder = ROOT / ".pytest_cache/npm"
    package = folder / "node_modules/onnxruntime-web"
    if (
        not package.exists()
        or json.loads((package / "package.json").read_text())["version"] != version
    ):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(
            [*command, f"onnxruntime-web@{version}"], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"npm can't install onnxruntime-web: {done.stderr[-300:]}")
    return package


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run that has learned CartPole."""
    run_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    options = ("--preset=ppo-cartpole-quick", "--num-workers=0", "--xla=off", "--seed=1")
    options += ("--stop-return=200", f"--run-dir={run_dir}")
    learner = StartedLearner(run_dir, *options)
    try:
        assert learner.wait(200) == 0, learner.text
    finally:
        learner.end()
    return run_dir


@pytest.fixture
def example(tmp_path: Path) -> Iterator[str]:
    """Address of a copy of the page, on this host alone."""
    folder = tmp_path / "page"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("onnx"))
    with serving_files(folder) as port:
        yield f"http://127.0.0.1:{port}"


def choose(page: Page, **values: str) -> None:
    """Fill in the form, and press its button."""
    for name, value in values.items():
        page.get(f"document.querySelector('form').elements[{name!r}].value = {json.dumps(value)}")
    page.get("document.querySelector('form').elements.fast.checked = true")
    page.get("document.querySelector('button').click()")


def returns_of(page: Page) -> list[int]:
    text = page.get("document.getElementById('returns').textContent")
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.slow
@needs_chromium
def test_the_page_plays_cartpole_by_an_export_and_by_a_server(
    cartpole: Path, example: str, onnxruntime_web: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "page"
    export = [sys.executable, "-m", "aiorl.export", str(cartpole), "--formats", "onnx"]
    subprocess.run(
        [*export, "--out", str(folder)], check=True, capture_output=True, env=python_path()
    )
    (folder / "ort").symlink_to(onnxruntime_web / "dist")
    index = (folder / "index.html").read_text()
    index = re.sub(r"https://cdn[^\"]*/dist/", "./ort/", index)
    (folder / "index.html").write_text(index)
    with (
        serving(cartpole, allow_origins=(example,)) as port,
        browsing(tmp_path / "home", example, f"http://127.0.0.1:{port}/") as page,
    ):
        for kind in ("onnx", "http", "socket"):
            page.do("Page.navigate", url=example)
            page.wait("document.readyState === 'complete'")
            page.wait("document.querySelector('form')?.elements.fast.checked === false")
            choose(page, kind=kind, server=f"http://127.0.0.1:{port}")
            wait_until(lambda: len(returns_of(page)) >= 2, 60)
            assert page.get("document.getElementById('problem').textContent") == ""
            assert max(returns_of(page)) > 100, "at random the pole falls after some 20 steps"
            page.get("document.querySelector('button').click()")
            page.wait("document.querySelector('button').textContent === 'Play'")
        choose(page, kind="http", server="http://127.0.0.1:9")
        page.wait("document.getElementById('problem').textContent.includes('reached')")
        page.problems = [text for text in page.problems if "127.0.0.1:9/" not in text]
        for width in (400, 1280):
            for is_dark in (False, True):
                page.resize(width, is_dark=is_dark)
                assert page.get("document.documentElement.scrollWidth <= innerWidth")
                page.picture(tmp_path / f"page-{width}-{is_dark}.png")
        assert page.problems == []


@pytest.mark.slow
@needs_chromium
def test_a_run_learns_from_the_games_of_a_page(example: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    learner = StartedLearner(
        run_dir,
        f"--config={ROOT / 'examples/external_http.yaml'}",
        *("--algo=impala", "--num-workers=1", "--client-port=0", "--xla=off"),
        *("--num-envs-per-worker=1", "--rollout-fragment-length=16", "--train-batch-size=64"),
        *(f"--allow-origin={example}", "--allow-origin=https://game.example"),
        f"--run-dir={run_dir}",
    )
    try:
        number = learner.wait_for(r"play at: \S+")
        url = learner.lines[number - 1].split()[-1]
        with browsing(tmp_path / "home", example, url) as page:
            # the page needs onnxruntime-web for the other way only, and this test has no copy
            page.do("Page.navigate", url=example)
            page.wait("document.readyState === 'complete' && document.querySelector('form')")
            choose(page, kind="socket", server=url)
            learner.wait_for_result(lambda result: result["episodes_total"] > 3)
            page.get("document.querySelector('button').click()")
        learner.send(signal.SIGTERM)
        learner.wait(60)
    finally:
        learner.end()


# A reverse proxy
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def behind_nginx(saved: Path, tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of nginx before a server, with the configuration of the page about browsers, but
    for TLS.
    """
    with serving(saved, token_file=tmp_path / "token") as port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        page = (ROOT / "docs/browsers.md").read_text()
        site = page.partition("```nginx\n")[2].partition("```")[0]
        site = re.sub(r"\n *ssl_.*", "", site).replace("listen 443 ssl", f"listen {address}")
        site = site.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        site = site.replace("TOKEN", (tmp_path / "token").read_text().strip())
        places = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{name}_temp_path {tmp_path}/{name};\n" for name in places)
        config = (
            f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}{site}}}\n"
        )
        (tmp_path / "nginx.conf").write_text(config)
        command = ["nginx", "-c", f"{tmp_path}/nginx.conf", "-e", "stderr", "-g", "daemon off;"]
        with subprocess.Popen(command) as process:
            try:
                wait_until(lambda: is_open(address))
                yield address
            finally:
                process.terminate()
                process.wait(20)


def is_open(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_gives_a_page_and_a_policy_one_origin(behind_nginx: str) -> None:
    connection = http.client.HTTPConnection(behind_nginx, timeout=20)
    for origin, expected in ((f"http://{behind_nginx}", 200), ("https://evil.example", 403)):
        body = json.dumps({"observation": OBSERVATION})
        connection.request("POST", "/policy/act", body, {"Origin": origin})
        answer = connection.getresponse()
        assert (answer.status, "action" in json.load(answer)) == (expected, expected == 200)
    connection.close()
    with connect(f"ws://{behind_nginx}/policy/ws", origin=f"http://{behind_nginx}") as talk:  # type: ignore[arg-type]
        talk.send(json.dumps({"id": 1, "observation": OBSERVATION}))
        assert "action" in json.loads(talk.recv(20))
    with (
        pytest.raises(InvalidStatus),
        connect(
            f"ws://{behind_nginx}/policy/ws",
            origin="https://evil.example",  # type: ignore[arg-type]
        ),
    ):
        pass
