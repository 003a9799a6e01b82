"""Files for operators: alerts, a board, units of systemd and containers name what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from aiorl.watch.metrics import Collector

ROOT = Path(__file__).parents[2]
OPERATION = ROOT / "examples/operation"
RULES = OPERATION / "prometheus-rules.yaml"
ALERTS = {
    "AiorlNoUpdate": "aiorl_last_update_age_seconds",
    "AiorlRunFailed": "aiorl_run_info",
    "AiorlUnhealthyPolicy": "aiorl_health_warnings",
}
"""Alerts that there have to be, and what they look at."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def queries_of_the_board() -> Iterator[str]:
    board = json.loads((OPERATION / "grafana.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (annotation["expr"] for annotation in board["annotations"]["list"])
    yield from (
        variable["query"]["query"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    )


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """Metrics of `aiorl watch` with their labels."""
    labels = dict[str, set[str]]()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector([]))
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels[name] = set(family._labelnames)  # type: ignore[attr-defined]
    return labels


QUERIES = [*(rule["expr"] for rule in rules()), *queries_of_the_board()]


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_and_labels_that_exist(
    metrics: dict[str, set[str]], query: str
) -> None:
    named = re.findall(r"\baiorl_\w+", query)
    assert named
    assert set(named) <= metrics.keys()
    labels = set(re.findall(r"(\w+)\s*=~?", re.sub(r'"[^"]*"', "", query)))
    assert labels <= set.union(*(metrics[name] for name in named))
    for name, function in re.findall(r"\b(rate|increase)\((aiorl_\w+)", query):
        assert function.endswith("_total"), name
    assert query.count("(") == query.count(")")


def test_there_are_alerts_that_say_what_to_do() -> None:
    alerts = {rule["alert"]: rule for rule in rules()}
    assert ALERTS.keys() <= alerts.keys()
    for name, metric in ALERTS.items():
        assert metric in alerts[name]["expr"]
    for rule in alerts.values():
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_panels_of_the_board_do_not_cover_each_other() -> None:
    board = json.loads((OPERATION / "grafana.json").read_text())
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is missing")
def test_alerts_go_off_for_what_they_are_for_and_not_for_runs_that_have_ended(
    tmp_path: Path,
) -> None:
    info = 'aiorl_run_info{run="%s", algo="ppo", env="e", phase="%s"}'
    series = {
        'aiorl_last_update_age_seconds{run="stuck"}': "0+60x60",
        'aiorl_last_update_age_seconds{run="fine"}': "5x60",
        info % ("crashed", "failed"): "1x60",
        'aiorl_last_change_age_seconds{run="crashed"}': "0+60x60",
        info % ("old", "failed"): "1x60",
        'aiorl_last_change_age_seconds{run="old"}': "900000x60",
        info % ("done", "ended"): "1x60",
        'aiorl_last_change_age_seconds{run="done"}': "60x60",
        'aiorl_health_warnings{run="dead"}': "1x60",
        'aiorl_health_warnings{run="fine"}': "0x60",
        'aiorl_workers_lost_total{run="flaky"}': "0+1x60",
        'aiorl_env_steps_discarded_total{run="late", reason="too old"}': "0+50x60",
        'aiorl_env_steps_sampled_total{run="late"}': "0+100x60",
        'aiorl_env_steps_discarded_total{run="fine", reason="too old"}': "0+1x60",
        'aiorl_env_steps_sampled_total{run="fine"}': "0+100x60",
        'aiorl_last_checkpoint_age_seconds{run="full"}': "0+60x60",
    }
    expected = {
        "AiorlNoUpdate": ["stuck"],
        "AiorlRunFailed": ["crashed"],
        "AiorlUnhealthyPolicy": ["dead"],
        "AiorlWorkersLost": ["flaky"],
        "AiorlEnvStepsDiscarded": ["late"],
        "AiorlNoCheckpoint": ["full"],
    }
    assert expected.keys() == {rule["alert"] for rule in rules()}
    counts = [
        {
            "expr": f'count by (run) (ALERTS{{alertname="{name}", alertstate="firing"}})',
            "eval_time": "55m",
            "exp_samples": [{"labels": f'{{run="{run}"}}', "value": 1} for run in runs],
        }
        for name, runs in expected.items()
    ]
    file = tmp_path / "alerts.yaml"
    tests = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": counts,
    }
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [tests]}
    file.write_text(yaml.safe_dump(content))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
