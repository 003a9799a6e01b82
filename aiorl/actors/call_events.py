"""Events and names that the sessions of both sides share: ends of calls, and the first call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiorl.net.wire import messages as m

INIT: Final = "__init__"
"""Method of the call that makes the actor's object."""
MAX_CREDIT: Final = 1 << 16
"""Most items of one stream that may be under way."""


@dataclass(frozen=True, slots=True, eq=False)
class CallEnded:
    """One of our own calls has ended with a reply; see `Reply`."""

    call_id: int
    ok: bool
    result: m.Value


@dataclass(frozen=True, slots=True, eq=False)
class ItemArrived:
    """The next item of a stream that we have asked for."""

    call_id: int
    value: m.Value
