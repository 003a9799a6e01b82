"""An interrupted training cell, as in Jupyter, loses nothing, and training can continue or end
(T2).
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from small_runs import SMALL

STATE = """
    numbers = sorted(int(path.name[-6:]) for path in Path(trainer.logdir, "checkpoints").glob("checkpoint-*"))
    print(json.dumps([numbers[-1], trainer._training.counters.updates]))
"""
GO_ON = """
    trainer._training.iteration.is_due = lambda *_: True
    trainer._training.core.is_enough = lambda: True
    print(trainer.train()["training_iteration"])
"""
TRAIN = """
    def tell():
        while trainer._training.counters.updates < 3:
            time.sleep(0.05)
        print("three updates", flush=True)
    threading.Thread(target=tell).start()
    trainer.train()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_t2_an_interrupted_cell_leaves_a_checkpoint_and_a_working_trainer(tmp_path: Path) -> None:
    """A trainer without workers, and then one with a worker."""
    manager, client = start_new_kernel(cwd=str(tmp_path))

    def run(code: str, *, interrupt_at: str = "") -> tuple[str, str]:
        """Run a cell, interrupt it at its first output, and return its output and the name of its
        error.
        """
        cell, printed, error = client.execute(textwrap.dedent(code)), "", ""
        while True:
            message = client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                printed += content["text"]
                if interrupt_at and interrupt_at in printed:
                    interrupt_at = ""
                    manager.interrupt_kernel()
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error

    def check(num_workers: int) -> None:
        settings: dict[str, Any] = {
            **SMALL,
            "num_workers": num_workers,
            "min_iter_time_s": 600,
            "run_dir": str(tmp_path / f"run-{num_workers}"),
        }
        make = f"""
            import aiorl, json, threading, time
            from pathlib import Path
            trainer = aiorl.PPOTrainer({settings!r}, env="CartPole-v1")
        """
        assert run(make)[1] == ""
        assert run(TRAIN, interrupt_at="three updates")[1] == "KeyboardInterrupt"
        saved, updates = json.loads(run(STATE)[0])
        assert 3 <= saved <= updates <= saved + 1, (
            "a checkpoint exists immediately; one update may have been running"
        )
        assert run(GO_ON) == ("1\n", "")
        after = json.loads(run(STATE)[0])[1]
        assert after > updates
        assert run("trainer.stop()") == ("", "")
        last = STATE.replace("trainer._training.counters.updates", "0")
        assert json.loads(run(last)[0])[0] == after
        kernel = psutil.Process(manager.provisioner.pid)  # type: ignore[union-attr]
        children = kernel.children(recursive=True)
        assert not [child for child in children if "aiorl.worker" in child.cmdline()]

    try:
        check(num_workers=0)
        check(num_workers=1)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
