"""A worker's side of the protocol: no socket, no clock; ``now`` is any monotonic time in seconds.

The shell calls ``connected``, ``disconnected``, ``receive``, ``broadcast`` and, at least every 0.25
s, ``tick``. After each call it drains ``messages_to_send()`` and ``events()``. The service calls
``start_fragment`` before it samples and passes the result to ``fragment_done``.

    CONNECTING --Welcome--> REGISTERED
    REGISTERED --learner silent--> PAUSED --Welcome of the same learner--> REGISTERED
    any --"incarnation ended", another learner, Bye--> CONNECTING as a new incarnation
    any --refused for good, final Bye, leaving--> ENDED
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from aiorl.config.worker import TransportConfig
from aiorl.data.columns import Array
from aiorl.errors import RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.calls import ReceivedCalls
from aiorl.net.protocol.leases import WorkerLeases
from aiorl.net.wire import messages as m

MAX_UNACKED_BYTES = 1 << 28
"""Default limit of the bytes of fragments sent and not acknowledged."""

_HELLO_AGAIN_S = 0.25
_FIRST_HELLO_WAIT_S = 0.5
_SNAPSHOT_WAIT_S = 1.0
_MAX_SNAPSHOT_WAIT_S = 8.0


@dataclass(slots=True)
class WorkerSettings:
    """Identity and timeouts of a worker.

    Attributes:
        worker_id: stable random name of this process.
        host: name of its host.
        pid: process id of the worker.
        slot_hint: preferred slot, 0 for any.
        transport: configured times; the service replaces them with the learner's.
        max_unacked: limit of fragments sent and not acknowledged; at the limit, no other fragment
            begins.
        max_unacked_bytes: the same limit in bytes, assuming that the next fragments are as large as
            the newest one; a single fragment may be larger.
    """

    worker_id: str
    host: str = ""
    pid: int = 0
    slot_hint: int = 0
    transport: TransportConfig = field(default_factory=TransportConfig)
    max_unacked: int = 1024
    max_unacked_bytes: int = MAX_UNACKED_BYTES


class WorkerState(StrEnum):
    """State of a worker in relation to its learner."""

    CONNECTING = "connecting"
    REGISTERED = "registered"
    PAUSED = "paused"
    ENDED = "ended"


class WorkerSession:
    """Messages that a worker may send, and the effects of those that it receives.

    Args:
        settings: identity and timeouts; set the learner's own timeouts there once they are known.
        make_incarnation: returns a new random name for each registration life.

    Attributes:
        state: see `WorkerState`.
        incarnation: name of this registration life.
        slot: index given by the learner, 0 before registration.
        learner_incarnation: life of the learner we are registered with, "" before registration.
        version: version of the newest snapshot received, -1 for none.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        make_incarnation: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.settings = settings
        self.state = WorkerState.CONNECTING
        self.incarnation = make_incarnation()
        self.slot = 0
        self.learner_incarnation = ""
        self.version = -1
        self._make_incarnation = make_incarnation
        self._leases = WorkerLeases()
        self._calls = ReceivedCalls()
        self._fragments = _SentFragments(settings)
        self._link = _Link()
        self._greeting = _Greeting(slot_hint=settings.slot_hint)
        self._catching_up = _CatchingUp()
        self._out: list[m.UpMessage] = []
        self._events: list[ev.WorkerEvent] = []
        self._heartbeat = _Heartbeat()

    # Connection
    # ----------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Begin a new connection: say Hello, and resend fragments that the learner does not
        have.
        """
        if self.state is WorkerState.ENDED:
            return
        self._link.is_up = True
        self._greet(now)
        self._say_hello(now)

    def disconnected(self, now: float, reason: str = "") -> None:
        """Note the loss of the connection; sampling continues within the leases until the learner
        counts as silent.
        """
        self._link.is_up = False
        self._link.reason = reason or "the connection broke"
        self._greet(now)

    def receive(self, message: m.Message, now: float) -> None:
        """Process a message addressed to this worker.

        Raises:
            RemoteProtocolError: when only workers send this type of message; the session continues.
        """
        if self.state is WorkerState.ENDED:
            return
        self._link.last_heard = now
        if self.state is WorkerState.PAUSED:
            # the learner is alive: do not wait for the backoff
            self._greeting.hurry(now)
        match message:
            case m.Welcome():
                self._welcomed(message, now)
            case m.Refused():
                self._refused(message, now)
            case m.Bye():
                self._bye(message, now)
            case m.LearnerBeat():
                self._learner_beat(message, now)
            case m.Ack() | m.Lease() | m.Snapshot() | m.Call() if (
                not self.slot or self._greeting.is_due
            ):
                pass
            case m.Ack():
                self._acked(message, now)
            case m.Lease():
                self._leases.add(message)
            case m.Snapshot():
                if message.learner_incarnation == self.learner_incarnation:
                    self._take_snapshot(message)
            case m.Call():
                self._called(message, now)
            case _:
                raise RemoteProtocolError(
                    f"a learner does not send {type(message).__name__}", field="type"
                )

    def broadcast(self, message: m.Message, now: float) -> None:
        """Process a message to all workers.

        Raises:
            RemoteProtocolError: when this type of message is never broadcast; the session
                continues.
        """
        if self.state is WorkerState.ENDED:
            return
        match message:
            case m.Snapshot():
                if self.slot and message.learner_incarnation == self.learner_incarnation:
                    self._take_snapshot(message)
            case m.LearnerBeat():
                self._learner_beat(message, now)
            case m.Bye():
                self._bye(message, now)
            case _:
                raise RemoteProtocolError(
                    f"{type(message).__name__} is never broadcast", field="type"
                )

    def tick(self, now: float) -> None:
        """Let time pass: send a heartbeat, a Hello or a snapshot request if due, and detect a
        silent learner.
        """
        transport = self.settings.transport
        link = self._link
        stood_still = link.tick(now)
        if self.state is WorkerState.ENDED:
            return
        if self.state is WorkerState.REGISTERED and stood_still > transport.heartbeat_timeout_s / 2:
            # the pause was ours: first process the messages that arrived meanwhile
            link.last_heard = min(now, link.last_heard + stood_still)
        silent_s = now - link.last_heard
        if self.state is WorkerState.REGISTERED and silent_s > transport.heartbeat_timeout_s:
            self.state = WorkerState.PAUSED
            self._greet(now)
            self._events.append(ev.LearnerLost(f"the learner has been silent for {silent_s:.0f} s"))
        greeting = self._greeting
        if link.is_up and greeting.is_due and now >= greeting.next_hello:
            self._say_hello(now)
        if not self._may_speak():
            return
        if now - self._heartbeat.last_sent >= transport.heartbeat_interval_s:
            self._say(self.beat(), now)
        if self._catching_up.must_ask(self.version, self._leases.version_needed(), now):
            self._say(m.SnapshotRequest(self.version), now)

    # Sampling
    # ----------------------------------------------------------------------------------------------

    def may_sample(self, version: int) -> bool:
        """Return whether a fragment can begin now with a policy of this version."""
        return self._may_begin() and self._leases.available(version) > 0

    def start_fragment(self, version: int) -> int | None:
        """Begin a fragment with a policy of this version; return the id of its lease, or None if
        none may begin.
        """
        return self._leases.begin(version) if self._may_begin() else None

    def fragment_done(self, samples: m.Samples, now: float) -> bool:
        """Send a fragment; its ``lease_id`` comes from `start_fragment`, and ``seq`` and the total
        are set here.

        Its arrays must not change until the learner has acknowledged it, because it may be sent
        again.

        Returns:
            False if the fragment belongs to an earlier incarnation and was dropped; the learner
            counts it as lost.
        """
        if not self._leases.finish(samples.lease_id):
            return False
        message = self._fragments.add(samples)
        if self._may_speak():
            self._say(message, now)
        return True

    def abandon_fragment(self, lease_id: int) -> bool:
        """Give up a fragment that was begun; its lease counts as unused.

        The env steps of unfinished fragments appear in no count.

        Returns:
            False if the fragment belongs to an earlier incarnation.
        """
        return self._leases.give_back(lease_id)

    def note_progress(self, state: str, in_env_s: float = 0.0) -> None:
        """Set the activity for the next heartbeat, which is sent immediately if the learner acts on
        it.
        """
        heartbeat = self._heartbeat
        acted_on = {m.BUILDING, m.OUT_OF_DATA}
        if state != heartbeat.activity and not acted_on.isdisjoint((state, heartbeat.activity)):
            heartbeat.send_soon()
        heartbeat.activity = state
        heartbeat.in_env_s = in_env_s

    @property
    def sampled_total(self) -> int:
        """Env steps of this incarnation's finished fragments."""
        return self._fragments.sampled_total

    @property
    def next_seq(self) -> int:
        """Number of the next finished fragment and of its filter deltas."""
        return self._fragments.next_seq

    @property
    def num_unacked(self) -> int:
        """Finished fragments that the learner has not acknowledged."""
        return len(self._fragments)

    # Saying
    # ----------------------------------------------------------------------------------------------

    def reply(self, request: ev.CallRequested, ok: bool, result: m.Value, now: float) -> None:
        """Answer a call, once it may be sent; nothing happens if that was another incarnation's, or
        has an answer.
        """
        call_id = request.call_id
        if request.incarnation != self.incarnation or not self._calls.is_running(call_id):
            return
        self._calls.end(call_id)
        answer = m.Reply(call_id, ok, result)
        if self._may_speak():
            self._say(answer, now)
        else:
            self._calls.unsent.append(answer)

    def failure(self, kind: str, message: str, traceback: str, now: float) -> None:
        """Report a failure, after which the learner ends this incarnation, and end the session."""
        if self._may_speak():
            self._say(self.beat(), now)
            self._say(m.Failure(kind, message, traceback, fatal=True), now)
        self.state = WorkerState.ENDED

    def leaving(self, reason: str, now: float) -> None:
        """End on purpose; the learner frees the slot immediately and counts unfinished fragments as
        lost.
        """
        if self._may_speak():
            self._say(m.Leaving(reason, self.sampled_total), now)
        self.state = WorkerState.ENDED

    def beat(self) -> m.Beat:
        """Return the current heartbeat."""
        heartbeat = self._heartbeat
        state = heartbeat.activity or ("sampling" if self._leases.begun else "waiting")
        return m.Beat(self.sampled_total, state, heartbeat.in_env_s)

    def messages_to_send(self) -> list[m.UpMessage]:
        """Return the messages to send, in order, and clear the list.

        Discard messages that could not be sent before the connection broke: once the learner has
        answered the next Hello, the session sends everything that matters again.
        """
        out = self._out
        self._out = []
        return out

    def events(self) -> list[ev.WorkerEvent]:
        """Return the events so far, in order, and clear the list."""
        events = self._events
        self._events = []
        return events

    def status_text(self, now: float) -> str:
        """Return a plain-English description of the worker's activity."""
        if self.state is WorkerState.ENDED:
            return f"ended: {self._greeting.refusal}" if self._greeting.refusal else "ended"
        if self.state is not WorkerState.REGISTERED:
            return self._waiting_text(now)
        if not self._link.is_up:
            activity = "waiting for it to come back"
            if self._leases.begun:
                activity = "finishing leased fragments"
            return f"the connection is gone ({self._link.reason}): {activity}"
        needed = self._leases.version_needed()
        if self._fragments.is_full(self._leases.begun):
            return f"waiting for the learner to acknowledge {self.num_unacked} fragments"
        if self._leases.begun:
            return "sampling"
        if needed is None:
            return "waiting for a lease: the learner is updating"
        if needed > self.version:
            return f"waiting for policy version {needed}, have {self.version}"
        return "about to sample"

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _waiting_text(self, now: float) -> str:
        if not self._link.is_up:
            return f"cannot reach the learner: {self._link.reason.removesuffix('.')}; trying again"
        every = f"trying again every {self._greeting.wait_s:g} s"
        if self.state is WorkerState.PAUSED:
            return f"learner silent for {now - self._link.last_heard:.0f} s: {every}"
        if self._greeting.refusal:
            return f"the learner says: {self._greeting.refusal}; {every}"
        step = "get ready" if self._greeting.is_learner_unready else "answer"
        return f"waiting for the learner to {step}; {every}"

    def _may_speak(self) -> bool:
        is_greeted = self._link.is_up and not self._greeting.is_due
        return is_greeted and self.state is WorkerState.REGISTERED

    def _may_begin(self) -> bool:
        return self.state is WorkerState.REGISTERED and not self._fragments.is_full(
            self._leases.begun
        )

    def _say(self, message: m.UpMessage, now: float) -> None:
        self._out.append(message)
        if isinstance(message, (m.Beat, m.Samples)):
            self._heartbeat.last_sent = now

    def _greet(self, now: float) -> None:
        """Send only Hello from now on, until the learner answers."""
        self._greeting.restart(now, self.settings.transport.reconnect_max_s)
        self._out.clear()

    def _say_hello(self, now: float) -> None:
        settings = self.settings
        self._greeting.sent(now, settings.transport.reconnect_max_s)
        self._out = [
            m.Hello(
                protocol=m.PROTOCOL_VERSION,
                run_id="",
                worker_id=settings.worker_id,
                incarnation=self.incarnation,
                slot_hint=self._greeting.slot_hint,
                host=settings.host,
                pid=settings.pid,
                learner_incarnation=self.learner_incarnation,
            )
        ]

    def _welcomed(self, welcome: m.Welcome, now: float) -> None:
        if welcome.incarnation != self.incarnation:
            return
        if self.learner_incarnation and welcome.learner_incarnation != self.learner_incarnation:
            self._reincarnate("the learner was restarted", now)
            return
        first = not self.slot
        was_paused = self.state is WorkerState.PAUSED
        self.state = WorkerState.REGISTERED
        self._greeting.is_due = False
        self._greeting.is_learner_unready = False
        self._greeting.refusal = ""
        self.slot = welcome.slot
        self._greeting.slot_hint = welcome.slot
        self.learner_incarnation = welcome.learner_incarnation
        if first:
            self._begin_with(welcome.snapshot.version)
            self._events.append(ev.Registered(welcome))
        else:
            self._take_snapshot(welcome.snapshot)
            if was_paused:
                self._events.append(ev.LearnerBack())
        self._acked(m.Ack(welcome.acked_seq, resend=True), now)
        for answer in self._calls.unsent:
            self._say(answer, now)
        self._calls.unsent.clear()
        self._heartbeat.send_soon()  # the totals may have been lost on the way

    def _refused(self, refusal: m.Refused, now: float) -> None:
        if refusal.incarnation and refusal.incarnation != self.incarnation:
            return
        if refusal.code == m.RefusalCode.HELLO_FIRST:
            if self._greeting.may_repeat(now):
                self._greet(now)
                self._say_hello(now)
            return
        if refusal.code == m.RefusalCode.ENDED:
            self._reincarnate(refusal.reason, now)
            return
        self._greeting.refusal = refusal.reason
        if not refusal.retry:
            self.state = WorkerState.ENDED
        self._events.append(ev.WasRefused(refusal.reason, refusal.retry, refusal.code))

    def _bye(self, bye: m.Bye, now: float) -> None:
        if bye.final:
            self.state = WorkerState.ENDED
            self._greeting.refusal = bye.reason
            self._events.append(ev.Shutdown(bye.reason, final=True))
        elif self.slot:
            self._events.append(ev.Shutdown(bye.reason, final=False))
            self._reincarnate(f"the learner said goodbye: {bye.reason}", now)
            self._greeting.refusal = bye.reason
            # the learner is about to leave
            self._greeting.next_hello = now + self._greeting.wait_s

    def _learner_beat(self, beat: m.LearnerBeat, now: float) -> None:
        if not self.slot:
            self._greeting.is_learner_unready = beat.version < 0
        elif beat.learner_incarnation != self.learner_incarnation:
            self._reincarnate("the learner was restarted", now)
        else:
            self._catching_up.announced(beat.version)

    def _reincarnate(self, reason: str, now: float) -> None:
        """Start over as a new incarnation; the learner counts the old one as lost, or is another
        learner.
        """
        self.state = WorkerState.CONNECTING
        self.incarnation = self._make_incarnation()
        self.slot = 0
        self.learner_incarnation = ""
        self._begin_with(-1)
        self._greeting.refusal = ""
        self._leases.clear()
        self._calls = ReceivedCalls()
        self._fragments.reset()
        self._heartbeat.in_env_s = 0.0
        self._heartbeat.activity = ""
        self._events.append(ev.Reincarnated(reason))
        self._greet(now)
        if self._link.is_up:
            self._say_hello(now)

    def _called(self, call: m.Call, now: float) -> None:
        """Ask to run a call, unless it is a repeated one that is known."""
        calls = self._calls
        if calls.is_running(call.call_id):
            return
        refusal = calls.refusal(call.call_id, self.slot)
        if refusal is not None:
            self._say(refusal, now)
            return
        calls.begin(call.call_id)
        self._events.append(
            ev.CallRequested(call.call_id, call.method, call.args, self.incarnation)
        )

    def _acked(self, ack: m.Ack, now: float) -> None:
        self._fragments.acked(ack.seq)
        if ack.resend:
            for message in self._fragments:
                self._say(message, now)

    def _begin_with(self, version: int) -> None:
        """Begin with a snapshot of this version; a newer one may be in flight, so wait a second
        before asking.
        """
        self.version = version
        self._catching_up = _CatchingUp(learners_version=version)

    def _take_snapshot(self, snapshot: m.Snapshot) -> None:
        catching_up = self._catching_up
        catching_up.announced(snapshot.version)
        if snapshot.version <= self.version:
            return
        if snapshot.since > self.version:
            catching_up.keep_for_later(snapshot)
            return
        snapshot = catching_up.with_later(snapshot)
        self.version = snapshot.version
        catching_up.reset()
        self._events.append(ev.SnapshotReceived(snapshot))


