"""The client port of a run: one address at which clients play episodes, which it deals to the run's workers.

Workers connect to it (`aiorl.serving.external`). A session stays with its worker, and is gone when that is lost. The
requests of clients are those of `aiorl serve`: /sessions and /act over HTTP, and the WebSocket /ws.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from aiorl.config.addresses import run_facts
from aiorl.config.command_line import Parser, exit_status
from aiorl.serving.sessions import Session, Sessions
from aiorl.serving.values import check_keys, flag
from aiorl.web.access import add_web_options, token_in, token_of, web_options
from aiorl.web.app import App
from aiorl.web.child import CLIENT_SECRET
from aiorl.web.messages import Refusal, Reply, Request, Response, WebSocket, always, json_response
from aiorl.web.server import serve
from aiorl.web.talk import Handler, over_http, packed, talk

Answer = dict[str, Any]

_MAX_SESSIONS, _TTL_S = 10_000, 600.0
_GONE = "The worker of this session is gone. Open a new session."


class _Link:
    """Connection of a worker.

    Attributes:
        waiting: answers to come, at most one to each session.
    """

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.waiting: dict[str, Reply] = {}

    def ask(self, do: str, session: str, said: Answer) -> Reply:
        if session in self.waiting:
            raise Refusal(409, "The last request of this session is still under way. Wait for its answer.")
        message = packed({"session": session, "do": do, "said": said})
        answer = self.waiting[session] = Reply()
        self._socket.write([message])
        return answer

    def take(self, message: bytes | str) -> None:
        said = msgpack.unpackb(message, object_hook=_array)
        waiting, answer = self.waiting.pop(said["session"]), said["answer"]
        if "error" in answer:
            waiting.set_exception(Refusal(answer["status"], answer["error"]))
        else:
            waiting.set_result(answer)


class Gate:
    """Sessions of clients, each with a worker, and the routes to them.

    Attributes:
        app: app with the routes.
    """

    def __init__(self, run_dir: Path) -> None:
        """Wait for workers that have the secret in a file of the run directory."""
        self._secret, self._run_dir = token_in(run_dir / CLIENT_SECRET), run_dir
        self._links: dict[int, _Link] = {}
        self._numbers = itertools.count()
        self._sessions = Sessions(_MAX_SESSIONS, _TTL_S, on_expiry=self._forget)
        handlers: dict[str, Handler] = {do: partial(self._ask, do) for do in ("act", "end", "close")}
        handlers |= {"open": self._open, "join": self._join}
        app = self.app = App()
        app.get("/live", always({"live": True}), is_open=True)
        app.get("/ready", self._ready, is_open=True)
        app.post("/act", over_http(handlers["act"]))
        app.post("/sessions", over_http(handlers["open"], 201))
        app.post("/sessions/{session}/end", over_http(handlers["end"]))
        app.delete("/sessions/{session}", over_http(handlers["close"]))
        app.websocket("/ws", talk(handlers))
        app.websocket("/workers", self._worker, is_open=True)

    # Workers ----------------------------------------------------------------------------------------------------

    async def _worker(self, socket: WebSocket) -> None:
        if not hmac.compare_digest(token_of(socket.request), self._secret):
            return
        number, link = next(self._numbers), _Link(socket)
        self._links[number] = link
        try:
            while (message := await socket.receive()) is not None:
                link.take(message)
                await socket.drain()
        finally:
            del self._links[number]
            for waiting in link.waiting.values():
                waiting.set_exception(Refusal(410, _GONE))

    def _forget(self, session: Session) -> None:
        if (link := self._links.get(session.arm)) is not None:
            with suppress(Refusal):  # its last request is still under way; the environment gives it up by itself
                link.ask("close", session.id, {})

    # Requests of clients ----------------------------------------------------------------------------------------

    def _open(self, said: Answer) -> Reply:
        check_keys(said, {"train"})
        flag(said, "train", True)
        if not self._links:
            raise Refusal(503, "No worker is ready yet. Try again in a second.")
        load = Counter(session.arm for session in self._sessions)
        number = min(self._links, key=lambda each: load[each])
        return self._links[number].ask("open", self._sessions.open("", number).id, said)

    def _ask(self, do: str, said: Answer) -> Reply:
        session = self._sessions.find(said.pop("session", None))
        if (link := self._links.get(session.arm)) is None:
            raise Refusal(410, _GONE)
        answer = link.ask(do, session.id, said)
        if do == "close":
            self._sessions.close(session.id)
        return answer

    def _join(self, said: Answer) -> Answer:
        """Return the learner's addresses, for a client that is a worker itself."""
        try:
            return {"addresses": run_facts(self._run_dir)["addresses"]}
        except (OSError, ValueError):
            raise Refusal(503, "No worker can join this run yet. Try again in a second.") from None

    async def _ready(self, request: Request) -> Response:
        figures = {"ready": bool(self._links), "workers": len(self._links), "sessions": len(self._sessions)}
        return json_response(figures, status=200 if self._links else 503)


def _array(value: Answer) -> Any:
    if value.keys() != {"data", "dtype", "shape"}:
        return value
    return np.frombuffer(value["data"], np.dtype(value["dtype"]).newbyteorder("<")).reshape(value["shape"])


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the client port of a run until the run ends, and return the exit status.

    Args:
        argv: arguments; None takes those of the process.
    """
    parser = Parser("python -m aiorl.serving.gate", "RUN_DIR [options]", "Serve the client port of a run.", "")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Directory of the run.")
    add_web_options(parser, port=0)
    given = parser.parse(sys.argv[1:] if argv is None else argv)
    gate = Gate(given.pop("run_dir"))
    return exit_status(lambda: asyncio.run(serve(gate.app, web_options(given))), interrupted="ended by Ctrl-C")


if __name__ == "__main__":
    sys.exit(main())
