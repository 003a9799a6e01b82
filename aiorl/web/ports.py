"""Ports that other processes serve for this one: the page of a run, and the port for its clients.

    # before a run begins: the ConfigError names the key
    check_ports(page=8265, has_clients=False)
    ports = Ports()
    ports.open(run_dir, page=8265)  # requests can be sent at once
    ports.close()

This process listens and hands the sockets to its children, so nothing can take a port in between. A
child serves the app of the run directory. It ends with this process, however that ends. A child
that fails is started again, with the same socket.
"""

from __future__ import annotations

import asyncio
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from aiorl.config.addresses import dialable, host_and_port, is_loopback, split_address, url
from aiorl.errors import ConfigError
from aiorl.process.children import DEFAULT_MAX_RESTARTS, Children, log_end
from aiorl.process.imports import child_python, python_path
from aiorl.web.access import WebOptions, listen, token_in, url_of, want_web
from aiorl.web.origins import read_origins

CLIENT_SECRET = "client.secret"
"""File of a run directory with the secret that lets its workers in at the port for clients."""
_SERVERS = {
    # the learner needs the processor more than the page
    "page": ("web", "aiorl.watch.app:make_app", "web.token", 10),
    "clients": ("client_port", "aiorl.serving.external:Gate", "client.token", 0),
}
"""Port -> its setting, the function that makes its app, the file of its token, and the niceness of
its process."""
_POLL_S = 0.1
_END_S = 5.0


def _options(key: str, value: int | str, token_file: Path) -> WebOptions:
    """Return the options of a server at PORT or HOST:PORT, where on loopback this user needs no
    token.
    """
    host, port = host_and_port(value, key=key)
    return WebOptions(host, port, token_file=token_file, lets_user_in=is_loopback(host))


def check_ports(
    *,
    page: int | str | None = None,
    clients: int | str | None = None,
    allow_origins: Sequence[str] = (),
    has_clients: bool,
) -> None:
    """Check that the ports of a run can be opened; see `Ports.open`.

    Args:
        page: PORT or HOST:PORT of its page, None = no page.
        clients: PORT or HOST:PORT for clients, None = no such port.
        allow_origins: origins whose pages may use the port for clients, as users write them.
        has_clients: True if clients play its environment.

    Raises:
        ConfigError: a port can't be opened, an address has another form, or packages are missing;
            it names the key.
    """
    if has_clients != (clients is not None):
        raise ConfigError(
            "client_port and an environment that clients play need each other.",
            key="client_port",
            value=clients,
            hint="Set env: external and client_port: 9900.",
        )
    if read_origins(allow_origins, key="allow_origin") and clients is None:
        raise ConfigError(
            "allow_origin is for web pages that use client_port, which is not set.",
            key="allow_origin",
            value=list(allow_origins),
        )
    with ExitStack() as listeners:  # both until the end, because they could be the same
        for key, value in (("web", page), ("client_port", clients)):
            if value is not None:
                want_web(f"{key} {value}")
                listeners.enter_context(listen(_options(key, value, Path()), key=key))


class Ports:
    """Ports of a run for others: its page, and the port for clients.

    Attributes:
        ways: "page" and "clients" -> the address, for each port that is open.
        gate: settings by which environments reach the port for clients: ``gate``, a dict with its
            ``addresses``, and the ``secret`` that lets them in; {} if there is none.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.ways: dict[str, str] = {}
        self.gate: dict[str, Any] = {}
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(
        self,
        run_dir: Path,
        *,
        page: int | str | None = None,
        clients: int | str | None = None,
        allow_origins: Sequence[str] = (),
        advertise: str | None = None,
    ) -> None:
        """Open the ports of a run.

        Args:
            run_dir: directory of the run, for tokens and logs.
            page: PORT or HOST:PORT of its page, None = no page.
            clients: PORT or HOST:PORT for clients, None = no such port.
            allow_origins: origins whose pages may use the port for clients.
            advertise: addresses of this host that the user gives, as for `dialable`.

        Raises:
            ConfigError: an address can't be listened on, or a token can't be written.
            OSError: a process can't be started.
        """
        if page is not None:
            self._open("page", page, run_dir, ())
        if clients is not None:
            # made before the other process reads it
            secret = token_in(run_dir / CLIENT_SECRET).decode()
            host, port = self._open(
                "clients", clients, run_dir, read_origins(allow_origins, key="allow_origin")
            )
            listening = dialable(url(host, port), None if is_loopback(host) else advertise)
            addresses = [url(split_address(address)[0], port) for address in listening]
            self.gate = {"gate": {"addresses": addresses, "secret": secret}}

    def close(self) -> None:
        """End the processes, which answer accepted requests first; a slow one ends by itself
        later.
        """
        self._is_over.set()
        for thread in self._threads:
            thread.join(_END_S)

    def _open(
        self, way: str, value: int | str, run_dir: Path, allow_origins: Sequence[str]
    ) -> tuple[str, int]:
        """Open a port, and return its host and number."""
        key, make_app, token, niceness = _SERVERS[way]
        options = _options(key, value, run_dir / token)
        log = run_dir / "logs" / f"{key}.txt"
        listener = listen(options)
        token_file = str(options.token_file)
        command = [
            *child_python("aiorl.web.ports"),
            make_app,
            str(run_dir),
            options.host,
            token_file,
            str(niceness),
            *allow_origins,
        ]
        self.ways[way] = url_of(options, listener)
        if not options.lets_user_in:
            self.ways[way] += f" (with the token in {token_file})"
        child = Children(
            lambda slot: command,
            [1],
            max_restarts=DEFAULT_MAX_RESTARTS,
            on_event=partial(log_end, f"the server at {self.ways[way]}, with the log {log},"),
            log_path=lambda slot: log,
            environment=python_path(),
            connect=lambda slot: listener.dup(),
        )
        child.start()
        self._threads.append(
            threading.Thread(
                target=self._supervise, args=(child, listener), name="port", daemon=True
            )
        )
        self._threads[-1].start()
        return options.host, listener.getsockname()[1]

    def _supervise(self, child: Children, listener: socket.socket) -> None:
        """Look after a process until the port is closed, or the process has failed too often."""
        with listener:
            while not (child.is_over or self._is_over.wait(_POLL_S)):
                child.poll()
        child.stop(signal.SIGTERM)
        while not child.is_over:
            time.sleep(_POLL_S)
            child.poll()


def main() -> None:
    """Serve a port of the parent process; the arguments are those that `Ports` gives."""
    from aiorl.web.server import serve

    make_app, run_dir, host, token_file, niceness, *allow_origins, number = sys.argv[1:]
    os.nice(int(niceness))
    options = WebOptions(
        host,
        token_file=Path(token_file),
        allow_origins=tuple(allow_origins),
        lets_user_in=is_loopback(host),
        inherited=int(number),
    )
    asyncio.run(serve(pkgutil.resolve_name(make_app)(Path(run_dir)), options))


if __name__ == "__main__":
    main()