@dataclass(slots=True)
class _Link:
    """The connection to the learner.

    Attributes:
        is_up: True if there is one.
        reason: why there is none, in plain words.
        last_heard: time of the learner's last message.
        last_tick: time of our last tick, None before the first.
    """

    is_up: bool = False
    reason: str = "no connection yet"
    last_heard: float = float("-inf")
    last_tick: float | None = None

    def tick(self, now: float) -> float:
        """Return the seconds since the last tick, 0 for the first."""
        elapsed_s = 0.0 if self.last_tick is None else now - self.last_tick
        self.last_tick = now
        return elapsed_s


@dataclass(slots=True)
class _Greeting:
    """Hellos, the pauses between them, and the learner's answers.

    Attributes:
        slot_hint: slot to ask for, 0 for any.
        is_due: True if a Hello is due or unanswered; until then nothing else may be sent.
        wait_s: pause after the next Hello, seconds.
        next_hello: time from which on the next one may be sent.
        last_hello: time of the last one.
        refusal: the learner's reason for refusing this worker, "" for none.
        is_learner_unready: True if the learner has said that it has no policy yet.
    """

    slot_hint: int
    is_due: bool = True
    wait_s: float = _FIRST_HELLO_WAIT_S
    next_hello: float = float("-inf")
    last_hello: float = float("-inf")
    refusal: str = ""
    is_learner_unready: bool = False

    def restart(self, now: float, max_wait_s: float) -> None:
        """Begin again, with a Hello now."""
        self.is_due = True
        self.wait_s = min(_FIRST_HELLO_WAIT_S, max_wait_s)
        self.next_hello = now

    def sent(self, now: float, max_wait_s: float) -> None:
        """Record a Hello, and double the pause after the one that follows."""
        self.last_hello = now
        self.next_hello = now + self.wait_s
        self.wait_s = min(2 * self.wait_s, max_wait_s)

    def may_repeat(self, now: float) -> bool:
        """Return whether the last Hello is long enough ago for another."""
        return now - self.last_hello >= _HELLO_AGAIN_S

    def hurry(self, now: float) -> None:
        """Say Hello at the next tick instead of waiting for the backoff."""
        if self.may_repeat(now):
            self.next_hello = now


