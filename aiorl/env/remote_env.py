"""RemoteEnv: environments of any kind in their own processes, each polled as soon as it is ready.

They pay off if a step takes milliseconds, or if steps take very different times. The children are
fresh Python processes (nothing is forked or pickled), so environments are named by id or import
path. A child always ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import socket
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from aiorl.config.code import refuse_objects, without_objects
from aiorl.data.columns import DEFAULT_AGENT_ID, Array
from aiorl.data.nested_codec import pack, unpack
from aiorl.data.spaces import space_from_dict
from aiorl.env import remote_child as wire
from aiorl.env.base_env import (
    ALL_AGENTS,
    ASYNC_RESET_RETURN,
    SEED_STRIDE,
    BaseEnv,
    ByAgent,
    FinishedGame,
    LockstepEnv,
    Poll,
    SettingsChange,
)
from aiorl.env.gym_like import ResetResult
from aiorl.env.registry import name_elsewhere
from aiorl.env.vector_env import Copies
from aiorl.env.wrapping import EnvPlan
from aiorl.errors import (
    BadObservationError,
    BadRewardError,
    ConfigError,
    EnvContractError,
    EnvError,
    SamplerDied,
    UnknownEnvError,
)
from aiorl.process.children import start_process
from aiorl.process.imports import child_python, python_path

logger = logging.getLogger(__name__)
_HOUR_S = 3600.0


class RemoteEnv(BaseEnv):
    """N environments in N child processes, as a BaseEnv.

    Attributes:
        env_id: name for messages.
        max_episode_steps: length at which the environments truncate episodes; None if there is no
            known limit.
        dropped_infos: number of entries of info dicts that could not be sent.
        processes: processes of the environments.
    """

    def __init__(self, plan: EnvPlan, *, timeout_s: float = 600.0) -> None:
        """Start the processes and wait until each has made its environment.

        Args:
            plan: description of the environments; its settings must be expressible in JSON.
            timeout_s: longest wait for one answer of a child, seconds.

        Raises:
            ConfigError: the children refuse the name or config, or there is no name for the
                environments.
            EnvError: an environment's constructor raised, or a child died.
        """
        self.num_envs = plan.num_envs
        self.dropped_infos = 0
        self.env_id = name_elsewhere(plan.env)
        self._env_id = self.env_id  # for messages of the base class
        self._wait_s = plan.remote_wait_ms / 1000.0
        self._games: list[FinishedGame] = []
        self._is_started = False
        self.processes = ChildProcesses(self.env_id, plan, timeout_s)
        # This ends the children when this object is garbage collected.
        self._end = weakref.finalize(self, self.processes.end)
        self._end.atexit = False
        try:
            ready = self.processes.start_all()
        except BaseException:
            self.stop()
            raise
        self._has_one_agent: bool = ready[0]["has_one_agent"]
        self._counts_games = all(facts["counts_games"] for facts in ready)
        self.max_episode_steps: int | None = ready[0]["max_episode_steps"]
        self.observation_space = _space(ready[0]["observation_space"])
        self.action_space = _space(ready[0]["action_space"])

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [copy.process.pid for copy in self.processes.copies]

    @property
    def restarts(self) -> int:
        """Number of processes replaced so far."""
        return self.processes.restarts

    def poll(self) -> Poll:
        """Return the results of the environments that are ready, at least one, in order; the first
        poll resets all.

        Raises:
            EnvError: an environment failed and must not be restarted.
            SamplerDied: ``interrupt`` was called.
        """
        if not self._is_started:
            self._is_started = True
            for index in range(self.num_envs):
                self.try_reset(index)
        if not self.processes.busy:
            raise EnvContractError(
                self.env_id, "it was polled, but no environment has anything to do"
            )
        faults: dict[Any, EnvError] = {}
        poll = Poll.empty()._replace(faults=faults)
        gather_until = math.inf
        while True:
            now = time.monotonic()
            busy = self.processes.busy
            if poll.obs or faults:
                gather_until = min(gather_until, now + self._wait_s)
                if gather_until <= now or not busy:
                    return Poll(*(dict(sorted(part.items())) for part in poll))
            due = min(gather_until, *(copy.answer_due for copy in busy))
            for copy in self.processes.wait_for_answers(due - now):
                self._take(copy, poll, faults)
            self._find_overdue(faults)

    def send_actions(self, action_dict: Mapping[Any, ByAgent]) -> None:
        """Start the step of each environment that has actions, without waiting for it."""
        for index, actions in action_dict.items():
            self.processes.copies[index].send(wire.STEP, pack(dict(actions)))

    def try_reset(self, env_id: Any) -> str:
        """Begin a new episode in one environment; its first observation arrives with a later
        poll.
        """
        self.processes.copies[env_id].send(wire.RESET, pack(None))
        return ASYNC_RESET_RETURN

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """See `BaseEnv.in_lockstep`; each copy is reset as soon as its episode ends."""
        if not self._has_one_agent:
            return None
        return _RemoteCopies(self, self.processes.copies).in_lockstep(horizon)

    def change_settings(self, change: SettingsChange) -> None:
        """See `BaseEnv.change_settings`."""
        self.processes.change_settings(change)

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See `BaseEnv.take_finished_games`."""
        if not self._counts_games:
            return None
        games = self._games
        self._games = []
        return games

    def interrupt(self) -> None:
        """See `BaseEnv.interrupt`."""
        self.processes.interrupt()

    def stop(self) -> None:
        """End the children; those that do not end within 2 s are killed."""
        self._end()

    def _take(self, copy: ChildProcess, poll: Poll, faults: dict[Any, EnvError]) -> None:
        """Take in the next frame of a child."""
        try:
            if copy.is_starting:
                copy.receive()
                copy.is_starting = False
                copy.send(wire.RESET, pack(None))
                return
            poll.add(copy.index, self.result(copy))
        except EnvError as error:
            self.processes.replace(copy, error)
            faults[copy.index] = error

    def result(self, copy: ChildProcess) -> list[Any]:
        """Wait for a child's observations, rewards, terminateds, truncateds and infos by agent.

        Raises:
            EnvError: the child reported a fault, died, or did not answer in time.
            SamplerDied: ``interrupt`` was called.
        """
        *columns, infos, games, dropped = unpack(copy.receive())
        copy.is_busy = False
        self._games.extend(FinishedGame(*game) for game in games)
        if dropped and not self.dropped_infos:
            logger.warning(
                "environment %s: infos that cannot be sent between processes are dropped",
                self.env_id,
            )
        self.dropped_infos += dropped
        return [*columns, unpack(infos)]

    def _find_overdue(self, faults: dict[Any, EnvError]) -> None:
        now = time.monotonic()
        for copy in self.processes.busy:
            if copy.answer_due < now:
                error = copy.overdue()
                self.processes.replace(copy, error)
                faults[copy.index] = error


