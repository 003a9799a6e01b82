"""App: routes of a server, its ASGI application, and the requests and answers of HTTP and
WebSockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    MutableMapping,
)
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import numpy as np
import orjson

from aiorl.config.files import num_containers
from aiorl.process.collector import collector_off
from aiorl.process.tasks import Tasks, first_of
from aiorl.text import one_line
from aiorl.web.budget import Budget, Share

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

MAX_BODY_BYTES = 16 << 20
HELD_BYTES = 128 << 20
"""Limit of what the requests of all clients that are let in hold together, in bytes of this
process."""
MAX_CONTAINERS = 1 << 20
"""Most lists and objects of a body or a message. An empty one can be a byte there; here it takes 64
bytes, and a microsecond of all clients' time."""
LARGE_BYTES = 64 << 10
"""Size above which the lists and objects of a request are counted."""
_PART_BYTES = 100
"""Cost of the object of a part of a body besides its bytes."""
CLOSING = ((b"connection", b"close"),)
"""Headers of an answer after which the connection is closed."""
RETRY_SOON = ((b"retry-after", b"1"),)
"""Headers of the refusal of a request that may be answered in a second."""
REFUSED = "aiorl.refused"
"""Key of a scope whose request was answered by its connection, without the app."""
ROUTE = "aiorl.route"
"""Key of a scope for its route, if its connection has looked for it already."""
ENDING = 1001
"""Code by which the server closes WebSockets when it ends."""
PROTOCOL = "aiorl"
"""Protocol of WebSockets, which pages name next to one that carries their token."""
_PERMISSION_S = b"7200"
"""Seconds for which a browser need not ask again whether a page may send a request."""
_ALWAYS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


# Answers
# --------------------------------------------------------------------------------------------------


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
    content_type: bytes = b"application/json"
    headers: Headers = ()
    stream: AsyncIterator[bytes] | None = None


def headers_of(response: Response) -> list[tuple[bytes, bytes]]:
    """Return all headers of an answer."""
    size = () if response.stream is not None else ((b"content-length", b"%d" % len(response.body)),)
    return [(b"content-type", response.content_type), *size, *_ALWAYS, *response.headers]


def json_response(value: Any, *, status: int = 200, headers: Headers = ()) -> Response:
    """Return an answer in JSON; NaN and infinities become null, arrays of NumPy become lists."""
    return Response(
        orjson.dumps(value, _other_array, orjson.OPT_SERIALIZE_NUMPY), status, headers=headers
    )


def _other_array(value: Any) -> Any:
    """Return an array that has no dimensions, or is not contiguous, in a form that orjson takes."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return np.ascontiguousarray(value) if value.ndim else value[()]


def always(value: Any) -> Callable[[Request], Awaitable[Response]]:
    """Return the function for a route that has the same answer to all requests."""

    async def answer(request: Request) -> Response:
        return json_response(value)

    return answer


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
        self.sentence = one_line(sentence, 500)
        self.headers = headers


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal of a request that failed. An error that isn't a refusal is logged, and
    makes a 500.

    Nothing of the request is held by the error afterwards: its frames would hold megabytes until
    they are collected.
    """
    refusal = error
    if not isinstance(refusal, Refusal):
        logger.error("answering a request failed", exc_info=error)
        refusal = Refusal(500, "The server failed at this request. Its log has the reason.")
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return refusal


def failed(error: BaseException) -> Response:
    """Return the answer to a request that failed; see `refusal_of`."""
    refusal = refusal_of(error)
    return json_response(
        {"error": refusal.sentence}, status=refusal.status, headers=refusal.headers
    )


