"""Slurm: one job with a learner and workers on its nodes, or a learner's job and an array of
workers.

The scripts outlive time limits, preemption, lost nodes and requeues. Four rules make them do so:

- The learner is a child of the batch script, without srun, which kills its task on SIGTERM instead
  of passing it on.
- USR1 comes before the time limit, and at preemption where the site sends it: after the checkpoint,
  the script asks for another turn. TERM comes from scancel and from plain preemption: the script
  stays until Slurm ends it, because Slurm puts back only preempted jobs that have not ended, and a
  job that requeued itself could not be cancelled.
- INT comes from ``stop``: the learner says goodbye for good, and the job completes.
- Only the first signal is passed on, because a second one would break off the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiorl.config.command_line import Parser, at_least, spelt
from aiorl.config.files import read_own
from aiorl.errors import AiorlError, ConfigError
from aiorl.launch.job import Job, Verb, check_printable, saved
from aiorl.launch.logs import show_ends
from aiorl.text import one_line

__all__ = ["ABOUT", "EXAMPLES", "VERBS", "add_arguments", "artefact", "run"]

ABOUT = (
    "Submits a Slurm job that trains on its nodes and continues by itself after time limits,"
    " preemption and lost nodes. Any other option is passed on to sbatch, such as --account=NAME;"
    " write long names, such as --partition."
)
EXAMPLES = """
Examples:
  # a learner, and workers on all cores of three nodes
  python -m aiorl.launch slurm --nodes 3 --cpus-per-node 16 --time 4:00:00 -- --env CartPole-v1 --run-dir runs/mine
  # a learner, and up to 20 worker hosts that come and go
  python -m aiorl.launch slurm --elastic 20 --worker-options=--partition=spot -- --env CartPole-v1 --algo impala
  # a Python file of yours in place of the learner
  python -m aiorl.launch slurm --nodes 3 --cpus-per-node 16 -- --script my_loop.py --population 64
  # show the job's script
  python -m aiorl.launch slurm --nodes 3 --print -- --env CartPole-v1
"""
_CPUS = 8
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", re.ASCII | re.IGNORECASE)
_NOT_OF_SBATCH = ("nodes", "cpus_per_node", "elastic", "worker_options", "python")
_FILES = ("learner.sbatch", "worker.sbatch")
_MAX_SCRIPT_BYTES = 1 << 20
_FACTS = {
    "name": lambda value: (
        isinstance(value, str) and re.fullmatch("[a-z0-9][a-z0-9-]{0,62}", value) is not None
    ),
    "elastic": lambda value: isinstance(value, bool),
}
"""Fact in launch.json -> its check."""
_BODY = Path(__file__).with_suffix(".sh")
"""Body of both scripts; lines such as ``@start`` stand for their parts."""

_START_LEARNER = """\
# the learner of a node that was lost may still hold it, and ends when it is gone
if [[ ${{SLURM_RESTART_COUNT:-0}} != 0 && -e {lock} ]]; then
    flock --timeout 300 {lock} true || rm -f {lock}
fi
{main}"$@" &"""
_STEP = """\
if ((SLURM_JOB_NUM_NODES > 1)); then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --nodes="$others" --ntasks="$others" --cpus-per-task="$SLURM_CPUS_PER_TASK" --exclude="$SLURMD_NODENAME" \\
        --no-kill --kill-on-bad-exit=0 --wait=0 {worker} &
fi
"""
_END_WORKERS = """\
scancel --quiet --name={name} --state=PENDING  # those that run hear the learner's goodbye
[[ $status == 0 ]] || scancel --quiet --name={name}
"""


def add_arguments(parser: Parser, words: Sequence[str]) -> None:
    """Declare the engine's own options in `parser`, and all others in `words` for sbatch."""
    add = parser.add_argument
    add(
        "--nodes",
        metavar="N",
        type=at_least(1),
        help="Nodes of the job; the learner runs on the first. (default: 1)",
    )
    add(
        "--cpus-per-node",
        metavar="N",
        type=at_least(1),
        help=f"Cores of each node. (default: {_CPUS})",
    )
    add(
        "--time",
        metavar="TIME",
        type=_time_limit,
        help="Time limit of one turn; the run continues in the next one.",
    )
    add("--partition", metavar="NAME", help="Partition of the job.")
    add(
        "--elastic",
        metavar="N",
        type=at_least(1),
        help=(
            "Submit a job with the learner, and an array of N one-node jobs with workers that come"
            " and go."
        ),
    )
    add(
        "--worker-options",
        metavar="OPTIONS",
        help=(
            'Other options of sbatch for the array, such as --worker-options="--partition=spot'
            ' --qos=low".'
        ),
    )
    add("--python", metavar="PYTHON", help="Python on the nodes. (default: the one that runs this)")
    _pass_on(parser, words)


def _time_limit(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"must be a time that Slurm reads, not {text!r:.50}: MINUTES, MINUTES:SECONDS,"
            " HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, DAYS-HOURS:MINUTES:SECONDS"
            " or UNLIMITED."
        )
    return text


