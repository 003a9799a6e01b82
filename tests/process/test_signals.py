from __future__ import annotations

import signal
import subprocess
import sys
import time

CODE = """
import asyncio
from aiorl.process.signals import on_stop_signals
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
    process.send_signal(signal.SIGINT)  # as `timeout` sends it: to the process and to its group
    assert process.stdout.readline() == "SIGINT\n"
    time.sleep(0.7)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    process.stdout.close()
