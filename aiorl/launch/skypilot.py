"""`aiorl launch skypilot`: a job group for SkyPilot, with a learner on demand and spot workers.

Each host runs `aiorl launch here`, with its rank, the learner's name in the group and the keys in a
secret. SkyPilot starts hosts again that it has lost.
"""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from aiorl.config.command_line import Parser, as_typed, at_least
from aiorl.config.key_text import VARIABLE
from aiorl.errors import ConfigError
from aiorl.launch.here import PORT
from aiorl.launch.job import Job, Verb, check_printable

__all__ = ["ABOUT", "EXAMPLES", "VERBS", "add_arguments", "artefact", "run"]

ABOUT = (
    "Prints a job group for SkyPilot, which finds hosts in clouds, on Kubernetes or Slurm: a"
    " learner, and workers on spot hosts that come and go."
)
EXAMPLES = """
Examples:
  python -m aiorl.launch skypilot --workers 8 --cpus 16 -- --env CartPole-v1 --run-dir runs/mine > mine.yaml
  # the run in a bucket, so that it survives its learner's host
  python -m aiorl.launch skypilot --infra aws --store s3://my-runs -- --env CartPole-v1 --run-dir runs/mine > mine.yaml
"""
VERBS: dict[str, Verb] = {}
_DEFAULTS = {
    "workers": 2,
    "cpus": 8,
    "learner_cpus": 4,
    "learner_memory": 8,
    "infra": "",
    "store": "",
    "on_demand": False,
}
_TEMPLATE = Path(__file__).parent / "manifests" / "skypilot.yaml"


def add_arguments(parser: Parser, words: Sequence[str]) -> None:
    """See `Engine.add_arguments`."""
    add = parser.add_argument
    for name, about in (
        ("workers", "Hosts with workers."),
        ("cpus", "Cores of such a host, at least, each for a worker."),
        ("learner-cpus", "Cores of the learner's host, at least."),
        ("learner-memory", "Its memory, in GB, at least."),
    ):
        default = _DEFAULTS[name.replace("-", "_")]
        add(f"--{name}", metavar="N", type=at_least(1), help=f"{about} (default: {default})")
    add("--infra", metavar="WHERE", help="As SkyPilot names it: aws, gcp/us-central1, k8s.")
    add("--store", metavar="URL", help="Bucket for the run, such as s3://my-runs.")
    add("--on-demand", action="store_true", help="No spot hosts for workers either.")
    add(
        "--setup",
        metavar="COMMAND",
        help="Command that installs aiorl and the environment on a host. (default: pip install)",
    )


def artefact(job: Job, options: dict[str, Any]) -> str:
    """See `Engine.artefact`. The keys are not in it."""
    check_printable(options)
    if job.config["insecure"]:
        raise ConfigError(
            "Hosts in a cloud can be reached by others, so they need keys.",
            key="insecure",
            hint="Leave --insecure out.",
        )
    settings: Mapping[str, Any] = _DEFAULTS | options
    learner = {
        "cpus": f"{settings['learner_cpus']}+",
        "memory": f"{settings['learner_memory']}+",
        "use_spot": False,
    }
    workers = {
        "cpus": f"{settings['cpus']}+",
        "use_spot": not settings["on_demand"],
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    if settings["infra"]:
        learner["infra"] = workers["infra"] = settings["infra"]
    run_dir = f"~/runs/{job.name}"
    mounts = ""
    if settings["store"]:
        run_dir = f"/runs/{job.name}"
        mount = {"/runs": {"source": settings["store"], "mode": "MOUNT"}}
        mounts = f"\nfile_mounts: {json.dumps(mount)}"
    local_workers = job.num_workers
    if local_workers is None:
        local_workers = max(1, settings["learner_cpus"] - job.own_cores)
    here = [
        "aiorl",
        "launch",
        "here",
        "--address",
        f"tcp://learner-0.{job.name}:{job.port or PORT}",
    ]
    here += ["--workers", str(settings["cpus"]), "--", *job.launch_words(run_dir, local_workers)]
    command = f"WORLD_SIZE={settings['workers'] + 1} {shlex.join(here)}"
    install = "pip install aiorl"
    install_learner = install if job.is_script else "pip install 'aiorl[learner]'"
    return Template(_TEMPLATE.read_text("utf-8")).substitute(
        name=job.name,
        learner_resources=json.dumps(learner),
        worker_resources=json.dumps(workers),
        workers=settings["workers"],
        secrets=json.dumps({VARIABLE: None}),
        mounts=mounts,
        learner_setup=_block(settings.get("setup", install_learner)),
        worker_setup=_block(settings.get("setup", install)),
        learner_run=_block(f"RANK=0 {command}"),
        worker_run=_block(f"RANK=$((SKYPILOT_NODE_RANK + 1)) {command}"),
    )


def run(job: Job, options: dict[str, Any]) -> int:
    """See `Engine.run`. Makes the keys, and prints the job group."""
    group = artefact(job, options)
    job.make_place()
    keys = job.make_keys()
    if keys.is_relative_to(job.run_dir):
        (keys / ".gitignore").write_text("*\n")  # or SkyPilot would send them with the code
    sys.stdout.write(group)
    sys.stderr.write(
        as_typed(
            f"With this in a file:\n  {VARIABLE}=$(python -m aiorl.keys {shlex.quote(str(keys))} --print)"
            f" sky jobs launch --secret {VARIABLE} FILE\n"
        )
    )
    return 0


def _block(text: str) -> str:
    return textwrap.indent(text, "  ")
