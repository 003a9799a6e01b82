"""`aiorl status RUN_DIR|ADDRESS`: what runs where, rates, lag, and the last words of each worker.

A run directory is read without asking anyone, so it works for a run that has ended, too. An address
is asked over the network, like a worker would connect. Both give the account of
`aiorl.run.overview`, of which nothing is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from aiorl.acting.run_lock import lock_owner
from aiorl.config.addresses import RUN_FILE, places_of, run_facts
from aiorl.config.command_line import Parser, exit_status, usage_error
from aiorl.config.files import names_inside, open_inside, parse_json
from aiorl.config.layers import CONFIG_FILE
from aiorl.errors import AiorlError, ConfigError, RemoteProtocolError
from aiorl.run.overview import MAX_BYTES, STATUS_FILE
from aiorl.run.report.loggers import JSONL_FILE, to_json
from aiorl.text import one_line, return_text

__all__ = ["main", "status_of_learner", "status_of_run"]

_PROG = "python -m aiorl.status"
_ABOUT = "Show what runs where, how fast, how far behind, and what each worker said last."
_EXAMPLES = """
Examples:
  # a run on this host or on a shared disk, running or ended
  python -m aiorl.status runs/mine
  # the learner itself, from any host
  python -m aiorl.status tcp://learner-host:5557 --keys keys
  # for programs
  python -m aiorl.status runs/mine --json
