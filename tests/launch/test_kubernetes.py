"""Manifests against published schemas and each other, kubectl's part by a fake, and the containers'
commands for real.

No cluster is needed. The containers run in directories that cannot be written, as another user,
without a network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import CARTPOLE, SMALL

import aiorl
from aiorl.keys import make_keys
from aiorl.launch import kubernetes
from aiorl.launch.__main__ import main
from aiorl.launch.job import Job
from aiorl.launch.script_job import checked_script

ROOT = Path(aiorl.__file__).parents[1]
ROLE, ROLES = "app.kubernetes.io/component", ("learner", "worker")
QUEUED = {"queue": "mine", "namespace": "lab", "worker_image": "aiorl:base"}
VARIANTS = [{}, QUEUED, {"jobset": True}, {"jobset": True, "queue": "mine"}]
JOBSET = {
    "": {"network", "successPolicy", "failurePolicy", "replicatedJobs"},
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "successPolicy": {"operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "rule": {
        "name",
        "action",
        "onJobFailureReasons",
        "onJobFailureMessagePatterns",
        "targetReplicatedJobs",
    },
    "job": {"name", "groupName", "template", "replicas", "dependsOn"},
}
"""Fields of jobset.x-k8s.io/v1alpha2, as JobSet 0.12 documents them."""


class Manifests:
    """Printed objects: ``found`` by kind, the jobs' specs and containers by role."""

    def __init__(self, made: Job, **options: Any) -> None:
        text = kubernetes.artefact(made, {"image": "registry/aiorl:learner", **options})
        self.documents = list(yaml.safe_load_all(text))
        self.found = {document["kind"]: document for document in self.documents}
        jobs = [document for document in self.documents if document["kind"] == "Job"]
        if "JobSet" in self.found:
            jobs = [each["template"] for each in self.found["JobSet"]["spec"]["replicatedJobs"]]
        self.specs = {each["metadata"]["labels"][ROLE]: each["spec"] for each in jobs}
        self.pods = {role: spec["template"] for role, spec in self.specs.items()}
        self.containers = {role: pod["spec"]["containers"][0] for role, pod in self.pods.items()}
        self.scripts = {role: container["args"][0] for role, container in self.containers.items()}


def job(*words: str) -> Job:
    config = dict.fromkeys(("keys", "resume", "preset", "init_from"))
    return Job(
        Path("/nowhere/My run_1"), words or ("--env", "CartPole-v1", "--preset", "auto"), config
    )


@pytest.mark.rest_slow
@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
@pytest.mark.parametrize("options", VARIANTS)
def test_the_objects_have_the_schemas_of_three_versions_of_kubernetes(
    options: dict[str, Any], version: str
) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    made = Manifests(job(), **options)
    named = {"metadata": {"name": "job"}, "apiVersion": "batch/v1", "kind": "Job"}
    documents = [document for document in made.documents if document["kind"] != "JobSet"]
    for document in [*documents, *({**named, "spec": spec} for spec in made.specs.values())]:
        validator.validate(document, version, strict=True)
    kinds = {"Secret", "PersistentVolumeClaim", "Service", "PodDisruptionBudget"}
    assert made.found.keys() == kinds | {"JobSet" if options.get("jobset") else "Job"}
    metadata = [document["metadata"] for document in made.documents]
    assert {each.get("namespace") for each in metadata} == {options.get("namespace")}
    assert all(len(each["name"]) <= 58 for each in metadata), "pods get five characters more"
    queues = [each["labels"].get("kueue.x-k8s.io/queue-name") for each in metadata]
    assert queues.count("mine") == ("queue" in options) * (1 if options.get("jobset") else 2)


