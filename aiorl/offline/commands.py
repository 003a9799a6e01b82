"""`python -m aiorl.data`: look at, check, convert and merge files of stored experience."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.config.command_line import Parser, as_typed, at_least, exit_status, usage_error
from aiorl.data import columns as c
from aiorl.data.arrays import Batch
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import ConfigError, DataError, nearest
from aiorl.offline.files import exists, file_name, in_directory, is_uri, make_directory, suffix_of, without_compression
from aiorl.offline.formats import BatchFile, Format, WriteOptions
from aiorl.offline.inspection import FileSummary, PolicySummary, inspect_file, policy_batches, validate_file
from aiorl.offline.minari_data import PREFIX
from aiorl.offline.readers import find_sources
from aiorl.offline.registry import FORMATS, SUFFIXES, format_named, format_of
from aiorl.offline.unit_actions import NORMALIZED, UnitActions, action_space_of, seem_scaled
from aiorl.offline.writers import COMPRESSED
from aiorl.text import one_line


@dataclass(slots=True)
class Rewritten:
    """What became of files.

    Attributes:
        rows: rows written by the path of their file.
        left_out: places that could not be read.
    """

    rows: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def convert(
    files: Sequence[str],
    out: str,
    options: WriteOptions,
    format_name: str | None = None,
    *,
    change: Callable[[SampleBatch], None] | None = None,
) -> Rewritten:
    """Write each file again in another format, or with other compression.

    Args:
        files: at least one.
        out: a file or ``minari:NAME``, of a single file; or a directory, made if need be.
        options: how they are written.
        format_name: None = what ``out`` says, JSON lines in a directory.
        change: called with the rows of each policy before they are written; None leaves them as they are.

    Raises:
        ConfigError: what can't be (also a ValueError). Nothing was written then.
        DataError: a format can't hold what is in a file, or there is a file of that name; that file was not written.
        OSError: a file can't be written.
    """
    done = Rewritten()
    for source, target, found in _targets(files, out, format_name):
        with _created(found, target, options) as file:
            batches = _read([source], done, keep_ids=True)
            done.rows[target] = sum(_write(file, _changed(batch, change)) for batch in batches)
    return done


def merge(files: Sequence[str], out: str, options: WriteOptions, format_name: str | None = None) -> Rewritten:
    """Write all files as one; episodes are numbered anew, so that those of different files stay apart.

    Raises: see `convert`.
    """
    done = Rewritten()
    found = format_named(format_name) if format_name else format_of(out)
    with _created(found, out, options) as file:
        done.rows[out] = sum(_write(file, batch) for batch in _read(files, done, keep_ids=False))
    return done


def _targets(files: Sequence[str], out: str, format_name: str | None) -> Iterator[tuple[str, str, Format]]:
    is_file = out.startswith(PREFIX) or (suffix_of(out) in SUFFIXES and not os.path.isdir(out))
    if is_file:
        if len(files) > 1:
            raise ConfigError(
                f"{len(files)} files can't be converted to the one file {out!r}.",
                key="out",
                value=out,
                hint="Give a directory, or make one of them with `python -m aiorl.data merge`.",
            )
        yield files[0], out, format_named(format_name) if format_name else format_of(out)
        return
    found = format_named(format_name or "json")
    if found.name == "minari":
        raise ConfigError("Minari's datasets have names:", key="out", value=out, hint=f"give --out {PREFIX}NAME-v0.")
    suffix = found.suffixes[0] if found.suffixes else ".json"
    names = [os.path.splitext(without_compression(file_name(path.removeprefix(PREFIX))))[0] + suffix for path in files]
    if double := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"Several files would become {sorted(double)[0]!r}.", key="out", value=out, hint="Convert them one by one."
        )
    make_directory(out)
    for path, name in zip(files, names, strict=True):
        yield path, in_directory(out, name), found


@contextlib.contextmanager
def _created(found: Format, path: str, options: WriteOptions) -> Iterator[BatchFile]:
    """A new file that does not stay if the block fails."""
    try:
        file = found.create(path, options)
    except FileExistsError as error:
        raise DataError(str(error) if path.startswith(PREFIX) else "there is a file of that name", path=path) from error
    try:
        yield file
        file.close()
    except BaseException:
        file.abandon()
        if not is_uri(path) and not path.startswith(PREFIX) and exists(path):
            os.unlink(path)
        raise


def _changed(batch: Batch, change: Callable[[SampleBatch], None] | None) -> Batch:
    if change is not None:
        for rows in policy_batches(batch).values():
            change(rows)
    return batch


def _write(file: BatchFile, batch: Batch) -> int:
    file.write(batch)
    return batch.total()


def _read(files: Sequence[str], done: Rewritten, *, keep_ids: bool) -> Iterator[Batch]:
    numbers = iter(range(2**62))
    for path in files:
        renumber = _keep if keep_ids else _Renumbering(numbers)
        try:
            for stored in format_of(path).read(path):
                if isinstance(stored, DataError):
                    done.left_out.append(str(stored))
                else:
                    yield renumber(stored.batch)
        except (DataError, OSError) as error:
            done.left_out.append(str(error))


def _keep(batch: Batch) -> Batch:
    return batch


class _Renumbering:
    """New numbers for the episodes of one file, the same for the same."""

    def __init__(self, numbers: Iterator[int]) -> None:
        """Take numbers that no other file has."""
        self._numbers = numbers
        self._new: dict[int, int] = {}

    def __call__(self, batch: Batch) -> Batch:
        if isinstance(batch, SampleBatch):
            return self._rows(batch)
        return MultiAgentBatch({name: self._rows(rows) for name, rows in batch.policy_batches.items()}, batch.count)

    def _rows(self, batch: SampleBatch) -> SampleBatch:
        if c.EPS_ID not in batch:
            return batch
        old, place = np.unique(batch[c.EPS_ID], return_inverse=True)
        first_seen = np.full(len(old), batch.count)
        np.minimum.at(first_seen, place, np.arange(batch.count))
        for index in np.argsort(first_seen):
            number = int(old[index])
            if number not in self._new:
                self._new[number] = next(self._numbers)
        new = np.array([self._new[int(number)] for number in old], np.int64)
        changed = batch.slice(0, batch.count)
        changed.env_steps = batch.env_steps
        changed[c.EPS_ID] = new[place.reshape(-1)]
        return changed


_PROG = "python -m aiorl.data"
_MAX_SHOWN = 600
_LABEL = 16
_ABOUT = {
    "inspect": "Show what files of experience hold: spaces, episodes, returns, action probabilities, columns.",
    "validate": "Check every row of files of experience; name what can't be read or doesn't fit.",
    "convert": "Write files of experience again in another format.",
    "merge": "Write several files of experience as one, with episodes numbered anew.",
}
_FORMATS = "\n".join(f"  {name:9} {found.about}" for name, found in FORMATS.items())
_HELP = f"""usage: {_PROG} COMMAND FILE... [options]

