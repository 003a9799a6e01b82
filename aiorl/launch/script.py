"""`python -m aiorl.launch.script [options] -- FILE [ARGS]`: a user's script in place of a learner.

It gives the script's `aiorl.Actors` its place by the variables of `aiorl.actors.launched`, and runs
the script as Python runs one. SIGTERM and SIGHUP reach the script as Ctrl-C does, so that all that
it has begun ends in order; then the status is 143, by which engines know that it can start again.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aiorl.actors.launched import ANOTHER_TURN, Launched
from aiorl.config.addresses import RUN_FILE
from aiorl.config.command_line import Parser, at_least
from aiorl.launch.ssh_host import state_of
from aiorl.process.children import watch_parent
from aiorl.process.program import status_after, stop_signals

_LEAVE_S: Final = 60.0
_OPTIONS: Final = {
    "run-dir": "directory for what the script saves",
    "bind": "address for its hub",
    "advertise": "host at which others reach it",
    "keys": "directory of keys",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script; raises what it raises, and SystemExit after a stop signal.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        "python -m aiorl.launch.script", "[options] -- FILE [ARGS]", "Runs a script.", ""
    )
    for name, about in _OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=name.upper(), help=f"The {about}.")
    parser.add_argument("--insecure", action="store_const", const="1", help="Everyone may join.")
    parser.add_argument("--num-joining", type=at_least(0), help="Processes that join.")
    parser.add_argument("--num-here", type=at_least(0), help="Processes with room here.")
    parser.add_argument("--exit-with-parent", action="store_true", help="End with the parent.")
    end = words.index("--")
    options = parser.parse(words[:end])
    if options.pop("exit_with_parent", False):
        watch_parent(lambda: os.kill(os.getpid(), signal.SIGTERM), grace_s=_LEAVE_S)
    run_dir = Path(options["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    os.environ.update(Launched(**options).variables())
    former = state_of(run_dir / RUN_FILE)
    file, *args = words[end + 1 :]
    try:
        _run(os.path.abspath(file), args)
    finally:
        if state_of(run_dir / RUN_FILE) == former:
            sys.stderr.write(
                f"aiorl: {file} ended without `async with aiorl.Actors()`: no process of another"
                " host could join\n"
            )


def _run(file: str, args: list[str]) -> None:
    """Run a script as ``__main__``, with its folder on the path and its arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, _interrupt)
    sys.path.insert(0, os.path.dirname(file))
    sys.argv[1:] = args
    try:
        runpy.run_path(file, run_name="__main__")
    except KeyboardInterrupt:
        number = signal.SIGTERM if ANOTHER_TURN.is_set() else signal.SIGINT
        raise SystemExit(status_after(number)) from None


def _interrupt(number: int, frame: object) -> None:
    """Let the script end as after Ctrl-C."""
    ANOTHER_TURN.set()
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
