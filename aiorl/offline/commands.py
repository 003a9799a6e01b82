"""`python -m aiorl.data`: inspect, check, convert and merge files of stored experience."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiorl.config.command_line import Parser, as_typed, at_least, exit_status, usage_error
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError, DataError, nearest
from aiorl.offline.episodes import ended, trajectories
from aiorl.offline.files import (
    exists,
    file_name,
    in_directory,
    is_uri,
    make_directory,
    suffix_of,
    without_compression,
)
from aiorl.offline.formats import BatchFile, Format, WriteOptions, map_policies
from aiorl.offline.inspection import count_of, inspect_file, validate_file
from aiorl.offline.minari_data import PREFIX
from aiorl.offline.registry import (
    FORMATS,
    SUFFIXES,
    find_sources,
    format_named,
    format_of,
    stored_batches,
)
from aiorl.offline.stored_columns import FLAGS
from aiorl.offline.unit_actions import NORMALIZED, UnitActions, action_space_of
from aiorl.offline.writers import COMPRESSED
from aiorl.text import one_line

Options = dict[str, Any]
"""Options given on the command line, by name."""
_Change = Callable[[str, str, SampleBatch], SampleBatch]
"""Function of a path, a policy id and the policy's rows in that file; returns the rows to write."""

_PROG = "python -m aiorl.data"
_MAX_SHOWN = 600
_FORMATS = "\n".join(f"  {name:9} {form.about}" for name, form in FORMATS.items())
_FILES = f"""
A FILE is a path, a directory, a pattern in quotes, a URI such as s3://bucket/data, or minari:NAME. The suffix gives the
format; JSON lines can also end in .gz or .lz4:
{_FORMATS}

examples:
  {_PROG} inspect runs/mine/output
  {_PROG} validate 'data/*.json' && echo all rows fit
  {_PROG} convert rllib.json --out mine.parquet
  {_PROG} merge 'data/output-*.json' --out all.parquet
  {_PROG} COMMAND --help      # options of a command

Status: 0 all is well, 1 something could not be read or written or didn't fit, 2 wrong usage.
"""


class _Command(NamedTuple):
    """Command of the program.

    Attributes:
        do: function of the files and options that runs the command and returns the exit status.
        about: line of help.
        examples: end of its own help.
    """

    do: Callable[[list[str], Options], int]
    about: str
    examples: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 all is well, 1 not all is, 2 wrong usage, 130
    ended by Ctrl-C.

    Args:
        argv: the command and its arguments; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        commands = "".join(f"  {name:9} {command.about}\n" for name, command in _COMMANDS.items())
        usage = f"usage: {_PROG} COMMAND FILE... [options]"
        about = "Inspect, check, convert and merge files of stored experience."
        sys.stdout.write(as_typed(f"{usage}\n\n{about}\n\ncommands:\n{commands}{_FILES}"))
        return 0 if words else 2
    name = words[0]
    if name not in _COMMANDS:
        usage_error(_PROG, f"There is no command {name!r}.{nearest(name, _COMMANDS)}")
    options = _parser(name).parse(words[1:])
    return exit_status(
        lambda: _COMMANDS[name].do(find_sources(options["files"]), options),
        interrupted="ended by Ctrl-C",
    )


def _parser(name: str) -> Parser:
    writes = name in ("convert", "merge")
    command = _COMMANDS[name]
    usage = "FILE... --out PATH [options]" if writes else "FILE... [options]"
    parser = Parser(f"{_PROG} {name}", usage, command.about, command.examples)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a path, directory, pattern, URI or minari:NAME"
    )
    if name == "validate":
        parser.add_argument(
            "--max-shown",
            type=at_least(1),
            metavar="N",
            help="faults to show for each file (20); all are counted",
        )
    if writes:
        what = "the new file, or minari:NAME"
        if name == "convert":
            what += "; a directory for several files"
        parser.add_argument("--out", required=True, metavar="PATH", help=what)
        parser.add_argument(
            "--to",
            metavar="FORMAT",
            help=f"one of {', '.join(FORMATS)}; default: by PATH, else json",
        )
        parser.add_argument(
            "--compress",
            metavar="A,B",
            help=f"columns to compress in json, or none ({','.join(COMPRESSED)})",
        )
        parser.add_argument(
            "--env", metavar="ID", help="environment, recorded by Minari, which needs its spaces"
        )
    if name == "convert":
        parser.add_argument(
            "--actions-in-input-normalized",
            action="store_true",
            help=(
                "stored actions of a Box are scaled to [-1, 1], "
                "as RLlib stores them: write actions of --env"
            ),
        )
    if name == "inspect":
        parser.add_argument(
            "--env", metavar="ID", help="the environment, to show its action space as well"
        )
    return parser


