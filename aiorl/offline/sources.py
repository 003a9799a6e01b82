"""From the settings ``input`` and ``output`` to the reader and writer of a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.config.code import check_takes, import_object, is_import_path, named_failures
from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError
from aiorl.offline.formats import WHOLE, Share
from aiorl.offline.io import (
    InputCreator,
    InputReader,
    IOContext,
    OutputCreator,
    OutputWriter,
    SamplerInput,
    noop_output,
    sampler_input,
)
from aiorl.offline.readers import (
    MAX_CORRUPT,
    AsStoredReader,
    FileReader,
    HoldOut,
    MixedReader,
    PostprocessedReader,
    ReaderOptions,
    ShuffledReader,
    StoredRowsReader,
)
from aiorl.offline.unit_actions import UnitActions, UnitGuess, seem_scaled
from aiorl.offline.writers import COMPRESSED, MAX_FILE_BYTES, FileWriter

SAMPLER = "sampler"
LOG_DIR = "logdir"
Input = str | Sequence[str] | Mapping[str, float] | InputCreator
Output = str | None | OutputCreator


@dataclass(frozen=True, slots=True)
class InputSettings:
    """How stored experience is read.

    Attributes:
        shuffle_buffer_size: batches in the buffer that shuffles; 0 keeps the order.
        postprocess_inputs: whether trajectories are postprocessed with the worker's current policies, rewards limited
            as those of its environments.
        epochs: passes over the files; None = without end.
        hold_out: which part of the episodes is read; None = all.
        whole_episodes: whether stored batches are cut between episodes only.
        max_corrupt: places that may be unreadable; one more ends the run.
        seed: of everything random; None = differently each time.
        actions_normalized: stored actions are scaled to [-1, 1], and are to be those of the environment.
        share: which of several readers this is; None: workers share by their indices, and the local one reads all.
    """

    shuffle_buffer_size: int = 0
    postprocess_inputs: bool = False
    epochs: int | None = None
    hold_out: HoldOut | None = None
    whole_episodes: bool = False
    max_corrupt: int = MAX_CORRUPT
    seed: int | None = None
    actions_normalized: bool = False
    share: Share | None = None


def input_creator(source: Input, settings: InputSettings | None = None) -> InputCreator:
    """What makes a worker's reader.

    Args:
        source: ``"sampler"``; a path, directory, pattern, URI or ``minari:NAME``; a list of such; a mapping of such,
            and perhaps ``"sampler"``, to the probabilities with which they are read; or a function that makes a reader
            of an IOContext, which is returned as it is.
        settings: how files are read.

    Raises:
        ConfigError: a source of another type; probabilities that are none (also a ValueError). Files are looked for
            when the reader is made.
    """
    settings = settings or InputSettings()
    if isinstance(source, str):
        if source == SAMPLER:
            return sampler_input
        return _files_creator({source: 1.0}, [source], settings)
    if isinstance(source, Mapping):
        MixedReader.check(source)
        if settings.epochs is not None and len(source) > 1:
            raise ConfigError("A mixture is read without end: its sources end at different times.", key="input")
        return _files_creator(source, None, settings)
    if callable(source):
        return source
    if isinstance(source, Sequence) and source and all(isinstance(item, str) for item in source):
        return _files_creator({"files": 1.0}, list(source), settings)
    raise ConfigError(
        f"input is {source!r}.",
        key="input",
        value=source,
        hint="Give 'sampler', files, a list of files, a mapping from sources to probabilities, or a function.",
    )


def _files_creator(weights: Mapping[str, float], files: Sequence[str] | None, settings: InputSettings) -> InputCreator:
    """Return what makes the reader of files, or of a mixture, for one worker."""
    weights = {name: weight for name, weight in weights.items() if weight > 0.0}

    def read(name: str, context: IOContext, options: ReaderOptions) -> InputReader:
        if files is None and name == SAMPLER:
            return context.default_sampler_input()
        found = FileReader(files if files is not None else name, options)
        reader = _taken_in(found, context, is_normalized=settings.actions_normalized)
        if not settings.postprocess_inputs:
            return reader
        # of a mixture rows come as often as it says, known or not
        return AsStoredReader(reader, is_numbered=len(weights) == 1)

    def create(context: IOContext) -> InputReader:
        options = _reader_options(context, settings)
        readers = {name: read(name, context, options) for name in weights}
        reader = next(iter(readers.values()))
        if len(readers) > 1:
            reader = MixedReader(readers, weights, _seed(settings, context, 1))
        if settings.shuffle_buffer_size:
            reader = ShuffledReader(reader, settings.shuffle_buffer_size, _seed(settings, context, 2))
        if settings.postprocess_inputs:
            reader = PostprocessedReader(reader, _postprocessing(context))
        return reader

    return create


def _postprocessed(creator: InputCreator) -> InputCreator:
    """What makes the reader of a user's own with its batches postprocessed."""
    return lambda context: PostprocessedReader(AsStoredReader(creator(context)), _postprocessing(context))


