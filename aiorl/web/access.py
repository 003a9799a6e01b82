"""Tokens, options of command lines, and the access log."""

from __future__ import annotations

import base64
import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from aiorl.config.addresses import is_loopback
from aiorl.config.command_line import Parser, at_least
from aiorl.config.files import open_regular, whose_else
from aiorl.errors import ConfigError, SecurityError
from aiorl.process.imports import require_packages
from aiorl.process.kept_logs import MAX_BYTES
from aiorl.text import one_line
from aiorl.web.app import MAX_BODY_BYTES, Headers, Refusal, Request
from aiorl.web.origins import ANY, check_token_for_any, read_origins, readable_by

logger = logging.getLogger(__name__)

_TOKEN = re.compile(rb"[!-~]{16,4096}")
_MAX_TOKEN_FILE = 8192
_TOKEN_PROTOCOL = "token."
_PORT = re.compile(r":\d+$")
USER = "aiorl.is_own"
"""Key of the state of a connection: True if a process of this user holds its other end."""


def want_web(by: str) -> None:
    """Check that the packages of the extra `serve` are installed.

    Args:
        by: the feature that needs them; the message begins with it.

    Raises:
        ConfigError: packages are missing.
    """
    require_packages(
        by, ("uvicorn", "httptools", "websockets", "prometheus_client"), "serve", key=""
    )


@dataclass(frozen=True, slots=True)
class WebOptions:
    """Address, safety and limits of a server.

    Attributes:
        host: address that it listens on.
        port: its port; 0 picks a free one.
        token_file: file with the token that each request has to carry; it is made if it doesn't
            exist.
        is_insecure: True lets everyone in who reaches it; otherwise, without a token, this user's
            processes alone.
        tls_cert: file with its certificate chain, in PEM.
        tls_key: file with the key of the certificate, in PEM.
        access_log: file that gets a line for each request; None = no log.
        allow_origins: origins whose pages may use it, as by `aiorl.web.origins.read_origins`.
        lets_user_in: True lets this user's processes on this host in without the token, too.
        max_body_bytes: size limit of a body or of a message of a WebSocket, in bytes.
        arrive_s: seconds in which a request has to arrive.
        inherited: descriptor of a listening socket of the parent process, with which the server
            ends; None = make one.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token_file: Path | None = None
    is_insecure: bool = False
    lets_user_in: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    access_log: Path | None = None
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    arrive_s: float = 30.0
    inherited: int | None = None


def add_web_options(parser: Parser, *, port: int) -> None:
    """Add the options of a server to a command; `port` is the default of its port."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", metavar="ADDRESS", help="Address to listen on (127.0.0.1: this host only)."
    )
    group.add_argument(
        "--port", type=at_least(0), metavar="N", help=f"Port; 0 picks a free one ({port})."
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=(
            "Every request must carry the token in FILE, as 'Authorization: Bearer TOKEN'. FILE is"
            " made if it doesn't exist. Without it, a server on 127.0.0.1 answers to this user's"
            " processes only."
        ),
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        dest="is_insecure",
        help="Without a token, let in anyone who reaches the address, other users too.",
    )
    group.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="Certificate chain, PEM; needs --tls-key."
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="Key of the certificate, PEM.")
    group.add_argument(
        "--access-log", type=Path, metavar="FILE", help="Write a line for each request."
    )
    group.add_argument(
        "--max-body-bytes",
        type=at_least(1024),
        metavar="N",
        help=f"Size limit of a body, or of a message of a WebSocket ({MAX_BODY_BYTES:,}).",
    )
    parser.set_defaults(port=port)


