"""Reader and writer of a worker, built from the settings ``input`` and ``output``."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.postprocess import NEED_ACTION_VALUES
from aiorl.config.code import check_takes, import_object, is_import_path, named_failures
from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError
from aiorl.offline.files import is_uri
from aiorl.offline.fitted_rows import RowFitter
from aiorl.offline.formats import WHOLE, Share
from aiorl.offline.io import (
    InputCreator,
    InputReader,
    IOContext,
    OutputCreator,
    OutputWriter,
    noop_output,
    sampler_input,
)
from aiorl.offline.readers import FileReader, HoldOut, PreparedReader, ReaderOptions
from aiorl.offline.registry import find_sources
from aiorl.offline.unit_actions import UnitActions, UnitGuess, seem_scaled
from aiorl.offline.writers import FileWriter

SAMPLER = "sampler"
LOG_DIR = "logdir"
Input = str | Sequence[str] | Mapping[str, float] | InputCreator
Output = str | None | OutputCreator
_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class InputSettings(ReaderOptions):
    """Options of reading stored experience.

    Without ``share``, workers share by their indices, and the local worker reads all files. Without
    ``batch_rows``, batches have as many rows as the worker's fragments.

    Attributes:
        shuffle_buffer_size: batches in the shuffling buffer; 0 keeps the order.
        postprocess_inputs: True to postprocess trajectories with the worker's current policies,
            with rewards clipped like those of its environments.
        actions_normalized: True if stored actions are scaled to [-1, 1] and must be scaled back.
    """

    shuffle_buffer_size: int = 0
    postprocess_inputs: bool = False
    actions_normalized: bool = False


def input_creator(source: Input, settings: InputSettings | None = None) -> InputCreator:
    """Return the function that creates a worker's reader.

    Args:
        source: ``"sampler"``; a path, directory, pattern, URI or ``minari:NAME``; a list of them; a
            mapping from these or ``"sampler"`` to their shares of the env steps; or a function from
            an IOContext to a reader, which is returned unchanged.
        settings: options of reading files.

    Raises:
        ConfigError: the source has another type, or shares are invalid (also a ValueError). Missing
            files are only noticed when the reader is created.
    """
    settings = settings or InputSettings()
    weights: list[float] = [1.0]
    if callable(source):
        return source
    if source == SAMPLER:
        return sampler_input
    if isinstance(source, Mapping):
        _check_weights(source)
        if settings.epochs is not None and len(source) > 1:
            raise ConfigError(
                "A mixture is read without end: its sources end at different times.", key="input"
            )
        weights = [weight for weight in source.values() if weight > 0.0]
        files: list[Any] = [name for name, weight in source.items() if weight > 0.0]
    elif isinstance(source, str) or (
        isinstance(source, Sequence) and source and all(isinstance(item, str) for item in source)
    ):
        files = [source]
    else:
        raise ConfigError(
            f"input is {source!r}.",
            key="input",
            value=source,
            hint=(
                "Give 'sampler', files, a list of files, a mapping from sources to shares, or a"
                " function."
            ),
        )

    def create(context: IOContext) -> InputReader:
        options = replace(
            settings,
            share=settings.share or share_of(context.worker_index, context.num_workers),
            batch_rows=settings.batch_rows
            or getattr(context.worker, "rollout_fragment_length", None),
            joins_episodes=settings.postprocess_inputs,
            adds_new_obs=settings.postprocess_inputs,
        )
        fit = _fitting(context)
        readers: list[InputReader] = []
        for name in files:
            if name == SAMPLER:
                readers.append(context.default_sampler_input())
            else:
                readers.append(FileReader(name, options, fit=fit))
        return _prepared(readers, context, settings, weights)

    return create


def _check_weights(weights: Mapping[str, float]) -> None:
    values = list(weights.values())
    are_shares = all(isinstance(value, int | float) and 0.0 <= value <= 1.0 for value in values)
    if not are_shares or abs(math.fsum(values) - 1.0) > _SUM_TOLERANCE:
        raise ConfigError(
            f"The shares of input are {values}; each must be from 0 to 1, and their sum 1.",
            key="input",
            value=dict(weights),
        )


def _prepared(
    readers: Sequence[InputReader],
    context: IOContext,
    settings: InputSettings,
    weights: Sequence[float] = (1.0,),
) -> InputReader:
    """Return one reader for all."""
    take_in = _taking_in(context, is_normalized=settings.actions_normalized)
    postprocess = _postprocessing(context) if settings.postprocess_inputs else None
    if len(readers) == 1 and not (take_in or postprocess or settings.shuffle_buffer_size):
        return readers[0]
    return PreparedReader(
        readers,
        weights,
        buffer_size=settings.shuffle_buffer_size,
        seed=None if settings.seed is None else (settings.seed, context.worker_index, 1),
        take_in=take_in,
        postprocess=postprocess,
    )


def share_of(slot: int, num_workers: int, sampler: int = 0, num_samplers: int = 1) -> Share:
    """Return the share of the files for a sampler; samplers of the local worker read everything.

    Args:
        slot: index of its worker, from 1; 0 = local.
        num_workers: workers of the run.
        sampler: number of the sampler in its worker, from 0.
        num_samplers: samplers of each worker.
    """
    if slot < 1:
        return WHOLE
    of = max(1, num_workers) * num_samplers
    return Share(((slot - 1) * num_samplers + sampler) % of, of)


def _fitting(context: IOContext) -> Callable[[str, SampleBatch], None] | None:
    """Return the function that gives a policy's rows their dtypes and shapes; None without
    policies.
    """
    if context.worker is None:
        return None
    fitters = {
        policy_id: RowFitter(
            getattr(policy, "observation_space", None), getattr(policy, "action_space", None)
        )
        for policy_id, policy in context.worker.policy_map.items()
    }

    def fit(policy_id: str, rows: SampleBatch) -> None:
        if policy_id in fitters:
            fitters[policy_id].fit(rows)

    return fit


def _taking_in(
    context: IOContext, *, is_normalized: bool
) -> Callable[[str, SampleBatch], None] | None:
    """Return the function that converts stored rows for their policies; None if there is nothing to
    convert.

    Actions are scaled back. If a policy takes raw observations, its filter learns from the rows
    read.

    Raises:
        ConfigError: the settings say that actions are scaled, but they can't be in this space (also
            a ValueError).
    """
    worker: Any = context.worker
    if worker is None:
        return None
    scales: dict[str, Callable[[SampleBatch], None]] = {}
    for policy_id, policy in worker.policy_map.items():
        if is_normalized:
            scales[policy_id] = UnitActions(policy.action_space).restore
        elif seem_scaled(policy.action_space, 0.0, 0.0):
            scales[policy_id] = UnitGuess(policy.action_space).inspect
    raw = {
        policy_id
        for policy_id, policy in worker.policy_map.items()
        if getattr(policy, "takes_raw", False)
    }

    def take_in(policy_id: str, rows: SampleBatch) -> None:
        if policy_id in scales:
            scales[policy_id](rows)
        if policy_id not in raw:
            return
        for name in (c.OBS, c.NEW_OBS):
            if name in rows:
                rows[name] = np.asarray(rows[name], np.float32)
        obs_filter = context.worker.filters[policy_id]
        # the user of the rows reports another shape
        if c.OBS in rows and rows[c.OBS].shape[1:] == obs_filter.shape:
            obs_filter.learn(rows[c.OBS])

    return take_in if scales or raw else None


def _postprocessing(context: IOContext) -> Callable[[str, SampleBatch], SampleBatch]:
    episodes = itertools.count()

    def postprocess(policy_id: str, part: SampleBatch) -> SampleBatch:
        worker = context.worker
        policy: Any = None if worker is None else worker.get_policy(policy_id)
        if worker is None or policy is None:
            raise ConfigError(
                f"postprocess_inputs needs a worker with a policy {policy_id!r}, which does not"
                " exist.",
                key="postprocess_inputs",
            )
        _name_episode(part, episodes)
        is_graph = isinstance(policy, GraphPolicy)
        if is_graph and policy.config.get("postprocess") in NEED_ACTION_VALUES:
            # they would be those of the policy that played, not the values of actions that
            # priorities need
            for name in (c.ACTION_DIST_INPUTS, c.VF_PREDS):
                part.pop(name, None)
        limit = worker.reward_limit
        if limit and c.REWARDS in part:
            part[c.REWARDS] = np.clip(part[c.REWARDS], -limit, limit)
        with worker.sampler.paused():  # two threads must not evaluate policies at the same time
            if is_graph and policy.is_recurrent:
                policy.add_recurrent_columns(part)
            processed: SampleBatch = policy.postprocess_trajectory(part)
        return processed

    return postprocess


def _name_episode(part: SampleBatch, numbers: Iterator[int]) -> None:
    """Add the columns by which samples tell trajectories apart, if stored rows don't have them."""
    if c.EPS_ID not in part:
        part[c.EPS_ID] = np.full(part.count, next(numbers), np.int64)
    if c.AGENT_INDEX not in part:
        part[c.AGENT_INDEX] = np.zeros(part.count, np.int64)


