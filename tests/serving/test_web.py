"""Server parts: routes, errors, limits, tokens, TLS, access log, streams, WebSockets and a graceful
end.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import gc
import http.client
import json
import os
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from gymnasium import spaces
from processes import wait_until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from aiorl.config.command_line import Parser
from aiorl.errors import ConfigError, SecurityError
from aiorl.process.tasks import new_event_loop
from aiorl.serving.values import parse_value
from aiorl.web import peers
from aiorl.web.access import WebOptions, add_web_options, web_options
from aiorl.web.app import (
    App,
    Refusal,
    Reply,
    Request,
    Response,
    WebSocket,
    json_response,
    parse_json,
)
from aiorl.web.origins import read_origins
from aiorl.web.peers import is_own_connection
from aiorl.web.server import WebServer

UPGRADE = (
    b"GET /talk HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)


class Site:
    """An app whose handlers wait for the test, in a thread with a loop of its own."""

    def __init__(self, **options: Any) -> None:
        self.app = App()
        self.app.add("GET", "/live", self.live, is_open=True)
        self.app.add("GET", "/failing", self.fail)
        self.app.add("GET", "/slow", self.slow)
        self.app.add("GET", "/events", self.events)
        self.app.add("POST", "/echo/{name}/end", self.echo)
        self.app.add_json_route("POST", "/quick", self.quick)
        self.app.add("WEBSOCKET", "/talk", self.talk)
        self.asked, self.go_on, self.left = threading.Event(), threading.Event(), threading.Event()
        self.server = WebServer(self.app, WebOptions(**options))
        self._started, self._stop = threading.Event(), asyncio.Event()
        self.loop = new_event_loop()
        self._thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(self._run()), daemon=True
        )

    async def _run(self) -> None:
        async with self.server.running():
            self._started.set()
            await self._stop.wait()

    def __enter__(self) -> Site:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)

    def __exit__(self, *error: object) -> None:
        self.go_on.set()
        self.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.loop.close()

    async def live(self, request: Request) -> Response:
        return Response(b"live", content_type=b"text/plain")

    async def fail(self, request: Request) -> Response:
        raise ValueError("a secret of the server")

    async def slow(self, request: Request) -> Response:
        self.asked.set()
        await asyncio.to_thread(self.go_on.wait, 10)
        return json_response({"done": True})

    async def events(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                for number in range(1 << 30):
                    yield b"data: %d\n\n" % number
                    await asyncio.sleep(0 if number < 2 else 60)
            finally:
                self.left.set()

        return Response(content_type=b"text/event-stream", stream=parts())

    async def echo(self, request: Request) -> Response:
        given = parse_json(await request.body())
        if not isinstance(given, dict):
            raise Refusal(422, f"Expected an object,\nnot {given}.")
        return json_response({**given, "name": request.names["name"], "query": request.query})

    def quick(self, said: dict[str, Any]) -> Reply:
        if "bad" in said:
            raise Refusal(422, "bad")
        found = Reply()
        answer = ValueError("a secret") if "fail" in said else {"size": len(said.get("x", ""))}
        asyncio.get_running_loop().call_later(0.01, found.set_result, answer)
        return found

    async def talk(self, talk: WebSocket) -> None:
        if talk.request.query:
            self.asked.set()
            await asyncio.to_thread(self.go_on.wait, 10)
        while (said := await talk.receive()) is not None:
            talk.write([said])

    def ask(
        self, method: str, path: str, body: Any = None, headers: Any = None
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            said = answer.read()
            is_json = answer.headers["content-type"] == "application/json"
            return (
                answer.status,
                json.loads(said) if is_json and said else said,
                dict(answer.headers),
            )
        finally:
            connection.close()

    @contextmanager
    def raw(self) -> Iterator[socket.socket]:
        with socket.socket() as found:
            # a client that doesn't read is soon noticed
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            found.settimeout(10)
            found.connect(("127.0.0.1", self.server.port))
            yield found


def everything(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def send_endlessly(connection: socket.socket, sent: bytes) -> None:
    while True:
        connection.sendall(sent)


def test_answers_and_errors_are_plain_json() -> None:
    with Site(max_body_bytes=2000) as site:
        assert site.ask("GET", "/live")[:2] == (200, b"live")
        status, said, headers = site.ask("HEAD", "/live")
        assert (status, said, headers["content-length"]) == (200, b"", "4")
        status, said, _ = site.ask("POST", "/echo/a%2Fb/end?x=1", b'{"a": [1, null]}')
        assert (status, said) == (200, {"a": [1, None], "name": "a/b", "query": {"x": "1"}})
        for method, path, body, expected, fact in [
            ("POST", "/quick", b" " * 2001, 413, "2,000"),
            ("POST", "/echo/a/end", b"[1", 400, "JSON"),
            ("POST", "/echo/a/end", b"[" * 1500, 400, "JSON"),
            ("POST", "/echo/a/end", b"[1]", 422, "[1]"),
            ("POST", "/echo/a/end", b" " * 2001, 413, "2,000"),
            ("POST", "/echo/a/end", b" " * 3_000_000, 413, "2,000"),
            ("POST", "/echo/a/end", iter([b" " * 1500] * 3), 413, "2,000"),
            ("POST", "/live", b"{}", 405, "GET"),
            ("GET", "/echo/a/end", None, 405, "POST"),
            ("GET", "/nothing", None, 404, "/nothing"),
            ("GET", "/failing", None, 500, "log"),
        ]:
            status, said, headers = site.ask(method, path, body)
            assert status == expected, path
            assert fact in said["error"]
            assert "\n" not in said["error"]
            assert "secret" not in said["error"]


def test_quick_requests_are_answered_in_order_whole_or_in_pieces() -> None:
    head = b"POST /quick HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    last = head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    bodies = [
        b'{"x":"1"}',
        b'{"bad":1}',
        b'{"x":"22"}',
        b'{"fail":1}',
        b'{"x":"%s"}' % (b"x" * 100_000),
        b"[1]",
        b"",
    ]
    sent = b"".join(head % len(body) + body for body in bodies)
    sent += b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" + last % 11 + b'{"x":"333"}'
    for size in (len(sent), 70, 1000):
        with Site() as site, site.raw() as connection:
            for start in range(0, len(sent), size):
                connection.sendall(sent[start : start + size])
            answers = [
                one.partition(b"\r\n\r\n") for one in everything(connection).split(b"HTTP/1.1 ")[1:]
            ]
            assert [head[:3] for head, _, _ in answers] == [
                b"200",
                b"422",
                b"200",
                b"500",
                b"200",
                b"400",
                b"200",
                b"200",
                b"200",
            ]
            said = [body for head, _, body in answers if head.startswith(b"200")]
            assert said == [b'{"size":%d}' % size for size in (1, 2, 100_000, 0)] + [
                b"live",
                b'{"size":3}',
            ]
            assert [b"connection: close" in head for head, _, _ in answers] == [False] * 8 + [True]


def test_thousands_of_requests_at_once_are_answered() -> None:
    head = b"POST /quick HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n"
    sent = (
        head % (b"", 2)
        + b"{}"
        + (head % (b"", 3) + b"[1]") * 3000
        + head % (b"connection: close\r\n", 0)
    )
    with Site() as site, site.raw() as connection:
        connection.sendall(sent)
        answers = everything(connection)
    assert (answers.count(b"HTTP/1.1 200"), answers.count(b"HTTP/1.1 400")) == (2, 3000)


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"],
)
def test_bytes_that_are_no_http_are_refused(sent: bytes) -> None:
    with Site() as site, site.raw() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection)[:12] in (b"HTTP/1.1 400", b"")
        assert site.ask("GET", "/live")[0] == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /live HT", 408),
        (b"", 408),
        (b"POST /echo/a/end HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n12", 408),
        (b"GET /live HTTP/1.1\r\nx: " + b"y" * 65_600, 431),
    ],
)
def test_slow_and_endless_requests_are_refused(sent: bytes, status: int) -> None:
    with Site(arrive_s=0.1) as site, site.raw() as connection:
        connection.sendall(sent)
        assert b" %d " % status in everything(connection)[:13]


def test_requests_of_a_connection_wait_for_answers_without_being_read() -> None:
    asked = b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n"
    further = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = further.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with Site() as site, site.raw() as connection:
        connection.sendall(asked + 3000 * further + last)
        assert site.asked.wait(10)
        (waiting,) = site.server.server_state.connections
        wait_until(lambda: waiting.flow.is_full)
        assert len(waiting.pipeline) <= 64
        site.go_on.set()
        answers = everything(connection)
    assert answers.count(b"HTTP/1.1 200") == 3002
    assert site.server.strangers.num_bytes == site.app.budget.num_bytes == 0


@pytest.mark.parametrize("is_let_in", [False, True])
def test_what_connections_hold_together_is_limited(
    is_let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiorl.web.server.HELD_BYTES", 100_000)
    monkeypatch.setattr("aiorl.web.server.STRANGERS_BYTES", 100_000)
    head = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
    if is_let_in:
        head = b"POST /echo/a/end HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000\r\n\r\n"
    with Site(max_body_bytes=20_000) as site, ExitStack() as stack:
        budget = site.app.budget if is_let_in else site.server.strangers
        refused: list[bytes] = []
        for _ in range(20):
            connection, before = stack.enter_context(site.raw()), budget.num_bytes
            connection.sendall(head + (b" " if is_let_in else b"x:") + b"y" * 18_000)
            connection.settimeout(0)

            def is_noted(connection: socket.socket = connection, before: int = before) -> bool:
                with suppress(BlockingIOError):
                    refused.append(connection.recv(1000))
                return bool(refused) or budget.num_bytes > before

            wait_until(is_noted)
            if refused:
                break
        assert refused[0].startswith(b"HTTP/1.1 503")
        assert budget.num_bytes <= 100_000
        stack.close()
        wait_until(lambda: budget.num_bytes == 0)
        assert site.ask("POST", "/echo/a/end", b"{}")[0] == 200


def test_a_body_in_many_chunks_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is parsed in a turn than one read brings, 256 KiB."""
    num_chunks = 200_000
    head = b"GET /live HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    turn = 0
    parsed = Counter[int]()
    with Site() as site, socket.create_connection(("127.0.0.1", site.server.port), 10) as client:

        def begin_turn() -> None:
            nonlocal turn
            turn += 1
            site.loop.call_soon(begin_turn)

        def count(connection: Any, body: bytes) -> None:
            parsed[turn] += 1

        monkeypatch.setattr(HttpToolsProtocol, "on_body", count)
        client.sendall(head + b"1\r\nx\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        site.loop.call_soon_threadsafe(begin_turn)
        site.loop.call_soon_threadsafe(time.sleep, 0.3)  # much has arrived after it
        client.sendall(b"1\r\nx\r\n" * num_chunks)
        wait_until(lambda: parsed.total() > num_chunks)
    assert max(parsed.values()) < 60_000


def test_many_quick_requests_of_a_client_leave_turns_to_others() -> None:
    num_requests = 3000
    request = b"POST /counted HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    turn = 0
    answered = Counter[int]()
    site = Site()

    def count(fields: dict[str, Any]) -> dict[str, Any]:
        answered[turn] += 1
        return {}

    def begin_turn() -> None:
        nonlocal turn
        turn += 1
        site.loop.call_soon(begin_turn)

    site.app.add_json_route("POST", "/counted", count)
    with site, socket.create_connection(("127.0.0.1", site.server.port), timeout=10) as client:
        site.loop.call_soon_threadsafe(begin_turn)
        site.loop.call_soon_threadsafe(time.sleep, 0.3)  # all of them have arrived after it
        client.sendall(request * num_requests)
        received = b""
        while received.count(b"HTTP/1.1 200") < num_requests:
            received += client.recv(1 << 20)
    assert max(answered.values()) < 50


@pytest.mark.parametrize("path", ["/quick", "/echo/a/end", "/nothing"])
@pytest.mark.parametrize("sent", [b"a: b\r\n" * 1000, b"a" * 6000], ids=["headers", "a name"])
def test_headers_behind_a_body_are_not_kept_and_limited(
    path: str, sent: bytes, tmp_path: Path
) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with Site(token_file=tmp_path / "token") as site, site.raw() as stranger:
        stranger.sendall(head.encode() + b"1\r\n{\r\n0\r\n")
        with pytest.raises(ConnectionError):
            stranger.sendall(sent * 2000)


def test_small_parts_of_a_body_can_come_one_by_one_with_headers_behind_them() -> None:
    head = b"POST /echo/a/end HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with Site() as site, site.raw() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        for part in (b"1\r\n", b"{", b"\r\n", b"1\r\n", b"}", b"\r\n", b"0\r\n", b"a: b\r\n\r\n"):
            connection.sendall(part)
            time.sleep(0.01)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_its_answers_is_cut_off() -> None:
    long = (
        b"POST /echo/a/end?x="
        + b"y" * 30_000
        + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    )
    with Site(arrive_s=0.1) as site, site.raw() as connection, pytest.raises(ConnectionError):
        send_endlessly(connection, long)


def test_who_is_not_let_in_is_refused_before_the_body_comes(tmp_path: Path) -> None:
    with Site(token_file=tmp_path / "token") as site:
        for path in ("/quick", "/echo/a/end"):
            with site.raw() as connection:
                connection.sendall(
                    f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999\r\n\r\n".encode()
                )
                head = connection.recv(1000)
                assert head.startswith(b"HTTP/1.1 401")
                assert b"connection: close" in head
                connection.sendall(b"x" * 999_999)
                assert everything(connection) == b""
        with site.raw() as connection:
            connection.sendall(
                b"POST /quick HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n" * 100
            )
            with suppress(ConnectionResetError):
                assert everything(connection).count(b"HTTP/1.1 401") == 1


def test_refused_requests_leave_nothing_behind() -> None:
    with Site() as site:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for path in ("/quick", "/echo/a/end"):
                for _ in range(4):
                    assert site.ask("POST", path, b"{" + b"x" * 2_000_000)[0] == 400
            for _ in range(4):
                assert site.ask("POST", "/quick", b'{"bad":"' + b"x" * 2_000_000 + b'"}')[0] == 422
            assert tracemalloc.get_traced_memory()[0] < 4_000_000
        finally:
            tracemalloc.stop()
            gc.enable()


def test_ends_of_lines_alone_keep_no_connection_open() -> None:
    with Site(arrive_s=0.1) as site, site.raw() as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"live"):
            received += connection.recv(1000)
        connection.sendall(b"\r\n")
        assert everything(connection) == b""


