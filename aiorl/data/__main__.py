"""`python -m aiorl.data`: see `aiorl.offline.commands`.

This module only gives the command its name.
"""

from __future__ import annotations

from aiorl.offline.commands import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
