"""`python tests/support/iteration_files.py`: the files of aiorl that run in one steady iteration of
PPO.

They are counted once with everything in one process, and once with a worker process.
`sys.setprofile` sees functions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMITS = {"in process": 40, "with a worker": 55}
"""Maximum number of files, by sampling process."""
sys.path.insert(0, str(ROOT))
_PACKAGE = str(ROOT / "aiorl") + "/"
_SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_envs_per_worker": 4,
    "rollout_fragment_length": 32,
    "train_batch_size": 128,
    "sgd_minibatch_size": 64,
    "num_sgd_iter": 2,
    "seed": 1,
    "compilation_cache": "off",
    "min_iter_time_s": 0,
    "observation_filter": "MeanStdFilter",
    "xla": "off",
}


class Seen:
    """Files with functions called since the last `clear`, in all threads that start after this
    object is made.
    """

    def __init__(self) -> None:
        self._files: set[str] = set()
        sys.setprofile(self._look)
        threading.setprofile(self._look)

    def _look(self, frame: Any, event: str, arg: object) -> None:
        if event == "call":
            self._files.add(frame.f_code.co_filename)

    def clear(self) -> None:
        """Forget all files."""
        self._files.clear()

    @property
    def files(self) -> set[str]:
        """Return paths below aiorl/."""
        return {
            name.removeprefix(_PACKAGE) for name in set(self._files) if name.startswith(_PACKAGE)
        }


def in_process() -> set[str]:
    """Return the files of an iteration that samples in the caller's thread."""
    return _iteration(Seen(), num_workers=0)


def with_worker() -> set[str]:
    """Return the files of an iteration with fragments from a worker process."""
    with tempfile.TemporaryDirectory() as folder:
        found = _iteration(Seen(), Path(folder), num_workers=0, bind="tcp://127.0.0.2:0")
        return found | set(json.loads((Path(folder) / "files.json").read_text()))


def _iteration(seen: Seen, folder: Path | None = None, **settings: Any) -> set[str]:
    import aiorl

    with tempfile.TemporaryDirectory() as runs:
        run_dir = Path(runs) / "run"
        worker = None
        if folder is not None:
            command = [sys.executable, __file__, "worker", str(folder), str(run_dir / "run.json")]
            worker = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        try:
            with aiorl.PPOTrainer({**_SETTINGS, "run_dir": str(run_dir), **settings}) as trainer:
                for _ in range(3):
                    trainer.train()
                _flag(folder, "begin")
                iterations = []
                for _ in range(3):
                    seen.clear()
                    trainer.train()
                    iterations.append(seen.files)
                # what a timer does once a second belongs to none
                found = set.intersection(*iterations)
                _flag(folder, "end")
        finally:
            if worker is not None:
                worker.terminate()
                worker.wait(10)
    return found


def _flag(folder: Path | None, name: str) -> None:
    """Send the worker a flag, and wait until it has noticed."""
    if folder is None:
        return
    (folder / name).touch()
    while (folder / name).exists():
        time.sleep(0.01)


def worker(folder: Path, run: Path) -> None:
    """Run a worker that records its files between two flags."""
    seen = Seen()

    def listen() -> None:
        for name in ("begin", "end"):
            while not (folder / name).exists():
                time.sleep(0.005)
            if name == "begin":
                seen.clear()
            else:
                (folder / "files.json").write_text(json.dumps(sorted(seen.files)))
            (folder / name).unlink()

    threading.Thread(target=listen, daemon=True).start()
    while not run.exists():
        time.sleep(0.01)
    from aiorl.worker import main

    main(
        [
            "--connect",
            json.loads(run.read_text())["address"],
            "--log-level",
            "ERROR",
            "--exit-with-parent",
        ]
    )


def main() -> int:
    """Print the counts; the exit status is 1 if one is above its limit."""
    status = 0
    for name, count in {"in process": in_process, "with a worker": with_worker}.items():
        files = count()
        print(f"one PPO iteration {name}: {len(files)} files (limit {LIMITS[name]})")
        if "-v" in sys.argv:
            print("  " + "\n  ".join(sorted(files)))
        if len(files) > LIMITS[name]:
            status = 1
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
