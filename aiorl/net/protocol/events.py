"""What the two sessions tell their service: frozen dataclasses, in the order things happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aiorl.net.wire.messages import Plain, Samples, Snapshot, Welcome

# Learner --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A new incarnation is registered; its Welcome is on the way. ``local``: its slot was reserved for it."""

    slot: int
    incarnation: str
    host: str
    pid: int
    local: bool


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An incarnation has ended, its slot is free and ``lost_env_steps`` in flight are counted lost."""

    slot: int
    incarnation: str
    reason: str
    lost_env_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class SamplesAccepted:
    """A fragment, the next of its incarnation: queued in the ledger, acknowledged, never delivered twice."""

    slot: int
    incarnation: str
    message: Samples


@dataclass(frozen=True, slots=True)
class LeaseOverdue:
    """A worker lives and has brought nothing for so long that its ``fragments`` are leased to others.

    ``waited_s`` counts from when it was given the lease, or brought something.
    """

    slot: int
    fragments: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker reports a failure of its own."""

    slot: int
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class PeerRejected:
    """A peer broke the protocol; nothing it sends is read any more."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class CallReplied:
    """The answer to a call; ``ok`` False with a text if it failed."""

    slot: int
    call_id: int
    ok: bool
    result: Plain


LearnerEvent: TypeAlias = (
    WorkerJoined | WorkerLost | SamplesAccepted | LeaseOverdue | WorkerFailed | PeerRejected | CallReplied
)

# Worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """This incarnation has a slot, a configuration and a first snapshot (in the welcome)."""

    welcome: Welcome


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotReceived:
    """A snapshot newer than any before; take it up as a whole between two steps."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class CallRequested:
    """Run a method and answer with ``WorkerSession.reply``."""

    call_id: int
    method: str


@dataclass(frozen=True, slots=True)
class LearnerLost:
    """Nothing was heard from the learner for too long: no fragment may be begun until LearnerBack."""

    reason: str


@dataclass(frozen=True, slots=True)
class LearnerBack:
    """The same learner answers again; slot, leases and unsent fragments are as they were."""


@dataclass(frozen=True, slots=True)
class Reincarnated:
    """The old incarnation is over: drop unfinished fragments; Registered will follow with a new slot."""

    reason: str


@dataclass(frozen=True, slots=True)
class WasRefused:
    """The learner does not take us; without ``retry`` the session has ended."""

    reason: str
    retry: bool
    code: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The learner said goodbye; after a ``final`` one the session has ended, else it waits for the next."""

    reason: str
    final: bool


WorkerEvent: TypeAlias = (
    Registered | SnapshotReceived | CallRequested | LearnerLost | LearnerBack | Reincarnated | WasRefused | Shutdown
)
