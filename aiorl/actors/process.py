"""`python -m aiorl.actors.process FD`: the process of one actor, which a hub on this host has
started, with the socket that it inherits from it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

from aiorl.actors.actor_session import ActorSession, Identity
from aiorl.actors.host import ActorHost
from aiorl.actors.values import ENDPOINT_LIMITS
from aiorl.net.transport.inherited import InheritedEndpoint
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


async def _run(connection: socket.socket, worker_id: str) -> int:
    identity = Identity(worker_id, socket.gethostname(), os.getpid())
    endpoint = InheritedEndpoint(connection, ENDPOINT_LIMITS)
    host = ActorHost(endpoint, ActorSession(identity))
    loop = asyncio.get_running_loop()
    report_stray_errors(host.fail)
    watch_parent(lambda: loop.call_soon_threadsafe(host.stop, "its parent is gone"))
    on_stop_signals(lambda name: host.stop(f"ended by {name}"))
    end = await host.run()
    logger.log(logging.DEBUG if end.is_orderly else logging.WARNING, "%s", end.reason)
    status = RUN_IS_OVER if end.is_final else FAILED
    end_within(_END_WITHIN_S, status)
    return status


def main(descriptor: str) -> int:
    """Run the actor of the parent process, and return the exit status."""
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    worker_id = os.environ.pop(WORKER_ID)  # not for the processes that the actor starts
    find_modules_here()
    log_to_stderr("WARNING")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(connection, worker_id))


if __name__ == "__main__":
    keep_output_from_failing()
    _status = main(*sys.argv[1:])
    logging.shutdown()
    os._exit(_status)  # a method that is stuck must not hold the process
