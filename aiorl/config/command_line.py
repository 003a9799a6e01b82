"""Command lines of aiorl's programs: argparse with errors in one plain sentence, and addresses tcp://HOST:PORT.

The module imports almost nothing, because workers are started often.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from aiorl.errors import AiorlError, ConfigError, SecurityError, UnknownPolicyError, nearest
from aiorl.text import one_line

_MAX_SHOWN = 2000
_WORDINGS = (
    (r"argument (\S+): expected .*", r"\1 needs a value."),
    (r"argument (\S+): ignored explicit argument .*", r"\1 takes no value."),
    (r"argument (\S+): (.*)", r"\1 \2"),
)
"""Messages of argparse -> our messages."""
_COMMAND = re.compile(r"python -m aiorl\.(learner|worker|evaluate|plot|export|estimate|data|keys|launch)\b(?!\.)")


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

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return name -> value of the options given.

        Raises:
            SystemExit: with status 0 after --help, and 2 after one sentence about wrong usage.
        """
        words = spelt(words)
        if {"-h", "--help"} & set(words):
            words = ["--help"]  # ignore all other words
        found, others = self.parse_known_args(words)
        if others:
            name = others[0].partition("=")[0]
            if not name.startswith("--") or name == "--":
                self.error(f"{others[0]!r} is neither an option nor its value. {self.hints.get(name, '')}".rstrip())
            self.error(f"There is no option {name}.{nearest(name, self.options())}")
        return vars(found)

    def error(self, message: str) -> NoReturn:
        """Report an error, and exit with status 2."""
        for pattern, wording in _WORDINGS:
            message, changed = re.subn(pattern, wording, message, count=1)
            if changed:
                break
        usage_error(self.prog, message)


def as_typed(text: str) -> str:
    """Write `aiorl train` for `python -m aiorl.learner`, and so on, unless the user started one of aiorl's modules."""
    if os.path.abspath(sys.argv[0]).startswith(os.path.dirname(os.path.dirname(__file__)) + os.sep):
        return text
    return _COMMAND.sub(lambda found: f"aiorl {'train' if found[1] == 'learner' else found[1]}", text)


def spelt(words: Sequence[str]) -> list[str]:
    """Return the words with options spelled as declared, and values that begin with - joined to their options."""
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
    """Report an error of the command line, and exit with status 2."""
    sys.stderr.write(as_typed(f"{prog}: {sentence}\n(`{prog} --help` shows examples.)\n"))
    raise SystemExit(2)


def exit_status(do: Callable[[], int | None], *, interrupted: str = "ended by Ctrl-C; nothing was written") -> int:
    """Run a command, and report its failure on standard error.

    Args:
        do: command; returns its own exit status, or None for 0.
        interrupted: message after Ctrl-C.

    Returns:
        0 if done, 1 if it failed, 2 if the request was invalid, 130 after Ctrl-C.
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


# Addresses ---------------------------------------------------------------------------------------------------

MAX_PORT = 65_534
"""Largest port of a learner, which also uses the next one for broadcasts."""
_ADDRESS = re.compile(r"tcp://(?:\[([^\]]+)\]|([^\[\]:/;@?#\s]+)):(\d{1,5})", re.ASCII)


def split_address(address: str, *, key: str = "address") -> tuple[str, int]:
    """Return host and port of "tcp://HOST:PORT".

    Args:
        address: text of the user. HOST is a name, an IPv4 address, an IPv6 address in brackets, or *.
        key: name of the setting, for the error.

    Returns:
        The host without brackets, and the port, at most MAX_PORT.

    Raises:
        ConfigError: the address has another form (also a ValueError).
    """
    found = _ADDRESS.fullmatch(address)
    in_brackets, name, port = found.groups() if found else (None, None, "")
    if not found or int(port) > MAX_PORT or (in_brackets is not None and not _is_ipv6(in_brackets)):
        raise ConfigError(
            f"{key} must look like tcp://HOST:PORT, such as tcp://127.0.0.1:5557, not {address!r:.200}.",
            key=key,
            value=address,
            hint=f"PORT goes up to {MAX_PORT}, because the next one is used as well. An IPv6 address needs brackets: "
            "tcp://[::1]:5557.",
        )
    return str(in_brackets or name), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`.

    Addresses that are not canonical (127.000.0.1, 127.1) don't count, because programs read them differently.
    """
    if host.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_open_bind(address: str, *, has_keys: bool, insecure: bool) -> bool:
    """Return whether anyone on the network can reach a learner that binds `address`, which the user must have allowed.

    Args:
        address: address that the learner listens on.
        has_keys: True if connections are authenticated.
        insecure: True if the user allows everyone to connect.

    Raises:
        SecurityError: anyone can, and the user has not allowed it.
        ConfigError: the address is malformed.
    """
    host, _ = split_address(address, key="bind")
    if has_keys or is_loopback(host):
        return False
    if not insecure:
        raise SecurityError(
            f"bind {address} can be reached from other hosts, so it needs keys.",
            key="bind",
            value=address,
            hint="Make them with `aiorl keys DIR` and give --keys DIR, or give --insecure if you trust "
            "everyone who can reach that address.",
        )
    return True


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
