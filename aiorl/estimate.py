"""`python -m aiorl.estimate`: estimate the return of a trained policy from stored episodes, without
an environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiorl.acting.acting_state import LoadedPolicy, load_policy
from aiorl.config.command_line import Parser, at_least, check_directory_of, exit_status
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, DataError
from aiorl.offline.estimators import behaviour_log_likelihoods
from aiorl.offline.estimators.judgement import METHODS, WITH_RATIOS, Judgement, judge
from aiorl.offline.fitted_rows import RowFitter
from aiorl.offline.readers import MAX_CORRUPT, HoldOut, StoredEpisodes
from aiorl.offline.unit_actions import NORMALIZED, UnitActions, UnitGuess
from aiorl.process.replaced_file import write_json

_PROG = "python -m aiorl.estimate"
_EXAMPLES = f"""estimators:
{"".join(f"  {name:<5} {about}" + chr(10) for name, about in METHODS.items())}
examples:
  python -m aiorl.estimate runs/mine data/
  python -m aiorl.estimate runs/mine "data/*.json" --methods pdis,dr --gamma 0.95 --json judged.json
  python -m aiorl.estimate runs/cloned data/ --hold-out 0.1    # Trained with --input-hold-out 0.1.
  python -m aiorl.estimate runs/mine minari:cartpole/expert-v0 --raw-observations --methods dm
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 ended by
    Ctrl-C.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    options = _parser().parse(argv)
    return exit_status(lambda: _estimate(options))


def _estimate(options: Mapping[str, Any]) -> None:
    file: Path | None = options.get("json")
    if file is not None:
        check_directory_of(file, "--json")
    policy = load_policy(options["checkpoint"], options.get("policy"))
    share = options.get("hold_out")
    stored = StoredEpisodes(
        options["data"],
        hold_out=None if share is None else HoldOut(share, "held_out"),
        max_corrupt=options.get("max_corrupt", MAX_CORRUPT),
    )
    guess = UnitGuess(policy.action_space, warns=False)
    restore_or_inspect = guess.inspect
    if options.get(NORMALIZED):
        restore_or_inspect = UnitActions(policy.action_space).restore
    is_raw = options.get("raw_observations", False)
    # raw observations are converted by the policy's preprocessor
    observation_space = None if is_raw else policy.policy.observation_space
    fitter = RowFitter(observation_space, policy.action_space)

    def take_in(episode: SampleBatch) -> None:
        fitter.fit(episode)
        restore_or_inspect(episode)

    methods = options.get("methods", tuple(METHODS))
    judgement = judge(
        policy.policy,
        _checked(policy, stored, take_in, has_ratios=not WITH_RATIOS.isdisjoint(methods)),
        methods=methods,
        gamma=options.get("gamma", policy.gamma),
        clip=options.get("clip"),
        num_resamples=options.get("bootstrap", 1000),
        seed=options.get("seed", 0),
        cut_is_end=options.get("cut_is_end", False),
        observe=policy.observe if is_raw else None,
    )
    if guess.seem_scaled:
        sys.stderr.write(
            "aiorl: all stored actions lie within [-1, 1], but the action space is"
            f" {policy.action_space}: if they are scaled, as RLlib stores them, pass"
            " --actions-in-input-normalized\n"
        )
    sys.stdout.write(_table(judgement) + _summary(judgement, policy, stored, is_raw=is_raw))
    if file is not None:
        about = {
            "checkpoint": str(policy.path),
            "policy": policy.policy_id,
            "files": stored.files,
            "corrupt_places": stored.num_corrupt,
            "rows_left_out": stored.num_left_out,
        }
        write_json(file, {**about, **judgement.to_dict()})


def _checked(
    policy: LoadedPolicy,
    stored: StoredEpisodes,
    take_in: Callable[[SampleBatch], None],
    *,
    has_ratios: bool,
) -> Iterator[SampleBatch]:
    """Yield stored episodes; errors in their action probabilities name the file."""
    for path, episode in stored:
        try:
            take_in(episode)
        except DataError as error:
            raise DataError(error.reason, path=path) from error
        if has_ratios:
            try:
                behaviour_log_likelihoods(episode, policy.action_space)
            except BatchError as error:
                raise DataError(str(error), path=path) from error
        yield episode