def output_creator(output: Output, **options: Any) -> OutputCreator:
    """Return the function that creates a worker's writer.

    Args:
        output: None; ``"logdir"``, the run's directory; a directory or its URI; or a function from
            an IOContext to a writer, which is returned unchanged.
        options: options of `FileWriter`.

    Raises:
        ConfigError: the output has another type (also a ValueError).
    """
    if output is None:
        return noop_output
    if callable(output):
        return output
    if not isinstance(output, str) or not output:
        raise ConfigError(
            f"output is {output!r}.",
            key="output",
            value=output,
            hint="Give null, 'logdir', a directory or a function.",
        )

    def create(context: IOContext) -> OutputWriter:
        directory = context.log_dir if output == LOG_DIR else output
        if directory is None:
            raise ConfigError(
                f"output is {LOG_DIR!r}, but there is no run directory.", key="output", value=output
            )
        return FileWriter(directory, worker_index=context.worker_index, **options)

    return create


def check_places(source: Any, output: Any) -> None:
    """Refuse files of the settings ``input`` and ``output`` that workers on this machine could not
    use; URIs and users' functions are left to the workers.

    Raises:
        ConfigError: no file of experience is there, or the output is a file or can't be written.
        DataError: the format of a file is unknown.
    """
    names = [source] if isinstance(source, str) else source
    if isinstance(source, Mapping):
        names = [name for name, weight in source.items() if weight > 0.0]
    for name in names:
        if name != SAMPLER and not is_uri(name) and not is_import_path(name):
            find_sources(name)
    if output in (None, LOG_DIR) or is_uri(output) or is_import_path(output):
        return
    place = Path(output).expanduser().absolute()
    while not os.path.exists(place):
        place = place.parent
    if not place.is_dir():
        raise ConfigError(
            f"output is {output!r}, but {place} is a file.",
            key="output",
            value=output,
            hint="Name a directory: each worker writes files of its own.",
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output is {output!r}, but {place} can't be written in: Permission denied.",
            key="output",
            value=output,
            hint="Check its owner and mode, or name another directory.",
        )


