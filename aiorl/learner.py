"""`python -m aiorl.learner`: training, with its workers, from the command line.

Every key of the config, including those of the algorithm, is an option (`--train-batch-size 4000`,
`--model.use-lstm`). Its value is read as YAML and checked by the config's own types, so a mistake
gets the same message wherever it is made. The help shows the options used most, with the meanings
and defaults from their declarations.
"""

from __future__ import annotations

from aiorl.process.program import end_at_once_on_stop_signals

if __name__ == "__main__":
    end_at_once_on_stop_signals("aiorl")  # before imports that take a second

import argparse
import contextlib
import faulthandler
import logging
import logging.handlers
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_origin

from aiorl.config import deep_update
from aiorl.config.command_line import Parser, spelt, usage_error
from aiorl.config.key import all_keys, default_text, expected, fact_of, meanings, render_keys
from aiorl.config.layers import (
    DEFAULT_ALGO,
    ConfigClassOf,
    Layer,
    algo_of,
    dump_yaml,
    load_config,
    render_effective,
)
from aiorl.config.parts import RuntimePart
from aiorl.config.presets import render_presets
from aiorl.config.rllib_file import CALLED, key_hint
from aiorl.config.schema import CommonConfig
from aiorl.config.yaml_text import parse_value
from aiorl.errors import (
    AiorlError,
    CheckpointError,
    ConfigError,
    InternalError,
    UnsupportedEnvError,
    described,
    nearest,
)
from aiorl.learning.algorithm import want_stored_experience
from aiorl.learning.algorithms.registry import config_class
from aiorl.process.imports import prepare_import
from aiorl.process.machine import is_debugged, on_debugger
from aiorl.process.program import CTRL_C, keep_output_from_failing

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from aiorl.acting.run_dir import RunDirectory
    from aiorl.run.build import LearningPlan
    from aiorl.run.run import Run

__all__ = ["command", "main"]

_PROG = "python -m aiorl.learner"

_ABOUT = "Trains a policy, with worker processes on this host and on any host that joins."
_TEXT = ("text", "text or null")
_SHOWN = {
    "run": {
        "env": "ID",
        "algo": "NAME",
        "preset": "NAME",
        "seed": "N",
        "stop_return": "R",
        "stop_timesteps": "N",
        "stop_time_s": "S",
        "run_dir": "DIR",
        "resume": "DIR",
        "init_from": "DIR",
    },
    "workers": {
        "num_workers": "N",
        "num_envs_per_worker": "N",
        "vectorize": "HOW",
        "max_worker_restarts": "N",
    },
    "evaluation and data": {"evaluation_interval": "N", "input": "PATH", "output": "PATH"},
    "network": {
        "bind": "ADDRESS",
        "keys": "DIR",
        "insecure": "",
        "web": "PORT",
        "client_port": "PORT",
        "allow_origin": "URL",
    },
}
"""Keys that the help shows, and the placeholders of their values."""

_EXAMPLES = """
Examples:
  # train, with workers on this host
  python -m aiorl.learner --env CartPole-v1 --stop-return 475
  # another algorithm, more workers, any config key
  python -m aiorl.learner --env CartPole-v1 --algo impala --num-workers 4 --lr 5e-4
  # settings made for the environment
  python -m aiorl.learner --env Acrobot-v1 --preset auto
  # continue a run that ended or was killed
  python -m aiorl.learner --resume runs/ppo_CartPole-v1_2026-01-31_12-00-00
  # write a config to a file, edit it and use it
  python -m aiorl.learner --env Pendulum-v1 --print-config > mine.yaml
  python -m aiorl.learner --config mine.yaml --seed 1
  # let workers on other hosts join
  python -m aiorl.learner --env CartPole-v1 --bind tcp://0.0.0.0:5557 --keys keys

Every config key is an option: --train-batch-size 4000, --model.fcnet-hiddens "[256, 256]".
"""

logger = logging.getLogger("aiorl.learner")

_MAX_EARLY = 1000  # log records kept until there is a file for them
_END_WITHIN_S = 60.0
_BACK_WITHIN_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit status, by which engines decide on a restart.

    0 means that a stop criterion was met or Ctrl-C ended the run, 1 failed, 2 wrong usage, 143 that
    SIGTERM or SIGHUP ended the run after its checkpoint was written.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    early = _EarlyLog()
    logging.getLogger().addHandler(early)
    try:
        return _main(sys.argv[1:] if argv is None else argv, early)
    finally:
        logging.getLogger().removeHandler(early)


