"""Sessions: what the server remembers of a client's episode from step to step."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from aiorl.web.messages import Refusal

if TYPE_CHECKING:
    from aiorl.serving.batching import Answer
    from aiorl.serving.record import Episode


class Session:
    """Memory of one client's episodes, one after the other.

    Attributes:
        id: its name.
        model: name of its policy.
        arm: index of the policy's versions side by side that answers it.
        is_at_start: True before the first step of an episode.
        state: recurrent state after the last step, an array [...] per component.
        prev_action: last action, in the environment's form.
        steps: steps of this episode.
        total: sum of the rewards reported in this episode.
        train: False if its episodes are not recorded.
        episode: recorded rows of this episode, if there are any.
    """

    def __init__(self, id: str, model: str, arm: int, now: float, *, train: bool = True) -> None:
        """Begin with an episode's start."""
        self.id, self.model, self.arm, self.used, self.train = id, model, arm, now, train
        self.episode: Episode | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a new episode."""
        self.drop_episode()
        self.is_at_start = True
        self.state: list[NDArray[Any]] = []
        self.prev_action: Any = None
        self.total = 0.0
        self.steps = 0

    def drop_episode(self) -> None:
        """Forget the rows recorded of this episode."""
        if self.episode is not None:
            self.episode.end("dropped")
            self.episode = None

    def note(self, answer: Answer, reward: float, *, is_start: bool) -> None:
        """Note an answered step.

        Args:
            answer: the answer; state and action after the step.
            reward: reward of the step before.
            is_start: True if the step is the first one of a new episode.
        """
        if is_start:
            self.restart()
        self.is_at_start = False
        self.state = [state[0].copy() for state in answer.states]
        self.prev_action = answer.actions[0]
        self.total += reward
        self.steps += 1


class Sessions:
    """Open sessions, limited in number, each ended after a time without a request.

    Attributes:
        max_sessions: number of open ones.
        ttl_s: seconds that a session is kept after its last request.
        num_expired: sessions ended because of that.
    """

    def __init__(
        self,
        max_sessions: int,
        ttl_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_expiry: Callable[[Session], None] = lambda session: None,
    ) -> None:
        """Begin with none; see the class. `clock` returns seconds; `on_expiry` is called with each expired session."""
        self.max_sessions, self.ttl_s, self.num_expired = max_sessions, ttl_s, 0
        self._clock, self._on_expiry = clock, on_expiry
        self._open: OrderedDict[str, Session] = OrderedDict()  # by the time of their last request

    def __len__(self) -> int:
        """Return the number of open sessions."""
        self._expire()
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        """Return an iterator of the open sessions."""
        return iter(self._open.values())

    def open(self, model: str, arm: int = 0, *, id: str = "", train: bool = True) -> Session:
        """Open a session of a policy.

        Args:
            model: name of the policy.
            arm: index of the versions that answers it.
            id: name chosen by the client; "" makes one that no other client can guess.
            train: False if its episodes are not recorded.

        Raises:
            Refusal: there are as many as the server keeps.
        """
        self._expire()
        if len(self._open) >= self.max_sessions:
            said = f"{self.max_sessions:,} sessions are open, as many as this server keeps. Close some, or try later."
            raise Refusal(503, said)
        session = Session(id or secrets.token_urlsafe(16), model, arm, self._clock(), train=train)
        self._open[session.id] = session
        return session

    def find(self, id: Any) -> Session:
        """Return an open session, and keep it for longer.

        Raises:
            Refusal: there is none of that name.
        """
        self._expire()
        session = self._open.get(id) if isinstance(id, str) else None
        if session is None:
            said = f"Session {shown(id)} is not open: it was closed, had no request for {self.ttl_s:g} s, or never was."
            raise Refusal(410 if isinstance(id, str) else 400, f"{said} Open a new one.")
        session.used = self._clock()
        self._open.move_to_end(session.id)
        return session

    def close(self, id: Any) -> Session:
        """Close a session, and return it.

        Raises:
            Refusal: there is none of that name.
        """
        session = self._open.pop(self.find(id).id)
        session.drop_episode()
        return session

    def is_open(self, id: str) -> bool:
        """Return True if a session of that name is open."""
        self._expire()
        return id in self._open

    def _expire(self) -> None:
        last = self._clock() - self.ttl_s
        while self._open:
            session = next(iter(self._open.values()))
            if session.used >= last:
                return
            del self._open[session.id]
            session.drop_episode()
            self.num_expired += 1
            self._on_expiry(session)