def web_options(arguments: dict[str, Any], by: str) -> WebOptions:
    """Return the options of a command that has those of `add_web_options`, and remove them from
    its arguments.

    Args:
        arguments: options of the command.
        by: the command.

    Raises:
        SecurityError: another address than loopback without a token or ``--insecure``.
        ConfigError: an option doesn't fit another one, or packages are missing.
    """
    want_web(by)
    options = WebOptions(
        **{name: arguments.pop(name) for name in WebOptions.__slots__ if name in arguments}
    )
    options = replace(
        options, allow_origins=read_origins(options.allow_origins, key="--allow-origin")
    )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key need each other.", key="tls_key")
    if not (is_loopback(options.host) or options.token_file or options.is_insecure):
        raise SecurityError(
            f"--host {options.host} can be reached by other hosts, so requests need a token.",
            key="host",
            value=options.host,
            hint="Add --token-file FILE, or --insecure to let everyone in.",
        )
    check_token_for_any(options.allow_origins, has_token=options.token_file is not None)
    return options


def listen(options: WebOptions, *, key: str = "port") -> socket.socket:
    """Return a socket that listens at the address of the options.

    Raises:
        ConfigError: the address can't be listened on; the error names the key.
    """
    if options.inherited is not None:
        return socket.socket(fileno=options.inherited)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        # without the address, which the sentence has already
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0].rstrip(".")
        raise ConfigError(
            f"{key} {options.port} of {options.host} can't be listened on: {reason}.",
            key=key,
            value=options.port,
            hint=f"Choose another one with --{key.replace('_', '-')}; 0 picks a free one.",
        ) from error


def url_of(options: WebOptions, listener: socket.socket) -> str:
    """Return the address of a server that listens there, such as ``http://127.0.0.1:8000``."""
    host = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
    if ":" in host:
        host = f"[{host}]"
    scheme = "http" if options.tls_cert is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


class Guard:
    """Check of who asks, by a token or the user of the client's process, and of where a browser's
    requests come from.

    Without a token, and without ``--insecure``, only processes of this user on this host are let
    in. With a token, they are let in without it if the options say so.

    A browser sends requests for any page that it shows. Requests of other sites' pages are refused
    unless the options allow their origin. If they allow any, such a page has to send the token by
    itself: that the browser is a process of this user, or knows a password, is not enough. Without
    a token, requests to another name than this host's are refused, too, because another site could
    give its name this address.

    Attributes:
        asks_user: True if each connection has to be looked up; its scopes then have `USER` in their
            ``state``.
    """

    def __init__(self, options: WebOptions) -> None:
        """Read the token, or make it.

        If the options let this user's processes in without it, a file that can't be used costs
        other users their way in, and there is a warning: some file systems can't make a file
        private, or have root write none.

        Raises:
            SecurityError: as `token_in`.
            ConfigError: as `token_in`.
        """
        self._token: bytes | None = None
        if options.token_file is not None:
            try:
                self._token = token_in(options.token_file)
            except ConfigError as error:
                if not options.lets_user_in or options.is_insecure:
                    raise
                logger.warning(
                    "Processes of this user are let in, and no one by a token: %s", error
                )
        names = {"localhost", "127.0.0.1", "[::1]", options.host.lower()}
        self.asks_user = (self._token is None or options.lets_user_in) and not options.is_insecure
        self._hosts = names if self.asks_user else None
        self._readable = {origin: readable_by(origin) for origin in options.allow_origins}

    def check(self, request: Request) -> None:
        """Check a request.

        Raises:
            Refusal: it may not be answered.
        """
        host = request.header(b"host")
        origin = request.header(b"origin")
        is_trusted = (
            not origin
            or origin.partition("://")[2].lower() == host.lower()
            or origin in self._readable
        )
        if not is_trusted and ANY not in self._readable:
            raise Refusal(
                403,
                f"Pages of {origin:.100} may not use this server. --allow-origin, or the key"
                " allow_origin of a run, lets them.",
            )
        token = token_of(request) if is_trusted else page_token_of(request)
        if self._token is None or not hmac.compare_digest(token, self._token):
            if not is_trusted:
                raise _needs_token()
            self._check_user(request, host)

    def headers_for(self, request: Request) -> Headers:
        """Return the headers by which a browser lets the page that has sent a request read the
        answer; () if it may not.
        """
        if not self._readable:
            return ()
        origin = request.header(b"origin")
        if origin in self._readable:
            return self._readable[origin]
        return self._readable.get(ANY, ()) if origin else ()

    def _check_user(self, request: Request, host: str) -> None:
        """Check a request that has no token, or a wrong one.

        Raises:
            Refusal: it may not be answered.
        """
        if self.asks_user and request.scope["state"].get(USER) is True:
            if self._hosts is not None and _name_in(host) not in self._hosts:
                raise Refusal(403, f"This server answers to localhost, not to {host:.100}.")
        elif self._token is not None:
            raise _needs_token()
        elif self.asks_user:
            raise Refusal(
                403,
                f"This server answers to processes of user {os.geteuid()} on its host. For others,"
                " start it with --token-file FILE and send the token, or with --insecure.",
            )


