"""`aiorl serve` in a thread, for tests that ask it by every protocol."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiorl.process.tasks import new_event_loop
from aiorl.serving.models import Models
from aiorl.serving.service import Service
from aiorl.web.access import WebOptions
from aiorl.web.app import json_response
from aiorl.web.server import WebServer


@contextlib.contextmanager
def serving(*targets: Path, **options: Any) -> Iterator[int]:
    """Serve runs, checkpoints or exports with options of `WebOptions`, and yield the port."""
    models = Models([str(target) for target in targets])
    server = WebServer(Service(models).app, WebOptions(**options))
    loop = new_event_loop()
    is_started, may_end = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with server.running():
            is_started.set()
            await may_end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    try:
        assert is_started.wait(20)
        yield server.port
    finally:
        loop.call_soon_threadsafe(may_end.set)
        thread.join(20)
        loop.close()


def post(port: int, path: str, content: Any) -> Any:
    """Return the answer to a request in JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, json_response(content).body)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status < 300, body[:500]
        return json.loads(body)
    finally:
        connection.close()