def _inspect(files: list[str], options: Options) -> int:
    status = 0
    space = action_space_of(options["env"]) if "env" in options else None
    for path in files:
        lines, is_whole = inspect_file(path, space)
        for line in lines:
            _say(line)
        if not is_whole:
            status = 1
    return status


def _validate(files: list[str], options: Options) -> int:
    most: int = int(options.get("max_shown", 20))
    num_faults = 0
    for path in files:
        faults = 0
        for fault in validate_file(path):
            faults += 1
            if faults <= most:
                _say(fault)
        if faults > most:
            _say(f"{path}: and {count_of(faults - most, 'fault', 'faults')} more")
        num_faults += faults
    checked = count_of(len(files), "file", "files")
    if not num_faults:
        _say(f"{checked} checked: all fits")
        return 0
    _say(f"{checked} checked: {count_of(num_faults, 'fault', 'faults')}")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(f"{one_line(line, _MAX_SHOWN)}\n")


def _convert(files: list[str], options: Options) -> int:
    change = _unchanged
    if options.get(NORMALIZED):
        if "env" not in options:
            raise ConfigError(
                f"{NORMALIZED} needs the action space.",
                key="env",
                value=None,
                hint="Give --env ID.",
            )
        change = functools.partial(_restored, UnitActions(action_space_of(options["env"])))
    status = 0
    for source, target, form in _targets(files, options["out"], options.get("to")):
        status |= _write([source], target, form=form, options=options, change=change)
    return status


def _merge(files: list[str], options: Options) -> int:
    out = options["out"]
    form = _format_for(out, options.get("to"))
    return _write(files, out, form=form, options=options, change=_renumbering())


def _format_for(out: str, format_name: str | None) -> Format:
    """Return the format of a file to write: the one named, or that of its path."""
    if format_name:
        return format_named(format_name)
    return format_of(out)


def _unchanged(path: str, policy_id: str, rows: SampleBatch) -> SampleBatch:
    return rows


def _restored(actions: UnitActions, path: str, policy_id: str, rows: SampleBatch) -> SampleBatch:
    actions.restore(rows)
    return rows


def _renumbering() -> _Change:
    """Return a function that numbers episodes again, so that episodes of different files stay
    apart. Those without numbers end with a row that is done, or with their batch if none can be.
    """
    new_numbers: dict[tuple[object, ...], int] = collections.defaultdict(itertools.count().__next__)
    num_ended: collections.Counter[tuple[object, ...]] = collections.Counter()

    def renumbered(path: str, policy_id: str, rows: SampleBatch) -> SampleBatch:
        numbers: list[int] = []
        if c.EPS_ID in rows:
            numbers += [new_numbers[path, number] for number in rows[c.EPS_ID].tolist()]
        else:
            for run in trajectories(rows):
                agents = run.get(c.AGENT_INDEX, (0,))
                agent = (path, policy_id, int(agents[0]))
                numbers += [new_numbers[*agent, num_ended[agent]]] * run.count
                if ended(run)[-1] or not any(name in run for name in FLAGS):
                    num_ended[agent] += 1
        rows[c.EPS_ID] = np.array(numbers, np.int64)
        return rows

    return renumbered


def _targets(
    files: Sequence[str], out: str, format_name: str | None
) -> Iterator[tuple[str, str, Format]]:
    is_file = out.startswith(PREFIX) or (suffix_of(out) in SUFFIXES and not os.path.isdir(out))
    if is_file:
        if len(files) > 1:
            raise ConfigError(
                f"{len(files)} files can't be converted to the one file {out!r}.",
                key="out",
                value=out,
                hint="Give a directory, or merge them into one file with `aiorl data merge`.",
            )
        yield files[0], out, _format_for(out, format_name)
        return
    form = format_named(format_name or "json")
    if form.name == "minari":
        raise ConfigError(
            "Minari's datasets have names:",
            key="out",
            value=out,
            hint=f"give --out {PREFIX}NAME-v0.",
        )
    suffix = form.suffixes[0] if form.suffixes else ".json"
    names = []
    for path in files:
        name = without_compression(file_name(path.removeprefix(PREFIX)))
        names.append(os.path.splitext(name)[0] + suffix)
    repeated = sorted(name for name in names if names.count(name) > 1)
    if repeated:
        raise ConfigError(
            f"Several files would become {repeated[0]!r}.",
            key="out",
            value=out,
            hint="Convert them one by one.",
        )
    make_directory(out)
    for path, name in zip(files, names, strict=True):
        yield path, in_directory(out, name), form