Look at, check, convert and merge files of stored experience.

commands:
  inspect   {_ABOUT["inspect"]}
  validate  {_ABOUT["validate"]}
  convert   {_ABOUT["convert"]}
  merge     {_ABOUT["merge"]}

A FILE is a path, a directory, a pattern in quotes, a URI such as s3://bucket/data, or minari:NAME. Its ending says its
format; JSON lines may also end in .gz or .lz4:
{_FORMATS}

examples:
  {_PROG} inspect runs/mine/output
  {_PROG} validate 'data/*.json' && echo all rows fit
  {_PROG} convert rllib.json --out mine.parquet
  {_PROG} merge 'data/output-*.json' --out all.parquet
  {_PROG} COMMAND --help      # the options of one

Status: 0 all is well, 1 something could not be read, written or didn't fit, 2 wrong usage.
"""
_EXAMPLES = {
    "inspect": f"""examples:
  {_PROG} inspect runs/mine/output
  {_PROG} inspect rllib.json --env Pendulum-v1       # also whether its actions seem to be scaled
  {_PROG} inspect 'data/*.parquet' minari:D4RL/door/human-v2

Spaces are as far as the rows tell: a Discrete action that was never taken is not counted. Without action_prob or
action_logp, importance sampling can't judge another policy on the data.
""",
    "validate": f"""examples:
  {_PROG} validate data
  {_PROG} validate data --max-shown 1000 > faults.txt

