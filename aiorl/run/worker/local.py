"""Local inference: a worker in a client's own process, whose episodes the client plays."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from aiorl.config.addresses import places_of
from aiorl.errors import AiorlError
from aiorl.process.tasks import new_event_loop
from aiorl.run.worker.service import make_service
from aiorl.serving import external


class LocalWorker:
    """Worker of a run in a thread of this process, which answers the requests of
    `aiorl.PolicyClient` itself.

    There can be one in a process. It acts by the weights that the learner publishes, and sends
    fragments to it.

    Attributes:
        env: the newest environment, which answers the requests; None before the run has one.
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
        if external.local_worker is not None:
            raise RuntimeError(
                "This process has a client with local inference already. Close it, or share it."
            )
        self._service = make_service(places_of(",".join(addresses)), keys)
        self.env: external.ClientEnv | None = None
        self._end = ""
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="local-worker", daemon=True)
        external.local_worker = self
        self._thread.start()

    def ask(self, do: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, with ``status`` and ``error`` if it is refused.

        Raises:
            ConnectionError: the worker has ended.
        """
        if self._end:
            raise ConnectionError(f"This process's worker has ended: {self._end}")
        if self.env is None:
            return {
                "status": 503,
                "error": "This process's worker is not ready yet. Try again in a second.",
            }
        name = secrets.token_urlsafe(16) if do == "open" else str(request.pop("session", ""))
        return self.env.answer(do, name, request)

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
            external.local_worker = None
