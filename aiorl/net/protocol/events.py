"""Events that the two sessions report to their service: frozen dataclasses, in the order in which
they happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from aiorl.net.wire.messages import Plain, Samples, Snapshot, Value, Welcome

# Learner
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A new incarnation is registered, and its Welcome is queued; ``local`` is True if the slot was
    reserved for it.
    """

    slot: int
    incarnation: str
    host: str
    pid: int
    local: bool


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An incarnation has ended: its slot is free, and its ``lost_env_steps`` in flight count as
    lost.

    ``host`` is its host, "" if we started it.
    """

    slot: int
    incarnation: str
    reason: str
    lost_env_steps: int
    host: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SamplesAccepted:
    """The next fragment of an incarnation: queued in the ledger, acknowledged, and never delivered
    twice.
    """

    slot: int
    incarnation: str
    message: Samples


@dataclass(frozen=True, slots=True)
class LeaseOverdue:
    """A live worker has sent nothing for too long; the ``fragments`` it owes are leased to others.

    ``waited_s`` is the time since its lease or its newest fragment, in seconds.
    """

    slot: int
    fragments: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker has reported a failure of its own; ``host`` is its host, "" if we started it."""

    slot: int
    kind: str
    message: str
    traceback: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class PeerRejected:
    """A peer broke the protocol; all further messages from it are ignored."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class CallReplied:
    """The answer to a call; if ``ok`` is False, ``result`` describes the error."""

    slot: int
    call_id: int
    method: str
    ok: bool
    result: Value


@dataclass(frozen=True, slots=True)
class CallLost:
    """A call has ended without an answer, because its worker is lost."""

    slot: int
    call_id: int
    method: str
    reason: str


@dataclass(frozen=True, slots=True)
class StatusRequested:
    """A peer, registered or not, asks for the account of the run, of at most ``max_bytes``."""

    peer: bytes
    max_bytes: int


LearnerEvent: TypeAlias = (
    WorkerJoined
    | WorkerLost
    | SamplesAccepted
    | LeaseOverdue
    | WorkerFailed
    | PeerRejected
    | CallReplied
    | CallLost
    | StatusRequested
)

# Worker
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """This incarnation has a slot, a configuration and a first snapshot (all in ``welcome``)."""

    welcome: Welcome


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotReceived:
    """A snapshot newer than any before; apply it as a whole between two steps."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class CallRequested:
    """The learner asks this incarnation to run a method; answer with ``WorkerSession.reply``."""

    call_id: int
    method: str
    args: Mapping[str, Plain]
    incarnation: str


@dataclass(frozen=True, slots=True)
class LearnerLost:
    """The learner has been silent for too long; no fragment can begin until LearnerBack."""

    reason: str


@dataclass(frozen=True, slots=True)
class LearnerBack:
    """The same learner answers again; slot, leases and unsent fragments are unchanged."""


@dataclass(frozen=True, slots=True)
class Reincarnated:
    """The old incarnation is over: drop unfinished fragments; Registered with a new slot follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class WasRefused:
    """The learner refused this worker; unless ``retry`` is True, the session has ended."""

    reason: str
    retry: bool
    code: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The learner said goodbye; after a ``final`` one the session has ended, otherwise it waits for
    the next one.
    """

    reason: str
    final: bool


WorkerEvent: TypeAlias = (
    Registered
    | SnapshotReceived
    | CallRequested
    | LearnerLost
    | LearnerBack
    | Reincarnated
    | WasRefused
    | Shutdown
)
