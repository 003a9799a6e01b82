from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
import aiorl.acting.acting_graph
from aiorl.process.forked_child import keep_children_out

def fork(leave):
    child = os.fork()
    if child == 0:
        leave()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return "it did not end"

def leave():
    sys.exit(7)

executor = ThreadPoolExecutor(1)
leaves = (leave, sys.exit, lambda: sys.exit("why"), lambda: 1 / 0)
print([executor.submit(keep_children_out, fork, leave).result() for leave in leaves], fork(leave))
"""


def test_a_forked_child_ends_with_its_own_status_whichever_thread_forked_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[7, 0, 1, 1] 7\n"
    assert "why\n" in done.stderr
    assert "ZeroDivisionError" in done.stderr