def _main(argv: Sequence[str], early: _EarlyLog) -> int:
    prepare_import()  # the module of a user's algorithm may load TensorFlow
    config = configure_learner(argv, config_class)
    os.environ.update(config.extra_python_environs_for_driver)
    logging.getLogger("aiorl").setLevel(config.log_level.replace("WARN", "WARNING"))
    logging.captureWarnings(True)
    try:
        _check_names(config)
        plan = _planned(config)
    except (ConfigError, UnsupportedEnvError) as error:  # wrong usage, before any file is made
        sys.stderr.write(f"aiorl: {error}\n")
        return 2
    if plan is not None:
        config = plan.config
    from aiorl.acting.run_dir import RunDirectory

    try:
        directory = RunDirectory.open(config)
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"aiorl: {error}\n")
        return 1
    _log_to(directory.logs(config.num_workers), early, config.log_max_bytes)
    with directory:
        return _train(config, directory, plan)


# The command line
# --------------------------------------------------------------------------------------------------


class LearnerArgs(NamedTuple):
    """Command line of the learner.

    Attributes:
        overrides: config keys set on the command line, nested as in the config.
        typed: dotted key -> option as typed, for messages.
        config_file: YAML file of keys, or None.
        print_config: print the effective config and exit.
        show_config: print each effective value with its origin and exit.
        help_config: print the reference of all keys and exit.
        help_presets: print all presets and exit.
    """

    overrides: dict[str, Any]
    typed: dict[str, str]
    config_file: Path | None = None
    print_config: bool = False
    show_config: bool = False
    help_config: bool = False
    help_presets: bool = False


def parse_learner_args(
    argv: Sequence[str], config_class_of: ConfigClassOf = lambda name: CommonConfig
) -> LearnerArgs:
    """Parse the learner's command line without checking its config keys.

    Args:
        argv: arguments without the program's name.
        config_class_of: name of an algorithm -> its config class; the help shows the defaults of
            that class.

    Raises:
        SystemExit: with status 0 after --help, or 2 after one sentence about wrong usage.
    """
    options = _parser(_class_to_explain(argv, config_class_of), argv).parse(argv)
    pairs: list[str] = options.pop("set", [])
    requests = {
        name: options.pop(name, False)
        for name in ("print_config", "show_config", "help_config", "help_presets")
    }
    args = LearnerArgs({}, {}, options.pop("config", None), **requests)
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            usage_error(_PROG, f"--set takes KEY=VALUE, such as --set lr=3e-4, not {pair!r}.")
        _set(args, name.strip(), parse_value(text), f"--set {name.strip()}")
    texts = {
        name
        for name, declared in all_keys(CommonConfig).items()
        if expected(declared.annotation) in _TEXT
    }
    for name, value in options.items():
        is_final = value is True or (name in texts and value != "null")
        if isinstance(value, list):  # the values of an option that can be repeated
            value = [part for text in value for part in _as_list(parse_value(text))]
        elif not is_final:
            value = parse_value(value)
        _set(args, name, value, _flag(name))
    return args


def configure_learner(argv: Sequence[str], config_class_of: ConfigClassOf) -> CommonConfig:
    """Return the effective config of a learner started with `argv`, or print the requested help or
    config and exit.

    Args:
        argv: arguments without the program's name.
        config_class_of: name of an algorithm -> its config class; raises UnknownAlgorithmError for
            unknown names.

    Raises:
        SystemExit: with status 0 after printing, or 2 after one sentence about wrong usage.
    """
    args = LearnerArgs({}, {})
    config_class = CommonConfig
    try:
        args = parse_learner_args(argv, config_class_of)
        if args.help_presets:
            _print_and_end(render_presets())
        config_class = config_class_of(algo_of([Layer(args.overrides)]))
        if args.help_config:
            _print_and_end(render_keys(config_class))
        config = load_config(
            config_class_of, file=args.config_file, overrides=args.overrides, warn=_warn
        )
    except ConfigError as error:
        usage_error(_PROG, _as_typed(error, args, config_class))
    if args.print_config:
        _print_and_end(dump_yaml(config))
    if args.show_config:
        _print_and_end(render_effective(config))
    return config


def _warn(text: str) -> None:
    sys.stderr.write(f"aiorl: {text}\n")
    sys.stderr.flush()


def _print_and_end(text: str) -> NoReturn:
    sys.stdout.write(text)
    raise SystemExit(0)