@contextlib.contextmanager
def _created(form: Format, path: str, options: WriteOptions) -> Iterator[BatchFile]:
    """Create a file, and remove it if the block fails."""
    try:
        file = form.create(path, options)
    except FileExistsError as error:
        reason = str(error) if path.startswith(PREFIX) else "the file already exists"
        raise DataError(reason, path=path) from error
    try:
        yield file
        file.close()
    except BaseException:
        file.abandon()
        if not is_uri(path) and not path.startswith(PREFIX) and exists(path):
            os.unlink(path)
        raise


def _write(
    files: Sequence[str],
    target: str,
    *,
    form: Format,
    options: Options,
    change: _Change,
) -> int:
    """Write files as one new file, changed; return 1 if unreadable places were reported and left
    out, else 0.
    """
    names = options.get("compress", ",".join(COMPRESSED)).split(",")
    write_options = WriteOptions(frozenset(names) - {"", "none"}, options.get("env"))
    num_rows = 0
    status = 0
    with _created(form, target, write_options) as file:
        for path in files:
            change_rows = functools.partial(change, path)
            for stored in stored_batches(path, joins_episodes=form.name == "minari"):
                if isinstance(stored, DataError):
                    sys.stderr.write(f"aiorl: left out: {one_line(str(stored), _MAX_SHOWN)}\n")
                    status = 1
                    continue
                batch = map_policies(stored.batch, change_rows)
                if batch is not None:
                    file.write(batch)
                    num_rows += batch.total()
    _say(f"{target}: {num_rows:,} rows")
    return status


_LEFT_OUT = (
    "Unreadable places are reported and left out; the status is then 1. Existing files are not"
    " overwritten.\n"
)
_COMMANDS = {
    "inspect": _Command(
        _inspect,
        "Show the contents of files of experience: spaces, episodes, returns, action probabilities,"
        " columns.",
        f"""examples:
  {_PROG} inspect runs/mine/output
  {_PROG} inspect rllib.json --env Pendulum-v1       # also whether its actions seem to be scaled
  {_PROG} inspect 'data/*.parquet' minari:D4RL/door/human-v2

Spaces are inferred from the rows: a Discrete action that was never taken is not counted. Without action_prob or
action_logp, importance sampling can't judge another policy on the data.
""",
    ),
    "validate": _Command(
        _validate,
        "Check every row of files of experience, and report what can't be read or doesn't fit.",
        f"""examples:
  {_PROG} validate data
  {_PROG} validate data --max-shown 1000 > faults.txt

Each fault is a line: FILE, line or row group, row: fault. The checks: Every place can be read. All batches have the
same columns. Observations, actions and rewards are finite. Probabilities are valid. The rows of an episode follow each
other: t counts up, obs is new_obs of the previous row, and no row follows a done.
""",
    ),
    "convert": _Command(
        _convert,
        "Write files of experience in another format.",
        f"""examples:
  {_PROG} convert rllib.json --out mine.parquet
  {_PROG} convert 'data/*.json' --out data-parquet --to parquet
  {_PROG} convert data/all.parquet --out minari:cartpole/mine-v0 --env CartPole-v1
  {_PROG} convert mine.json --out for-rllib.json --to rllib

{_LEFT_OUT}""",
    ),
    "merge": _Command(
        _merge,
        "Merge several files of experience into one, with new episode numbers.",
        f"""examples:
  {_PROG} merge 'runs/mine/output/*.json' --out all.parquet
  {_PROG} merge day1 day2 --out both.json.gz --compress obs,new_obs

Episodes get new numbers, so that episodes of different files stay apart.
{_LEFT_OUT}""",
    ),
}
