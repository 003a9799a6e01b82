"""What may be typed after `python -m aiorl.learner` and `python -m aiorl.worker`.

The options that people reach for have names of their own and are declared here, for tyro. Every other key of the
config, those of the algorithm included, is an option too (`--train-batch-size 4000`, `--model.use-lstm true`): its
value is read as YAML and checked by the config's own types, so that a mistake gets the same plain sentence wherever
it was made. Wrong usage ends with exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import tyro

from aiorl.config.address import split_address
from aiorl.config.load import ConfigClassOf, dump_yaml, load_config, parse_value
from aiorl.config.reference import render_text
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, nearest
from aiorl.process.restarts import DEFAULT_MAX_RESTARTS

__all__ = [
    "LEARNER_PROG",
    "LearnerArgs",
    "WorkerArgs",
    "configure_learner",
    "parse_learner_args",
    "parse_worker_args",
    "usage_error",
]

LEARNER_PROG = "python -m aiorl.learner"
WORKER_PROG = "python -m aiorl.worker"


@dataclass(frozen=True, slots=True)
class LearnerArgs:
    """What was asked of the learner.

    Attributes:
        overrides: config keys that the command line sets, nested as the config is.
        config_file: YAML file of keys, or None.
        print_config: print the effective config and end.
        help_config: print the reference of all keys and end.
        typed: dotted key -> the option it was typed as, for messages.
    """

    overrides: dict[str, Any] = field(default_factory=dict)
    config_file: Path | None = None
    print_config: bool = False
    help_config: bool = False
    typed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """What was asked of a worker, or of the supervisor of several.

    Attributes:
        connect: the learner's address, tcp://HOST:PORT.
        num_workers: worker processes on this host.
        keys: directory of this host's CURVE keys, or None.
        log_level: level of the log on stderr; None takes the learner's.
        max_worker_restarts: restarts of one worker process before it stays down.
        slot: index that the learner gave a worker which it started itself; None for all others.
        exit_with_parent: end as soon as the process that started this one is gone.
    """

    connect: str
    num_workers: int = 1
    keys: Path | None = None
    log_level: str | None = None
    max_worker_restarts: int = DEFAULT_MAX_RESTARTS
    slot: int | None = None
    exit_with_parent: bool = False


def _option(metavar: str, help_text: str, *, default: str = "") -> Any:
    """How tyro shows an option whose value stays text until the config checks it."""
    hint = f"(default: {default})" if default else ""
    return tyro.conf.arg(metavar=metavar, help=help_text, help_behavior_hint=hint)


def _switch(help_text: str) -> Any:
    return tyro.conf.arg(help=help_text, help_behavior_hint="")


@dataclass(frozen=True)
class _RunOptions:
    env: Annotated[str, _option("ID", "Gymnasium id, package.module:Name, module:registered-name or gym:ID.")] = ""
    algo: Annotated[str, _option("NAME", "Algorithm.", default="ppo")] = ""
    seed: Annotated[str, _option("N", "Seed of everything random.", default="a fresh one")] = ""
    stop_return: Annotated[str, _option("R", "End once the mean return of the last 100 episodes is R.")] = ""
    stop_timesteps: Annotated[str, _option("N", "End after N env steps.")] = ""
    stop_time_s: Annotated[str, _option("S", "End after S seconds.")] = ""
    run_dir: Annotated[str, _option("DIR", "Where all files go.", default="runs/<algo>_<env>_<time>")] = ""
    resume: Annotated[str, _option("DIR", "Go on with the run in DIR, from its newest checkpoint.")] = ""


@dataclass(frozen=True)
class _WorkerOptions:
    num_workers: Annotated[
        str, _option("N", "Worker processes started here. 0: only workers that join.", default="2")
    ] = ""
    num_envs_per_worker: Annotated[
        str, _option("N", "Environments that each worker steps together.", default="as --algo sets it")
    ] = ""
    vectorize: Annotated[str, _option("auto|native|serial|remote", "How they are stepped.", default="auto")] = ""
    max_worker_restarts: Annotated[str, _option("N", "Restarts of one worker before it is given up.", default="3")] = ""


@dataclass(frozen=True)
class _NetworkOptions:
    bind: Annotated[str, _option("ADDRESS", "Listen here.", default="tcp://127.0.0.1:0, any free port")] = ""
    keys: Annotated[str, _option("DIR", "CURVE keys, as python -m aiorl.keys DIR makes them.")] = ""
    insecure: Annotated[bool, _switch("Do without keys: let everyone join who reaches the address.")] = False


@dataclass(frozen=True)
class _ConfigOptions:
    config: Annotated[str, _option("FILE", "YAML file of config keys; options win over it.")] = ""
    set: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="KEY=VALUE", help="Set any config key, as in model.use_lstm=true.",
                      help_behavior_hint="(repeatable)"),
        tyro.conf.UseAppendAction,
    ] = ()  # fmt: skip
    print_config: Annotated[bool, _switch("Print the effective config as YAML and end.")] = False
    help_config: Annotated[bool, _switch("Explain every config key of --algo and end.")] = False


_PLAIN = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


@dataclass(frozen=True)
class _Learner:
    """Trains a policy, with worker processes here and on any host that joins."""

    run: _RunOptions = _RunOptions()
    workers: _WorkerOptions = _WorkerOptions()
    network: _NetworkOptions = _NetworkOptions()
    settings: _ConfigOptions = _ConfigOptions()


_LEARNER_EXAMPLES = """
Examples:
  # train here and now, workers included
  python -m aiorl.learner --env CartPole-v1 --stop-return 475
  # another algorithm, more workers, any config key
  python -m aiorl.learner --env CartPole-v1 --algo impala --num-workers 4 --lr 5e-4
  # go on with a run that ended or was killed
  python -m aiorl.learner --resume runs/ppo_CartPole-v1_2026-01-31_12-00-00
  # keep a config: write it, edit it, use it
  python -m aiorl.learner --env Pendulum-v1 --print-config > mine.yaml
  python -m aiorl.learner --config mine.yaml --seed 1
  # let workers of other hosts join
  python -m aiorl.learner --env CartPole-v1 --bind tcp://0.0.0.0:5557 --keys keys

