"""Parameters of tests by what they cost: in each run of the tests, in CI, or at night."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_cost(names: Iterable[str], *, quick: Collection[str], nightly: Collection[str]) -> list[Any]:
    """Return names as parameters: `quick` ones for each run, `nightly` ones for the night, and all
    others for CI, too.
    """

    def marks_of(name: str) -> Any:
        if name in quick:
            return ()
        return pytest.mark.nightly if name in nightly else pytest.mark.slow

    return [pytest.param(name, marks=marks_of(name)) for name in names]