@dataclass(slots=True)
class _CatchingUp:
    """Requests for a snapshot that this worker has missed.

    Attributes:
        learners_version: newest version the learner is known to have.
        wait_s: time for which this worker may be behind before it asks, seconds.
        since: time since which it is behind, or of its last request; None if it is not behind.
        later: changes that have arrived before the version that they build on; None if there are
            none. They are kept because the missing version may take longer to arrive than the
            next ones are apart.
    """

    learners_version: int = -1
    wait_s: float = _SNAPSHOT_WAIT_S
    since: float | None = None
    later: m.Snapshot | None = None

    def announced(self, version: int) -> None:
        """Note a version that the learner has."""
        self.learners_version = max(self.learners_version, version)

    def keep_for_later(self, snapshot: m.Snapshot) -> None:
        """Keep a snapshot whose base is missing, and ask for a whole one at the next tick."""
        if self.later is None:
            # broadcasts arrive in order, so waiting would not help
            self.since = float("-inf")
        elif snapshot.version <= self.later.version:
            return
        elif snapshot.since <= self.later.version:
            snapshot = snapshot.after(self.later)
        self.later = snapshot

    def with_later(self, snapshot: m.Snapshot) -> m.Snapshot:
        """Return a snapshot with the changes after it that arrived before it, if they build on
        it.
        """
        later = self.later
        if later is None or later.version <= snapshot.version:
            self.later = None
            return snapshot
        if later.since > snapshot.version:
            return snapshot
        self.later = None
        return later.after(snapshot)

    def reset(self) -> None:
        """Wait a second before asking, because a newer snapshot may be in flight."""
        self.wait_s = _SNAPSHOT_WAIT_S
        self.since = None

    def must_ask(self, version: int, needed: int | None, now: float) -> bool:
        """Return whether to ask for a snapshot now; if so, the next pause is twice as long.

        Args:
            version: the worker's version.
            needed: version that a lease requires, None if there is no lease.
            now: the time in seconds.
        """
        if max(self.learners_version, -1 if needed is None else needed) <= version:
            self.since = None
        elif self.since is None:
            self.since = now
        elif now - self.since >= self.wait_s:
            self.since = now
            self.wait_s = min(2 * self.wait_s, _MAX_SNAPSHOT_WAIT_S)
            return True
        return False


