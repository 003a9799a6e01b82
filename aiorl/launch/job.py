"""The parts that all engines share: the run, its learner's command, keys, quoting, facts for verbs.

An engine is a module `aiorl.launch.NAME` with the names of `Engine`. Its files for a run are in the
run's directory:

    launch.json     the engine, and facts that its verbs need (`Job.save`, `saved`)
    keys/           keys of this run, unless the user gave others (`Job.make_keys`)

Engines that have the run's directory elsewhere, on a host or in a volume, keep the same files
there. No secret is in an argument list, an environment variable or a log: commands name the
directory of keys.

Verbs act on these files: they end processes, submit scripts and name objects of a cluster. So the
directory must be one in which only its user can write (`Job.make_place`), and `saved` refuses a
file of anyone else.

`python -m aiorl.launch.job LEARNER OPTIONS` checks options and prints the facts that make a `Job`,
so that the launcher itself loads little.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from aiorl.config.addresses import host_and_port, split_address
from aiorl.config.command_line import Parser, as_typed
from aiorl.config.files import check_own_directory, parse_json, read_own
from aiorl.errors import ConfigError
from aiorl.process.imports import child_python, find_modules_here, prepare_import, python_path
from aiorl.process.replaced_file import replaced

__all__ = [
    "Engine",
    "Job",
    "Verb",
    "absolute",
    "check_printable",
    "checked",
    "new_run_dir",
    "saved",
]

CORES = "from aiorl.process.machine import usable_cores; print(usable_cores())"
"""Python that prints the cores of a host that its processes can use."""
_FACTS = "launch.json"
_MAX_FACTS_BYTES = 1 << 20
_KEYS = ("algo", "env", "run_dir", "resume", "keys", "insecure", "preset", "init_from", "web")
"""Keys of the effective config that a `Job` is made from."""


class Verb(NamedTuple):
    """Command for a run that was launched: ``aiorl launch ENGINE VERB RUN [WORDS]``.

    Attributes:
        do: function of RUN and the other words, all text; returns the exit status.
        takes: placeholders of the other words, such as "N".
        about: one sentence for the help.
    """

    do: Callable[..., int]
    takes: str
    about: str


class Engine(Protocol):
    """Names that the module of an engine has.

    `options` are those given, name -> value, as `Parser.parse` returns them; there are no defaults
    in it.

    Attributes:
        ABOUT: a sentence or two for the help.
        EXAMPLES: examples for the help.
        VERBS: name -> command for launched runs: status, logs, stop, and scale where the engine
            can.
    """

    ABOUT: str
    EXAMPLES: str
    VERBS: Mapping[str, Verb]

    def add_arguments(self, parser: Parser, words: Sequence[str]) -> None:
        """Declare options in `parser`; `words` are those of the command line, for an engine that
        passes some on.
        """

    def artefact(self, job: Job, options: dict[str, Any]) -> str:
        """Return the script, commands or manifests of `job` with `options`; change and connect to
        nothing.
        """

    def run(self, job: Job, options: dict[str, Any]) -> int:
        """Launch `job` with `options` and return the exit status."""


@dataclass(frozen=True)
class Job:
    """A run to launch: its directory, and the learner's options.

    Attributes:
        run_dir: absolute path of the run's directory, without ``..``; it need not exist.
        words: the learner's options as the user typed them.
        config: effective values of the keys that `words` and config files set, for those that an
            engine looks at.
        num_workers: local workers that the user wants with the learner; None leaves it to the
            engine.
        port: the learner's port that the user wants, which also uses the next one; None for any.
        is_script: True if a user's script takes the learner's place.
        own_cores: number of cores that the learner itself needs on its host.
    """

    is_script: ClassVar[bool] = False
    own_cores: ClassVar[int] = 2
    run_dir: Path
    words: tuple[str, ...]
    config: Mapping[str, Any]
    num_workers: int | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        """Check that scripts, manifests and command lines can hold all texts of the job."""
        check_printable({"run_dir": str(self.run_dir), **self.config})
        for word in self.words:  # quoted in the body of a script, they can have several lines
            check_printable({word.partition("=")[0]: re.sub(r"[\n\t]", " ", word)})

    @property
    def bind(self) -> str:
        """Address for the learner to listen on, through any interface."""
        return f"tcp://0.0.0.0:{self.port or 0}"

    @property
    def name(self) -> str:
        """Name of the run for other places: letters, digits and ``-``, at most 47, another for each
        run directory.
        """
        token = hashlib.sha256(f"{socket.gethostname()}:{self.run_dir}".encode()).hexdigest()[:6]
        slug = re.sub(r"[^a-z0-9]+", "-", self.run_dir.name.lower())[:40].strip("-")
        return f"{slug or 'run'}-{token}"

    @property
    def keys(self) -> Path:
        """Directory of the keys that the user gave, or of those made for this run."""
        directory = self.config["keys"]
        if directory:
            return absolute(directory)
        return self.run_dir / "keys"

    def make_keys(self, workers: tuple[str, ...] = ("worker",)) -> Path:
        """Make the keys that are missing, unless the user gave some, and return their directory.

        Args:
            workers: names of the workers' keys.

        Raises:
            SecurityError: the directory can't be written, or has unusable keys.
        """
        from aiorl.keys import make_keys  # loads ZeroMQ

        absent = tuple(name for name in workers if not (self.keys / f"{name}.key_secret").exists())
        if absent and self.keys == self.run_dir / "keys":
            make_keys(self.keys, absent)
        return self.keys

    def main_words(self, *place: str, resumed: bool, run_dir: str = "") -> list[str]:
        """Return the module that runs where workers join, and the words of its command.

        Args:
            *place: options that say where it listens, and with which keys.
            resumed: True if the directory already has a run.
            run_dir: the run's directory where it runs; "" for the same as here.
        """
        return ["aiorl", "train", *self.learner_words(resumed=resumed, run_dir=run_dir), *place]

    def main_sh(self, python: str, place: str, run_dir: str = "") -> str:
        """Return lines of POSIX shell that set the positional parameters to the command of
        `main_words`.

        Args:
            python: the Python where it runs, as shell text (quoted, or a variable).
            place: options that say where it listens, and with which keys, as shell text.
            run_dir: the run's directory where it runs; "" for the same as here.
        """
        return f'{self.learner_sh(python, run_dir)}set -- "$@" {place}\n'

    def launch_words(self, run_dir: str, num_workers: int) -> list[str]:
        """Return the words after ``--`` of another `aiorl launch`, on a host that shares no disk.

        Args:
            run_dir: the run's directory there.
            num_workers: number of worker processes next to the learner.
        """
        words = [*self.words, "--run-dir", run_dir, "--num-workers", str(num_workers)]
        if self.config["keys"] is not None:
            words += ["--keys", "null"]
        if self.config["resume"] is not None:
            words += ["--resume", "null"]
        return words

    def process_words(self, here: int, joining: int | None) -> list[str]:
        """Return the options that say how many worker processes there are.

        Args:
            here: number of processes next to the learner.
            joining: number of processes that the engine starts elsewhere; None if it can't know.
        """
        return ["--num-workers", str(here)]

    def code_path(self) -> dict[str, str]:
        """Return the environment variable with which Python finds the job's code on this machine,
        and on those that share its disk.
        """
        return python_path()

    def check_files(self) -> None:
        """Refuse what the command needs of this machine and does not find."""

    def learner_words(self, *, resumed: bool, run_dir: str = "") -> list[str]:
        """Return the learner's options for a new or a resumed run; options that follow them take
        precedence.

        Args:
            resumed: True if the directory already has a run.
            run_dir: the run's directory where the learner runs; "" for the same as here.
        """
        return [*self.words, *self._place(resumed, run_dir or str(self.run_dir))]

    def learner_sh(self, python: str, run_dir: str = "") -> str:
        """Return lines of POSIX shell that set the positional parameters to the learner's command,
        new or resumed.

        Args:
            python: the Python where the learner runs, as shell text (quoted, or a variable).
            run_dir: the run's directory where the learner runs; "" for the same as here.
        """
        run_dir = run_dir or str(self.run_dir)
        new, resumed = (
            shlex.join(self._place(is_resumed, run_dir)) for is_resumed in (False, True)
        )
        return (
            f"set -- {python} -P -m aiorl train {shlex.join(self.words)}\n"
            f"if [ -e {shlex.quote(f'{run_dir}/run.json')} ]; then\n"
            f'    set -- "$@" {resumed}\n'
            f'else\n    set -- "$@" {new}\nfi\n'
        )

    def _place(self, is_resumed: bool, run_dir: str) -> list[str]:
        """Return the options that say where the run is, and undo those that don't fit it."""
        words = ["--run-dir", run_dir]
        if is_resumed:
            words = ["--resume", run_dir, *words]
            for name, option in (("preset", "--preset"), ("init_from", "--init-from")):
                if self.config[name] is not None:
                    words += [option, "null"]
        elif self.config["resume"]:
            words += ["--resume", "null"]
        return words

    def forward(self, host: str, ssh: str = "ssh") -> str:
        """Return a line with the command that forwards the page of the run to this machine; ""
        without a known port.

        Args:
            host: host of the learner, as `ssh` knows it.
            ssh: command of ssh with its own options.
        """
        name, port = host_and_port(self.config.get("web") or 0, key="web")
        if not port:
            return ""
        target = "127.0.0.1" if name in ("0.0.0.0", "::") else name
        return (
            f"  {ssh} -L {port}:{target}:{port} {host}  # then http://127.0.0.1:{port} is its"
            " page\n"
        )

    def save(self, engine: str, facts: Mapping[str, Any]) -> None:
        """Save what the engine's verbs need to know of this run, in place of what an earlier launch
        saved.

        Args:
            engine: name of the engine.
            facts: values for JSON, without secrets.
        """
        self.make_place()
        self.write(_FACTS, json.dumps({"engine": engine, **facts}, indent=1) + "\n")

    def make_place(self) -> None:
        """Make the run's directory and that of its logs, in which only this user may write.

        Raises:
            ConfigError: they can't be made, or someone else can write there: verbs act on the files
                in them, and the keys in them admit workers.
        """
        for name in (".", "logs", "keys"):
            directory = self.run_dir / name
            if name == "keys" and not directory.exists():
                continue
            try:
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
                check_own_directory(directory)
            except OSError as error:
                raise ConfigError(
                    f"{directory} can't be the place of a launched run: {error.strerror}.",
                    key="run_dir",
                    value=str(self.run_dir),
                    hint="Give another directory with --run-dir DIR.",
                ) from error

    def write(self, name: str, text: str) -> None:
        """Write a file into the run's directory, which others can't change, in place of a former
        one.

        Args:
            name: name of the file.
            text: its content.
        """
        with replaced(self.run_dir / name) as temporary:
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)