def test_the_jobset_has_fields_and_values_of_its_api() -> None:
    document = Manifests(job(), jobset=True).found["JobSet"]
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = document["spec"]
    learner, worker = spec["replicatedJobs"]
    rules = spec["failurePolicy"]["rules"]
    parts = [
        ("", spec),
        *spec.items(),
        *(("rule", rule) for rule in rules),
        ("job", learner),
        ("job", worker),
    ]
    assert all(part.keys() <= JOBSET[name] for name, part in parts if name in JOBSET)
    assert all(
        re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) for rule in rules
    )
    assert "dependsOn" not in learner, "the first job can depend on none"
    assert worker["dependsOn"] == [{"name": "learner", "status": "Ready"}]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["learner"]}
    assert [(rule["action"], rule.get("targetReplicatedJobs")) for rule in rules] == [
        ("FailJobSet", None),
        ("FailJobSet", ["learner"]),
        ("RestartJobAndIgnoreMaxRestarts", ["worker"]),
    ]
    # JobSet makes jobs indexed unless they say otherwise, and an indexed job cannot be a work queue
    assert {each["template"]["spec"]["completionMode"] for each in (learner, worker)} == {
        "NonIndexed"
    }


@pytest.mark.parametrize("options", VARIANTS)
def test_what_refers_to_another_object_finds_it(options: dict[str, Any]) -> None:
    made = Manifests(job(), **options)
    service, budget = made.found["Service"], made.found["PodDisruptionBudget"]
    for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]):
        assert [
            selector.items() <= made.pods[role]["metadata"]["labels"].items() for role in ROLES
        ] == [True, False]
    samples, broadcast = (port["port"] for port in service["spec"]["ports"])
    assert broadcast == samples + 1
    name = service["metadata"]["name"]
    assert f"--connect tcp://{name}:{samples} " in made.scripts["worker"]
    assert f"--bind tcp://0.0.0.0:{samples} --advertise {name} " in made.scripts["learner"]
    for role, pod in made.pods.items():
        subprocess.run(["sh", "-n", "-c", made.scripts[role]], check=True, timeout=20)
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in made.containers[role]["volumeMounts"]} == volumes.keys()
        secret = volumes["keys"]["secret"]
        assert secret["secretName"] == made.found["Secret"]["metadata"]["name"]
        assert {item["key"] for item in secret["items"]} <= made.found["Secret"][
            "stringData"
        ].keys()
        private = [item["path"] for item in secret["items"] if item["path"].endswith("_secret")]
        assert private == [f"{role}.key_secret"], "and no other's"
    claim = made.pods["learner"]["spec"]["volumes"][-1]["persistentVolumeClaim"]["claimName"]
    assert claim == made.found["PersistentVolumeClaim"]["metadata"]["name"]
    assert made.containers["worker"]["image"] == options.get(
        "worker_image", "registry/aiorl:learner"
    )
    assert "completions" not in made.specs["worker"], (
        "a work queue: the first worker that ends with the run ends it"
    )


@pytest.mark.parametrize(
    ("status", "is_disrupted", "action"),
    [
        (143, True, "Ignore"),
        (137, True, "Ignore"),
        (2, False, "FailJob"),
        (143, False, "Ignore"),
        (1, False, "Count"),
    ],
)
def test_ends_of_pods_count_as_they_should(status: int, is_disrupted: bool, action: str) -> None:
    for role, spec in Manifests(job()).specs.items():
        assert spec["template"]["spec"]["restartPolicy"] == "Never", "or the policy has no effect"
        for rule in spec["podFailurePolicy"]["rules"]:
            by_status = rule.get("onExitCodes", {"values": [], "containerName": role})
            assert by_status["containerName"] == role
            if status in by_status["values"] or (is_disrupted and "onPodConditions" in rule):
                assert rule["action"] == action
                break
        else:
            assert action == "Count"