def test_messages_of_a_socket_that_are_not_complete_cost_little_and_end_it() -> None:
    mask, none = b"\x80" + bytes(4), {"max_size": None, "ping_interval": None}
    with Site(arrive_s=0.5) as site:
        url = f"ws://127.0.0.1:{site.server.port}/talk"
        for sent in (
            b"\x02" + mask + 20_000 * (b"\x00" + mask),
            b"\x82\xfe\xff\xff" + bytes(4) + b"half",
        ):
            with connect(url, **none) as talk:
                talk.socket.sendall(sent)
                with pytest.raises(ConnectionClosed) as caught:
                    talk.recv(10)
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 1008
        with connect(url, **none) as talk:
            talk.send(["a", "", "b"])
            assert talk.recv(10) == "ab"
            talk.ping()
            for _ in range(2):
                talk.send("x" * 60_000)
                assert talk.recv(10) == "x" * 60_000


def test_a_socket_whose_answers_are_not_read_is_cut_off() -> None:
    with Site(arrive_s=0.1) as site:
        # pings, and messages
        for sent in (
            b"\x89\xfd" + bytes(4 + 125),
            b"\x82\xfe\xff\x00" + bytes(4 + 65_280),
        ):
            with site.raw() as connection:
                connection.sendall(UPGRADE)
                assert connection.recv(1000).startswith(b"HTTP/1.1 101")
                with pytest.raises(ConnectionError):
                    send_endlessly(connection, sent)


