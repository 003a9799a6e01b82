"""`env: external`: environments whose episodes are played by clients of the run's client port.

The port is one address for all workers. Its process, the gate, takes the requests of `aiorl serve`:
/sessions and /act over HTTP, and the WebSocket /ws. It deals sessions to the environments, each of
which connects to it by the WebSocket /workers, and passes their requests on. A session plays one
episode after the other. It stays with its environment, and is gone when that is lost. The steps of
all sessions of an environment are answered together.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from gymnasium import spaces
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from aiorl.config.addresses import Addresses, run_facts
from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.data.spaces import space_from_dict
from aiorl.env.external_env import ExternalMultiAgentEnv
from aiorl.env.registry import EnvContext
from aiorl.errors import AiorlError, ClosedEpisodeError, ConfigError, EpisodeTimeout, SamplerDied
from aiorl.serving.sessions import Session, Sessions
from aiorl.serving.values import check_keys, flag, number, parse_value
from aiorl.web.access import token_in, token_of
from aiorl.web.app import (
    MAX_CONTAINERS,
    RETRY_SOON,
    App,
    JsonHandler,
    Refusal,
    Reply,
    Request,
    Response,
    WebSocket,
    always,
    full,
    json_response,
    refusal_of,
)
from aiorl.web.budget import Budget, Share
from aiorl.web.messages import add_message_routes, packed, unpacked
from aiorl.web.ports import CLIENT_SECRET

logger = logging.getLogger(__name__)

Fields = dict[str, Any]
"""Request or answer, by the names of its parts."""

OnReply = Callable[[Fields], None]
"""Function that takes the answer to a request."""

CLIENTS = "clients"
"""Beginning of what `ClientEnv.waits_for` returns."""
_RETRY_S = 1.0
_TICK_S = 1.0
_MAX_MESSAGE = 1 << 20
"""Bytes of the requests, or of the answers, that are sent together."""
_MAX_SESSIONS = 10_000
_TTL_S = 600.0
_MAX_CONTAINERS = 2 * MAX_CONTAINERS
"""Most lists and objects of the requests that are sent together; those of one are within it."""
_MAX_MAIL = 128 << 20
_MAX_MAIL_OF_WORKER = 64 << 20
"""Bytes of the requests that all workers, and one of them, may have without having answered
them."""
_MAIL_ITEM_BYTES = 2000
"""Cost of a request besides the bytes of its message."""
_GONE = "The worker of this session is lost, or the run is over. Open a new session."
_MAX_DEPTH = 50
_OF_ACT = frozenset(("observation", "action", "reward", "info", "dones", "start"))
_OF_END = frozenset(("observation", "reward", "info", "dones", "truncated"))
local_worker: Any = None
"""`LocalWorker` of this process, None if there is none; an environment that begins becomes its
``env``."""


class ClientEnv(ExternalMultiAgentEnv):
    """Environment that clients play.

    Its config has ``observation_space`` and ``action_space``, descriptions as by `space_to_dict`,
    or mappings of them by agent; ``max_concurrent`` (100), the limit of open episodes; and
    ``idle_timeout_s`` (300): an episode without a request for that long is truncated.

    Attributes:
        has_clients: marks environments that clients play.
        is_by_agent: True if requests have observations, actions, rewards and infos by agent; False
            if those of the only agent are the values themselves.
        link: the last connection to the client port, None before there was one.
    """

    has_clients = True

    def __init__(self, config: EnvContext) -> None:
        """Prepare without connecting.

        Raises:
            ConfigError: a space is missing, or a setting can't be used.
        """
        self._max_concurrent = _setting(config, "max_concurrent", int, 100)
        action_space = _setting(config, "action_space", _spaces)
        observation_space = _setting(config, "observation_space", _spaces)
        super().__init__(action_space, observation_space, self._max_concurrent)
        self.idle_timeout_s = _setting(config, "idle_timeout_s", float, 300.0)
        self.is_by_agent = not isinstance(observation_space, spaces.Space)
        self._gate: Mapping[str, Any] = config.get("gate") or {}
        self._sessions: dict[str, _Session] = {}
        self._is_over = threading.Event()
        # answers, and the connections by which their requests came
        self._answers: deque[tuple[ClientConnection, bytes]] = deque()
        self._sending = threading.Lock()
        self.link: ClientConnection | None = None

    def run(self) -> None:
        """Answer requests until the environment is closed; connect again after a loss.

        It begins when the sampler first asks for observations. Until then, as while the first
        update is compiled, clients hear that no worker is ready.

        Raises:
            ConfigError: the run has no client port.
        """
        self._episodes.is_polled.wait()
        if self._episodes.is_stopped:
            return
        if local_worker is not None:
            local_worker.env = self
            self._is_over.wait()
            return
        if not self._gate:
            raise ConfigError(
                "An external environment needs clients.", key="client_port", hint="Set client_port."
            )
        addresses = Addresses(self._gate["addresses"])
        dial = partial(
            connect,
            additional_headers={"Authorization": f"Bearer {self._gate['secret']}"},
            compression=None,
            max_size=None,
            proxy=None,
        )
        while not self._is_over.is_set():
            try:
                with dial(f"ws{addresses.next().removeprefix('tcp')}/workers") as self.link:
                    addresses.confirm()
                    self._talk(self.link)
            except (OSError, WebSocketException) as error:
                if not self._is_over.is_set():
                    logger.warning("no connection to the client port: %s; trying again", error)
            lost = self._sessions
            self._sessions = {}
            for session in lost.values():
                session.drop()
            self._is_over.wait(_RETRY_S)

    def close(self) -> None:
        """See `ExternalEnv.close`."""
        super().close()
        self._is_over.set()
        if self.link is not None:
            self.link.close()

    def publish(
        self,
        episode_id: str,
        obs: dict[str, Any],
        client_actions: dict[str, Any] | None,
        on_answer: OnReply,
    ) -> None:
        """Publish observations by agent, and have the actions for them passed on: those that the
        client took, and the policies' for others.
        """

        def pass_on(actions: Mapping[str, Any] | AiorlError) -> None:
            if isinstance(actions, AiorlError):
                on_answer(_refused(actions))
                return
            taken = {**actions, **(client_actions or {})}
            on_answer({"action": taken if self.is_by_agent else taken[DEFAULT_AGENT_ID]})

        self._check(episode_id, obs, client_actions)
        self._episodes.submit(episode_id, obs, client_actions, pass_on)

    def waits_for(self) -> str:
        """See `ExternalEnv.waits_for`."""
        num_sessions = len(self._sessions)
        are_open = "1 session is" if num_sessions == 1 else f"{num_sessions} sessions are"
        return super().waits_for() and f"{CLIENTS}: {are_open} open"

    def after_answers(self) -> None:
        """Send the answers to the gate that there are by now."""
        if not self._answers:
            return
        with self._sending:
            link = self.link
            assert link is not None, "a request came by it"
            answers = []
            while self._answers:
                link_of_request, answer = self._answers.popleft()
                if link_of_request is link:  # those of a lost one have no one to go to
                    answers.append(answer)
            # clients of a link that is lost now get an error from the gate
            with suppress(OSError, WebSocketException):
                for message in _messages_of(answers):
                    link.send(message)

    def answer(self, do: str, name: str, body: Mapping[str, Any]) -> Fields:
        """Return the answer to a request; see `submit`."""
        answers: queue.SimpleQueue[Fields] = queue.SimpleQueue()
        self.submit(do, name, body, answers.put)
        while True:
            try:
                return answers.get(timeout=self.action_timeout_s)
            except queue.Empty:
                self._episodes.time_out(self.action_timeout_s)

    def submit(self, do: str, name: str, body: Mapping[str, Any], on_answer: OnReply) -> None:
        """Take a request of a session, and have the answer passed on, with ``status`` and ``error``
        if it is refused.

        Args:
            do: "open", "act", "end" or "close".
            name: the session.
            body: the other keys of the request.
            on_answer: takes the answer, in this thread or in the sampler's.
        """
        try:
            if do == "act":
                self._sessions[name].act(body, on_answer)
                return
            answer = self._answer_now(do, name, body)
        except Exception as error:
            answer = _refused(error)
        on_answer(answer)

    def _answer_now(self, do: str, name: str, body: Mapping[str, Any]) -> Fields:
        if do == "open":
            self._sessions[name] = _Session(self, flag(body, "train", True))
            return {"session": name}
        if do == "close":
            return self._sessions.pop(name).drop()
        if do == "end":
            return self._sessions[name].end(body)
        raise ValueError(f"{do!r:.40} is not a request of a session: open, act, end or close")

    def _talk(self, link: ClientConnection) -> None:
        """Take the requests that come by a connection, until it is lost."""
        checked_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                for request in _requests_in(link.recv(timeout=_TICK_S, decode=False)):
                    session = request["session"]
                    on_answer = partial(self._queue, link, session)
                    self.submit(request["do"], session, request["said"], on_answer)
            now = time.monotonic()
            if now - checked_at > _TICK_S:
                checked_at = now
                self._episodes.time_out(self.action_timeout_s)
            self.after_answers()

    def _queue(self, link: ClientConnection, session: str, answer: Fields) -> None:
        self._answers.append((link, packed({"session": session, "answer": answer})))


def _refused(error: Exception) -> Fields:
    """Return the answer to a request that failed."""
    match error:
        case ClosedEpisodeError() | EpisodeTimeout() | SamplerDied() | KeyError():
            refusal = Refusal(
                410, f"The session or its episode is gone: {error}. Open a new session."
            )
        case AiorlError() | ValueError() | TypeError():
            refusal = Refusal(400, getattr(error, "message", str(error)))
        case RuntimeError():  # as many episodes are open as may be
            refusal = Refusal(503, str(error))
        case _:
            refusal = refusal_of(error)
    return {"status": refusal.status, "error": refusal.sentence}


def _messages_of(values: Iterable[bytes]) -> Iterator[bytes]:
    """Yield values, which are packed, as arrays of those that together have some size at most."""
    parts = list[bytes]()
    num_bytes = 0
    for value in values:
        if parts and num_bytes + len(value) > _MAX_MESSAGE:
            yield _array_of(parts)
            parts = []
            num_bytes = 0
        parts.append(value)
        num_bytes += len(value)
    if parts:
        yield _array_of(parts)


def _array_of(values: Sequence[bytes]) -> bytes:
    return b"".join([msgpack.Packer().pack_array_header(len(values)), *values])


def _requests_in(message: bytes) -> list[Fields]:
    """Return the requests in a message of the gate.

    Raises:
        ConnectionError: it is none.
    """
    try:
        requests = unpacked(message, _MAX_CONTAINERS)
    except Refusal as refusal:
        raise ConnectionError(refusal.sentence) from refusal
    if not isinstance(requests, list) or any(
        not isinstance(request, dict) or request.keys() != {"session", "do", "said"}
        for request in requests
    ):
        raise ConnectionError("The message is no list of requests.")
    return requests


def client_env(name: str) -> Callable[[EnvContext], ClientEnv]:
    """Return the function that makes environments for clients."""
    return ClientEnv


class _Session:
    """Session: its open episode, if any, with the steps and the sum of the rewards of that."""

    def __init__(self, env: ClientEnv, is_trained_on: bool) -> None:
        self._env = env
        self._is_trained_on = is_trained_on
        self._episode: Any = None
        self._steps = 0
        self._total = 0.0

    def act(self, body: Mapping[str, Any], on_answer: OnReply) -> None:
        check_keys(body, _OF_ACT)
        obs = self._values(body, "observation")
        client_actions = self._values(body, "action") if "action" in body else None
        if flag(body, "start"):
            self.drop()
        if self._episode is None:
            self._episode = self._env.start_episode(training_enabled=self._is_trained_on)
        self._publish(body, self._env.publish, obs, client_actions, on_answer)
        self._steps += 1

    def end(self, body: Mapping[str, Any]) -> Fields:
        check_keys(body, _OF_END)
        if not self._steps:
            raise Refusal(400, "The session has no step to end: 'act' begins an episode.")
        obs = self._values(body, "observation")
        is_truncated = flag(body, "truncated")
        self._publish(body, self._env.end_episode, obs, truncated=is_truncated)
        return self.drop()

    def drop(self) -> Fields:
        """Give up the episode unless it has ended, and return its steps and the sum of its
        rewards.
        """
        totals = {"steps": self._steps, "reward": self._total}
        self._env.drop_episode(self._episode)
        self._episode = None
        self._steps = 0
        self._total = 0.0
        return totals

    def _publish(
        self, body: Mapping[str, Any], publish: Callable[..., None], *args: Any, **keys: Any
    ) -> None:
        """Report rewards, infos and done agents, then publish observations; a refused request adds
        no reward.
        """
        if "dones" in body and not self._env.is_by_agent:
            raise Refusal(400, "'dones' is for several agents; 'end' ends the episode.")
        infos = self._by_agent(body, "info")
        dones = body.get("dones")
        if _is_deep(infos, _MAX_DEPTH):
            raise Refusal(400, f"'info' is nested in more than {_MAX_DEPTH} levels.")
        rewards: dict[str, float] = {}
        if self._steps:  # a reward belongs to an action
            for agent, reward in self._by_agent(body, "reward", 0.0).items():
                rewards[agent] = number(reward, "reward")
        self._env.log_returns(self._episode, rewards, infos, dones)
        try:
            publish(self._episode, *args, **keys)
        except ValueError:
            self._env.log_returns(
                self._episode, {agent: -reward for agent, reward in rewards.items()}
            )
            raise
        self._total += sum(rewards.values())

    def _values(self, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Return the observations or the actions of a request by agent; those of unknown agents are
        not read.
        """
        if key not in body:
            raise Refusal(400, f"The request needs {key!r}.")
        values = dict(self._by_agent(body, key))
        space = getattr(self._env, f"{key}_space")
        for agent, value in values.items():
            if isinstance(space, spaces.Space):
                values[agent] = parse_value(space, value, key)
            elif agent in space:
                values[agent] = parse_value(space[agent], value, key)
        return values

    def _by_agent(
        self, body: Mapping[str, Any], key: str, default: Any = None
    ) -> Mapping[str, Any]:
        """Return a part of a request by agent."""
        part = body.get(key, default)
        if not self._env.is_by_agent:
            return {DEFAULT_AGENT_ID: part}
        if not isinstance(part or {}, Mapping):
            raise Refusal(400, f"{key!r} must be an object, agent -> {key}.")
        return part or {}


