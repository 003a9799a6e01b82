"""The engine for whatever starts N copies of one command: srun, mpirun, PBS, a cloud's launcher.

Each copy becomes a learner or workers, by the rank that its starter put into the environment.
Copies meet through the run's directory, which all must see, or at an address.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aiorl.config.addresses import split_address
from aiorl.config.command_line import Parser, at_least
from aiorl.errors import ConfigError
from aiorl.launch.job import Job, Verb, check_printable
from aiorl.process.imports import child_python, python_path
from aiorl.process.machine import usable_cores

__all__ = ["ABOUT", "EXAMPLES", "VERBS", "add_arguments", "artefact", "run"]

ABOUT = (
    "Makes one of N copies of this command the learner, and the others workers; srun, mpirun, PBS"
    " or a cloud's launcher starts the copies. They meet in the run's directory on a shared file"
    " system, or at --address."
)
EXAMPLES = """
Examples:
  # copies with a shared directory
  mpirun -n 4 aiorl launch here -- --env CartPole-v1 --run-dir runs/mine
  # one copy on each node, with 16 cores
  srun -N 4 --ntasks-per-node 1 -c 16 aiorl launch here -- --env CartPole-v1 --run-dir runs/mine
  # the learner's host1, and other hosts, without a shared directory
  RANK=0 aiorl launch here --address tcp://host1:5557 -- --env CartPole-v1 --keys keys
  RANK=1 aiorl launch here --address tcp://host1:5557 -- --env CartPole-v1 --keys keys
"""
VERBS: dict[str, Verb] = {}
RANK_VARIABLES = (
    ("RANK", "LOCAL_WORLD_SIZE"),  # torchrun and many others, or the user
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PALS_RANKID", "PALS_LOCAL_SIZE"),  # Cray's PALS
    ("PMI_RANK", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PMIX_RANK", ""),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),  # LSF's jsrun
    ("FLUX_TASK_RANK", ""),
    ("SLURM_PROCID", "SLURM_TASKS_PER_NODE"),
    ("PBS_NODENUM", ""),  # pbsdsh
    ("JOB_COMPLETION_INDEX", ""),  # an indexed Job of Kubernetes
    ("AWS_BATCH_JOB_NODE_INDEX", ""),
    ("SKYPILOT_NODE_RANK", ""),
    ("NODE_RANK", ""),
)
"""Variables with a copy's rank, and with the number of copies on its host; the first that is set
counts.

Those of MPI come first, because schedulers start its daemons and set their own variables for them.
"""
_LEARNER_CORES = 2
_POLL_S = 0.2
_REPORT_AFTER_S = 10.0


class _Copy(NamedTuple):
    """Rank of this copy, counted from 0, the variable that names it, and the copies on this
    host.
    """

    rank: int
    variable: str
    together: int


def add_arguments(parser: Parser, words: Sequence[str]) -> None:
    """Declare the engine's options in `parser`; it ignores `words`."""
    add = parser.add_argument
    add(
        "--address",
        metavar="ADDRESS",
        help=(
            "tcp://HOST:PORT of the learner, for hosts that share no directory; --keys DIR must be"
            " on each host then."
        ),
    )
    add(
        "--workers",
        metavar="N",
        type=at_least(1),
        help=(
            "Workers of each copy. (default: the cores of its host for it, less two for the"
            " learner)"
        ),
    )


def artefact(job: Job, options: dict[str, Any]) -> str:
    """Return the commands that `job` with `options` becomes on rank 0 and on all others of this
    host.
    """
    learner, worker = _commands(job, options, _Copy(0, "", 1), is_resumed=_has_run(job))
    return f"# rank 0\n{shlex.join(learner)}\n# all others\n{shlex.join(worker)}\n"