Check = Callable[[Any], bool]
"""Function that returns whether a value read from a file is of the right kind."""


def saved(
    run: str, engine: str, checks: Mapping[str, Check] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Return a run's absolute directory, and the facts that `Job.save` saved there.

    Args:
        run: the directory as the user typed it.
        engine: name of the engine that has to have launched it.
        checks: name of each fact that is needed -> its check.

    Raises:
        ConfigError: this engine launched no run there; someone else can have written the file; or
            it is invalid.
    """
    path = absolute(run)
    file = path / _FACTS
    hint = f"Give the run directory that `aiorl launch {engine}` printed."
    try:
        facts = parse_json(read_own(file, max_bytes=_MAX_FACTS_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{path} was not launched by `aiorl launch`: it has no {_FACTS}.",
            key="RUN",
            value=run,
            hint=hint,
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{error.filename or file} is not used: {error.strerror}.",
            key="RUN",
            value=run,
            hint=(
                "`aiorl status RUN` shows runs of other users, too; only their owners can manage"
                " them."
            ),
        ) from error
    except ValueError as error:
        raise _damaged(file, str(error), run) from error
    if not isinstance(facts, dict):
        raise _damaged(file, f"it is {facts!r:.50}", run)
    if facts.get("engine") != engine:
        raise ConfigError(
            f"{path} was not launched by {engine}, but by {facts.get('engine')!r:.30}.",
            key="RUN",
            value=run,
            hint=hint,
        )
    for name, is_right in (checks or {}).items():
        if name not in facts or not is_right(facts[name]):
            raise _damaged(file, f"{name} is {facts.get(name)!r:.50}", run)
    return path, facts


def _damaged(file: Path, reason: str, run: str) -> ConfigError:
    return ConfigError(
        f"{file} is damaged: {reason}.",
        key="RUN",
        value=run,
        hint="Launch the run again, which writes the file again, or end its processes by hand.",
    )


def absolute(path: str) -> Path:
    """Return the path that a user typed, without ``~`` and ``..``; links in it stay."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def check_printable(values: Mapping[str, Any]) -> None:
    """Refuse texts that a script, a manifest or a command line would read as something else.

    A line break ends a line of a script, and what follows is a command; YAML has no escapes in
    plain text; bytes that are no UTF-8 can't be written.

    Args:
        values: name -> text, or any value that can contain texts.

    Raises:
        ConfigError: a text has unprintable characters; the error names the value's name.
    """
    for name, value in values.items():
        for text in _texts(value):
            if not text.isprintable():
                raise ConfigError(
                    f"{name} has characters that can't be printed: {text!r:.200}.",
                    key=name,
                    value=text,
                    hint=(
                        "Write it on one line, in UTF-8; long settings can be in a file: --config"
                        " FILE."
                    ),
                )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str | os.PathLike):
        yield os.fspath(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


# The check of options
# --------------------------------------------------------------------------------------------------


def checked(words: Sequence[str]) -> Job:
    """Check `words`, the learner's options, on this machine, and return the job.

    The environment itself may exist only where the job runs. If the run's directory has a run, the
    options are checked as those of its resume.

    Raises:
        SystemExit: with status 2 after a sentence about wrong usage; with 0 if the options asked
            for a text.
    """
    check = subprocess.run(
        [*child_python("aiorl.launch.job"), *words],
        env={**os.environ, **python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(as_typed(check.stderr))
    facts: Any = None
    with contextlib.suppress(ValueError):
        facts = json.loads(check.stdout)
    if check.returncode or not isinstance(facts, dict):
        sys.stdout.write(check.stdout)
        raise SystemExit(check.returncode)
    typed = facts["typed"]
    port = 0
    if "bind" in typed:
        _, port = split_address(typed["bind"], key="bind")
    return Job(
        run_dir=_run_dir(facts["config"]),
        words=tuple(words),
        config=facts["config"],
        num_workers=typed.get("num_workers"),
        port=port or None,
    )


def _run_dir(config: Mapping[str, Any]) -> Path:
    """Return the run's absolute directory; for a run without one, a new name below ``runs``."""
    if config["run_dir"] is not None:
        return absolute(config["run_dir"])
    return new_run_dir(config["algo"], config["env"])


def new_run_dir(*names: object) -> Path:
    """Return an absolute path below ``runs``, made of names and the time, that does not exist."""
    parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)) for name in names]
    path = Path("runs").absolute() / "_".join([*parts, time.strftime("%Y-%m-%d_%H-%M-%S")])
    if path.exists():
        return path.with_name(f"{path.name}_{secrets.token_hex(2)}")
    return path


def _check(words: list[str]) -> None:
    """Print the facts of a job as JSON, or one sentence about wrong usage, and end with status
    2.
    """
    prepare_import()  # the module of a user's algorithm may load TensorFlow
    find_modules_here()
    from aiorl.learner import configure_learner, parse_learner_args
    from aiorl.learning.algorithms.registry import config_class

    config = configure_learner(words, config_class)
    if (
        config.run_dir
        and config.resume is None
        and os.path.exists(os.path.expanduser(f"{config.run_dir}/run.json"))
    ):
        place = ["--resume", config.run_dir, "--preset", "null", "--init-from", "null"]
        config = configure_learner([*words, *place], config_class)
    effective = {name: getattr(config, name) for name in _KEYS}
    overrides = parse_learner_args(words).overrides
    typed = {name: overrides[name] for name in ("num_workers", "bind") if name in overrides}
    sys.stdout.write(json.dumps({"config": effective, "typed": typed}))


if __name__ == "__main__":
    _check(sys.argv[1:])
