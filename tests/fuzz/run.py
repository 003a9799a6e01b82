"""Fuzz everything that reads what others wrote, guided by coverage: `make fuzz`, 10 minutes by default.

Each target of `fuzz_targets` runs in a process of its own, as many at once as there are cores. A finding is saved in
the target's folder of the corpus, where the tests run it from then on; the exit status is 1 then. `--update-corpus`
adds the smallest inputs that reach what the corpus doesn't reach yet.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

from fuzz_targets import TARGETS, Target  # noqa: E402

CORPUS = HERE / "corpus"
FINDING = "finding-"
_PROGRESS = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")
_EXECUTED = re.compile(r"stat::number_of_executed_units: +(\d+)")


@dataclass
class Result:
    """What became of one target."""

    target: Target
    executions: int = 0
    edges: int = 0
    features: int = 0
    corpus: int = 0
    seconds: float = 0.0
    findings: list[Path] = field(default_factory=list)
    failure: str = ""
    output: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--update-corpus", action="store_true", help="keep what reaches something new")
    options = parser.parse_args(arguments)
    memory = "/dev/shm"
    in_memory = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aiorl-fuzz-", dir=in_memory) as scratch:
        results = _run_all(options, Path(scratch))
    _report(results)
    return any(result.findings or result.failure for result in results)


def _run_all(options: argparse.Namespace, scratch: Path) -> list[Result]:
    """Run the targets in as many lanes as there are jobs, the longest first."""
    targets = sorted((TARGETS[name] for name in options.targets), key=lambda target: -target.share)
    whole = sum(target.share for target in targets)
    waiting = [(target, options.jobs * options.seconds * target.share / whole) for target in targets]
    results: list[Result] = []
    lock = threading.Lock()

    def lane() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                target, seconds = waiting.pop(0)
            result = _run_one(target, seconds, scratch / target.name, options.update_corpus)
            with lock:
                results.append(result)
                _print_line(result)

    _print_head()
    lanes = [threading.Thread(target=lane) for _ in range(options.jobs)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    return results


def _run_one(target: Target, seconds: float, scratch: Path, update: bool) -> Result:
    found, seeds, kept = scratch / "found", scratch / "seeds", CORPUS / target.name
    for directory in (found, seeds, kept):
        directory.mkdir(parents=True, exist_ok=True)
    before = set(kept.iterdir())
    flags = [
        f"-max_total_time={max(1, round(seconds))}", f"-max_len={target.max_bytes}", "-timeout=30",
        "-report_slow_units=30", "-rss_limit_mb=3000", "-print_final_stats=1", "-entropic_scale_per_exec_time=1",
        f"-artifact_prefix={kept}/{FINDING}",
    ]  # fmt: skip
    result = Result(target)
    started = time.monotonic()
    child = _start(target, seeds, [*flags, str(found), str(seeds), str(kept)])
    result.seconds = time.monotonic() - started
    result.output = child.stdout
    result.findings = sorted(set(kept.iterdir()) - before)
    for match in _PROGRESS.finditer(child.stdout):
        result.edges, result.features, result.corpus = map(int, match.groups())
    if match := _EXECUTED.search(child.stdout):
        result.executions = int(match[1])
    if child.returncode and not result.findings:
        result.failure = f"it ended with status {child.returncode}"
    if update and not result.findings:
        _start(
            target,
            seeds,
            ["-merge=1", "-use_counters=0", f"-max_len={target.max_bytes}", str(kept), str(seeds), str(found)],
        )
    return result


def _start(target: Target, seeds: Path, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("fuzz_one.py")), target.name, str(seeds), *flags]
    environ = os.environ | {"TMPDIR": str(seeds.parent)}
    return subprocess.run(
        command, env=environ, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


_LINE = "{:16} {:>12} {:>8} {:>8} {:>8} {:>8} {:>9}"


def _print_head() -> None:
    print(_LINE.format("target", "executions", "per s", "edges", "features", "corpus", "findings"), flush=True)


def _print_line(result: Result) -> None:
    rate = result.executions / max(result.seconds, 1e-9)
    line = _LINE.format(
        result.target.name, f"{result.executions:,}", f"{rate:,.0f}", result.edges, result.features, result.corpus,
        len(result.findings),
    )  # fmt: skip
    print(line, flush=True)


def _report(results: list[Result]) -> None:
    executions = sum(result.executions for result in results)
    findings = [path for result in results for path in result.findings]
    print(f"{executions:,} executions, {len(findings)} findings")
    for result in results:
        if result.findings or result.failure:
            print(f"\n{result.target.name}: {result.failure}")
            for path in result.findings:
                print(f"  saved as {path.relative_to(HERE.parents[1])}")
            print("\n".join(result.output.splitlines()[-60:]))


if __name__ == "__main__":
    sys.exit(main())
