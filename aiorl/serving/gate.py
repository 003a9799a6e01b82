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
from aiorl.web.messages import Refusal, Reply, Request, Response, WebSocket, always, json_response
from aiorl.web.server import serve
from aiorl.web.talk import Handler, over_http, packed, talk

Answer = dict[str, Any]

_MAX_SESSIONS, _TTL_S = 10_000, 600.0
_OF_ACT = frozenset(("observation", "action", "reward", "info", "dones", "start", "explore"))
_OF_END = frozenset(("observation", "reward", "info", "dones", "truncated"))


class _Link:
    """Connection of a worker."""

    def __init__(self, socket: WebSocket) -> None:
        self.about: Any = None
        self._socket = socket
        self._ids = itertools.count()
        self._waiting: dict[int, Reply] = {}
        self._busy: set[str] = set()

    def ask(self, do: str, session: str, said: Answer) -> Reply:
        if session in self._busy:
            raise Refusal(409, "The last request of this session is still under way. Wait for its answer.")
        answer = Reply()
        id = next(self._ids)
        self._waiting[id] = answer
        self._busy.add(session)
        answer.add_done_callback(lambda done: self._busy.discard(session))
        self._socket.write([packed({**said, "id": id, "do": do, "session": session})])
        return answer

    def take(self, message: bytes | str) -> None:
        said = msgpack.unpackb(message, object_hook=_array)
        if "about" in said:
            self.about = said["about"]
            return
        answer = self._waiting.pop(said.pop("id"))
        if "error" in said:
            answer.set_exception(Refusal(said["status"], said["error"]))
        else:
            answer.set_result(said)

    def lose(self) -> None:
        for answer in self._waiting.values():
            answer.set_exception(Refusal(410, "The worker of this session is gone. Open a new session."))


class Gate:
    """Sessions of clients, each with a worker, and the routes to them.

    Attributes:
        app: app with the routes.
    """

    def __init__(self, secret: Path) -> None:
        """Wait for workers that have the secret in a file of the run directory."""
        self._secret, self._run_dir = token_in(secret), secret.parent
        self._links: dict[int, _Link] = {}
        self._numbers = itertools.count()
        self._sessions = Sessions(_MAX_SESSIONS, _TTL_S, on_expiry=self._forget)
        handlers: dict[str, Handler] = {
            "act": partial(self._ask, "act", keys=_OF_ACT), "open": self._open,
            "end": partial(self._ask, "end", keys=_OF_END), "close": self._close, "join": self._join,
        }  # fmt: skip
        app = self.app = App()
        app.get("/", self._index)
        app.get("/live", always({"live": True}), is_open=True)
        app.get("/ready", self._ready, is_open=True)
        app.post("/act", over_http(handlers["act"]))
        app.post("/sessions", over_http(self._open, 201))
        app.post("/sessions/{session}/end", over_http(handlers["end"]))
        app.delete("/sessions/{session}", over_http(self._close))
        app.websocket("/ws", talk(handlers))
        app.websocket("/workers", self._worker, is_open=True)

    # Workers ----------------------------------------------------------------------------------------------------

    async def _worker(self, socket: WebSocket) -> None:
        if not hmac.compare_digest(token_of(socket.request), self._secret):
            return
        number, link = next(self._numbers), _Link(socket)
        try:
            while (message := await socket.receive()) is not None:
                link.take(message)
                self._links.setdefault(number, link)
                await socket.drain()
        finally:
            self._links.pop(number, None)
            link.lose()

    def _forget(self, session: Session) -> None:
        if (link := self._links.get(session.arm)) is not None:
            with suppress(Refusal):  # its last request is still under way; the environment gives it up by itself
                link.ask("close", session.id, {})

    def _ask(self, do: str, said: Answer, keys: frozenset[str]) -> Reply:
        session = self._sessions.find(said.pop("session", None))
        check_keys(said, keys)
        link = self._links.get(session.arm)
        if link is None:
            self._sessions.close(session.id)
            raise Refusal(410, "The worker of this session is gone. Open a new session.")
        return link.ask(do, session.id, said)

    # Requests of clients ----------------------------------------------------------------------------------------

    def _open(self, said: Answer) -> Reply:
        check_keys(said, {"policy", "train"})
        train = flag(said, "train", True)
        if not self._links:
            raise Refusal(503, "No worker is ready yet. Try again in a second.")
        load = Counter(session.arm for session in self._sessions)
        number = min(self._links, key=lambda each: load[each])
        session = self._sessions.open("", number)
        return self._links[number].ask("open", session.id, {"train": train})

    def _close(self, said: Answer) -> Reply:
        answer = self._ask("close", dict(said), frozenset())
        self._sessions.close(said["session"])
        return answer

    def _join(self, said: Answer) -> Answer:
        """Return the learner's addresses, for a client that is a worker itself."""
        try:
            return {"addresses": run_facts(self._run_dir)["addresses"]}
        except (OSError, ValueError):
            raise Refusal(503, "No worker can join this run yet. Try again in a second.") from None

    async def _index(self, request: Request) -> Response:
        about = next((link.about for link in self._links.values()), None)
        figures = {"workers": len(self._links), "sessions": len(self._sessions)}
        return json_response({"name": "aiorl", **figures, **(about or {})})

    async def _ready(self, request: Request) -> Response:
        return json_response({"ready": bool(self._links)}, status=200 if self._links else 503)


def _array(value: Answer) -> Any:
    if value.keys() != {"data", "dtype", "shape"}:
        return value
    return np.frombuffer(value["data"], np.dtype(value["dtype"]).newbyteorder("<")).reshape(value["shape"])


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the client port of a run until the run ends, and return the exit status.

    Args:
        argv: arguments; None takes those of the process.
    """
    parser = Parser("python -m aiorl.serving.gate", "SECRET_FILE [options]", "Serve the client port of a run.", "")
    parser.add_argument("secret", type=Path, metavar="SECRET_FILE", help="File with the secret of the run's workers.")
    add_web_options(parser, port=0)
    given = parser.parse(sys.argv[1:] if argv is None else argv)
    gate = Gate(given.pop("secret"))
    return exit_status(lambda: asyncio.run(serve(gate.app, web_options(given))), interrupted="ended by Ctrl-C")


if __name__ == "__main__":
    sys.exit(main())
