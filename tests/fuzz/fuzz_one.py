"""Fuzz one target in this process:

`fuzz_one.py TARGET SEEDS [libFuzzer's flags and folders]`; started by `run.py`.
"""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

from fuzz_targets import TARGETS, Target  # noqa: E402


def _untraced(target: Target) -> list[str]:
    """Return our modules that the target does not use; `include` alone would trace whole packages."""
    root = HERE.parents[1]
    paths = [
        path.relative_to(root).with_suffix("").parts for path in (root / "aiorl").rglob("*.py")
    ]
    names = [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in paths]
    return [
        name
        for name in names
        if not any(f"{name}.".startswith(f"{traced}.") for traced in target.traced)
    ]


def main() -> None:
    name, seeds, *flags = sys.argv[1:]
    target = TARGETS[name]
    with atheris.instrument_imports(include=list(target.traced), exclude=_untraced(target)):
        run = target.run
    logging.disable()
    gc.freeze()  # imported objects need no further garbage collection
    for number, seed in enumerate(target.seeds()):
        (Path(seeds) / f"{number:05}").write_bytes(seed)
    # merging starts this command again through a shell
    atheris.Setup([f"{sys.executable} {__file__} {name} {seeds}", *flags], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
