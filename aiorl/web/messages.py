"""Requests and answers as messages of a WebSocket, many under way at a time.

Each message is a request: an object with ``do``, the name of a handler ("act" if it is missing);
``id``, a number or a text that its answer repeats; and the handler's own keys. A binary message is
msgpack and is answered in msgpack, a text is JSON and is answered in JSON. Answers come in any
order. A request that fails is answered by ``{"id", "status", "error"}``. In msgpack, an array of an
answer is ``{"data": bytes, "dtype", "shape"}``, in row-major order and little endian; in JSON it is
a list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from reprlib import repr as short_repr
from typing import Any, NoReturn

import msgpack
import numpy as np

from aiorl.process.collector import collector_off
from aiorl.web.app import (
    LARGE_BYTES,
    MAX_CONTAINERS,
    App,
    JsonHandler,
    Refusal,
    Reply,
    WebSocket,
    json_response,
    parse_json,
    refusal_of,
    reply_of,
    too_many_containers,
)

Note = Callable[[str, str, float], None]
"""Function that is called with a request's handler ("" if there is none), its status, and seconds
until its answer."""

MAX_UNDER_WAY = 1024
"""Requests of one WebSocket that are not answered yet; further ones are not read."""
_MAX_ID = 200
_EXACT = 1 << 53  # as float64


def add_message_routes(
    app: App, handlers: Mapping[str, JsonHandler], note: Note = lambda do, status, seconds: None
) -> None:
    """Add the routes by which clients reach handlers, over HTTP and at the WebSocket /ws; see the
    module.

    Args:
        app: the app.
        handlers: "act", "open", "end" and "close", and others for the WebSocket alone.
        note: called with each answer at the WebSocket, for metrics.
    """
    app.add_json_route("POST", "/act", handlers["act"])
    app.add_json_route("POST", "/sessions", handlers["open"], 201)
    app.add_json_route("POST", "/sessions/{session}/end", handlers["end"])
    app.add_json_route("DELETE", "/sessions/{session}", handlers["close"])
    app.add("WEBSOCKET", "/ws", lambda socket: _Conversation(socket, handlers, note).run())


class _Conversation:
    """Requests of one WebSocket, and their answers."""

    def __init__(self, socket: WebSocket, handlers: Mapping[str, JsonHandler], note: Note) -> None:
        self._socket = socket
        self._handlers = handlers
        self._note = note
        self._answers: list[bytes | str] = []
        self._num_under_way = 0
        self._is_answered = asyncio.Event()

    async def run(self) -> None:
        while (message := await self._socket.receive()) is not None:
            self._answer(message)
            await self._until(MAX_UNDER_WAY - 1)
            await self._socket.drain()
        if self._socket.is_ending:
            await self._until(0)

    async def _until(self, num_under_way: int) -> None:
        while self._num_under_way > num_under_way:
            self._is_answered.clear()
            await self._is_answered.wait()

    def _answer(self, message: bytes | str) -> None:
        # filled as the request is read; an answer to one that can't be read needs it, too
        header: dict[str, Any] = {"id": None, "do": "", "began": time.perf_counter()}

        def answer() -> dict[str, Any] | Reply:
            body = parse_json(message) if isinstance(message, str) else unpacked(message)
            if not isinstance(body, dict):
                raise Refusal(
                    400,
                    "A message must be an object, such as {'id': 1, 'observation': [0.1, 0.2]}.",
                )
            id = body.pop("id", None)
            do = body.pop("do", "act")
            if not isinstance(id, int | float | str | None) or len(str(id)) > _MAX_ID:
                raise Refusal(
                    400, f"'id' must be a number, or a text of at most {_MAX_ID} characters."
                )
            if isinstance(id, float) and abs(id) > _EXACT:
                raise Refusal(
                    400, f"'id' {id!r} may have lost digits. Send a number of this size as a text."
                )
            header["id"] = id
            if not isinstance(do, str) or do not in self._handlers:
                raise Refusal(
                    400, f"'do' can't be {short_repr(do)}; there are {', '.join(self._handlers)}."
                )
            header["do"] = do
            return self._handlers[do](body)

        self._num_under_way += 1
        encode = packed if isinstance(message, bytes) else _json_text
        reply_of(answer).add_done_callback(partial(self._queue, encode, header))

    def _queue(
        self, encode: Callable[[dict[str, Any]], bytes | str], header: dict[str, Any], reply: Reply
    ) -> None:
        """Queue an answer for the end of this turn of the event loop."""
        try:
            answer = reply.result()
            message = encode({"id": header["id"], **answer})
        except Exception as error:
            refusal = refusal_of(error)
            answer = {"status": refusal.status, "error": refusal.sentence}
            message = encode({"id": header["id"], **answer})
        if not self._answers:  # all answers of a turn are sent together
            asyncio.get_running_loop().call_soon(self._send)
        self._answers.append(message)
        seconds = time.perf_counter() - header["began"]
        self._note(header["do"], str(answer.get("status", 200)), seconds)

    def _send(self) -> None:
        answers = self._answers
        self._answers = []
        self._num_under_way -= len(answers)
        self._socket.write(answers)
        self._is_answered.set()


def packed(answer: Mapping[str, Any]) -> bytes:
    """Return a message in msgpack."""
    message: bytes = msgpack.packb(answer, default=_plain)
    return message


def _json_text(answer: Mapping[str, Any]) -> str:
    return json_response(answer).body.decode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {
            "data": value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes(),
            "dtype": value.dtype.name,
            "shape": value.shape,
        }
    raise TypeError(f"{type(value).__name__} has no form in msgpack")


def unpacked(message: bytes, max_containers: int = MAX_CONTAINERS) -> Any:
    """Return the value in a message of msgpack.

    Args:
        message: the message.
        max_containers: most lists and objects in it.

    Raises:
        Refusal: the message is not valid msgpack, or has more of them.
    """
    try:
        if len(message) <= LARGE_BYTES:
            return _unpack(message)
        count = _counter(max_containers)
        with collector_off():
            return _unpack(message, list_hook=count, object_hook=count)
    except Refusal:
        raise
    except Exception as error:  # msgpack's errors, ValueError and others: any fault of the message
        raise Refusal(400, f"The message is not valid msgpack: {error}.") from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"its extension type {code} is not used here")


def _counter(most: int) -> Callable[[Any], Any]:
    """Return a function that returns its argument; it refuses the call after `most` others."""
    room = iter(range(most))

    def count(value: Any) -> Any:
        if next(room, None) is None:
            raise too_many_containers(most)
        return value

    return count


_unpack = partial(msgpack.unpackb, ext_hook=_refuse_extension, max_ext_len=0)  # nor timestamps