def test_the_end_does_not_wait_for_what_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorl.web.server.GRACE_S", 1000.0)
    head = b"host: localhost\r\ncontent-length: 9\r\n\r\n12"
    partial = [
        b"GET /live HT",
        b"POST /quick HTTP/1.1\r\n" + head,
        b"POST /echo/a/end HTTP/1.1\r\n" + head,
    ]
    with ExitStack() as stack, Site() as site:  # which ends first
        for sent in (*partial, UPGRADE):
            stack.enter_context(site.raw()).sendall(sent)
        unread = stack.enter_context(site.raw())
        unread.setblocking(False)
        with suppress(BlockingIOError):
            send_endlessly(unread, b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        wait_until(lambda: len(site.server.server_state.connections) == 5)


def test_further_connections_than_allowed_are_refused_until_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiorl.web.server.MAX_CONNECTIONS", 2)
    with Site() as site:
        with site.raw() as first, site.raw() as second:
            for connection in (first, second):
                connection.sendall(b"GET /live HTTP/1.1\r\n\r\n")
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            assert site.ask("GET", "/live")[0] == 503
        while site.ask("GET", "/live")[0] == 503:
            pass


def test_clients_that_are_not_let_in_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiorl.web.server.MAX_NEWCOMERS", 2)
    with Site(token_file=tmp_path / "token") as site, ExitStack() as stack:
        token = (tmp_path / "token").read_text().strip()
        asked = f"GET /failing HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode()

        def ask(connection: socket.socket) -> None:
            connection.sendall(asked)
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(1000)
            assert received.startswith(b"HTTP/1.1 500")

        client = stack.enter_context(site.raw())
        ask(client)
        first, second = (stack.enter_context(site.raw()) for _ in range(2))
        wait_until(lambda: len(site.server.newcomers) == 2)
        third = stack.enter_context(site.raw())
        assert everything(first).startswith(b"HTTP/1.1 503")
        for connection in (client, second, third):
            ask(connection)


def test_a_token_is_required_and_made_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with Site(token_file=path) as site:
        token = path.read_text().strip()
        assert path.stat().st_mode & 0o777 == 0o600
        assert site.ask("GET", "/live")[0] == 200
        status, said, headers = site.ask("GET", "/slow")
        assert (status, "Bearer" in said["error"]) == (401, True)
        assert "Basic" in headers["www-authenticate"]
        for header in (
            f"Bearer {token}x",
            "Bearer",
            "Basic !",
            "Basic bm86bm8=",
            f"Digest {token}",
            "Bearer \xff",
        ):
            assert site.ask("GET", "/failing", headers={"Authorization": header})[0] == 401
        with (
            pytest.raises(Exception, match="401"),
            connect(f"ws://127.0.0.1:{site.server.port}/talk"),
        ):
            pass
        assert site.ask("GET", "/failing", headers={"Authorization": f"Bearer {token}"})[0] == 500
        headers = {"Authorization": f"Bearer {token}"}
        with connect(f"ws://127.0.0.1:{site.server.port}/talk", additional_headers=headers) as talk:
            talk.send("hello")
            assert talk.recv() == "hello"
    path.chmod(0o644)
    with pytest.raises(SecurityError, match="0644"):
        WebServer(App(), WebOptions(token_file=path))
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(SecurityError, match=str(path)):
        WebServer(App(), WebOptions(token_file=path))


@pytest.mark.parametrize("fault", ["others can read it", "it can't be made", "it has none"])
def test_this_user_is_let_in_without_a_token_that_can_not_be_private(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    if fault == "others can read it":
        path.write_text("a-token-that-others-read")
        path.chmod(0o666)
    elif fault == "it has none":
        path.touch(0o600)
    else:
        path = tmp_path / "missing" / "token"
    with Site(token_file=path, lets_user_in=True) as site:
        assert site.ask("GET", "/failing")[0] == 500
        monkeypatch.setattr("aiorl.web.server.is_own_connection", Mock(return_value=False))
        token = {"Authorization": "Bearer a-token-that-others-read"}
        assert site.ask("GET", "/failing", headers=token)[0] == 403, (
            "another user, who may have read the token"
        )
    assert [record.levelname for record in caplog.records if str(path) in record.getMessage()] == [
        "WARNING"
    ]
    for options in (
        WebOptions(token_file=path),
        WebOptions(token_file=path, lets_user_in=True, is_insecure=True),
    ):
        with pytest.raises(ConfigError) as caught:
            WebServer(App(), options)
        assert caught.value.key == "token_file"


def test_other_addresses_need_a_token_or_a_word(tmp_path: Path) -> None:
    parser = Parser("prog", "", "", "")
    add_web_options(parser, port=8000)
    found: Callable[..., WebOptions] = lambda *words: web_options(parser.parse(words), "prog")  # noqa: E731
    assert (found().host, found().port) == ("127.0.0.1", 8000)
    with pytest.raises(SecurityError, match=r"0\.0\.0\.0"):
        found("--host", "0.0.0.0")
    assert found("--host", "0.0.0.0", "--insecure").is_insecure
    assert found("--host", "::", "--token-file", str(tmp_path / "token")).host == "::"
    with pytest.raises(ConfigError, match="--tls-key"):
        found("--tls-cert", "a")
    with Site() as site, pytest.raises(ConfigError, match=str(site.server.port)):
        asyncio.run(WebServer(App(), WebOptions(port=site.server.port)).running().__aenter__())


@contextmanager
def other_user() -> Iterator[None]:
    os.seteuid(12345)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sockets of another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ports_on_loopback_admit_this_user_only(host: str, tmp_path: Path) -> None:
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    asked = (
        b"GET %s HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\nconnection:"
        b" close\r\n\r\n"
    )

    def status(site: Site, path: bytes, token: bytes = b"") -> bytes:
        with other_user():
            connection = socket.socket(family)
        with connection:
            connection.connect((host, site.server.port))
            connection.sendall(asked % (path, token))
            return everything(connection)[9:12]

    with Site(host=host) as site:
        assert (status(site, b"/failing"), status(site, b"/live"), status(site, b"/none")) == (
            b"403",
            b"200",
            b"404",
        )
        url = f"ws://{'[::1]' if host == '::1' else host}:{site.server.port}/talk"
        with connect(url) as talk:
            talk.send("a")
            assert talk.recv(10) == "a"
        with other_user():
            connection = socket.socket(family)
        connection.connect((host, site.server.port))
        with connection, pytest.raises(InvalidStatus) as caught, connect(url, sock=connection):
            pass
        assert caught.value.response.status_code == 403
    with Site(host=host, token_file=tmp_path / "also", lets_user_in=True) as site:
        token = (tmp_path / "also").read_bytes().strip()
        assert [status(site, b"/failing"), status(site, b"/failing", token)] == [b"401", b"500"]
        if host == "127.0.0.1":
            for headers, expected in (
                ({}, 500),
                ({"Host": "evil.example"}, 403),
                ({"Origin": "http://evil"}, 403),
            ):
                assert site.ask("GET", "/failing", headers=headers)[0] == expected
    with Site(host=host, is_insecure=True) as site:
        assert status(site, b"/failing") == b"500"
    with Site(host=host, token_file=tmp_path / "token") as site:
        token = (tmp_path / "token").read_bytes().strip()
        assert (status(site, b"/failing"), status(site, b"/failing", token)) == (b"401", b"500")


def test_the_user_of_a_connection_is_known_while_its_process_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = listener.getsockname()
        client = socket.create_connection(server)
        accepted, name = listener.accept()
        with accepted:
            assert is_own_connection(name, server)
            assert not is_own_connection(server, (name[0], 1))
            with monkeypatch.context() as patched:
                patched.setattr("aiorl.web.peers.uid_of", Mock(side_effect=OSError))
                assert is_own_connection(name, server), "found among this user's processes"
                assert not is_own_connection((name[0], 1), server)
            client.close()
            assert not is_own_connection(name, server)


@pytest.fixture
def _asks_anew() -> Iterator[None]:
    """Forget what this process knows of its kernel and its user, before and after a test."""
    for function in (peers.kernel_reports_users, peers.uid_of_strangers):
        function.cache_clear()
    yield
    for function in (peers.kernel_reports_users, peers.uid_of_strangers):
        function.cache_clear()


@contextmanager
def connected() -> Iterator[tuple[peers.Address, peers.Address]]:
    """Yield the ends of a connection of this process: the client's and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        accepted, name = listener.accept()
        with accepted:
            assert client.getsockname() == name
            yield name, listener.getsockname()


@pytest.mark.usefixtures("_asks_anew")
def test_this_user_is_let_in_where_the_kernel_finds_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks = Mock(return_value=-1)
    monkeypatch.setattr("aiorl.web.peers.uid_of", asks)
    with connected() as (client, server):
        assert is_own_connection(client, server)
        assert not is_own_connection((client[0], 1), server)
    assert asks.call_count <= 1, "the kernel is asked once"


@pytest.mark.usefixtures("_asks_anew")
def test_who_can_not_be_looked_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    too_many = Mock(side_effect=OSError(errno.EMFILE, "too many open files"))
    with connected() as (client, server):
        with monkeypatch.context() as patched:
            patched.setattr("aiorl.web.peers.uid_of", too_many)
            patched.setattr("psutil.process_iter", too_many)
            assert not is_own_connection(client, server)
        assert is_own_connection(client, server), "as soon as there are descriptors again"


@pytest.mark.usefixtures("_asks_anew")
@pytest.mark.parametrize(
    ("users", "is_known"),
    [
        ("         0          0 4294967295\n", True),
        ("0 1000 1\n", False),
        ("0 0 65534\n65535 65535 9\n", False),
        (None, True),
    ],
)
def test_nobody_is_a_user_where_all_users_are_known(
    users: str | None, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "overflow").write_text(f"{os.geteuid()}\n")
    if users is not None:
        (tmp_path / "map").write_text(users)
    monkeypatch.setattr("aiorl.web.peers.OVERFLOW_FILE", tmp_path / "overflow")
    monkeypatch.setattr("aiorl.web.peers.MAP_FILE", tmp_path / "map", raising=False)
    with connected() as (client, server):
        assert is_own_connection(client, server) == is_known


def test_pages_of_other_sites_may_not_ask() -> None:
    with Site() as site:
        here = f"127.0.0.1:{site.server.port}"
        for headers, expected in [
            ({"Host": "evil.example"}, 403),
            ({"Host": "[::1"}, 403),
            ({"Host": "localhost:1"}, 500),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Host": here, "Origin": f"http://{here}"}, 500),
        ]:
            assert site.ask("GET", "/failing", headers=headers)[0] == expected, headers
        with (
            pytest.raises(Exception, match="403"),
            connect(f"ws://{here}/talk", origin="http://evil.example"),
        ):
            pass
        asks_for = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        status, _, headers = site.ask("OPTIONS", "/quick", headers=asks_for)
        assert (status, "access-control-allow-origin" in headers) == (403, False)
        assert site.ask("OPTIONS", "/quick")[0] == 405


GAME = "https://game.example"


def test_pages_of_allowed_origins_get_permission_and_can_read_every_answer() -> None:
    with Site(allow_origins=(GAME,), max_body_bytes=2000) as site:
        for path, methods in (("/quick", "POST"), ("/echo/a/end", "POST"), ("/failing", "GET")):
            asks_for = {
                "Origin": GAME,
                "Access-Control-Request-Method": methods,
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            status, said, headers = site.ask("OPTIONS", path, headers=asks_for)
            assert (status, said, headers["access-control-allow-origin"]) == (200, b"", GAME)
            assert headers["access-control-allow-methods"] == methods
            assert headers["access-control-allow-headers"] == "authorization,content-type"
        for method, path, body, expected in (
            ("POST", "/quick", b"{}", 200),
            ("POST", "/quick", b'{"bad": 1}', 422),
            ("POST", "/quick", b" " * 2001, 413),
            ("POST", "/echo/a/end", b"{}", 200),
            ("GET", "/failing", None, 500),
            ("GET", "/nothing", None, 404),
            ("GET", "/live", None, 200),
        ):
            status, _, headers = site.ask(method, path, body, {"Origin": GAME})
            assert (status, headers.get("access-control-allow-origin")) == (expected, GAME)
            for other in ({}, {"Origin": "http://evil.example"}):
                _, _, headers = site.ask(method, path, body, other)
                assert "access-control-allow-origin" not in headers
        assert site.ask("POST", "/quick", b"{}", {"Origin": f"{GAME}:444"})[0] == 403


def test_pages_of_any_origin_must_send_the_token_by_themselves(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with Site(allow_origins=("*",), token_file=file, lets_user_in=True) as site:
        token = file.read_text().strip()
        password = base64.b64encode(f"aiorl:{token}".encode()).decode()
        assert site.ask("POST", "/quick", b"{}")[0] == 200, "a process of this user, and no page"
        for authorization, expected in (
            ("", 401),
            (f"Basic {password}", 401),
            (f"Bearer {token}x", 401),
            (f"Bearer {token}", 200),
        ):
            status, _, headers = site.ask(
                "POST", "/quick", b"{}", {"Origin": GAME, "Authorization": authorization}
            )
            assert (status, headers["access-control-allow-origin"]) == (expected, "*")
        url: Any = f"ws://127.0.0.1:{site.server.port}/talk"
        with connect(url, origin=GAME, subprotocols=["aiorl", f"token.{token}"]) as talk:
            talk.send("a")
            assert (talk.recv(10), talk.subprotocol) == ("a", "aiorl")
        for protocols in (None, ["aiorl"], ["aiorl", "token.x"]):
            with (
                pytest.raises(InvalidStatus) as caught,
                connect(url, origin=GAME, subprotocols=protocols),
            ):
                pass
            assert caught.value.response.status_code == 401


def test_origins_are_taken_as_browsers_send_them() -> None:
    texts = (
        "HTTPS://Game.example:443/",
        "http://localhost:8080",
        "app://1",
        "http://[::1]:80",
        "*",
    )
    assert read_origins(texts, key="k") == (GAME, *texts[1:3], "http://[::1]", "*")
    for text in ("game.example", f"{GAME}/play", "null", "file:///tmp/a", "https://*.example", ""):
        with pytest.raises(ConfigError) as caught:
            read_origins([text], key="allow_origin")
        assert (caught.value.key, repr(text) in str(caught.value)) == ("allow_origin", True)
    parser = Parser("serve", "", "", "")
    add_web_options(parser, port=0)
    with pytest.raises(SecurityError, match="token"):
        web_options({**parser.parse([]), "allow_origins": ["*"], "is_insecure": True}, "serve")


def test_a_stream_ends_when_its_client_leaves() -> None:
    with Site() as site:
        with site.raw() as connection:
            connection.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            said = b""
            while b"data: 2" not in said:
                said += connection.recv(1000)
            assert not site.left.is_set()
        assert site.left.wait(10)


def test_the_end_answers_what_was_accepted_and_ends_streams() -> None:
    with Site() as site, site.raw() as slow, site.raw() as events, site.raw() as idle:
        slow.sendall(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
        events.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        idle.sendall(b"GET /live HTTP/1.1\r\n\r\n")
        received = b""
        while not received.endswith(b"live"):  # it comes in two parts
            received += idle.recv(1000)
        assert site.asked.wait(10)
        with connect(f"ws://127.0.0.1:{site.server.port}/talk") as talk:
            talk.send(b"1")
            assert talk.recv() == b"1"
            site.stop()
            assert everything(idle) == b""
            assert everything(events).endswith(b"0\r\n\r\n")
            with pytest.raises(ConnectionClosed):
                talk.recv(timeout=10)
            with pytest.raises(OSError), site.raw():
                pass
            site.go_on.set()
            assert everything(slow).endswith(b'{"done":true}')


def test_a_message_that_was_received_before_the_end_is_answered() -> None:
    with Site() as site, connect(f"ws://127.0.0.1:{site.server.port}/talk?slow=1") as talk:
        assert site.asked.wait(10)
        (connection,) = site.server.server_state.connections
        talk.send("a")
        while not connection.queue.qsize():
            pass
        site.stop()
        site.loop.call_soon_threadsafe(site.go_on.set)
        assert talk.recv(10) == "a"
        with pytest.raises(ConnectionClosed, match="1001"):
            talk.recv(10)


def test_the_access_log_has_a_line_for_each_request_and_rotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiorl.web.access.MAX_BYTES", 2000)
    path = tmp_path / "access.log"
    with Site(access_log=path, token_file=tmp_path / "token") as site:
        token = (tmp_path / "token").read_text().strip()
        site.ask("GET", f"/failing?token={token}", headers={"Authorization": f"Bearer {token}"})
        site.ask("GET", "/a%0Ab")
        site.ask("GET", "/live")
        for _ in range(60):
            site.ask("GET", "/live")
    text = path.with_name("access.log.1").read_text() + path.read_text()
    assert path.stat().st_size < 2000
    assert token not in text
    assert all(len(line.split()) == 6 for line in text.splitlines())
    assert " GET /live 200 " in text
    with Site(access_log=Path("/dev/full")) as site:
        assert site.ask("GET", "/live")[0] == 200, "a full disk costs lines alone"


def test_connections_that_are_refused_are_logged_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiorl.web.server.MAX_CONNECTIONS", 1)
    path = tmp_path / "access.log"
    with Site(access_log=path, arrive_s=0.1) as site:
        counted: list[tuple[str, str, int]] = []
        site.app.on_answer.append(
            lambda request, status, seconds: counted.append((request.method, request.path, status))
        )
        for sent in (
            b"GET /live HT",
            b"nonsense\r\n\r\n",
            b"GET /live HTTP/1.1\r\nx: " + b"y" * 65_600,
            b"GET /live HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n",
            b"POST /echo/a/end HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n12",
        ):
            with site.raw() as connection:
                connection.sendall(sent)
                everything(connection)
            wait_until(lambda: not site.server.server_state.connections)
        with site.raw() as first, site.raw() as second:
            everything(second)
            first.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            everything(first)
    lines = [line.split()[2:5] for line in path.read_text().splitlines()]
    refused = [["-", "-", status] for status in ("408", "400", "431", "431")]
    assert lines == [
        *refused,
        ["POST", "/echo/a/end", "408"],
        ["-", "-", "503"],
        ["GET", "/live", "200"],
    ]
    assert [str(status) for _, _, status in counted] == [status for _, _, status in lines]
    assert {path for _, path, status in counted if status != 200} == {""}


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate of localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "2",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


def ask_by_tls(site: Site, cert: Path) -> bytes:
    context = ssl.create_default_context(cafile=str(cert))
    connection = http.client.HTTPSConnection(
        "localhost", site.server.port, timeout=10, context=context
    )
    connection.request("GET", "/live")
    with closing(connection):
        return connection.getresponse().read()


def test_tls_is_spoken_with_the_given_files(tls_files: tuple[Path, Path]) -> None:
    cert, key = tls_files
    with Site(tls_cert=cert, tls_key=key) as site:
        assert ask_by_tls(site, cert) == b"live"
        assert site.server.url.startswith("https://")
    with pytest.raises(ConfigError, match=str(key)):
        WebServer(App(), WebOptions(tls_cert=key, tls_key=key))


def test_clients_that_never_shake_hands_make_room_for_others(
    tls_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiorl.web.server.MAX_NEWCOMERS", 2)
    cert, key = tls_files
    with Site(tls_cert=cert, tls_key=key) as site, ExitStack() as stack:
        silent = [stack.enter_context(site.raw()) for _ in range(3)]
        assert everything(silent[0]) == b""
        assert ask_by_tls(site, cert) == b"live"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (np.array(0.5, np.float32), 0.5),
        (np.arange(6).reshape(2, 3).T, [[0, 3], [1, 4], [2, 5]]),
        (
            (np.int64(2), {"z": np.array([1, 0], np.int8), "a": np.float32(0.25)}),
            [2, {"z": [1, 0], "a": 0.25}],
        ),
    ],
    ids=["without dimensions", "not contiguous", "nested"],
)
def test_every_array_has_a_form_in_json(value: Any, written: Any) -> None:
    body = json_response(value).body
    assert json.loads(body) == written
    with pytest.raises(TypeError):
        json_response({"object": object()})


@pytest.mark.parametrize(
    "space", [spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(3), spaces.MultiBinary(2)], ids=str
)
@pytest.mark.parametrize("value", [None, "0.5"])
def test_null_and_text_are_no_observations(space: spaces.Space[Any], value: Any) -> None:
    with pytest.raises(Refusal) as caught:
        parse_value(space, value, "observation")
    assert caught.value.status == 400
    assert "observation" in caught.value.sentence
