"""`env: external`: environments whose episodes are played by clients of the run's client port.

Each worker's environment connects to the server of the port (`aiorl.serving.gate`), which passes requests on to it. The
steps of all its sessions are answered together. A session plays one episode after the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from aiorl.data.actions import leaves_of, nested
from aiorl.data.spaces import space_from_dict, space_to_dict
from aiorl.env.external_env import ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.registry import EnvContext
from aiorl.errors import AiorlError, ClosedEpisodeError, ConfigError, EpisodeTimeout, SamplerDied
from aiorl.serving.values import flag, given_value, held_by, number, part_at
from aiorl.web.messages import Refusal
from aiorl.web.talk import packed, unpacked

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_IDLE_S = 300.0
_MAX_CONCURRENT = 100
_MAX_DEPTH = 50
here: Callable[[Clients], object] | None = None
"""Called with the clients of each environment, in a process that plays itself; None if none does."""


class _Played:
    """Environment that clients play."""

    def __init__(self, config: EnvContext) -> None:
        """Read the spaces.

        Raises:
            ConfigError: a space is missing, or its description is damaged.
        """
        most = int(config.get("max_concurrent", _MAX_CONCURRENT))
        super().__init__(*_spaces_in(config), most)  # type: ignore[call-arg]
        self.clients = Clients(self, config, most)

    def run(self) -> None:
        """Let clients play until the environment is closed."""
        self.clients.run()

    def close(self) -> None:
        """See `ExternalEnv.close`."""
        super().close()  # type: ignore[misc]
        self.clients.close()


class ClientEnv(_Played, ExternalEnv):
    """Environment of one agent that clients play.

    Its config has ``observation_space`` and ``action_space``, descriptions as by `space_to_dict`; ``max_concurrent``
    (100), the limit of open episodes; and ``idle_timeout_s`` (300): an episode without a request for that long is
    truncated.
    """


class ClientMultiAgentEnv(_Played, ExternalMultiAgentEnv):
    """Environment of several agents that clients play; its spaces are mappings, agent -> description."""


def client_env(name: str) -> Callable[[EnvContext], Any]:
    """Return the function that makes environments for clients; spaces by agent make one of several agents."""
    return lambda config: (ClientMultiAgentEnv if _is_by_agent(config.get("observation_space")) else ClientEnv)(config)


def _is_by_agent(given: Any) -> bool:
    return isinstance(given, Mapping) and "kind" not in given


def _spaces_in(config: EnvContext) -> list[Any]:
    """Return the action space and the observation space."""
    found = []
    for key in ("action_space", "observation_space"):
        try:
            given = config.get(key) or {}
            by_agent = {str(agent): space_from_dict(one) for agent, one in given.items()} if _is_by_agent(given) else {}
            if not given:
                raise ConfigError("it is missing")
            found.append(by_agent or space_from_dict(given))
        except ConfigError as error:
            hint = "Write {kind: Discrete, n: 2} or {kind: Box, shape: [4], low: -1, high: 1, dtype: float32}."
            said = f"env_config.{key} does not describe a space: {error}"
            raise ConfigError(said, key=f"env_config.{key}", hint=hint) from error
    return found


@dataclass(slots=True)
class _Session:
    """Session: its open episode, if any, with the steps and the rewards of that."""

    is_trained_on: bool
    episode: Any = None
    steps: int = 0
    total: float = 0.0


class Clients:
    """Clients of an environment, at the other end of a connection."""

    def __init__(self, env: Any, config: EnvContext, most: int) -> None:
        """Prepare without connecting; config as for `ClientEnv`, `most` is the limit of open episodes."""
        env.idle_timeout_s = float(config.get("idle_timeout_s", _IDLE_S))
        self._env = env
        self._is_multi_agent = isinstance(env, ExternalMultiAgentEnv)
        self._most = most
        self._gate: Mapping[str, Any] = config.get("gate") or {}
        self._sessions: dict[str, _Session] = {}
        self._is_over = threading.Event()
        self._link: ClientConnection | None = None

    def run(self) -> None:
        """Answer requests until `close` is called; connect again after a loss.

        Raises:
            ConfigError: the run has no client port.
        """
        if here is not None:
            here(self)
            self._is_over.wait()
            return
        if not self._gate:
            raise ConfigError("An external environment needs clients.", key="client_port", hint="Set client_port.")
        with ThreadPoolExecutor(self._most, "client") as threads:
            said = ""
            while not self._is_over.wait(_RETRY_S if said else 0.0):
                try:
                    with self._dial() as self._link:
                        self._link.send(packed({"about": _described(self._env)}))
                        for message in self._link:
                            threads.submit(self._reply, self._link, message)
                    said = "the connection was lost"
                except (OSError, WebSocketException) as error:
                    said = str(error)
                lost, self._sessions = self._sessions, {}
                for session in list(lost.values()):  # threads that still answer may change it
                    self._drop(session)
                if not self._is_over.is_set():
                    logger.warning("no connection to the client port: %s; trying again", said)

    def close(self) -> None:
        """Make `run` return."""
        self._is_over.set()
        if self._link is not None:
            self._link.close()

    def _dial(self) -> ClientConnection:
        found: Exception = OSError("it has no address")
        for url in self._gate["urls"]:
            try:
                headers = {"Authorization": f"Bearer {self._gate['secret']}"}
                return connect(
                    f"{url}/workers", additional_headers=headers, compression=None, max_size=None, proxy=None
                )
            except (OSError, WebSocketException) as error:
                found = error
        raise found

    def _reply(self, link: ClientConnection, message: str | bytes) -> None:
        said = unpacked(message if isinstance(message, bytes) else b"")
        answer = {"id": said.pop("id"), **self.answer(said.pop("do"), said.pop("session"), said)}
        with suppress(OSError, WebSocketException):  # clients know from the gate
            link.send(packed(answer))

    def answer(self, do: str, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request of a session, with ``status`` and ``error`` if it is refused.

        Args:
            do: "open", "act", "end" or "close".
            name: the session.
            said: the other keys of the request.
        """
        try:
            if do == "open":
                self._sessions[name] = _Session(flag(said, "train", True))
                return {"session": name}
            session = self._sessions.pop(name) if do == "close" else self._sessions[name]
            return {"act": self._act, "end": self._end, "close": self._close}[do](session, said)
        except Exception as error:
            return _fault(error)

    def _act(self, session: _Session, said: Mapping[str, Any]) -> dict[str, Any]:
        obs = self._value(said, "observation")
        action = self._value(said, "action") if "action" in said else None
        if flag(said, "start"):
            self._drop(session)
        if session.episode is None:
            session.episode = self._env.start_episode(training_enabled=session.is_trained_on)
            session.steps, session.total = 0, 0.0
        with self._logged(session, said):
            if action is None:
                action = self._env.get_action(session.episode, obs)
            else:
                self._env.log_action(session.episode, obs, action)
        session.steps += 1
        return {"action": action}

    def _end(self, session: _Session, said: Mapping[str, Any]) -> dict[str, Any]:
        if not session.steps:
            raise Refusal(400, "The session has no step to end: 'act' begins an episode.")
        obs = self._value(said, "observation")
        is_truncated = flag(said, "truncated")
        with self._logged(session, said):
            self._env.end_episode(session.episode, obs, truncated=is_truncated)
        found = {"steps": session.steps, "reward": session.total}
        session.episode, session.steps = None, 0
        return found

    def _close(self, session: _Session, said: Mapping[str, Any]) -> dict[str, Any]:
        self._drop(session)
        return {"steps": session.steps, "reward": session.total}

    def _drop(self, session: _Session) -> None:
        episode, session.episode = session.episode, None
        if episode is not None:
            self._env.drop_episode(episode)

    @contextmanager
    def _logged(self, session: _Session, said: Mapping[str, Any]) -> Iterator[None]:
        """Log rewards since the last request, info, and done agents; a request that is refused adds no reward."""
        if not session.steps:  # there is no action that they could belong to
            yield
            return
        if _is_deep(said.get("info"), _MAX_DEPTH):
            raise Refusal(400, f"'info' is nested in more than {_MAX_DEPTH} levels.")
        rewards = self._rewards(said)
        dones = [said.get("dones")] if self._is_multi_agent else []
        self._env.log_returns(session.episode, rewards, said.get("info"), *dones)
        try:
            yield
        except ValueError:
            self._env.log_returns(session.episode, self._rewards(said, -1.0))
            raise
        session.total += sum(rewards.values()) if self._is_multi_agent else rewards

    def _rewards(self, said: Mapping[str, Any], sign: float = 1.0) -> Any:
        if not self._is_multi_agent:
            return sign * number(said.get("reward", 0.0), "reward")
        given = said.get("reward") or {}
        if not isinstance(given, Mapping):
            raise Refusal(400, "'reward' must be an object, agent -> reward.")
        return {agent: sign * number(one, f"reward of {agent}") for agent, one in given.items()}

    def _value(self, said: Mapping[str, Any], key: str) -> Any:
        """Return the observation or the action of a request, with arrays; by agent if there are several."""
        known = getattr(self._env, f"{key}_space")
        if key not in said:
            raise Refusal(400, f"The request needs {key!r}.")
        if not self._is_multi_agent:
            return _read(known, said[key], key)
        given, is_one = said[key], isinstance(known, spaces.Space)
        if not isinstance(given, dict) or (not is_one and given.keys() - known.keys()):
            raise Refusal(400, f"{key!r} must be an object, agent -> {key}; the agents are {list(known)!r:.300}.")
        return {who: _read(known if is_one else known[who], one, f"{key} of {who}") for who, one in given.items()}