def _table(judgement: Judgement) -> str:
    size = judgement.effective_sample_size
    rows = [("estimator", "estimate", "95 % interval", "V_prev", "gain", "effective sample size")]
    for name, estimate in judgement.estimates.items():
        interval = "-"
        sample_size = "-"
        if estimate.interval is not None:
            interval = "{:,.4g} to {:,.4g}".format(*estimate.interval)
        if name in WITH_RATIOS and size is not None:
            sample_size = f"{size:,.1f}"
        rows.append(
            (
                name,
                f"{estimate.value:,.4g}",
                interval,
                f"{judgement.v_prev:,.4g}",
                f"{estimate.gain:,.4g}",
                sample_size,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("   ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines) + "\n"


def _summary(
    judgement: Judgement, policy: LoadedPolicy, stored: StoredEpisodes, *, is_raw: bool
) -> str:
    lines = [
        "",
        (
            f"{judgement.num_episodes:,} episodes ({judgement.num_rows:,} steps) of"
            f" {len(stored.files)} files, gamma {judgement.gamma:g}, seed {judgement.seed}; mean"
            f" return as recorded: {judgement.v_prev:,.4g} (V_prev)"
        ),
        (
            f"policy {policy.policy_id} after {policy.env_steps:,} env steps, actions drawn:"
            f" {policy.path}"
        ),
    ]
    if judgement.num_clipped_ratios:
        lines.append(
            f"{judgement.num_clipped_ratios:,} ratios were clipped, in"
            f" {judgement.num_clipped_episodes:,} episodes"
        )
    if stored.num_corrupt or stored.num_left_out:
        lines.append(
            f"left out: {stored.num_corrupt:,} unreadable places, {stored.num_left_out:,} steps of"
            " episodes without a beginning or an end"
        )
    if "dm" in judgement.estimates:
        lines.append(
            "the interval of dm covers only the spread of first observations, not the error of its"
            " fitted Q"
        )
    if policy.is_filtered and not is_raw:
        lines.append(
            "observations are assumed to be stored filtered, as aiorl does; pass --raw-observations"
            " if they are not"
        )
    return "\n".join(lines) + "\n"


def _parser() -> Parser:
    parser = Parser(
        _PROG,
        "CHECKPOINT DATA... [options]",
        "Estimate the return of a trained policy from episodes of another one, without an"
        " environment or TensorFlow.",
        _EXAMPLES,
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a run directory, for its newest checkpoint, or one checkpoint",
    )
    parser.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help="files, directories, patterns or URIs of stored experience, minari:NAME",
    )
    parser.add_argument(
        "--methods",
        type=_methods,
        metavar="NAMES",
        help=f"estimators, separated by commas ({','.join(METHODS)})",
    )
    parser.add_argument("--gamma", type=float, metavar="G", help="discount (the run's)")
    parser.add_argument(
        "--clip", type=float, metavar="C", help="upper bound on probability ratios (none)"
    )
    parser.add_argument(
        "--bootstrap",
        type=at_least(0),
        metavar="N",
        help="number of resamples for intervals; 0: no intervals (1000)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), metavar="N", help="seed of features, folds and resamples (0)"
    )
    parser.add_argument(
        "--cut-is-end",
        action="store_true",
        help="dm, dr: count no return after a time limit, instead of the fitted Q's value",
    )
    parser.add_argument(
        "--raw-observations",
        action="store_true",
        help=(
            "observations are stored as the environment returned them, "
            "neither preprocessed nor filtered"
        ),
    )
    parser.add_argument(
        "--actions-in-input-normalized",
        action="store_true",
        help="stored actions of a Box are scaled to [-1, 1], as RLlib stores them",
    )
    parser.add_argument(
        "--hold-out",
        type=float,
        metavar="SHARE",
        help="use only the episodes that training with the same --input-hold-out did not see (all)",
    )
    parser.add_argument(
        "--max-corrupt",
        type=at_least(0),
        metavar="N",
        help=f"unreadable places allowed per file ({MAX_CORRUPT})",
    )
    parser.add_argument("--policy", metavar="ID", help="policy id, if there are several policies")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all numbers to a file, for each episode, too",
    )
    return parser


def _methods(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    raise SystemExit(main())