def _parser(config_class: type[CommonConfig], argv: Sequence[str]) -> Parser:
    """Make a parser for the options in the help and for all others in `argv`, which the config
    checks later.
    """
    parser = Parser(_PROG, "--env ID [options]", _ABOUT, _EXAMPLES)
    meaning_of = {}
    if {"-h", "--help"} & set(argv):  # reading the meanings takes time
        meaning_of = meanings(config_class)
    for title, names in _SHOWN.items():
        group = parser.add_argument_group(title)
        for name, metavar in names.items():
            text = meaning_of.get(name, "").replace("%", "%%")
            if metavar:
                declared = config_class.model_fields[name]
                text += _notes(declared)
                # several values of a list are given one by one, or as one list
                action = "append" if get_origin(declared.annotation) is list else "store"
                group.add_argument(_flag(name), action=action, metavar=metavar, help=text)
            else:
                group.add_argument(_flag(name), action="store_true", help=text)
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config", metavar="FILE", type=Path, help="YAML file of config keys; options override it."
    )
    parser.hints["-f"] = "--config FILE reads settings, including experiment files for rllib train."
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        help="Set any config key, as in model.use_lstm=true; repeatable.",
    )
    group.add_argument(
        "--print-config", action="store_true", help="Print the effective config as YAML and exit."
    )
    group.add_argument(
        "--show-config",
        action="store_true",
        help="Print each effective value with its origin and exit.",
    )
    group.add_argument(
        "--help-config", action="store_true", help="Explain every config key of --algo and exit."
    )
    group.add_argument(
        "--help-presets", action="store_true", help="List the presets with their settings and exit."
    )
    declared_options = {*parser.options()}
    for word in dict.fromkeys(word.partition("=")[0] for word in spelt(argv)):
        if word.startswith("--") and len(word) > 2 and word not in declared_options:
            parser.add_argument(word, nargs="?", const="true", help=argparse.SUPPRESS)
    return parser


def _notes(declared: FieldInfo) -> str:
    """Return the unit and the default of a key in brackets, if it has any."""
    default = default_text(declared)
    notes = [fact_of(declared, "unit")]
    if default != "null":
        notes.append(f"default: {default}")
    text = "; ".join(filter(None, notes))
    return f" ({text})" if text else ""


def _class_to_explain(argv: Sequence[str], config_class_of: ConfigClassOf) -> type[CommonConfig]:
    """Return the config class of the algorithm named in `argv`; unknown algorithms raise an error
    later.
    """
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--algo", nargs="?", default=DEFAULT_ALGO)
    try:
        return config_class_of(str(peek.parse_known_args(argv)[0].algo))
    except ConfigError:
        return CommonConfig


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _set(args: LearnerArgs, dotted: str, value: Any, typed: str) -> None:
    args.typed[dotted] = typed
    *groups, last = dotted.split(".")
    inner = args.overrides
    for group in groups:
        below = inner.setdefault(group, {})
        if not isinstance(below, dict):
            usage_error(_PROG, f"{typed} and {_flag(group)} cannot both be given.")
        inner = below
    # a group merges with the keys of it that were set before
    inner.update(deep_update(inner, {last: value}))


def _as_typed(error: ConfigError, args: LearnerArgs, config_class: type[CommonConfig]) -> str:
    """Return the error's message, with options in place of keys that were typed as options."""
    text = str(error)
    typed = args.typed.get(error.key)
    if typed is None or typed.startswith("--set "):
        return text
    if error.message != f"There is no key {error.key}.":
        return typed + text.removeprefix(error.key) if text.startswith(error.key) else text
    if key_hint(error.key, {}):
        hint = re.sub(rf"^{CALLED}([\w.]*\w)", lambda key: CALLED + _flag(key[1]), error.hint)
        return f"There is no option {typed}. {hint}"
    options = [_flag(name) for name in all_keys(config_class)]
    options += _parser(config_class, []).options()
    hint = nearest(typed, dict.fromkeys(options), count=1)
    return f"There is no option {typed}.{hint}"


def _flag(key: str) -> str:
    return f"--{key.rstrip('_').replace('_', '-')}"


# Training
# --------------------------------------------------------------------------------------------------


class _EarlyLog(logging.handlers.MemoryHandler):
    """Buffer for log records until there is a log file; shows aiorl's warnings until there is a
    display.
    """

    def __init__(self) -> None:
        super().__init__(_MAX_EARLY, flushLevel=logging.CRITICAL + 1, flushOnClose=False)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.levelno >= logging.WARNING and record.name.startswith("aiorl"):
            sys.stderr.write(f"aiorl: {record.getMessage()}\n")


