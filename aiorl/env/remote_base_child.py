"""The child's side of RemoteBaseEnv: one environment of any kind, ``python -m aiorl.env.remote_base_child``.

Frames as in ``remote_child``; observations, actions and infos are packed by ``nested_codec``. A reset's or step's
result is the list (obs, rewards, terminateds, truncateds, packed infos, finished games, number of dropped infos).
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from typing import Any

from aiorl.data.spaces import space_to_dict
from aiorl.env import remote_child as wire
from aiorl.env.base_env import BaseEnv, FinishedGame, Poll, opening_poll
from aiorl.env.multi_agent_env import MultiAgentBaseEnv, MultiAgentEnv
from aiorl.env.nested_codec import pack, pack_infos, unpack
from aiorl.env.stepped_vector_env import CopiesVectorEnv, VectorBaseEnv
from aiorl.errors import EnvError, InternalError, UnsupportedSpaceError

__all__: list[str] = []


def main() -> int:
    """Serve the parent until it closes the connection or dies."""
    return wire.run_child(_serve)


def _serve(connection: socket.socket) -> None:
    _, payload = wire.receive_frame(connection)
    settings: dict[str, Any] = json.loads(payload)
    vector_index = int(settings["vector_index"])
    env = _make_env(settings)
    games = env.take_finished_games()
    ready = {
        "observation_space": _space_as_data(env.observation_space),
        "action_space": _space_as_data(env.action_space),
        "counts_games": games is not None,
    }
    wire.send_frame(connection, wire.READY, json.dumps(ready).encode())
    started = False
    try:
        while True:
            kind, payload = wire.receive_frame(connection)
            if kind == wire.RESET:
                poll = _reset(env) if started else env.poll()
                started = True
            else:
                env.send_actions({0: unpack(payload)})
                poll = env.poll()
            wire.send_frame(connection, wire.RESULT, _packed(poll, env.take_finished_games() or []))
    except EnvError as error:
        error.vector_index = vector_index
        raise
    finally:
        env.stop()


def _reset(env: BaseEnv) -> Poll:
    obs = env.try_reset(0)
    if not isinstance(obs, dict):
        raise InternalError(f"{type(env).__name__} is reset at once, and yet gave {obs!r}")
    return opening_poll({0: obs})


def _packed(poll: Poll, games: list[FinishedGame]) -> bytes:
    infos, dropped = pack_infos(poll.infos[0])
    games_as_lists = [list(game) for game in games]
    flags = [poll.terminateds[0], poll.truncateds[0]]
    return pack([poll.obs[0], poll.rewards[0], *flags, infos, games_as_lists, dropped])


def _make_env(settings: dict[str, Any]) -> BaseEnv:
    env_id, env = wire.make_copy(settings)
    seed = settings["seed"]
    if isinstance(env, MultiAgentEnv):
        return MultiAgentBaseEnv([env], env_id=env_id, seed=seed)
    return VectorBaseEnv(CopiesVectorEnv([env], env_id=env_id, seed=seed))


def _space_as_data(space: Any) -> dict[str, Any] | None:
    with contextlib.suppress(UnsupportedSpaceError):
        return None if space is None else space_to_dict(space)
    return None


if __name__ == "__main__":
    sys.exit(main())
