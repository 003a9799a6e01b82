"""Files for operators: alerts, a board, units of systemd and containers name what exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_module import run_module
from prometheus_client import CollectorRegistry

from aiorl.watch.metrics import LABELLED, Collector
from aiorl.worker import parse_worker_args

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
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector([]))
    labels = {figure.name: {"run", figure.label} for figure in LABELLED}
    labels["run_info"] = {"run", "algo", "env", "phase"}
    return {
        family.name + ("_total" if family.type == "counter" else ""): labels.get(
            family.name.removeprefix("aiorl_"), {"run"}
        )
        for family in registry.collect()
    }


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


# Units of systemd
# --------------------------------------------------------------------------------------------------

UNITS = sorted((OPERATION / "systemd").glob("*.service"))
PROGRAM = "/opt/aiorl/bin/aiorl"


def unit(path: Path) -> dict[str, list[str]]:
    """Return the values of a unit by key; a key may come several times."""
    values = dict[str, list[str]]()
    for line in path.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            values.setdefault(name, []).append(value)
    return values


def check_command(words: Sequence[str], tmp_path: Path) -> None:
    """Check that aiorl knows all options of a command, whose places don't exist here."""
    program, command, *rest = words
    assert program in ("aiorl", PROGRAM)
    if command == "worker":
        assert parse_worker_args(rest).connect
        return
    done = run_module("aiorl", [command, *rest], dict(os.environ), tmp_path)
    if "--print" in rest:
        assert done.returncode == 0, done.stderr
        assert "aiorl train" in done.stdout
    else:  # options come first, then places
        assert done.returncode == 2
        assert str(tmp_path) in done.stderr, done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_commands_that_exist_and_end_them_with_a_checkpoint(
    path: Path, tmp_path: Path
) -> None:
    values = unit(path)
    (command,) = values["ExecStart"]
    for name, value in {
        "%i": "mine",
        "%S": str(tmp_path / "absent"),
        "${WORKERS}": "2",
        "${LEARNER}": "run:absent",
        "${BIND}": "tcp://127.0.0.1:0",
        "/etc/aiorl": str(tmp_path / "absent"),
    }.items():
        command = command.replace(name, value)
    words = shlex.split(command)
    if words[1:3] == ["launch", "here"]:
        assert any("RANK=0" in value for value in values["Environment"])
        (tmp_path / "absent").mkdir()
        (tmp_path / "absent/mine.yaml").write_text("env: CartPole-v1\n")
        words = [*words[:3], "--print", *words[3:]]
    check_command(words, tmp_path)
    assert values["User"] == ["aiorl"]
    if "TimeoutStopSec" in values:
        assert values["SuccessExitStatus"] == ["143"]
        assert values["RestartPreventExitStatus"] == ["2"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is missing")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace(PROGRAM, sys.executable)
        (tmp_path / path.name.replace("@", "@mine")).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *tmp_path.iterdir()],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    ours = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "aiorl" in line]
    assert ours == []


# Containers
# --------------------------------------------------------------------------------------------------


def stages() -> dict[str, str]:
    """Return the text of each stage of the Dockerfile by name."""
    parts = re.split(
        r"^FROM (\S+) AS (\S+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    return {
        name: f"{base}\n{text}" for base, name, text in zip(*[iter(parts[1:])] * 3, strict=True)
    }


def test_the_stages_of_the_images_exist_and_the_learner_is_the_default() -> None:
    texts = stages()
    assert list(texts)[-1] == "learner"
    for name, text in texts.items():
        before = [*texts][: [*texts].index(name)]
        named = [text.splitlines()[0], *re.findall("--from=(\\S+)", text)]
        assert all(":" in base or base in before for base in named), name
    server = texts["server"]
    assert "HEALTHCHECK" in server
    assert "[serve]" in texts["build-server"]
    assert "/v2/health/ready" in server


def test_the_services_use_images_and_commands_that_exist(tmp_path: Path) -> None:
    compose = yaml.safe_load((OPERATION / "compose.yaml").read_text())
    services = compose["services"]
    command = re.findall(r"^CMD (\[.*\])$", stages()["server"], re.MULTILINE)[-1]
    assert set(services) == {"learner", "worker", "serve", "watch"}
    for name, service in services.items():
        build = service.get("build")
        if build:
            assert build["target"] in stages()
            assert (OPERATION / build["context"] / "Dockerfile").exists()
            assert service["image"] == f"aiorl:{build['target']}"
        assert set(service.get("depends_on", [])) <= services.keys()
        volumes = {volume.split(":")[0] for volume in service["volumes"]}
        assert volumes <= compose["volumes"].keys()
        words = service.get("command") or json.loads(command)
        if name == "learner":
            assert service["environment"] == {"RANK": "0"}
            words = [*words[:3], "--print", *words[3:]]
        assert words[0] == "aiorl"
        words = [word.replace("/runs", str(tmp_path / "runs")) for word in words]
        check_command(
            [word.replace("/tokens", str(tmp_path / "absent")) for word in words], tmp_path
        )
