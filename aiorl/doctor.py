"""`python -m aiorl.doctor [ADDRESS]`: check this machine, and the way to a learner, with a remedy
for each problem.

Nothing is changed, and no worker joins.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiorl import __version__
from aiorl.config.addresses import Addresses, dialable, split_address
from aiorl.config.command_line import Parser, exit_status, learner_places
from aiorl.errors import AiorlError, SecurityError
from aiorl.net.transport.security import ADMITTED, AdmittedKeys, load_learner_keys, load_worker_keys
from aiorl.net.wire.messages import PROTOCOL_VERSION
from aiorl.process.imports import child_python, find_modules_here, python_path
from aiorl.process.machine import usable_cores
from aiorl.process.program import keep_output_from_failing
from aiorl.process.versions import NEEDED, installed_version, versions
from aiorl.status import Part, status_of_learner
from aiorl.text import one_line

__all__ = ["Finding", "main"]

_ABOUT = (
    "Checks this machine, and the way from here to a learner. Each problem has its remedy on the"
    " same line."
)
_EXAMPLES = """
Examples:
  # a host for workers or the learner
  python -m aiorl.doctor
  # a worker's host, and whether it can join this learner
  python -m aiorl.doctor tcp://learner-host:5557 --keys keys
"""
_PORT = 5557
_MIN_FILES = 256
_GOOD_FILES = 4096
_GOOD_FREE = 1 << 30
_DIAL_S = 3.0
_ANSWER_S = 5.0
_APART_S = 2.0
_COMPILE_S = 300.0
_NO_GPU = 3
"""Exit status of `aiorl.learning.gpu_check`, which is not imported, since it needs TensorFlow."""
_GPU_DEVICE = "GPU"
_GOOD_CUDNN = "nvidia-cudnn-cu12>=9.24"
_NOT_SYNCHRONIZED = 5
"""Result of adjtimex, TIME_ERROR: nothing keeps the clock right."""
OK = "ok"
WARN = "warn"
FAIL = "fail"


class Finding(NamedTuple):
    """Result of one check.

    Attributes:
        level: "ok", "warn" or "fail".
        check: name of the check.
        text: a sentence or some facts.
        remedy: what the user can do, "" if there is nothing to do.
    """

    level: str
    check: str
    text: str
    remedy: str = ""


# This machine
# --------------------------------------------------------------------------------------------------


def _software() -> Finding:
    text = (
        f"aiorl {__version__} in {Path(__file__).parent}, Python {platform.python_version()},"
        f" protocol {PROTOCOL_VERSION}"
    )
    return Finding(OK, "software", text)


def _packages() -> Finding:
    lines = (Path(__file__).parent / "constraints.txt").read_text("utf-8").split()
    installed = versions()
    tested = dict(line.split("==") for line in lines)
    missing = [name for name in NEEDED if not installed.get(name, "")]
    untested = [
        f"{name} {version} (tested: {tested[name]})"
        for name, version in installed.items()
        if name in tested and version.split(".")[0] != tested[name].split(".")[0]
    ]
    if missing:
        return Finding(
            FAIL, "packages", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    if untested:
        return Finding(
            WARN, "packages", ", ".join(untested), "install with `-c aiorl/constraints.txt`"
        )
    if importlib.util.find_spec("tensorflow") is None:
        return Finding(
            OK, "packages", "for workers only", "for a learner: pip install '.[learner]'"
        )
    return Finding(OK, "packages", "for learner and workers")


def _cores() -> Finding:
    machine = os.cpu_count() or 1
    usable = usable_cores()
    text = f"{usable} of {machine} can be used"
    if usable < machine:
        return Finding(
            WARN,
            "cores",
            f"{text}: affinity or a control group limits them",
            f"--num-workers {usable}",
        )
    return Finding(OK, "cores", text)


def _files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding(OK, "files", "no limit")
    text = f"up to {hard} open files"
    if hard >= _GOOD_FILES:
        return Finding(OK, "files", text)
    return Finding(
        FAIL if hard < _MIN_FILES else WARN,
        "files",
        f"{text}: a learner takes at most about {max(1, hard // 4)} workers",
        f"raise the hard limit: `ulimit -Hn {4 * _GOOD_FILES}` as root, or limits.conf",
    )


def _room() -> Finding:
    remedy = "free some space, or set TMPDIR to a directory that you can write"
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile():
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            FAIL, "room", f"no temporary file can be written: {error.strerror or error}", remedy
        )
    text = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < _GOOD_FREE:
        return Finding(WARN, "room", text, remedy)
    return Finding(OK, "room", text)


def _name() -> Finding:
    name = socket.gethostname()
    # the last one is the name itself
    interfaces = [split_address(address)[0] for address in dialable("tcp://0.0.0.0:1")[:-1]]
    from_elsewhere = f"other hosts dial {', '.join(interfaces) or 'no address'}"
    try:
        infos = socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError as error:
        text = f"{name} has no address ({error.strerror}); {from_elsewhere}"
        address = next(iter(interfaces), "ADDRESS")
        return Finding(WARN, "name", text, f"for a learner here: --advertise {address}")
    return Finding(OK, "name", f"{name} is {_hosts_in(infos)} here; {from_elsewhere}")


def _hosts_in(infos: Sequence[tuple[Any, ...]]) -> str:
    """Return the addresses among the answers of `socket.getaddrinfo`, sorted."""
    return ", ".join(sorted({str(address[0]) for *_, address in infos}))


def _ports() -> Finding:
    in_use = []
    for port in (_PORT, _PORT + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                in_use.append(str(port))
    if in_use:
        return Finding(
            WARN,
            "ports",
            f"{' and '.join(in_use)} in use",
            "for another learner here: --bind with another port",
        )
    return Finding(OK, "ports", f"{_PORT} and {_PORT + 1} are free for a learner here")


def _clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    state = None
    with contextlib.suppress(OSError, AttributeError):  # another system
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state == _NOT_SYNCHRONIZED:
        remedy = "run chrony or systemd-timesyncd; only times in logs depend on it"
        return Finding(WARN, "clock", f"{now}; nothing seems to keep it right", remedy)
    return Finding(OK, "clock", now)


def _gpu_names() -> list[str]:
    """Return the names of this host's NVIDIA GPUs."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.splitlines()


