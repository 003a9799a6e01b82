"""`aiorl launch kubernetes`: manifests of a learner and its workers, to pipe into ``kubectl apply
-f -``.

The learner is a Job with a volume for the run, from which a new pod resumes. The workers are a Job
without completions, a work queue: the first worker that ends with the run ends it. With
``--jobset`` both are in a JobSet. The templates are the files in ``manifests``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from aiorl.config.command_line import Parser, as_typed, at_least
from aiorl.config.files import read_regular
from aiorl.errors import AiorlError, ConfigError
from aiorl.launch.job import Job, Verb, check_printable, saved
from aiorl.launch.logs import printable, run_shown

__all__ = ["ABOUT", "EXAMPLES", "VERBS", "add_arguments", "artefact", "run"]

ABOUT = "Prints manifests of a learner and its workers, to pipe into: kubectl apply -f -"
EXAMPLES = """
Examples:
  python -m aiorl.launch kubernetes --image registry/aiorl:learner --workers 8 \\
      -- --env CartPole-v1 --stop-return 475 --run-dir runs/mine | kubectl apply -f -
  # 16 cores for each worker pod, in the queue of a cluster with Kueue
  python -m aiorl.launch kubernetes --image registry/aiorl:learner --cpus 16 --queue mine -- --env CartPole-v1
  # a Python file of yours, in the image, in place of the learner
  python -m aiorl.launch kubernetes --image registry/mine --workers 8 -- --script my_loop.py | kubectl apply -f -

