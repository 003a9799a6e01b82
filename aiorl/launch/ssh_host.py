"""Program that `aiorl launch ssh` runs on each host; it comes through standard input, and needs
only Python.

It takes code and keys into a directory of its own, runs one process, a learner or the parent of
workers, and removes the directory. Its standard output is the log, and at the end a learner's run
directory. The process ends when this program's standard input does, or is silent for 20 seconds:
the launcher is gone, or the connection is cut. If this program is killed, its guard ends the
process and removes the directory; if the host dies, the next launch here does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

GREETING = "aiorl launch: "
"""Beginning of the line with facts; a login shell may print others above it."""
RUN_FOLLOWS = b"aiorl launch: the run directory\n"
"""Line before the archive of a learner's run directory."""
PORT_IS = "aiorl launch: the learner listens on port "
"""Beginning of the line with the port of a learner that has begun to listen."""
CORES = "CORES"
"""Word of a command that is replaced by the number of usable cores."""
_SILENT_S = 20.0
_POLL_S = 0.3
_END_S = 5.0
_RUN = ("run",)
"""Directory that stays on a host unless it was sent to the launcher: a learner's run."""
_SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def checked_facts(facts: Any) -> dict[str, Any]:
    """Return the facts that the program on a host sent, after checking their kinds.

    Raises:
        ValueError: one is missing or of another kind.
    """
    if not isinstance(facts, dict) or not isinstance(facts.get("missing"), list):
        raise ValueError(f"its first line makes no sense: {facts!r:.200}")
    texts = [facts.get(name) for name in ("place", "client", "server", "python", "digest")]
    for value in (*texts, *facts["missing"]):
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"its first line makes no sense: {value!r:.200}")
    return facts


def package_digest(package: Path) -> str:
    """Return a digest of a package's source files; empty if there are none."""
    digest = hashlib.sha256()
    paths = sorted(package.rglob("*.py"))
    for path in paths:
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest() if paths else ""


def state_of(run_json: Path) -> tuple[int, int] | None:
    """Return inode and time of the last change of a run's file with its addresses; None if it does
    not exist.
    """
    try:
        stats = run_json.stat()
    except OSError:
        return None
    return stats.st_ino, stats.st_mtime_ns


