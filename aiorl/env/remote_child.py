"""The child's side of RemoteEnv: one environment in its own process, ``python -m
aiorl.env.remote_child``.

Frames on a socket pair, both ways: kind (1 byte), length (4 bytes), payload. Settings, READY and
errors are JSON; ``nested_codec`` packs the rest. A RESET contains the seed to begin with, or None.
A STEP contains the actions by agent. SETTINGS are other
settings for the next episodes, and have no answer. A RESULT contains observations, rewards, terminateds,
truncateds, packed infos, finished games and the number of dropped infos. The process ends with its
parent, for which it has a second pipe whose other end the parent holds: a thread waits for its end,
and the kernel kills an environment that is stuck.
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
import traceback
from typing import Any

from aiorl.data.nested_codec import pack, pack_infos, unpack
from aiorl.data.spaces import space_to_dict
from aiorl.env.base_env import SettingsChange, opening_poll
from aiorl.env.gym_like import episode_limit
from aiorl.env.kinds import check_can_be_remote, kind_of
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError, EnvError, UnsupportedSpaceError
from aiorl.process.children import end_with_parent
from aiorl.process.imports import find_modules_here

SETUP = b"u"
READY = b"y"
RESET = b"r"
STEP = b"s"
SETTINGS = b"c"
RESULT = b"o"
ERROR = b"e"
HEAD = struct.Struct("<cI")


def send_frame(connection: socket.socket, kind: bytes, *parts: bytes | memoryview) -> None:
    """Send one frame.

    Raises:
        OSError: the peer is gone.
    """
    connection.sendall(HEAD.pack(kind, sum(len(part) for part in parts)) + b"".join(parts))


def receive_frame(connection: socket.socket) -> tuple[bytes, bytearray]:
    """Return the next frame's kind and payload.

    Raises:
        EOFError: the peer closed the connection.
        OSError: the connection failed or timed out.
    """
    kind, length = HEAD.unpack(_receive_exactly(connection, HEAD.size))
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
    """Serve the parent until it closes the connection or dies, and report an error to it; return
    the exit status.
    """
    find_modules_here()
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent handles Ctrl-C and a closed terminal
        signal.signal(number, signal.SIG_IGN)
    life = int(sys.argv[2])
    end_with_parent(life=life)
    threading.Thread(target=_wait_for_end, args=(life,), daemon=True).start()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            _serve(connection)
        except (EOFError, OSError):
            return 0
        except Exception as error:
            _send_error(connection, error)
            return 1
    return 0


def _wait_for_end(life: int) -> None:
    os.read(life, 1)  # returns when the parent's end is closed
    os._exit(0)


def _serve(connection: socket.socket) -> None:
    _, payload = receive_frame(connection)
    settings: dict[str, Any] = json.loads(payload)
    creator = resolve_env(settings["env"])
    wrapping = Wrapping(**settings["wrapping"])
    config = wrapping.env_config(creator, settings["env_config"])
    context = EnvContext(config, settings["worker_index"], settings["vector_index"], remote=True)

    def make(index: int) -> Any:
        return wrapping.wrap(creator(context.copy_with_overrides()), context)

    copy = make(0)
    check_can_be_remote(copy, creator.env_id)
    kind_of_env = kind_of(copy, creator.env_id)
    env = kind_of_env.to_base_env([copy], creator.env_id, settings["seed"])
    ready = {
        "has_one_agent": kind_of_env.is_single,
        "observation_space": _space_as_data(env.observation_space),
        "action_space": _space_as_data(env.action_space),
        "max_episode_steps": episode_limit(copy),
        "counts_games": env.take_finished_games() is not None,
    }
    send_frame(connection, READY, json.dumps(ready).encode())
    try:
        is_started = False
        while True:
            kind, payload = receive_frame(connection)
            seed_or_actions = unpack(payload)
            if kind == SETTINGS:
                context = context.copy_with_overrides(seed_or_actions["config"])
                env.change_settings(SettingsChange(context, make, seed_or_actions["seed"]))
                continue
            if kind == STEP:
                env.send_actions({0: seed_or_actions})
            elif seed_or_actions is not None:
                env.vector_env.seeds = [seed_or_actions]  # type: ignore[attr-defined]  # only single-agent ones get a seed
            if kind == RESET and is_started:
                obs: Any = env.try_reset(0)  # kinds that can be remote reset immediately
                poll = opening_poll({0: obs})
            else:
                poll = env.poll()
            is_started = True
            infos, dropped = pack_infos(poll.infos.get(0, {}))
            games = [list(game) for game in env.take_finished_games() or []]
            parts = [
                poll.obs[0],
                poll.rewards[0],
                poll.terminateds[0],
                poll.truncateds[0],
                infos,
                games,
                dropped,
            ]
            send_frame(connection, RESULT, pack(parts))
    except EnvError as error:
        error.vector_index = context.vector_index
        raise
    finally:
        env.stop()


def _space_as_data(space: Any) -> dict[str, Any] | None:
    try:
        return None if space is None else space_to_dict(space)
    except UnsupportedSpaceError:
        return None


def _send_error(connection: socket.socket, error: Exception) -> None:
    facts: dict[str, Any] = {
        "kind": type(error).__name__,
        "message": getattr(error, "message", str(error)),
    }
    if isinstance(error, ConfigError):
        facts |= {"config": True, "key": error.key, "hint": error.hint}
    else:
        text = "".join(traceback.format_exception(error))
        if isinstance(error, EnvError):
            text = error.traceback_text
        facts |= {"config": False, "step": getattr(error, "step", 0), "traceback": text}
    with contextlib.suppress(OSError):  # the parent may have hung up already
        send_frame(connection, ERROR, json.dumps(facts).encode())


if __name__ == "__main__":
    sys.exit(main())
