"""Strike whole runs with random faults and report how they recover: `python -m benchmarks.chaos`.

A learner with keys trains with local and outside workers. Meanwhile processes are killed and
frozen, connections reset, corrupted and delayed, disks filled and keys withdrawn. The campaign
touches only processes that it started, and loopback addresses. With ``--actors``, a program of
actors is struck instead. The exit status is 0 if every bar holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.actor_faults import ActorReport, run_actor_chaos
from benchmarks.chaos.faults import KINDS
from benchmarks.chaos.report import Bars, Report
from benchmarks.chaos.scenario import Options, run_chaos

__all__ = ["main"]

_ALGOS = ("ppo", "impala")
_LEAST_S = 600.0
"""Shortest run in which memory and moves in the ledger are judged; shorter ones are still warming
up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and report; the exit status is 0 if every bar holds, 1 if not, 130 after
    Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=840.0, help="how long new faults begin; 840 takes 20 min"
    )
    parser.add_argument(
        "--actors", action="store_true", help="strike a program of actors, not training runs"
    )
    parser.add_argument("--seed", type=int, help="seed of the order of faults; default: random")
    parser.add_argument(
        "--kinds",
        type=_kinds,
        default=list(KINDS),
        metavar="A,B",
        help="kinds of faults; see --list",
    )
    parser.add_argument(
        "--algos", type=_algos, default=list(_ALGOS), metavar="A,B", help="ppo,impala: one run each"
    )
    parser.add_argument(
        "--slack", type=float, default=1.0, help="factor for all timeouts, for a busy machine"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the full report to FILE"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep the logs in this directory; default: delete them"
    )
    parser.add_argument("--list", action="store_true", help="list the kinds of faults")
    args = parser.parse_args(argv)
    if args.list:
        for kind in KINDS.values():
            print(f"{kind.name:28} {kind.act.__doc__}")
        return 0
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    kinds = "those of actors" if args.actors else ", ".join(args.kinds)
    print(f"seed {seed}: {args.seconds:g} s of faults, kinds: {kinds}", flush=True)
    bars = Bars()
    bars = Bars(
        median_s=bars.median_s * args.slack,
        worst_s=bars.worst_s * args.slack,
        death_median_s=bars.death_median_s * args.slack,
        memory=bars.memory if args.seconds >= _LEAST_S else None,
        is_ledger_moved=args.seconds >= _LEAST_S
        and args.kinds == list(KINDS)
        and args.algos == list(_ALGOS),
    )
    with tempfile.TemporaryDirectory(prefix="aiorl-chaos-") as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        options = Options(
            args.seconds, seed, args.kinds, args.algos, folder.resolve(), bars, args.slack
        )
        try:
            report = asyncio.run(_run(options, has_actors=args.actors))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("interrupted; all its processes have ended", flush=True)
            return 130
    print(f"\n{report.text()}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


async def _run(options: Options, *, has_actors: bool) -> Report | ActorReport:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    def tell(line: str) -> None:
        print(line, flush=True)

    if has_actors:
        return await run_actor_chaos(
            options.seconds, options.seed, options.folder, tell, options.patience
        )
    return await run_chaos(options, tell)


def _kinds(text: str) -> list[str]:
    return _chosen(text, list(KINDS))


def _algos(text: str) -> list[str]:
    return _chosen(text, _ALGOS)


def _chosen(text: str, known: Sequence[str]) -> list[str]:
    chosen = [name for name in text.split(",") if name]
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no {name!r}; known: {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