def _check_names(config: CommonConfig) -> None:
    """Exit with a usage error if the environment, the keys or stored experience that is needed
    cannot be found.
    """
    from aiorl.env.registry import resolve_env
    from aiorl.net.transport.security import load_learner_keys

    try:
        resolve_env(config.env or "")
        if config.keys is not None:
            load_learner_keys(Path(config.keys))
        if config.is_offline:  # known before TensorFlow is loaded
            want_stored_experience(config)
    except ConfigError as error:
        usage_error(_PROG, str(error))


def _planned(config: CommonConfig) -> LearningPlan | None:
    """Plan the run before any file is made; return None if planning fails for another reason than
    the user's settings.

    Raises:
        ConfigError: a setting is impossible.
        UnsupportedEnvError: aiorl cannot step the environment.
    """
    from aiorl.learning.tf_runtime import begin_loading, prepare_environment

    prepare_environment(RuntimePart.of(config))  # a user's module may load TensorFlow
    begin_loading()
    from aiorl.run.build import plan_learning

    try:
        return plan_learning(config)
    except (ConfigError, UnsupportedEnvError):
        raise
    except AiorlError:
        return None  # it recurs later, when there is a log


def _train(config: CommonConfig, directory: RunDirectory, plan: LearningPlan | None) -> int:
    """Train and return the exit status.

    The event loop has its own thread. A run without workers samples and learns in the current
    thread, so that a debugger, a profiler and ``print`` see everything.
    """
    from aiorl.run.run import Run
    from aiorl.run.threads import LoopThread

    loop = LoopThread("aiorl-run")
    is_back = threading.Event()
    run = Run(config, directory, plan=plan, caller=loop)

    def make_way() -> None:
        # raised on the loop itself, where nothing is drawn meanwhile
        with contextlib.suppress(InternalError):
            loop.do(run.make_way)

    def end_without(status: int) -> None:
        # this thread can be in an environment or an update, which cannot be interrupted
        if not is_back.wait(_BACK_WITHIN_S):
            _end_process(status)

    async def train() -> int:
        status = await _status_of(run, directory)
        threading.Thread(target=end_without, args=(status,), daemon=True).start()
        return status

    on_debugger(make_way)
    loop.on_stop_signals(lambda name: run.request_stop(f"Ended by {name}.", final=name == CTRL_C))
    try:
        return loop.call(train())
    finally:
        is_back.set()
        loop.close()


async def _status_of(run: Run, directory: RunDirectory) -> int:
    """Train and return the exit status."""
    log = directory.shown / directory.log.name
    # If even the end hangs, print the stacks and exit with status 1, in a thread without the loop
    # or Python's lock
    run.on_release = lambda: faulthandler.dump_traceback_later(_END_WITHIN_S, exit=True)
    try:
        outcome = await run.run()
    except Exception as error:
        logger.exception("the run failed")
        text = str(error) if isinstance(error, AiorlError) else f"unexpected {described(error)}"
        sys.stderr.write(f"aiorl: {text}\n")
        if run.is_misconfigured:
            return 2
        sys.stderr.write(f"(the traceback is in {log})\n")
        return 1
    run.show(run.summary(outcome))
    if not outcome.ok:
        return 1
    return 0 if run.is_final else 128 + signal.SIGTERM


def _log_to(logs: Sequence[Path], early: _EarlyLog, max_bytes: int) -> None:
    """Write all log records, including early ones, to the first log; the display shows warnings by
    itself.

    Keeps that file and the logs of local workers small from now on.
    """
    from aiorl.process.kept_logs import LogRotation
    from aiorl.run.report.log_files import LogFile

    handler = LogFile(logs[0])
    root = logging.getLogger()
    root.addHandler(handler)
    root.removeHandler(early)
    early.setTarget(handler)
    early.flush()
    early.close()
    LogRotation(logs, max_bytes)


def command() -> None:
    """Run the program: train and end the process, even if threads are left."""
    end_at_once_on_stop_signals("aiorl")  # until the run handles them
    keep_output_from_failing()
    status = main()
    if is_debugged():  # a profiler still has to write its results
        sys.exit(status)
    _end_process(status)


def _end_process(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # TensorFlow's threads, or a running import, must not keep the process alive


if __name__ == "__main__":
    command()