def _pass_on(parser: Parser, words: Sequence[str]) -> None:
    for name in dict.fromkeys(word.partition("=")[0] for word in spelt(words)):
        if name.startswith("--") and name not in ("--", "--help", *parser.options()):
            parser.add_argument(name, nargs="?", const="", help=argparse.SUPPRESS)


def artefact(job: Job, options: dict[str, Any]) -> str:
    """Return the scripts of `job` with `options`."""
    return "\n".join(_scripts(job, options).values())


def run(job: Job, options: dict[str, Any]) -> int:
    """Write and submit the scripts of `job` with `options`, and return the exit status.

    Raises:
        ConfigError: a job of this run is there already.
    """
    scripts = _scripts(job, options)
    names = [job.name]
    # launched on another login node, the same run has another name
    with contextlib.suppress(ConfigError):
        _, facts = saved(str(job.run_dir), "slurm", _FACTS)
        names.append(facts["name"])
    tasks = _tasks(",".join(names))
    if tasks:
        task, state, *_ = tasks[0]
        raise ConfigError(
            f"{job.run_dir} is trained by job {task}, which is {state}.",
            key="run_dir",
            value=str(job.run_dir),
            hint=f"End it first: aiorl launch slurm stop {job.run_dir}",
        )
    job.make_place()
    job.make_keys()
    for name, text in scripts.items():
        job.write(name, text)
    job.save("slurm", {"name": job.name, "elastic": "elastic" in options})
    learner = _submit(job.run_dir / _FILES[0])
    sys.stdout.write(f"submitted job {learner}, which trains {job.run_dir}\n")
    elastic = options.get("elastic")
    if elastic:
        array = _submit(job.run_dir / _FILES[1], f"--dependency=after:{learner}")
        sys.stdout.write(f"submitted array {array} of {elastic} worker hosts\n")
    for name, verb in VERBS.items():
        if name != "scale" or elastic:
            words = f"{name} {shlex.quote(str(job.run_dir))} {verb.takes}".rstrip()
            sys.stdout.write(f"  aiorl launch slurm {words}\n")
    sys.stdout.write(job.forward(f"$(squeue --me -hn {job.name} -o %B)"))
    return 0


# Scripts
# --------------------------------------------------------------------------------------------------


