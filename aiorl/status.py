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
_UNTIL_CONNECTED_S = 0.05
"""Pause between two looks whether the connection is there."""
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
    "ms/step": "env_step_ms",
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
    account = _account_in(directory)
    changed_ns = [time_ns for _, _, time_ns in signature(directory, *FILES)]
    silent_s = max(0.0, time.time() - max(changed_ns, default=0) / 1e9)
    has_ended = Part(account).part("learner").text("end") != ""
    account["silent_s"] = silent_s
    account["is_alive"] = not has_ended and _is_alive(directory, silent_s)
    account["run_dir"] = str(directory.absolute())
    account["learner_words"] = _words(directory, "log.txt")
    newest = last_line(directory, JSONL_FILE, _RESULT_BYTES)
    account["result"] = _object_in(newest.encode()) or account.get("result")
    logs = [name for name in names_inside(directory, "logs") if name.endswith(".txt")]
    logs.sort(key=lambda name: (len(name), name))  # worker-10 after worker-9
    account["logs"] = {name: _words(directory, f"logs/{name}") for name in logs[:_MAX_LOGS]}
    return account


def _account_in(directory: Path) -> dict[str, Any]:
    """Return the account that the learner wrote; that of another run in the directory is left out."""
    try:
        run_id = run_facts(directory)["run_id"]
    except (OSError, ValueError):  # it has just begun, or is a copy of its results alone
        return {}
    content, _ = part_of(directory, STATUS_FILE, 0, 2 * MAX_BYTES)
    account = _object_in(content)
    if account.get("run_id") != run_id:
        return {"run_id": run_id}
    return account


def _is_alive(directory: Path, silent_s: float) -> bool | None:
    owner = lock_owner(directory)
    if owner is not None and owner["host"] == socket.gethostname():
        return psutil.pid_exists(owner["pid"])
    # on another host: it can be between two accounts, but also gone
    if silent_s < SILENT_S:
        return True
    return None


def _object_in(content: bytes) -> dict[str, Any]:
    """Return the object that a JSON text holds, {} if there is none."""
    try:
        value = parse_json(content, is_strict=False)
    except ValueError:
        return {}
    return Part(value).value


def signature(directory: Path, *names: str) -> tuple[tuple[int, int, int], ...]:
    """Return inode, size and time of the last change in ns of the files that exist; other contents
    have others.
    """
    signatures = []
    for name in names:
        with contextlib.suppress(OSError):
            stat = (directory / name).lstat()
            signatures.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(signatures)


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
            if start < 0:
                start = max(0, size + start)
            file.seek(start)
            return file.read(max_bytes), size
    except OSError:
        return b"", 0