def configured_input(settings: WorkerConfig, share: Share) -> InputCreator:
    """Return the function that creates the reader for a config.

    Args:
        settings: the config.
        share: share of the files to read.

    Raises:
        ConfigError: as `input_creator`, or a function can't be imported.
    """
    source = settings.input
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
    if isinstance(source, str) and is_import_path(source):
        create_reader = _users("input", source, InputReader, "next")
        unshuffled = replace(options, shuffle_buffer_size=0)
        return lambda context: _prepared([create_reader(context)], context, unshuffled)
    return input_creator(source, options)


def configured_output(settings: WorkerConfig) -> OutputCreator:
    """Return the function that creates the writer for a config.

    Raises:
        ConfigError: as `output_creator`, or a function can't be imported.
    """
    output: Output = settings.output
    if isinstance(output, str) and is_import_path(output):
        output = _users("output", output, OutputWriter, "write")
    return output_creator(
        output,
        compress_columns=settings.output_compress_columns,
        max_file_bytes=settings.output_max_file_size,
    )


def _users(key: str, path: str, kind: type[Any], method: str) -> Callable[[IOContext], Any]:
    """Return the function that a setting names; errors of it and of its results name the setting.

    Raises:
        ConfigError: it can't be imported, or does not accept an IOContext.
    """
    function = import_object(path, key=key)
    what = f"{key} {path!r}"
    if not callable(function):
        raise ConfigError(
            f"{key} is {path!r}, expected a function of an IOContext.", key=key, value=path
        )
    check_takes(function, what, key, None)

    def create(context: IOContext) -> Any:
        result = function(context)
        if not isinstance(result, kind):
            raise ConfigError(
                f"{what} returned a {type(result).__name__}, expected an aiorl.{kind.__name__}.",
                key=key,
                value=path,
            )
        named_method = named_failures(getattr(result, method), f"{what}: {method}", key)
        with contextlib.suppress(AttributeError):  # it may have __slots__
            setattr(result, method, named_method)
        return result

    return named_failures(create, what, key)