The image needs aiorl with the extra `learner`, and the environment. The printed Secret has the run's private keys.
"""
_MANIFESTS = Path(__file__).parent / "manifests"
_PORT = 5557
_DEFAULTS = {
    "workers": 2,
    "cpus": 4,
    "memory": "2Gi",
    "learner_cpus": 4,
    "learner_memory": "4Gi",
    "storage": "5Gi",
    "namespace": "",
    "queue": "",
    "jobset": False,
}
_LABEL = "app.kubernetes.io/"
_LEARNER_KEYS = ("learner.key_secret", "learner.key", "admitted/worker.key")
_WORKER_KEYS = ("worker.key_secret", "learner.key")
_UNMADE = "(made when the run is launched)\n"
_MAX_KEY_BYTES = 16 << 10
_NAME = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
_KINDS = ("jobset", "job", "service", "poddisruptionbudget", "secret")
"""Kinds of objects that ``stop`` deletes, if a run has them."""
_ALL_KINDS = {"trainjob", "trainingruntime", *_KINDS}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(_NAME, value) is not None


_FACTS = {
    "name": _is_name,
    "namespace": lambda value: value == "" or _is_name(value),
    "kinds": lambda value: isinstance(value, str) and set(value.split(",")) <= _ALL_KINDS,
}
"""Fact in launch.json -> its check: kubectl gets these values as words of its own command line."""


def add_arguments(parser: Parser, words: Sequence[str]) -> None:
    """See `Engine.add_arguments`."""
    add_options_of_pods(parser)
    parser.add_argument(
        "--jobset",
        action="store_true",
        help="Make a JobSet, which fails as a whole, instead of two Jobs.",
    )


def add_options_of_pods(parser: Parser, least_workers: int = 0) -> None:
    """Declare the options of pods in `parser`.

    Args:
        parser: the parser.
        least_workers: least number of worker pods.
    """
    add = parser.add_argument
    quantity = _matching(r"\d+(\.\d+)?([EPTGMK]i?|[km])?", "an amount, such as 4Gi")
    name = _matching(_NAME, "a name of lower-case letters, digits and '-'")

    def default(key: str) -> str:
        return f"(default: {_DEFAULTS[key]})"

    add(
        "--image",
        metavar="IMAGE",
        help="Image with aiorl, its extra `learner`, and the environment.",
    )
    add(
        "--worker-image",
        metavar="IMAGE",
        help="Image for workers, which need no `learner`. (default: --image's)",
    )
    add(
        "--workers",
        metavar="N",
        type=at_least(least_workers),
        help=f"Worker pods. {default('workers')}",
    )
    add(
        "--cpus",
        metavar="N",
        type=at_least(1),
        help=f"Cores of a worker pod, each for a worker. {default('cpus')}",
    )
    add(
        "--memory",
        metavar="SIZE",
        type=quantity,
        help=f"Memory of a worker pod. {default('memory')}",
    )
    add(
        "--learner-cpus",
        metavar="N",
        type=at_least(1),
        help=f"Cores of the learner. {default('learner_cpus')}",
    )
    add(
        "--learner-memory",
        metavar="SIZE",
        type=quantity,
        help=f"Its memory. {default('learner_memory')}",
    )
    add(
        "--storage",
        metavar="SIZE",
        type=quantity,
        help=f"Size of the volume for the run. {default('storage')}",
    )
    add(
        "--namespace",
        metavar="NAME",
        type=name,
        help="Namespace of the objects. (default: kubectl's own)",
    )
    add(
        "--queue",
        metavar="NAME",
        type=name,
        help="Kueue's local queue; the number of workers is elastic there.",
    )


def _matching(pattern: str, description: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"must be {description}, not {text!r:.80}.")
        return text

    return read


def artefact(job: Job, options: dict[str, Any]) -> str:
    """See `Engine.artefact`. Keys that are not made yet have placeholders in the Secret."""
    return manifests(job, options, "jobset" if options.get("jobset") else "jobs")


def manifests(
    job: Job,
    options: dict[str, Any],
    template: str,
    worker: str = "worker",
    worker_labels: Mapping[str, str] | None = None,
) -> str:
    """Return the manifests of a run.

    Args:
        job: the run.
        options: the engine's options.
        template: file in ``manifests`` with the objects that start pods.
        worker: name of the worker's job in a JobSet, and of its container.
        worker_labels: further labels of that job.

    Raises:
        ConfigError: no image is given, or a text has unprintable characters.
    """
    settings = _complete(options)
    name = _name(job)
    port = job.port or _PORT
    labels = {f"{_LABEL}name": "aiorl", f"{_LABEL}instance": name}
    queue: dict[str, str] = {}
    elastic: dict[str, str] = {}
    if settings["queue"]:
        queue = {"kueue.x-k8s.io/queue-name": settings["queue"]}
        elastic = {"kueue.x-k8s.io/elastic-job": "true"}
    facts: dict[str, object] = settings | {
        "name": name,
        "port": port,
        "next_port": port + 1,
        "image": json.dumps(settings["image"]),
        "worker_image": json.dumps(settings.get("worker_image", settings["image"])),
        "labels": labels,
        "set_labels": labels | queue,
        "keys": _secret(job.keys),
        "elastic": elastic,
        "worker_job": worker,
    }
    for role in ("learner", "worker"):
        role_labels = labels | {f"{_LABEL}component": role}
        facts[f"{role}_labels"] = role_labels
        facts[f"{role}_job_labels"] = role_labels | queue
        facts[f"set_{role}_labels"] = {**role_labels, **(worker_labels or {})}
    specs = {"learner": _learner(job, facts), "worker": _worker(job, facts)}
    if template != "jobs":
        specs = {role: textwrap.indent(spec, " " * 6) for role, spec in specs.items()}
        specs["jobset"] = _filled("jobset_spec", facts | specs)
    if template == "kubeflow":
        specs["jobset"] = textwrap.indent(specs["jobset"], " " * 4)
    text = _filled("objects", facts) + _filled(template, facts | specs)
    if settings["namespace"]:
        text = text.replace("\nmetadata: {", f"\nmetadata: {{namespace: {settings['namespace']}, ")
    return text


def run(job: Job, options: dict[str, Any]) -> int:
    """See `Engine.run`. Makes the keys, and prints the manifests."""
    unused = "job" if options.get("jobset") else "jobset"
    kinds = [kind for kind in _KINDS if kind != unused]
    return print_and_save(job, options, "kubernetes", artefact, kinds)


def print_and_save(
    job: Job,
    options: dict[str, Any],
    engine: str,
    make: Callable[[Job, dict[str, Any]], str],
    kinds: Sequence[str],
) -> int:
    """Make the keys, print manifests, and save what verbs need; returns the exit status.

    Args:
        job: the run.
        options: the engine's options.
        engine: name of the engine.
        make: function that returns the manifests.
        kinds: kinds of the objects to delete when the run is stopped.

    Raises:
        ConfigError: see `manifests`.
    """
    settings = _complete(options)
    job.make_place()
    job.make_keys()
    sys.stdout.write(make(job, options))
    facts = {
        "name": _name(job),
        "namespace": settings["namespace"],
        "kinds": ",".join(kinds),
    }
    job.save(engine, facts)
    steps = "".join(
        f"  python -m aiorl.launch {engine} {verb} {job.run_dir}\n"
        for verb in ("status", "logs", "stop")
    )
    sys.stderr.write(as_typed(f"After `kubectl apply -f -` of these manifests:\n{steps}"))
    return 0


def _complete(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with their defaults."""
    if "image" not in options:
        raise ConfigError(
            "No image is given.", key="image", hint="Name one: --image registry/aiorl:learner"
        )
    check_printable(options)
    return _DEFAULTS | options


