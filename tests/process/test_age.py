from __future__ import annotations

import subprocess
import sys
import time

import pytest

from aiorl.process import age

TELL = "from aiorl.process.age import age_s; print(age_s())"
TICK_S = 0.02


def test_a_process_is_no_older_than_its_parent_has_seen_it() -> None:
    """H4: by the hour, it may be a second more."""
    began = time.monotonic()
    told = subprocess.run([sys.executable, "-c", TELL], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert 0 <= float(told) <= time.monotonic() - began + TICK_S


def test_where_there_is_no_proc_the_hour_of_the_start_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = age.age_s()

    def no_proc(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("/proc/self/stat")

    monkeypatch.setattr(age, "open", no_proc, raising=False)
    assert abs(age.age_s() - known) < 1.5
