"""Fuzz all code that reads foreign data, guided by coverage: `make fuzz`, 10 minutes by default.

Each target of `fuzz_targets` runs in its own process, as many processes at a time as there are
cores. A finding is saved in the target's folder of the corpus, where the tests run it from then on;
the exit status is then 1. `--update-corpus` adds the smallest inputs that reach code that the
corpus does not reach yet.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

from fuzz_targets import TARGETS, Target  # noqa: E402

CORPUS = HERE / "corpus"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at once"
    )
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET"
    )
    parser.add_argument(
        "--update-corpus", action="store_true", help="keep what reaches something new"
    )
    options = parser.parse_args(arguments)
    targets = sorted((TARGETS[name] for name in options.targets), key=lambda target: -target.share)
    each = options.jobs * options.seconds / sum(target.share for target in targets)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aiorl-fuzz-", dir=memory) as scratch:

        def fuzz(target: Target) -> bool:
            return _fuzz(
                target, each * target.share, Path(scratch, target.name), options.update_corpus
            )

        with ThreadPoolExecutor(options.jobs) as lanes:
            return not all(list(lanes.map(fuzz, targets)))


def _fuzz(target: Target, seconds: float, scratch: Path, update: bool) -> bool:
    """Print findings, and return True if there are none."""
    found, seeds, kept = scratch / "found", scratch / "seeds", CORPUS / target.name
    for directory in (found, seeds, kept):
        directory.mkdir(parents=True, exist_ok=True)
    before = set(kept.iterdir())
    flags = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={target.max_bytes}",
        "-timeout=30",
        "-report_slow_units=30",
        "-rss_limit_mb=3000",
        "-print_final_stats=1",
        "-entropic_scale_per_exec_time=1",
        f"-artifact_prefix={kept}/finding-",
    ]
    child = _start(target, seeds, [*flags, str(found), str(seeds), str(kept)])
    lines = child.stdout.splitlines()
    findings = sorted(set(kept.iterdir()) - before)
    if child.returncode or findings:
        saved = (
            ", ".join(str(path.relative_to(HERE.parents[1])) for path in findings)
            or "nothing is saved"
        )
        print(
            target.name,
            f"ended with status {child.returncode}, {saved}",
            *lines[-60:],
            sep="\n",
            flush=True,
        )
        return False
    reached = [line for line in lines if " cov: " in line or "number_of_executed_units" in line]
    print(f"{target.name:16}", *reached[-2:], flush=True)
    if update:
        merge = ["-merge=1", "-use_counters=0", f"-max_len={target.max_bytes}"]
        _start(target, seeds, [*merge, str(kept), str(seeds), str(found)])
    return True


def _start(target: Target, seeds: Path, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "fuzz_one.py"), target.name, str(seeds), *flags]
    environ = os.environ | {"TMPDIR": str(seeds.parent)}
    return subprocess.run(
        command,
        env=environ,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


if __name__ == "__main__":
    sys.exit(main())
