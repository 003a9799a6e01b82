"""Both endpoints over ZeroMQ: ROUTER + XPUB on the learner, DEALER + SUB on a worker."""

from __future__ import annotations

from aiorl.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.transport.zmq_worker import ZmqWorkerEndpoint

__all__ = ["ZmqLearnerEndpoint", "ZmqWorkerEndpoint"]
