"""Every message of the wire protocol, a frozen dataclass each; what may be said when is up to the sessions.

Three kinds of traffic: *up* (worker to learner), *down* (learner to one worker) and *broadcast* (learner to
all). Values are numbers, strings, bytes, lists, maps with string keys and NumPy arrays, nothing else.
``env_steps`` totals are cumulative over one incarnation, so that a lost message never loses a count.
An *incarnation* is one registration life of a worker, a *learner incarnation* one life of a learner process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from aiorl.data.fragment import PolicyGraph

PROTOCOL_VERSION = 3

# What a field may hold is said by its annotation as it is written here: `aiorl.net.wire.schema` checks by these names.
Count: TypeAlias = int
"""0 to 2**53."""
Count32: TypeAlias = int
"""0 to 2**31 - 1."""
Version: TypeAlias = int
"""-1, for none, to 2**53."""
Seconds: TypeAlias = float
Name: TypeAlias = str
"""At most 64 visible ASCII characters; any other is refused."""
Kind: TypeAlias = str
"""A line of at most 64 characters. Texts that do not fit are made to, see `aiorl.text`."""
State: TypeAlias = str
"""A line of at most 200 characters."""
Host: TypeAlias = str
"""A line of at most 255 characters."""
Sentence: TypeAlias = str
"""A line of at most 1,000 characters."""
Paragraph: TypeAlias = str
"""A line of at most 4,000 characters."""
Lines: TypeAlias = str
"""At most ``schema.MAX_TEXT`` characters, of which the last are kept."""

# Any dtype that travels: what is in a column is known to its readers, not to the wire.
AnyArray: TypeAlias = NDArray[Any]
Arrays: TypeAlias = Mapping[str, AnyArray]
"""Column or weight name -> array."""
PolicyArrays: TypeAlias = Mapping[str, Arrays]
"""Policy id -> name -> array."""
Plain: TypeAlias = "bool | int | float | str | bytes | AnyArray | Sequence[Plain] | Mapping[str, Plain] | None"
"""What a call may carry: plain data, arrays included. Tuples come out as lists."""


class RefusalCode:
    """Why a peer was refused, for programs; ``Refused.reason`` says it for people."""

    HELLO_FIRST = "hello_first"  # not registered, or on a connection not known: say Hello again
    ENDED = "incarnation_ended"  # counted lost: come back as a new incarnation
    FULL = "full"  # no slot free now: try again later
    RUN = "wrong_run"
    VERSION = "wrong_version"
    VIOLATION = "violation"


# Up -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker asks to be registered, or says that it is still the one it was.

    Attributes:
        protocol: version of the protocol it speaks.
        run_id: the run it belongs to, "" for any.
        worker_id: stable random name of the worker process.
        incarnation: random name of this registration life.
        slot_hint: the slot it would like, 0 for any.
        host: its host's name, for people.
        pid: its process id on that host.
        learner_incarnation: the learner life it was registered with, "" if it never was in this life.
    """

    protocol: Count
    run_id: Name
    worker_id: Name
    incarnation: Name
    slot_hint: Count32 = 0
    host: Host = ""
    pid: Count32 = 0
    learner_incarnation: Name = ""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One fragment, sampled under a lease.

    Attributes:
        seq: 1, 2, 3... within the incarnation; also the number of its filter deltas.
        lease_id: the lease it was begun under.
        env_steps: valid rows.
        agent_steps: recorded rows, equal to ``env_steps`` for single-agent environments.
        first_version: policy version in force at its first row.
        last_version: policy version in force at its last row.
        num_envs: N of its columns [T, N, ...].
        length: T of its columns [T, N, ...].
        batches: policy id -> column -> array.
        episodes: finished episodes as columns [K].
        filter_deltas: policy id -> {"n", "mean", "m2"}.
        perf: seconds and counts of the sampler.
        sampled_total: env steps this incarnation has taken so far.
        abandoned_total: env steps of those that will never be sent.
    """

    seq: Count
    lease_id: Count
    env_steps: Count
    agent_steps: Count
    first_version: Version
    last_version: Version
    num_envs: Count
    length: Count
    batches: PolicyArrays
    episodes: Arrays
    filter_deltas: PolicyArrays
    perf: Mapping[str, float]
    sampled_total: Count = 0
    abandoned_total: Count = 0


BUILDING: Final = "building its environment"
"""What a worker says that it does, and then perhaps nothing for a while: an environment may be built by code that lets
no other code of its process run."""
OUT_OF_DATA: Final = "waiting for the end: all of its stored experience is read"
"""What a worker says that it does once all passes over its stored experience are read, and what came of them has
arrived."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker lives.

    Attributes:
        sampled_total: env steps this incarnation has taken so far, in fragments that are finished or given up; a worker
            may add what it knows of unfinished ones.
        state: what it is doing, in plain words.
        in_env_s: how long the running environment call has lasted, seconds; 0 outside of one.
        abandoned_total: env steps of ``sampled_total`` that will never be sent.
    """

    sampled_total: Count
    state: State
    in_env_s: Seconds = 0.0
    abandoned_total: Count = 0


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A worker that missed a broadcast asks for the newest snapshot; ``have_version`` is -1 for none."""

    have_version: Version


