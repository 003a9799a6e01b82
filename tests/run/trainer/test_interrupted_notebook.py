"""A cell that trains is interrupted as Jupyter does it: nothing is lost, and all goes on or ends as it should (T2)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from small_runs import SMALL

_TIMEOUT_S = 120


class Notebook:
    """A kernel, cell by cell."""

    def __init__(self, folder: Path) -> None:
        self.manager: KernelManager
        self.manager, self._client = start_new_kernel(cwd=str(folder))

    def run(self, code: str, *, interrupt_at: str = "") -> tuple[str, str]:
        """What a cell prints, and the name of its error; it is interrupted as soon as it prints something."""
        cell, printed, error = self._client.execute(textwrap.dedent(code)), "", ""
        while True:
            message = self._client.get_iopub_msg(timeout=_TIMEOUT_S)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                printed += content["text"]
                if interrupt_at and interrupt_at in printed:
                    interrupt_at = ""
                    self.manager.interrupt_kernel()
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error

    @property
    def processes(self) -> list[psutil.Process]:
        kernel = psutil.Process(self.manager.provisioner.pid)  # type: ignore[union-attr]
        return kernel.children(recursive=True)

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    yield made
    made.close()


STATE = """
    import json
    from pathlib import Path
    numbers = sorted(int(path.name[-6:]) for path in Path(trainer.logdir, "checkpoints").glob("checkpoint-*"))
    print(json.dumps([numbers, trainer._training.counters.updates]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_t2_an_interrupted_cell_leaves_a_checkpoint_and_a_trainer_that_goes_on(notebook: Notebook) -> None:
    before = len(notebook.processes)
    for num_workers in (0, 1):
        settings: dict[str, Any] = {**SMALL, "num_workers": num_workers, "min_iter_time_s": 600}
        printed, error = notebook.run(f"""
            import threading, time
            import aiorl
            trainer = aiorl.PPOTrainer({settings!r}, env="CartPole-v1")
        """)
        assert error == "", printed
        _, error = notebook.run(
            """
            def tell():
                while trainer._training.counters.updates < 3:
                    time.sleep(0.05)
                print("three updates", flush=True)
            telling = threading.Thread(target=tell)
            telling.start()
            trainer.train()
            """,
            interrupt_at="three updates",
        )
        assert error == "KeyboardInterrupt"
        numbers, updates = json.loads(notebook.run(STATE)[0])
        assert numbers, "a checkpoint is there at once"
        assert 3 <= numbers[-1] <= updates <= numbers[-1] + 1  # one may have been under way
        printed, error = notebook.run("""
            trainer._training.iteration.is_due = lambda *_: True
            trainer._training.flow.is_enough = lambda: True
            print(trainer.train()["training_iteration"])
        """)
        assert (printed.strip(), error) == ("1", "")
        _, after = json.loads(notebook.run(STATE)[0])
        assert after > updates
        assert notebook.run("trainer.stop()") == ("", "")
        (numbers, _) = json.loads(notebook.run(STATE.replace("trainer._training.counters.updates", "0"))[0])
        assert numbers[-1] == after
        assert len(notebook.processes) == before
