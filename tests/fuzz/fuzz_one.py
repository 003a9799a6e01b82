"""Fuzz one target in this process: `fuzz_one.py TARGET SEEDS [libFuzzer's flags and folders]`; started by `run.py`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

from fuzz_targets import TARGETS  # noqa: E402


def main() -> None:
    name, seeds, *flags = sys.argv[1:]
    target = TARGETS[name]
    with atheris.instrument_imports(include=list(target.traced)):
        run = target.run
    logging.disable()
    for number, seed in enumerate(target.seeds()):
        (Path(seeds) / f"{number:05}").write_bytes(seed)
    # merging starts this command again, by a shell
    atheris.Setup([f"{sys.executable} {__file__} {name} {seeds}", *flags], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