Each fault is a line: FILE, line or row group, row: what. Checked is that every place can be read, that all batches have
the same columns, that observations, actions and rewards are finite, that probabilities are some, and that the rows of
an episode follow each other: t counts on, obs is new_obs of the row before, and no row follows a done.
""",
    "convert": f"""examples:
  {_PROG} convert rllib.json --out mine.parquet
  {_PROG} convert 'data/*.json' --out data-parquet --to parquet
  {_PROG} convert data/all.parquet --out minari:cartpole/mine-v0 --env CartPole-v1
  {_PROG} convert mine.json --out for-rllib.json --to rllib

Places that can't be read are named and left out; the status is 1 then. No file is written over.
""",
    "merge": f"""examples:
  {_PROG} merge 'runs/mine/output/*.json' --out all.parquet
  {_PROG} merge day1 day2 --out both.json.gz --compress obs,new_obs

Episodes get new numbers, so that those of different files stay apart. Places that can't be read are named and left out;
the status is 1 then. No file is written over.
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands; the exit status: 0 all is well, 1 not all was, 2 wrong usage, 130 ended by Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(as_typed(_HELP))
        return 0 if words else 2
    name = words[0]
    if name not in _ABOUT:
        usage_error(_PROG, f"There is no command {name!r}.{nearest(name, _ABOUT)}")
    given = _parser(name).parse(words[1:])
    return exit_status(
        lambda: _COMMANDS[name](find_sources(given["files"]), given),
        interrupted="ended by Ctrl-C",
    )