@dataclass(slots=True)
class _Heartbeat:
    """Content of the next heartbeat, and the time since which the learner lacks our totals.

    Attributes:
        activity: activity to report, "" for sampling or waiting.
        in_env_s: duration of the running environment call, seconds.
        last_sent: time of the last message with the totals.
    """

    activity: str = ""
    in_env_s: float = 0.0
    last_sent: float = float("-inf")

    def send_soon(self) -> None:
        """Make a heartbeat due at the next tick."""
        self.last_sent = float("-inf")


class _SentFragments:
    """Finished, unacknowledged fragments of one incarnation in order, until `reset`.

    Attributes:
        sampled_total: env steps of all finished fragments.
        next_seq: number of the next finished fragment.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._unacked: deque[tuple[m.Samples, int]] = deque()
        self.reset()

    def reset(self) -> None:
        """Forget everything for a new incarnation."""
        self.next_seq = 1
        self.sampled_total = 0
        self._unacked.clear()
        self._bytes = self._newest_bytes = 0

    def __len__(self) -> int:
        return len(self._unacked)

    def __iter__(self) -> Iterator[m.Samples]:
        return (message for message, _ in self._unacked)

    def is_full(self, begun: int) -> bool:
        """Return whether no further fragment can begin, in addition to ``begun`` ones, until more
        are acknowledged.
        """
        settings = self._settings
        num_fragments = len(self._unacked) + begun
        if num_fragments >= settings.max_unacked:
            return True
        expected_bytes = self._bytes + (begun + 1) * self._newest_bytes
        return num_fragments > 0 and expected_bytes > settings.max_unacked_bytes

    def add(self, samples: m.Samples) -> m.Samples:
        """Keep a finished fragment, and return the message to send, with its number and the
        total.
        """
        self.sampled_total += samples.env_steps
        message = samples._replace(seq=self.next_seq, sampled_total=self.sampled_total)
        self.next_seq += 1
        size = _array_bytes(message)
        self._unacked.append((message, size))
        self._bytes += size
        self._newest_bytes = size
        return message

    def acked(self, seq: int) -> None:
        """Drop all fragments up to this number, which have arrived."""
        while self._unacked and self._unacked[0][0].seq <= seq:
            self._bytes -= self._unacked.popleft()[1]


def _array_bytes(samples: m.Samples) -> int:
    groups: list[Mapping[str, Array]] = [
        *samples.batches.values(),
        *samples.filter_deltas.values(),
    ]
    return sum(array.nbytes for group in groups for array in group.values())
