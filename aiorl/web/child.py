"""Ports that another process serves for this one, such as the page of a run.

    check_ports(8265, None, has_clients=False)     # before a run begins: the ConfigError names the key
    ports = Ports()
    ports.open(run_dir, 8265, None, None)          # requests can be sent at once
    ports.close()

This process listens and hands the socket to the child, so nothing can take the port in between. The child's module is a
command with the options of `add_web_options` that calls `aiorl.web.server.serve`. It ends with this process, however
that ends: its standard input is a socket, which closes then. A child that fails is started again, with the same socket.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aiorl.config.addresses import dialable, host_and_port, is_loopback, split_address, url
from aiorl.errors import ConfigError
from aiorl.process.children import DEFAULT_MAX_RESTARTS, FAILED, Restarts, status_text
from aiorl.process.imports import child_python, python_path
from aiorl.web.access import WebOptions, listen, token_in, url_of, want_web

logger = logging.getLogger(__name__)

_END_S = 5.0


def port_options(key: str, value: int | str, *, token_file: Path) -> WebOptions:
    """Return the options of a server at PORT or HOST:PORT.

    Args:
        key: setting that has the address.
        value: the address; without a host it is loopback, and port 0 picks a free one.
        token_file: file with the token for any other host than loopback; it is made if it doesn't exist.

    Raises:
        ConfigError: the address has another form.
    """
    host, port = host_and_port(value, key=key)
    return WebOptions(host, port, token_file=None if is_loopback(host) else token_file)


def check_ports(page: int | str | None, clients: int | str | None, *, has_clients: bool) -> None:
    """Check that the ports of a run can be opened; see `Ports.open`.

    Args:
        page: PORT or HOST:PORT of its page, None = no page.
        clients: PORT or HOST:PORT for clients, None = no such port.
        has_clients: True if its environment is played by clients.

    Raises:
        ConfigError: one can't, its address has another form, or packages are missing; the error names the key.
    """
    if has_clients and clients is None:
        said = "This environment is played by clients, and they need a port."
        raise ConfigError(said, key="client_port", hint="Set client_port, for example to 9900.")
    if clients is not None and not has_clients:
        said = f"client_port is {clients}, but this environment is not played by clients."
        raise ConfigError(said, key="client_port", value=clients, hint="Set env: external, or leave client_port out.")
    with ExitStack() as held:  # until the end, as they could be the same
        for key, value in (("web", page), ("client_port", clients)):
            if value is not None:
                want_web(f"{key} {value}")
                held.enter_context(listen(port_options(key, value, token_file=Path()), key=key))


class Ports:
    """Ports of a run for others: its page, and the port for clients.

    Attributes:
        ways: "page" and "clients" -> the address, of those that are open.
        gate: settings by which environments reach the port for clients: ``gate``, a dict with ``urls``, and the
            ``secret`` that lets them in; {} if there is none.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.ways: dict[str, str] = {}
        self.gate: dict[str, Any] = {}
        self._children: list[WebChild] = []

    def open(self, run_dir: Path, page: int | str | None, clients: int | str | None, advertise: str | None) -> None:
        """Open the ports of a run.

        Args:
            run_dir: directory of the run, for tokens and logs.
            page: PORT or HOST:PORT of its page, None = no page.
            clients: PORT or HOST:PORT for clients, None = no such port.
            advertise: addresses of this host that the user gives, as for `dialable`.

        Raises:
            ConfigError: an address can't be listened on, or a file can't be written.
        """
        if page is not None:
            options = port_options("web", page, token_file=run_dir / "web.token")
            child = self._start(options, "aiorl.watch", run_dir, run_dir / "logs" / "web.txt")
            self.ways["page"] = str(child)
        if clients is not None:
            options = port_options("client_port", clients, token_file=run_dir / "client.token")
            secret = token_in(path := run_dir / "client.secret").decode()
            child = self._start(options, "aiorl.serving.gate", path, run_dir / "logs" / "client_port.txt")
            self.ways["clients"] = str(child)
            host, port = options.host, int(child.url.rpartition(":")[2])
            found = [url(host, port)] if is_loopback(host) else dialable(url(host, port), advertise)
            urls = [f"ws{url(split_address(each)[0], port).removeprefix('tcp')}" for each in found]
            self.gate = {"gate": {"urls": urls, "secret": secret}}

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()

    def _start(self, options: WebOptions, module: str, argument: Path, log: Path) -> WebChild:
        self._children.append(child := WebChild(options, module, [str(argument)], log=log))
        return child


class WebChild:
    """Process that serves a port for this one.

    Attributes:
        url: its address, such as ``http://127.0.0.1:8265``.
        is_over: set when it is closed, or has failed too often and stays down.
    """

    def __init__(self, options: WebOptions, module: str, words: Sequence[str], *, log: Path) -> None:
        """Listen, and start the process, in a thread that watches over it.

        Args:
            options: address and safety of the server.
            module: module of aiorl with the command.
            words: arguments of the command, besides options of a server.
            log: file to which the process appends its errors.

        Raises:
            ConfigError: the address can't be listened on.
        """
        self.is_over = threading.Event()
        self._listener = listen(options)
        self.url = url_of(options, self._listener)
        self._token_file, self._log = options.token_file, log
        number = self._listener.fileno()
        words = [*words, "--host", options.host, "--inherited", str(number)]
        words += [] if options.token_file is None else ["--token-file", str(options.token_file)]
        self._input, self._lifeline = socket.socketpair()
        self._child: dict[str, Any] = {
            "args": [*child_python(module), *words], "stdin": self._input, "pass_fds": [number],
            "start_new_session": True, "env": {**os.environ, **python_path()},
        }  # fmt: skip
        self._thread = threading.Thread(target=self._keep, name="web-child", daemon=True)
        self._thread.start()
        logger.info("%s serves %s", module, self)

    def __str__(self) -> str:
        """Return the address, and where the token for it is."""
        return self.url if self._token_file is None else f"{self.url} (with the token in {self._token_file})"

    def close(self) -> None:
        """End the process, which answers accepted requests first; a slow one ends by itself later."""
        self.is_over.set()
        self._listener.close()
        self._lifeline.close()
        self._thread.join(_END_S)
        self._input.close()

    def _keep(self) -> None:
        """Run the process until it is closed, or has failed too often."""
        restarts, pause_s = Restarts(DEFAULT_MAX_RESTARTS), 0.0
        while not self.is_over.wait(pause_s):
            began, status = time.monotonic(), FAILED
            try:
                with self._log.open("ab") as log:
                    process = subprocess.Popen(**self._child, stdout=log, stderr=log)
                said = status_text(status := process.wait())
            except (OSError, subprocess.SubprocessError) as error:
                said = str(error)
            if self.is_over.is_set():
                return
            pause = restarts.pause_after(status, time.monotonic() - began)
            if pause is None:
                logger.error("the server at %s ended with %s and stays down; its log: %s", self.url, said, self._log)
                self.is_over.set()
                self._listener.close()
                return
            pause_s = pause
            logger.warning("the server at %s ended with %s; it is started again in %g s", self.url, said, pause_s)
