"""`python -m aiorl.data`: see `aiorl.offline.commands`. The name is the users'; the package itself is below it."""

from __future__ import annotations

from aiorl.offline.commands import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
