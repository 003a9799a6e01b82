"""Chromium without a window, steered by its DevTools protocol; and a server of the files of pages."""

from __future__ import annotations

import base64
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


class Page:
    """A page of a browser, steered by the DevTools protocol; `problems` are errors and requests to
    other hosts.
    """

    def __init__(self, link: ClientConnection, homes: tuple[str, ...]) -> None:
        self.problems: list[str] = []
        self._homes = homes
        self._number = 0
        self._socket = link
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while (found := json.loads(self._socket.recv(60))).get("id") != self._number:
            self._note(found.get("method"), found.get("params", {}))
        assert "error" not in found, found
        return dict(found["result"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            url = re.sub("//[^/]*@", "//", params["request"]["url"])
            self.problems += [] if url.startswith(self._homes) else [url]
        if method == "Runtime.exceptionThrown" or (
            method == "Log.entryAdded" and params["entry"]["level"] == "error"
        ):
            self.problems.append(str(params))

    def get(self, expression: str) -> Any:
        found = self.do(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        for _ in range(300):
            if self.get(f"Boolean({condition})"):
                return
            time.sleep(0.1)
        raise AssertionError(f"{condition}: {self.get('document.body.innerText')}")

    def resize(self, width: int, *, height: int = 900, is_dark: bool = False) -> None:
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = "dark" if is_dark else "light"
        self.do(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.do("Page.captureScreenshot")["data"]))

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.do(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )


@contextmanager
def browsing(profile: Path, *homes: str) -> Iterator[Page]:
    """Start a browser, and yield its page.

    Args:
        profile: directory for its files.
        homes: beginnings of the addresses that the page may ask for.
    """
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stderr is not None
            port = next(
                int(found[1])
                for line in process.stderr
                if (found := re.search(r"ws://[^:]+:(\d+)/", line))
            )
            with urlopen(f"http://127.0.0.1:{port}/json", timeout=20) as answer:
                (target,) = (each for each in json.load(answer) if each["type"] == "page")
            with connect(target["webSocketDebuggerUrl"], max_size=None) as link:
                yield Page(link, homes)
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def serving_files(directory: Path, changes: Mapping[str, bytes] | None = None) -> Iterator[int]:
    """Serve the files of a directory, and yield the port.

    Args:
        directory: the directory.
        changes: path, such as "/index.html" -> content in place of the file's.
    """

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            content = (changes or {}).get(self.path)
            if content is None:
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("content-type", self.guess_type(self.path))
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(directory))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
