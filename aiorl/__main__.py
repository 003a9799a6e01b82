"""`aiorl COMMAND` or `python -m aiorl COMMAND`: all of aiorl's commands in one program.

Only the module of the given command is loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from aiorl import __version__
from aiorl.config.command_line import usage_error
from aiorl.errors import nearest
from aiorl.process.early import has_loaded
from aiorl.process.imports import find_modules_here
from aiorl.process.program import keep_output_from_failing

__all__ = ["command", "main"]

_PROG = "aiorl"
_COMMANDS = {
    "train": (
        "aiorl.learner",
        "train a policy, with worker processes here and on any host that joins",
    ),
    "worker": ("aiorl.worker", "sample for a learner on this or another host"),
    "evaluate": (
        "aiorl.evaluate",
        "play episodes with a trained policy; record a video or store them",
    ),
    "plot": ("aiorl.plot", "draw learning curves of runs, and compare experiments"),
    "serve": ("aiorl.serve", "answer requests for a trained policy's actions over HTTP"),
    "export": ("aiorl.export", "export a trained policy to files that run without aiorl"),
    "estimate": ("aiorl.estimate", "estimate the return of a trained policy from stored episodes"),
    "data": ("aiorl.data.__main__", "inspect, check, convert and merge stored experience"),
    "watch": ("aiorl.watch.__main__", "show runs in the browser, and follow those that train"),
    "status": ("aiorl.status", "show what runs where, and what each worker said last"),
    "doctor": ("aiorl.doctor", "check this machine, and the way to a learner"),
    "keys": ("aiorl.keys", "make the keys that let workers on other hosts join"),
    "launch": (
        "aiorl.launch.__main__",
        "train on many hosts: ssh, Slurm, Kubernetes, or copies of one command",
    ),
}
_OTHER_NAMES = {
    "dashboard": "watch",
    "enjoy": "evaluate",
    "eval": "evaluate",
    "learn": "train",
    "learner": "train",
    "play": "evaluate",
    "predict": "serve",
    "resume": "train --resume",
    "rollout": "evaluate",
    "run": "train",
    "test": "evaluate",
    "ui": "watch",
}
"""Command of other libraries, or a word for it -> the command here."""
_LIST = "\n".join(f"  {name:10}{about}" for name, (_, about) in _COMMANDS.items())
_HELP = f"""usage: aiorl COMMAND [options]

Distributed reinforcement learning: asyncio workers, a TensorFlow learner, no cluster framework.

commands:
{_LIST}

examples:
  aiorl train --env CartPole-v1 --stop-return 475          # Takes about ten seconds.
  aiorl train --env Pendulum-v1 --preset auto --stop-time-s 300
  aiorl train --help-config                                # Lists all settings.
  aiorl evaluate runs/mine --episodes 20 --video mine.mp4
  aiorl plot runs
  aiorl worker --connect tcp://learner-host:5557 --keys keys
  aiorl status runs/mine
  aiorl COMMAND --help                                     # Shows a command's options and examples.

`aiorl --version` shows the version. Each command is also a module: `aiorl train` is `python -m aiorl.learner`, the
other commands are `python -m aiorl.COMMAND`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status, or 2 for wrong usage.

    Args:
        argv: the command and its arguments; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"aiorl {__version__}\n")
        return 0
    name, *rest = words
    if name.startswith("-"):
        usage_error(
            _PROG, f"Put a command before its options: aiorl train {' '.join(words[:2]):.100}"
        )
    if name not in _COMMANDS:
        near = nearest(name, _COMMANDS, count=1) or f" Commands: {', '.join(_COMMANDS)}."
        if name in _OTHER_NAMES:
            near = f" Here it is called: aiorl {_OTHER_NAMES[name]}"
        usage_error(_PROG, f"There is no command {name!r:.50}.{near}")
    module = importlib.import_module(_COMMANDS[name][0])
    sys.argv[1:] = rest
    has_loaded()
    if hasattr(module, "command"):  # ends the process itself
        module.command()
    status: int = module.main(rest)
    return status


def command() -> None:
    """Run as the program, and exit.

    The console script also finds modules in the current directory.
    """
    keep_output_from_failing()
    if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(sys.argv[0])):
        del sys.path[0]  # the folder of the script
    find_modules_here()
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while the command's module is loaded
        sys.stderr.write("aiorl: ended by Ctrl-C\n")
        sys.exit(130)


if __name__ == "__main__":
    command()
