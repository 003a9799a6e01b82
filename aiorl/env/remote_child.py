"""The child's side of RemoteEnv: one environment in a process of its own, ``python -m aiorl.env.remote_child``.

Frames on a socket pair, both ways: kind (1 byte), length (4 bytes), payload. Settings and errors are JSON,
arrays are raw bytes in the dtype and shape that the spaces give. The process ends when its parent does: the
parent holds the other end of a second pipe, which a thread here waits on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.spaces import space_to_dict
from aiorl.env.checks import env_fault
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.env.vector_env import SerialEnv
from aiorl.env.wrapping import Wrapping
from aiorl.errors import AiorlError, ConfigError, EnvError

__all__ = [
    "ERROR",
    "FINAL",
    "GAME",
    "MAX_FRAME_BYTES",
    "READY",
    "RESET",
    "RESULT",
    "SETUP",
    "STEP",
    "STEP_HEAD",
    "TERMINATED",
    "TRUNCATED",
    "make_copy",
    "receive_frame",
    "run_child",
    "send_frame",
]

SETUP, READY, RESET, STEP, RESULT, ERROR = b"u", b"y", b"r", b"s", b"o", b"e"
TERMINATED, TRUNCATED, FINAL = 1, 2, 4
HEAD = struct.Struct("<cI")
STEP_HEAD = struct.Struct("<dBxHxxxx")
"""Reward, flags and number of finished games before the observation bytes of a result; the games are behind them."""
GAME = struct.Struct("<dq")
"""Reward and length of a finished game."""
SEED = struct.Struct("<?q")
MAX_FRAME_BYTES = 1 << 30


def send_frame(connection: socket.socket, kind: bytes, *parts: bytes | memoryview) -> None:
    """Send one frame.

    Raises:
        OSError: the peer is gone.
    """
    connection.sendall(HEAD.pack(kind, sum(len(part) for part in parts)) + b"".join(parts))


def receive_frame(connection: socket.socket) -> tuple[bytes, bytearray]:
    """The next frame's kind and payload.

    Raises:
        EOFError: the peer closed.
        OSError: the connection broke, a timeout included.
    """
    kind, length = HEAD.unpack(_receive_exactly(connection, HEAD.size))
    if length > MAX_FRAME_BYTES:
        raise OSError(f"a frame of {length} bytes is announced, at most {MAX_FRAME_BYTES} are accepted")
    return kind, _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError("the other process closed the connection")
        view = view[count:]
    return data


def main() -> int:
    """Serve the parent until it closes the connection or dies."""
    return run_child(_serve)


def run_child(serve: Callable[[socket.socket], None]) -> int:
    """A child's whole life: serve the parent, and tell it of an error; the exit status.

    Args:
        serve: serves on the connection until that is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (EOFError, OSError):
            return 0
        except Exception as error:
            _send_error(connection, error)
            return 1
    return 0


def _end_with_parent(life: int) -> None:
    os.read(life, 1)  # returns when the parent's end is closed
    os._exit(0)


def _serve(connection: socket.socket) -> None:
    _, payload = receive_frame(connection)
    settings: dict[str, Any] = json.loads(payload)
    env = _make_env(settings)
    vector_index = int(settings["vector_index"])
    ready = {
        "env_id": env.env_id,
        "observation_space": space_to_dict(env.observation_space),
        "action_space": space_to_dict(env.action_space),
        "max_episode_steps": env.max_episode_steps,
        "counts_games": env.take_finished_games() is not None,
    }
    send_frame(connection, READY, json.dumps(ready).encode())
    action_dtype = np.dtype(env.action_space.dtype)
    action_shape = tuple(env.action_space.shape or ())
    try:
        while True:
            kind, payload = receive_frame(connection)
            if kind == RESET:
                seeded, seed = SEED.unpack(payload)
                send_frame(connection, RESULT, env.reset([seed] if seeded else None).tobytes())
                continue
            action: NDArray[Any] = np.frombuffer(payload, action_dtype).reshape(1, *action_shape)
            step = env.step(action)
            flags = TERMINATED * bool(step.terminateds[0]) + TRUNCATED * bool(step.truncateds[0])
            final = b""
            if step.final_obs is not None:
                flags |= FINAL
                final = step.final_obs.tobytes()
            games = env.take_finished_games() or []
            head = STEP_HEAD.pack(float(step.rewards[0]), flags, len(games))
            tail = b"".join(GAME.pack(game.reward, game.length) for game in games)
            send_frame(connection, RESULT, head, step.obs.tobytes(), final, tail)
    except EnvError as error:
        error.vector_index = vector_index
        raise
    finally:
        env.close()


def _make_env(settings: dict[str, Any]) -> SerialEnv:
    env_id, copy = make_copy(settings)
    return SerialEnv([copy], env_id=env_id, horizon=settings["horizon"])


def make_copy(settings: Mapping[str, Any]) -> tuple[str, Any]:
    """The environment that the parent's settings ask for: its name, and it with its wrappers.

    Raises:
        ConfigError: there is no such environment.
        EnvError: its constructor raised.
    """
    vector_index = int(settings["vector_index"])
    creator = resolve_env(settings["env"])
    wrapping = Wrapping.from_dict(settings["wrapping"])
    config = wrapping.env_config(creator, settings["env_config"])
    context = EnvContext(config, int(settings["worker_index"]), vector_index, remote=True)
    try:
        return creator.env_id, wrapping.wrap(creator(context), context)
    except AiorlError:
        raise
    except Exception as error:
        raise env_fault(creator.env_id, "its constructor", error, vector_index, -1) from error


def _send_error(connection: socket.socket, error: Exception) -> None:
    facts: dict[str, Any] = {"kind": type(error).__name__, "message": str(error), "config": False}
    if isinstance(error, EnvError):
        facts.update(message=error.message, step=error.step, traceback=error.traceback_text)
    elif isinstance(error, ConfigError):
        facts.update(message=error.message, config=True, key=error.key, hint=error.hint)
    else:
        facts.update(traceback=env_fault("", "", error, 0, 0).traceback_text)
    with contextlib.suppress(OSError):  # the parent may have hung up already
        send_frame(connection, ERROR, json.dumps(facts).encode())


if __name__ == "__main__":
    sys.exit(main())
