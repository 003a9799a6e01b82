"""WebServer: an app on a port, by uvicorn's protocols, with limits of time, size and number.

What connections hold is counted in what it costs this process. Clients that are not let in, or not
yet, share a small budget. It has heads that are not complete, requests that wait for answers, and
answers that wait to be read. Those of clients that are let in share the budget of the app with the
bodies of their requests. A connection that would exceed its budget is refused and closed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import OPEN

from aiorl.config.addresses import is_loopback
from aiorl.errors import ConfigError
from aiorl.process.children import watch_parent
from aiorl.process.program import on_stop_signals, raise_open_file_limit
from aiorl.process.tasks import Tasks
from aiorl.web.access import USER, AccessLog, Guard, WebOptions, listen, url_of
from aiorl.web.app import (
    CLOSING,
    ENDING,
    HELD_BYTES,
    REFUSED,
    ROUTE,
    App,
    Receive,
    Refusal,
    Reply,
    Request,
    Response,
    failed,
    full,
    headers_of,
    json_response,
    reply_of,
)
from aiorl.web.budget import Budget, Share
from aiorl.web.peers import is_own_connection

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 128
MAX_CONNECTIONS = 4096
"""Connections at a time; fewer if the process can open fewer files."""
MAX_NEWCOMERS = 1024
"""Connections whose clients are not let in, or not yet; the oldest makes room for another one."""
_SPARE_FILES = 64
"""Files that the process can open besides its connections."""
STRANGERS_BYTES = 32 << 20
"""Limit of what all connections of clients that are not let in hold together, in bytes of this
process."""
_MAX_WAITING = 32
_MAX_SLICE = 512
"""Requests of a connection that wait for the answer to another one, or are answered in one turn of
the event loop; and bytes that may hold about as many of them."""
_MAX_SMALL_READ = 16 << 10
"""Bytes above which no more are read in the same turn of the event loop: each chunk of a body can
have one.
"""
_MAX_MESSAGES = 256
_MAX_MESSAGES_SLICE = 8 << 10
"""Messages of a WebSocket that wait to be taken, after which no more are parsed; and bytes parsed
in one turn."""
_REQUEST_BYTES = 3000
_HEADER_BYTES = 200
_MESSAGE_BYTES = 400
"""Costs of the objects of a request, a header and a message besides their own bytes."""
_UNCOUNTED_BYTES = 4096
_NEVER = float("inf")
_IDLE_S = 75
GRACE_S = 10
"""Seconds that open connections get at the end of the server."""
_LINGER_S = 1.5
_CLOSE_S = 2.0
"""Seconds that a WebSocket waits for the client's agreement to its end."""
_POLL_S = 0.05
_UNREAD_AT_END_S = 1.0


