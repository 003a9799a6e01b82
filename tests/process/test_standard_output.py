from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def status_with_full_output(*arguments: str) -> int:
    with FULL.open("wb") as full:
        return subprocess.run([sys.executable, *arguments], stdout=full, stderr=full, timeout=60).returncode


def test_prints_to_a_full_disk_are_lost_and_nothing_else() -> None:
    script = """
import logging, sys
from aiorl.process.standard_output import keep_output_from_failing
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
from aiorl.process.standard_output import has_reader, keep_output_from_failing
keep_output_from_failing()
had_one = has_reader()
sys.stdin.read()
print("some")
sys.exit(7 if had_one and not has_reader() else 8)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    process.communicate(b"", timeout=60)
    assert process.returncode == 7


@pytest.mark.parametrize("arguments", [("aiorl.learner", "--env", "NoSuchEnv-v0"), ("aiorl.worker", "--nonsense")])
def test_both_programs_end_with_their_own_status_where_nothing_can_be_printed(arguments: tuple[str, ...]) -> None:
    assert status_with_full_output("-m", *arguments) == 2


def test_what_is_printed_arrives_line_by_line_and_is_there_when_the_process_is_killed(tmp_path: Path) -> None:
    script = """
import os
from aiorl.process.standard_output import keep_output_from_failing
keep_output_from_failing()
print("gr\\u00fcn")
os._exit(0)
"""
    with (tmp_path / "out").open("wb") as out:
        environment = {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, "-c", script], stdout=out, env=environment, check=True, timeout=60)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "gr\u00fcn\n"
