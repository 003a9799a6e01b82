"""Where Python processes started from here look for modules."""

from __future__ import annotations

import os
import sys

__all__ = ["python_path"]


def python_path() -> dict[str, str]:
    """The environment variable by which another Python finds the modules that this one finds.

    Such as those beside the script that is run, which are on no other process's path.
    """
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