def run(job: Job, options: dict[str, Any]) -> int:
    """Become the learner or the workers of `job` with `options`; returns only if that is
    impossible.

    Raises:
        ConfigError: no variable names this copy's rank, or the copies cannot meet.
    """
    copy = _copy(os.environ)
    if (
        not job.config["insecure"]
        and job.config["keys"] is None
        and job.config["run_dir"] is not None
    ):
        job.make_place()  # the copies meet there, and trust the keys that they find
    learner, worker = _commands(job, options, copy, is_resumed=_has_run(job))
    role = "learner" if copy.rank == 0 else "workers"
    if copy.rank == 0:
        if not job.config["insecure"]:
            job.make_keys()
        command = learner
    else:
        _wait_for_keys(job)
        command = worker
    sys.stderr.write(f"aiorl: {copy.variable} is {copy.rank}: {role}\n")
    os.execve(command[0], command, {**os.environ, **python_path()})


def _commands(
    job: Job, options: Mapping[str, Any], copy: _Copy, *, is_resumed: bool
) -> tuple[list[str], list[str]]:
    """Return the commands of the learner and of a copy with workers."""
    check_printable(options)
    address = options.get("address")
    secret = [] if job.config["insecure"] else ["--keys", str(job.keys)]
    if address is not None:
        host, port = split_address(address, key="--address")
        if secret and job.config["keys"] is None:
            raise ConfigError(
                "--address needs keys that are on each host.",
                key="keys",
                hint=(
                    "Make them with `aiorl keys DIR`, copy them to each host, and give --keys DIR"
                    " after --."
                ),
            )
        meeting = address
        place = ["--bind", f"tcp://0.0.0.0:{port}", "--advertise", host]
    elif job.config["run_dir"] is None:
        raise ConfigError(
            "The copies have to know where they meet.",
            key="run_dir",
            hint=(
                "Give --run-dir DIR after --, a directory on a shared file system, or --address"
                " tcp://HOST:PORT before."
            ),
        )
    else:
        meeting = f"run:{job.run_dir}"
        place = ["--bind", job.bind]
    cores = _cores(copy.together)
    local_workers = job.num_workers
    if local_workers is None:
        local_workers = options.get("workers", max(1, cores - _LEARNER_CORES))
    python = child_python("aiorl")
    learner = [
        *python,
        "train",
        *job.learner_words(resumed=is_resumed),
        *place,
        *secret,
        "--num-workers",
        str(local_workers),
    ]
    worker = [*python, "worker", "--connect", meeting, *secret]
    return learner, [*worker, "--num-workers", str(options.get("workers", cores))]


def _copy(environment: Mapping[str, str]) -> _Copy:
    for variable, together in RANK_VARIABLES:
        rank = environment.get(variable, "")
        if rank.isdecimal():
            number = environment.get(together, "1").partition("(")[0]  # Slurm writes 2(x3),1
            return _Copy(int(rank), variable, int(number) if number.isdecimal() else 1)
    names = ", ".join(name for name, _ in RANK_VARIABLES)
    raise ConfigError(
        f"No variable says which copy this is: none of {names} is set.",
        key="RANK",
        hint=(
            "Start the copies with srun or mpirun, or set RANK to 0 for the learner and to 1, 2,"
            " ... for the others."
        ),
    )


def _cores(together: int) -> int:
    """Return the cores for one of the copies on this host; starters that bind each to its own leave
    it fewer.
    """
    cores = usable_cores()
    cores_of_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if cores_of_task.isdecimal():
        return max(1, min(cores, int(cores_of_task)))
    if cores == os.cpu_count():
        return max(1, cores // together)
    return cores


def _has_run(job: Job) -> bool:
    return (job.run_dir / "run.json").exists()


def _wait_for_keys(job: Job) -> None:
    """Wait until the learner's copy has made the keys of this run."""
    report_at = time.monotonic() + _REPORT_AFTER_S
    while not job.config["insecure"] and not all(
        (job.keys / name).exists() for name in ("worker.key_secret", "learner.key")
    ):
        if time.monotonic() > report_at:
            sys.stderr.write(
                f"aiorl: waiting for the copy with rank 0 to make keys in {job.keys}\n"
            )
            report_at += 60.0
        time.sleep(_POLL_S)
