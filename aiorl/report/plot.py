"""`python -m aiorl.report.plot`: the name that `python -m aiorl.plot` had in earlier versions."""

from __future__ import annotations

from aiorl.plot import main

if __name__ == "__main__":
    raise SystemExit(main())
