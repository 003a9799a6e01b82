"""Command lines of aiorl's programs: argparse with errors in one plain sentence, and the worker's options.

It loads next to nothing, since workers are started often. The learner's options are in `aiorl.config.reference`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from aiorl.config.address import split_address
from aiorl.errors import AiorlError, ConfigError, UnknownPolicyError, nearest
from aiorl.process.children import DEFAULT_MAX_RESTARTS
from aiorl.text import one_line

_MAX_SHOWN = 2000
_WORDINGS = (
    (r"argument (\S+): expected .*", r"\1 needs a value."),
    (r"argument (\S+): ignored explicit argument .*", r"\1 takes no value."),
    (r"argument (\S+): (.*)", r"\1 \2"),
)
"""Messages of argparse -> our messages."""
_COMMAND = re.compile(r"python -m aiorl\.(learner|worker|evaluate|plot|export|estimate|data|keys)\b(?!\.)")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose options may be written with _ for -, and have negative numbers for values."""

    def __init__(self, prog: str, usage: str, about: str, examples: str) -> None:
        """Take what the help begins and ends with."""
        super().__init__(
            prog,
            f"{prog} {usage}",
            about,
            examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self.hints: dict[str, str] = {}
        """Word that is no option -> what to write instead."""

    def format_help(self) -> str:
        """Return the help, with commands as the user types them."""
        return as_typed(super().format_help())

    def options(self) -> list[str]:
        """Return all options that the help shows, such as ``--seed``."""
        return [
            word
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for word in action.option_strings
            if word.startswith("--")
        ]

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return name -> value of the options given.

        Raises: SystemExit, with status 0 after --help and 2 after one sentence about wrong usage.
        """
        words = spelt(words)
        if {"-h", "--help"} & set(words):
            words = ["--help"]  # whatever else there is
        found, others = self.parse_known_args(words)
        if others:
            name = others[0].partition("=")[0]
            if not name.startswith("--") or name == "--":
                self.error(f"{others[0]!r} is neither an option nor its value. {self.hints.get(name, '')}".rstrip())
            self.error(f"There is no option {name}.{nearest(name, self.options())}")
        return vars(found)

    def error(self, message: str) -> NoReturn:
        """Say what was wrong, and end with status 2."""
        for pattern, wording in _WORDINGS:
            message, changed = re.subn(pattern, wording, message, count=1)
            if changed:
                break
        usage_error(self.prog, message)


def as_typed(text: str) -> str:
    """Write `aiorl train` for `python -m aiorl.learner`, and so on, in a text for a user who has typed `aiorl`."""
    if os.path.basename(sys.argv[0]) != "aiorl":
        return text
    return _COMMAND.sub(lambda found: f"aiorl {'train' if found[1] == 'learner' else found[1]}", text)


def spelt(words: Sequence[str]) -> list[str]:
    """Return the words with options spelt as declared, and values that begin with - tied to their options."""
    made: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            made.append(name.replace("_", "-") + equals + value)
        elif name.startswith("-") and word != "-h" and made and re.fullmatch("--[^=]+", made[-1]):
            made[-1] += f"={word}"
        else:
            made.append(word)
    return made


def at_least(least: int) -> Callable[[str], int]:
    """Read a whole number that is no smaller than `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}.")
        return int(text)

    return read


def usage_error(prog: str, sentence: str) -> NoReturn:
    """Say what was wrong with the command line, and end with status 2."""
    sys.stderr.write(as_typed(f"{prog}: {sentence}\n(`{prog} --help` shows examples.)\n"))
    raise SystemExit(2)


def exit_status(do: Callable[[], int | None], *, interrupted: str = "ended by Ctrl-C; nothing was written") -> int:
    """Do what a command line asks for; what goes wrong is said on standard error.

    Args:
        do: gives a status of its own, or None for 0.
        interrupted: what is said after Ctrl-C.
    Returns: 0 done, 1 failed, 2 asked for what cannot be, 130 ended by Ctrl-C.
    """
    try:
        status = do()
    except KeyboardInterrupt:
        sys.stderr.write(f"aiorl: {interrupted}\n")
        return 130
    except (AiorlError, ImportError, OSError) as error:
        sys.stderr.write(f"aiorl: {one_line(str(error), _MAX_SHOWN)}\n")
        return 2 if isinstance(error, ConfigError | UnknownPolicyError) else 1
    return status or 0


# The worker's options --------------------------------------------------------------------------------------------

_WORKER_ABOUT = "Samples for a learner; may join at any time, and waits for a learner that is away."
_WORKER_EXAMPLES = """
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
    """Command line of a worker, or of the supervisor of several.

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
    """Return what the worker's command line says.

    Args:
        argv: without the program's name.
    Raises: SystemExit, with status 0 after --help and 2 after one sentence about wrong usage.
    """
    defaults = WorkerArgs._field_defaults
    parser = Parser("python -m aiorl.worker", "--connect tcp://HOST:PORT [options]", _WORKER_ABOUT, _WORKER_EXAMPLES)
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
