"""WebServer: an app on a port, by uvicorn's protocols, with limits of time, size and number."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import OPEN

from aiorl.config.addresses import is_loopback
from aiorl.errors import ConfigError
from aiorl.process.children import watch_parent
from aiorl.process.program import on_stop_signals, raise_open_file_limit
from aiorl.process.tasks import Tasks
from aiorl.web.access import AccessLog, Guard, WebOptions, listen, url_of
from aiorl.web.app import ENDING, App, Receive, Reply, Request, Response, failed, headers_of, json_response, reply_of

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES, _MAX_CONNECTIONS = 64 << 10, 4096
_NEVER = float("inf")
_IDLE_S, _GRACE_S, _LINGER_S = 75, 10, 1.5


class WebServer(uvicorn.Server):
    """App on a port.

    Attributes:
        app: the app.
        options: the options.
        port: its port.
        url: its address, such as ``http://127.0.0.1:8000``.
    """

    def __init__(self, app: App, options: WebOptions) -> None:
        """Prepare to listen.

        Raises:
            ConfigError: options can't be applied.
            SecurityError: the token is unsafe (also a ConfigError).
        """
        self.app, self.options, self.port, self.url = app, options, options.port, ""
        self._heads: dict[Any, bytes] = {}
        app.check, app.max_body_bytes = Guard(options).check, options.max_body_bytes
        self._log = None if options.access_log is None else AccessLog(options.access_log)
        if self._log is not None:
            app.on_answer.append(self._log.note)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it has a line for each malformed request
        config = uvicorn.Config(
            cast("Any", app), http=cast("Any", partial(_Connection, self)), ws=_Socket, lifespan="off",
            log_config=None, access_log=False, proxy_headers=False, server_header=False,
            timeout_keep_alive=_IDLE_S, timeout_graceful_shutdown=_GRACE_S,
            ws_max_size=options.max_body_bytes, ws_per_message_deflate=False, ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )  # fmt: skip
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            said = f"--tls-cert {options.tls_cert} can't be used: {error.strerror or error}."
            raise ConfigError(said, key="tls_cert", value=str(options.tls_cert)) from error
        super().__init__(config)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Listen; at the end, answer the accepted requests, for at most ten seconds, and close.

        Raises:
            ConfigError: the address can't be listened on.
        """
        self.app.closing = asyncio.get_running_loop().create_future()
        raise_open_file_limit()
        listener = listen(self.options)
        self.port, self.url = listener.getsockname()[1], url_of(self.options, listener)
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([listener])
        if self.config.ssl is None and not is_loopback(self.options.host):
            logger.warning("%s is not encrypted: others on its way can read requests and the token", self.url)
        tasks = Tasks(lambda error: None)  # which it has logged
        tasks.start(self.main_loop(), "web-server")
        try:
            yield self
        finally:
            self.app.closing.set_result(None)  # streams end by themselves
            await self.shutdown([listener])
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await tasks.close()
            if self._log is not None:
                with suppress(OSError):  # a full disk costs lines alone
                    self._log.close()

    def head_of(self, response: Response, keep_alive: bool) -> bytes:
        """Return the head of an answer in HTTP/1.1. All of it but the length is kept for up to a second."""
        key = response[1:], keep_alive
        found = self._heads.get(key)
        if found is None:
            headers = [*self.server_state.default_headers, *headers_of(response)]
            headers += [] if keep_alive else [(b"connection", b"close")]
            lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"content-length"]
            found = self._heads[key] = STATUS_LINE[response.status] + b"".join(lines)
        return found + b"content-length: %d\r\n\r\n" % len(response.body)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, set the date and close late connections."""
        if counter % 10 == 0:
            self._heads.clear()
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, _Connection) and connection.deadline < now:
                    connection.refuse(408, "The request did not arrive in time.")
        return await super().on_tick(counter)


async def serve(app: App, options: WebOptions, said: Callable[[str], str] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; with an inherited socket, until the parent is gone.

    Args:
        app: the app.
        options: the options.
        said: makes a line from the server's address, which is printed once the server listens.

    Raises:
        ConfigError: as `WebServer`.
    """
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    on_stop_signals(lambda name: stopped.set())
    async with WebServer(app, options).running() as server:
        if options.inherited is not None:
            watch_parent(lambda: loop.call_soon_threadsafe(stopped.set), grace_s=_GRACE_S + _LINGER_S)
        if said is not None:
            sys.stdout.write(f"{said(server.url)}\n")
            sys.stdout.flush()
        await stopped.wait()
        if options.inherited is not None and server.server_state.tasks:
            await asyncio.sleep(_LINGER_S)  # streams show that the parent has ended


