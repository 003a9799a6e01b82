"""Requests and responses of HTTP, messages of WebSockets, and refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import orjson

from aiorl.text import one_line

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

JSON = b"application/json"
_MAX_SENTENCE = 500


class Refusal(Exception):
    """Refusal of a request, answered as {"error": sentence}.

    Attributes:
        status: status of HTTP, 4xx or 503.
        sentence: the fault and how to correct it, on one line.
        headers: headers of the answer.
    """

    def __init__(self, status: int, sentence: str, headers: Headers = ()) -> None:
        super().__init__(status, sentence)
        self.status = status
        self.sentence = one_line(sentence, _MAX_SENTENCE)
        self.headers = headers

    def response(self) -> Response:
        """Return the answer."""
        return json_response({"error": self.sentence}, status=self.status, headers=self.headers)


class Gone(Exception):
    """The client closed its connection before its request was complete."""


class Reply:
    """Answer to come. It is used like a future, but callbacks run at once, in the same turn of the event loop."""

    __slots__ = ("_callbacks", "_error", "_found", "_is_done")

    def __init__(self) -> None:
        """Begin without an answer."""
        self._callbacks: list[Callable[[Reply], object]] = []
        self._found: Any = None
        self._error: BaseException | None = None
        self._is_done = False

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the answer."""
        if not self._is_done:
            future = asyncio.get_running_loop().create_future()
            self.add_done_callback(lambda reply: None if future.done() else future.set_result(None))
            yield from future
        return self.result()

    def add_done_callback(self, callback: Callable[[Reply], object]) -> None:
        """Call a function with this reply as soon as it is there."""
        self._callbacks.append(callback)
        if self._is_done:
            self._tell()

    def result(self) -> Any:
        """Return the answer, which is there, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._found

    def set_result(self, found: Any) -> None:
        """Set the answer."""
        self._found = found
        self._tell()

    def set_exception(self, error: BaseException) -> None:
        """Set the error."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        self._is_done, callbacks, self._callbacks = True, self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the others are answered
                logger.exception("an answer could not be sent")


class Response(NamedTuple):
    """Answer to a request.

    Attributes:
        body: the whole body.
        status: status of HTTP.
        content_type: type of the body.
        headers: further headers, in lower case.
        stream: parts of the body instead of `body`; for example server-sent events.
    """

    body: bytes = b""
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = ()
    stream: AsyncIterator[bytes] | None = None


def json_response(value: Any, *, status: int = 200, headers: Headers = ()) -> Response:
    """Return an answer in JSON; NaN and infinities become null, arrays of NumPy become lists."""
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, JSON, headers)


def always(said: Any) -> Callable[[Request], Awaitable[Response]]:
    """Return the function for a route that has the same answer to all requests."""

    async def answer(request: Request) -> Response:
        return json_response(said)

    return answer


def metrics_response(registry: CollectorRegistry) -> Response:
    """Return the metrics of a registry in Prometheus's text format."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(registry), 200, CONTENT_TYPE_LATEST.encode())


def parse_json(body: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        Refusal: it is none.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"The body is not valid JSON: {error}.") from None


class Request:
    """Request whose headers have arrived.

    Attributes:
        scope: its ASGI scope.
        names: parts of its path that the route names.
        max_bytes: size limit of its body, in bytes.
    """

    __slots__ = ("_receive", "max_bytes", "names", "scope")

    def __init__(self, scope: Mapping[str, Any], receive: Receive, max_bytes: int) -> None:
        """Take over a request; its body is read on demand."""
        self.scope = scope
        self.names: Mapping[str, str] = {}
        self.max_bytes = max_bytes
        self._receive = receive

    @property
    def method(self) -> str:
        """Its method, in upper case."""
        return str(self.scope.get("method", "GET"))

    @property
    def path(self) -> str:
        """Its path, without the query, decoded."""
        return str(self.scope["path"])

    @property
    def query(self) -> dict[str, str]:
        """Its query; the last of several equal names counts."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def header(self, name: bytes) -> str:
        """Return a header by its `name` in lower case, "" if it is missing."""
        for known, value in self.scope["headers"]:
            if known == name:
                return str(value.decode("latin-1"))
        return ""

    async def body(self) -> bytes:
        """Read the whole body.

        Raises:
            Refusal: it is too large.
            Gone: the client closed the connection.
        """
        announced = self.header(b"content-length")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            raise self.too_large()
        parts: list[bytes] = []
        size, has_more = 0, True
        while has_more and size <= self.max_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            size, has_more = size + len(parts[-1]), message.get("more_body", False)
        if size > self.max_bytes:
            raise self.too_large()
        return b"".join(parts)

    async def until_gone(self) -> None:
        """Wait until the client closes the connection; only after the whole body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def too_large(self) -> Refusal:
        """Return the refusal of a body that is too large."""
        return Refusal(413, f"The body may have at most {self.max_bytes:,} bytes.")


SOCKET, ENDING = "aiorl.socket", "aiorl.ending"
"""Extension of ASGI by which a WebSocket reaches its connection, and the type of the message that it closes by."""


class WebSocket:
    """Accepted WebSocket.

    Attributes:
        request: the request that opened it.
        is_ending: True once all messages are read because the server closes: answer them, then return.
    """

    def __init__(self, request: Request) -> None:
        """Take over a WebSocket after its handshake."""
        self.request, self.is_ending = request, False
        self._connection = request.scope["extensions"][SOCKET]

    async def receive(self) -> bytes | str | None:
        """Return the next message; None when the client is gone, or the server closes and all messages are read."""
        message = await self._connection.receive()
        if message["type"] != "websocket.receive":
            self.is_ending = message["type"] == ENDING
            return None
        data: bytes | str | None = message.get("bytes")
        return message.get("text", "") if data is None else data

    def write(self, messages: Iterable[bytes | str]) -> None:
        """Send messages without waiting; those to a client that is gone are dropped. See `drain`."""
        self._connection.write(messages)

    async def drain(self) -> None:
        """Wait while the client does not read."""
        await self._connection.writable.wait()
