"""Local inference: a worker in a client's own process, whose episodes the client plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from aiorl.config.addresses import places_of
from aiorl.errors import AiorlError
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.transport.security import load_worker_keys
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint
from aiorl.process.program import raise_open_file_limit
from aiorl.process.tasks import new_event_loop
from aiorl.run.worker.service import WorkerService
from aiorl.serving import external

_NOT_READY = {"status": 503, "error": "This process's worker is not ready yet. Try again in a second."}


class LocalWorker:
    """Worker of a run in a thread of this process, which answers the requests of `aiorl.PolicyClient` itself.

    There can be one in a process. It acts by the weights that the learner publishes, and sends fragments to it.
    """

    def __init__(self, addresses: Sequence[str], keys: str | None) -> None:
        """Join a run.

        Args:
            addresses: addresses of the learner.
            keys: directory of this host's CURVE keys; None = none.

        Raises:
            RuntimeError: this process has a worker already.
            SecurityError: the keys can't be used.
        """
        found = None if keys is None else load_worker_keys(keys)
        raise_open_file_limit()
        settings = WorkerSettings(secrets.token_hex(8), socket.gethostname(), os.getpid(), slot_hint=0)
        places = [place for address in addresses for place in places_of(address)]
        self._made: queue.SimpleQueue[external.Clients] = queue.SimpleQueue()
        if external.here is not None:
            raise RuntimeError("This process has a client with local inference already. Close it, or share it.")
        external.here = self._made.put
        self._clients: external.Clients | None = None
        self._end = ""
        self._loop = new_event_loop()
        self._service = WorkerService(ZmqWorkerEndpoint(places, keys=found), WorkerSession(settings))
        self._thread = threading.Thread(target=self._run, name="local-worker", daemon=True)
        self._thread.start()

    def ask(self, do: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, with ``status`` and ``error`` if it is refused.

        Raises:
            ConnectionError: the worker has ended.
        """
        with contextlib.suppress(queue.Empty):
            while True:  # a run that was resumed made new ones
                self._clients = self._made.get_nowait()
        if self._end:
            raise ConnectionError(f"This process's worker has ended: {self._end}")
        if self._clients is None:
            return _NOT_READY
        name = secrets.token_urlsafe(16) if do == "open" else str(said.get("session"))
        return self._clients.answer(do, name, said)

    def close(self) -> None:
        """Leave the run."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._service.stop, "the client was closed")
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._end = runner.run(self._service.run()).reason
        except AiorlError as error:
            self._end = str(error)
        finally:
            self._end = self._end or "it failed"
            external.here = None
