"""`python -m aiorl.worker`: workers, and the small process that starts them again whatever ends them."""

from __future__ import annotations

import os

# ruff: noqa: E402
# Read by NumPy's and ONNX Runtime's libraries when they are loaded: one thread per worker process, as many
# workers share a host (num_cpus_per_worker raises ONNX Runtime's own).
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiorl.process.children import FAILED, HOPELESS, KEYS_VARIABLE, WORKER_ID_VARIABLE, take_handed_over
from aiorl.process.imports import child_python, find_modules_here, python_path

if TYPE_CHECKING:
    from aiorl.config.command_line import WorkerArgs

__all__ = ["command", "main"]

logger = logging.getLogger("aiorl.worker")

_PARENTED = "--exit-with-parent"
_END_WITHIN_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run workers until the run is over; the exit status: 0 over or stopped, 1 failed, 2 wrong usage.

    A worker whose parent looks after it (the option that tells it so is not in the help) ends with one of the statuses
    of `aiorl.process.children`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return _run_worker(words) if _PARENTED in words else _keep_workers(words)


# The parent -----------------------------------------------------------------------------------------------------


def _keep_workers(words: list[str]) -> int:
    from aiorl.config.command_line import parse_worker_args
    from aiorl.process.keeper import Keeper

    take_handed_over()  # is for one worker, not for several
    args = parse_worker_args(words)
    _log_to_stderr(args.log_level)
    os.environ.update(python_path())
    command = [*child_python("aiorl.worker"), *words, _PARENTED]
    try:
        return Keeper(command, args.num_workers, args.max_worker_restarts).run()
    except OSError as error:
        logger.error("a worker process could not be started: %s", error)
        return FAILED


# The worker -----------------------------------------------------------------------------------------------------


def _run_worker(words: list[str]) -> int:
    from aiorl.config.command_line import parse_worker_args
    from aiorl.errors import AiorlError, ConfigError
    from aiorl.process.tasks import run

    find_modules_here()
    args = parse_worker_args(words)
    _log_to_stderr(args.log_level)
    try:
        return run(_work(args))
    except AiorlError as error:
        logger.error("%s", error)
        return HOPELESS if isinstance(error, ConfigError) else FAILED


def _log_to_stderr(level: str | None) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    logging.getLogger("aiorl").setLevel((level or "INFO").replace("WARN", "WARNING"))


async def _work(args: WorkerArgs) -> int:
    import asyncio
    import secrets
    import socket
    import threading

    from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
    from aiorl.net.transport.run_keys import from_variable
    from aiorl.net.transport.security import load_worker_keys
    from aiorl.net.transport.system import raise_open_file_limit, share_one_heap
    from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint
    from aiorl.process.children import watch_parent
    from aiorl.process.program import on_stop_signals
    from aiorl.process.tasks import tell_of_stray_errors
    from aiorl.run.worker.service import WorkerService

    share_one_heap()
    raise_open_file_limit()  # libzmq may abort where it can have no descriptor
    handed_over = take_handed_over()
    keys = from_variable(handed_over[KEYS_VARIABLE]) if handed_over[KEYS_VARIABLE] else None
    if args.keys is not None:
        keys = load_worker_keys(args.keys)
    settings = WorkerSettings(
        worker_id=handed_over[WORKER_ID_VARIABLE] or secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        slot_hint=args.slot or 0,
    )
    service = WorkerService(ZmqWorkerEndpoint(args.connect, keys=keys), WorkerSession(settings))
    loop = asyncio.get_running_loop()
    tell_of_stray_errors(service.fail)
    if args.exit_with_parent:
        reason = "the process that started this worker is gone"
        watch_parent(lambda: loop.call_soon_threadsafe(service.stop, reason))
    on_stop_signals(lambda name: service.stop(f"ended by {name}"))
    logger.info("worker %d looks for the learner at %s", os.getpid(), args.connect)
    outcome = await service.run()
    logger.log(logging.INFO if outcome.ok else logging.ERROR, "%s", outcome.reason)
    at_last = threading.Timer(_END_WITHIN_S, os._exit, (outcome.status,))  # the loop waits for threads when it closes
    at_last.daemon = True
    at_last.start()
    return outcome.status


def command() -> None:
    """Be the program: run and end the process, whatever threads are left."""
    from aiorl.process.program import keep_output_from_failing

    keep_output_from_failing()
    status = main()
    logging.shutdown()
    os._exit(status)  # a sampler stuck in its environment must not hold the process


if __name__ == "__main__":
    command()