def _parser(name: str) -> Parser:
    writes = name in ("convert", "merge")
    parser = Parser(
        f"{_PROG} {name}",
        "FILE... --out PATH [options]" if writes else "FILE... [options]",
        _ABOUT[name],
        _EXAMPLES[name],
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a path, directory, pattern, URI or minari:NAME")
    if name == "validate":
        parser.add_argument(
            "--max-shown",
            type=at_least(1),
            metavar="N",
            help="faults that are shown of each file (20); all are counted",
        )
    if writes:
        what = "the new file, or minari:NAME" + ("; a directory for several files" if name == "convert" else "")
        parser.add_argument("--out", required=True, metavar="PATH", help=what)
        parser.add_argument("--to", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; what PATH says, else json")
        parser.add_argument(
            "--compress", metavar="A,B", help=f"columns to compress in json, or none ({','.join(COMPRESSED)})"
        )
        parser.add_argument("--env", metavar="ID", help="the environment, for Minari to note and take the spaces of")
    if name == "convert":
        parser.add_argument(
            "--actions-in-input-normalized", action="store_true", help="actions of a Box are stored scaled to [-1, 1], "
            "as RLlib stores them: write those of --env",
        )  # fmt: skip
    if name == "inspect":
        parser.add_argument("--env", metavar="ID", help="the environment, whose action space is shown, too")
    return parser


def _inspect(files: list[str], given: dict[str, Any]) -> int:
    status = 0
    space = action_space_of(given["env"]) if "env" in given else None
    for path in files:
        summary = inspect_file(path)
        sys.stdout.write("".join(f"{one_line(line, _MAX_SHOWN)}\n" for line in _lines(summary, space)))
        status = status or (1 if summary.num_errors else 0)
    return status


def _lines(summary: FileSummary, space: spaces.Space[Any] | None) -> list[str]:
    rows = sum(policy.rows for policy in summary.policies.values())
    lines = [f"{summary.path}: {summary.format_name}, {_count(summary.batches, 'batch', 'batches')}, {rows:,} rows"]
    for policy_id, policy in summary.policies.items():
        if policy_id != DEFAULT_POLICY_ID:
            lines.append(f"  policy {policy_id}: {policy.rows:,} rows")
        lines += _policy_lines(policy, space)
    if summary.num_errors:
        lines.append(f"  {'unreadable':{_LABEL}}{_count(summary.num_errors, 'place', 'places')}:")
        lines += [f"    {error}" for error in summary.errors]
        if summary.num_errors > len(summary.errors):
            lines.append(f"    and {summary.num_errors - len(summary.errors):,} more")
    return lines


def _policy_lines(policy: PolicySummary, space: spaces.Space[Any] | None) -> list[str]:
    columns = policy.columns
    facts = [
        (what, columns[name].space)
        for what, name in (("observations", c.OBS), ("actions", c.ACTIONS))
        if name in columns
    ]
    if space is not None:
        facts.append(("of the env", f"{space}"))
        taken = columns.get(c.ACTIONS)
        low, high = (None, None) if taken is None else (taken.low, taken.high)
        if low is not None and high is not None and seem_scaled(space, low, high):
            facts.append(("", f"actions seem to be scaled to [-1, 1], as RLlib stores them: set {NORMALIZED}"))
    facts.append(("episodes", _episodes(policy)))
    if policy.returns:
        facts.append(("returns", _spread(policy.returns)))
        facts.append(("lengths", _spread(policy.lengths)))
    found = policy.probabilities
    none = "none recorded; importance sampling needs action_prob or action_logp"
    facts.append(("probabilities", none if found is None else f"of the actions taken {found[0]:.3g} to {found[1]:.3g}"))
    names = [f"{name} {column.dtype}{_shape(column.shape)}" for name, column in columns.items()]
    facts.append(("columns", ", ".join(names)))
    return [f"  {what:{_LABEL}}{fact}" for what, fact in facts]


def _episodes(policy: PolicySummary) -> str:
    if c.EPS_ID not in policy.columns:
        return "not known: there is no column eps_id"
    going_on = len(policy.open_episodes)
    return f"{len(policy.returns):,} ended" + (f", {going_on:,} cut by the end of the file" if going_on else "")


def _spread(values: Sequence[float]) -> str:
    found = np.asarray(values, np.float64)
    return f"{found.mean():,.4g} on average, {found.min():,.4g} to {found.max():,.4g}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return " of differing shapes" if shape is None else f"{list(shape)}" if shape else ""


def _count(number: int, one: str, many: str) -> str:
    return f"1 {one}" if number == 1 else f"{number:,} {many}"


def _validate(files: list[str], given: dict[str, Any]) -> int:
    most: int = int(given.get("max_shown", 20))
    faults_of_all = 0
    for path in files:
        faults = 0
        for fault in validate_file(path):
            faults += 1
            if faults <= most:
                sys.stdout.write(f"{one_line(fault, _MAX_SHOWN)}\n")
        if faults > most:
            sys.stdout.write(f"{one_line(path, _MAX_SHOWN)}: and {_count(faults - most, 'fault', 'faults')} more\n")
        faults_of_all += faults
    checked = _count(len(files), "file", "files")
    sys.stdout.write(
        f"{checked} checked: {_count(faults_of_all, 'fault', 'faults') if faults_of_all else 'all fits'}\n"
    )
    return 1 if faults_of_all else 0


def _convert(files: list[str], given: dict[str, Any]) -> int:
    change = None
    if given.get(NORMALIZED):
        if "env" not in given:
            raise ConfigError(f"{NORMALIZED} needs the action space.", key="env", value=None, hint="Give --env ID.")
        change = UnitActions(action_space_of(given["env"])).restore
    return _told(convert(files, given["out"], _options(given), given.get("to"), change=change))


def _merge(files: list[str], given: dict[str, Any]) -> int:
    return _told(merge(files, given["out"], _options(given), given.get("to")))


def _options(given: dict[str, Any]) -> WriteOptions:
    names = given.get("compress", ",".join(COMPRESSED))
    return WriteOptions(frozenset(names.split(",")) - {"", "none"}, given.get("env"))


def _told(done: Rewritten) -> int:
    for path, rows in done.rows.items():
        sys.stdout.write(f"{one_line(path, _MAX_SHOWN)}: {rows:,} rows\n")
    for place in done.left_out:
        sys.stderr.write(f"aiorl: left out: {one_line(place, _MAX_SHOWN)}\n")
    return 1 if done.left_out else 0


_COMMANDS: dict[str, Callable[[list[str], dict[str, Any]], int]] = {
    "inspect": _inspect,
    "validate": _validate,
    "convert": _convert,
    "merge": _merge,
}