class Reply:
    """Answer to come.

    It works like a future, but callbacks run at once, in the same turn of the event loop.
    """

    __slots__ = ("_answer", "_callbacks", "_is_done")

    def __init__(self) -> None:
        """Begin without an answer."""
        self._callbacks: list[Callable[[Reply], object]] = []
        self._answer: Any = None
        self._is_done = False

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the answer."""
        future = asyncio.get_running_loop().create_future()

        def wake(reply: Reply) -> None:
            if not future.done():  # the task that waits can be cancelled
                future.set_result(None)

        self.add_done_callback(wake)
        yield from future
        return self.result()

    def add_done_callback(self, callback: Callable[[Reply], object]) -> None:
        """Call a function with this reply as soon as the answer is there."""
        self._callbacks.append(callback)
        if self._is_done:
            self.set_result(self._answer)  # calls it now

    def result(self) -> Any:
        """Return the answer, which has to be there; if it is an error, raise it."""
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def set_result(self, answer: Any) -> None:
        """Set the answer, or the error."""
        self._answer = answer
        self._is_done = True
        while self._callbacks:
            try:
                self._callbacks.pop()(self)
            except Exception:  # the others are answered
                logger.exception("an answer could not be sent")


def reply_of(ask: Callable[[], Any]) -> Reply:
    """Call a function that returns an answer or a `Reply`, and return it as a `Reply`; an error is
    an answer, too.
    """
    try:
        answer = ask()
    except Exception as error:
        answer = error
    if isinstance(answer, Reply):
        return answer
    reply = Reply()
    reply.set_result(answer)
    return reply


# Requests
# --------------------------------------------------------------------------------------------------


class Request:
    """Request whose headers have arrived.

    Attributes:
        scope: its ASGI scope.
        method: its method, in upper case; WEBSOCKET for a handshake.
        path: its path, without the query, decoded.
        names: parts of its path that the route names.
        max_bytes: size limit of its body, in bytes.
        share: its part of the budget for what requests hold; None counts nothing.
    """

    __slots__ = ("_receive", "max_bytes", "method", "names", "path", "scope", "share")

    def __init__(self, scope: Mapping[str, Any], receive: Receive, max_bytes: int) -> None:
        """Take over a request; its body is read on demand."""
        self.scope = scope
        self.max_bytes = max_bytes
        self._receive = receive
        self.method = str(scope.get("method", "WEBSOCKET"))
        self.path = str(scope["path"])
        self.names: Mapping[str, str] = {}
        self.share: Share | None = None

    @property
    def query(self) -> dict[str, str]:
        """Its query; the last of several equal names counts."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def header(self, name: bytes) -> str:
        """Return a header by its `name` in lower case, "" if it is missing."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return ""

    async def body(self) -> bytes:
        """Read the whole body.

        Raises:
            Refusal: it is too large, the bodies of all requests are, or the client closed the
                connection.
        """
        announced = self.header(b"content-length")
        parts = list[bytes]()
        size = 0
        has_more = True
        is_large = announced.isdecimal() and int(announced) > self.max_bytes
        while has_more and not is_large:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "The body ended early.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            has_more = message.get("more_body", False)
            is_large = size > self.max_bytes
            if self.share is not None and not self.share.resize(size + _PART_BYTES * len(parts)):
                raise full()
        if is_large:
            raise self.too_large()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def until_gone(self) -> None:
        """Wait until the client closes the connection; only after the whole body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def too_large(self) -> Refusal:
        """Return the refusal of a body that is too large."""
        return Refusal(413, f"The body may have at most {self.max_bytes:,} bytes.")


def full() -> Refusal:
    """Return the refusal of a request for which there is no room next to the others."""
    return Refusal(
        503,
        "The server holds as many requests as it may. Try again later.",
        RETRY_SOON,
    )