def _scripts(job: Job, options: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text of the learner's script, and of the workers' if they are elastic."""
    check_printable(options)
    check_printable({"current directory": Path.cwd(), "python": sys.executable, **job.code_path()})
    job.check_files()
    elastic = options.get("elastic")
    if elastic and "nodes" in options:
        raise ConfigError(
            "--nodes is for a job of fixed size, not for --elastic.",
            key="nodes",
            hint="Leave one out.",
        )
    if "worker_options" in options and not elastic:
        raise ConfigError(
            "--worker-options is for --elastic N.",
            key="worker_options",
            hint="Give --elastic, too.",
        )
    cpus = options.get("cpus_per_node", _CPUS)
    local_workers = job.num_workers
    if local_workers is None:
        local_workers = max(1, cpus - job.own_cores)
    # jobs of an array come and go
    joining = None if elastic else (options.get("nodes", 1) - 1) * cpus
    python = options.get("python") or sys.executable
    keys = str(job.keys)
    command = [python, "-P", "-m", "aiorl", "worker", "--connect", f"run:{job.run_dir}"]
    command += ["--keys", keys, "--log-dir", f"{job.run_dir}/logs"]
    worker = f'{shlex.join(command)} --num-workers "$SLURM_CPUS_PER_TASK"'
    place = ["--bind", job.bind, "--keys", keys, *job.process_words(local_workers, joining)]
    start = _START_LEARNER.format(
        lock=shlex.quote(f"{job.run_dir}/lock"),
        main=job.main_sh(shlex.quote(python), shlex.join(place)),
    )
    sbatch_options = {
        name.replace("_", "-"): value
        for name, value in options.items()
        if name not in _NOT_OF_SBATCH
    }
    if "job-name" in sbatch_options:
        raise ConfigError(
            "--job-name can't be chosen, because the run is found by it.",
            key="job_name",
            hint="Give --run-dir DIR after --, which the job is named after.",
        )
    header = {
        "job-name": job.name,
        "output": _pattern(job.run_dir / "slurm-%j.log"),
        "nodes": options.get("nodes", 1),
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "chdir": Path.cwd(),
        "signal": "B:USR1@60",
        "requeue": "",
        "no-kill": "",
        "open-mode": "append",
        **sbatch_options,
    }
    learner_file, worker_file = _FILES
    if not elastic:
        step = _STEP.format(worker=worker)
        return {learner_file: _script(job, header, start, step, after="")}
    worker_header = {
        **header,
        "job-name": f"{job.name}-worker",
        "output": _pattern(job.run_dir / "slurm-%A_%a.log"),
        "array": f"0-{elastic - 1}",
        **_sbatch_options(options.get("worker_options", "")),
    }
    after = _END_WORKERS.format(name=f"{job.name}-worker")
    return {
        learner_file: _script(job, header, start, workers="", after=after),
        worker_file: _script(job, worker_header, f"{worker} &", workers="", after=""),
    }


def _script(job: Job, header: Mapping[str, object], start: str, workers: str, after: str) -> str:
    lines = ["#!/usr/bin/env bash"]
    for name, value in header.items():
        word = "" if value == "" else f"={shlex.quote(str(value))}"
        lines.append(f"#SBATCH --{name}{word}")
    environment = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in job.code_path().items()
    )
    parts = {"environment": environment, "start": f"{start}\n", "workers": workers, "after": after}
    body = re.sub(r"(?m)^@(\w+)\n", lambda match: parts[match[1]], _BODY.read_text("utf-8"))
    return "\n".join([*lines, body])


def _pattern(path: Path) -> str:
    """Return a path in which Slurm replaces only the pattern in its last part."""
    return f"{str(path.parent).replace('%', '%%')}/{path.name}"


def _sbatch_options(text: str) -> dict[str, str]:
    parser = Parser("python -m aiorl.launch slurm --worker-options", "", "", "")
    parser.add_argument("--time", type=_time_limit)
    words = shlex.split(text)
    _pass_on(parser, words)
    return {name.replace("_", "-"): value for name, value in parser.parse(words).items()}


# Verbs
# --------------------------------------------------------------------------------------------------


def _status(run: str) -> int:
    path, facts = saved(run, "slurm", _FACTS)
    tasks = _tasks(f"{facts['name']},{facts['name']}-worker")
    for task, state, *rest in tasks:
        sys.stdout.write(one_line(f"{task:12} {state:12} {' '.join(rest)}", 1000) + "\n")
    if not tasks:
        sys.stdout.write(f"no job of {path} is in the queue\n")
    return 0 if tasks else 1


def _logs(run: str) -> int:
    path, _ = saved(run, "slurm", _FACTS)
    files = sorted(
        [*path.glob("slurm-*.log"), *path.glob("logs/*.txt")],
        key=lambda file: file.lstat().st_mtime,
    )
    return show_ends(files, 20, follow=sys.stdout.isatty())


def _scale(run: str, number: str) -> int:
    path, facts = saved(run, "slurm", _FACTS)
    if not facts["elastic"] or not _tasks(facts["name"]):
        reason = "no learner in the queue" if facts["elastic"] else "a fixed size"
        raise ConfigError(
            f"{path} has {reason}.", key="RUN", hint="Launch it with --elastic N to scale it."
        )
    if not number.isdecimal():
        raise ConfigError(f"N must be a whole number of hosts, not {number!r:.50}.", key="N")
    tasks = [task for task in _tasks(f"{facts['name']}-worker") if task[1] != "COMPLETING"]
    tasks.sort(key=lambda task: task[1] == "RUNNING", reverse=True)
    surplus = [task[0] for task in tasks[int(number) :]]
    if surplus:
        _slurm("scancel", *surplus)
    elif len(tasks) < int(number):
        _submit(path / _FILES[1], f"--array=0-{int(number) - len(tasks) - 1}")
    sys.stdout.write(f"{len(tasks)} worker hosts before, {number} now\n")
    return 0


def _stop(run: str) -> int:
    path, facts = saved(run, "slurm", _FACTS)
    running = [task for task, state, *_ in _tasks(facts["name"]) if state == "RUNNING"]
    if running:
        _slurm("scancel", "--signal=INT", "--batch", *running)
        sys.stdout.write("it saves its state and ends, and all workers with it\n")
    else:
        _slurm("scancel", "--quiet", f"--name={facts['name']}")
        _slurm("scancel", "--quiet", f"--name={facts['name']}-worker")
        sys.stdout.write(f"no learner of {path} runs; its jobs in the queue are cancelled\n")
    return 0


VERBS = {
    "status": Verb(_status, "", "Shows the run's jobs."),
    "logs": Verb(_logs, "", "Shows the ends of all logs, and follows them in a terminal."),
    "scale": Verb(_scale, "N", "Sets the number of worker hosts of an elastic run."),
    "stop": Verb(_stop, "", "Ends the run with a checkpoint."),
}


def _tasks(name: str) -> list[list[str]]:
    """Return id, state, and nodes or reason of each queued or running job with a name, tasks of
    arrays one by one.
    """
    command = ["squeue", "-hr", "--me", "-n", name, "-o", "%i %T %R"]
    return [line.split() for line in _slurm(*command).splitlines()]


def _submit(script: Path, *options: str) -> str:
    """Submit a script of this user's, and return the job's id.

    Raises:
        AiorlError: someone else can have written the script, or Slurm does not take it.
    """
    try:
        read_own(script, max_bytes=_MAX_SCRIPT_BYTES)
    except OSError as error:
        raise AiorlError(
            f"{error.filename or script} is not submitted: {error.strerror}."
        ) from error
    return _slurm("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def _slurm(*words: str) -> str:
    """Run one of Slurm's commands and return its output.

    Raises:
        AiorlError: it is missing or failed.
    """
    try:
        process = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise AiorlError(
            f"{words[0]} is not on PATH: run this on a login node of a Slurm cluster."
        ) from error
    if process.returncode:
        reason = process.stderr.strip() or process.returncode
        raise AiorlError(f"{shlex.join(words)} failed: {reason}")
    return process.stdout
