"""`python -m aiorl.serve`: trained policies behind HTTP and WebSocket, without TensorFlow."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiorl.config.command_line import Parser, at_least, exit_status
from aiorl.process.program import log_to_stderr
from aiorl.process.tasks import Tasks, new_event_loop

__all__ = ["main"]

_ABOUT = """Answer requests for actions of trained policies, over HTTP and WebSocket.

Each PATH is a run directory (its newest checkpoint), a checkpoint, or an export to ONNX. The policies of a run are
served under their ids, such as default_policy; NAME=PATH gives another name."""
_FOLLOWED = ("newest", "best")
_EXAMPLES = """examples:
  # one policy, on this host
  python -m aiorl.serve runs/mine
  curl localhost:8000/act -d '{"observation": [0.0, 0.1, 0.0, -0.1], "explore": true}'
  # several policies; for other hosts, with a token and TLS
  python -m aiorl.serve easy=runs/mine/checkpoints/checkpoint-000020 hard=runs/mine --host 0.0.0.0 \\
      --token-file token --tls-cert cert.pem --tls-key key.pem
  curl https://HOST:8000/act -H "Authorization: Bearer $(cat token)" -d '{"policy": "hard", "observation": [...]}'
  # for web pages of another server
  python -m aiorl.serve runs/mine --allow-origin http://localhost:8080
  # the newest checkpoint of a run in training; a tenth of the requests for an export
  python -m aiorl.serve game=runs/mine game=exported/onnx --follow --share 0.1
  # episodes as data for aiorl train --input and aiorl estimate
  python -m aiorl.serve runs/mine --record data

GET /openapi.json describes all requests and answers, with examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit status: 0 ended, 1 failed, 2 wrong usage.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    from aiorl.web.access import add_web_options

    parser = Parser("python -m aiorl.serve", "PATH... [options]", _ABOUT, _EXAMPLES)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="[NAME=]PATH",
        help="A run directory, a checkpoint or an export.",
    )
    parser.add_argument(
        "--follow",
        nargs="?",
        const="newest",
        choices=_FOLLOWED,
        help="Serve newer checkpoints of runs as they appear: all, or those in best/.",
    )
    parser.add_argument(
        "--share",
        type=float,
        metavar="S",
        help="Share of a policy's requests for each further PATH of its name (none).",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="Write episodes of sessions as stored experience.",
    )
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="Threads of an evaluation (1)."
    )
    parser.add_argument(
        "--seed", type=at_least(0), metavar="N", help="Seed of drawn actions (a random one)."
    )
    parser.add_argument(
        "--max-sessions", type=at_least(1), metavar="N", help="Sessions open at a time (10,000)."
    )
    parser.add_argument(
        "--session-ttl-s",
        type=at_least(1),
        metavar="S",
        help="Seconds that a session is kept after its last request (600).",
    )
    parser.add_argument(
        "--log-level", choices=("DEBUG", "INFO", "WARNING"), help="Level of the log (INFO)."
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        dest="allow_origins",
        metavar="URL",
        help=(
            "Let web pages of this origin, such as https://game.example, use the server; repeatable."
            " '*' lets all pages that send the token."
        ),
    )
    add_web_options(parser, port=8000)
    options = parser.parse(_with_follow_at_the_end(sys.argv[1:] if argv is None else argv))
    log_to_stderr(options.pop("log_level", None))
    return exit_status(lambda: _serve(options), interrupted="ended by Ctrl-C")


def _with_follow_at_the_end(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `--follow` where no path can be taken for its
    value; a bare word that is neither a value nor there stays its value, which is then refused.
    """
    before_follow: list[str] = []
    follow: list[str] = []
    for previous, word in pairwise(["", *words]):
        if word == "--follow":
            follow = ["--follow=newest"]
        elif previous == "--follow" and (word in _FOLLOWED or not _can_be_target(word)):
            follow = [f"--follow={word}"]
        else:
            before_follow.append(word)
    return [*before_follow, *follow]


def _can_be_target(word: str) -> bool:
    return word.startswith("-") or "/" in word or "=" in word or Path(word).exists()


def _serve(options: dict[str, Any]) -> None:
    from aiorl.web.access import web_options

    web = web_options(options, "aiorl serve")
    directory = options.pop("record", None)
    from aiorl.serving.models import Models
    from aiorl.serving.service import Service
    from aiorl.web.server import serve

    limits = {
        name: options.pop(name) for name in ("max_sessions", "session_ttl_s") if name in options
    }
    models = Models(options.pop("paths"), **options)
    recorder = None
    if directory is not None:
        from aiorl.serving.record import Recorder

        recorder = Recorder(directory)
    service = Service(models, recorder=recorder, **limits)
    gc.freeze()  # loaded objects stay, and the garbage collector takes 35 ms to look at them

    def announcement(url: str) -> str:
        names = [
            f"{model.name} {' and '.join(arm.name for arm in model.arms)} ({model.env})"
            for model in models.values()
        ]
        served = ", ".join(names) or f"{models.waiting}, when it has a checkpoint,"
        return f"Serving {served} at {url} (Ctrl-C ends)."

    async def run() -> None:
        tasks = Tasks(lambda error: None)  # which it has logged
        tasks.start(models.follow(), "follow")
        await serve(service.app, web, announcement)

    with (
        closing(recorder) if recorder else nullcontext(),
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(run())


if __name__ == "__main__":
    sys.exit(main())
