"""All that may be set, for people: the learner's options, its help, and the generated pages of the documentation.

Every key of the config, including those of the algorithm, is an option (`--train-batch-size 4000`, `--model.use-lstm`).
Its value is read as YAML and checked by the config's own types, so a mistake gets the same plain sentence wherever it
is made. The help shows the options that people reach for, with the meanings and defaults of their declarations.

`python -m aiorl.config.reference` prints docs/config.md, `... reference presets` prints docs/presets.md, and
`... reference PAGE...` makes the tables of other libraries' names in these pages again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aiorl.config.check import CALLED, NONE, key_hint, other_names
from aiorl.config.command_line import Parser, spelt, usage_error
from aiorl.config.files import parse_value
from aiorl.config.key import all_keys, as_written, by_group, expected, group_of, unit_of, where_of
from aiorl.config.layers import (
    DEFAULT_ALGO,
    ConfigClassOf,
    Layer,
    algo_of,
    dump_yaml,
    load_config,
    named_preset,
    preset_names,
    render_effective,
)
from aiorl.config.merge import to_plain
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, nearest

LEARNER_PROG = "python -m aiorl.learner"

_ABOUT = "Trains a policy, with worker processes here and on any host that joins."
_TEXT = ("text", "text or null")
_SHOWN = {
    "run": {
        "env": "ID", "algo": "NAME", "preset": "NAME", "seed": "N", "stop_return": "R", "stop_timesteps": "N",
        "stop_time_s": "S", "run_dir": "DIR", "resume": "DIR", "init_from": "DIR",
    },
    "workers": {
        "num_workers": "N", "num_envs_per_worker": "N", "vectorize": "HOW", "max_worker_restarts": "N",
    },
    "evaluation and data": {"evaluation_interval": "N", "input": "PATH", "output": "PATH"},
    "network": {"bind": "ADDRESS", "keys": "DIR", "insecure": ""},
}  # fmt: skip
"""Keys that the help shows, and the placeholders of their values."""

_EXAMPLES = """
Examples:
  # train here and now, workers included
  python -m aiorl.learner --env CartPole-v1 --stop-return 475
  # another algorithm, more workers, any config key
  python -m aiorl.learner --env CartPole-v1 --algo impala --num-workers 4 --lr 5e-4
  # settings made for the environment
  python -m aiorl.learner --env Acrobot-v1 --preset auto
  # go on with a run that ended or was killed
  python -m aiorl.learner --resume runs/ppo_CartPole-v1_2026-01-31_12-00-00
  # keep a config: write it, edit it, use it
  python -m aiorl.learner --env Pendulum-v1 --print-config > mine.yaml
  python -m aiorl.learner --config mine.yaml --seed 1
  # let workers of other hosts join
  python -m aiorl.learner --env CartPole-v1 --bind tcp://0.0.0.0:5557 --keys keys

