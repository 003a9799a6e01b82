"""What a worker says again until it is answered: its Hello, its fragments, its request for a snapshot."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiorl.config.worker import TransportConfig
from aiorl.errors import ConfigError
from aiorl.net.wire import messages as m
from aiorl.text import MAX_NAME, is_name

__all__ = ["MAX_UNACKED_BYTES", "Greeting", "SentFragments", "VersionWatch", "WorkerSettings"]

MAX_UNACKED_BYTES = 1 << 28
"""Bytes of fragments sent and not acknowledged, where a configuration says nothing else."""

_HELLO_AGAIN_S = 0.25
_FIRST_HELLO_WAIT_S = 0.5
_MAX_RESEND_WAIT_S = 16.0
_SNAPSHOT_WAIT_S, _MAX_SNAPSHOT_WAIT_S = 1.0, 8.0


@dataclass(slots=True)
class WorkerSettings:
    """Who a worker is and how patient.

    Attributes:
        worker_id: stable random name of this process.
        host: its host's name.
        pid: its process id.
        run_id: the only run it joins, "" for any.
        slot_hint: the slot it would like, 0 for any.
        transport: the times that a configuration sets; the learner's once it has told them.
        max_unacked: fragments sent and not acknowledged; no other is begun beyond.
        max_unacked_bytes: the same in bytes, as far as the newest fragment tells how large the next ones are; a single
            one may be larger.

    Raises: ConfigError for a worker_id or run_id that is too long or not printable.
    """

    worker_id: str
    host: str = ""
    pid: int = 0
    run_id: str = ""
    slot_hint: int = 0
    transport: TransportConfig = field(default_factory=TransportConfig)
    max_unacked: int = 1024
    max_unacked_bytes: int = MAX_UNACKED_BYTES

    def __post_init__(self) -> None:
        """Refuse names that no learner would take."""
        for key, value in (("worker_id", self.worker_id), ("run_id", self.run_id)):
            if not is_name(value):
                raise ConfigError(
                    f"{key} is {value[:80]!r}, but may have at most {MAX_NAME} visible ASCII characters",
                    key=key,
                    value=value,
                )


class Greeting:
    """While it is open, a Hello is due or unanswered, and nothing but Hello may be sent.

    Attributes:
        is_linked: the endpoint is connected.
        link_words: why it is not, in plain words.
        is_open: see above.
        refusal: why the learner has not taken us, "" if it has not said no.
        is_learner_unready: it is there but cannot take anybody yet.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.is_linked = False
        self.link_words = "no connection yet"
        self.refusal = ""
        self.is_learner_unready = False
        self._settings = settings
        self._next = self._last = float("-inf")
        self.begin(self._next)

    def begin(self, now: float) -> None:
        """From now on only Hello is sent, until the learner answers."""
        self.is_open = True
        self._wait_s = min(_FIRST_HELLO_WAIT_S, self._settings.transport.reconnect_max_s)
        self._next = now

    def is_due(self, now: float) -> bool:
        """Whether Hello should be said."""
        return self.is_linked and self.is_open and now >= self._next

    def may_repeat(self, now: float) -> bool:
        """Whether the last Hello is long enough ago to say another out of turn."""
        return now - self._last >= _HELLO_AGAIN_S

    def hurry(self, now: float) -> None:
        """The learner lives: do not wait for the backoff to end."""
        if self.may_repeat(now):
            self._next = now

    def put_off(self, now: float) -> None:
        """The learner is about to go: wait before the next Hello."""
        self._next = now + self._wait_s

    def said(self, now: float) -> None:
        """Hello was said; the next one comes later."""
        self._last = now
        self._next = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._settings.transport.reconnect_max_s)

    def end(self) -> None:
        """The learner has taken us."""
        self.is_open = False
        self.refusal = ""
        self.is_learner_unready = False

    def text(self, silent_s: float | None) -> str:
        """What we wait for, in plain words; ``silent_s``: for so long nothing was heard of a learner that had us."""
        if not self.is_linked:
            return f"cannot reach the learner: {self.link_words}; trying again"
        every = f"trying again every {self._wait_s:g} s"
        if silent_s is not None:
            return f"learner silent for {silent_s:.0f} s: {every}"
        if self.refusal:
            return f"the learner says: {self.refusal}; {every}"
        if self.is_learner_unready:
            return f"waiting for the learner to get ready; {every}"
        return f"waiting for the learner to answer; {every}"


