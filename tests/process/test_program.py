"""Signals, and output that never makes a program fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import asyncio
from aiorl.process.program import on_stop_signals
async def main():
    on_stop_signals(lambda name: print(name, flush=True))
    print("ready", flush=True)
    await asyncio.sleep(30)
asyncio.run(main())
"""


def test_the_first_signal_asks_and_a_later_second_one_ends_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # as `timeout` does: to the process and to its group
    assert process.stdout.readline() == "Ctrl-C\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.7)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)
def test_before_a_run_begins_a_signal_ends_the_program_with_one_line(
    number: signal.Signals, name: str
) -> None:
    code = """
import time
from aiorl.process.program import end_at_once_on_stop_signals
end_at_once_on_stop_signals("aiorl")
print("ready", flush=True)
time.sleep(30)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=5)
    assert (process.returncode, errors.count("\n")) == (0 if number == signal.SIGINT else 143, 1)
    assert f" {name} " in errors


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_closed_terminal_asks_for_the_end_unless_its_signal_is_ignored(is_ignored: bool) -> None:
    """It is ignored as under nohup."""
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" if is_ignored else ""
    with subprocess.Popen(
        [sys.executable, "-c", before + CODE], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        if is_ignored:
            process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == ("SIGTERM\n" if is_ignored else "SIGHUP\n")
        process.kill()


def test_signals_are_handled_before_anything_large_is_loaded() -> None:
    code = (
        "import sys; import aiorl.process.program; assert not {'asyncio', 'numpy', 'pydantic'} &"
        " sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loop_in_another_thread_handles_a_signal_and_the_main_thread_is_interrupted() -> None:
    code = """
import asyncio, threading, time
from aiorl.process.program import on_stop_signals_for_loop_of_another_thread
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
def break_off():
    raise KeyboardInterrupt
def say(text):  # the end of the line with it: another thread may say something at the same time
    print(text + "\\n", end="", flush=True)
on_stop_signals_for_loop_of_another_thread(loop, say, break_off)
try:
    print("ready", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    say("broken off")
while True:
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        pass
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert {process.stdout.readline() for _ in range(2)} == {"Ctrl-C\n", "broken off\n"}
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.7)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    process.stdout.close()


FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def status_with_full_output(*arguments: str) -> int:
    with FULL.open("wb") as full:
        return subprocess.run(
            [sys.executable, *arguments], stdout=full, stderr=full, timeout=60
        ).returncode


def test_prints_to_a_full_disk_are_lost_and_nothing_else() -> None:
    script = """
import logging, sys
from aiorl.process.program import keep_output_from_failing
keep_output_from_failing()
logging.basicConfig(stream=sys.stderr)
for _ in range(3):
    print("x" * 100_000)
    print("some", end="", flush=True)
    sys.stderr.write("some")
    logging.error("some")
sys.exit(7)
"""
    assert status_with_full_output("-c", script) == 7


def test_a_reader_that_leaves_is_noticed() -> None:
    script = """
import sys
from aiorl.process.program import has_reader, keep_output_from_failing
keep_output_from_failing()
had_one = has_reader()
sys.stdin.read()
print("some")
sys.exit(7 if had_one and not has_reader() else 8)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    process.communicate(b"", timeout=60)
    assert process.returncode == 7


@pytest.mark.parametrize(
    "arguments", [("aiorl.learner", "--env", "NoSuchEnv-v0"), ("aiorl.worker", "--nonsense")]
)
def test_both_programs_end_with_their_own_status_if_nothing_can_be_printed(
    arguments: tuple[str, ...],
) -> None:
    assert status_with_full_output("-m", *arguments) == 2


def test_output_arrives_line_by_line_and_survives_a_kill(tmp_path: Path) -> None:
    script = """
import os
from aiorl.process.program import keep_output_from_failing
keep_output_from_failing()
print("gr\\u00fcn")
os._exit(0)
"""
    with (tmp_path / "out").open("wb") as out:
        environment = {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": ":".join(sys.path)}
        subprocess.run(
            [sys.executable, "-c", script], stdout=out, env=environment, check=True, timeout=60
        )
    assert (tmp_path / "out").read_text(encoding="utf-8") == "gr\u00fcn\n"