Every config key is an option: --train-batch-size 4000, --model.fcnet-hiddens "[256, 256]".
"""


class LearnerArgs(NamedTuple):
    """Command line of the learner.

    Attributes:
        overrides: config keys that the command line sets, nested as the config is.
        typed: dotted key -> the option it was typed as, for messages.
        config_file: YAML file of keys, or None.
        print_config: print the effective config and end.
        show_config: print each effective value and its origin, and end.
        help_config: print the reference of all keys and end.
        help_presets: print all presets and end.
    """

    overrides: dict[str, Any]
    typed: dict[str, str]
    config_file: Path | None = None
    print_config: bool = False
    show_config: bool = False
    help_config: bool = False
    help_presets: bool = False


def parse_learner_args(argv: Sequence[str], config_class_of: ConfigClassOf = lambda name: CommonConfig) -> LearnerArgs:
    """Return what the learner's command line says; its config keys are not checked yet.

    Args:
        argv: without the program's name.
        config_class_of: name of an algorithm -> its config class, whose defaults the help shows.
    Raises: SystemExit, with status 0 after --help and 2 after one sentence about wrong usage.
    """
    found = _parser(_class_to_explain(argv, config_class_of), argv).parse(argv)
    pairs: list[str] = found.pop("set", [])
    asked = {name: found.pop(name, False) for name in ("print_config", "show_config", "help_config", "help_presets")}
    args = LearnerArgs({}, {}, found.pop("config", None), **asked)
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            usage_error(LEARNER_PROG, f"--set takes KEY=VALUE, such as --set lr=3e-4, not {pair!r}.")
        _set(args, name.strip(), parse_value(text), f"--set {name.strip()}")
    texts = {name for name, declared in all_keys(CommonConfig) if expected(declared.annotation) in _TEXT}
    for name, text in found.items():
        is_said = text is True or (name in texts and text != "null")
        _set(args, name, text if is_said else parse_value(text), _flag(name))
    return args


def configure_learner(argv: Sequence[str], config_class_of: ConfigClassOf) -> CommonConfig:
    """Return the effective config of a learner started with `argv`, or print what was asked for instead.

    Args:
        argv: without the program's name.
        config_class_of: name of an algorithm -> its config class; raises UnknownAlgorithmError for others.
    Raises: SystemExit, with status 0 after something was printed, 2 after one sentence about wrong usage.
    """
    args, config_class = LearnerArgs({}, {}), CommonConfig
    try:
        args = parse_learner_args(argv, config_class_of)
        if args.help_presets:
            _print_and_end(render_presets())
        config_class = config_class_of(algo_of([Layer(args.overrides)]))
        if args.help_config:
            _print_and_end(render_keys(config_class))
        config = load_config(config_class_of, file=args.config_file, overrides=args.overrides, warn=_warn)
    except ConfigError as error:
        usage_error(LEARNER_PROG, _as_typed(error, args, config_class))
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
    """Make a parser of the options that the help shows and of all others in `argv`: the config knows the keys."""
    parser = Parser(LEARNER_PROG, "--env ID [options]", _ABOUT, _EXAMPLES)
    for title, names in _SHOWN.items():
        group = parser.add_argument_group(title)
        for name, metavar in names.items():
            declared = config_class.model_fields[name]
            text, default = str(declared.description).replace("%", "%%"), default_text(declared)
            if not metavar:
                group.add_argument(_flag(name), action="store_true", help=text)
                continue
            notes = "; ".join(filter(None, [unit_of(declared), "" if default == "null" else f"default: {default}"]))
            group.add_argument(_flag(name), metavar=metavar, help=f"{text} ({notes})" if notes else text)
    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", type=Path, help="YAML file of config keys; options win over it.")
    parser.hints["-f"] = "--config FILE reads settings, also those of an experiment for rllib train."
    group.add_argument(
        "--set", metavar="KEY=VALUE", action="append", help="Set any config key, as in model.use_lstm=true; repeatable."
    )
    group.add_argument("--print-config", action="store_true", help="Print the effective config as YAML and end.")
    group.add_argument(
        "--show-config", action="store_true", help="Print each effective value and where it comes from, and end."
    )
    group.add_argument("--help-config", action="store_true", help="Explain every config key of --algo and end.")
    group.add_argument("--help-presets", action="store_true", help="List the presets with their settings and end.")
    declared_options = {*parser.options()}
    for word in dict.fromkeys(word.partition("=")[0] for word in spelt(argv)):
        if word.startswith("--") and len(word) > 2 and word not in declared_options:
            parser.add_argument(word, nargs="?", const="true", help=argparse.SUPPRESS)
    return parser


def _class_to_explain(argv: Sequence[str], config_class_of: ConfigClassOf) -> type[CommonConfig]:
    """Return the config class of the algorithm that is asked for; unknown algorithms are refused later."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--algo", nargs="?", default=DEFAULT_ALGO)
    try:
        return config_class_of(str(peek.parse_known_args(argv)[0].algo))
    except ConfigError:
        return CommonConfig


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
    """Return the error's sentence, with options in place of keys that were typed as options."""
    typed = args.typed.get(error.key)
    if typed is None or typed.startswith("--set "):
        return str(error)
    if error.message == f"There is no key {error.key}.":
        if key_hint(error.key, {}):
            hint = re.sub(rf"^{CALLED}([\w.]*\w)", lambda found: CALLED + _flag(found[1]), error.hint)
            return f"There is no option {typed}. {hint}"
        known = [_flag(name) for name, _ in all_keys(config_class)] + _parser(config_class, []).options()
        return f"There is no option {typed}.{nearest(typed, dict.fromkeys(known), count=1)}".rstrip()
    return str(error).replace(error.key, typed, 1) if str(error).startswith(error.key) else str(error)


def _flag(key: str) -> str:
    return f"--{key.rstrip('_').replace('_', '-')}"


# Help and pages of the documentation --------------------------------------------------------------------------