def test_pods_are_as_restricted_as_the_strictest_standard_of_kubernetes_wants() -> None:
    made = Manifests(job())
    for role in ROLES:
        pod, container = made.pods[role]["spec"], made.containers[role]
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (
            True,
            1000,
        )
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_options_pass_through_shell_and_yaml_unchanged() -> None:
    words = ("--env-config", '{"text": "it\'s $HOME: {a}\n\n  # b"}', "--env", "a b")
    script = Manifests(job(*words)).scripts["learner"]
    seen = re.sub(r"^(umask|mkdir|cp) .*\n", "", script, flags=re.MULTILINE).replace(
        'exec "$@"', 'printf "%s\\0" "$@"'
    )
    done = subprocess.run(
        ["sh", "-c", seen, "sh"], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout.split("\0")[5 : 5 + len(words)] == [*words]


# The command, and kubectl
# --------------------------------------------------------------------------------------------------

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
    secret, shown_secret = (next(yaml.safe_load_all(text))["stringData"] for text in (first, shown))
    keys = tmp_path / "mine" / "keys"
    assert secret["worker.key_secret"] == (keys / "worker.key_secret").read_text()
    assert (keys / "worker.key_secret").stat().st_mode & 0o777 == 0o600
    assert shown_secret.keys() == secret.keys()
    private = re.search('secret-key = "(.*)"', secret["worker.key_secret"])
    assert private is not None
    assert first.count(private[1]) == 1, "in the Secret, and nowhere else"


@pytest.mark.parametrize(
    "words", ["--image", "--image=i --cpus=0", "--image=i --memory=much", "--workers=1"]
)
def test_wrong_usage_ends_with_status_2(words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["kubernetes", *words.split(), "--", "--env", "CartPole-v1"]))
    assert ended.value.code == 2


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


# The containers' commands
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux for namespaces"
)
@pytest.mark.skipif(
    not shutil.which("unshare") or not shutil.which("ip"), reason="needs unshare and ip"
)
@pytest.mark.parametrize(
    ("how", "is_script"), [("by_chroot", False), ("by_podman", False), ("by_chroot", True)]
)
def test_containers_run_as_another_user_in_a_root_that_cannot_be_written_and_the_learner_resumes(
    tmp_path: Path, how: str, is_script: bool
) -> None:
    """R255: a script in the learner's place starts again, and its processes join again."""
    if how == "by_podman" and (not shutil.which("podman") or ROOT.is_relative_to("/tmp")):
        pytest.skip("podman is not installed, or hides this copy of the sources")
    words = (CARTPOLE, *SMALL, "--min-iter-time-s=0.2", "--stop-timesteps=8192", "--seed=1")
    begun = "grep -qs updates_total runs/*/result.jsonl"
    launched = job(*words)
    if is_script:
        loop = ROOT / "tests" / "support" / "launched_loop.py"
        launched = checked_script("aiorl launch", ["--script", str(loop), "wait-once"])
        begun = "grep -qs '2 actors, 2 joined' learner.log"
    made = Manifests(replace(launched, run_dir=tmp_path), workers=1, cpus=2)
    make_keys(tmp_path / "keys")
    places = {
        ROOT,
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(sys.executable).resolve().parents[1],
    }
    probes = [
        container["readinessProbe"]["exec"]["command"][2] for container in made.containers.values()
    ]
    environment = {
        "HOW": how,
        "BEGUN": begun,
        "NAME": made.found["Service"]["metadata"]["name"],
        "PLACES": " ".join(str(place) for place in places if not place.is_relative_to("/usr")),
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(ROOT),
        **{role.upper(): script for role, script in made.scripts.items()},
        **dict(zip(("LISTENS", "CONNECTED"), probes, strict=True)),
    }
    (tmp_path / "c").mkdir()
    command = [
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "bash",
    ]
    done = subprocess.run(
        [*command, Path(__file__).with_name("containers.sh")],
        cwd=tmp_path / "c",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    logs = "".join(path.read_text() for path in sorted((tmp_path / "c").glob("*.log")))
    assert done.stdout.splitlines() == ["preempted 143", "learner 0", "worker 0"], (
        f"{done.stderr}\n{logs}"
    )
    assert ("turn 2" if is_script else "resuming from") in logs