def last_line(directory: Path, name: str, tail_bytes: int = 16 << 10) -> str:
    """Return the last whole line of a file that is not empty, "" if there is none."""
    tail, _ = part_of(directory, name, -tail_bytes, tail_bytes)
    whole_lines = tail.rpartition(b"\n")[0].rstrip()
    return whole_lines.rpartition(b"\n")[2].decode(errors="replace")


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
    reason = "it did not answer"

    def on_message(frames: list[memoryview]) -> None:
        nonlocal reason
        try:
            message = decode(frames)
        except RemoteProtocolError as error:
            reason = f"its answer was not understood: {error}"
            return
        if isinstance(message, Status) and isinstance(message.account, dict) and not answer.done():
            answer.set_result(message.account)
        elif isinstance(message, Refused):
            reason = f"it refused: {message.reason}; is its version of aiorl older?"

    def on_event(event: Event) -> None:
        nonlocal reason
        if event.kind is not EventKind.CONNECTED:
            reason = event.reason

    endpoint = ZmqWorkerEndpoint(places, keys=None if keys is None else load_worker_keys(keys))
    endpoint.on_message = on_message
    endpoint.on_event = on_event
    endpoint.start()
    try:
        async with asyncio.timeout(wait_s):
            while not answer.done():
                pause_s = _UNTIL_CONNECTED_S
                if endpoint.connected:
                    endpoint.send(encode(StatusRequest(DEFAULT_LIMITS.max_header_bytes // 2)))
                    pause_s = _ASK_AGAIN_S
                await asyncio.wait([answer], timeout=pause_s)
    except TimeoutError:
        problem = f"the learner at {endpoint.address} gave no account in {wait_s:g} s: {reason}"
        raise AiorlError(one_line(problem, 1000)) from None
    finally:
        await endpoint.close()
    return {**answer.result(), "silent_s": 0.0, "is_alive": True}


# Showing it
# --------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e18  # no NaN or infinity


class Part:
    """Reader of a part of an account, which may hold anything.

    Attributes:
        value: the part itself, {} if it is missing or of another kind.
    """

    def __init__(self, value: object) -> None:
        self.value: dict[Any, Any] = value if isinstance(value, dict) else {}

    def part(self, name: str) -> Part:
        return Part(self.value.get(name))

    def _list(self, name: str) -> list[Any]:
        items = self.value.get(name)
        return items if isinstance(items, list) else []

    def parts(self, name: str) -> list[Part]:
        return [Part(item) for item in self._list(name)]

    def texts(self, name: str, most: int = 100) -> list[str]:
        return [one_line(item, most) for item in self._list(name) if isinstance(item, str)]

    def items(self) -> Iterator[tuple[str, str]]:
        return ((one_line(str(name), 64), self.text(name)) for name in self.value)

    def number(self, name: str) -> float | None:
        value = self.value.get(name)
        if _is_number(value):
            return value
        return None

    def numbers(self, name: str) -> list[float]:
        return [*filter(_is_number, self._list(name))]

    def text(self, name: str, most: int = _MAX_WORDS) -> str:
        """Return a text or a number as one printable line, "" for anything else."""
        value = self.value.get(name)
        if isinstance(value, str):
            return one_line(value, most)
        number = self.number(name)
        if number is None:
            return ""
        if abs(number) >= 10 or number == int(number):
            return f"{number:,.0f}"
        return f"{number:.2g}"


def shown(account: dict[str, Any]) -> str:
    """Return an account as text for people."""
    whole = Part(account)
    learner = whole.part("learner")
    result = whole.part("result")
    mean_return = result.number("episode_reward_mean_last_100")
    dialable = ", ".join(learner.texts("addresses")[:4])
    facts = {
        "run": f"{whole.text('run_id')} in {whole.text('run_dir', 4000)}",
        "state": _state(whole),
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
        "return": "" if mean_return is None else return_text(mean_return),
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
    lines += [f"{'advice':11}{sentence}" for sentence in whole.texts("advice", _MAX_WORDS)]
    logs = [[name, words] for name, words in whole.part("logs").items()]
    if workers:
        lines += ["", *_table([[*_COLUMNS], *workers])]
    if gone:
        lines += ["", "gone:", *_table(gone)]
    if logs:
        lines += ["", "logs:", *_table(logs)]
    return "\n".join(lines) + "\n"


def _state(account: Part) -> str:
    learner = account.part("learner")
    silent_s = max(0.0, account.number("silent_s") or 0.0)
    end = learner.text("end")
    if end:
        return f"ended {_ago(silent_s)}: {end}"
    state = learner.text("state") or "nothing is known of its state"
    if account.value.get("is_alive") is False:
        state = "its process is gone"
    elif silent_s < SILENT_S:
        return state
    last_s = max(0.0, time.time() - silent_s)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last_s))
    return f"{state}; silent since {since}, for {_span(silent_s)}"


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
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(directory)  # raises PermissionError where a run can't be seen
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
    options = parser.parse(argv)
    target: str | None = options.get("target")
    if not target:
        usage_error(_PROG, "Name a run directory, or the address of a learner.")
    logging.getLogger("aiorl").addHandler(logging.NullHandler())  # the error says it all

    def show() -> None:
        account = _account_at(target, options.get("keys"))
        if options.get("json"):
            sys.stdout.write(json.dumps(to_json(account), indent=1) + "\n")
        else:
            sys.stdout.write(shown(account))

    return exit_status(show, interrupted="ended by Ctrl-C")


if __name__ == "__main__":
    sys.exit(main())