def _name(job: Job) -> str:
    """Return the name that the names of all objects begin with; a Service's begins with a
    letter.
    """
    if job.name[0].isalpha():
        return job.name
    return f"run-{job.name}"


def _secret(keys: Path) -> dict[str, str]:
    """Return the contents of the Secret: its keys can't contain ``/``."""
    files = {file: keys / file for file in (*_LEARNER_KEYS, *_WORKER_KEYS)}
    if not keys.exists():
        return {_item(file): _UNMADE for file in files}
    contents = dict[str, str]()
    for file, path in files.items():
        content = read_regular(path, max_bytes=_MAX_KEY_BYTES, follow=True)
        contents[_item(file)] = content.decode("ascii", errors="replace")
    return contents


def _item(file: str) -> str:
    return file.replace("/", "-")


def _learner(job: Job, facts: Mapping[str, object]) -> str:
    """Return the spec of the learner's Job."""
    joining = None if facts["queue"] else int(str(facts["workers"])) * int(str(facts["cpus"]))
    numbers = shlex.join(job.process_words(job.num_workers or 0, joining))
    place = (
        f"--bind tcp://0.0.0.0:{facts['port']} --advertise {facts['name']}-learner "
        f'--keys "$HOME/keys" {numbers}'
    )
    command = job.main_sh("python", place, f"/runs/{facts['name']}")
    return _job(
        "learner",
        f'{command}exec "$@"',
        _LEARNER_KEYS,
        facts,
        container="learner",
        counts="  parallelism: 1\n  completions: 1\n  backoffLimit: 10",
        grace_s="60 # for the last checkpoint",
        cpus=facts["learner_cpus"],
        memory=facts["learner_memory"],
        ready="it listens",
        connection=f":{facts['port']:04X} 0*:0000 0A",
        mount="\n        - {name: runs, mountPath: /runs}",
        volume=(
            f"\n      - {{name: runs, persistentVolumeClaim: {{claimName: {facts['name']}-runs}}}}"
        ),
    )


def _worker(job: Job, facts: Mapping[str, object]) -> str:
    """Return the spec of the workers' Job."""
    address = f"tcp://{facts['name']}-learner:{facts['port']}"
    folder = os.path.dirname(job.words[0]) if job.is_script else ""
    find_script = ""
    if folder:
        path = f"{shlex.quote(folder)}${{PYTHONPATH:+:$PYTHONPATH}}"
        find_script = f"export PYTHONPATH={path}\n"
    return _job(
        "worker",
        f'{find_script}exec python -P -m aiorl worker --connect {address} --keys "$HOME/keys" --num-workers'
        f" {facts['cpus']}",
        _WORKER_KEYS,
        facts,
        container=facts["worker_job"],
        counts=(
            f"  parallelism: {facts['workers']} # completions are not set: pods are replaced until"
            " one succeeds\n  backoffLimit: 1000000"
        ),
        image=facts["worker_image"],
        grace_s="30",
        ready="it is connected to the learner",
        connection=f":{facts['port']:04X} 01 ",
        mount="",
        volume="",
    )


