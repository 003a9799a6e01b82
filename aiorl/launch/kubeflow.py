"""`aiorl launch kubeflow`: a TrainJob of Kubeflow Trainer with a runtime of its own.

The runtime is the JobSet of `aiorl launch kubernetes --jobset`, whose workers are the trainer's
nodes. Their number is fixed while the TrainJob runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiorl.config.command_line import Parser
from aiorl.launch.job import Job, Verb
from aiorl.launch.kubernetes import Verbs, add_options_of_pods, manifests, print_and_save

__all__ = ["ABOUT", "EXAMPLES", "VERBS", "add_arguments", "artefact", "run"]

ABOUT = (
    "Prints a TrainJob of Kubeflow Trainer and its runtime, with a learner and its workers, to pipe"
    " into: kubectl apply -f -"
)
EXAMPLES = """
Examples:
  python -m aiorl.launch kubeflow --image registry/aiorl:learner --workers 8 \\
      -- --env CartPole-v1 --stop-return 475 --run-dir runs/mine | kubectl apply -f -

The image needs aiorl with the extra `learner`, and the environment. The printed Secret has the run's private keys.
"""
_NODES = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""Label of the job whose pods are the trainer's nodes, which are containers named ``node``."""
_KINDS = ("trainjob", "trainingruntime", "service", "poddisruptionbudget", "secret")
_SHOWN = "trainjobs,jobs,pods,persistentvolumeclaims"
VERBS: Mapping[str, Verb] = {
    name: verb for name, verb in Verbs("kubeflow", _SHOWN).table().items() if name != "scale"
}


def add_arguments(parser: Parser, words: Sequence[str]) -> None:
    """See `Engine.add_arguments`."""
    add_options_of_pods(parser, least_workers=1)


def artefact(job: Job, options: dict[str, Any]) -> str:
    """See `Engine.artefact`. Keys that are not made yet have placeholders in the Secret."""
    return manifests(job, options, "kubeflow", worker="node", worker_labels=_NODES)


def run(job: Job, options: dict[str, Any]) -> int:
    """See `Engine.run`. Makes the keys, and prints the manifests."""
    return print_and_save(job, options, "kubeflow", artefact, _KINDS)
