"""Command lines of aiorl's programs: argparse with errors in one plain sentence.

The module imports almost nothing, because workers are started often.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from aiorl.errors import AiorlError, ConfigError, UnknownPolicyError, nearest
from aiorl.process.early import has_loaded
from aiorl.text import one_line

_MAX_SHOWN = 2000
_WORDINGS = (
    (r"argument (\S+): expected .*", r"\1 needs a value."),
    (r"argument (\S+): ignored explicit argument .*", r"\1 takes no value."),
    (
        r"argument (\S+): invalid choice: (.+) \(choose from (.+)\)",
        r"\1 must be one of \3, not \2.",
    ),
    (r"argument (\S+): invalid float value: (.+)", r"\1 must be a number, not \2."),
    (r"argument (\S+): (.*)", r"\1 \2"),
)
"""Messages of argparse -> our messages."""
_COMMAND = re.compile(r"python -m aiorl\.([a-z]+)\b(?!\.)")
_TRAIN = re.compile(r"python -m aiorl\.learner\b(?!\.)")


class Parser(argparse.ArgumentParser):
    """ArgumentParser that accepts _ for - in options, and negative numbers as values."""

    def __init__(self, prog: str, usage: str, about: str, examples: str) -> None:
        """Set the texts that the help begins and ends with."""
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
        """Word that is not an option -> the spelling to use instead."""

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

    def parse(self, words: Sequence[str] | None = None) -> dict[str, Any]:
        """Return name -> value of the options given.

        Args:
            words: the command's arguments; None takes those of the process.

        Raises:
            SystemExit: with status 0 after --help, and 2 after one sentence about wrong usage.
        """
        words = spelt(sys.argv[1:] if words is None else words)
        if {"-h", "--help"} & set(words):
            words = ["--help"]  # ignore all other words
        options, unknown_words = self.parse_known_args(words)
        if unknown_words:
            word = unknown_words[0]
            name = word.partition("=")[0]
            if not name.startswith("--") or name == "--":
                hint = self.hints.get(name, "")
                self.error(f"{word!r} is neither an option nor its value. {hint}".rstrip())
            self.error(f"There is no option {name}.{nearest(name, self.options())}")
        return vars(options)

    def error(self, message: str) -> NoReturn:
        """Report an error, and exit with status 2."""
        for pattern, wording in _WORDINGS:
            message, changed = re.subn(pattern, wording, message, count=1)
            if changed:
                break
        usage_error(self.prog, message)


def as_typed(text: str) -> str:
    """Write `aiorl train` for `python -m aiorl.learner`, and so on, unless the user started one of
    aiorl's modules and the command `aiorl` is not on the path.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    is_module = os.path.abspath(sys.argv[0]).startswith(package + os.sep)
    if is_module and shutil.which("aiorl") is None:
        return text
    return _COMMAND.sub(r"aiorl \1", _TRAIN.sub("aiorl train", text))


def spelt(words: Sequence[str]) -> list[str]:
    """Return the words with options spelled as declared, and values that begin with - joined to
    their options.
    """
    spelt_words: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        last = spelt_words[-1] if spelt_words else ""
        if name.startswith("--"):
            spelt_words.append(name.replace("_", "-") + equals + value)
        elif name.startswith("-") and word != "-h" and re.fullmatch("--[^=]+", last):
            spelt_words[-1] += f"={word}"
        else:
            spelt_words.append(word)
    return spelt_words


def at_least(least: int) -> Callable[[str], int]:
    """Read a whole number that is no smaller than `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, not {text!r}."
            )
        return int(text)

    return read


def finite_number(text: str) -> float:
    """Read a number that is neither infinite nor NaN."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}.")
    return number


def learner_places(text: str) -> list[str]:
    """Read the places of a learner, as `aiorl.config.addresses.places_of` returns them."""
    from aiorl.config.addresses import places_of  # few commands need it

    try:
        return places_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--connect ")) from error


def check_directory_of(file: Path, option: str) -> None:
    """Refuse a file to write whose directory does not exist, or that is a directory itself.

    Raises:
        ConfigError: it can't be written there.
    """
    if file.is_dir():
        raise ConfigError(f"{option} is {str(file)!r}, which is a directory. Name a file.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} is {str(file)!r}, but its directory does not exist.")


def usage_error(prog: str, sentence: str) -> NoReturn:
    """Report an error of the command line, and exit with status 2."""
    sys.stderr.write(as_typed(f"{prog}: {sentence}\n(`{prog} --help` shows examples.)\n"))
    raise SystemExit(2)


def exit_status(
    do: Callable[[], int | None], *, interrupted: str = "ended by Ctrl-C; nothing was written"
) -> int:
    """Run a command, and report its failure on standard error.

    Args:
        do: command; returns its own exit status, or None for 0.
        interrupted: message after Ctrl-C.

    Returns:
        0 if done, 1 if it failed, 2 if the request was invalid, 130 after Ctrl-C.
    """
    has_loaded()
    try:
        status = do()
    except KeyboardInterrupt:
        sys.stderr.write(f"aiorl: {interrupted}\n")
        return 130
    except (AiorlError, ImportError, OSError) as error:
        text = str(error)
        if isinstance(error, PermissionError) and error.filename is not None:
            text = (
                f"{error.filename} can't be used: {error.strerror}. Check the owner and mode of it"
                " and of its directory."
            )
        sys.stderr.write(f"aiorl: {one_line(text, _MAX_SHOWN)}\n")
        return 2 if isinstance(error, ConfigError | UnknownPolicyError) else 1
    return status or 0