def check_gpus() -> Iterator[Finding]:
    """Compile a small convolution with XLA where there are a GPU and TensorFlow, as updates with
    images do.
    """
    names = _gpu_names()
    if not names or importlib.util.find_spec("tensorflow") is None:
        return
    text = ", ".join(one_line(name, 100) for name in names)
    try:
        result = subprocess.run(
            [*child_python("aiorl.learning.gpu_check"), _GPU_DEVICE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_S,
            check=False,
            env={**os.environ, **python_path()},
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            FAIL, "gpu", f"{text}: no convolution was compiled in {_COMPILE_S:g} s", "set xla: off"
        )
        return
    if result.returncode == _NO_GPU:
        yield Finding(
            WARN, "gpu", f"{text}, but TensorFlow sees no GPU", "pip install 'aiorl[learner-gpu]'"
        )
    elif result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line and "errors_impl" in line]
        error = next(iter(errors or lines[-1:]), f"status {result.returncode}")
        cudnn = installed_version("nvidia-cudnn-cu12") or "of the system"
        yield Finding(
            FAIL,
            "gpu",
            f"{text}: with cuDNN {cudnn}, a convolution does not compile with XLA:"
            f" {one_line(error, 300)}",
            f"pip install '{_GOOD_CUDNN}', or set xla: off",
        )
    else:
        yield Finding(OK, "gpu", f"{text}; a convolution compiles with XLA")


# Keys, and the way to a learner
# ------------------------------------------------------------------------------


def _keys(path: Path) -> Finding:
    """Check permissions and contents, and that the keys in one directory belong together."""
    learner = worker = None
    learner_file = path / "learner.key_secret"
    owners = []
    try:
        if learner_file.exists():
            learner = load_learner_keys(path)
        if learner is None or set(path.glob("*.key_secret")) - {learner_file}:
            worker = load_worker_keys(path)
        if learner is not None:
            admitted = AdmittedKeys(learner.admitted).refresh()
            owners.append(f"a learner that admits {', '.join(admitted.values()) or 'no one'}")
            if worker is not None and worker.public_key not in admitted:
                remedy = f"cp {worker.public_key_file} {path / ADMITTED}"
                return Finding(FAIL, "keys", f"{worker.public_key_file} is not admitted", remedy)
            if worker is not None and worker.learner_key != learner.public_key:
                remedy = "make new ones in an empty directory: aiorl keys DIR"
                return Finding(
                    FAIL, "keys", f"{path}/learner.key belongs to another learner", remedy
                )
        if worker is not None:
            owners.append("a worker")
    except SecurityError as error:
        return Finding(FAIL, "keys", error.message, error.hint)
    return Finding(OK, "keys", f"{path} has those of {' and '.join(owners)}")


def _way(places: Sequence[str], keys: Path | None) -> Iterator[Finding]:
    addresses = Addresses(places)
    address = addresses.next()
    if not address:
        problem = addresses.problem or f"{', '.join(places)} names no address"
        yield Finding(
            FAIL, "address", problem, "start the learner, or give its address: tcp://HOST:PORT"
        )
        return
    host, port = split_address(address)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"{host} has no address here: {error.strerror or error}"
        yield Finding(
            FAIL, "address", text, f"give an IP address, or add {host} to DNS or /etc/hosts"
        )
        return
    yield Finding(OK, "address", f"{address}, {_hosts_in(infos)}")
    dialled = [_dial(host, number) for number in (port, port + 1)]
    yield from dialled
    if all(finding.level == OK for finding in dialled):
        yield from _learner(address, keys)


