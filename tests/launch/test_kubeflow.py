"""`aiorl launch kubeflow`: the objects have the fields of Kubeflow Trainer's own models, and match."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from aiorl.launch.__main__ import main

RUNTIME, JOB = "TrainingRuntime", "TrainJob"


def objects(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    learner = words or ("--", "--env", "CartPole-v1")
    assert main(["kubeflow", "--image", "i", "--workers", "3", "--print", *learner]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    return {document["kind"]: document for document in documents}


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_models_of_kubeflow_trainer_take_all_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    api = pytest.importorskip("kubeflow_trainer_api.models")
    made = objects(capsys)
    for kind in (RUNTIME, JOB):
        model = getattr(api, f"TrainerV1alpha1{kind}")
        read = model.from_dict(made[kind]).to_dict()
        # the models drop what they do not know
        assert json.loads(json.dumps(read, default=str)) == made[kind]


def test_the_job_refers_to_its_runtime_whose_workers_are_the_trainers_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The label, and the name of the container, are those that Kubeflow Trainer looks for."""
    made = objects(capsys)
    spec = made[JOB]["spec"]
    assert spec["runtimeRef"]["name"] == made[RUNTIME]["metadata"]["name"]
    assert spec["trainer"]["numNodes"] == made[RUNTIME]["spec"]["mlPolicy"]["numNodes"] == 3
    jobset = made[RUNTIME]["spec"]["template"]["spec"]
    learner, nodes = jobset["replicatedJobs"]
    step = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert nodes["template"]["metadata"]["labels"][step] == "trainer"
    assert step not in learner["template"]["metadata"]["labels"]
    container = nodes["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["name"] == "node"
    rules = nodes["template"]["spec"]["podFailurePolicy"]["rules"]
    named = [rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule]
    assert set(named) == {"node"}
    in_jobset = {job["name"] for job in jobset["replicatedJobs"]}
    for rule in jobset["failurePolicy"]["rules"]:
        assert {*rule.get("targetReplicatedJobs", ())} <= in_jobset
    service = made["Service"]["spec"]["selector"]
    pods = learner["template"]["spec"]["template"]["metadata"]["labels"]
    assert service.items() <= pods.items()
    assert made["Service"]["metadata"]["name"] in container["args"][0]


def test_verbs_know_the_objects_and_there_is_none_that_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\necho "$*" >> "$CALLS"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = ["--", "--env", "CartPole-v1", "--run-dir", "mine"]
    assert main(["kubeflow", "--image", "i", *run]) == 0
    assert main(["kubeflow", "status", "mine"]) == 0
    assert main(["kubeflow", "stop", "mine"]) == 0
    shown, deleted = (tmp_path / "calls").read_text().splitlines()
    assert shown.startswith("get trainjobs,jobs,pods")
    assert deleted.startswith("delete trainjob,trainingruntime,service,")
    with pytest.raises(SystemExit):
        main(["kubeflow", "scale", "mine", "3"])
    assert main(["kubernetes", "stop", "mine"]) == 2, "another engine launched it"
    assert "kubeflow" in capsys.readouterr().err