def parse_json(body: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        Refusal: the text is not valid JSON, or has more than `MAX_CONTAINERS`.
    """
    try:
        if len(body) <= LARGE_BYTES:
            return orjson.loads(body)
        content = body.encode() if isinstance(body, str) else body
        if num_containers(content) > MAX_CONTAINERS:
            raise too_many_containers(MAX_CONTAINERS)
        with collector_off():
            return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"The body is not valid JSON: {error}.") from None


def too_many_containers(most: int) -> Refusal:
    """Return the refusal of a body or message with more lists and objects than `most`."""
    return Refusal(413, f"The request may have at most {most:,} lists and objects.")


class WebSocket:
    """Accepted WebSocket.

    Attributes:
        request: the request that opened it.
        is_ending: True once all messages are read because the server closes: answer them, then
            return.
    """

    def __init__(self, request: Request, connection: Any) -> None:
        """Take over a WebSocket after its handshake, with the server's protocol of its
        connection.
        """
        self.request = request
        self.is_ending = False
        self._connection = connection

    async def receive(self) -> bytes | str | None:
        """Return the next message; None when the client is gone, or the server closes and all
        messages are read.
        """
        message = await self._connection.receive()
        if message["type"] == "websocket.disconnect":
            self.is_ending = message["code"] == ENDING
            return None
        data: bytes | str | None = message.get("bytes")
        return message.get("text", "") if data is None else data

    def write(self, messages: Iterable[bytes | str]) -> None:
        """Send messages without waiting; those to a client that is gone are dropped.

        See `drain`.
        """
        self._connection.write(messages)

    def exempt(self) -> None:
        """Count what the client makes this process hold in no budget, because it is a part of this
        program.
        """
        self._connection.is_exempt = True

    async def drain(self) -> None:
        """Wait while the client does not read."""
        await self._connection.writable.wait()


def _protocol_of(request: Request) -> str | None:
    """Return the protocol that a page offers besides one that carries its token; browsers want one
    of them to be chosen.
    """
    return PROTOCOL if PROTOCOL in request.scope.get("subprotocols", ()) else None


# Routes
# --------------------------------------------------------------------------------------------------

JsonHandler = Callable[[dict[str, Any]], dict[str, Any] | Reply]
"""Function that takes the keys of a request, and returns its answer or a `Reply`; it may raise a
`Refusal`."""


class App:
    """Routes, and the ASGI application that answers by them.

    Attributes:
        closing: done when the server closes; exists once it runs.
        max_body_bytes: size limit of bodies, in bytes; the server sets it.
        budget: what the requests of clients that are let in hold together.
        quick: functions of `add_json_route` for POST by path, each with the status of its answers;
            `WebServer` calls them without ASGI.
        check: called with each request to a route that isn't open; raises a `Refusal`. The server
            sets it.
        headers_for: returns the headers by which a page of another origin can read the answer to
            its request, () if there is no such page or it may not. The server sets it.
        routes: path -> its pattern, and method -> handler, and whether it is open.
        on_answer: called with each request, the status and the seconds until the answer was
            complete.
    """

    closing: asyncio.Future[None]

    def __init__(self) -> None:
        """Start without routes."""
        self.max_body_bytes = MAX_BODY_BYTES
        self.budget = Budget(HELD_BYTES)
        self.check: Callable[[Request], None] = lambda request: None
        self.headers_for: Callable[[Request], Headers] = lambda request: ()
        self.on_answer: list[Callable[[Request, int, float], None]] = []
        self.quick: dict[
            str, tuple[Callable[[bytes, Mapping[str, str]], dict[str, Any] | Reply], int]
        ] = {}
        self.routes: dict[
            str, tuple[re.Pattern[str], dict[str, tuple[Callable[[Any], Awaitable[Any]], bool]]]
        ] = {}

    def add(
        self,
        method: str,
        path: str,
        handler: Callable[[Any], Awaitable[Any]],
        *,
        is_open: bool = False,
    ) -> None:
        """Add a route.

        Args:
            method: "GET" (and HEAD), "POST", "DELETE" or "WEBSOCKET".
            path: its path; a part in braces takes any text and names it.
            handler: returns the answer to a `Request`; or talks with a `WebSocket`, and closes it
                by returning.
            is_open: True needs no token.
        """
        pattern = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]*)", re.escape(path)))
        self.routes.setdefault(path, (pattern, {}))[1][method] = handler, is_open

    def add_json_route(
        self, method: str, path: str, handler: JsonHandler, status: int = 200
    ) -> None:
        """Add a route whose requests and answers are objects in JSON. POST costs little if the path
        has no braces.

        Args:
            method: see `add`.
            path: see `add`.
            handler: takes the keys of the body, which is an object or empty, and of the path;
                returns the answer.
            status: status of the answers.
        """

        def ask(body: bytes, names: Mapping[str, str]) -> dict[str, Any] | Reply:
            fields = parse_json(body) if body.strip() else {}
            if not isinstance(fields, dict):
                raise Refusal(400, "The body must be empty, or an object.")
            return handler({**fields, **names})

        async def answer(request: Request) -> Response:
            body = await request.body()
            return json_response(await reply_of(lambda: ask(body, request.names)), status=status)

        self.add(method, path, answer)
        if method == "POST" and "{" not in path:
            self.quick[path] = ask, status

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer as ASGI's application."""
        began = time.perf_counter()
        request = Request(scope, receive, self.max_body_bytes)
        request.share = Share(self.budget)
        try:
            status = await self._respond(request, receive, send)
        finally:
            request.share.resize(0)
        if REFUSED not in scope:
            self.note(request, status, began)

    async def _respond(self, request: Request, receive: Receive, send: Send) -> int:
        """Answer a request, and return the status."""
        try:
            handle, request.names, _ = request.scope.get(ROUTE) or self.route_of(request)
            if request.method == "WEBSOCKET":
                await receive()
                await send({"type": "websocket.accept", "subprotocol": _protocol_of(request)})
                # `receive` is a method of the connection, which ASGI has no other way to
                await self._serve_websocket(handle, WebSocket(request, receive.__self__), send)  # type: ignore[attr-defined]
                return 101
            response: Response = await handle(request)
        except Exception as error:
            response = failed(error)
        await self._answer(request, self.readable(request, response), send)
        return response.status

    def readable(self, request: Request, response: Response) -> Response:
        """Return an answer with the headers by which the page that asks can read it, if it may."""
        headers = self.headers_for(request)
        return response._replace(headers=response.headers + headers) if headers else response

    def note(self, request: Request, status: int, began: float) -> None:
        """Pass an answered request on to `on_answer`; `began` is a time of `time.perf_counter`."""
        seconds = time.perf_counter() - began
        loop = asyncio.get_running_loop()
        for note in self.on_answer:
            loop.call_soon(note, request, status, seconds)  # after the answer is on its way

    def route_of(
        self, request: Request
    ) -> tuple[Callable[[Any], Awaitable[Any]], Mapping[str, str], bool]:
        """Return the handler of a request, the parts of its path that the route names, and whether
        the route is open.

        Raises:
            Refusal: there is none, or the client is not let in.
        """
        raw_path = request.scope["raw_path"].decode("latin-1")
        method = request.method
        for pattern, methods in self.routes.values():
            match = pattern.fullmatch(raw_path)
            if match is None:
                continue
            route = methods.get("GET" if method == "HEAD" else method)
            if method == "OPTIONS" and request.header(b"origin"):
                return self._permission_for(request, methods), {}, True
            if route is None:
                allowed = ", ".join(sorted(methods))
                raise Refusal(
                    405,
                    f"{request.path} takes {allowed}, not {method}.",
                    ((b"allow", allowed.encode()),),
                )
            handle, is_open = route
            if not is_open:
                self.check(request)
            names = {name: unquote(part) for name, part in match.groupdict().items()}
            return handle, names, is_open
        raise Refusal(404, f"There is nothing at {request.path}.")

    def _permission_for(
        self, request: Request, methods: Iterable[str]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler for a browser that asks, without a token, whether a page may send a
        request with some method and headers.

        Raises:
            Refusal: pages of this origin may not.
        """
        if not self.headers_for(request):
            self.check(request)
        headers = (
            (b"access-control-allow-methods", ", ".join(sorted(methods)).encode()),
            (
                b"access-control-allow-headers",
                request.header(b"access-control-request-headers").encode("latin-1"),
            ),
            (b"access-control-max-age", _PERMISSION_S),
        )

        async def answer(request: Request) -> Response:
            return Response(headers=headers)

        return answer

    async def _answer(self, request: Request, response: Response, send: Send) -> None:
        kind = "websocket.http.response" if request.method == "WEBSOCKET" else "http.response"
        await send(
            {"type": f"{kind}.start", "status": response.status, "headers": headers_of(response)}
        )
        if response.stream is not None and request.method != "HEAD":
            await self._send_parts(request, response.stream, send)
        await send({"type": f"{kind}.body", "body": response.body})

    async def _send_parts(self, request: Request, parts: AsyncIterator[bytes], send: Send) -> None:
        async def send_all() -> None:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})

        tasks = Tasks(lambda error: None)  # which it has logged
        over = tasks.start(first_of(request.until_gone(), self.closing), "web-client")
        try:
            sending = await first_of(send_all(), over)
            if sending is not None:
                sending.result()  # raises what the handler's iterator has raised
        except Exception:
            logger.exception("the stream at %s failed", request.path)
        finally:
            await tasks.close()

    async def _serve_websocket(
        self, talk: Callable[[WebSocket], Awaitable[None]], socket: WebSocket, send: Send
    ) -> None:
        code = 1000
        try:
            await talk(socket)
        except OSError:  # the client is gone
            return
        except Exception:
            logger.exception("the WebSocket at %s failed", socket.request.path)
            code = 1011
        with contextlib.suppress(OSError, RuntimeError):  # it is closed already
            await send({"type": "websocket.close", "code": ENDING if self.closing.done() else code})
