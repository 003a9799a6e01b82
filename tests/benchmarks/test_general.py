from __future__ import annotations

import json

import pytest

from benchmarks import general as bench


@pytest.mark.parametrize(("kind", "agents"), [("multi", 4), ("single", 1)])
def test_subject_and_baseline_count_the_agent_steps_they_took(kind, agents):
    """Both record every row of the agents that still stand: at most all agents at each step, and no less than one."""
    for make in (bench._make_subject, bench._make_baseline):
        advance = make(kind, 2)
        for _ in range(3):
            rows = advance()
            assert 2 * bench.FRAGMENT <= rows <= 2 * bench.FRAGMENT * agents
            assert agents == 1 or rows > 2 * bench.FRAGMENT


def test_a_measurement_runs_and_prints_two_rates(monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROUND_S", 0.01)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "pin_to_one_core", lambda: None)
    monkeypatch.setattr("sys.argv", ["general", "multi", "2"])
    bench.main()
    value, baseline = json.loads(capsys.readouterr().out)
    assert value > 0
    assert baseline > 0
