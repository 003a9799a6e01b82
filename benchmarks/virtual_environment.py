"""Virtual environments of libraries that aiorl is measured against, in the user's cache directory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.recordings import default_cache

__all__ = ["virtual_environment"]

_CONSTRAINTS = Path(__file__).parents[1] / "aiorl" / "constraints.txt"


def virtual_environment(
    name: str, packages: Sequence[str], folders: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Return the folder of a virtual environment; make it first if it is missing or was made for
    other packages.

    Packages that aiorl uses, too, have the versions of its ``constraints.txt``.

    Args:
        name: name of the folder.
        packages: what pip installs.
        folders: name of a folder in it -> a package that pip puts there, without those it needs.
    """
    folder = default_cache() / name
    stamp = folder / ".installed"
    wanted = " ".join([*packages, *folders.values()])
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-c", str(_CONSTRAINTS), *packages], check=True)
        for place, package in folders.items():
            target = ["--no-deps", "--target", str(folder / place)]
            subprocess.run([*pip, *target, package], check=True)
        stamp.write_text(wanted)
    return folder