Every config key is an option: --train-batch-size 4000, --model.fcnet-hiddens "[256, 256]".
"""


@dataclass(frozen=True)
class _Worker:
    """Samples for a learner; may join at any time, and waits for a learner that is away."""

    connect: Annotated[str, _option("tcp://HOST:PORT", "The learner's address, which it shows at its start.")] = ""
    num_workers: Annotated[str, _option("N", "Worker processes on this host.", default="1")] = ""
    keys: Annotated[str, _option("DIR", "This host's CURVE keys, as python -m aiorl.keys makes them.")] = ""
    max_worker_restarts: Annotated[
        str, _option("N", "Restarts of one worker process before it stays down.", default=str(DEFAULT_MAX_RESTARTS))
    ] = ""
    log_level: Annotated[str, _option("DEBUG|INFO|WARN|ERROR", "Level of the log.", default="the learner's")] = ""


_WORKER_EXAMPLES = """
Examples:
  # one worker for a learner on this host
  python -m aiorl.worker --connect tcp://127.0.0.1:5557
  # eight workers on this host for a learner on another one
  python -m aiorl.worker --connect tcp://learner-host:5557 --num-workers 8 --keys keys

Environment, policy and config come from the learner: the address (and keys) is all a worker needs. Keys of a learner
of the same user on the same host it finds by itself.
"""

_WORKER_HIDDEN = {"slot": str, "exit-with-parent": bool}
"""Options that the learner gives the workers it starts itself; not in the help."""


def parse_learner_args(argv: Sequence[str]) -> LearnerArgs:
    """What the learner's command line says; its config keys are not checked yet.

    Args:
        argv: without the program's name.
    Raises: SystemExit, with status 0 after --help and 2 after one sentence about wrong usage.
    """
    named, others = _split(argv, _kinds(_Learner), LEARNER_PROG, take_others=True)
    options = _parse(_Learner, named, LEARNER_PROG, _LEARNER_EXAMPLES)
    args = LearnerArgs(
        config_file=Path(options.settings.config) if options.settings.config else None,
        print_config=options.settings.print_config,
        help_config=options.settings.help_config,
    )
    for name, text in others:
        _set(args, name.replace("-", "_"), parse_value(text), f"--{name}")
    for pair in options.settings.set:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            usage_error(LEARNER_PROG, f"--set takes KEY=VALUE, such as --set lr=3e-4, not {pair!r}.")
        _set(args, name.strip(), parse_value(text), f"--set {name.strip()}")
    for group in (options.run, options.workers, options.network):
        for name in (item.name for item in fields(group)):
            value = getattr(group, name)
            if value not in ("", False):
                typed_as_text = name in ("env", "algo", "run_dir", "resume", "bind", "keys")
                _set(args, name, value if typed_as_text or value is True else parse_value(value), _flag(name))
    return args


def configure_learner(argv: Sequence[str], config_class_of: ConfigClassOf) -> CommonConfig:
    """The effective config of a learner started with `argv`; does what --print-config and --help-config ask.

    Args:
        argv: without the program's name.
        config_class_of: name of an algorithm -> its config class; raises UnknownAlgorithmError for others.
    Raises: SystemExit, with status 0 after something was printed, 2 after one sentence about wrong usage.
    """
    args = parse_learner_args(argv)
    config_class: type[CommonConfig] = CommonConfig
    try:
        config_class = config_class_of(str(args.overrides.get("algo", CommonConfig.model_fields["algo"].default)))
        if args.help_config:
            sys.stdout.write(render_text(config_class))
            raise SystemExit(0)
        config = load_config(config_class_of, file=args.config_file, overrides=args.overrides)
    except ConfigError as error:
        usage_error(LEARNER_PROG, _as_typed(error, args, config_class))
    if args.print_config:
        sys.stdout.write(dump_yaml(config))
        raise SystemExit(0)
    return config


def parse_worker_args(argv: Sequence[str]) -> WorkerArgs:
    """What the worker's command line says.

    Args:
        argv: without the program's name.
    Raises: SystemExit, with status 0 after --help and 2 after one sentence about wrong usage.
    """
    visible = _kinds(_Worker)
    words, _ = _split(argv, {**visible, **_WORKER_HIDDEN}, WORKER_PROG, take_others=False)
    hidden = {}
    named = []
    for word in words:
        name, _, text = word.removeprefix("--").partition("=")
        if name in _WORKER_HIDDEN:
            hidden[name] = text
        else:
            named.append(word)
    options = _parse(_Worker, named, WORKER_PROG, _WORKER_EXAMPLES)
    if not options.connect:
        usage_error(WORKER_PROG, "Where is the learner? Give its address: --connect tcp://HOST:PORT")
    try:
        _, port = split_address(options.connect, key="--connect")
    except ConfigError as error:
        usage_error(WORKER_PROG, str(error))
    if port == 0:
        usage_error(WORKER_PROG, f"--connect needs the learner's port, not 0, in {options.connect!r}.")
    levels = ("DEBUG", "INFO", "WARN", "ERROR")
    if options.log_level and options.log_level.upper() not in levels:
        usage_error(WORKER_PROG, f"--log-level must be {' or '.join(levels)}, not {options.log_level!r}.")
    return WorkerArgs(
        connect=options.connect,
        num_workers=_whole(options.num_workers, "--num-workers", least=1) if options.num_workers else 1,
        keys=Path(options.keys) if options.keys else None,
        log_level=options.log_level.upper() or None,
        slot=_whole(hidden["slot"], "--slot", least=0) if "slot" in hidden else None,
        exit_with_parent="exit-with-parent" in hidden,
        max_worker_restarts=(
            _whole(options.max_worker_restarts, "--max-worker-restarts", least=0)
            if options.max_worker_restarts
            else DEFAULT_MAX_RESTARTS
        ),
    )


def usage_error(prog: str, sentence: str) -> NoReturn:
    """Says what was wrong with the command line, and ends with status 2."""
    sys.stderr.write(f"{prog}: {sentence}\n(`{prog} --help` shows examples.)\n")
    raise SystemExit(2)


def _parse(options: type[Any], argv: list[str], prog: str, examples: str) -> Any:
    """An instance of `options`; Any because tyro's overloads can't follow the type of a private dataclass."""
    try:
        return tyro.cli(options, args=argv, prog=prog, config=_PLAIN)
    except SystemExit:
        if argv == ["--help"]:
            sys.stdout.write(examples)
        raise


def _split(
    argv: Sequence[str], kinds: Mapping[str, type], prog: str, *, take_others: bool
) -> tuple[list[str], list[tuple[str, str]]]:
    """Sorts `argv` into named options, ready for tyro, and others, which may be config keys."""
    named: list[str] = []
    others: list[tuple[str, str]] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        if word in ("-h", "--help"):
            return ["--help"], []
        if not word.startswith("--") or word == "--":
            usage_error(prog, f"{word!r} belongs to no option.")
        name, equals, text = word[2:].partition("=")
        kind = kinds.get(name.replace("_", "-"))
        if kind is None and not take_others:
            hint = nearest(f"--{name}", [f"--{known}" for known in kinds])
            usage_error(prog, f"There is no option --{name}.{hint}")
        if kind is bool:
            if equals:
                usage_error(prog, f"--{name} takes no value.")
            named.append(f"--{name.replace('_', '-')}")
            continue
        if not equals:
            if waiting and not waiting[0].startswith("--"):
                text = waiting.pop(0)
            elif kind is None:
                text = "true"
            else:
                usage_error(prog, f"--{name} needs a value.")
        if kind is None:
            others.append((name, text))
        else:
            named.append(f"--{name.replace('_', '-')}={text}")
    return named, others


def _kinds(options: type[Any]) -> dict[str, type]:
    """Option name -> bool for a switch, str for one that takes a value."""
    kinds: dict[str, type] = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        if is_dataclass(hint) and isinstance(hint, type):
            kinds.update(_kinds(hint))
        else:
            kinds[name.replace("_", "-")] = bool if get_args(hint)[0] is bool else str
    return kinds


def _set(args: LearnerArgs, dotted: str, value: Any, typed: str) -> None:
    args.typed[dotted] = typed
    *groups, last = dotted.split(".")
    inner = args.overrides
    for group in groups:
        below = inner.setdefault(group, {})
        if not isinstance(below, dict):
            usage_error(LEARNER_PROG, f"{typed} and {_flag(group)} can't both be given.")
        inner = below
    inner[last] = value


def _as_typed(error: ConfigError, args: LearnerArgs, config_class: type[CommonConfig]) -> str:
    """The error's sentence, with options where it would name keys that were typed as options."""
    typed = args.typed.get(error.key)
    if typed is None or typed.startswith("--set "):
        return str(error)
    if error.message.startswith("There is no key"):
        known = [_flag(name) for name in config_class.model_fields]
        known += [f"--{name}" for name in _kinds(_Learner)]
        return f"There is no option {typed}.{nearest(_flag(error.key), dict.fromkeys(known), count=1)}".rstrip()
    return str(error).replace(error.key, typed, 1) if str(error).startswith(error.key) else str(error)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _whole(text: str, option: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        usage_error(WORKER_PROG, f"{option} must be a whole number of at least {least}, not {text!r}.")
    return int(text)
