from __future__ import annotations

import subprocess
import sys

CODE = """
import time
from aiorl.process.parent_watch import watch_parent
watch_parent(lambda: print("lost", flush=True), grace_s=0.05)
print("ready", flush=True)
time.sleep(30)
"""


def test_the_end_of_standard_input_is_told_and_ends_the_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    process.stdin.close()
    assert process.stdout.readline() == "lost\n"
    assert process.wait(10) == 3
    process.stdout.close()
