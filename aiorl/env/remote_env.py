"""RemoteEnv: each copy of an environment in a process of its own, all stepped at the same time.

Worth it when a step takes milliseconds: the waits of the copies overlap. The children are fresh Python
processes (nothing is forked or pickled), so the environment must be known by id or import path. A child ends
with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.spaces import space_from_dict
from aiorl.env import remote_child as wire
from aiorl.env.checks import ObservationCheck
from aiorl.env.lockstep import LockstepEnv, VectorStep
from aiorl.errors import BadObservationError, BadRewardError, ConfigError, EnvError, UnknownEnvError

__all__ = ["RemoteEnv"]

_ENV_ERRORS = {error.__name__: error for error in (EnvError, BadObservationError, BadRewardError)}
_CLOSE_WAIT_S = 2.0


class RemoteEnv(LockstepEnv):
    """N environments in N child processes."""

    def __init__(
        self,
        env: str,
        env_config: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        *,
        worker_index: int = 0,
        horizon: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Start the processes and wait until each has made its environment.

        Args:
            env: id or import path; names given to ``register_env`` exist only in the process that gave them.
            env_config: the environment's own settings; must be expressible in JSON.
            num_envs: number of copies N.
            worker_index: slot of the worker, for the environments' EnvContext.
            horizon: truncate episodes at this many steps; None or 0 = the environment's own limit.
            timeout_s: longest wait for one answer of a child.

        Raises:
            ConfigError: the children refuse the name, config or horizon.
            EnvError: an environment's constructor raised, or a child died.
        """
        self.env_id = env
        self.num_envs = num_envs
        self._children: list[_Child] = []
        self._closed = False
        try:
            for index in range(num_envs):
                settings = {
                    "env": env,
                    "env_config": dict(env_config or {}),
                    "worker_index": worker_index,
                    "vector_index": index,
                    "horizon": horizon,
                }
                self._children.append(_Child(env, index, _as_json(settings), timeout_s))
            ready = [json.loads(child.receive(wire.READY)) for child in self._children]
        except BaseException:
            self.close()
            raise
        self.observation_space = space_from_dict(ready[0]["observation_space"])
        self.action_space = space_from_dict(ready[0]["action_space"])
        self.max_episode_steps = ready[0]["max_episode_steps"]
        check = ObservationCheck(env, self.observation_space)
        self._action_dtype = np.dtype(self.action_space.dtype)
        self._obs: NDArray[Any] = np.zeros((num_envs, *check.shape), check.dtype)
        self._obs_bytes = self._obs[0].nbytes
        self._rewards = np.zeros(num_envs, np.float64)
        self._terminateds = np.zeros(num_envs, np.bool_)
        self._truncateds = np.zeros(num_envs, np.bool_)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [child.process.pid for child in self._children]

    def reset(self, seeds: Sequence[int] | None = None) -> NDArray[Any]:
        """First observations of new episodes; see LockstepEnv."""
        for index, child in enumerate(self._children):
            seed = 0 if seeds is None else int(seeds[index])
            child.send(wire.RESET, wire.SEED.pack(seeds is not None, seed))
        for index, child in enumerate(self._children):
            self._obs[index] = self._to_obs(child.receive(wire.RESULT), 0)
        return self._obs

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every copy at the same time; see LockstepEnv."""
        actions = np.ascontiguousarray(actions, self._action_dtype)
        for child, action in zip(self._children, actions, strict=True):
            child.send(wire.STEP, action.tobytes())
        finals: list[NDArray[Any]] = []
        final_index: list[int] = []
        for index, child in enumerate(self._children):
            payload = child.receive(wire.RESULT)
            self._rewards[index], flags = wire.STEP_HEAD.unpack_from(payload)
            self._terminateds[index] = bool(flags & wire.TERMINATED)
            self._truncateds[index] = bool(flags & wire.TRUNCATED)
            self._obs[index] = self._to_obs(payload, wire.STEP_HEAD.size)
            if flags & wire.FINAL:
                child.steps = 0
                final_index.append(index)
                finals.append(self._to_obs(payload, wire.STEP_HEAD.size + self._obs_bytes))
        result = VectorStep(self._obs, self._rewards, self._terminateds, self._truncateds)
        if finals:
            result.final_index = np.array(final_index, np.int64)
            result.final_obs = np.stack(finals)
        return result

    def _to_obs(self, payload: bytearray, offset: int) -> NDArray[Any]:
        count = self._obs[0].size
        return np.frombuffer(payload, self._obs.dtype, count, offset).reshape(self._obs.shape[1:])

    def close(self) -> None:
        """End the children; one that does not end by itself within 2 s is killed."""
        if self._closed:
            return
        self._closed = True
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.wait()


class _Child:
    """One child process and the connection to it.

    Attributes:
        steps: steps asked for in the current episode.
    """

    def __init__(self, env_id: str, index: int, settings: bytes, timeout_s: float) -> None:
        self._env_id = env_id
        self._index = index
        self._timeout_s = timeout_s
        self.steps = 0
        self.connection, theirs = socket.socketpair()
        their_life, self._life = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aiorl.env.remote_child", str(theirs.fileno()), str(their_life)],
                pass_fds=(theirs.fileno(), their_life),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            self.hang_up()
            raise EnvError(env_id, f"its process did not start: {error}", vector_index=index) from error
        finally:
            theirs.close()
            os.close(their_life)
        self.connection.settimeout(timeout_s)
        self.send(wire.SETUP, settings)

    def send(self, kind: bytes, payload: bytes) -> None:
        self.steps = 0 if kind == wire.RESET else self.steps + (kind == wire.STEP)
        # A child that is gone is told of by ``receive``, which knows why.
        with contextlib.suppress(OSError):
            wire.send_frame(self.connection, kind, payload)

    def receive(self, expected: bytes) -> bytearray:
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
            self._env_id,
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
        return EnvError(self._env_id, message, vector_index=self._index, step=self.steps)

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


def _as_json(settings: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(settings).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"env_config cannot be sent to a process of its own: {error}.",
            key="env_config",
            hint="Use numbers, strings, lists and mappings only, or vectorize: serial.",
        ) from error
