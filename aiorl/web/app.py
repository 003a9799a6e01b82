"""App: routes of a server, and its ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from aiorl.process.tasks import Tasks, first_of
from aiorl.web.messages import Gone, Receive, Refusal, Reply, Request, Response, Send, WebSocket, json_response

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
Talk = Callable[[WebSocket], Awaitable[None]]
Quick = Callable[[bytes], Reply]

MAX_BODY_BYTES = 16 << 20
_ALWAYS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_FAILED = Response(b'{"error":"The server failed at this request. Its log has the reason."}', 500)


def headers_of(response: Response) -> list[tuple[bytes, bytes]]:
    """Return all headers of an answer."""
    size = () if response.stream is not None else ((b"content-length", b"%d" % len(response.body)),)
    return [(b"content-type", response.content_type), *size, *_ALWAYS, *response.headers]


def failed(request: Request, error: BaseException) -> Response:
    """Return the answer to a request that failed: a refusal as it says, and 500 for others, which are logged."""
    if isinstance(error, Refusal):
        return error.response()
    logger.error("answering %s %s failed", request.method, request.path, exc_info=error)
    return _FAILED


class _Route(NamedTuple):
    handle: Callable[[Any], Awaitable[Any]]
    is_open: bool


class App:
    """Routes, and the ASGI application that answers by them.

    Attributes:
        closing: done when the server closes; exists once it runs.
        max_body_bytes: size limit of bodies, in bytes; the server sets it.
        quick: handlers of `post_quick` by path.
        check: called with each request to a route that isn't open; raises a `Refusal`. The server sets it.
        on_answer: called with each request, the status and the seconds until the answer was complete.
    """

    closing: asyncio.Future[None]

    def __init__(self) -> None:
        """Start without routes."""
        self.max_body_bytes = MAX_BODY_BYTES
        self.check: Callable[[Request], None] = lambda request: None
        self.on_answer: list[Callable[[Request, int, float], None]] = []
        self.quick: dict[str, Quick] = {}
        self._routes: dict[str, tuple[list[str], dict[str, _Route]]] = {}

    def get(self, path: str, handler: Handler, *, is_open: bool = False) -> None:
        """Add a route for GET and HEAD.

        Args:
            path: its path; a part in braces takes any text and names it.
            handler: returns the answer to a request.
            is_open: True needs no token.
        """
        self._add("GET", path, handler, is_open)

    def post(self, path: str, handler: Handler) -> None:
        """Add a route for POST, with arguments as for `get`."""
        self._add("POST", path, handler, False)

    def post_quick(self, path: str, handler: Quick) -> None:
        """Add a route for POST that costs little, for a path that is asked often.

        Args:
            path: its path, without parts in braces.
            handler: takes the whole body, and returns the future of an answer in JSON.
        """

        async def answer(request: Request) -> Response:
            return json_response(await handler(await request.body()))

        self.post(path, answer)
        self.quick[path] = handler

    def delete(self, path: str, handler: Handler) -> None:
        """Add a route for DELETE, with arguments as for `get`."""
        self._add("DELETE", path, handler, False)

    def websocket(self, path: str, talk: Talk, *, is_open: bool = False) -> None:
        """Add a route for WebSockets; `talk` is called with each one at `path`, and closes it by returning."""
        self._add("WEBSOCKET", path, talk, is_open)

    def _add(self, method: str, path: str, handle: Callable[[Any], Awaitable[Any]], is_open: bool) -> None:
        _, methods = self._routes.setdefault(path, (path.split("/"), {}))
        methods[method] = _Route(handle, is_open)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer as ASGI's application."""
        began = time.perf_counter()
        request = Request(scope, receive, self.max_body_bytes)
        if scope["type"] == "websocket":
            status = await self._talk(request, receive, send)
        else:
            try:
                response = await self._route_of(request, request.method)(request)
            except Gone:
                return
            except Exception as error:
                response = failed(request, error)
            status = response.status
            await self._answer(request, response, send)
        self.note(request, status, began)

    def note(self, request: Request, status: int, began: float) -> None:
        """Tell `on_answer` of a request that was answered; it began at a time of `time.perf_counter`."""
        seconds = time.perf_counter() - began
        for note in self.on_answer:
            note(request, status, seconds)

    def _route_of(self, request: Request, method: str) -> Callable[[Any], Awaitable[Any]]:
        methods = self._methods(request)
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise Refusal(405, f"{request.path} takes {allowed}, not {method}.", ((b"allow", allowed.encode()),))
        if not route.is_open:
            self.check(request)
        return route.handle

    def _methods(self, request: Request) -> dict[str, _Route]:
        if request.path in self._routes and "{" not in request.path:
            return self._routes[request.path][1]
        given = request.scope.get("raw_path", b"").decode("latin-1").split("/")
        for parts, methods in self._routes.values():
            if len(parts) == len(given):
                pairs = [*zip(parts, given, strict=True)]
                if all(part == own or part[:1] == "{" for part, own in pairs):
                    request.names = {part[1:-1]: unquote(own) for part, own in pairs if part[:1] == "{"}
                    return methods
        raise Refusal(404, f"There is nothing at {request.path}.")

    async def _answer(self, request: Request, response: Response, send: Send) -> None:
        body, stream = response.body, response.stream
        await send({"type": "http.response.start", "status": response.status, "headers": headers_of(response)})
        if stream is not None:
            if request.method != "HEAD":
                await self._send_parts(request, aiter(stream), send)
            if (aclose := getattr(stream, "aclose", None)) is not None:
                await aclose()
        await send({"type": "http.response.body", "body": body})

    async def _send_parts(self, request: Request, parts: Any, send: Send) -> None:
        async def part() -> bytes:
            found: bytes = await anext(parts)
            return found

        tasks = Tasks(lambda error: None)  # which it has logged
        over = tasks.start(first_of(request.until_gone(), self.closing), "web-client")
        try:
            while (step := await first_of(part(), over)) is not None:
                await send({"type": "http.response.body", "body": step.result(), "more_body": True})
        except StopAsyncIteration:
            pass
        except Exception:
            logger.exception("the stream at %s failed", request.path)
        finally:
            await tasks.close()

    async def _talk(self, request: Request, receive: Receive, send: Send) -> int:
        try:
            talk = self._route_of(request, "WEBSOCKET")
        except Refusal as refusal:
            response = refusal.response()
            headers = [(b"content-type", response.content_type), *response.headers]
            start = {"type": "websocket.http.response.start", "status": response.status, "headers": headers}
            await send(start)
            await send({"type": "websocket.http.response.body", "body": response.body})
            return response.status
        await receive()
        await send({"type": "websocket.accept"})
        code = 1001 if self.closing.done() else 1000
        with contextlib.suppress(OSError, RuntimeError):  # the client is gone, or it is closed already
            try:
                await talk(WebSocket(request))
                code = 1001 if self.closing.done() else 1000
            except OSError:
                raise
            except Exception:
                logger.exception("the WebSocket at %s failed", request.path)
                code = 1011
            await send({"type": "websocket.close", "code": code})
        return 101
