"""The learner's service as the configuration wants it, listening for workers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.net.protocol.events import WorkerFailed
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.transport.descriptors import raise_open_file_limit
from aiorl.net.transport.endpoint import EndpointLimits
from aiorl.net.transport.security import WorkerKeys, load_learner_keys
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.wire.limits import limits_of, max_workers_of
from aiorl.run.report.results import Results
from aiorl.run.service import LearnerService

__all__ = ["listen"]


def listen(
    config: CommonConfig,
    directory: RunDirectory,
    results: Results,
    ledger: Ledger | None,
    *,
    tell: Callable[[str, int], None],
    fail: Callable[[BaseException], None],
    on_worker_failed: Callable[[WorkerFailed], None],
    on_out_of_data: Callable[[], None],
) -> tuple[LearnerService, WorkerKeys | None]:
    """Listen where the run listened before a resume if that is free, else where the configuration says.

    Args:
        config: the effective configuration.
        directory: the run's.
        results: where episodes and lags go.
        ledger: the account of the run to resume.
        tell: told (text, logging level) what users want to know.
        fail: told of an error of a task, after which the service is of no use.
        on_worker_failed: told what workers report of failures of their own.
        on_out_of_data: told when all stored experience is read, and trained on.
    Returns: the service, and what workers that the learner starts have to prove; None without keys.
    Raises: ConfigError if the address can't be bound, or the keys can't be used.
    """
    keys = None if config.keys is None else load_learner_keys(Path(config.keys))
    limits = limits_of(config.transport)
    settings = LearnerSettings(
        config.transport, max_workers_of(limits), config.num_workers, data_ends=config.input_epochs is not None
    )
    raise_open_file_limit()

    def listen_on(bind: str) -> tuple[LearnerService, WorkerKeys | None]:
        endpoint = ZmqLearnerEndpoint(
            bind, keys=keys, insecure=config.insecure, limits=EndpointLimits.of(config.transport)
        )
        service = LearnerService(
            config,
            endpoint,
            LearnerSession(directory.run_id, secrets.token_hex(8), settings, ledger),
            results,
            on_event=tell,
            on_failure=fail,
            on_worker_failed=on_worker_failed,
            on_out_of_data=on_out_of_data,
            limits=limits,
        )
        service.start()
        return service, endpoint.worker_keys

    if directory.last_address and config.bind.endswith(":0"):
        try:
            return listen_on(directory.last_address)
        except ConfigError as error:
            tell(f"workers will not find the learner where it was: {error}", logging.WARNING)
    return listen_on(config.bind)