@dataclass(frozen=True, slots=True)
class Failure:
    """Something failed on the worker; after a ``fatal`` one it ends."""

    kind: Kind
    message: Paragraph
    fatal: bool = field(default=False, kw_only=True)
    traceback: Lines = ""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The answer to a Call: its result, or with ``ok`` False a text saying what went wrong."""

    call_id: Count
    ok: bool
    result: Plain


@dataclass(frozen=True, slots=True)
class Leaving:
    """A worker ends on purpose; the last message of its incarnation."""

    reason: Sentence
    sampled_total: Count = 0
    abandoned_total: Count = 0


# Down -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything that acting depends on, of one version; taken up as a whole between two steps.

    Attributes:
        version: policy version, from 0, never falling within a learner incarnation.
        weights: policy id -> weight name -> array.
        filters: policy id -> filter state.
        filter_acks: incarnation -> highest ``Samples.seq`` whose filter delta is merged here.
        global_vars: plain data, ``{"timestep": ...}`` and what algorithms add.
        learner_incarnation: filled in by the learner session.
    """

    version: Version
    weights: PolicyArrays
    filters: PolicyArrays
    filter_acks: Mapping[str, int]
    global_vars: Mapping[str, Any]
    learner_incarnation: Name = ""


@dataclass(frozen=True, slots=True, eq=False)
class Welcome:
    """A worker is registered; all it needs to sample.

    Attributes:
        slot: its index, from 1, stable for the incarnation.
        num_workers: workers the run is configured for.
        run_id: the run, kept over a resume.
        learner_incarnation: life of the learner process.
        config: the worker's part of the configuration, plain data.
        graphs: policy id -> acting graph.
        snapshot: the newest snapshot.
        incarnation: whom it welcomes; a late one for an older incarnation is ignored.
        acked_seq: its fragments up to this one have arrived; those after it must be sent again.
    """

    slot: Count
    num_workers: Count
    run_id: Name
    learner_incarnation: Name
    config: Mapping[str, Any]
    graphs: Mapping[str, PolicyGraph]
    snapshot: Snapshot
    incarnation: Name = ""
    acked_seq: Count = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """The learner does not take what was said; with ``retry`` the worker may come back.

    Attributes:
        reason: a sentence for people.
        retry: whether coming back can help.
        code: one of ``RefusalCode``.
        incarnation: whom it concerns, "" where the learner can't tell.
    """

    reason: Sentence
    retry: bool
    code: Kind = ""
    incarnation: Name = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """Leave to sample fragments with policy version >= ``min_version``.

    ``fragments`` is the total of all ever granted under this id, so that saying it twice grants nothing
    twice; a later message of the same id raises it.
    """

    lease_id: Count
    fragments: Count
    min_version: Version


@dataclass(frozen=True, slots=True)
class Ack:
    """All Samples up to ``seq`` have arrived; with ``resend`` the later ones have not: send them again."""

    seq: Count
    resend: bool = False


@dataclass(frozen=True, slots=True)
class LearnerBeat:
    """The learner lives, and its newest snapshot is ``version`` (-1: none yet)."""

    learner_incarnation: Name
    version: Version


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The learner asks a worker to run a method; the answer is a Reply of the same ``call_id``."""

    call_id: Count
    method: Kind
    args: Mapping[str, Plain]


@dataclass(frozen=True, slots=True)
class Bye:
    """The learner ends. ``final``: the run is over; otherwise it may come back and workers wait for it."""

    reason: Sentence
    final: bool


UpMessage: TypeAlias = Hello | Samples | Beat | SnapshotRequest | Failure | Reply | Leaving
DownMessage: TypeAlias = Welcome | Refused | Lease | Ack | Snapshot | LearnerBeat | Call | Bye
Message: TypeAlias = UpMessage | DownMessage
