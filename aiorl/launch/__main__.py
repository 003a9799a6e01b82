"""`aiorl launch ENGINE [options] -- LEARNER OPTIONS`, the same with `-- --script FILE [ARGS]`, and
`aiorl launch ENGINE VERB RUN` for launched runs.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import cast

from aiorl.config.command_line import Parser, as_typed, exit_status, usage_error
from aiorl.errors import nearest
from aiorl.launch.job import Engine, Job, checked
from aiorl.launch.script_job import checked_script, is_script
from aiorl.process.imports import find_modules_here
from aiorl.process.program import keep_output_from_failing

__all__ = ["main"]

_PROG = "python -m aiorl.launch"
_ENGINES = {
    "ssh": "hosts that you can log in to",
    "slurm": "a Slurm cluster",
    "kubernetes": "a Kubernetes cluster: prints manifests for kubectl",
    "kubeflow": "Kubeflow Trainer on Kubernetes: prints a TrainJob for kubectl",
    "skypilot": "clouds and clusters by SkyPilot: prints a job group",
    "here": "copies of this command that srun, mpirun, PBS or a cloud's launcher starts",
}
"""Engine, also the module's name -> the hosts that it uses."""
_LIST = "\n".join(f"  {name:12}{about}" for name, about in _ENGINES.items())
_HELP = f"""usage: {_PROG} ENGINE [options] -- LEARNER OPTIONS
       {_PROG} ENGINE [options] -- --script FILE [ARGS]
       {_PROG} ENGINE VERB RUN

Starts a learner and its workers on many hosts. What follows -- are options of `aiorl train`. With --script, a Python
file of yours takes the learner's place, and the processes on hosts join its `aiorl.Actors()`.

engines:
{_LIST}

examples:
  {_PROG} ssh --hosts host1=16 host2=16 -- --env CartPole-v1 --stop-return 475
  {_PROG} slurm --nodes 3 --time 4:00:00 -- --env CartPole-v1 --stop-return 475 --run-dir runs/mine
  {_PROG} ssh --hosts host1=16 host2=16 -- --script my_loop.py --population 64
  {_PROG} slurm status runs/mine
  {_PROG} ENGINE --help        # Shows an engine's options, verbs and examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0, 1 if something failed, 2 for wrong usage, 130
    after Ctrl-C.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    name, *words = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help", "help"):
        sys.stdout.write(as_typed(_HELP))
        return 0 if name else 2
    if name not in _ENGINES:
        hint = nearest(name, _ENGINES) or f" Engines: {', '.join(_ENGINES)}."
        usage_error(_PROG, f"There is no engine {name!r:.50}.{hint}")
    engine = cast(Engine, importlib.import_module(f"aiorl.launch.{name}"))
    return exit_status(lambda: _run(name, engine, words), interrupted="ended by Ctrl-C")


def _run(name: str, engine: Engine, words: list[str]) -> int:
    prog = f"{_PROG} {name}"
    if words and words[0] in engine.VERBS:
        verb = engine.VERBS[words[0]]
        placeholders = f"RUN {verb.takes}".split()
        if {"-h", "--help"} & set(words) or len(words) - 1 != len(placeholders):
            usage_error(prog, f"Write: {prog} {words[0]} {' '.join(placeholders)}")
        return verb.do(*words[1:])
    if words and engine.VERBS and words[0].isalpha():
        hint = nearest(words[0], engine.VERBS) or f" Verbs: {', '.join(engine.VERBS)}."
        usage_error(prog, f"There is no verb {words[0]!r:.50}.{hint}")
    engine_words = list(itertools.takewhile(lambda word: word != "--", words))
    learner_words = words[len(engine_words) + 1 :]
    verbs = "".join(
        f"  {prog} {key} RUN {verb.takes:6}# {verb.about}\n" for key, verb in engine.VERBS.items()
    )
    usage = f"[options] -- LEARNER OPTIONS\n       {prog} [options] -- --script FILE [ARGS]"
    parser = Parser(prog, usage, engine.ABOUT, f"{engine.EXAMPLES}\n{verbs}".rstrip())
    parser.add_argument(
        "--print", action="store_true", help="Print what would be run or submitted, and end."
    )
    engine.add_arguments(parser, engine_words)
    options = parser.parse(engine_words)
    if not learner_words:
        parser.error(
            "Put the learner's options after --, such as: -- --env CartPole-v1 --stop-return 475;"
            " or a script: -- --script my_loop.py"
        )
    if is_script(learner_words):
        job: Job = checked_script(prog, learner_words)
    else:
        job = checked(learner_words)
    if options.pop("print", False):
        sys.stdout.write(engine.artefact(job, options))
        return 0
    return engine.run(job, options)


if __name__ == "__main__":
    keep_output_from_failing()
    find_modules_here()
    sys.exit(main())
