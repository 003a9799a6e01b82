"""`python -m aiorl.evaluate`: play whole episodes with a trained policy, without TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from aiorl.config.command_line import Parser, at_least, check_directory_of, exit_status
from aiorl.process.replaced_file import write_json
from aiorl.run.evaluation import Evaluation, evaluate

__all__ = ["evaluate", "main"]

_PROG = "python -m aiorl.evaluate"
_EXAMPLES = """examples:
  python -m aiorl.evaluate runs/ppo_CartPole-v1_2026-01-31_12-00-00
  python -m aiorl.evaluate runs/mine --episodes 100 --seed 1 --json result.json
  python -m aiorl.evaluate runs/mine/checkpoints/checkpoint-000120 --video cartpole.mp4
  python -m aiorl.evaluate runs/mine --episodes 200 --explore --output data
  python -m aiorl.evaluate runs/mine --horizon 1000
"""
_MAX_SHOWN = 50


class _Callable(ModuleType):
    """This module, callable:

    ``aiorl.evaluate(...)`` is the function even after an import of the module.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Evaluation:
        return evaluate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 ended by
    Ctrl-C.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    options = _parser().parse(argv)
    return exit_status(lambda: _evaluate(options))


def _evaluate(options: dict[str, Any]) -> None:
    number = 0

    def show(episode: Any) -> None:
        nonlocal number
        number += 1
        if number <= _MAX_SHOWN:
            sys.stdout.write(
                f"episode {number:4d}   return {episode.episode_reward:12,.2f}  "
                f" {episode.episode_length:8,d} steps\n"
            )
        elif number == _MAX_SHOWN + 1:
            sys.stdout.write("...\n")
        sys.stdout.flush()

    file: Path | None = options.pop("json", None)
    if file is not None:
        check_directory_of(file, "--json")
    if "horizon" in options:
        options["config"] = {"horizon": options.pop("horizon")}
    result = evaluate(options.pop("path"), **options, on_episode=show)
    sys.stdout.write(_summary(result))
    if file is not None:
        write_json(file, result.to_dict())


def _summary(result: Evaluation) -> str:
    manner = "actions drawn" if result.explore else "most likely actions"
    lines = [
        "",
        (
            f"return {result.mean:,.2f} ± {result.std:,.2f} (mean and deviation of"
            f" {len(result.returns)} episodes; {min(result.returns):,.2f} to"
            f" {max(result.returns):,.2f})"
        ),
        *_means("metric", result.custom_metrics),
        *_means("return of", result.policy_returns),
        (
            f"{result.algo} on {result.env} after {result.env_steps:,} env steps, {manner}, seed"
            f" {result.seed}"
        ),
        result.checkpoint,
    ]
    if result.video is not None:
        lines.append(f"video of the first episodes: {result.video}")
    return "\n".join(lines) + "\n"


def _means(what: str, values_by_name: Mapping[str, Sequence[float]]) -> list[str]:
    return [
        f"{what} {name}: {sum(values) / len(values):,.4g} (mean of {len(values)})"
        for name, values in values_by_name.items()
    ]


def _parser() -> Parser:
    parser = Parser(
        _PROG,
        "PATH [options]",
        "Play whole episodes with a trained policy, one after another, without TensorFlow.",
        _EXAMPLES,
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a run directory, for its newest checkpoint, or one checkpoint",
    )
    parser.add_argument("--episodes", type=at_least(1), metavar="N", help="number of episodes (10)")
    parser.add_argument(
        "--seed",
        type=at_least(0),
        metavar="N",
        help="seed of environment and actions (a random one, which is shown)",
    )
    parser.add_argument(
        "--horizon",
        type=at_least(1),
        metavar="N",
        help="cut episodes after N steps (as in training); required if they might never end",
    )
    parser.add_argument(
        "--explore",
        action="store_true",
        help=(
            "draw actions from their distribution, as in training, instead of "
            "taking the most likely ones"
        ),
    )
    pictures = parser.add_mutually_exclusive_group()
    pictures.add_argument(
        "--video", type=Path, metavar="FILE.mp4", help="record a video of the first three episodes"
    )
    pictures.add_argument("--render", choices=("human",), help="show the environment in a window")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write each episode's return to a file, too"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help=(
            "also store the episodes in a directory, as --input of later runs; estimates "
            "need --explore, too"
        ),
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
