"""All messages of the wire protocol, a named tuple each: these are defined and made in a third of the
time of frozen dataclasses. The sessions decide which are allowed when.

There are three kinds of traffic: *up* (worker to learner), *down* (learner to one worker) and
*broadcast* (learner to all workers). Values are only numbers, strings, bytes, lists, maps with
string keys, and NumPy arrays. ``env_steps`` totals are cumulative over one incarnation, so that a
lost message never loses a count. An *incarnation* is one registration life of a worker, and a
*learner incarnation* one life of a learner process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from aiorl.data.columns import Array
from aiorl.data.fragment import PolicyGraph

PROTOCOL_VERSION = 4
"""Version of the messages and their rules. The form of messages has a version of its own,
`format.FORMAT_VERSION`, so that a side of another protocol can read why it is refused."""

RUN_OF_ACTORS: Final = "actors"
"""``Hello.run_id`` of a process that offers to run an actor; no run has this id."""
INIT: Final = "__init__"
"""Method of the call, number 0, that makes the object of an actor."""
_NONE: Final[Mapping[str, Any]] = {}
"""Default of fields with maps; nothing changes the map of a message."""

# A field's annotation, as written here, defines its permitted values: `aiorl.net.wire.schema`
# checks by these names.
Count: TypeAlias = int
"""0 to 2**53."""
Count32: TypeAlias = int
"""0 to 2**31 - 1."""
Version: TypeAlias = int
"""-1 to 2**53; -1 means none."""
Seconds: TypeAlias = float
Name: TypeAlias = str
"""At most 64 visible ASCII characters; other strings are refused."""
Kind: TypeAlias = str
"""A line of at most 64 characters. Longer or unprintable texts are changed to fit, see
`aiorl.text`."""
State: TypeAlias = str
"""A line of at most 200 characters."""
Host: TypeAlias = str
"""A line of at most 255 characters."""
Sentence: TypeAlias = str
"""A line of at most 1,000 characters."""
Paragraph: TypeAlias = str
"""A line of at most 4,000 characters."""
Lines: TypeAlias = str
"""At most ``schema.MAX_TEXT`` characters; of a longer text, the end is kept."""

# Any dtype that can be sent: the readers know what a column contains, the wire does not.
Arrays: TypeAlias = Mapping[str, Array]
"""Column or weight name -> array."""
PolicyArrays: TypeAlias = Mapping[str, Arrays]
"""Policy id -> name -> array."""
Account: TypeAlias = Mapping[str, Any]
"""Plain data without arrays, with all texts printable."""
Plain: TypeAlias = (
    "bool | int | float | str | bytes | Array | Sequence[Plain] | Mapping[str, Plain] | None"
)
"""Data of a call: plain data, including arrays. Tuples arrive as lists."""
Value: TypeAlias = Plain
"""Like `Plain`, but texts are for programs and arrive unchanged."""


class RefusalCode:
    """Codes of refusals for programs; ``Refused.reason`` is for people."""

    HELLO_FIRST = "hello_first"  # not registered, or on an unknown connection: say Hello again
    ENDED = "incarnation_ended"  # counted as lost: come back as a new incarnation
    FULL = "full"  # no free slot now: try again later
    RUN = "wrong_run"
    VERSION = "wrong_version"
    VIOLATION = "violation"
    ACTORS = "actors"  # not a learner but a hub of actors: come back as a process for one


# Up
# --------------------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """A worker asks to be registered, or says that it is still the same incarnation.

    Attributes:
        protocol: version of the protocol it speaks.
        run_id: the run it belongs to, "" for any.
        worker_id: stable random name of the worker process.
        incarnation: random name of this registration life.
        slot_hint: preferred slot, 0 for any.
        host: name of its host, for people.
        pid: its process id on that host.
        learner_incarnation: the learner life it was registered with, "" if this incarnation never
            was.
    """

    protocol: Count
    run_id: Name
    worker_id: Name
    incarnation: Name
    slot_hint: Count32 = 0
    host: Host = ""
    pid: Count32 = 0
    learner_incarnation: Name = ""


class Samples(NamedTuple):
    """One fragment, sampled under a lease.

    Attributes:
        seq: 1, 2, 3... within the incarnation; also the number of its filter deltas.
        lease_id: the lease under which it was begun.
        env_steps: valid rows.
        agent_steps: recorded rows, equal to ``env_steps`` for single-agent environments.
        first_version: policy version of its first row.
        last_version: policy version of its last row.
        num_envs: N of its columns [T, N, ...].
        length: T of its columns [T, N, ...].
        batches: policy id -> column -> array.
        episodes: finished episodes as columns [K].
        filter_deltas: policy id -> {"n", "mean", "m2"}.
        perf: seconds and counts of the sampler.
        sampled_total: env steps this incarnation has sampled so far.
        abandoned_total: those of them that will never be sent.
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
"""State of a worker that may then be silent for a while: building an environment can block all
other code of its process."""
WAITING_FOR: Final = "waiting for "
"""Beginning of the state of a worker whose environment waits for others, such as its clients."""
OUT_OF_DATA: Final = "waiting for the end: all of its stored experience is read"
"""State of a worker that has read all passes over its stored experience, after all resulting
fragments have arrived."""


