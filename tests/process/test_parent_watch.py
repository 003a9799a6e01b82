from __future__ import annotations

import subprocess
import sys

CODE = """
import time
from aiorl.process.parent_watch import watch_parent
watch_parent(lambda: print("lost", flush=True), on_line=lambda line: print(line, end="", flush=True), grace_s=0.05)
print("ready", flush=True)
time.sleep(30)
"""


EVALUATES = """
import sys, time
from aiorl.run import evaluation_child

def evaluate(checkpoint):
    print("evaluating", file=sys.stderr, flush=True)
    time.sleep(60)

evaluation_child.evaluate = evaluate
sys.exit(evaluation_child.main())
"""


def test_the_end_of_standard_input_is_told_and_ends_the_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    process.stdin.write("a request\n")
    process.stdin.flush()
    assert process.stdout.readline() == "a request\n"
    process.stdin.close()
    assert process.stdout.readline() == "lost\n"
    assert process.wait(10) == 3
    process.stdout.close()


def test_the_process_that_evaluates_ends_with_its_parent_also_during_an_evaluation() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", EVALUATES], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write('{"checkpoint": "here"}\n')
    process.stdin.flush()
    assert process.stderr.readline() == "evaluating\n"
    process.stdin.close()
    assert process.wait(20) == 3
    process.stderr.close()