"""
_WAIT_S = 10.0
_ASK_AGAIN_S = 1.0
SILENT_S = 20.0
"""Age of an account from which its learner counts as silent; it writes one every few seconds."""
_MAX_LOGS = 4096
_MAX_WORDS = 300
_RESULT_BYTES = 1 << 20
FILES = (RUN_FILE, STATUS_FILE, JSONL_FILE, CONFIG_FILE, "log.txt")
"""Files of a run directory that change while it runs."""
_COLUMNS = {
    "#": "slot",
    "host": "host",
    "pid": "pid",
    "doing": "state",
    "env steps": "env_steps",
    "steps/s": "env_steps_per_s",
    "lag": "lag",
    "heard": "heard_s",
    "last words": "words",
}


# Getting an account
# --------------------------------------------------------------------------------------------------


def is_run(directory: Path) -> bool:
    """Return True if a directory has files of a run."""
    return any(os.path.isfile(directory / name) for name in (RUN_FILE, JSONL_FILE, CONFIG_FILE))


def status_of_run(directory: Path) -> dict[str, Any]:
    """Return the account of a run from its files.

    Args:
        directory: the run directory; files can be missing or damaged.

    Returns:
        The account, with its age ``silent_s`` and ``is_alive`` (None if unknown); ``result`` is the
        newest one.
    """
    account: dict[str, Any] = {}
    with contextlib.suppress(
        OSError, ValueError
    ):  # it has just begun, or is a copy of its results alone
        account["run_id"] = run_facts(directory)["run_id"]
        found = _object_in(part_of(directory, STATUS_FILE, 0, 2 * MAX_BYTES)[0])
        account = found if found.get("run_id") == account["run_id"] else account
    last = max((changed for _, _, changed in signature(directory, *FILES)), default=0) / 1e9
    account["silent_s"] = max(0.0, time.time() - last)
    has_ended = Part(account).part("learner").text("end") != ""
    account["is_alive"] = False if has_ended else _is_alive(directory, account["silent_s"])
    account["run_dir"] = str(directory.absolute())
    account["learner_words"] = _words(directory, "log.txt")
    newest = last_line(directory, JSONL_FILE, _RESULT_BYTES)
    account["result"] = _object_in(newest.encode()) or account.get("result")
    logs = [name for name in names_inside(directory, "logs") if name.endswith(".txt")]
    names = sorted(logs, key=lambda name: (len(name), name))
    account["logs"] = {name: _words(directory, f"logs/{name}") for name in names[:_MAX_LOGS]}
    return account


def _is_alive(directory: Path, silent_s: float) -> bool | None:
    owner = lock_owner(directory)
    if owner is not None and owner["host"] == socket.gethostname():
        return psutil.pid_exists(owner["pid"])
    return True if silent_s < SILENT_S else None


def _object_in(content: bytes) -> dict[str, Any]:
    """Return the object that a JSON text holds, {} if there is none."""
    with contextlib.suppress(ValueError):
        if isinstance(found := parse_json(content, is_strict=False), dict):
            return found
    return {}


def signature(directory: Path, *names: str) -> tuple[tuple[int, int, int], ...]:
    """Return inode, size and time of the last change in ns of the files that exist; other contents
    have others.
    """
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            stat = (directory / name).lstat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def part_of(directory: Path, name: str, start: int, max_bytes: int) -> tuple[bytes, int]:
    """Return a part of a file, and the file's size; b"" and 0 if it can't be read, or is behind a
    link.

    Args:
        directory: the run directory.
        name: path of the file inside it.
        start: first byte of the part; a negative one counts from the end.
        max_bytes: most bytes of the part.
    """
    try:
        with open_inside(directory, name) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start if start >= 0 else max(0, size + start))
            return file.read(max_bytes), size
    except OSError:
        return b"", 0


def last_line(directory: Path, name: str, tail_bytes: int = 16 << 10) -> str:
    """Return the last whole line of a file that is not empty, "" if there is none."""
    tail, _ = part_of(directory, name, -tail_bytes, tail_bytes)
    return tail.rpartition(b"\n")[0].rstrip().rpartition(b"\n")[2].decode(errors="replace")


def _words(directory: Path, name: str) -> str:
    return one_line(last_line(directory, name), _MAX_WORDS)


async def status_of_learner(
    places: Sequence[str], keys: Path | None, *, wait_s: float = _WAIT_S
) -> dict[str, Any]:
    """Ask a learner for the account of its run.

    Args:
        places: where it is, as `places_of` returns them.
        keys: CURVE keys of a worker, or None.
        wait_s: seconds to wait for an answer.

    Raises:
        ConfigError: the keys cannot be used.
        AiorlError: there is no answer, or none that can be read.
    """
    from aiorl.net.transport.endpoint import Event, EventKind
    from aiorl.net.transport.security import load_worker_keys
    from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint
    from aiorl.net.wire.decoding import decode
    from aiorl.net.wire.encoding import encode
    from aiorl.net.wire.format import DEFAULT_LIMITS
    from aiorl.net.wire.messages import Refused, Status, StatusRequest

    answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    reason = ["it did not answer"]

    def hear(frames: list[memoryview]) -> None:
        try:
            message = decode(frames)
        except RemoteProtocolError as error:
            reason.append(f"its answer was not understood: {error}")
            return
        if isinstance(message, Status) and isinstance(message.account, dict) and not answer.done():
            answer.set_result(message.account)
        elif isinstance(message, Refused):
            reason.append(f"it refused: {message.reason}; is its version of aiorl older?")

    def note(event: Event) -> None:
        if event.kind is not EventKind.CONNECTED:
            reason.append(event.reason)

    endpoint = ZmqWorkerEndpoint(places, keys=None if keys is None else load_worker_keys(keys))
    endpoint.on_message = hear
    endpoint.on_event = note
    endpoint.start()
    try:
        async with asyncio.timeout(wait_s):
            while not answer.done():
                if endpoint.connected:
                    endpoint.send(encode(StatusRequest(DEFAULT_LIMITS.max_header_bytes // 2)))
                await asyncio.wait([answer], timeout=_ASK_AGAIN_S if endpoint.connected else 0.05)
    except TimeoutError:
        said = f"the learner at {endpoint.address} gave no account in {wait_s:g} s: {reason[-1]}"
        raise AiorlError(one_line(said, 1000)) from None
    finally:
        await endpoint.close()
    return {**answer.result(), "silent_s": 0.0, "is_alive": True}


# Showing it
# --------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    )  # no NaN or infinity


class Part:
    """Reader of a part of an account, which may hold anything.

    Attributes:
        value: the part itself, {} if it is missing or of another kind.
    """

    def __init__(self, value: object) -> None:
        self.value: dict[Any, Any] = value if isinstance(value, dict) else {}

    def part(self, name: str) -> Part:
        return Part(self.value.get(name))

    def parts(self, name: str) -> list[Part]:
        found = self.value.get(name)
        return [Part(each) for each in found] if isinstance(found, list) else []

    def texts(self, name: str) -> list[str]:
        found = self.value.get(name)
        return (
            [one_line(each, 100) for each in found if isinstance(each, str)]
            if isinstance(found, list)
            else []
        )

    def items(self) -> Iterator[tuple[str, str]]:
        return ((one_line(str(name), 64), self.text(name)) for name in self.value)

    def number(self, name: str) -> float | None:
        found = self.value.get(name)
        return found if _is_number(found) else None

    def numbers(self, name: str) -> list[float]:
        found = self.value.get(name)
        return [*filter(_is_number, found)] if isinstance(found, list) else []

    def text(self, name: str, most: int = _MAX_WORDS) -> str:
        """Return a text or a number as one printable line, "" for anything else."""
        found = self.value.get(name)
        number = self.number(name)
        if number is not None:
            return (
                f"{number:,.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.2g}"
            )
        return one_line(found, most) if isinstance(found, str) else ""


def shown(account: dict[str, Any]) -> str:
    """Return an account as text for people."""
    whole = Part(account)
    learner = Part(account).part("learner")
    result = whole.part("result")
    silent_s = max(0.0, whole.number("silent_s") or 0.0)
    state = learner.text("state") or "nothing is known of its state"
    if learner.text("end"):
        state = f"ended {_ago(silent_s)}: {learner.text('end')}"
    elif account.get("is_alive") is False or silent_s >= SILENT_S:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(0.0, time.time() - silent_s)))
        state = "its process is gone" if account.get("is_alive") is False else state
        state += f"; silent since {since}, for {_span(silent_s)}"
    dialable = ", ".join(learner.texts("addresses")[:4])
    facts = {
        "run": f"{whole.text('run_id')} in {whole.text('run_dir', 4000)}",
        "state": state,
        "learner": (
            f"{learner.text('host') or '-'} (pid {learner.text('pid').replace(',', '') or '-'})"
            f" {dialable}"
        ),
        "trained": (
            f"{result.text('env_steps_trained_total') or 0} env steps "
            f"in {result.text('updates_total') or 0} updates"
        ),
        "rates": (
            f"{result.text('sampled_steps_per_s') or '-'} sampled,"
            f" {result.text('trained_steps_per_s') or '-'} trained env steps/s"
        ),
        "lag": ", ".join(f"{name} {value}" for name, value in whole.part("policy_lag").items()),
        "return": (
            ""
            if (mean := result.number("episode_reward_mean_last_100")) is None
            else return_text(mean)
        ),
        "workers": (
            f"{whole.text('num_workers') or 0}, and {whole.text('num_gone') or 0} that are gone"
        ),
        "last words": whole.text("learner_words"),
    }
    lines = [f"{name:11}{text}".rstrip() for name, text in facts.items() if text]
    workers = [_row(part) for part in whole.parts("workers")]
    gone = [
        [
            part.text("slot"),
            part.text("host"),
            _ago(time.time() - (part.number("time") or 0.0)),
            part.text("words"),
        ]
        for part in whole.parts("gone")[:8]
    ]
    logs = [[name, words] for name, words in whole.part("logs").items()]
    if workers:
        lines += ["", *_table([[*_COLUMNS], *workers])]
    for title, rows in ("gone:", gone), ("logs:", logs):
        if rows:
            lines += ["", title, *_table(rows)]
    return "\n".join(lines) + "\n"


def _row(part: Part) -> list[str]:
    texts = {name: part.text(name) for name in _COLUMNS.values()}
    texts["pid"] = texts["pid"].replace(",", "")
    texts["heard_s"] = _ago(part.number("heard_s") or 0.0)
    return list(texts.values())


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(60, max(map(len, column))) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _span(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def _ago(seconds: float) -> str:
    return f"{_span(max(0.0, seconds))} ago"


def _account_at(target: str, keys: Path | None) -> dict[str, Any]:
    if target.startswith(("tcp:", "run:", "@", "ipc:")):
        return asyncio.run(status_of_learner(places_of(target), keys))
    directory = Path(target).expanduser()
    if not is_run(directory):
        hint = "Give a run directory, or tcp://HOST:PORT."
        raise ConfigError(f"{directory} has no files of a run.", key="RUN_DIR", hint=hint)
    return status_of_run(directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Show an account, and return the exit status: 0 shown, 1 no answer, 2 wrong usage.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    parser = Parser(_PROG, "RUN_DIR|ADDRESS [options]", _ABOUT, _EXAMPLES)
    parser.add_argument(
        "target",
        metavar="RUN_DIR|ADDRESS",
        nargs="?",
        help="A run directory; or the learner: tcp://HOST:PORT, run:DIR or @FILE.",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        type=Path,
        help="CURVE keys of a worker, to ask a learner with keys.",
    )
    parser.add_argument("--json", action="store_true", help="Print the whole account as JSON.")
    found = parser.parse(sys.argv[1:] if argv is None else argv)
    target: str | None = found.get("target")
    if not target:
        usage_error(_PROG, "Name a run directory, or the address of a learner.")
    logging.getLogger("aiorl").addHandler(logging.NullHandler())  # the error says it all

    def do() -> None:
        account = _account_at(target, found.get("keys"))
        sys.stdout.write(
            json.dumps(to_json(account), indent=1) + "\n" if found.get("json") else shown(account)
        )

    return exit_status(do, interrupted="ended by Ctrl-C")


if __name__ == "__main__":
    sys.exit(main())
