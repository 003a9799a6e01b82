"""`python -m aiorl.actors.process`: the process of one actor, which a hub on this host has started."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from aiorl.actors.actor_session import ActorSession, Ended, Identity
from aiorl.actors.host import ActorHost
from aiorl.actors.values import ENDPOINT_LIMITS
from aiorl.net.transport.relay import worker_endpoint
from aiorl.net.transport.security import load_worker_keys
from aiorl.process.children import FAILED, RUN_IS_OVER, WORKER_ID, watch_parent
from aiorl.process.imports import find_modules_here
from aiorl.process.program import (
    end_within,
    keep_output_from_failing,
    log_to_stderr,
    on_stop_signals,
)
from aiorl.process.tasks import new_event_loop, report_stray_errors

logger = logging.getLogger("aiorl.actor")

_END_WITHIN_S = 5.0
_ENVIRONMENT = dict(os.environ)
"""Environment variables before an actor can change them."""


def make_host(
    connect: Sequence[str], worker_id: str = "", keys: Path | str | None = None
) -> ActorHost:
    """Return the host of this process's actor.

    Args:
        connect: places of the hub, as `aiorl.config.addresses.places_of` returns them.
        worker_id: name of this process; "" makes one.
        keys: directory of this host's CURVE keys, or None.

    Raises:
        SecurityError: the keys can't be used.
    """
    identity = Identity(worker_id or secrets.token_hex(8), socket.gethostname(), os.getpid())
    worker_keys = None if keys is None else load_worker_keys(keys)
    endpoint = worker_endpoint(connect, worker_keys, ENDPOINT_LIMITS)
    return ActorHost(endpoint, ActorSession(identity))


def begin_again(end: Ended) -> NoReturn:
    """Replace this process by a fresh one with the same command line, for the next actor.

    Nothing of the actor before is left: no module, no thread, no memory, no environment variable.
    """
    logger.log(logging.INFO if end.is_orderly else logging.WARNING, "%s", end.reason)
    logging.shutdown()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _ENVIRONMENT)


async def _run(address: str, worker_id: str) -> int:
    host = make_host([address], worker_id)
    loop = asyncio.get_running_loop()
    report_stray_errors(host.fail)
    watch_parent(lambda: loop.call_soon_threadsafe(host.stop, "its parent is gone"))
    on_stop_signals(lambda name: host.stop(f"ended by {name}"))
    end = await host.run()
    logger.log(logging.DEBUG if end.is_orderly else logging.WARNING, "%s", end.reason)
    status = RUN_IS_OVER if end.is_final else FAILED
    end_within(_END_WITHIN_S, status)
    return status


def main(address: str) -> int:
    """Run the actor of a local hub, and return the exit status."""
    worker_id = os.environ.pop(WORKER_ID)  # not for the processes that the actor starts
    find_modules_here()
    log_to_stderr("WARNING")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(address, worker_id))


if __name__ == "__main__":
    keep_output_from_failing()
    _status = main(*sys.argv[1:])
    logging.shutdown()
    os._exit(_status)  # a method that is stuck must not hold the process
