"""Sessions: what the server remembers of a client's episode from step to step."""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, NamedTuple

from aiorl.data.columns import Array
from aiorl.serving.episode import Episode
from aiorl.web.app import Refusal


class Memory(NamedTuple):
    """A policy's memory of the steps before.

    Attributes:
        state: recurrent state, an array [...] per component, as `Actor.initial_memory`.
        action: the last action, in the environment's form.
        reward: its reward.
    """

    state: Sequence[Array]
    action: Any
    reward: float = 0.0


@dataclass(slots=True, eq=False)
class Session:
    """One client's episodes, one after the other.

    Attributes:
        id: its name.
        model: name of its policy.
        arm: index of the policy's versions side by side that answers it.
        used: time of its last request.
        train: False if its episodes are not recorded.
        memory: memory after the last step; None before the first one of an episode.
        steps: steps of this episode.
        total: sum of the rewards reported in this episode.
        episode: recorded rows of this episode, if there are any.
    """

    id: str
    model: str
    arm: int
    used: float
    train: bool = True
    memory: Memory | None = None
    steps: int = 0
    total: float = 0.0
    episode: Episode | None = None

    def restart(self) -> None:
        """Begin a new episode."""
        self.drop_episode()
        self.memory = None
        self.steps = 0
        self.total = 0.0

    def drop_episode(self) -> None:
        """Forget the rows recorded of this episode."""
        if self.episode is not None:
            self.episode.end("dropped")
            self.episode = None


class Sessions:
    """Open sessions, limited in number, each ended after a time without a request.

    Attributes:
        ttl_s: seconds that a session is kept after its last request.
        clock: returns the time, in seconds.
        num_of_arm: number of the open sessions of each arm.
    """

    def __init__(
        self, max_sessions: int, ttl_s: float, on_expiry: Callable[[Session], object]
    ) -> None:
        """Begin with none.

        Args:
            max_sessions: number of open sessions.
            ttl_s: seconds that a session is kept after its last request.
            on_expiry: called with each session that has ended for lack of requests.
        """
        self.ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._on_expiry = on_expiry
        self.clock: Callable[[], float] = time.monotonic
        self.num_of_arm: Counter[int] = Counter()
        self._open: OrderedDict[str, Session] = OrderedDict()  # by the time of their last request

    def __len__(self) -> int:
        """Return the number of open sessions."""
        self._expire()
        return len(self._open)

    def open(self, model: str, arm: int = 0, *, id: str = "", train: bool = True) -> Session:
        """Open a session of a policy.

        Args:
            model: name of the policy.
            arm: index of the versions that answers it.
            id: name chosen by the client; "" makes one that no other client can guess.
            train: False if its episodes are not recorded.

        Raises:
            Refusal: as many are open as there may be.
        """
        if len(self) >= self._max_sessions:
            raise Refusal(
                503,
                f"{self._max_sessions:,} sessions are open, the most there may be. Try again"
                " later.",
            )
        session = Session(
            id=id or secrets.token_urlsafe(16),
            model=model,
            arm=arm,
            used=self.clock(),
            train=train,
        )
        self._open[session.id] = session
        self.num_of_arm[arm] += 1
        return session

    def find(self, id: Any) -> Session:
        """Return an open session, and keep it for longer.

        Raises:
            Refusal: there is none of that name.
        """
        if id is None:
            raise Refusal(
                400,
                "This request needs a session. POST /sessions opens one, as does a message with"
                " 'do': 'open'. Send its name as 'session'.",
            )
        if not isinstance(id, str) or not self.is_open(id):
            raise Refusal(
                410 if isinstance(id, str) else 400,
                f"Session {short_repr(id)} is not open: it was closed, had no request for"
                f" {self.ttl_s:g} s, or never was. Open a new one.",
            )
        session = self._open[id]
        session.used = self.clock()
        self._open.move_to_end(id)
        return session

    def close(self, id: Any) -> None:
        """Close a session.

        Raises:
            Refusal: there is none of that name.
        """
        self._remove(self.find(id))

    def is_open(self, id: str) -> bool:
        """Return True if a session of that name is open."""
        self._expire()
        return id in self._open

    def _expire(self) -> None:
        last = self.clock() - self.ttl_s
        while self._open:
            session = next(iter(self._open.values()))
            if session.used >= last:
                return
            self._remove(session)
            self._on_expiry(session)

    def _remove(self, session: Session) -> None:
        del self._open[session.id]
        self.num_of_arm[session.arm] -= 1
        if not self.num_of_arm[session.arm]:
            del self.num_of_arm[session.arm]
        session.drop_episode()