@lru_cache(maxsize=256)
def _name_in(host: str) -> str:
    return _PORT.sub("", host).lower()


def _needs_token() -> Refusal:
    return Refusal(
        401,
        "Send the server's token: 'Authorization: Bearer TOKEN'.",
        headers=(
            (b"www-authenticate", b'Basic realm="aiorl"'),
            (b"www-authenticate", b"Bearer"),
        ),
    )


def token_of(request: Request) -> bytes:
    """Return the token that a request carries, b"" if there is none."""
    scheme, _, value = request.header(b"authorization").partition(" ")
    if scheme.lower() == "basic":  # a browser's: any name, with the token as password
        with contextlib.suppress(ValueError):
            return base64.b64decode(value, validate=True).partition(b":")[2]
    return page_token_of(request)


def page_token_of(request: Request) -> bytes:
    """Return the token that the program or page behind a request has sent by itself, and not the
    browser on its behalf; b"" if there is none.

    Pages can't set headers of a WebSocket, so there the token is the name of a protocol that the
    page offers: ``token.``, followed by the token, percent-encoded.
    """
    scheme, _, value = request.header(b"authorization").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")
    for protocol in request.scope.get("subprotocols", ()):
        if protocol.startswith(_TOKEN_PROTOCOL):
            return unquote_to_bytes(protocol.removeprefix(_TOKEN_PROTOCOL))
    return b""


def token_in(path: Path) -> bytes:
    """Return the token in a file, which is made if it doesn't exist.

    Raises:
        SecurityError: the file can be read by others, or contains no token.
        ConfigError: the file can't be read or written.
    """
    try:
        with (
            contextlib.suppress(FileExistsError),
            open(path, "x", opener=partial(os.open, mode=0o600)) as new_file,
        ):
            new_file.write(secrets.token_urlsafe(32) + "\n")
        with open_regular(path, follow=True) as file:
            fault = whose_else(os.fstat(file.fileno()))
            token = file.read(_MAX_TOKEN_FILE).strip()
    except OSError as error:
        raise ConfigError(
            f"--token-file {path} can't be used: {error.strerror}.",
            key="token_file",
            value=str(path),
        ) from error
    if fault:
        raise SecurityError(
            f"--token-file {path} {fault}.",
            key="token_file",
            value=str(path),
            hint=f"Run: chmod 600 {path}",
        )
    if not _TOKEN.fullmatch(token):
        raise SecurityError(
            f"--token-file {path} must contain one word of 16 to 4096 visible ASCII characters.",
            key="token_file",
            value=str(path),
            hint="Remove it, and it is made.",
        )
    return token


class AccessLog(RotatingFileHandler):
    """File with a line for each request: time, client, method, path, status, milliseconds.

    It never has a query.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            ConfigError: it can't be written.
        """
        try:
            super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--access-log {path} can't be written: {error.strerror}.",
                key="access_log",
                value=str(path),
            ) from error

    def note(self, request: Request, status: int, seconds: float) -> None:
        """Add a line."""
        client = (request.scope.get("client") or ("-",))[0]
        path = one_line(request.scope["raw_path"].decode("latin-1"), 200)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = f"{now} {client} {request.method} {path} {status} {seconds * 1000:.2f}"
        self.handle(
            logging.LogRecord(
                name="", level=logging.INFO, pathname="", lineno=0, msg=line, args=(), exc_info=None
            )
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: a full disk costs lines, but no answers."""