class Beat(NamedTuple):
    """Heartbeat of a worker.

    Attributes:
        sampled_total: env steps this incarnation has sampled so far in fragments that are finished
            or given up; steps of unfinished fragments may be added.
        state: its activity, in plain words.
        in_env_s: duration of the running environment call, seconds; 0 outside of a call.
        abandoned_total: env steps of ``sampled_total`` that will never be sent.
    """

    sampled_total: Count
    state: State
    in_env_s: Seconds = 0.0
    abandoned_total: Count = 0


class SnapshotRequest(NamedTuple):
    """A worker that missed a broadcast asks for the newest snapshot; ``have_version`` is -1 for
    none.
    """

    have_version: Version


class Failure(NamedTuple):
    """A failure on the worker; after a ``fatal`` one it ends."""

    kind: Kind
    message: Paragraph
    traceback: Lines = ""
    fatal: bool = False


class Leaving(NamedTuple):
    """A worker ends on purpose; the last message of its incarnation."""

    reason: Sentence
    sampled_total: Count = 0
    abandoned_total: Count = 0


class StatusRequest(NamedTuple):
    """Anyone who may connect asks for the account of the run, of at most ``max_bytes``; it needs no
    registration.
    """

    max_bytes: Count32


# Down
# --------------------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Everything that acting depends on, of one version; apply it as a whole between two steps.

    A *partial* snapshot has only what has changed since an earlier version. It may be applied to
    that version and to each later one.

    Attributes:
        version: policy version, from 0; it never decreases within a learner incarnation.
        weights: policy id -> weight name -> array; of a partial snapshot, of the policies whose
            weights have changed.
        filters: policy id -> filter state; of a partial snapshot, without those that have not
            changed.
        filter_acks: incarnation -> highest ``Samples.seq`` whose filter delta is merged here.
        global_vars: plain data: ``{"timestep": ...}`` and additions of algorithms.
        learner_incarnation: filled in by the learner session.
        since: version that a partial snapshot builds on; -1 for a whole one. Sent only if partial.
        policies: policy id -> packed policy (`aiorl.run.added_policy`) of those added since the
            learner began, or since that version; an empty array stands for a policy that was
            removed. Sent only if not empty.
        env_config: all settings of the environments, if they have changed since the learner began;
            also in partial snapshots. Environments take them before their next episodes. Sent only
            if not empty.
        env_changes: number of changes that led to them; 0 for none. Sent only if not 0.
    """

    version: Version
    weights: PolicyArrays
    filters: PolicyArrays
    filter_acks: Mapping[str, int]
    global_vars: Mapping[str, Any]
    learner_incarnation: Name = ""
    since: Version = -1
    policies: Arrays = _NONE
    env_config: Mapping[str, Any] = _NONE
    env_changes: Count = 0

    @property
    def is_whole(self) -> bool:
        """True if it builds on no other snapshot."""
        return self.since < 0

    def after(self, earlier: Snapshot) -> Snapshot:
        """Return one snapshot with the effect of an earlier one and of this one.

        Args:
            earlier: a snapshot of the version that this one builds on, or of a later one.
        """
        if self.is_whole:
            return self
        policies = {**earlier.policies, **self.policies}
        removed = {policy_id for policy_id, packed in policies.items() if not packed.size}
        if earlier.is_whole:  # policies that it does not mention do not exist
            policies = {name: packed for name, packed in policies.items() if name not in removed}
        weights = {**earlier.weights, **self.weights}
        filters = {**earlier.filters, **self.filters}
        return self._replace(
            weights={name: arrays for name, arrays in weights.items() if name not in removed},
            filters={name: state for name, state in filters.items() if name not in removed},
            since=earlier.since,
            policies=policies,
        )


class Welcome(NamedTuple):
    """The learner has registered a worker, and sends all data that it needs to sample.

    Attributes:
        slot: its index, from 1, stable for the incarnation.
        num_workers: workers the run is configured for.
        run_id: id of the run, kept over a resume.
        learner_incarnation: life of the learner process.
        config: the worker's part of the configuration, plain data.
        graphs: policy id -> acting graph.
        snapshot: the newest snapshot.
        incarnation: the incarnation it is for; a late one for an older incarnation is ignored.
        acked_seq: fragments up to this one have arrived; later ones must be sent again.
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


