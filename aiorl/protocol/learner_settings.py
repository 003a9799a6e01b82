"""How patient a learner is with its workers, and how large its run."""

from __future__ import annotations

from dataclasses import dataclass

from aiorl.wire.limits import MAX_WORKERS

__all__ = ["LearnerSettings"]


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How patient and how large; times in seconds.

    Attributes:
        heartbeat_interval_s: a LearnerBeat this often, to each worker and to all.
        heartbeat_timeout_s: silence after which a worker is lost.
        build_timeout_s: the same for one that says it is building its environment, where that is longer: some of that
            keeps a whole process from doing anything else.
        max_workers: slots; more workers are asked to try again later. At most `max_workers_of` the limits of messages.
        lease_timeout_s: time for a fragment, after which others get its lease; more where the others are slow too.
        num_workers: told to workers: how many the run is configured for.
        hello_grace: messages without a Hello after which a peer is dropped.
        resend_ask_s: how often at most a worker is asked to send again what is missing.
        snapshot_interval_s: how often at most a worker gets the newest snapshot on request.
        call_timeout_s: a call not answered for this long has failed.
    """

    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    build_timeout_s: float = 0.0
    max_workers: int = MAX_WORKERS
    lease_timeout_s: float = 30.0
    num_workers: int = 0
    hello_grace: int = 64
    resend_ask_s: float = 0.25
    snapshot_interval_s: float = 0.5
    call_timeout_s: float = 60.0
