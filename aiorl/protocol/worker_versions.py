"""Which policy version a worker has, which one its learner has, and when to ask for what is missing."""

from __future__ import annotations

__all__ = ["VersionWatch"]

_MAX_WAIT_S = 8.0


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
        self._wait_s = min(2 * self._wait_s, _MAX_WAIT_S)