class WebServer(uvicorn.Server):
    """App on a port.

    Attributes:
        app: the app.
        options: the options.
        guard: the check of who asks.
        strangers: what connections of clients that are not let in hold together.
        newcomers: connections of clients that are not let in, the oldest first.
        port: its port.
        url: its address, such as ``http://127.0.0.1:8000``.
    """

    def __init__(self, app: App, options: WebOptions) -> None:
        """Prepare to listen.

        Raises:
            ConfigError: options can't be applied.
            SecurityError: the token is unsafe (also a ConfigError).
        """
        self.app = app
        self.options = options
        self.port = options.port
        self.url = ""
        self._heads: dict[Any, bytes] = {}
        self.guard = Guard(options)
        self.strangers = Budget(STRANGERS_BYTES)
        self.newcomers: dict[_Connection, None] = {}
        app.check = self.guard.check
        app.headers_for = self.guard.headers_for
        app.max_body_bytes = options.max_body_bytes
        app.budget.max_bytes = max(HELD_BYTES, 4 * options.max_body_bytes)
        self._log = None if options.access_log is None else AccessLog(options.access_log)
        if self._log is not None:
            app.on_answer.append(self._log.note)
        # it has a line for each malformed request
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            cast("Any", app),
            http=cast("Any", partial(_Connection, self)),
            ws=cast("Any", partial(_Socket, self)),
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=GRACE_S,
            ws_max_size=options.max_body_bytes,
            ws_per_message_deflate=False,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--tls-cert {options.tls_cert} can't be used: {error.strerror or error}.",
                key="tls_cert",
                value=str(options.tls_cert),
            ) from error
        super().__init__(config)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Listen; at the end, answer the accepted requests, for at most ten seconds, and close.

        Raises:
            ConfigError: the address can't be listened on.
        """
        self.app.closing = asyncio.get_running_loop().create_future()
        raise_open_file_limit()
        self.max_connections = min(
            MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES
        )
        listener = listen(self.options)
        self.port = listener.getsockname()[1]
        self.url = url_of(self.options, listener)
        self.lifespan = self.config.lifespan_class(self.config)
        accepting = Tasks(lambda error: None)  # which it has logged
        if self.config.ssl is None:
            await self.startup([listener])
        else:
            self.servers = []
            accepting.start(self._accept(listener, accepting), "web-accept")
        if self.config.ssl is None and not is_loopback(self.options.host):
            logger.warning(
                "%s is not encrypted: others on its way can read requests and the token", self.url
            )
        tasks = Tasks(lambda error: None)
        tasks.start(self.main_loop(), "web-server")
        try:
            yield self
        finally:
            self.app.closing.set_result(None)  # streams end by themselves
            await accepting.close()
            await self.shutdown([listener])
            await tasks.close()
            if self._log is not None:
                with suppress(OSError):  # a full disk costs lines alone
                    self._log.close()

    async def _accept(self, listener: socket.socket, tasks: Tasks) -> None:
        """Accept connections and shake hands by TLS, with as many at a time as there may be
        newcomers; a server of asyncio has no limit.
        """
        handshakes: dict[asyncio.Task[None], None] = {}
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:  # for example without free descriptors
                await asyncio.sleep(_POLL_S)
                continue
            task = tasks.start(self._shake_hands(accepted), "web-handshake")
            handshakes[task] = None
            task.add_done_callback(lambda done: handshakes.pop(done, None))
            num_connections = len(handshakes) + len(self.server_state.connections)
            if len(handshakes) > MAX_NEWCOMERS or num_connections > self.max_connections:
                oldest = next(iter(handshakes))
                del handshakes[oldest]
                oldest.cancel()
            await asyncio.sleep(0)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        connection = partial(
            _Connection,
            self,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                connection,
                accepted,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self.options.arrive_s,
            )

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, answer the requests that have arrived, and close; what no one reads waits
        for a second.
        """
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        ends_at = time.monotonic() + GRACE_S
        while (state.connections or state.tasks) and time.monotonic() < ends_at:
            for connection in self._connections():
                if not connection.ends:  # also one that has just been accepted
                    connection.shutdown()
            self._check_connections(min(self.options.arrive_s, _UNREAD_AT_END_S))
            await asyncio.sleep(_POLL_S)
        for connection in self._connections():
            connection.transport.abort()
        for task in state.tasks:
            task.cancel()

    def head_of(self, response: Response, keep_alive: bool) -> bytes:
        """Return the head of an answer in HTTP/1.1.

        All of it but the length is kept for up to a second.
        """
        key = response[1:], keep_alive
        head = self._heads.get(key)
        if head is None:
            headers = [*self.server_state.default_headers, *headers_of(response)]
            if not keep_alive:
                headers += CLOSING
            lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"content-length"]
            head = STATUS_LINE[response.status] + b"".join(lines)
            self._heads[key] = head
        return head + b"content-length: %d\r\n\r\n" % len(response.body)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, set the date and close late connections; more often if they have less
        time.
        """
        if counter % 10 == 0:
            self._heads.clear()
        if counter % 10 == 0 or self.options.arrive_s < 1.0:
            self._check_connections(self.options.arrive_s)
        return await super().on_tick(counter)

    def _check_connections(self, unread_s: float) -> None:
        """End connections whose request is late, or whose answers no one reads for `unread_s`."""
        now = time.monotonic()
        for connection in self._connections():
            connection.unread.check(connection.transport, connection.is_blocked, now, unread_s)
            connection.check_deadline(now)

    def _connections(self) -> list[_Connection | _Socket]:
        return cast("list[_Connection | _Socket]", list(self.server_state.connections))


async def serve(
    app: App, options: WebOptions, announce: Callable[[str], str] | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM; with an inherited socket, until the parent is gone.

    Args:
        app: the app.
        options: the options.
        announce: makes a line from the server's address, which is printed once the server listens.

    Raises:
        ConfigError: as `WebServer`.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_stop_signals(lambda name: stopped.set())
    async with WebServer(app, options).running() as server:
        if options.inherited is not None:
            watch_parent(
                lambda: loop.call_soon_threadsafe(stopped.set), grace_s=GRACE_S + _LINGER_S
            )
        if announce is not None:
            sys.stdout.write(f"{announce(server.url)}\n")
            sys.stdout.flush()
        await stopped.wait()
        if options.inherited is not None and server.server_state.tasks:
            await asyncio.sleep(_LINGER_S)  # streams show that the parent has ended


class _Unread:
    """Answers that a client does not read: its connection ends if none of their bytes leaves for
    some time.
    """

    __slots__ = ("_num_bytes", "_since")

    def __init__(self) -> None:
        self._num_bytes = -1
        self._since = 0.0

    def check(
        self, transport: asyncio.Transport, is_blocked: bool, now: float, limit_s: float
    ) -> None:
        """Note whether bytes have left since the last check; end the connection if it is time."""
        if not is_blocked and not transport.is_closing():
            self._num_bytes = -1
            return
        num_bytes = transport.get_write_buffer_size()
        if num_bytes != self._num_bytes:
            self._num_bytes = num_bytes
            self._since = now
        elif now - self._since > limit_s:
            transport.abort()


class _Flow(FlowControl):
    """Flow control that doesn't continue reading while as many requests wait as may.

    Attributes:
        is_full: True while they do.
    """

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class _Connection(HttpToolsProtocol):
    """Connection with a deadline for requests, limits of their sizes and number, and a short way to
    quick handlers.

    A request for a quick handler that arrives as a whole is answered without a task, and without
    ASGI.

    Attributes:
        deadline: time by which the request has to be complete, by the monotonic clock.
        unread: answers that the client doesn't read.
        ends: True if it ends with the answers to the requests that have arrived.
    """

    flow: _Flow

    def __init__(self, server: WebServer, **state: Any) -> None:
        super().__init__(**state)
        self._server = server
        self._app = server.app
        self._options = server.options
        self._head_bytes = 0  # also of lines behind a body, or between its parts
        self._is_in_head = False
        self._is_in_request = False
        self._has_body = False  # the data parsed last has a part of a body
        # a request for a quick handler, without its body so far
        self._without_body: tuple[RequestResponseCycle, Request] | None = None
        self._rest = b""  # received, but not parsed, because as many requests wait as may
        self._num_answered = 0  # requests for quick handlers, in this turn of the event loop
        self._share = Share(server.strangers)
        self._is_let_in = False
        self._is_over = False  # after a refusal; the rest of its request is not kept
        self.ends = False
        self.unread = _Unread()
        self.deadline = time.monotonic() + self._options.arrive_s

    @property
    def is_blocked(self) -> bool:
        """True while answers wait for the client to read."""
        return self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.flow = _Flow(transport)
        is_own = False
        if self._server.guard.asks_user:
            is_own = is_own_connection(cast("Any", self.client), cast("Any", self.server))
            self.app_state = {**self.app_state, USER: is_own}
        if len(self.connections) > self._server.max_connections:
            self.refuse(503, "The server has as many connections as it takes. Try again later.")
        elif not is_own:
            self._server.newcomers[self] = None
            if len(self._server.newcomers) > MAX_NEWCOMERS:
                oldest = next(iter(self._server.newcomers))
                oldest.refuse(503, "Others need the connection. Try again later.")
                self._server.newcomers.pop(oldest, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._share.resize(0)
        self._server.newcomers.pop(self, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_bytes()

    # What arrives
    # ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._rest:  # reading was paused too late
            self._rest += data
            self._count_bytes()
            return
        newest = self.cycle
        is_idle = self.cycle is None or self.cycle.response_complete
        # a request has an empty line at least; a body in lines has none
        if len(data) > _MAX_SLICE and data.count(b"\n\r\n") + data.count(b"\n\n") > _MAX_WAITING:
            self._feed_in_slices(data)
        else:
            self._feed(data)
            if self._is_full:
                self._wait_for_answers()
        # ends of lines without a request
        if is_idle and self.cycle is newest and self.deadline == _NEVER:
            self.deadline = time.monotonic() + self._options.arrive_s
        if self._is_in_head or self.pipeline or self._rest or self._share.num_bytes:
            self._count_bytes()
        if len(data) > _MAX_SMALL_READ and self.transport.get_protocol() is self:
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Read again, in a later turn than much that has arrived: libuv reads up to 32 times in
        one.
        """
        if self.transport.is_closing():
            return
        owner = cast("_Connection | _Socket", self.transport.get_protocol())
        is_paused = owner.flow.read_paused if isinstance(owner, _Connection) else owner.read_paused
        if not is_paused:
            self.transport.resume_reading()

    def _feed_in_slices(self, data: bytes) -> None:
        """Parse requests until as many wait as may, and keep the rest."""
        for start in range(0, len(data), _MAX_SLICE):
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if self._is_full:
                self._rest = data[start:]
                self._wait_for_answers()
                return
            self._feed(data[start : start + _MAX_SLICE])

    def _feed(self, data: bytes) -> None:
        self._has_body = False
        super().data_received(data)
        if self._without_body is not None:  # its body takes longer
            cycle, request = self._without_body
            self._without_body = None
            self._start_task(cycle, request)
        if self._is_in_head:
            end_of_last_head = max(0, data.rfind(b"\r\n\r\n"))
            self._head_bytes += len(data) - end_of_last_head
            if self._head_bytes > _MAX_HEAD_BYTES or len(self.headers) > _MAX_HEADERS:
                self._refuse_head()
        elif self._is_in_request and not self._has_body:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse_head()

    @property
    def _is_full(self) -> bool:
        return max(len(self.pipeline), self._num_answered) >= _MAX_WAITING

    def _wait_for_answers(self) -> None:
        self.flow.pause_reading()
        self.flow.is_full = True

    def _begin_turn(self) -> None:
        self._num_answered = 0
        self._resume()

    def _resume(self) -> None:
        """Parse what had to wait."""
        if self.flow.is_full and not self._is_full and not self.transport.is_closing():
            self.flow.is_full = False
            rest = self._rest
            self._rest = b""
            if rest:
                self._feed_in_slices(rest)
            if not self.flow.is_full:
                self.flow.resume_reading()
            self._count_bytes()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_request = True
        self._is_in_head = True
        self._head_bytes = 0
        if self.deadline == _NEVER:  # the first request has to come within that of the connection
            self.deadline = time.monotonic() + self._options.arrive_s

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # others come behind the body, and are not kept
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.headers) > _MAX_HEADERS:
            self._refuse_head()
        self._is_in_head = False
        if not self._is_over:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_request = False
        if self._is_over:
            self.transport.close()
            return
        self.deadline = _NEVER
        super().on_message_complete()
        if self._without_body is not None and self._without_body[0] is self.cycle:
            cycle, request = self._without_body
            self._without_body = None
            self._answer(cycle, request)

    def handle_websocket_upgrade(self) -> None:
        if not self._is_over and not self.transport.is_closing():
            super().handle_websocket_upgrade()
            self._share.resize(0)
            self._server.newcomers.pop(self, None)

    # Answers
    # ----------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._is_over or self.transport.is_closing():
            return
        request = Request(cycle.scope, cast(Receive, cycle.receive), self._app.max_body_bytes)
        is_quick = (
            request.path in self._app.quick
            and request.method == "POST"
            and not cycle.waiting_for_100_continue
            and not self.flow.write_paused
            and not self.pipeline  # or answers given at once would be nested in each other
        )
        if not is_quick:
            self._start_task(cycle, request)
        elif self._let_in(cycle, request):
            if cycle.more_body:
                self._without_body = cycle, request
            else:
                self._answer(cycle, request)

    def _start_task(self, cycle: RequestResponseCycle, request: Request) -> None:
        """Answer by ASGI. Who is not let in is refused now, before the body is kept."""
        try:
            route = self._app.route_of(request)
        except Refusal as refusal:
            if refusal.status in (401, 403):
                self._refuse_before_body(cycle, request, refusal)
                return
        else:
            cast("dict[str, Any]", cycle.scope)[ROUTE] = route
            _, _, is_open = route
            if not (self._is_let_in or is_open):
                self._let_in_connection()
        super()._start_asgi_task(cycle, self.app)

    def _let_in(self, cycle: RequestResponseCycle, request: Request) -> bool:
        """Check a request for a quick handler before its body; return False if it was refused."""
        try:
            self._app.check(request)
        except Exception as error:
            self._refuse_before_body(cycle, request, error)
            return False
        if not self._is_let_in:
            self._let_in_connection()
        return True

    def _let_in_connection(self) -> None:
        self._is_let_in = True
        self._share.move_to(self._app.budget)
        self._server.newcomers.pop(self, None)

    def _refuse_before_body(
        self, cycle: RequestResponseCycle, request: Request, error: Exception
    ) -> None:
        """Answer a request of which only the head is needed; the connection is closed after its
        body.
        """
        response = self._app.readable(request, failed(error))
        body = b"" if request.method == "HEAD" else response.body
        self._is_over = True
        cycle.response_started = cycle.response_complete = True
        self.transport.write(self._server.head_of(response, keep_alive=False) + body)
        self._app.note(request, response.status, time.perf_counter())
        self.pipeline.clear()
        if cycle.more_body:
            self.flow.resume_reading()
        else:
            self.transport.close()

    def _answer(self, cycle: RequestResponseCycle, request: Request) -> None:
        if not self._num_answered:
            self.loop.call_soon(self._begin_turn)
        self._num_answered += 1
        began = time.perf_counter()
        ask, status = self._app.quick[request.path]

        def answer() -> dict[str, Any] | Reply:
            if len(cycle.body) > request.max_bytes:
                raise request.too_large()
            return ask(bytes(cycle.body), {})

        def respond(reply: Reply) -> None:
            try:
                response = json_response(reply.result(), status=status)
            except Exception as error:
                response = failed(error)
            cycle.response_started = cycle.response_complete = True
            self._write(self._app.readable(request, response), keep_alive=cycle.keep_alive)
            self.on_response_complete()
            self._app.note(request, response.status, began)

        reply_of(answer).add_done_callback(respond)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.ends and not self.pipeline:
            self.transport.close()
        if len(self.cycle.body) > _UNCOUNTED_BYTES and self.cycle.response_complete:
            self.cycle.body = bytearray()
        if self.flow.is_full:
            self.loop.call_soon(self._resume)  # the parser could be at work now
        elif self._share.num_bytes:
            self._count_bytes()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "The request is not valid HTTP.")

    def _refuse_head(self) -> None:
        self.refuse(
            431, f"The headers may have at most {_MAX_HEAD_BYTES:,} bytes, in {_MAX_HEADERS} lines."
        )

    def refuse(self, status: int, sentence: str) -> None:
        """Answer without the app, and close the connection."""
        if self._is_over or self.transport.is_closing():
            self.transport.close()
            return
        now = time.monotonic()
        age_s = max(0.0, now - self.deadline + self._options.arrive_s)  # 0 without a request
        self.deadline = _NEVER
        self._is_over = True
        if self._is_in_head or self.cycle is None or not self.cycle.response_started:
            scope: dict[str, Any] = {
                "method": "-",
                "raw_path": b"-",
                "client": self.client,
                "path": "",
                "headers": (),
            }
            if not self._is_in_head and self.cycle is not None:
                asgi_scope = cast("dict[str, Any]", self.cycle.scope)
                asgi_scope[REFUSED] = True
                for name in ("method", "raw_path", "headers"):
                    scope[name] = asgi_scope[name]
            request = Request(scope, cast(Receive, None), 0)
            response = self._app.readable(
                request, json_response({"error": sentence}, status=status)
            )
            self._write(response, keep_alive=False)
            self._app.note(request, status, time.perf_counter() - age_s)
        self._rest = b""
        self.pipeline.clear()
        self.transport.close()

    def _write(self, response: Response, *, keep_alive: bool) -> None:
        if not self.transport.is_closing():
            self.transport.write(self._server.head_of(response, keep_alive) + response.body)
            if not keep_alive:
                self.transport.close()

    # Limits
    # ----------------------------------------------------------------------------------------------

    def _count_bytes(self) -> None:
        """Count what the connection holds; end it if that is too much next to what others hold."""
        if self.transport.is_closing():
            return
        num_bytes = len(self._rest) + self.transport.get_write_buffer_size()
        if self._is_in_head:
            num_bytes += 2 * self._head_bytes + _HEADER_BYTES * len(self.headers)
        if self.cycle is not None and not self.pipeline:
            num_bytes += len(self.cycle.body)
        for cycle, _ in self.pipeline:
            num_headers = len(cast("list[Any]", cycle.scope["headers"]))
            num_bytes += _REQUEST_BYTES + _HEADER_BYTES * num_headers + len(cycle.body)
        if not self._share.resize(num_bytes if num_bytes > _UNCOUNTED_BYTES else 0):
            is_blocked = self.flow.write_paused
            self.refuse(503, full().sentence)
            if is_blocked:
                self.transport.abort()

    def check_deadline(self, now: float) -> None:
        """Refuse a request that is late, unless it waits to be read."""
        if self.deadline == _NEVER:
            return
        if self.flow.read_paused and not self._is_over:
            self.deadline = now + self._options.arrive_s
        elif self.deadline < now:
            self.refuse(408, "The request did not arrive in time.")

    def shutdown(self) -> None:
        """End after the answers to the requests that have arrived as a whole."""
        self._rest = b""
        self.ends = True
        is_answered = self.cycle is None or self.cycle.response_complete
        is_partial = not is_answered and self.cycle.more_body
        if is_partial and self.pipeline:
            self.pipeline.popleft()  # the newest one; others are before it
        elif is_partial:
            self.refuse(503, "The server ends. Try again later.")
        elif is_answered:
            self.transport.close()
        else:
            self.cycle.keep_alive = False