def _setting(config: EnvContext, key: str, read: Callable[[Any], Any], default: Any = None) -> Any:
    """Return a setting of an environment."""
    try:
        return read(config.get(key, default))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"env_config.{key} can't be used: {error}",
            key=f"env_config.{key}",
            hint=("A space looks like {kind: Discrete, n: 2}; docs/clients.md has all kinds."),
        ) from error


def _spaces(setting: Any) -> Any:
    """Return the space of a description, or the spaces by agent of a mapping of them; spaces are
    their own.
    """
    space = gymnasium_space(setting)
    if isinstance(space, spaces.Space):
        return space
    if isinstance(space, Mapping) and space and "kind" not in space:
        return {str(agent): _spaces(part) for agent, part in space.items()}
    return space_from_dict(space)


def _is_deep(value: Any, levels: int) -> bool:
    """Return True if values are nested in more than some number of levels."""
    if levels < 0:
        return True
    if isinstance(value, Mapping):
        return any(_is_deep(part, levels - 1) for part in value.values())
    return isinstance(value, list | tuple) and any(_is_deep(part, levels - 1) for part in value)


# The gate
# --------------------------------------------------------------------------------------------------


class _Link:
    """Connection of an environment, and the requests that it has not answered yet, at most one of
    each session.

    Attributes:
        waiting: session -> its answer to come, and the bytes of its request.
    """

    def __init__(self, socket: WebSocket, mail: Budget) -> None:
        self.waiting: dict[str, tuple[Reply, int]] = {}
        self._socket = socket
        self._requests: list[bytes] = []
        self._share = Share(mail)

    def ask(self, do: str, session: str, body: Fields) -> Reply:
        if session in self.waiting:
            raise Refusal(
                409, "The last request of this session is still under way. Wait for its answer."
            )
        message = packed({"session": session, "do": do, "said": body})
        num_bytes = len(message) + _MAIL_ITEM_BYTES
        unanswered = self._share.num_bytes + num_bytes
        # this is also what the queue of the worker holds
        if unanswered > _MAX_MAIL_OF_WORKER or not self._share.resize(unanswered):
            raise full()
        answer = Reply()
        self.waiting[session] = answer, num_bytes
        if not self._requests:  # all requests of a turn are sent together
            asyncio.get_running_loop().call_soon(self._send)
        self._requests.append(message)
        return answer

    def _send(self) -> None:
        self._socket.write(_messages_of(self._requests))
        self._requests = []

    def receive(self, message: bytes | str) -> None:
        for fields in msgpack.unpackb(message, object_hook=_array):
            reply, num_bytes = self.waiting.pop(fields["session"])
            self._share.resize(self._share.num_bytes - num_bytes)
            answer = fields["answer"]
            if "error" in answer:
                answer = Refusal(answer["status"], answer["error"])
            reply.set_result(answer)

    def lose(self) -> None:
        """Answer what waits for a worker that is gone."""
        self._share.resize(0)
        for reply, _ in self.waiting.values():
            reply.set_result(Refusal(410, _GONE))


