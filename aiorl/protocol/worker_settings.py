"""Who a worker is to its learner, how patient, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aiorl.errors import ConfigError
from aiorl.text import MAX_NAME, is_name

__all__ = ["BUILDING", "WorkerSettings", "WorkerState"]

BUILDING = "building its environment"
"""What a worker says that it does, and then perhaps nothing for a while: an environment may be built by code that lets
no other code of its process run."""


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


class WorkerState(StrEnum):
    """Where a worker stands with its learner."""

    CONNECTING = "connecting"
    REGISTERED = "registered"
    PAUSED = "paused"
    ENDED = "ended"