def _is_deep(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels < 0 or any(_is_deep(one, levels - 1) for one in inner)


def _described(env: Any) -> dict[str, Any]:
    def described(space: Any) -> dict[str, Any]:
        is_one = isinstance(space, spaces.Space)
        return space_to_dict(space) if is_one else {agent: described(one) for agent, one in space.items()}

    return {name: described(getattr(env, name)) for name in ("observation_space", "action_space")}


def _read(space: spaces.Space[Any], value: Any, name: str) -> Any:
    """Return a client's value as one of the space."""
    given = given_value(space, value, name)
    try:
        parts = []
        for path, leaf in leaves_of(space):
            part = held_by(np.dtype(leaf.dtype), part_at(given, path))
            if part.shape != leaf.shape or not np.isfinite(part).all():
                raise ValueError(f"shape {list(part.shape)}, expected {list(leaf.shape or ())} of finite numbers")
            parts.append(part[()])
        return nested(space, iter(parts))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise Refusal(400, f"The {name} does not fit its space: {error!s:.200}.") from None


def _fault(error: Exception) -> dict[str, Any]:
    """Return the answer to a request that failed."""
    match error:
        case Refusal():
            return {"status": error.status, "error": error.sentence}
        case ClosedEpisodeError() | EpisodeTimeout() | SamplerDied() | KeyError():
            return {"status": 410, "error": f"The session or its episode is gone: {error}. Open a new session."}
        case AiorlError() | ValueError() | TypeError():
            return {"status": 400, "error": getattr(error, "message", str(error))}
        case RuntimeError():  # as many episodes are open as may be
            return {"status": 503, "error": str(error)}
        case _:
            logger.error("answering a client failed", exc_info=error)
            return {"status": 500, "error": "The worker failed at this request. Its log has the reason."}
