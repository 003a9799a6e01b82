from __future__ import annotations

import json

import pytest

from benchmarks.result import Figure


@pytest.mark.parametrize(
    ("value", "baseline", "smaller", "ok"),
    [(10.0, 15.0, False, True), (9.0, 9.0, False, False), (10.0, 20.0, False, False), (9.0, 20.0, True, True)],
)
def test_both_bounds_must_hold(value, baseline, smaller, ok):
    figure = Figure("x", value, "steps/s", baseline, 10.0, 0.6, smaller)
    assert figure.ok is ok
    assert figure.ratio == value / baseline


def test_a_figure_without_bounds_is_ok():
    assert Figure("x", 1.0, "s").ok
    assert Figure("x", 1.0, "s").ratio is None


def test_a_figure_survives_json():
    figure = Figure("x", 1.0, "s", 2.0, target=3.0)
    assert Figure.from_dict(json.loads(json.dumps(figure.to_dict()))) == figure
    assert figure.to_dict()["ok"] is False