class Refused(NamedTuple):
    """The learner refuses a message; if ``retry`` is True, the worker may come back.

    Attributes:
        reason: a sentence for people.
        retry: True if coming back can help.
        code: one of ``RefusalCode``.
        incarnation: the incarnation it is for, "" if the learner does not know.
    """

    reason: Sentence
    retry: bool
    code: Kind = ""
    incarnation: Name = ""


class Lease(NamedTuple):
    """Permission to sample fragments at a policy version of ``min_version`` or above.

    ``fragments`` is the total ever granted under this id, so repeating the message grants nothing
    more. A later message with the same id raises the total.
    """

    lease_id: Count
    fragments: Count
    min_version: Version


class Ack(NamedTuple):
    """All Samples up to ``seq`` have arrived; if ``resend`` is True, later ones have not: send them
    again.
    """

    seq: Count
    resend: bool = False


class LearnerBeat(NamedTuple):
    """Heartbeat of the learner; its newest snapshot is ``version`` (-1 for none)."""

    learner_incarnation: Name
    version: Version


class Bye(NamedTuple):
    """The learner ends; if ``final``, the run is over, otherwise the learner may come back and
    workers wait for it.
    """

    reason: Sentence
    final: bool


class Status(NamedTuple):
    """The account of the run (`aiorl.run.overview`), for people."""

    account: Account


# Calls, up and down
# --------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """Ask the receiver to run a method; the answer is a Reply with the same ``call_id``.

    A learner calls methods of workers. A hub of actors calls methods of an actor, and an actor
    those of another one, through the hub.

    Attributes:
        call_id: number of the call, unique for its sender.
        method: name of the method.
        args: its arguments by name.
        actor: up, the actor that is called; down, the one that calls, "" for the hub itself.
        credit: items of a stream that may be sent before a Credit; 0 if no stream is wanted.
    """

    call_id: Count
    method: Name
    args: Mapping[str, Plain]
    actor: Name = ""
    credit: Count32 = 0


class Reply(NamedTuple):
    """The answer to a Call: its result or, if ``ok`` is False, one of `failed` or `lost`."""

    call_id: Count
    ok: bool
    result: Value


def failed(kind: str, message: str = "", traceback: str = "") -> dict[str, Value]:
    """Return the result of a call that has raised an exception.

    Args:
        kind: name of the exception's class.
        message: its text.
        traceback: its traceback as text.
    """
    return {"kind": kind, "message": message, "traceback": traceback}


def lost(name: str, reason: str, *, is_restarting: bool = False) -> dict[str, Value]:
    """Return the result of a call without an answer: whether the method has run is unknown.

    Args:
        name: the lost actor, or anything else that is lost with the answer.
        reason: why it is, one plain sentence.
        is_restarting: True if the actor starts again.
    """
    return {"lost": name, "message": reason, "is_restarting": is_restarting}


class Item(NamedTuple):
    """The next item of the stream that a Call asked for; a Reply ends the stream."""

    call_id: Count
    value: Value


class Credit(NamedTuple):
    """The caller can take ``items`` more of a stream."""

    call_id: Count
    items: Count32


class Cancel(NamedTuple):
    """The caller no longer waits for the answer; a Reply still follows."""

    call_id: Count


class Payload(NamedTuple):
    """Arguments that calls to several actors share, broadcast once; the calls name its number."""

    number: Count
    value: Value


class PayloadRequest(NamedTuple):
    """An actor that missed a Payload asks for it."""

    number: Count


CallMessage: TypeAlias = Call | Reply | Item | Credit | Cancel
UpMessage: TypeAlias = (
    Hello
    | Samples
    | Beat
    | SnapshotRequest
    | Failure
    | Leaving
    | StatusRequest
    | CallMessage
    | PayloadRequest
)
DownMessage: TypeAlias = (
    Welcome | Refused | Lease | Ack | Snapshot | LearnerBeat | Bye | Status | CallMessage | Payload
)
Message: TypeAlias = UpMessage | DownMessage
