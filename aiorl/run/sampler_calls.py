"""The learner's end of the calls that code of users makes to samplers of a run's workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from aiorl.actors.calls import answer_of
from aiorl.actors.values import num_bytes, refuse_handle
from aiorl.errors import (
    ActorError,
    ActorLost,
    LocalProtocolError,
    UnsendableError,
)
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import LearnerSession
from aiorl.net.wire.messages import Call, Plain


@dataclass(frozen=True, slots=True)
class SamplerPlace:
    """A sampler of a registered worker.

    Attributes:
        slot: index of the worker, from 1.
        incarnation: id of its registration.
        sampler: index among the samplers of the worker, from 0.
    """

    slot: int
    incarnation: str
    sampler: int


class SamplerCalls:
    """The learner's end of users' calls that have not ended. They run between two fragments of their
    sampler, in order.

    Args:
        session: sends them.
        check: raises LocalProtocolError if a message can't be sent.
        pump: called after each call, to send its message.
    """

    def __init__(
        self, session: LearnerSession, check: Callable[[Call], None], pump: Callable[[], None]
    ) -> None:
        self._session = session
        self._check = check
        self._pump = pump
        self._open: dict[int, Future[Any]] = {}

    def begin(
        self, place: SamplerPlace, method: str, packed: Mapping[str, Plain], future: Future[Any]
    ) -> None:
        """Call a method of a sampler's RolloutWorker, in the event loop's thread.

        Args:
            place: the sampler.
            method: name of the method.
            packed: its arguments, see `aiorl.actors.calls.packed_arguments`.
            future: gets the result, or the error: RemoteError of the method, ActorLost if the
                worker is lost, UnsendableError if the arguments are too large.
        """
        slot = self._session.slot_of(place.incarnation)
        if not slot:
            future.set_exception(ActorLost(f"worker {place.slot}", "it has left the run"))
            return
        args = {**packed, "sampler": place.sampler}
        try:
            self._check(Call(0, method, args))
        except LocalProtocolError as error:
            text = f"the arguments of {method} can't be sent: {error}"
            future.set_exception(UnsendableError(text))
            return
        number = self._session.call(slot, method, args, num_bytes=num_bytes(args))
        self._open[number] = future
        self._pump()

    def replied(self, reply: ev.CallReplied) -> None:
        """Take the answer to a call."""
        future = self._open.pop(reply.call_id, None)
        if future is None:  # not a call of a user
            return
        method = f"{reply.method} of worker {reply.slot}"
        answer, error = answer_of(
            method, ok=reply.ok, result=reply.result, make_handle=refuse_handle
        )
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)

    def lost(self, loss: ev.CallLost) -> None:
        """End a call whose worker is lost."""
        future = self._open.pop(loss.call_id, None)
        if future is not None:
            future.set_exception(ActorLost(f"worker {loss.slot}", loss.reason))

    def close(self, reason: str) -> None:
        """End all calls; the workers have left."""
        for future in self._open.values():
            future.set_exception(
                ActorError(f"the call has no answer, since the run ends: {reason}")
            )
        self._open.clear()
