"""The process of an actor that has joined a hub of another program by `aiorl worker`."""

from __future__ import annotations

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

logger = logging.getLogger("aiorl.actor")

_ENVIRONMENT = dict(os.environ)
"""Environment variables before an actor can change them."""


def make_host(connect: Sequence[str], keys: Path | str | None) -> ActorHost:
    """Return the host of this process's actor.

    Args:
        connect: places of the hub, as `aiorl.config.addresses.places_of` returns them.
        keys: directory of this host's CURVE keys, or None.

    Raises:
        SecurityError: the keys can't be used.
    """
    identity = Identity(secrets.token_hex(8), socket.gethostname(), os.getpid())
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