def _reader_options(context: IOContext, settings: InputSettings) -> ReaderOptions:
    return ReaderOptions(
        share=settings.share or share_of(context.worker_index, context.num_workers),
        epochs=settings.epochs,
        hold_out=settings.hold_out,
        seed=settings.seed,
        batch_rows=getattr(context.worker, "rollout_fragment_length", None),
        whole_episodes=settings.whole_episodes,
        max_corrupt=settings.max_corrupt,
    )


def share_of(slot: int, num_workers: int, sampler: int = 0, num_samplers: int = 1) -> Share:
    """Which share of the files is a sampler's; the local worker's samplers read everything.

    Args:
        slot: index of its worker, from 1; 0 = local.
        num_workers: workers of the run.
        sampler: which of its worker's, from 0.
        num_samplers: samplers of each worker.
    """
    if slot < 1:
        return WHOLE
    of = max(1, num_workers) * num_samplers
    return Share(((slot - 1) * num_samplers + sampler) % of, of)


def _seed(settings: InputSettings, context: IOContext, use: int) -> int | None:
    return None if settings.seed is None else settings.seed * 1_000_003 + context.worker_index * 16 + use


def _taken_in(reader: InputReader, context: IOContext, *, is_normalized: bool) -> InputReader:
    """The reader with stored rows as policies take them.

    Actions are the environment's. Where a policy takes raw observations, its filter learns from those that are read.

    Raises:
        ConfigError: actions are said to be scaled of a space whose actions can't be (also a ValueError).
    """
    worker: Any = context.worker
    if worker is None:
        return reader
    scales: dict[str, Callable[[SampleBatch], None]] = {}
    for policy_id, policy in worker.policy_map.items():
        if is_normalized:
            scales[policy_id] = UnitActions(policy.action_space).restore
        elif seem_scaled(policy.action_space, 0.0, 0.0):
            scales[policy_id] = UnitGuess(policy.action_space).look
    raw = {policy_id for policy_id, policy in worker.policy_map.items() if getattr(policy, "takes_raw", False)}
    if not scales and not raw:
        return reader

    def take_in(policy_id: str, rows: SampleBatch) -> None:
        if policy_id in scales:
            scales[policy_id](rows)
        if policy_id not in raw:
            return
        for name in (c.OBS, c.NEW_OBS):
            if name in rows:
                rows[name] = np.asarray(rows[name], np.float32)
        own = worker.filters[policy_id]
        if c.OBS in rows and rows[c.OBS].shape[1:] == own.shape:  # else whoever takes the rows says what is wrong
            own.learn(rows[c.OBS])

    return StoredRowsReader(reader, take_in)


def _postprocessing(context: IOContext) -> Callable[[str, SampleBatch], SampleBatch]:
    def postprocess(policy_id: str, part: SampleBatch) -> SampleBatch:
        worker = context.worker
        policy: Any = None if worker is None else worker.get_policy(policy_id)
        if worker is None or policy is None:
            raise ConfigError(
                f"postprocess_inputs needs a worker with a policy {policy_id!r}, and there is none.",
                key="postprocess_inputs",
            )
        limit = worker.reward_limit
        if limit and c.REWARDS in part:
            part[c.REWARDS] = np.clip(part[c.REWARDS], -limit, limit)
        with worker.sampler.paused():  # policies are not evaluated by two threads at once
            if isinstance(policy, GraphPolicy) and policy.is_recurrent:
                policy.recall(part)
            made: SampleBatch = policy.postprocess_trajectory(part)
        return made

    return postprocess