def port_in(run_json: Path) -> int:
    """Return the port at which a run's learner listens; 0 if the file can't be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        port = json.loads(run_json.read_text("utf-8"))["port"]
        if type(port) is int and 0 < port < 65_535:
            return port
    return 0


def main() -> int:
    """Run the process that the launcher asks for, and return its exit status."""
    os.umask(0o077)
    requests = sys.stdin.buffer
    greeting = json.loads(requests.readline())
    place = Path(greeting["place"]).expanduser()
    sys.path.pop(0)  # the home directory, where a clone of aiorl may be
    package = Path("/nowhere")
    spec = importlib.util.find_spec("aiorl")
    if spec is not None and spec.submodule_search_locations:
        package = Path(spec.submodule_search_locations[0])
    client, _, server, _ = (os.environ.get("SSH_CONNECTION") or "127.0.0.1 0 127.0.0.1 0").split()
    facts = {
        "place": str(place),
        "client": client,
        "server": server,
        "python": sys.executable,
        "digest": package_digest(package),
        "missing": [name for name in greeting["modules"] if importlib.util.find_spec(name) is None],
    }
    os.write(1, f"{GREETING}{json.dumps(facts)}\n".encode())
    request = json.loads(requests.readline())
    remaining: tuple[str, ...] = ()
    try:
        _make(place)
        _remove_remains(place)
        for size in request["archives"]:
            with tarfile.open(fileobj=io.BytesIO(requests.read(size))) as archive:
                archive.extractall(place, **_SAFELY)
        status, is_cut = _run(place, request)
        remaining = _RUN
        if (place / "run").exists() and not is_cut:
            os.write(1, RUN_FOLLOWS)
            with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
                archive.add(place / "run", "run")
            sys.stdout.buffer.flush()
            remaining = ()
    finally:
        _remove(place, remaining)
    return status


def _make(place: Path) -> None:
    """Make the directory, locked as long as this program or its guard runs; the lock's file names
    this host.
    """
    while True:
        place.joinpath("code").mkdir(parents=True, exist_ok=True)
        lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:  # otherwise another launch has just removed it
            os.ftruncate(lock, 0)
            os.pwrite(lock, _host_name(), 0)
            os.fsync(lock)  # the directory may be another host's, too
            return
        os.close(lock)


def _host_name() -> bytes:
    return os.fsencode(socket.gethostname())


def _remove(place: Path, remaining: Collection[str]) -> None:
    """Remove a directory, except for files and directories of some names."""
    for path in place.iterdir():
        if path.name in remaining:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in (place, place.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def _remove_remains(place: Path) -> None:
    """Remove directories of any launch here whose program and guard are gone, so that no key stays;
    runs stay.

    Hosts can share the home directory, and not all file systems show them each other's locks.
    """
    for other in place.parent.parent.glob("*/*+*"):
        with contextlib.suppress(OSError), (other / "lock").open("r+b") as file:
            if file.read() != _host_name():
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(other, _RUN)


def _guarded(place: Path, child: int, leave_s: float) -> int:
    """Start a process that does this program's last duties if it is killed.

    Args:
        place: the directory to remove.
        child: id of the process group to end.
        leave_s: seconds for its orderly end.

    Returns:
        The descriptor to which this program writes a byte when it has done them itself.
    """
    reads, writes = os.pipe()
    if os.fork():
        os.close(reads)
        return writes
    try:
        os.close(writes)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # the connection ends without this process
            os.dup2(nothing, descriptor)
        if not os.read(reads, 1):
            _end(child, leave_s)
            _remove(place, _RUN)
    finally:
        os._exit(0)


def _end(group: int, leave_s: float) -> None:
    """End a process group: in order, or after some seconds by force."""
    for number, wait_s in ((signal.SIGTERM, leave_s), (signal.SIGKILL, _END_S)):
        deadline = time.monotonic() + wait_s
        try:
            os.killpg(group, number)
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(_POLL_S)
        except ProcessLookupError:
            return


def _run(place: Path, request: dict[str, Any]) -> tuple[int, bool]:
    """Run the process to its end, and return its status, and True if the launcher has fallen
    silent.
    """
    path = [str(place / "package"), os.environ.get("PYTHONPATH", "")]
    if request.get("folder"):  # of a script, which workers import
        path.insert(1, str(place / "code" / request["folder"]))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.chdir(place / "code")
    command: list[str] = request["command"]
    if CORES in command:
        count = [sys.executable, "-P", "-c", request["cores"]]
        cores = int(subprocess.run(count, stdout=subprocess.PIPE, check=True).stdout)
        command[command.index(CORES)] = str(max(1, cores - request["spare"]))
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # the host shuts down
        signal.signal(number, lambda number, frame: stop_signals.append(number))
    run_json = place / "run" / "run.json"
    former = state_of(run_json)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
    guard = _guarded(place, child.pid, request["leave_s"])
    last_sign = time.monotonic()  # of the launcher
    while child.poll() is None and not stop_signals and time.monotonic() - last_sign < _SILENT_S:
        if state_of(run_json) != former:
            port = port_in(run_json)
            if port:
                former = state_of(run_json)
                os.write(1, f"{PORT_IS}{port}\n".encode())
        if select.select([0], [], [], _POLL_S)[0]:
            last_sign = time.monotonic()
            if not os.read(0, 4096):
                break
    is_cut = time.monotonic() - last_sign >= _SILENT_S
    if child.poll() is None:
        child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(request["leave_s"])
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    with contextlib.suppress(OSError):  # the guard has been killed
        os.write(guard, b".")
    if status < 0:  # a signal has ended it; these are a shell's numbers for that
        status = 128 - status
    return status, is_cut


if __name__ == "__main__":
    sys.exit(main())