def _dial(host: str, port: int) -> Finding:
    began = time.monotonic()
    try:
        socket.create_connection((host, port), _DIAL_S).close()
    except TimeoutError:
        text = f"no answer from {host} port {port} within {_DIAL_S:g} s"
        return Finding(
            FAIL,
            "port",
            text,
            "let a firewall pass this port, or give an address of the right network",
        )
    except OSError as error:
        remedy = "start the learner, with --bind tcp://0.0.0.0:PORT for other hosts"
        return Finding(FAIL, "port", f"{host} port {port}: {error.strerror or error}", remedy)
    took_ms = 1000 * (time.monotonic() - began)
    return Finding(OK, "port", f"{host} port {port} answers in {took_ms:.1f} ms")


def _learner(address: str, keys: Path | None) -> Iterator[Finding]:
    """Ask the learner as `aiorl status` does, and compare its answer with this host.

    Its answer may be anything.
    """
    try:
        account = asyncio.run(status_of_learner([address], keys, wait_s=_ANSWER_S))
    except AiorlError as error:
        remedy = (
            "give keys of this learner, --keys DIR, and install the same version of aiorl on both"
            " sides"
        )
        yield Finding(FAIL, "learner", str(error), remedy)
        return
    accepts = "" if keys is None else ", accepts these keys"
    text = (
        f"it answers{accepts}, speaks protocol {PROTOCOL_VERSION}, run {_text(account, 'run_id')}"
    )
    yield Finding(OK, "learner", text)
    learner = Part(account).part("learner").value
    learner_versions = learner.get("versions")
    if isinstance(learner_versions, dict):
        yield _same_versions(learner_versions)
    module, colon, _ = _text(learner, "env").partition(":")
    if colon and re.fullmatch(r"[\w.]+", module):
        yield check_code(module)
    learner_time = account.get("time")
    if isinstance(learner_time, float):
        yield _same_time(learner_time)


def _same_versions(learner_versions: dict[str, Any]) -> Finding:
    differences = [
        f"{name} {version} here, {_text(learner_versions, name)} there"
        for name, version in versions().items()
        if version != learner_versions.get(name)
    ]
    if not differences:
        return Finding(OK, "versions", "the same there")
    remedy = "install the same versions on both sides"
    return Finding(WARN, "versions", ", ".join(differences), remedy)


def _same_time(learner_time: float) -> Finding:
    ahead_s = time.time() - learner_time
    direction = "ahead of" if ahead_s > 0 else "behind"
    text = f"{abs(ahead_s):.1f} s {direction} the learner's"
    if abs(ahead_s) <= _APART_S:
        return Finding(OK, "clocks", text)
    remedy = "run chrony or systemd-timesyncd on both hosts; only times in logs depend on it"
    return Finding(WARN, "clocks", text, remedy)


def _text(facts: dict[str, Any], name: str) -> str:
    """Return a text that a learner sent, fit to be shown."""
    return one_line(str(facts.get(name, "none")), 100)


def check_code(module: str) -> Finding:
    """Check that a worker here can import the module of an environment."""
    remedy = f"start workers in the directory that has {module}, or set PYTHONPATH"
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(module) is not None:
            return Finding(OK, "code", f"{module} of the environment is found here")
    return Finding(
        FAIL, "code", f"there is no module {module} here, which has the environment", remedy
    )


# The command
# --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings, and return the exit status: 0, or 1 if a check failed, or 2 for wrong
    usage.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    parser = Parser("python -m aiorl.doctor", "[ADDRESS] [options]", _ABOUT, _EXAMPLES)
    parser.add_argument(
        "address",
        metavar="ADDRESS",
        nargs="?",
        type=learner_places,
        default=None,
        help="The learner: tcp://HOST:PORT, run:DIR or @FILE.",
    )
    parser.add_argument(
        "--keys", metavar="DIR", type=Path, help="Keys of this host, which are checked too."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print a JSON list of objects with level, check, text and remedy.",
    )
    logging.getLogger("aiorl").addHandler(logging.NullHandler())  # the findings say it
    options = parser.parse(argv)
    places = options.get("address") or []
    return exit_status(lambda: _report(places, options.get("keys"), is_json="json" in options))


def _findings(places: Sequence[str], keys: Path | None) -> Iterator[Finding]:
    for check in (_software, _packages, _cores, _files, _room, _name, _ports, _clock):
        yield check()
    yield from check_gpus()
    if keys is not None:
        yield _keys(keys)
    if places:
        yield from _way(places, keys)


def _report(places: Sequence[str], keys: Path | None, *, is_json: bool) -> int:
    findings = []
    for finding in _findings(places, keys):
        findings.append(finding)
        if is_json:
            continue
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        sys.stdout.write(f"{finding.level:5}{finding.check:10}{finding.text}{remedy}\n")
        sys.stdout.flush()
    if is_json:
        sys.stdout.write(json.dumps([finding._asdict() for finding in findings], indent=1) + "\n")
    return int(any(finding.level == FAIL for finding in findings))


if __name__ == "__main__":
    keep_output_from_failing()
    find_modules_here()
    sys.exit(main())
