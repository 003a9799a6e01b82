"""A learner in this process, without TensorFlow, whose workers are real processes that connect over TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from in_process import InProcess

from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint

__all__ = ["learner_over_tcp", "until"]


def learner_over_tcp(*, insecure: bool = False, **settings: Any) -> InProcess:
    """A learner that listens for workers of this user, or on loopback, and has none yet; use within a running loop."""
    network: Any = SimpleNamespace(learner=lambda: ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=insecure))
    both = InProcess(network=network, **settings)
    both.start(0)
    both.service.go_on()
    return both


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
