from __future__ import annotations

import json

import pytest

from benchmarks import off_policy as bench


@pytest.mark.nightly
@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_a_measurement_runs_and_prints_rates_of_subject_and_baseline(
    algo: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("STORED", 500), ("HIDDEN", 8), ("MINIBATCHES", 4), ("ROUNDS", 1)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "pin_to_one_core", lambda: None)
    bench.main(algo)
    value, baseline = json.loads(capsys.readouterr().out)
    assert value > 0
    assert baseline > 0
