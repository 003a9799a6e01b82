"""What a worker says again until it is answered: its Hello, its fragments, its request for a snapshot.

Settings are given with each call, since a learner may change them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from aiorl.errors import ConfigError
from aiorl.text import MAX_NAME, is_name
from aiorl.wire import messages as m

__all__ = ["Greeting", "SentFragments", "VersionWatch", "WorkerSettings"]

_HELLO_AGAIN_S = 0.25
_MAX_RESEND_WAIT_S = 16.0
_MAX_SNAPSHOT_WAIT_S = 8.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Who a worker is and how patient; times in seconds.

    Attributes:
        worker_id: stable random name of this process.
        host: its host's name.
        pid: its process id.
        run_id: the only run it joins, "" for any.
        slot_hint: the slot it would like, 0 for any.
        heartbeat_interval_s: a Beat at least this often.
        heartbeat_timeout_s: silence of the learner after which sampling pauses.
        hello_backoff_s: first and longest wait between two Hellos.
        resend_after_s: without an Ack for this long, unacknowledged fragments are sent again.
        snapshot_wait_s: how long a newer snapshot may be on its way before we ask for it.
        max_unacked: fragments sent and not acknowledged; no other is begun beyond.
        max_unacked_bytes: the same in bytes.

    Raises: ConfigError for a worker_id or run_id that is too long or not printable.
    """

    worker_id: str
    host: str = ""
    pid: int = 0
    run_id: str = ""
    slot_hint: int = 0
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    hello_backoff_s: tuple[float, float] = (0.5, 5.0)
    resend_after_s: float = 2.0
    snapshot_wait_s: float = 1.0
    max_unacked: int = 1024
    max_unacked_bytes: int = 1 << 28

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
        self.is_open = True
        self.refusal = ""
        self.is_learner_unready = False
        self._wait_s = settings.hello_backoff_s[0]
        self._next = self._last = float("-inf")

    def begin(self, now: float, settings: WorkerSettings) -> None:
        """From now on only Hello is sent, until the learner answers."""
        self.is_open = True
        self._wait_s = settings.hello_backoff_s[0]
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

    def said(self, now: float, settings: WorkerSettings) -> None:
        """Hello was said; the next one comes later."""
        self._last = now
        self._next = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, settings.hello_backoff_s[1])

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
        abandoned_total: env steps of fragments that were given up.
        in_progress: env steps of all unfinished fragments together.
        next_seq: the number the next finished fragment gets.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._unacked: deque[tuple[m.Samples, int]] = deque()
        self.reset(settings)

    def reset(self, settings: WorkerSettings) -> None:
        """Forget all: another incarnation begins."""
        self.next_seq = 1
        self.abandoned_total = self.in_progress = 0
        self._finished = 0
        self._unacked.clear()
        self._bytes = 0
        self._resend_at = float("inf")
        self._resend_wait = settings.resend_after_s

    def __len__(self) -> int:
        return len(self._unacked)

    @property
    def sampled_total(self) -> int:
        """Env steps of this incarnation so far."""
        return self._finished + self.abandoned_total + self.in_progress

    def is_full(self, begun: int, settings: WorkerSettings) -> bool:
        """Whether no other fragment may be begun beside the ``begun`` ones until more is acknowledged."""
        return len(self._unacked) + begun >= settings.max_unacked or self._bytes >= settings.max_unacked_bytes

    def add(self, samples: m.Samples, now: float, settings: WorkerSettings) -> m.Samples:
        """Keep a finished fragment; the message to be sent, with its number and the totals."""
        self._finished += samples.env_steps
        self.in_progress = max(0, self.in_progress - samples.env_steps)
        message = dataclasses.replace(
            samples, seq=self.next_seq, sampled_total=self.sampled_total, abandoned_total=self.abandoned_total
        )
        self.next_seq += 1
        if not self._unacked:
            self._wait_anew(now, settings)
        size = _array_bytes(message)
        self._unacked.append((message, size))
        self._bytes += size
        return message

    def abandon(self, env_steps: int) -> None:
        """Give an unfinished fragment up."""
        self.abandoned_total += env_steps
        self.in_progress = max(0, self.in_progress - env_steps)

    def acked(self, seq: int, now: float, settings: WorkerSettings) -> None:
        """All fragments up to this number have come."""
        unacked = self._unacked
        advanced = False
        while unacked and unacked[0][0].seq <= seq:
            self._bytes -= unacked.popleft()[1]
            advanced = True
        if advanced:
            self._wait_anew(now, settings)

    def is_resend_due(self, now: float) -> bool:
        """Whether fragments have waited for their acknowledgement long enough."""
        return bool(self._unacked) and now >= self._resend_at

    def take_again(self, now: float) -> list[m.Samples]:
        """All unacknowledged fragments, to be sent again; the next time comes twice as late."""
        self._resend_at = now + self._resend_wait
        self._resend_wait = min(2 * self._resend_wait, _MAX_RESEND_WAIT_S)
        return [message for message, _ in self._unacked]

    def _wait_anew(self, now: float, settings: WorkerSettings) -> None:
        self._resend_wait = settings.resend_after_s
        self._resend_at = now + self._resend_wait


def _array_bytes(samples: m.Samples) -> int:
    groups: list[Mapping[str, m.AnyArray]] = [*samples.batches.values(), *samples.filter_deltas.values()]
    return sum(array.nbytes for group in groups for array in group.values())


class VersionWatch:
    """Follows the versions of one incarnation.

    Attributes:
        version: newest snapshot received, -1 for none.
    """

    def __init__(self, wait_s: float) -> None:
        self.reset(wait_s)

    def reset(self, wait_s: float, version: int = -1) -> None:
        """Begin anew with a snapshot of this version; a newer one may be on its way for ``wait_s``, seconds."""
        self.version = self._learners = version
        self._wait_s = wait_s
        self._behind_since: float | None = None

    def heard(self, version: int) -> None:
        """The learner has this version."""
        self._learners = max(self._learners, version)

    def take(self, version: int, wait_s: float) -> bool:
        """A snapshot has come; whether it is newer than what we have."""
        self.heard(version)
        if version <= self.version:
            return False
        self.version = version
        self._behind_since = None
        self._wait_s = wait_s
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
