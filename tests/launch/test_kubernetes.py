"""Manifests against published schemas and each other, kubectl's part by a fake, and the containers' commands for real.

No cluster is needed. The containers run in directories that cannot be written, as another user, without a network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import aiorl
from aiorl.launch import kubernetes
from aiorl.launch.__main__ import main
from aiorl.launch.job import Job

ROOT = Path(aiorl.__file__).parents[1]
OPTIONS = {"image": "registry/aiorl:learner"}
VARIANTS = [{}, {"queue": "mine", "namespace": "lab", "cpus": 16}, {"jobset": True}, {"jobset": True, "queue": "mine"}]
JOBSET = {
    "": {"network", "successPolicy", "failurePolicy", "replicatedJobs"},
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "successPolicy": {"operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "rule": {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs"},
    "replicatedJob": {"name", "groupName", "template", "replicas", "dependsOn"},
}
"""Fields of jobset.x-k8s.io/v1alpha2, as JobSet 0.12 documents them."""


def job(folder: Path, *words: str) -> Job:
    config = dict.fromkeys(("keys", "resume", "preset", "init_from"))
    return Job(folder / "My run_1", words or ("--env", "CartPole-v1", "--preset", "auto"), {**config, "preset": "auto"})


def objects(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects by kind and component."""
    found = {}
    for document in yaml.safe_load_all(text):
        metadata = document["metadata"]
        role = metadata["labels"].get("app.kubernetes.io/component", "")
        found[document["kind"], role] = document
    return found


