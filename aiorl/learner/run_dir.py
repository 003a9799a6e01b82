"""The run directory: where every file of a run lives.

It holds:

    config.yaml          the effective configuration
    run.json             run id and the address workers connect to, for a resume
    log.txt              the learner's log; logs/worker-<slot>.txt those of local workers
    progress.csv, result.jsonl, events.out.tfevents.*, learning_curve.png
    checkpoints/

Nothing outside of it is written.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from aiorl.config.load import save_config
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError

__all__ = ["RunDirectory"]

_RESULTS_ROOT = "runs"


@dataclass(slots=True)
class RunDirectory:
    """Paths of one run.

    Attributes:
        path: the directory.
        run_id: random name of the run, kept over a resume.
        last_address: where the learner listened before the resume, "" for a new run.
    """

    path: Path
    run_id: str
    last_address: str = ""

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """The learner's log file."""
        return self.path / "log.txt"

    def worker_log(self, slot: int) -> Path:
        """Log file of the local worker of a slot."""
        return self.path / "logs" / f"worker-{slot}.txt"

    @classmethod
    def open(cls, config: CommonConfig) -> RunDirectory:
        """Create the directory of a new run and write ``config.yaml``, or take that of the run to resume.

        A resumed run's ``config.yaml`` is left as it is until `save_config`: options that turn out not to fit the
        checkpoint shall not stay behind.

        Raises:
            ConfigError: it cannot be created or written, belongs to another run, or holds no run to resume.
        """
        if config.resume is not None:
            directory = cls._existing(Path(config.resume))
        else:
            directory = cls(_new_path(config), secrets.token_hex(8))
        try:
            (directory.path / "logs").mkdir(parents=True, exist_ok=True)
            directory.checkpoints.mkdir(exist_ok=True)
            directory.log.open("a").close()
        except OSError as error:
            raise ConfigError(
                f"the run directory {directory.path} can't be written: {error.strerror or error}.",
                key="run_dir",
                value=str(directory.path),
                hint="Give another one with --run-dir DIR.",
            ) from error
        if config.resume is None:
            directory.save_config(config)
        return directory

    def save_config(self, config: CommonConfig) -> None:
        """Write ``config.yaml``.

        Raises:
            ConfigError: it cannot be written.
        """
        save_config(config, self.path)

    def save_address(self, address: str) -> None:
        """Remember where the learner listens, so that after a resume workers find it again.

        Raises:
            ConfigError: the file cannot be written.
        """
        temporary = self.path / "run.json.tmp"
        try:
            temporary.write_text(json.dumps({"run_id": self.run_id, "address": address}) + "\n", encoding="utf-8")
            os.replace(temporary, self.path / "run.json")
        except OSError as error:
            raise ConfigError(
                f"{self.path / 'run.json'} can't be written: {error.strerror or error}.",
                key="run_dir",
                value=str(self.path),
            ) from error

    @classmethod
    def _existing(cls, path: Path) -> RunDirectory:
        try:
            facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
            return cls(path, str(facts["run_id"]), str(facts["address"]))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is no run directory: it holds no run.json.",
                key="resume",
                value=str(path),
                hint="Give the directory that the run named at its end.",
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path / 'run.json'} can't be read: {error}.", key="resume", value=str(path)) from error


def _new_path(config: CommonConfig) -> Path:
    if config.run_dir is not None:
        path = Path(config.run_dir).expanduser()
        if (path / "run.json").exists():
            raise ConfigError(
                f"{path} already holds a run.",
                key="run_dir",
                value=str(path),
                hint=f"Go on with it by --resume {path}, or give another directory.",
            )
        return path
    env = re.sub(r"[^A-Za-z0-9._-]+", "-", str(config.env))
    base = f"{config.algo}_{env}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    path = Path(_RESULTS_ROOT) / base
    while path.exists():  # two runs within one second
        path = Path(_RESULTS_ROOT) / f"{base}_{secrets.token_hex(2)}"
    return path
