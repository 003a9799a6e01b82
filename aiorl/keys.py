"""``python -m aiorl.keys DIR``: make keys for learner and workers.

The directory works for both sides: the learner reads its private key and the admitted public keys
from it, a worker its own private key and the learner's public key. See
`aiorl.net.transport.security` for the files.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from aiorl.config.addresses import dialable
from aiorl.config.command_line import Parser, as_typed
from aiorl.config.key_text import keys_as_text, write_new
from aiorl.errors import AiorlError, ConfigError, SecurityError
from aiorl.net.transport.security import ADMITTED, read_public_key, read_secret_key
from aiorl.process.program import keep_output_from_failing

__all__ = ["main", "make_keys", "parse_key_args"]

_ABOUT = "Make the keys that let workers on other hosts join a learner."
_EXAMPLES = """
Examples:

  python -m aiorl.keys ~/keys
      Make a key pair for the learner, and one that all workers share.

  python -m aiorl.keys ~/keys --workers host1 host2
      Make a pair for each host. To shut out host1, delete admitted/host1.key. To add a host, run the
      command again with its name; existing keys stay as they are.

  python -m aiorl.keys ~/keys --print
      Print the keys as one line, for the secret AIORL_KEYS of a cloud. It makes them if there are none.

The output says which files to copy to the other hosts, and how to start the learner and workers.
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PUBLIC = (
    "# {what}, made by `aiorl keys`. Public: can be given to anyone.\ncurve\n    public-key ="
    ' "{public}"\n'
)
_SECRET = (
    "# {what}, made by `aiorl keys`. PRIVATE: copy it only to hosts that use it.\n"
    'curve\n    public-key = "{public}"\n    secret-key = "{secret}"\n'
)


def make_keys(directory: Path, workers: tuple[str, ...] = ("worker",)) -> list[Path]:
    """Make a key pair for the learner, if there is none, and one for each worker, which is admitted
    immediately.

    Args:
        directory: directory for the files; made if it doesn't exist.
        workers: names of the worker keys to make.

    Returns:
        The files made.

    Raises:
        ConfigError: a name can't be used, or a key exists already; nothing is written then.
        SecurityError: the learner's existing key can't be read, or the directory can't be written.
    """
    for name in workers:
        if not _NAME.fullmatch(name) or name == "learner":
            raise ConfigError(
                f"{name!r} is not a valid name for a worker's key:",
                key="workers",
                value=name,
                hint=(
                    "use letters, digits, '.', '_' and '-', beginning with a letter or digit, and"
                    " not 'learner'."
                ),
            )
    workers = tuple(dict.fromkeys(workers))
    admitted = directory / ADMITTED
    for name in workers:
        for file in (
            directory / f"{name}.key_secret",
            directory / f"{name}.key",
            admitted / f"{name}.key",
        ):
            if os.path.exists(file):  # unlike that of Path, this raises no PermissionError
                raise _exists_already(file, directory)
    files: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        admitted.mkdir(mode=0o755, exist_ok=True)
        learner = directory / "learner.key_secret"
        if learner.exists():
            read_secret_key(learner)
            read_public_key(learner.with_suffix(".key"))
        else:
            files += _write_pair(directory, "learner")
        for name in workers:
            files += _write_pair(directory, name)
            public_key = (directory / f"{name}.key").read_text()
            files.append(write_new(admitted / f"{name}.key", public_key, 0o644))
    except OSError as error:
        raise SecurityError(
            f"cannot write keys to {directory} ({error.strerror}: {error.filename}):",
            key="directory",
            value=str(directory),
            hint="check that you own it and that the disk has space.",
        ) from error
    return files


def _exists_already(file: Path, directory: Path) -> ConfigError:
    return ConfigError(
        f"{file} already exists and is not overwritten:",
        key="directory",
        value=str(directory),
        hint=(
            "choose another directory, add a key with another name by --workers NAME, or delete"
            " the old key."
        ),
    )


def _write_pair(directory: Path, name: str) -> list[Path]:
    public_key, secret_key = zmq.curve_keypair()
    facts = {
        "what": f"key of {name!r}",
        "public": public_key.decode(),
        "secret": secret_key.decode(),
    }
    return [
        write_new(directory / f"{name}.key_secret", _SECRET.format(**facts), 0o600),
        write_new(directory / f"{name}.key", _PUBLIC.format(**facts), 0o644),
    ]


def _next_steps(directory: Path, workers: tuple[str, ...], files: list[Path]) -> str:
    lines = ["Made:", *(f"  {path}" for path in files)]
    quoted = shlex.quote(str(directory))
    address = dialable("tcp://0.0.0.0:5557")[0]
    copies = [
        f"  {directory / name}.key_secret and {directory / 'learner.key'} to the hosts of {name!r}"
        for name in workers
    ]
    lines += [
        "",
        f"Copy, for example with scp -p, into {quoted} on each host (files ending in key_secret"
        " keep mode 0600):",
        *copies,
        "",
        "Start the learner:",
        f"  python -m aiorl.learner --env CartPole-v1 --bind tcp://0.0.0.0:5557 --keys {quoted}",
        "Start workers on another host:",
        f"  python -m aiorl.worker --connect {address} --keys {quoted}",
        f"The public keys in {directory / ADMITTED} may connect. Add or delete files there at any"
        " time; changes",
        "take effect without a restart.",
    ]
    return "\n".join(lines) + "\n"


class KeyArgs(NamedTuple):
    """Command line of `aiorl keys`.

    Attributes:
        directory: absolute path of the directory of keys.
        workers: names of the workers' keys to make.
        print: True to print the keys as one line.
    """

    directory: Path
    workers: tuple[str, ...]
    print: bool


def parse_key_args(arguments: Sequence[str] | None) -> KeyArgs:
    """Return the directory and the names of the workers' keys from a command line.

    Args:
        arguments: the words of the command line; None takes those of the process.

    Raises:
        SystemExit: with status 0 after --help, or with status 2 after a message about wrong usage.
    """
    parser = Parser("python -m aiorl.keys", "DIR [--workers NAME ...] [--print]", _ABOUT, _EXAMPLES)
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="Directory for the keys; made with mode 0700 if missing.",
    )
    parser.add_argument(
        "--workers",
        metavar="NAME",
        nargs="+",
        default=["worker"],
        help=(
            "Names of the worker keys to make; letters, digits, '.', '_' and '-'. (default: worker)"
        ),
    )
    parser.add_argument(
        "--print",
        action="store_true",
        default=False,
        help="Print the keys as one line, which `aiorl launch here` reads from AIORL_KEYS.",
    )
    options = parser.parse(arguments)
    if options["print"] and options["workers"] != ["worker"]:
        parser.error("--print is for the key that all workers share: leave --workers out.")
    return KeyArgs(
        directory=options["directory"].expanduser().absolute(),
        workers=tuple(options["workers"]),
        print=options["print"],
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit status: 0, or 1 with a message on standard error.

    Args:
        arguments: the command's arguments; None takes those of the process.
    """
    directory, workers, is_printed = parse_key_args(arguments)
    try:
        if is_printed:
            if not (directory / "worker.key_secret").exists():
                make_keys(directory)
            sys.stdout.write(f"{keys_as_text(directory)}\n")
            return 0
        files = make_keys(directory, workers)
    except AiorlError as error:
        sys.stderr.write(f"aiorl.keys: {error}\n")
        return 1
    sys.stdout.write(as_typed(_next_steps(directory, workers, files)))
    return 0


if __name__ == "__main__":
    keep_output_from_failing()
    sys.exit(main())