def _job(
    role: str, script: str, keys: Sequence[str], facts: Mapping[str, object], **of_role: object
) -> str:
    """Return the spec of a Job whose container runs `script` and has the keys that it needs."""
    return _filled(
        "job",
        {
            **facts,
            "labels": facts[f"{role}_labels"],
            "script": textwrap.indent(script, " " * 10),
            "key_items": [{"key": _item(file), "path": file} for file in keys],
            **of_role,
        },
    )


def _filled(template: str, facts: Mapping[str, object]) -> str:
    """Return a template with its facts, those that are not text as JSON."""
    return Template((_MANIFESTS / f"{template}.yaml").read_text("utf-8")).substitute(
        {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in facts.items()
        }
    )


# Verbs
# --------------------------------------------------------------------------------------------------


class Verbs:
    """Verbs of an engine whose runs are objects of a cluster.

    Args:
        engine: name of the engine.
        kinds: kinds of objects whose state ``status`` shows.
    """

    def __init__(self, engine: str, kinds: str) -> None:
        self._engine = engine
        self._kinds = kinds

    def table(self) -> dict[str, Verb]:
        """Return name -> verb."""
        return {
            "status": Verb(self._status, "", "Shows jobs and pods; READY pods are connected."),
            "logs": Verb(
                self._logs, "", "Shows the ends of all logs, and follows them in a terminal."
            ),
            "scale": Verb(self._scale, "N", "Sets the number of worker pods."),
            "stop": Verb(self._stop, "", "Ends the run with a checkpoint; its volume stays."),
        }

    def _status(self, run: str) -> int:
        self._kubectl(run, "get", self._kinds, _OURS, "--output=wide")
        return 0

    def _logs(self, run: str) -> int:
        follow = ["--follow"] if sys.stdout.isatty() else []
        self._kubectl(
            run, "logs", _OURS, "--prefix", "--tail=20", "--max-log-requests=1000", *follow
        )
        return 0

    def _scale(self, run: str, number: str) -> int:
        if not number.isdecimal():
            raise ConfigError(f"N must be a whole number of pods, not {number!r:.50}.", key="N")
        workers = f"{_OURS},{_LABEL}component=worker"
        for name in self._kubectl(run, "get", "jobs", workers, "--output=name").split():
            if not re.fullmatch(rf"[a-z0-9.]+/{_NAME}", name):
                raise AiorlError(f"kubectl named {name!r:.100}, which is no job.")
            self._kubectl(run, "patch", name, f'--patch={{"spec": {{"parallelism": {number}}}}}')
        return 0

    def _stop(self, run: str) -> int:
        self._kubectl(run, "delete", "KINDS", _OURS, "--cascade=foreground")
        name = saved(run, self._engine, _FACTS)[1]["name"]
        sys.stdout.write(
            f"The volume with the run stays, until: kubectl delete persistentvolumeclaim {name}-runs\n"
        )
        return 0

    def _kubectl(self, run: str, *words: str) -> str:
        """Run kubectl for a launched run, and return its output if it is asked for names.

        Args:
            run: the run directory as the user typed it.
            words: arguments; NAME and KINDS in them become those of the run.

        Raises:
            AiorlError: kubectl is missing or failed.
        """
        _, facts = saved(run, self._engine, _FACTS)
        marks = {"NAME": facts["name"], "KINDS": facts["kinds"]}
        command = ["kubectl"]
        if facts["namespace"]:
            command += ["--namespace", facts["namespace"]]
        command += [re.sub("NAME|KINDS", lambda match: marks[match[0]], word) for word in words]
        names = ""
        try:
            if "--output=name" in words:
                process = subprocess.run(command, check=False, capture_output=True)
                status = process.returncode
                names = process.stdout.decode("utf-8", errors="replace")
                for line in process.stderr.splitlines():
                    sys.stderr.write(printable(line) + "\n")
            else:
                status = run_shown(command)
        except FileNotFoundError as error:
            raise AiorlError(
                "kubectl is not on PATH: run this where you use the cluster."
            ) from error
        if status:
            raise AiorlError(f"kubectl {words[0]} failed with status {status}.")
        return names


_OURS = f"--selector={_LABEL}instance=NAME"
VERBS = Verbs("kubernetes", "jobs,pods,persistentvolumeclaims").table()