def output_creator(
    output: Output,
    *,
    compress_columns: Collection[str] = COMPRESSED,
    max_file_bytes: int = MAX_FILE_BYTES,
    format_name: str = "json",
) -> OutputCreator:
    """What makes a worker's writer.

    Args:
        output: None; ``"logdir"``, the run's directory; a directory or URI of one; or a function that makes a writer of
            an IOContext, which is returned as it is.
        compress_columns: columns to be compressed, no others are.
        max_file_bytes: size at which another file is begun.
        format_name: of the files.

    Raises:
        ConfigError: an output of another type (also a ValueError).
    """
    if output is None:
        return noop_output
    if callable(output):
        return output
    if not isinstance(output, str) or not output:
        raise ConfigError(
            f"output is {output!r}.", key="output", value=output, hint="Give null, 'logdir', a directory or a function."
        )

    def create(context: IOContext) -> OutputWriter:
        directory = context.log_dir if output == LOG_DIR else output
        if directory is None:
            raise ConfigError(f"output is {LOG_DIR!r}, and there is no run directory.", key="output", value=output)
        return FileWriter(
            directory,
            worker_index=context.worker_index,
            compress_columns=compress_columns,
            max_file_bytes=max_file_bytes,
            format_name=format_name,
        )

    return create


def configured_input(settings: WorkerConfig, share: Share) -> InputCreator:
    """What makes the reader that a config asks for.

    Args:
        settings: the config.
        share: of the files that is read.

    Raises:
        ConfigError: as `input_creator`; a function that can't be imported.
    """
    source = settings.input
    if isinstance(source, str) and is_import_path(source):
        own = _users("input", source, InputReader, "next")

        def found(context: IOContext) -> InputReader:
            reader = own(context)
            if isinstance(reader, SamplerInput):  # nothing of it is stored
                return reader
            return _taken_in(reader, context, is_normalized=settings.actions_in_input_normalized)

        return _postprocessed(found) if settings.postprocess_inputs else found
    options = InputSettings(
        shuffle_buffer_size=settings.shuffle_buffer_size,
        postprocess_inputs=settings.postprocess_inputs,
        epochs=settings.input_epochs,
        hold_out=HoldOut(settings.input_hold_out) if settings.input_hold_out else None,
        whole_episodes=not settings.is_truncating,
        max_corrupt=settings.input_max_corrupt,
        seed=settings.seed,
        actions_normalized=settings.actions_in_input_normalized,
        share=share,
    )
    return input_creator(source, options)


def configured_output(settings: WorkerConfig) -> OutputCreator:
    """What makes the writer that a config asks for.

    Raises:
        ConfigError: as `output_creator`; a function that can't be imported.
    """
    named = settings.output
    output: Output = named
    if named is not None and is_import_path(named):
        output = _users("output", named, OutputWriter, "write")
    return output_creator(
        output, compress_columns=settings.output_compress_columns, max_file_bytes=settings.output_max_file_size
    )


def _users(key: str, path: str, kind: type[Any], method: str) -> Callable[[IOContext], Any]:
    """Return the function that a setting names; its failures, and those of what it makes, name the setting.

    Raises:
        ConfigError: it can't be imported, or takes no IOContext.
    """
    function = import_object(path, key=key)
    what = f"{key} {path!r}"
    if not callable(function):
        raise ConfigError(f"{key} is {path!r}, expected a function of an IOContext.", key=key, value=path)
    check_takes(function, what, key, None)

    def create(context: IOContext) -> Any:
        made = function(context)
        if not isinstance(made, kind):
            raise ConfigError(
                f"{what} gave a {type(made).__name__}, expected an aiorl.{kind.__name__}.", key=key, value=path
            )
        with contextlib.suppress(AttributeError):  # it may have __slots__
            setattr(made, method, named_failures(getattr(made, method), f"{what}: {method}", key))
        return made

    return named_failures(create, what, key)