def config_page(model: type[BaseModel] = CommonConfig) -> str:
    """Return the text of docs/config.md: one table for each group of keys."""
    lines = [
        "# Config reference",
        "",
        "The keys that all algorithms share. An algorithm has other defaults and more keys of its own; see all of",
        "them with `python -m aiorl.learner --algo NAME --help-config`. A key is set in a YAML file (`--config FILE`),",
        "or on the command line as `--key-name VALUE` or `--set key=VALUE`; the command line wins. Written with a dot,",
        "`model.use_lstm` is the key `use_lstm` inside `model`.",
        "",
        "Where: L is the learner, W the workers, B both; workers get their part from the learner.",
    ]
    for group, keys in _grouped(model):
        lines += ["", f"## {group}", "", "| Key | Default | Type | Where | Meaning |", "|---|---|---|---|---|"]
        for dotted, field in keys:
            where, meaning = where_of(field)[:1].upper(), str(field.description).replace("|", "\\|")
            lines.append(f"| `{dotted}` | `{default_text(field)}` | {_kind(field)} | {where} | {meaning} |")
    return "\n".join(lines) + "\n"


def render_keys(model: type[BaseModel]) -> str:
    """Return each key with its default, and its meaning below, for `--help-config`."""
    lines: list[str] = []
    for group, keys in _grouped(model):
        lines += ["", group.upper()]
        for dotted, field in keys:
            lines += [f"  {dotted}: {default_text(field)}", f"      {field.description} ({_kind(field)})"]
    return "\n".join(lines[1:]) + "\n"


def default_text(field: FieldInfo) -> str:
    """Return a key's default as a config file would say it."""
    return as_written(to_plain(field.get_default(call_default_factory=True)))


def _kind(field: FieldInfo) -> str:
    unit = unit_of(field)
    return expected(field.annotation) + (f"; {unit}" if unit else "")


def _grouped(model: type[BaseModel]) -> Iterable[tuple[str, Iterable[tuple[str, FieldInfo]]]]:
    return groupby(by_group(all_keys(model)), key=lambda named: group_of(named[1]))


def render_presets() -> str:
    """Return each preset with its environments, its result and its settings, for `--help-presets`."""
    paragraphs = []
    for preset in map(named_preset, preset_names()):
        lines = [f"{preset.name}: {', '.join(preset.envs)}", f"  Result: {preset.result}", f"  From: {preset.source}"]
        paragraphs.append("\n".join(lines + [f"      {line}" for line in preset.lines()]) + "\n")
    return "\n".join(paragraphs)


def presets_page() -> str:
    """Return the text of docs/presets.md: one table, and each preset's settings."""
    presets = list(map(named_preset, preset_names()))
    lines = [
        "# Presets",
        "",
        "Settings for one algorithm in one environment, or in several alike. `--preset NAME` takes one,",
        "`--preset auto` the one for the algorithm and the environment, if there is one; likewise `preset: NAME` in a",
        'config file and `PPOConfig(preset="auto")`. Default < preset < config file < option or argument: what is set',
        "otherwise wins. `--show-config` shows each value and where it comes from. The files are in `aiorl/presets/`.",
        "",
        "| Preset | Environments | Result | Settings from |",
        "|---|---|---|---|",
    ]
    for preset in presets:
        envs = ", ".join(f"`{env}`" for env in preset.envs)
        lines.append(f"| `{preset.name}` | {envs} | {preset.result} | {preset.source} |")
    for preset in presets:
        lines += ["", f"## {preset.name}", "", "```yaml", *preset.lines(), "```"]
    return "\n".join(lines) + "\n"


def _keys_table(library: str) -> str:
    """Return a Markdown table of the keys of a section."""
    lines = ["| Name | Here | Difference |", "|---|---|---|"]
    for name, entry in other_names()[library].items():
        answers = {} if isinstance(entry, str) else entry
        keys = [f"`{key}`" for key in answers if key != NONE]
        notes = dict.fromkeys(str(note) for key, note in answers.items() if note and key != NONE)
        otherwise = entry if isinstance(entry, str) else answers.get(NONE) or ""
        texts = [*notes, f"Otherwise: {otherwise}" if keys and otherwise else otherwise]
        lines.append(f"| `{name}` | {', '.join(keys) or 'none'} | {' '.join(filter(None, texts))} |")
    return "\n".join(lines) + "\n"


def _python_table(library: str) -> str:
    """Return a Markdown table of the names in Python code of a section."""
    lines = ["| Name | Here |", "|---|---|"]
    for of, names in other_names()["python"][library].items():
        lines += [f"| `{of}.{name}` | {text} |" for name, text in names.items()]
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """Return a page of the documentation with its tables made again, each behind a comment that names it."""
    render = {"keys": _keys_table, "python": _python_table}
    return re.sub(
        r"(<!-- (keys|python) (\w+) -->\n)(?:\|.*\n)*", lambda found: found[1] + render[found[2]](found[3]), page
    )


def _main(words: Sequence[str]) -> None:
    if words in ([], ["presets"]):
        sys.stdout.write(presets_page() if words else config_page())
        return
    for page in map(Path, words):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
