from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import replay as bench


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 500), ("STACKS", 100), ("TURNS", 2), ("ROUNDS", 1), ("BATCH", 8)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "pin_to_one_core", lambda: None)


@pytest.mark.parametrize(("what", "figures"), [("prioritised", 2), ("uniform", 1), ("frames", 1)])
def test_a_measurement_runs_and_prints_times_of_subject_and_baseline(
    what: str, figures: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(what)
    pairs = json.loads(capsys.readouterr().out)
    assert len(pairs) == figures
    assert all(value > 0 and baseline > 0 for value, baseline in pairs)


def test_the_replay_by_hand_draws_by_priority_too() -> None:
    errors = np.full(500, -1e-6)  # which the priorities add
    errors[[7, 300]] = [1.0, 3.0]
    bare = bench._Bare(500, np.random.default_rng(0), errors)
    bare._columns["actions"][:] = np.arange(500)
    drawn = bare.by_priority()[0]["actions"]
    assert set(drawn.tolist()) == {7, 300}
