"""What may be typed after `python -m aiorl.worker`. Loads next to nothing: workers are started often."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aiorl.config.address import split_address
from aiorl.config.parser import Parser, at_least
from aiorl.errors import ConfigError
from aiorl.process.restarts import DEFAULT_MAX_RESTARTS

__all__ = ["WorkerArgs", "parse_worker_args"]

_ABOUT = "Samples for a learner; may join at any time, and waits for a learner that is away."
_EXAMPLES = """
Examples:
  # one worker for a learner on this host
  python -m aiorl.worker --connect tcp://127.0.0.1:5557
  # eight workers on this host for a learner on another one
  python -m aiorl.worker --connect tcp://learner-host:5557 --num-workers 8 --keys keys

Environment, policy and config come from the learner: the address (and keys) is all a worker needs. Keys of a learner
of the same user on the same host it finds by itself.
"""
_LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")


class WorkerArgs(NamedTuple):
    """What was asked of a worker, or of the supervisor of several.

    Attributes:
        connect: the learner's address, tcp://HOST:PORT.
        num_workers: worker processes on this host.
        keys: directory of this host's CURVE keys, or None.
        log_level: level of the log on stderr; None takes the learner's.
        max_worker_restarts: restarts of one worker process before it stays down.
        slot: index that the learner gave a worker which it started itself; None for all others.
        exit_with_parent: end as soon as the process that started this one is gone.
    """

    connect: str
    num_workers: int = 1
    keys: Path | None = None
    log_level: str | None = None
    max_worker_restarts: int = DEFAULT_MAX_RESTARTS
    slot: int | None = None
    exit_with_parent: bool = False


def parse_worker_args(argv: Sequence[str]) -> WorkerArgs:
    """What the worker's command line says.

    Args:
        argv: without the program's name.
    Raises: SystemExit, with status 0 after --help and 2 after one sentence about wrong usage.
    """
    defaults = WorkerArgs._field_defaults
    parser = Parser("python -m aiorl.worker", "--connect tcp://HOST:PORT [options]", _ABOUT, _EXAMPLES)
    add = parser.add_argument
    add("--connect", metavar="ADDRESS", type=_address, help="The learner's address, which it shows at its start.")
    add(
        "--num-workers", metavar="N", type=at_least(1),
        help=f"Worker processes on this host. (default: {defaults['num_workers']})",
    )  # fmt: skip
    add("--keys", metavar="DIR", type=Path, help="CURVE keys, as python -m aiorl.keys DIR makes them.")
    add(
        "--max-worker-restarts", metavar="N", type=at_least(0),
        help=f"Restarts of one worker process before it stays down. (default: {DEFAULT_MAX_RESTARTS})",
    )  # fmt: skip
    add("--log-level", metavar="|".join(_LEVELS), type=_level, help="Level of the log. (default: the learner's)")
    # those that the learner gives the workers it starts itself
    add("--slot", type=at_least(0), help=argparse.SUPPRESS)
    add("--exit-with-parent", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse(argv)
    if "connect" not in found:
        parser.error("Where is the learner? Give its address: --connect tcp://HOST:PORT")
    return WorkerArgs(**found)


def _address(text: str) -> str:
    try:
        _, port = split_address(text, key="--connect")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--connect ")) from error
    if port == 0:
        raise argparse.ArgumentTypeError(f"needs the learner's port, not 0, in {text!r}.")
    return text


def _level(text: str) -> str:
    if text.upper() not in _LEVELS:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(_LEVELS)}, not {text!r}.")
    return text.upper()
