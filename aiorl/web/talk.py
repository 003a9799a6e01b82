"""Talks: requests and answers on a WebSocket, many under way at a time.

Each message is a request: an object with ``do``, the name of a handler ("act" if it is missing); ``id``, a number or a
text that its answer repeats; and the handler's own keys. A binary message is msgpack and is answered in msgpack, a text
is JSON and is answered in JSON. Answers come in any order. That to a request that fails is ``{"id", "status",
"error"}``. In msgpack, an array of an answer is ``{"data": bytes, "dtype", "shape"}``, in row-major order and little
endian; in JSON it is a list.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from reprlib import repr as shown
from typing import Any, NoReturn

import msgpack
import numpy as np
import orjson

from aiorl.web.app import Refusal, Reply, Request, Response, WebSocket, json_response, parse_json

logger = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], dict[str, Any] | Reply]
"""Function that takes the keys of a request, and returns the answer, now or to come; it may raise a `Refusal`."""
Note = Callable[[str, str, float], None]
"""Function that is called with a request's handler ("" if there is none), status and seconds until its answer."""

MAX_UNDER_WAY = 1024
"""Requests of one WebSocket that are not answered yet; further ones are not read."""
_MAX_ID = 200
_FAILED = {"status": 500, "error": "The server failed at this request. Its log has the reason."}


def talk(
    handlers: Mapping[str, Handler], note: Note = lambda do, status, seconds: None
) -> Callable[[WebSocket], Awaitable[None]]:
    """Return the function for `App.websocket` that answers requests by handlers; see the module.

    Args:
        handlers: handlers by their names.
        note: called with each answer, for metrics.
    """
    return lambda socket: _Talk(socket, handlers, note).run()


def over_http(handler: Handler, status: int = 200) -> Callable[[Request], Awaitable[Response]]:
    """Return the function for a route of `App` that answers by a handler.

    Args:
        handler: handler; it gets the keys of the body, which is an object or empty, and those in the path.
        status: status of its answers.
    """

    async def answer(request: Request) -> Response:
        body = await request.body()
        said = parse_json(body) if body.strip() else {}
        if not isinstance(said, dict):
            raise Refusal(400, "The body must be empty, or an object.")
        found = handler({**said, **request.names})
        return json_response(found if isinstance(found, dict) else await found, status=status)

    return answer


class _Talk:
    def __init__(self, socket: WebSocket, handlers: Mapping[str, Handler], note: Note) -> None:
        self._socket, self._handlers, self._note = socket, handlers, note
        self._answers: list[bytes | str] = []
        self._num_under_way = 0
        self._is_answered = asyncio.Event()

    async def run(self) -> None:
        while (message := await self._socket.receive()) is not None:
            self._take(message)
            await self._until(MAX_UNDER_WAY - 1)
            await self._socket.drain()
        if self._socket.is_ending:
            await self._until(0)

    async def _until(self, num_under_way: int) -> None:
        while self._num_under_way > num_under_way:
            self._is_answered.clear()
            await self._is_answered.wait()

    def _take(self, message: bytes | str) -> None:
        began, do, id = time.perf_counter(), "", None
        is_text = isinstance(message, str)
        self._num_under_way += 1
        try:
            said = parse_json(message) if isinstance(message, str) else unpacked(message)
            if not isinstance(said, dict):
                raise Refusal(400, "A message must be an object, such as {'id': 1, 'observation': [0.1, 0.2]}.")
            given, wanted = said.pop("id", None), said.pop("do", "act")
            if not isinstance(given, int | float | str | None) or len(str(given)) > _MAX_ID:
                raise Refusal(400, f"'id' must be a number, or a text of at most {_MAX_ID} characters.")
            id = given
            if not isinstance(wanted, str) or wanted not in self._handlers:
                raise Refusal(400, f"'do' can't be {shown(wanted)}; there are {', '.join(self._handlers)}.")
            do = wanted
            answer = self._handlers[do](said)
        except Exception as error:
            answer = _fault(error)
        give = partial(self._give, id=id, do=do, is_text=is_text, began=began)
        if isinstance(answer, Reply):
            answer.add_done_callback(give)
        else:
            give(answer)

    def _give(self, answer: dict[str, Any] | Reply, *, id: Any, do: str, is_text: bool, began: float) -> None:
        form = _as_text if is_text else packed
        try:
            found = answer.result() if isinstance(answer, Reply) else answer
            written = form({"id": id, **found})
        except Exception as error:
            written = form({"id": id, **(found := _fault(error))})
        if not self._answers:  # all answers of a turn are sent together
            asyncio.get_running_loop().call_soon(self._send)
        self._answers.append(written)
        self._note(do, str(found.get("status", 200)), time.perf_counter() - began)

    def _send(self) -> None:
        answers, self._answers = self._answers, []
        self._num_under_way -= len(answers)
        self._socket.write(answers)
        self._is_answered.set()


def _fault(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Refusal):
        return {"status": error.status, "error": error.sentence}
    logger.error("answering a message failed", exc_info=error)
    return _FAILED


def _as_text(answer: Mapping[str, Any]) -> str:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def packed(answer: Mapping[str, Any]) -> bytes:
    """Return a message in msgpack."""
    found: bytes = msgpack.packb(answer, default=_plain)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        return {"data": data, "dtype": value.dtype.name, "shape": value.shape}
    raise TypeError(f"{type(value).__name__} has no form in msgpack")


def unpacked(message: bytes) -> Any:
    """Return the value in a message of msgpack.

    Raises:
        Refusal: it is none.
    """
    try:
        return msgpack.unpackb(message, ext_hook=_refuse_extension)
    except Exception as error:  # its own errors, ValueError and others, for anything that is no msgpack
        raise Refusal(400, f"The message is not valid msgpack: {error}.") from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"its extension type {code} is not used here")
