"""Virtual environments of libraries that aiorl is measured against, in the user's cache directory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recordings import default_cache

__all__ = ["virtual_environment"]

_CONSTRAINTS = Path(__file__).parents[1] / "aiorl" / "constraints.txt"


def virtual_environment(name: str, packages: Sequence[str]) -> Path:
    """Return the folder of a virtual environment; make it first if it is missing or was made for
    other packages.

    Packages that aiorl uses, too, have the versions of its ``constraints.txt``.

    Args:
        name: name of the folder.
        packages: what pip installs.
    """
    folder = default_cache() / name
    stamp = folder / ".installed"
    wanted = " ".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        python = str(folder / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "-c", str(_CONSTRAINTS), *packages],
            check=True,
        )
        stamp.write_text(wanted)
    return folder