class _RemoteEnvironment:
    """Environment in its own process, in gym-like form: a step or reset under way is not sent
    again.
    """

    def __init__(self, remote: RemoteEnv, copy: ChildProcess) -> None:
        self._remote = remote
        self._copy = copy
        self.observation_space = remote.observation_space
        self.action_space = remote.action_space
        self.spec = SimpleNamespace(max_episode_steps=remote.max_episode_steps)

    def send(self, action: Any) -> None:
        """Begin a step."""
        if not self._copy.is_busy:
            self._copy.send(wire.STEP, pack({DEFAULT_AGENT_ID: action}))

    def begin_episode(self, seed: int | None) -> None:
        """Begin a reset."""
        if not self._copy.is_busy:
            self._copy.send(wire.RESET, pack(seed))

    def reset(self, *, seed: int | None = None) -> ResetResult:
        """Wait for the first observation of an episode."""
        self.begin_episode(seed)
        return self._remote.result(self._copy)[0][DEFAULT_AGENT_ID], {}

    def step(self, action: Any) -> tuple[Any, ...]:
        """Wait for the results of a step."""
        self.send(action)
        obs, rewards, terminateds, truncateds, infos = self._remote.result(self._copy)
        agent = DEFAULT_AGENT_ID
        return (
            obs[agent],
            rewards[agent],
            terminateds[ALL_AGENTS],
            truncateds[ALL_AGENTS],
            infos.get(agent),
        )


class _RemoteCopies(Copies):
    """Environments in their own processes, which step and begin their episodes at the same time."""

    can_begin = True

    def __init__(self, remote: RemoteEnv, copies: Sequence[ChildProcess]) -> None:
        self._remote = remote
        self.senders = [_RemoteEnvironment(remote, copy) for copy in copies]
        super().__init__(self.senders, env_id=remote.env_id)

    def begin_episodes(self, rows: Array, indices: Sequence[int]) -> None:
        for index in indices:
            self.senders[index].begin_episode(self.seeds[index])
        super().begin_episodes(rows, indices)

    def take_finished_games(self) -> list[FinishedGame] | None:
        return self._remote.take_finished_games()

    def close(self) -> None:
        self._remote.stop()