class SentFragments:
    """Fragments finished and not acknowledged, in order; one incarnation's, until `reset`.

    Attributes:
        sampled_total: env steps of all that were finished.
        next_seq: the number the next finished fragment gets.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._unacked: deque[tuple[m.Samples, int]] = deque()
        self._resend_wait = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget all: another incarnation begins."""
        self.next_seq = 1
        self.sampled_total = 0
        self._unacked.clear()
        self._bytes = self._newest_bytes = 0
        self._wait_anew(float("inf"))

    def __len__(self) -> int:
        return len(self._unacked)

    def is_full(self, begun: int) -> bool:
        """Whether no other fragment may be begun beside the ``begun`` ones until more is acknowledged."""
        settings, held = self._settings, len(self._unacked) + begun
        expected = self._bytes + (begun + 1) * self._newest_bytes
        return held >= settings.max_unacked or (held > 0 and expected > settings.max_unacked_bytes)

    def add(self, samples: m.Samples, now: float) -> m.Samples:
        """Keep a finished fragment; the message to be sent, with its number and the total."""
        self.sampled_total += samples.env_steps
        message = dataclasses.replace(samples, seq=self.next_seq, sampled_total=self.sampled_total)
        self.next_seq += 1
        if not self._unacked:
            self._wait_anew(now)
        size = _array_bytes(message)
        self._unacked.append((message, size))
        self._bytes += size
        self._newest_bytes = size
        return message

    def acked(self, seq: int, now: float) -> None:
        """All fragments up to this number have come."""
        unacked = self._unacked
        advanced = False
        while unacked and unacked[0][0].seq <= seq:
            self._bytes -= unacked.popleft()[1]
            advanced = True
        if advanced:
            self._wait_anew(now)

    def is_resend_due(self, now: float) -> bool:
        """Whether fragments have waited for their acknowledgement long enough."""
        return bool(self._unacked) and now >= self._resend_at

    def take_again(self, now: float) -> list[m.Samples]:
        """All unacknowledged fragments, to be sent again; the next time comes twice as late."""
        self._resend_at = now + self._resend_wait
        self._resend_wait = min(2 * self._resend_wait, _MAX_RESEND_WAIT_S)
        return [message for message, _ in self._unacked]

    def _wait_anew(self, now: float) -> None:
        self._resend_wait = self._settings.transport.resend_after_s
        self._resend_at = now + self._resend_wait


def _array_bytes(samples: m.Samples) -> int:
    groups: list[Mapping[str, m.AnyArray]] = [*samples.batches.values(), *samples.filter_deltas.values()]
    return sum(array.nbytes for group in groups for array in group.values())


class VersionWatch:
    """Follows the versions of one incarnation.

    Attributes:
        version: newest snapshot received, -1 for none.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, version: int = -1) -> None:
        """Begin anew with a snapshot of this version; a newer one may be on its way for a second."""
        self.version = self._learners = version
        self._wait_s = _SNAPSHOT_WAIT_S
        self._behind_since: float | None = None

    def heard(self, version: int) -> None:
        """The learner has this version."""
        self._learners = max(self._learners, version)

    def take(self, version: int) -> bool:
        """A snapshot has come; whether it is newer than what we have."""
        self.heard(version)
        if version <= self.version:
            return False
        self.version = version
        self._behind_since = None
        self._wait_s = _SNAPSHOT_WAIT_S
        return True

    def is_overdue(self, needed: int, now: float) -> bool:
        """Whether a snapshot of the version needed, or that the learner has, has been missing for long enough."""
        if max(self._learners, needed) <= self.version:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        else:
            return now - self._behind_since >= self._wait_s
        return False

    def asked(self, now: float) -> None:
        """The snapshot was asked for; the next time comes later."""
        self._behind_since = now
        self._wait_s = min(2 * self._wait_s, _MAX_SNAPSHOT_WAIT_S)
