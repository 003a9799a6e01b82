"""A user's script that is launched in place of a learner, with `aiorl.Actors` that others join.

The words after ``--`` are options of the place, then ``--script FILE``, then the script's own
arguments. The script starts from its beginning each time; what it needs from an earlier turn, it
saves in ``AIORL_RUN_DIR`` and reads there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from aiorl.config.addresses import split_address
from aiorl.config.command_line import Parser, at_least
from aiorl.errors import ConfigError
from aiorl.launch.job import Job, absolute, new_run_dir
from aiorl.process.imports import python_path

OPTION = "--script"
_MODULE = "aiorl.launch.script"
_CONFIG_FILE = "config.yaml"
"""File that the directory of a run of `aiorl train` has."""
_DEFAULTS: Mapping[str, Any] = {
    "run_dir": None,
    "keys": None,
    "insecure": False,
    "bind": None,
    "num_workers": None,
    "resume": None,
    "preset": None,
    "init_from": None,
    "web": None,
}


@dataclass(frozen=True)
class ScriptJob(Job):
    """A script to launch; ``words`` are its file, as the user typed it, and its arguments."""

    is_script: ClassVar[bool] = True
    own_cores: ClassVar[int] = 1

    def main_words(self, *place: str, resumed: bool, run_dir: str = "") -> list[str]:
        """See `Job.main_words`."""
        return [_MODULE, "--run-dir", run_dir or str(self.run_dir), *place, "--", *self.words]

    def main_sh(self, python: str, place: str, run_dir: str = "") -> str:
        """See `Job.main_sh`."""
        directory = shlex.quote(run_dir or str(self.run_dir))
        return (
            f"set -- {python} -P -m {_MODULE} --run-dir {directory} {place}"
            f" -- {shlex.join(self.words)}\n"
        )

    def launch_words(self, run_dir: str, num_workers: int) -> list[str]:
        """See `Job.launch_words`."""
        words = ["--run-dir", run_dir, "--num-workers", str(num_workers)]
        if self.config["insecure"]:
            words.append("--insecure")
        return [*words, OPTION, *self.words]

    def process_words(self, here: int, joining: int | None) -> list[str]:
        """See `Job.process_words`."""
        words = ["--num-here", str(here)]
        if joining is not None:
            words += ["--num-joining", str(joining)]
        if self.config["insecure"]:
            words.append("--insecure")
        return words

    def code_path(self) -> dict[str, str]:
        """See `Job.code_path`."""
        folder = os.path.dirname(os.path.abspath(self.words[0]))
        others = python_path().get("PYTHONPATH", "").split(os.pathsep)
        return {"PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys([folder, *others])))}

    def check_files(self) -> None:
        """Refuse a script that does not exist on this machine."""
        if not os.path.isfile(self.words[0]):
            _refuse(
                f"the script {self.words[0]!r:.200} does not exist.",
                self.words[0],
                "Give the path of a Python file, from the current directory.",
            )

    def path_in(self, code: Path, files: Collection[Path]) -> str:
        """Return the script's path on a host that gets a directory of code.

        Args:
            code: the directory here.
            files: the files of it that are sent, relative to it.

        Raises:
            ConfigError: the script is none of them.
        """
        path = Path(os.path.relpath(self.words[0], code))
        if path not in files:
            _refuse(
                f"the script {self.words[0]!r:.200} is not among the files of {code} that are sent.",
                self.words[0],
                "Launch it from the directory of your code, or name that with --code DIR; a file"
                " that Git ignores is sent with --include FILE.",
            )
        return str(path)


def _refuse(message: str, script: str, hint: str) -> NoReturn:
    raise ConfigError(message, key="script", value=script, hint=hint)


def is_script(words: Sequence[str]) -> bool:
    """Return whether words after ``--`` name a script, and not a learner's options."""
    return any(word.partition("=")[0] == OPTION for word in words)


def checked_script(prog: str, words: Sequence[str]) -> ScriptJob:
    """Return the job that words with ``--script`` describe.

    Args:
        prog: the command, for messages.
        words: all words after ``--``.

    Raises:
        ConfigError: the directory has a run of `aiorl train`, or the address is malformed.
        SystemExit: with status 2 after a sentence about wrong usage.
    """
    index = next(i for i, word in enumerate(words) if word.partition("=")[0] == OPTION)
    _, equals, file = words[index].partition("=")
    script = [file, *words[index + 1 :]] if equals else [*words[index + 1 :]]
    parser = Parser(prog, f"[options] -- [PLACE] {OPTION} FILE [ARGS]", "", "")
    for name in ("run-dir", "keys", "bind"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--num-workers", type=at_least(0))
    parser.add_argument("--insecure", action="store_true")
    for word in words[:index]:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in parser.options():
            parser.error(
                f"{name} has no meaning for a script. Before {OPTION} there can be --run-dir,"
                " --keys, --bind, --num-workers and --insecure; options of the script follow its"
                " file."
            )
    if not script or not script[0] or script[0].startswith("-"):
        parser.error(f"{OPTION} needs the file of a script.")
    config = {**_DEFAULTS, **parser.parse(words[:index])}
    run_dir = new_run_dir(Path(script[0]).stem)
    if config["run_dir"] is not None:
        run_dir = absolute(config["run_dir"])
    if (run_dir / _CONFIG_FILE).exists():
        raise ConfigError(
            f"{run_dir} has a run of aiorl train.",
            key="run_dir",
            value=str(run_dir),
            hint="Give a script another directory.",
        )
    port = 0
    if config["bind"] is not None:
        _, port = split_address(config["bind"], key="bind")
    return ScriptJob(
        run_dir=run_dir,
        words=tuple(script),
        config=config,
        num_workers=config["num_workers"],
        port=port or None,
    )
