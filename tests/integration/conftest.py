"""Fixtures that start real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Processes, check_ledger, wait_until


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def ledger_balances() -> Callable[[dict[str, Any]], None]:
    return check_ledger