class ChildProcesses:
    """Child processes of a RemoteEnv, one for each copy; some that fail are replaced.

    Attributes:
        copies: the processes, in the order of the copies.
        restarts: number of processes replaced so far.
    """

    def __init__(self, env_id: str, plan: EnvPlan, timeout_s: float) -> None:
        """Prepare without starting any.

        Args:
            env_id: name of the environment in other processes.
            plan: description of the environments.
            timeout_s: longest wait for one answer of a child, seconds.
        """
        self.copies: list[ChildProcess] = []
        self.restarts = 0
        self._env_id = env_id
        self._plan = plan
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self._is_interrupted = False

    @property
    def busy(self) -> list[ChildProcess]:
        """The processes that owe an answer."""
        return [copy for copy in self.copies if copy.is_busy]

    def start_all(self) -> list[dict[str, Any]]:
        """Start all processes; return the facts that each reports once it has made its environment.

        Raises:
            ConfigError: the settings cannot be sent, or a child refused them.
            EnvError: a child reported a fault, died, or did not answer in time.
        """
        for index in range(self._plan.num_envs):
            self.copies.append(self._start(index))
        ready = [json.loads(copy.receive()) for copy in self.copies]
        for copy in self.copies:
            copy.is_starting = False
            copy.is_busy = False
        return ready

    def change_settings(self, change: SettingsChange) -> None:
        """Send other settings to the environments, also to those that are started later.

        Raises:
            ConfigError: a setting is an object, which can't be sent.
        """
        refuse_objects(change.config, "env_config")
        self._plan = replace(self._plan, env_config=dict(change.config))
        config = without_objects(dict(change.config), has_members=False)
        for copy in self.copies:
            copy.send(wire.SETTINGS, pack({"config": config, "seed": change.seed_of(copy.index)}))

    def _start(self, index: int) -> ChildProcess:
        plan = self._plan
        refuse_objects(plan.env_config, "env_config")
        refuse_objects(list(plan.wrapping.users), "wrappers")
        seed = plan.seed
        if seed is not None:
            # The replacement of a process must not play the same episodes again.
            seed += SEED_STRIDE * index + self.restarts
        settings = {
            "env": self._env_id,
            "env_config": without_objects(dict(plan.env_config), has_members=False),
            "worker_index": plan.worker_index,
            "vector_index": index,
            "wrapping": without_objects(asdict(plan.wrapping), has_members=False),
            "seed": seed,
        }
        copy = ChildProcess(self._env_id, index, settings, self._timeout_s)
        self._selector.register(copy.connection, selectors.EVENT_READ, copy)
        return copy

    def wait_for_answers(self, timeout_s: float) -> list[ChildProcess]:
        """Return the processes from which a frame can be read.

        Args:
            timeout_s: longest wait for one of them, seconds; less than 0 does not wait.
        """
        return [key.data for key, _ in self._selector.select(max(0.0, timeout_s))]

    def replace(self, copy: ChildProcess, error: EnvError) -> None:
        """Start a new process for a copy that failed, or raise the error if restarts are used up.

        Args:
            copy: its process.
            error: its failure.

        Raises:
            EnvError: the given one; as many processes of this copy failed within the last hour as
                the plan allows.
        """
        now = time.monotonic()
        while copy.failed_at and copy.failed_at[0] < now - _HOUR_S:
            copy.failed_at.popleft()
        if len(copy.failed_at) >= self._plan.max_restarts_per_hour:
            raise error
        self._selector.unregister(copy.connection)
        copy.hang_up()
        copy.process.kill()
        copy.process.wait()
        self.restarts += 1
        logger.warning("restarting an environment (%d restarts so far): %s", self.restarts, error)
        fresh = self._start(copy.index)
        fresh.failed_at = copy.failed_at
        fresh.failed_at.append(now)
        self.copies[copy.index] = fresh
        if self._is_interrupted:  # meanwhile
            fresh.interrupt()

    def interrupt(self) -> None:
        """Make all waits for answers raise SamplerDied; any thread can call this."""
        self._is_interrupted = True
        for copy in self.copies:
            copy.interrupt()

    def end(self) -> None:
        """End the processes; kill those that do not end within 2 s."""
        self._selector.close()
        for copy in self.copies:
            copy.hang_up()
        for copy in self.copies:
            copy.wait()


def _space(data: dict[str, Any] | None) -> Any:
    return None if data is None else space_from_dict(data)