class _Socket(WebSocketsSansIOProtocol):
    """Connection of a WebSocket that can also send without waiting, and ends after the messages
    received so far.

    Attributes:
        unread: messages that the client doesn't read.
        ends: True if it ends with the answers to the messages that were parsed.
        is_exempt: True if what it holds is in no budget.
    """

    def __init__(self, server: WebServer, **state: Any) -> None:
        super().__init__(**state)
        self._server = server
        self._rest = b""  # received, but not parsed
        self._will_parse = False
        self.ends = False
        self.is_exempt = False
        self._queued_bytes = 0
        self._share = Share(server.strangers)
        self._partial_by = _NEVER  # time by which a message that has begun must be complete
        self.close_timeout = _CLOSE_S
        self.unread = _Unread()

    @property
    def is_blocked(self) -> bool:
        """True while messages wait for the client to read."""
        return not self.writable.is_set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._share.resize(0)

    # What arrives
    # ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        # much more than an agreement to the end
        if self.close_sent and len(data) > _MAX_MESSAGES_SLICE:
            self.transport.abort()
            return
        if (
            self._rest
            or len(data) > _MAX_MESSAGES_SLICE
            or (self.handshake_initiated and not self.handshake_complete)
        ):
            self._rest += data
            self._pause()
            self._parse_soon()
        else:
            super().data_received(data)
        self._count_bytes()

    def _parse_soon(self) -> None:
        if not self._will_parse:
            self._will_parse = True
            self.loop.call_soon(self._parse)

    def _parse(self) -> None:
        """Parse a part of what has arrived, unless it has to wait; other connections have their
        turns in between.
        """
        self._will_parse = False
        if (
            not self.handshake_complete
            or self.queue.qsize() >= _MAX_MESSAGES
            or self.transport.is_closing()
        ):
            return
        part = self._rest[:_MAX_MESSAGES_SLICE]
        self._rest = self._rest[_MAX_MESSAGES_SLICE:]
        super().data_received(part)
        self._resume()

    async def receive(self) -> Any:
        """Return the next event; see ASGI."""
        if self._rest and self.queue.empty():
            self._parse_soon()
        event = cast("dict[str, Any]", await self.queue.get())
        self._queued_bytes -= len(event.get("bytes") or event.get("text") or b"")
        if self.read_paused:
            self._resume()
        return event

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        if self._share.num_bytes:
            self._count_bytes()
        if self._rest:
            self._parse_soon()
        elif self.read_paused and self.queue.empty() and self.writable.is_set() and not self.ends:
            self.read_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pause()  # or answers to pings would pile up
        self._count_bytes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume()

    def handle_cont(self, event: Frame) -> None:
        """Join a frame to its message now: empty frames would cost more than their bytes."""
        message = cast("bytes | bytearray", self.frames[0])
        if isinstance(message, bytes):
            message = bytearray(message)
        message += event.data
        self.frames = [cast("bytes", message)]
        if event.fin:
            self.frames = [bytes(message)]
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        if not self.close_sent:
            self._queued_bytes += len(self.frames[0])
        self._partial_by = _NEVER
        super().send_receive_event_to_app()

    # Limits
    # ----------------------------------------------------------------------------------------------

    def _count_bytes(self) -> None:
        """Count what the connection holds; end it if that is too much next to what others hold."""
        if self.transport.is_closing() or self.is_exempt:
            return
        if self.handshake_complete:
            self._share.move_to(self._server.app.budget)
        num_bytes = len(self._rest) + len(self.conn.reader.buffer) + sum(map(len, self.frames))
        num_bytes += self._queued_bytes + _MESSAGE_BYTES * self.queue.qsize()
        num_bytes += self.transport.get_write_buffer_size()
        if not self._share.resize(num_bytes if num_bytes > _UNCOUNTED_BYTES else 0):
            self._fail(1013, full().sentence)

    def _fail(self, code: int, reason: str) -> None:
        is_blocked = self.is_blocked
        self.conn.fail(code, reason)
        if self.conn.close_sent is None or is_blocked:
            self.transport.abort()
        else:
            self.handle_parser_exception()

    def check_deadline(self, now: float) -> None:
        """End the connection if a message that has begun is late, unless it waits to be read."""
        if (
            self.transport.is_closing()
            or self.read_paused
            or not (self.frames or self.conn.reader.buffer)
        ):
            self._partial_by = _NEVER
        elif self._partial_by == _NEVER:
            self._partial_by = now + self._server.options.arrive_s
        elif self._partial_by < now:
            self._fail(1008, "The message did not arrive in time.")

    # What leaves
    # ----------------------------------------------------------------------------------------------

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
        if not self.writable.is_set():
            self._count_bytes()

    def shutdown(self) -> None:
        """End after the messages that were parsed."""
        self._rest = b""
        self.ends = True
        self._pause()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": ENDING})
