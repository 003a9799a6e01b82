"""A child process that holds one environment, as its parent sees it.

The children are fresh Python processes (nothing is forked or pickled). A child ends with its parent, however
that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from aiorl.env import remote_child as wire
from aiorl.errors import (
    BadObservationError,
    BadRewardError,
    ConfigError,
    EnvContractError,
    EnvError,
    UnknownEnvError,
)
from aiorl.process.imports import child_python, python_path

__all__ = ["ChildProcess"]

_ENV_ERRORS = {error.__name__: error for error in (EnvError, BadObservationError, BadRewardError, EnvContractError)}
_CLOSE_WAIT_S = 2.0


class ChildProcess:
    """One child process and the connection to it.

    Attributes:
        env_id: the environment's name.
        connection: the socket to it; its timeout is that of one answer.
        process: the process.
        steps: steps asked for in the current episode.
    """

    def __init__(
        self,
        env_id: str,
        index: int,
        settings: Mapping[str, Any],
        timeout_s: float,
        module: str = "aiorl.env.remote_child",
    ) -> None:
        """Start the process and send it its settings; it answers with READY.

        Args:
            env_id: the environment's name, for messages.
            index: which copy it holds.
            settings: what the child is told; must be expressible in JSON.
            timeout_s: longest wait for one answer.
            module: what the child runs.

        Raises:
            ConfigError: settings that JSON cannot express.
            EnvError: the process did not start.
        """
        payload = _as_json(settings)
        self.env_id = env_id
        self._index = index
        self._timeout_s = timeout_s
        self.steps = 0
        self.connection, theirs = socket.socketpair()
        their_life, self._life = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*child_python(module), str(theirs.fileno()), str(their_life)],
                pass_fds=(theirs.fileno(), their_life),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **python_path()},
            )
        except OSError as error:
            self.hang_up()
            raise EnvError(env_id, f"its process did not start: {error}", vector_index=index) from error
        finally:
            theirs.close()
            os.close(their_life)
        self.connection.settimeout(timeout_s)
        self.send(wire.SETUP, payload)

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send one frame; ``receive`` reports a child that is gone."""
        self.steps = 0 if kind == wire.RESET else self.steps + (kind == wire.STEP)
        # A child that is gone is told of by ``receive``, which knows why.
        with contextlib.suppress(OSError):
            wire.send_frame(self.connection, kind, payload)

    def receive(self, expected: bytes) -> bytearray:
        """The payload of the next frame.

        Raises:
            EnvError: the child reported a fault, died, or did not answer in time.
            ConfigError: the child refuses its settings.
        """
        try:
            kind, payload = wire.receive_frame(self.connection)
        except TimeoutError as error:
            raise self._fault(f"gave no answer within {self._timeout_s:g} s") from error
        except (EOFError, OSError) as error:
            raise self._fault(f"its process (pid {self.process.pid}) died: {self._exit_text()}") from error
        if kind == wire.ERROR:
            raise self._told(json.loads(payload))
        if kind != expected:
            raise self._fault(f"its process answered {kind!r} where {expected!r} was due")
        return payload

    def _told(self, facts: dict[str, Any]) -> Exception:
        """The error that the child reported."""
        if facts["config"]:
            kind = UnknownEnvError if facts["kind"] == UnknownEnvError.__name__ else ConfigError
            return kind(facts["message"], key=facts["key"], hint=facts["hint"])
        kind_of_env_error = _ENV_ERRORS.get(facts["kind"], EnvError)
        return kind_of_env_error(
            self.env_id,
            facts["message"],
            vector_index=self._index,
            step=int(facts.get("step", 0)),
            traceback_text=facts.get("traceback", ""),
        )

    def _exit_text(self) -> str:
        try:
            status = self.process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def _fault(self, message: str) -> EnvError:
        return EnvError(self.env_id, message, vector_index=self._index, step=self.steps)

    def hang_up(self) -> None:
        """Let the child end."""
        self.connection.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def wait(self) -> None:
        """Wait for the end; kill if it does not come."""
        try:
            self.process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()


def _as_json(settings: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(settings).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"env_config cannot be sent to a process of its own: {error}.",
            key="env_config",
            hint="Use numbers, strings, lists and mappings only, or keep the environments in this process.",
        ) from error
