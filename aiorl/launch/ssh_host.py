"""Program that `aiorl launch ssh` runs on each host; it comes through standard input, and needs only Python.

It takes code and keys into a directory of its own, runs one process, a learner or the parent of workers, and removes
the directory. Its standard output is the log, and at the end a learner's run directory. The process ends when this
program's standard input does, or is silent for 20 seconds: the launcher is gone, or the connection is cut.
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
from pathlib import Path
from typing import Any

GREETING = "aiorl launch: "
"""Beginning of the line with facts; a login shell may print others above it."""
RUN_FOLLOWS = b"aiorl launch: the run directory\n"
"""Line before the archive of a learner's run directory."""
CORES = "CORES"
"""Word of a command that is replaced by the number of usable cores."""
_SILENT_S, _LOOK_S = 20.0, 0.3
_SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def checked_facts(facts: Any) -> dict[str, Any]:
    """Return the facts that the program on a host sent, after checking their kinds.

    Raises:
        ValueError: one is missing or of another kind.
    """
    texts = ("place", "client", "server", "python", "digest")
    if not isinstance(facts, dict) or type(facts.get("port")) is not int or not isinstance(facts.get("missing"), list):
        raise ValueError(f"its first line makes no sense: {facts!r:.200}")
    for name in (*texts, *facts["missing"]):
        value = facts.get(name) if name in texts else name
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"its first line makes no sense: {value!r:.200}")
    return facts


def package_digest(package: Path) -> str:
    """Return a digest of a package's source files; empty if there are none."""
    digest, paths = hashlib.sha256(), sorted(package.rglob("*.py"))
    for path in paths:
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest() if paths else ""


def free_port() -> int:
    """Return a free port of this host; the next one is free, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("", port + 1))
                return port


def main() -> int:
    """Run the process that the launcher asks for, and return its exit status."""
    os.umask(0o077)
    requests = sys.stdin.buffer
    wanted = json.loads(requests.readline())
    place = Path(wanted["place"]).expanduser()
    sys.path.pop(0)  # the home directory, where a clone of aiorl may be
    found = importlib.util.find_spec("aiorl")
    where = found.submodule_search_locations[0] if found and found.submodule_search_locations else "/nowhere"
    client, _, server, _ = (os.environ.get("SSH_CONNECTION") or "127.0.0.1 0 127.0.0.1 0").split()
    facts = {
        "place": str(place), "client": client, "server": server, "port": free_port(), "python": sys.executable,
        "digest": package_digest(Path(where)),
        "missing": [name for name in wanted["modules"] if importlib.util.find_spec(name) is None],
    }  # fmt: skip
    os.write(1, f"{GREETING}{json.dumps(facts)}\n".encode())
    wanted = json.loads(requests.readline())
    kept = []
    try:
        place.joinpath("code").mkdir(parents=True, exist_ok=True)
        _remove_remains(place)
        for size in wanted["archives"]:
            with tarfile.open(fileobj=io.BytesIO(requests.read(size))) as archive:
                archive.extractall(place, **_SAFELY)
        status, is_cut = _run(place, wanted)
        kept = ["run"]
        if (place / "run").exists() and not is_cut:
            os.write(1, RUN_FOLLOWS)
            with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
                archive.add(place / "run", "run")
            sys.stdout.buffer.flush()
            kept = []
    finally:
        for path in place.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in (place, place.parent):
            with contextlib.suppress(OSError):
                path.rmdir()
    return status


def _remove_remains(place: Path) -> None:
    """Remove directories of the same kind whose program was killed; this program's is locked while it runs."""
    fcntl.flock(os.open(place / "lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
    for other in place.parent.glob(place.name.partition("+")[0] + "+*"):
        with contextlib.suppress(OSError), (other / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other)


def _run(place: Path, wanted: dict[str, Any]) -> tuple[int, bool]:
    """Run the process to its end, and return its status, and True if the launcher has fallen silent."""
    path = [str(place / "package"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.chdir(place / "code")
    command: list[str] = wanted["command"]
    if CORES in command:
        count = [sys.executable, "-P", "-c", wanted["cores"]]
        cores = int(subprocess.run(count, stdout=subprocess.PIPE, check=True).stdout) - wanted["spare"]
        command[command.index(CORES)] = str(max(1, cores))
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # the host shuts down
        signal.signal(number, lambda number, frame: asked.append(number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
    heard = time.monotonic()
    while child.poll() is None and not asked and time.monotonic() - heard < _SILENT_S:
        if select.select([0], [], [], _LOOK_S)[0]:
            heard = time.monotonic()
            if not os.read(0, 4096):
                break
    is_cut = time.monotonic() - heard >= _SILENT_S
    if child.poll() is None:
        child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(wanted["leave_s"])
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    return (128 - status if status < 0 else status), is_cut


if __name__ == "__main__":
    sys.exit(main())
