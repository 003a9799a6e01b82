"""`python -m aiorl.worker`: workers, and the small parent process that restarts them."""

from __future__ import annotations

import os

from aiorl.process.early import ONE_THREAD

# ruff: noqa: E402
# The libraries of NumPy and ONNX Runtime read these when they are loaded. Each worker process gets one thread, since
# many workers share a host (num_cpus_per_worker raises the number for ONNX Runtime).
for _name, _number in ONE_THREAD.items():
    os.environ.setdefault(_name, _number)

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aiorl.config.command_line import Parser, at_least, learner_places
from aiorl.errors import AiorlError, ConfigError
from aiorl.process.children import (
    DEFAULT_MAX_RESTARTS,
    FAILED,
    FORMER_END,
    HOPELESS,
    RELAY,
    WORKERS_TOGETHER,
    WRONG_USAGE,
)
from aiorl.process.imports import child_python, find_modules_here, python_path
from aiorl.process.program import log_to_stderr

if TYPE_CHECKING:
    from aiorl.actors.host import ActorHost
    from aiorl.run.worker.service import WorkerService

__all__ = ["command", "main"]

logger = logging.getLogger("aiorl.worker")

_PARENTED = "--exit-with-parent"
_END_WITHIN_S = 5.0
_RELAY_SLOT = 0
_ABOUT = (
    "Samples for a learner. A worker can join at any time, and waits while the learner is away."
)
_EXAMPLES = """
Examples:
  # one worker for a learner on this host
  python -m aiorl.worker --connect tcp://127.0.0.1:5557
  # eight workers on this host for a learner on another one
  python -m aiorl.worker --connect tcp://learner-host:5557 --num-workers 8 --keys keys
  # find the learner by its run directory on a shared disk, also after it was resumed on another host
  python -m aiorl.worker --connect run:/shared/runs/mine --keys /shared/keys

Environment, policy and config come from the learner: a worker needs only its address, and keys if they are in use. A
learner of the same user on the same host needs no keys.
"""
_LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")