_CONFIG_ERRORS = {UnknownEnvError.__name__: UnknownEnvError}
_ENV_ERRORS = {
    error.__name__: error
    for error in (EnvError, BadObservationError, BadRewardError, EnvContractError)
}
_CLOSE_WAIT_S = 2.0


class ChildProcess:
    """Child process and the connection to it.

    Attributes:
        env_id: the environment's name.
        index: index of its copy.
        connection: the socket to it, with the timeout of one answer.
        process: the process.
        steps: steps requested in the current episode.
        is_starting: True until it has made its environment.
        is_busy: True while it owes an answer.
        answer_due: deadline of the answer, by the monotonic clock.
        failed_at: times at which it and its predecessors were replaced, by the same clock.
    """

    def __init__(
        self,
        env_id: str,
        index: int,
        settings: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        """Start the process and send it its settings; it answers with READY.

        Args:
            env_id: the environment's name, for messages.
            index: index of its copy.
            settings: settings sent to the child; must be expressible in JSON.
            timeout_s: longest wait for one answer, seconds.

        Raises:
            ConfigError: the settings cannot be expressed in JSON.
            OSError: the process did not start.
        """
        try:
            payload = json.dumps(settings).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"env_config cannot be sent to another process: {error}.",
                key="env_config",
                hint=(
                    "Use only numbers, strings, lists and mappings, or keep the environments in"
                    " this process."
                ),
            ) from error
        self.env_id = env_id
        self.index = index
        self.steps = 0
        self.is_starting = True
        self._is_interrupted = False
        self.failed_at: deque[float] = deque()
        self._timeout_s = timeout_s
        self.connection, theirs = socket.socketpair()
        their_life, self._life = os.pipe()
        try:
            self.process = start_process(
                [*child_python("aiorl.env.remote_child"), str(theirs.fileno()), str(their_life)],
                pass_fds=(theirs.fileno(), their_life),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **python_path()},
            )
        finally:
            theirs.close()
            os.close(their_life)
        self.connection.settimeout(timeout_s)
        self.send(wire.SETUP, payload)

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send one frame; ``receive`` reports a child that is gone. All but SETTINGS require an
        answer.
        """
        if kind != wire.SETTINGS:
            self.is_busy = True
            self.answer_due = time.monotonic() + self._timeout_s
        if kind == wire.RESET:
            self.steps = 0
        elif kind == wire.STEP:
            self.steps += 1
        with contextlib.suppress(OSError):
            wire.send_frame(self.connection, kind, payload)

    def receive(self) -> bytearray:
        """Return the payload of the next frame.

        Raises:
            EnvError: the child reported a fault, died, or did not answer in time.
            ConfigError: the child refused its settings.
            SamplerDied: ``interrupt`` was called.
        """
        try:
            kind, payload = wire.receive_frame(self.connection)
        except TimeoutError as error:
            raise self.overdue() from error
        except (EOFError, OSError) as error:
            if self._is_interrupted:
                raise SamplerDied(
                    "the wait for environments in other processes was interrupted"
                ) from error
            self.wait()
            raise self.fault(
                f"its process (pid {self.process.pid}) died: exit status {self.process.returncode}"
            ) from error
        if kind == wire.ERROR:
            raise self._reported_error(json.loads(payload))
        return payload

    def _reported_error(self, facts: dict[str, Any]) -> Exception:
        """Return the error that the child reported."""
        if facts["config"]:
            config_error = _CONFIG_ERRORS.get(facts["kind"], ConfigError)
            return config_error(facts["message"], key=facts["key"], hint=facts["hint"])
        env_error = _ENV_ERRORS.get(facts["kind"], EnvError)
        return env_error(
            self.env_id,
            facts["message"],
            vector_index=self.index,
            step=facts["step"],
            traceback_text=facts["traceback"],
        )

    def overdue(self) -> EnvError:
        """Return the error for an answer that did not come in time."""
        return self.fault(f"did not answer within {self._timeout_s:g} s")

    def fault(self, message: str) -> EnvError:
        """Return an error of this copy, at its step."""
        return EnvError(self.env_id, message, vector_index=self.index, step=self.steps)

    def interrupt(self) -> None:
        """Make ``receive`` raise immediately, even if it is waiting; any thread can call this."""
        self._is_interrupted = True
        with contextlib.suppress(OSError):  # hung up already
            self.connection.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Close the connection, which ends the child."""
        self.connection.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def wait(self) -> None:
        """Wait for the child to end; kill it if it does not."""
        try:
            self.process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
