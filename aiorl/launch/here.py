"""The engine for whatever starts N copies of one command: srun, mpirun, PBS, a cloud's launcher.

Each copy becomes a learner or workers, by the rank that its starter put into the environment.
Copies meet through the run's directory, which all must see, or at an address, which is given or the
starter's.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from aiorl.config.addresses import split_address, url
from aiorl.config.command_line import Parser, at_least
from aiorl.config.key_text import FILE_VARIABLE, VARIABLE, text_of_keys, write_keys
from aiorl.errors import ConfigError
from aiorl.launch.job import Job, Verb, check_printable
from aiorl.launch.starters import Copy, copy_of, main_of
from aiorl.process.imports import child_python
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
  # a script of yours in place of the learner
  mpirun -n 4 aiorl launch here --workers 8 -- --run-dir runs/mine --script my_loop.py
"""
VERBS: dict[str, Verb] = {}
PORT = 5557
"""Port of a learner that is found by its host's name."""
_POLL_S = 0.2
_REPORT_AFTER_S = 10.0


def add_arguments(parser: Parser, words: Sequence[str]) -> None:
    """Declare the engine's options in `parser`; it ignores `words`."""
    add = parser.add_argument
    add(
        "--address",
        metavar="ADDRESS",
        help=(
            "tcp://HOST:PORT of the learner, for hosts that share no directory; --keys DIR, or"
            f" {VARIABLE}, must be on each host then. (default: as the starter says)"
        ),
    )
    add(
        "--port",
        metavar="PORT",
        type=at_least(1),
        help=f"Port of the learner at the host that the starter names. (default: {PORT})",
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
    job.check_files()
    learner, worker = _commands(job, options, Copy(0, ""), _place(job, options))
    return f"# rank 0\n{shlex.join(learner)}\n# all others\n{shlex.join(worker)}\n"


def run(job: Job, options: dict[str, Any]) -> int:
    """Become the learner or the workers of `job` with `options`; returns only if that is
    impossible.

    Raises:
        ConfigError: no variable names this copy's rank, or the copies cannot meet.
        SecurityError: the keys in the environment can't be used.
    """
    job.check_files()
    copy = copy_of(os.environ)
    keys = text_of_keys(os.environ)
    if keys and job.config["keys"] is None and not job.config["insecure"]:
        # not into the run's directory: a mounted bucket knows no private files
        directory = tempfile.mkdtemp(prefix="aiorl-keys-")
        write_keys(keys, Path(directory))
        job = replace(job, config={**job.config, "keys": directory})
    place = _place(job, options)
    if copy.rank != 0 and not place.meeting:
        raise ConfigError(
            f"{copy.source} is {copy.rank}, but no variable has the address of the first host.",
            key="--address",
            hint="Give it: --address tcp://HOST:PORT.",
        )
    learner, worker = _commands(job, options, copy, place)
    if not job.config["insecure"] and job.config["keys"] is None:
        job.make_place()  # the copies meet there, and trust the keys that they find
    command = worker
    role = "workers"
    if copy.rank == 0:
        if not job.config["insecure"]:
            job.make_keys()
        command = learner
        role = "script" if job.is_script else "learner"
    else:
        _wait_for_keys(job)
    sys.stderr.write(f"aiorl: {copy.source} is {copy.rank}: {role}, {place.about}\n")
    environment = {**os.environ, **job.code_path()}
    for variable in (VARIABLE, FILE_VARIABLE):
        environment.pop(variable, None)  # environments and scripts need no keys
    os.execve(command[0], command, environment)


class _Place(NamedTuple):
    """Place where the copies meet.

    Attributes:
        meeting: place of the learner, for workers; "" if this copy can't know it and is the
            learner.
        options: options of the learner that say where it listens.
        about: the place, and who says so.
    """

    meeting: str
    options: list[str]
    about: str


def _place(job: Job, options: Mapping[str, Any]) -> _Place:
    """Return where the copies meet: at an address if each has the keys, otherwise in the run's
    directory.

    Raises:
        ConfigError: they can't meet.
    """
    check_printable(options)
    has_keys = bool(job.config["keys"] or text_of_keys(os.environ))
    is_free = has_keys or job.config["insecure"]
    address = options.get("address")
    if address is not None:
        host, port = split_address(address, key="--address")
        if not is_free:
            raise ConfigError(
                "--address needs keys that are on each host.",
                key="keys",
                hint=(
                    "Make them with `aiorl keys DIR`, copy them to each host, and give --keys DIR"
                    f" after --; or put what `aiorl keys DIR --print` prints into {VARIABLE}."
                ),
            )
        bind = ["--bind", f"tcp://0.0.0.0:{port}", "--advertise", host]
        return _Place(address, bind, f"at {address}")
    main = main_of(os.environ) if is_free else None
    if main is not None:
        port = options.get("port", job.port or PORT)
        bind = ["--bind", f"tcp://0.0.0.0:{port}"]
        if not main.host:
            return _Place("", bind, f"at port {port} of this host ({main.source})")
        meeting = url(main.host, port)
        return _Place(meeting, [*bind, "--advertise", main.host], f"at {meeting} ({main.source})")
    if job.config["run_dir"] is None:
        raise ConfigError(
            "The copies have to know where they meet.",
            key="run_dir",
            hint=(
                "Give --run-dir DIR after --, a directory on a shared file system, or --address"
                f" tcp://HOST:PORT before; or, where the starter names the first host, keys in"
                f" {VARIABLE}."
            ),
        )
    return _Place(f"run:{job.run_dir}", ["--bind", job.bind], f"in {job.run_dir}")


def _commands(
    job: Job, options: Mapping[str, Any], copy: Copy, place: _Place
) -> tuple[list[str], list[str]]:
    """Return the commands of the learner and of a copy with workers."""
    secret = [] if job.config["insecure"] else ["--keys", str(job.keys)]
    cores = _cores(copy.together)
    local_workers = job.num_workers
    if local_workers is None:
        local_workers = options.get("workers", max(1, cores - job.own_cores))
    joining = None
    if copy.copies and "workers" in options:
        joining = (copy.copies - 1) * options["workers"]
    module, *words = job.main_words(
        *place.options,
        *secret,
        *job.process_words(local_workers, joining),
        resumed=(job.run_dir / "run.json").exists(),
    )
    worker = [*child_python("aiorl"), "worker", "--connect", place.meeting, *secret]
    worker += ["--num-workers", str(options.get("workers", cores))]
    return [*child_python(module), *words], worker


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