def main(argv: Sequence[str] | None = None) -> int:
    """Run workers until the run is over and return the exit status, by which engines decide on a
    restart.

    0 means that the learner has said that the run is over, 1 failed, 2 wrong usage or useless to
    try again, 143 ended by SIGTERM, 130 by Ctrl-C.

    A worker with a parent that watches it (it gets an option that is not in the help) ends with one
    of the statuses in `aiorl.process.children`.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if _PARENTED in words:
        return _run_worker(words)
    return _keep_workers(words)


# The command line
# --------------------------------------------------------------------------------------------------


class WorkerArgs(NamedTuple):
    """Command line of a worker, or of the supervisor of several.

    Attributes:
        connect: places of the learner, as `aiorl.config.addresses.places_of` returns them.
        num_workers: number of worker processes on this host.
        keys: directory of this host's CURVE keys, or None.
        log_level: level of the log on stderr; None uses the learner's.
        log_dir: directory for the output of each worker process; None uses that of this process.
        max_worker_restarts: restarts of one worker process before it stays down.
        slot: index of a worker started by the learner; None for all others.
        worker_id: name of a worker started by the learner; "" for all others.
        exit_with_parent: end as soon as the parent process is gone.
    """

    connect: Sequence[str]
    num_workers: int = 1
    keys: Path | None = None
    log_level: str | None = None
    log_dir: Path | None = None
    max_worker_restarts: int = DEFAULT_MAX_RESTARTS
    slot: int | None = None
    worker_id: str = ""
    exit_with_parent: bool = False


def parse_worker_args(argv: Sequence[str]) -> WorkerArgs:
    """Parse the worker's command line.

    Args:
        argv: arguments without the program's name.

    Raises:
        SystemExit: with status 0 after --help, or 2 after one sentence about wrong usage.
    """
    defaults = WorkerArgs._field_defaults
    parser = Parser(
        "python -m aiorl.worker", "--connect tcp://HOST:PORT [options]", _ABOUT, _EXAMPLES
    )
    parser.add_argument(
        "--connect",
        metavar="ADDRESS",
        type=learner_places,
        action="extend",
        help=(
            "The learner's address, which it shows when it starts; or run:DIR or @FILE, to look it"
            " up there at each try. Several, separated by commas, are tried in turn."
        ),
    )
    parser.add_argument(
        "--num-workers",
        "--slots",
        metavar="N",
        type=at_least(1),
        help=(
            "Worker processes on this host, or processes for actors. (default:"
            f" {defaults['num_workers']})"
        ),
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        type=Path,
        help="CURVE keys, as python -m aiorl.keys DIR makes them.",
    )
    parser.add_argument(
        "--max-worker-restarts",
        metavar="N",
        type=at_least(0),
        help=(
            "Restarts of one worker process before it stays down. (default:"
            f" {DEFAULT_MAX_RESTARTS})"
        ),
    )
    parser.add_argument(
        "--log-level",
        metavar="|".join(_LEVELS),
        type=_level,
        help="Level of the log. (default: the learner's)",
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help=(
            "Directory for the output of each worker process: worker-HOST-N.txt, appended and kept"
            " small."
        ),
    )
    # options of workers that are started by the learner
    parser.add_argument("--slot", type=at_least(0), help=argparse.SUPPRESS)
    parser.add_argument("--worker-id", help=argparse.SUPPRESS)
    parser.add_argument("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse(argv)
    if "connect" not in options:
        parser.error("Set the learner's address: --connect tcp://HOST:PORT")
    return WorkerArgs(**options)


def _level(text: str) -> str:
    if text.upper() not in _LEVELS:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(_LEVELS)}, not {text!r}.")
    return text.upper()


# The parent
# --------------------------------------------------------------------------------------------------


def _keep_workers(words: list[str]) -> int:
    from aiorl.process.keeper import Keeper
    from aiorl.process.kept_logs import MAX_BYTES, LogRotation, own_logs

    args = parse_worker_args(words)
    log_to_stderr(args.log_level)
    slots = range(1, args.num_workers + 1)
    relay_name = ""
    if args.num_workers > 1:
        slots = range(_RELAY_SLOT, args.num_workers + 1)  # the relay should be there first
        relay_name = f"relay-{os.urandom(6).hex()}"
    os.environ.update({**python_path(), WORKERS_TOGETHER: str(args.num_workers), RELAY: relay_name})
    worker = [*child_python("aiorl.worker"), *words, _PARENTED]
    relay = [*child_python("aiorl.net.transport.relay"), str(args.keys or ""), args.log_level or ""]
    commands = {slot: worker for slot in slots} | {_RELAY_SLOT: relay}
    logs: dict[int, Path] = {}
    if args.log_dir is not None:
        try:
            logs.update(enumerate(own_logs(args.log_dir, args.num_workers), start=1))
        except OSError as error:
            logger.error("--log-dir %s can't be used: %s", args.log_dir, error.strerror or error)
            return WRONG_USAGE
    try:
        if logs:
            LogRotation([*logs.values()], MAX_BYTES)
        return Keeper(
            commands.__getitem__, slots, args.max_worker_restarts, log_path=logs.get
        ).run()
    except OSError as error:
        logger.error("a worker process could not be started: %s", error)
        return FAILED


# The worker
# --------------------------------------------------------------------------------------------------


def _run_worker(words: list[str]) -> int:
    import asyncio

    from aiorl.process.tasks import new_event_loop

    find_modules_here()
    args = parse_worker_args(words)
    log_to_stderr(args.log_level)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_work(args))
    except ConfigError as error:
        logger.error("%s", error)
        return HOPELESS
    except AiorlError as error:
        logger.error("%s", error)
        return FAILED


async def _work(args: WorkerArgs) -> int:
    import asyncio

    from aiorl.net.transport.system import share_one_heap
    from aiorl.process.children import watch_parent
    from aiorl.process.program import end_within, on_stop_signals
    from aiorl.process.tasks import report_stray_errors
    from aiorl.run.worker.service import WorkerOutcome, make_service

    share_one_heap()
    service = make_service(args.connect, args.keys, args.worker_id, args.slot or 0)
    if args.slot is None:  # a learner knows how the workers that it started have ended
        service.former_end = os.environ.get(FORMER_END, "")
        service.may_join_hub = True
    loop = asyncio.get_running_loop()
    work: WorkerService | ActorHost = service
    stopped_by: list[str] = []

    def stop(reason: str) -> None:
        stopped_by.append(reason)  # `work` may be about to end already, for another reason
        work.stop(reason)

    report_stray_errors(lambda error: work.fail(error))
    if args.exit_with_parent:
        reason = "the process that started this worker is gone"
        watch_parent(lambda: loop.call_soon_threadsafe(stop, reason))
    on_stop_signals(lambda name: stop(f"ended by {name}"))
    logger.info("worker %d connects to the learner at %s", os.getpid(), ", ".join(args.connect))
    outcome = await service.run()
    if outcome.found_hub and not stopped_by:
        from aiorl.actors.joined import begin_again, make_host

        logger.info("it is a hub of actors: this process runs one of them")
        work = make_host(args.connect, args.keys)
        end = await work.run()
        if not end.is_final and not stopped_by:
            begin_again(end)
        outcome = WorkerOutcome(True, end.reason, final=end.is_final)
    logger.log(logging.INFO if outcome.ok else logging.ERROR, "%s", outcome.reason)
    end_within(_END_WITHIN_S, outcome.status)
    return outcome.status


def command() -> None:
    """Run the program and end the process, even if threads are left."""
    from aiorl.process.program import keep_output_from_failing

    keep_output_from_failing()
    status = main()
    logging.shutdown()
    os._exit(status)  # a sampler stuck in its environment must not hold the process


if __name__ == "__main__":
    command()