class Gate(App):
    """App of the client port of a run: sessions of clients, each with a worker, and the routes to
    them.
    """

    def __init__(self, run_dir: Path) -> None:
        """Wait for workers that have the secret in a file of the run directory."""
        # imported here, because workers do without its packages
        from aiorl.serving.request_metrics import RequestMetrics

        super().__init__()
        self._secret = token_in(run_dir / CLIENT_SECRET)
        self._run_dir = run_dir
        self._links: dict[int, _Link] = {}
        self._numbers = itertools.count()
        # the arm of a session is the number of its worker's link
        self._sessions = Sessions(_MAX_SESSIONS, _TTL_S, on_expiry=self._forget)
        self._mail = Budget(_MAX_MAIL)
        metrics = self._metrics = RequestMetrics()
        metrics.count_sessions(self._sessions)
        metrics.gauge(
            "aiorl_client_port_workers",
            "Environments that answer clients.",
            lambda: len(self._links),
        )
        metrics.gauge(
            "aiorl_client_port_unanswered_bytes",
            "Bytes of the requests that environments have not answered.",
            lambda: self._mail.num_bytes,
        )
        self.on_answer.append(metrics.note)
        handlers: dict[str, JsonHandler] = {
            do: partial(self._ask, do) for do in ("act", "end", "close")
        }
        add_message_routes(
            self, handlers | {"open": self._open, "join": self._join}, metrics.note_message
        )
        self.add("GET", "/metrics", metrics.answer)
        self.add("GET", "/live", always({"live": True}), is_open=True)
        self.add("GET", "/ready", self._ready, is_open=True)
        self.add("WEBSOCKET", "/workers", self._worker, is_open=True)

    # Workers
    # ----------------------------------------------------------------------------------------------

    async def _worker(self, socket: WebSocket) -> None:
        if not hmac.compare_digest(token_of(socket.request), self._secret):
            return
        socket.exempt()
        number = next(self._numbers)
        link = _Link(socket, self._mail)
        self._links[number] = link
        try:
            while (message := await socket.receive()) is not None:
                link.receive(message)
                await socket.drain()
        finally:
            del self._links[number]
            link.lose()

    def _forget(self, session: Session) -> None:
        self._metrics.note_expiry(session)
        link = self._links.get(session.arm)
        if link is not None:
            # refused if its last request is still under way; the environment gives it up by itself
            with suppress(Refusal):
                link.ask("close", session.id, {})

    # Requests of clients
    # ----------------------------------------------------------------------------------------------

    def _open(self, body: Fields) -> Reply:
        check_keys(body, {"train"})
        flag(body, "train", True)
        if not self._links:
            raise Refusal(
                503,
                "The run has no worker for clients yet: it starts, or compiles its first update."
                " Try again in a second.",
                RETRY_SOON,
            )
        number = min(self._links, key=self._sessions.num_of_arm.__getitem__)
        session = self._sessions.open("", number)
        try:
            return self._links[number].ask("open", session.id, body)
        except Refusal:
            self._sessions.close(session.id)
            raise

    def _ask(self, do: str, body: Fields) -> Reply:
        session = self._sessions.find(body.pop("session", None))
        link = self._links.get(session.arm)
        if link is None:
            self._sessions.close(session.id)
            raise Refusal(410, _GONE)
        answer = link.ask(do, session.id, body)
        if do == "close":
            self._sessions.close(session.id)
        return answer

    def _join(self, body: Fields) -> Fields:
        """Return the learner's addresses, for a client that is a worker itself."""
        try:
            return {"addresses": run_facts(self._run_dir)["addresses"]}
        except (OSError, ValueError):
            raise Refusal(503, "No worker can join this run yet. Try again in a second.") from None

    async def _ready(self, request: Request) -> Response:
        return json_response({"ready": bool(self._links)}, status=200 if self._links else 503)


def _array(value: Fields) -> Any:
    if value.keys() != {"data", "dtype", "shape"}:
        return value
    return np.frombuffer(value["data"], np.dtype(value["dtype"]).newbyteorder("<")).reshape(
        value["shape"]
    )
