"""`aiorl watch [RUN_DIR|DIRECTORY]`: a page of runs in the browser, which follows those that
train.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiorl.config.command_line import Parser, exit_status
from aiorl.errors import ConfigError
from aiorl.web.access import add_web_options, web_options

__all__ = ["main"]

_ABOUT = (
    "Show runs in the browser. Only their directories are read, so it works during and after a run,"
    " or on a copy."
)
_PORT = 8265
_EXAMPLES = f"""
Examples:
  python -m aiorl.watch                          # the runs in ./runs
  python -m aiorl.watch runs/mine                # one run
  ssh -L {_PORT}:127.0.0.1:{_PORT} HOST aiorl watch /path/to/runs     # of another host; then open the address here
  python -m aiorl.watch runs --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C or SIGTERM, and return the exit status: 0 ended, 2 wrong usage.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    parser = Parser("python -m aiorl.watch", "[RUN_DIR|DIRECTORY] [options]", _ABOUT, _EXAMPLES)
    parser.add_argument(
        "where",
        metavar="RUN_DIR|DIRECTORY",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="A run directory, or a directory of runs (./runs).",
    )
    add_web_options(parser, port=_PORT)
    arguments = parser.parse(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: _watch(arguments), interrupted="ended by Ctrl-C")


def _watch(arguments: dict[str, Any]) -> None:
    options = web_options(arguments, "aiorl watch")
    root = arguments["where"].expanduser()
    from aiorl.watch.app import make_app
    from aiorl.web.server import serve

    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a directory.",
            key="DIRECTORY",
            hint="Give a run directory, or a directory of runs.",
        )
    asyncio.run(serve(make_app(root), options, lambda url: f"{root}: {url}"))


if __name__ == "__main__":
    sys.exit(main())