def jobs(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specs of the jobs of learner and workers."""
    if ("JobSet", "") in found:
        replicated = found["JobSet", ""]["spec"]["replicatedJobs"]
        return {each["name"]: each["template"]["spec"] for each in replicated}
    return {role: document["spec"] for (kind, role), document in found.items() if kind == "Job"}


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
@pytest.mark.parametrize("options", VARIANTS)
def test_the_objects_have_the_schemas_of_three_versions_of_kubernetes(
    tmp_path: Path, options: dict[str, Any], version: str
) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    found = objects(kubernetes.artefact(job(tmp_path), OPTIONS | options))
    named = {"metadata": {"name": "job"}, "apiVersion": "batch/v1", "kind": "Job"}
    checked = [document for (kind, _), document in found.items() if kind != "JobSet"]
    for document in [*checked, *({**named, "spec": spec} for spec in jobs(found).values())]:
        validator.validate(document, version, strict=True)
    kinds = {"Secret", "PersistentVolumeClaim", "Service", "PodDisruptionBudget"}
    assert {kind for kind, _ in found} == kinds | {"JobSet" if options.get("jobset") else "Job"}
    assert {document["metadata"].get("namespace") for document in found.values()} == {options.get("namespace")}
    queues = [each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for each in found.values()]
    assert queues.count("mine") == ("queue" in options) * (1 if options.get("jobset") else 2)


def test_the_jobset_has_fields_and_values_of_its_api(tmp_path: Path) -> None:
    document = objects(kubernetes.artefact(job(tmp_path), OPTIONS | {"jobset": True}))["JobSet", ""]
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = document["spec"]
    assert spec.keys() <= JOBSET[""]
    assert all(spec[name].keys() <= JOBSET[name] for name in ("network", "successPolicy", "failurePolicy"))
    assert all(rule.keys() <= JOBSET["rule"] for rule in spec["failurePolicy"]["rules"])
    assert all(
        re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", r["name"]) for r in spec["failurePolicy"]["rules"]
    )
    learner, worker = spec["replicatedJobs"]
    assert (learner.keys() | worker.keys()) <= JOBSET["replicatedJob"]
    assert "dependsOn" not in learner, "the first job can depend on none"
    assert worker["dependsOn"] == [{"name": "learner", "status": "Ready"}]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["learner"]}
    actions = [(rule["action"], rule.get("targetReplicatedJobs")) for rule in spec["failurePolicy"]["rules"]]
    assert actions == [
        ("FailJobSet", None), ("FailJobSet", ["learner"]), ("RestartJobAndIgnoreMaxRestarts", ["worker"]),
    ]  # fmt: skip
    # JobSet makes jobs indexed unless they say otherwise, and an indexed job cannot be a work queue
    assert {each["template"]["spec"]["completionMode"] for each in (learner, worker)} == {"NonIndexed"}


@pytest.mark.parametrize("options", VARIANTS)
def test_what_refers_to_another_object_finds_it(tmp_path: Path, options: dict[str, Any]) -> None:
    text = kubernetes.artefact(job(tmp_path), OPTIONS | options)
    found, specs = objects(text), jobs(objects(text))
    pods = {role: spec["template"] for role, spec in specs.items()}
    service = found["Service", ""]
    budget = found["PodDisruptionBudget", ""]["spec"]
    for selector in (service["spec"]["selector"], budget["selector"]["matchLabels"]):
        assert selector.items() <= pods["learner"]["metadata"]["labels"].items()
        assert not selector.items() <= pods["worker"]["metadata"]["labels"].items()
    samples, broadcast = (port["port"] for port in service["spec"]["ports"])
    assert broadcast == samples + 1
    scripts = {role: pod["spec"]["containers"][0]["args"][0] for role, pod in pods.items()}
    assert f"--connect tcp://{service['metadata']['name']}:{samples} " in scripts["worker"]
    assert f"--bind tcp://0.0.0.0:{samples} " in scripts["learner"]
    kept = found["Secret", ""]["stringData"]
    for role, pod in pods.items():
        subprocess.run(["sh", "-n", "-c", scripts[role]], check=True, timeout=20)
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        (container,) = pod["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        secret = volumes["keys"]["secret"]
        assert secret["secretName"] == found["Secret", ""]["metadata"]["name"]
        assert {item["key"] for item in secret["items"]} <= kept.keys()
        paths = {item["path"] for item in secret["items"]}
        others = {"learner": "worker", "worker": "learner"}[role]
        assert f"{others}.key_secret" not in paths, "each has its own private key only"
    claim = volumes_of(pods["learner"])["runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim", ""]["metadata"]["name"]
    assert all(len(document["metadata"]["name"]) <= 58 for document in found.values())
    assert specs["worker"]["parallelism"] == 2
    assert "completions" not in specs["worker"], "a work queue: the first worker that ends with the run ends it"


def volumes_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {volume["name"]: volume for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("status", "conditions", "action"),
    [
        (143, {"DisruptionTarget"}, "Ignore"),
        (137, {"DisruptionTarget"}, "Ignore"),
        (2, set(), "FailJob"),
        (143, set(), "Ignore"),
        (1, set(), "Count"),
        (137, set(), "Count"),
    ],
)
def test_ends_of_pods_count_as_they_should(tmp_path: Path, status: int, conditions: set[str], action: str) -> None:
    for role, spec in jobs(objects(kubernetes.artefact(job(tmp_path), OPTIONS))).items():
        assert spec["template"]["spec"]["restartPolicy"] == "Never", "or the policy has no effect"
        actions = [
            rule["action"]
            for rule in spec["podFailurePolicy"]["rules"]
            if conditions & {each["type"] for each in rule.get("onPodConditions", [])}
            or (
                status in rule.get("onExitCodes", {}).get("values", []) and rule["onExitCodes"]["containerName"] == role
            )
        ]
        assert [*actions, "Count"][0] == action


def test_pods_are_as_restricted_as_the_strictest_standard_of_kubernetes_wants(tmp_path: Path) -> None:
    for spec in jobs(objects(kubernetes.artefact(job(tmp_path), OPTIONS))).values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        own, whole = container["securityContext"], pod["securityContext"]
        assert whole["runAsNonRoot"]
        assert whole["runAsUser"] > 0
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert pod["automountServiceAccountToken"] is False
        assert volumes_of(spec["template"])["keys"]["secret"]["defaultMode"] == 0o440
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert 30 <= pod["terminationGracePeriodSeconds"] <= 60


def test_options_pass_through_shell_and_yaml_unchanged(tmp_path: Path) -> None:
    words = ("--env-config", '{"text": "it\'s $HOME: {a}\n\n  # b"}', "--env", "a b")
    spec = jobs(objects(kubernetes.artefact(job(tmp_path, *words), OPTIONS)))["learner"]
    script = spec["template"]["spec"]["containers"][0]["args"][0]
    seen = re.sub(r"^(umask|mkdir|cp) .*\n", "", script, flags=re.MULTILINE).replace('exec "$@"', 'printf "%s\\0" "$@"')
    done = subprocess.run(["sh", "-c", seen, "sh"], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.split("\0")[5 : 5 + len(words)] == [*words]


# The command, and kubectl ------------------------------------------------------------------------------------

FAKE_KUBECTL = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in *--output=name) echo job.batch/one-worker;; esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(FAKE_KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "calls"


def launch(folder: Path, *options: str) -> int:
    learner = ["--env", "CartPole-v1", "--run-dir", str(folder / "mine")]
    return main(["kubernetes", "--image", "aiorl:learner", *options, "--", *learner])


def test_launching_again_keeps_the_keys_and_printing_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, "--print") == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "mine").exists()
    assert launch(tmp_path) == launch(tmp_path, "--workers", "9") == 0
    first, second = (f"# {text}" for text in capsys.readouterr().out.split("# Who can read")[1:])
    assert first.replace("parallelism: 2 ", "parallelism: 9 ") == second
    secret = objects(first)["Secret", ""]["stringData"]
    keys = tmp_path / "mine" / "keys"
    assert secret["worker.key_secret"] == (keys / "worker.key_secret").read_text()
    assert (keys / "worker.key_secret").stat().st_mode & 0o777 == 0o600
    assert objects(shown)["Secret", ""]["stringData"].keys() == secret.keys()
    private = re.search('secret-key = "(.*)"', secret["worker.key_secret"])
    assert private is not None
    assert first.count(private[1]) == 1, "in the Secret, and nowhere else"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--image"], "--image"),
        (["--image=i", "--cpus=0"], "--cpus"),
        (["--image=i", "--memory=much"], "--memory"),
        (["--workers=1"], "image"),
    ],
)
def test_wrong_usage_ends_with_status_2(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["kubernetes", *options, "--", "--env", "CartPole-v1"])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_verbs_use_kubectl_on_the_runs_objects(
    tmp_path: Path, calls: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--jobset"] if kind == "jobset" else []
    assert launch(tmp_path, "--namespace", "lab", *own) == 0
    name = json.loads((tmp_path / "mine" / "launch.json").read_text())["name"]
    for words in (["status"], ["logs"], ["scale", "5"], ["stop"]):
        assert main(["kubernetes", words[0], str(tmp_path / "mine"), *words[1:]]) == 0
    status, logs, find, patch, stop = calls.read_text().splitlines()
    ours = f"--selector=app.kubernetes.io/instance={name}"
    assert all(call.startswith("--namespace lab ") for call in (status, logs, find, patch, stop))
    assert all(ours in call for call in (status, logs, find, stop))
    assert patch.endswith('patch job.batch/one-worker --patch={"spec": {"parallelism": 5}}')
    assert f" delete {kind},service,poddisruptionbudget,secret " in stop
    assert f"{name}-runs" in capsys.readouterr().out, "the volume stays, and it says so"
