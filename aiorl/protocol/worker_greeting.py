"""A worker's way to its learner: the connection, when to say Hello over it, and what has come back."""

from __future__ import annotations

from aiorl.protocol.worker_settings import WorkerSettings

__all__ = ["Greeting"]

_HELLO_AGAIN_S = 0.25


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
