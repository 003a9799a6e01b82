"""`python -m aiorl.export`: export a trained policy to ONNX, SavedModel, Keras or TFLite."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiorl.config.command_line import Parser, exit_status
from aiorl.run.export.writing import FORMATS, export_policy

__all__ = ["main"]

_PROG = "python -m aiorl.export"
_EXAMPLES = """examples:
  python -m aiorl.export runs/ppo_CartPole-v1_2026-01-31_12-00-00
  python -m aiorl.export runs/mine --formats onnx,savedmodel,keras,tflite --out cartpole
  python -m aiorl.export runs/mine/checkpoints/checkpoint-000120 --policy left
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 ended by
    Ctrl-C.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    options = _parser().parse(argv)
    return exit_status(lambda: _export(options))


def _export(options: Mapping[str, Any]) -> None:
    written = export_policy(
        options["path"],
        options.get("out", "exported"),
        options.get("formats", ("onnx",)),
        policy_id=options.get("policy"),
    )
    for name, path in written.items():
        sys.stdout.write(f"{name:12}{path}\n")
    sys.stdout.write(
        "Each export was checked against the policy. policy.json describes its inputs and"
        " outputs.\n"
    )


def _parser() -> Parser:
    parser = Parser(
        _PROG,
        "PATH [options]",
        "Export a trained policy to files that run without aiorl, and check them.",
        _EXAMPLES,
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a run directory, for its newest checkpoint, or one checkpoint",
    )
    parser.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        metavar="A,B",
        help=f"any of {', '.join(FORMATS)} (onnx)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for a directory per format (exported)"
    )
    parser.add_argument(
        "--policy", metavar="ID", help="policy id, if there are several policies (default_policy)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
