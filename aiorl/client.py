"""PolicyClient: asks `aiorl serve`, or a run in training, for actions.

The module needs `msgpack` and `websockets`, and uses NumPy if it is installed. It works as a copy
without aiorl, too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from socket import gaierror
from typing import Any

import msgpack
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

_log = logging.getLogger(__name__)

_MAX_ANSWER = 1 << 30
_BUSY = 503
_RETRY_S = 0.2
_LONGEST_RETRY_S = 2.0
_FINAL = (gaierror, ssl.SSLError, WebSocketException)
"""Causes of failing to connect that stay, however long one waits."""
_NUM_THREADS = 100
_FORMATS: dict[str, Any] = dict(
    bool="?",
    uint8="B",
    uint16="H",
    uint32="I",
    uint64="Q",
    int8="b",
    int16="h",
    int32="i",
    int64="q",
    float32="f",
    float64="d",
)


class RequestRefused(RuntimeError):
    """A server of policies refused a request.

    Attributes:
        status: status of HTTP; 410 = the session is gone.
        sentence: the fault and how to correct it.
    """

    def __init__(self, status: int, sentence: str) -> None:
        """Take over the server's answer."""
        super().__init__(f"{sentence} (status {status})")
        self.status = status
        self.sentence = sentence


class PolicyClient(contextlib.AbstractContextManager["PolicyClient"]):
    """Client of a server of policies. All requests of all threads go over one connection.

        with PolicyClient("http://localhost:8000") as client:
            action = client.act([0.0, 0.1, 0.0, -0.1])

    Observations and actions are in the environment's form, of numbers, lists, dicts and arrays.
    Arrays of answers are NumPy's. Without NumPy they are nested lists, and those of float16 can't
    be read. After a loss, the next request connects again.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 60.0,
        ready_timeout_s: float = 300.0,
        tls: ssl.SSLContext | None = None,
        local: bool = False,
        keys: str | None = None,
    ) -> None:
        """Connect, waiting until the server's port is open.

        Args:
            url: address of the server, such as ``http://localhost:8000`` or ``wss://host:8000``.
            token: the server's token.
            timeout_s: seconds within which the server's port has to be open now, and within which
                each answer has to come.
            ready_timeout_s: seconds within which a server has to have room for a session; a run
                that compiles its first update has none.
            tls: context that knows the server's certificate; None = the system's.
            local: True for a run in training: this process becomes one of its workers and acts by
                itself, by the newest weights. It needs aiorl, and there can be one in a process.
            keys: directory of this host's CURVE keys, with `local`, if the run uses keys.

        Raises:
            ConnectionError: the server can't be reached within ``timeout_s``, or at all.
            RequestRefused: the token is wrong, or the server has no run to join.
        """
        if url.startswith("http"):
            url = f"ws{url.removeprefix('http')}"  # https becomes wss
        self._url = f"{url.rstrip('/')}/ws"
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._tls = tls
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._socket: ClientConnection | None = None
        self._local: Any = None
        socket = self._socket = self._connect_patiently()
        if local:
            from aiorl.run.worker.local import LocalWorker

            with contextlib.closing(socket):  # the worker has a connection of its own
                self._local = LocalWorker(self._patiently("join")["addresses"], keys)
            self._threads = ThreadPoolExecutor(_NUM_THREADS, "policy-client")

    def act(self, observation: Any, *, explore: bool = False, **keys: Any) -> Any:
        """Return the action for an observation.

        Args:
            observation: the observation.
            explore: True draws the action; otherwise it is the most likely one.
            keys: further keys of the request, such as ``policy``.

        Raises:
            RequestRefused: the server can't answer the request.
            ConnectionError: the server is gone.
            TimeoutError: there is no answer in time.
        """
        return self.ask("act", observation=observation, explore=explore, **keys)["action"]

    def session(self, policy: str | None = None, *, train: bool = True) -> PolicySession:
        """Return a session, for episodes one after the other; with the errors of `act`.

        A server that has no room for it yet, like a run without workers or one that compiles its
        first update, is asked again for ``ready_timeout_s``.

        Args:
            policy: name of the policy; None = the only one.
            train: False: a run in training learns nothing from its episodes.
        """
        keys = {} if policy is None else {"policy": policy}
        return PolicySession(self, self._patiently("open", train=train, **keys)["session"])

    def _patiently(self, do: str, **keys: Any) -> dict[str, Any]:
        end = time.monotonic() + self._ready_timeout_s
        while True:
            try:
                return self.ask(do, **keys)
            except RequestRefused as error:
                if error.status != _BUSY or time.monotonic() > end:
                    raise
            time.sleep(_RETRY_S)

    def ask(self, do: str, **keys: Any) -> dict[str, Any]:
        """Return the answer to a request; with the errors of `act`.

        Args:
            do: "act", "open", "end" or "close".
            keys: keys of the request.
        """
        if self._local is None:
            return self.submit(do, **keys).result(self._timeout_s)
        return _accepted(self._local.ask(do, keys))

    def submit(self, do: str, **keys: Any) -> Future[dict[str, Any]]:
        """Send a request without waiting.

        Args:
            do: see `ask`.
            keys: keys of the request.

        Returns:
            Future of the answer, with the errors of `act`.

        Raises:
            ConnectionError: the server is gone.
        """
        if self._local is not None:
            return self._threads.submit(self.ask, do, **keys)
        answer: Future[dict[str, Any]] = Future()
        answer.set_running_or_notify_cancel()
        id = next(self._ids)
        packed = msgpack.packb({"id": id, "do": do, **keys}, default=_plain)
        with self._lock:
            socket = self._socket = self._socket or self._connect()
            self._waiting[id] = answer
        with contextlib.suppress(WebSocketException):  # `_read` ends what waits
            socket.send(packed)
        return answer

    def close(self) -> None:
        """Close the connection; a worker in this process leaves the run, with the fragment that it
        has begun.
        """
        if self._local is not None:
            self._local.close()
            self._threads.shutdown(wait=False)
        socket = self._socket  # the reading thread sets it to None
        if socket is not None:
            socket.close()

    def __exit__(self, *error: object) -> None:
        """Close the connection."""
        self.close()

    def _connect_patiently(self) -> ClientConnection:
        end = time.monotonic() + self._timeout_s
        is_reported = False
        pause_s = _RETRY_S
        while True:
            try:
                return self._connect()
            except ConnectionError as error:
                left_s = end - time.monotonic()
                if isinstance(error.__cause__, _FINAL) or left_s <= 0.0:
                    raise
                if pause_s == _LONGEST_RETRY_S and not is_reported:
                    is_reported = True  # the address may be wrong
                    _log.warning("%s; trying for %.0f seconds more", error, left_s)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2.0 * pause_s, _LONGEST_RETRY_S)

    def _connect(self) -> ClientConnection:
        try:
            socket = connect(
                self._url,
                additional_headers=self._headers,
                compression=None,
                max_size=_MAX_ANSWER,
                ssl=self._tls,
            ).__enter__()  # newer versions of websockets want it
        except InvalidStatus as error:
            body = bytes(error.response.body or b"").decode(errors="replace")
            with contextlib.suppress(ValueError, TypeError, KeyError):
                body = json.loads(body)["error"]
            raise RequestRefused(error.response.status_code, body) from None
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"{self._url} can't be reached: {error}") from error
        threading.Thread(
            target=self._read, args=(socket,), name="policy-client", daemon=True
        ).start()
        return socket

    def _read(self, socket: ClientConnection) -> None:
        reason = "the connection was closed"
        try:
            for message in socket:
                answer = msgpack.unpackb(message, object_hook=_array)
                waiting = self._waiting.pop(answer["id"])
                try:
                    waiting.set_result(_accepted(answer))
                except RequestRefused as error:
                    waiting.set_exception(error)
        except Exception as error:
            reason = str(error)
        socket.close()
        with self._lock:
            self._socket = None
            lost = self._waiting
            self._waiting = {}
        for waiting in lost.values():
            waiting.set_exception(ConnectionError(f"{self._url} is gone: {reason}"))


def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise RequestRefused(answer["status"], answer["error"])
    return answer


class PolicySession(contextlib.AbstractContextManager["PolicySession"]):
    """Session: episodes one after the other. The next `act` after an episode's end begins another
    one.

        with client.session() as game:
            action = game.act(observation)
            game.end(observation, reward=1.0)

    Each reward is the sum of those since the session's last request. Errors are those of
    `PolicyClient.act`; status 410 means that the session is gone.

    Attributes:
        id: its name.
    """

    def __init__(self, client: PolicyClient, id: str) -> None:
        """Take over an open session."""
        self._client = client
        self.id = id

    def act(self, observation: Any, reward: Any = 0.0, **keys: Any) -> Any:
        """Return the action for an observation.

        Args:
            observation: the observation.
            reward: reward since the last request.
            keys: further keys of the request, such as ``explore`` or ``dones``.
        """
        return self._ask("act", observation=observation, reward=reward, **keys)["action"]

    def log_action(self, observation: Any, action: Any, reward: Any = 0.0, **keys: Any) -> None:
        """Report an action that the client took by itself; see `act`."""
        self._ask("act", observation=observation, action=action, reward=reward, **keys)

    def end(
        self,
        observation: Any,
        reward: Any = 0.0,
        *,
        truncated: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """End the episode, and return its steps and the sum of its rewards.

        Args:
            observation: the last observation.
            reward: reward since the last request.
            truncated: True if the episode could have gone on.
            info: what the environment says about the last step.
        """
        return self._ask(
            "end", observation=observation, reward=reward, truncated=truncated, info=info or {}
        )

    def close(self) -> None:
        """Close the session; an episode that has not ended is dropped."""
        self._ask("close")

    def __exit__(self, *error: object) -> None:
        """Close the session, unless it is gone."""
        with contextlib.suppress(OSError, RequestRefused):
            self.close()

    def _ask(self, do: str, **keys: Any) -> dict[str, Any]:
        return self._client.ask(do, session=self.id, **keys)


def _plain(value: Any) -> Any:
    """Return the form of an array or a number of NumPy in a message."""
    if not hasattr(value, "dtype"):
        raise TypeError(f"{type(value).__name__} can't be sent")
    if not value.shape:
        return value.item()
    data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"data": data, "dtype": value.dtype.name, "shape": value.shape}


def _array(value: dict[str, Any]) -> Any:
    """Return the array that an object of an answer stands for, or the object."""
    if value.keys() != {"data", "dtype", "shape"}:
        return value
    data = value["data"]
    shape = value["shape"]
    try:
        import numpy as np
    except ImportError:
        return memoryview(data).cast(_FORMATS[value["dtype"]], shape).tolist()
    return np.frombuffer(data, np.dtype(value["dtype"]).newbyteorder("<")).reshape(shape).copy()
