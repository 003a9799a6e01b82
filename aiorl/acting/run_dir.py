"""The run directory, which contains all files of a run.

Its contents:

    config.yaml          the effective configuration
    run.json             run id and addresses for workers, for a resume; the seed
    status.json          who runs where, how fast, and since when
    lock                 the learner that writes here, while it does
    log.txt              the learner's log; logs/worker-<slot>.txt are those of local workers
    progress.csv, result.jsonl, events.out.tfevents.*, learning_curve.png
    checkpoints/

A run writes only two things elsewhere: sockets for workers of the same user
(`aiorl.net.transport.local`), and code compiled by XLA, for later runs
(`aiorl.learning.compilation_cache`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiorl.acting.checkpoint import clear_partial
from aiorl.acting.run_lock import RunLock
from aiorl.config.addresses import RUN_FILE as _RUN, run_facts_and_owners, split_address
from aiorl.config.files import strangers
from aiorl.config.layers import CONFIG_FILE, save_config
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.text import is_utf8

_RESULTS_ROOT = "runs"
_OWN_FILE = re.compile(
    rf"({re.escape(CONFIG_FILE)}|{re.escape(_RUN)}|status\.json)(\.tmp)?|log\.txt.*|progress\.csv.*|result\.jsonl.*"
    r"|worker-\d+\.txt.*"
)

_OWN_DIRECTORIES = ("logs", "checkpoints", "checkpoints/superseded", "best", "evaluation")


@dataclass(eq=False)
class RunDirectory:
    """Paths of one run, and the exclusive right to write there.

    Attributes:
        path: absolute path of the directory.
        lock: lock of the directory.
        run_id: random name of the run, kept over a resume.
        last_port: port of the learner before the resume, 0 for a new run.
        seed: seed of the run.
        is_new: True unless the run is resumed.
        is_made: True if the directory was created for this run.
    """

    path: Path
    lock: RunLock
    run_id: str
    last_port: int = 0
    seed: int | None = None
    is_new: bool = False
    is_made: bool = False

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """The learner's log file."""
        return self.path / "log.txt"

    def worker_log(self, slot: int) -> Path:
        """Return the log file of the local worker in a slot."""
        return self.path / "logs" / f"worker-{slot}.txt"

    def logs(self, num_workers: int) -> list[Path]:
        """Return all log files of a run with ``num_workers`` local workers."""
        return [self.log, *map(self.worker_log, range(1, num_workers + 1))]

    @property
    def shown(self) -> Path:
        """Path for people, relative if it is below the working directory."""
        # the working directory is gone, or the path is elsewhere
        with contextlib.suppress(OSError, ValueError):
            return self.path.relative_to(Path.cwd())
        return self.path

    @classmethod
    def open(cls, config: CommonConfig) -> Self:
        """Create the directory of a new run and write ``config.yaml``, or open the directory of the
        run to resume.

        A resumed run's ``config.yaml`` stays unchanged until `save_config`, so that options that
        turn out not to fit the checkpoint leave no trace.

        Raises:
            ConfigError: when it cannot be created or written, another learner writes there, it
                belongs to another run, or it contains no run to resume.
        """
        is_new = config.resume is None
        is_made = False
        if config.resume is not None:
            path = Path(config.resume).absolute()  # the working directory may change later
            _check_name(path)
            run_id, port = _facts(path)
        else:
            path, is_made = _make_new(config)
            run_id = secrets.token_hex(8)
            port = 0
        try:
            lock = RunLock.acquire(path)
        except OSError as error:
            raise _unwritable(path, error.strerror) from error
        directory = cls(path, lock, run_id, port, seed=config.seed, is_new=is_new, is_made=is_made)
        try:
            if is_new and (path / _RUN).exists():
                hint = f"Continue it with --resume {path}, or give another directory."
                raise _unusable(path, f"{path} already holds a run.", hint)
            directory._prepare()
            if is_new:
                directory.save_config(config)
        except BaseException:
            directory.close()
            raise
        return directory

    def close(self) -> None:
        """Let others write here; can be called again."""
        self.lock.release()

    def abandon(self) -> None:
        """Clean up after a new run that could not begin, so that the corrected command can use the
        same directory.
        """
        if self.is_new:
            for name in (_RUN, CONFIG_FILE, "status.json"):
                (self.path / name).unlink(missing_ok=True)
            if self.is_made:
                shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def save_config(self, config: CommonConfig) -> None:
        """Write ``config.yaml``.

        Raises:
            ConfigError: when it cannot be written.
        """
        save_config(config, self.path)

    def save_address(self, address: str, dialable: Sequence[str] = ()) -> None:
        """Save the learner's addresses, by which workers find it, also after a resume.

        Args:
            address: address that it is bound to.
            dialable: addresses for workers, if they are others.

        Raises:
            ConfigError: when the file cannot be written.
        """
        addresses = [*dialable] or [address]
        facts = {"run_id": self.run_id, "address": addresses[0], "addresses": addresses}
        self.save_json(_RUN, {**facts, "port": split_address(address)[1], "seed": self.seed})

    def save_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Replace a file as a whole.

        Raises:
            ConfigError: when it cannot be written.
        """
        temporary = self.path / f"{name}.tmp"
        try:
            temporary.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            os.replace(temporary, self.path / name)
        except OSError as error:
            said = f"{self.path / name} can't be written: {error.strerror or error}."
            raise _unusable(self.path, said) from error

    def _prepare(self) -> None:
        """Create missing directories, and check that no link leads a writer elsewhere."""
        try:
            for name in _OWN_DIRECTORIES:
                if (self.path / name).is_symlink():
                    said = (
                        f"{self.path / name} is a link, so nothing is written to or removed from"
                        " its target."
                    )
                    raise _unusable(self.path, said, "Remove it, or move its target here.")
            (self.path / "logs").mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            for path in (*self.path.iterdir(), *(self.path / "logs").iterdir()):
                if _OWN_FILE.fullmatch(path.name) and (path.is_symlink() or not path.is_file()):
                    raise _unusable(
                        self.path,
                        f"{path} is no regular file, so nothing is written to it.",
                        "Remove it.",
                    )
            self.log.open("a").close()
            clear_partial(self.checkpoints)
        except OSError as error:
            raise _unwritable(self.path, error.strerror) from error


def _check_name(path: Path) -> None:
    if not is_utf8(str(path)):
        raise _unwritable(path, "its path is no UTF-8 text, so files and workers can't get it")


def _make(path: Path, *, exist_ok: bool) -> None:
    _check_name(path)
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if not exist_ok:
            raise
        raise _unwritable(path, "it is not a directory") from None
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    except ValueError as error:  # the path contains a NUL
        raise _unwritable(path, str(error)) from error


def _unwritable(path: Path, reason: str | None) -> ConfigError:
    said = f"the run directory {path} can't be written: {reason}."
    return _unusable(path, said, "Give another one with --run-dir DIR.")


def _unusable(path: Path, said: str, hint: str = "", *, key: str = "run_dir") -> ConfigError:
    return ConfigError(said, key=key, value=str(path), hint=hint)


def _facts(path: Path) -> tuple[str, int]:
    """Return run id and port in ``run.json``; the port is 0 if another user wrote it, other than
    root.

    Raises:
        ConfigError: when the file is missing or invalid.
    """
    try:
        facts, owners = run_facts_and_owners(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "Give the directory that the run named when it ended."
        raise _unusable(
            path, f"{path} is not a run directory: it has no {_RUN}.", hint, key="resume"
        ) from error
    except (OSError, ValueError) as error:
        said = f"{path / _RUN} can't be read: {getattr(error, 'strerror', None) or error}."
        raise _unusable(path, said, key="resume") from error
    if strangers(owners):
        return facts["run_id"], 0  # where a run listens is not another user's to say
    return facts["run_id"], facts["port"]


def _make_new(config: CommonConfig) -> tuple[Path, bool]:
    """Return an absolute directory for a new run, and True if it was created just now.

    A default name is unique, even if several runs begin in the same second.
    """
    if config.run_dir is not None:
        path = Path(config.run_dir).expanduser().absolute()
        is_there = os.path.exists(path)
        _make(path, exist_ok=True)
        return path, not is_there
    algo, env = (re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)) for name in (config.algo, config.env))
    base = f"{algo}_{env}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    path = Path(_RESULTS_ROOT).absolute() / base
    while True:
        with contextlib.suppress(FileExistsError):
            _make(path, exist_ok=False)
            return path, True
        path = path.with_name(f"{base}_{secrets.token_hex(2)}")