class _Connection(HttpToolsProtocol):
    """Connection with a deadline for requests, a size limit for headers, and a short way to quick handlers.

    A request for a quick handler that arrives as a whole is answered without a task, and without ASGI.

    Attributes:
        deadline: time by which the request has to be complete, by the monotonic clock.
    """

    def __init__(self, server: WebServer, **state: Any) -> None:
        super().__init__(**state)
        self._server, self._app, self._options = server, server.app, server.options
        self._head_bytes, self._is_in_head = 0, False
        self._begun: RequestResponseCycle | None = None  # a request for a quick handler, without its body so far
        self.deadline = time.monotonic() + self._options.arrive_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            self.refuse(503, "The server has as many connections as it takes. Try again later.")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._begun is not None:  # its body takes longer
            cycle, self._begun = self._begun, None
            super()._start_asgi_task(cycle, self.app)
        if self._is_in_head:
            self._head_bytes += len(data) - max(0, data.rfind(b"\r\n\r\n"))  # without requests before it
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.refuse(431, f"The headers may have at most {_MAX_HEAD_BYTES:,} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        if self.deadline == _NEVER:  # the first request has to come within that of the connection
            self.deadline = time.monotonic() + self._options.arrive_s

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.deadline = _NEVER
        super().on_message_complete()
        if self._begun is not None and self._begun is self.cycle:
            self._begun = None
            self._answer(self.cycle)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if (
            cycle.scope["path"] not in self._app.quick
            or cycle.scope["method"] != "POST"
            or cycle.waiting_for_100_continue
            or self.flow.write_paused
            or self.pipeline  # or answers given at once would be nested in each other
        ):
            super()._start_asgi_task(cycle, app)
        elif cycle.more_body:
            self._begun = cycle
        else:
            self._answer(cycle)

    def _answer(self, cycle: RequestResponseCycle) -> None:
        began = time.perf_counter()
        request = Request(cycle.scope, cast(Receive, cycle.receive), self._app.max_body_bytes)
        ask, status = self._app.quick[request.path]

        def answer() -> dict[str, Any] | Reply:
            self._app.check(request)
            if len(cycle.body) > request.max_bytes:
                raise request.too_large()
            return ask(bytes(cycle.body), {})

        def respond(reply: Reply) -> None:
            try:
                response = json_response(reply.result(), status=status)
            except Exception as error:
                response = failed(error)
            cycle.response_started = cycle.response_complete = True
            self._write(response, keep_alive=cycle.keep_alive)
            self.on_response_complete()
            self._app.note(request, response.status, began)

        reply_of(answer).add_done_callback(respond)

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "The request is not valid HTTP.")

    def refuse(self, status: int, sentence: str) -> None:
        """Answer without the app, and close the connection."""
        self.deadline = _NEVER
        if self._is_in_head or self.cycle is None or not self.cycle.response_started:
            self._write(json_response({"error": sentence}, status=status), keep_alive=False)
        self.transport.close()

    def _write(self, response: Response, *, keep_alive: bool) -> None:
        if not self.transport.is_closing():
            self.transport.write(self._server.head_of(response, keep_alive) + response.body)
            if not keep_alive:
                self.transport.close()


class _Socket(WebSocketsSansIOProtocol):
    """Connection of a WebSocket that can also send without waiting, and ends after the messages received so far."""

    def write(self, messages: Iterable[bytes | str]) -> None:
        """Send messages now; those to a client that is gone are dropped."""
        if self.conn.state is not OPEN or self.transport.is_closing():
            return
        for message in messages:
            if isinstance(message, str):
                self.conn.send_text(message.encode())
            else:
                self.conn.send_binary(message)
        self.transport.write(b"".join(self.conn.data_to_send()))

    def shutdown(self) -> None:
        self.queue.put_nowait({"type": "websocket.disconnect", "code": ENDING})
