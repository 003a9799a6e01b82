"""Ports that another process serves for this one, such as the page of a run.

    check_port("web", 8265)                        # before a run begins: the ConfigError names the key
    options = port_options("web", 8265, token_file=run_dir / "web.token")
    child = WebChild(options, "aiorl.watch", [str(run_dir)], log=run_dir / "logs" / "web.txt")   # `page_of_run`
    child.url                                      # requests can be sent at once
    child.close()

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
from pathlib import Path
from typing import Any

from aiorl.config.addresses import host_and_port, is_loopback
from aiorl.process.children import DEFAULT_MAX_RESTARTS, FAILED, Restarts, status_text
from aiorl.process.imports import child_python, python_path
from aiorl.web.access import WebOptions, listen, url_of, want_web

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


def check_port(key: str, value: int | str | None) -> None:
    """Check that a server can listen at PORT or HOST:PORT; None needs none.

    Raises:
        ConfigError: it can't, the address has another form, or packages are missing; the error names the key.
    """
    if value is not None:
        want_web(f"{key} {value}")
        listen(port_options(key, value, token_file=Path()), key=key).close()


def page_of_run(value: int | str | None, run_dir: Path) -> WebChild | None:
    """Return a child that serves the page of a run at PORT or HOST:PORT, None if there is to be none.

    Raises:
        ConfigError: the address can't be listened on.
    """
    if value is None:
        return None
    options = port_options("web", value, token_file=run_dir / "web.token")
    return WebChild(options, "aiorl.watch", [str(run_dir)], log=run_dir / "logs" / "web.txt")


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
