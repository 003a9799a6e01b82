"""Minari's datasets, read and written by name: ``minari:cartpole/mine-v0``.

They are in Minari's own directory (``MINARI_DATASETS_PATH``, else ``~/.minari/datasets``). Nothing
is downloaded; use ``minari download NAME``. An episode is a batch. Observations of a Box are stored
unchanged, those of other spaces as a preprocessor returns them for a policy, and nested actions in
column form.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.acting.preprocessors import preprocessor_for
from aiorl.config.files import open_regular, parse_json, read_regular
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout, Space
from aiorl.data.columns import NUMBER_KINDS, Array
from aiorl.data.sample_batch import Batch, SampleBatch
from aiorl.data.spaces import space_from_dict
from aiorl.errors import AiorlError, DataError
from aiorl.offline.episodes import trajectories
from aiorl.offline.files import EXTRA
from aiorl.offline.formats import WHOLE, BatchFile, Format, Share, Stored, WriteOptions, placed
from aiorl.offline.stored_columns import Room, to_batch
from aiorl.offline.unit_actions import action_space_of
from aiorl.process.imports import needed_by
from aiorl.text import one_line

PREFIX = "minari:"
_FILE = "main_data.hdf5"
_FLUSH_BYTES = 1 << 26
_MAX_METADATA_BYTES = 1 << 26
_ROW_OF_ANY_LENGTH = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
_FAULTS = (
    AiorlError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OSError,
    RuntimeError,
    OverflowError,
)
"""Errors of h5py and Pillow for damaged files."""


class MinariDataset(Format):
    """Minari's datasets."""

    name = "minari"
    suffixes = ()
    about = "a dataset of Minari, named minari:NAME"

    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """See `Format.read`; a batch is an episode."""
        with needed_by("Minari's datasets", "the minari package", EXTRA, key="input"):
            import h5py
            import minari
        dataset_id = path.removeprefix(PREFIX)
        data = minari.storage.datasets_root_dir.get_dataset_path(dataset_id) / "data"
        with contextlib.ExitStack() as stack:
            try:
                rows_of = _Episodes(*_spaces(data / "metadata.json"))
                plain = stack.enter_context(open_regular(data / _FILE, follow=True))
                file = stack.enter_context(h5py.File(plain, "r"))
                num_episodes = len(file)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"Minari has no dataset {dataset_id!r} here; `minari download {dataset_id}`"
                ) from error
            except _FAULTS as error:
                raise placed(error, path) from error
            for number in range(num_episodes):
                if share.has(number):
                    place = f"episode {number}"
                    try:
                        yield Stored(place, rows_of(number, _Group(file, f"episode_{number}")))
                    except _FAULTS as error:
                        yield placed(error, path, place)

    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """See `Format.create`."""
        return _MinariFile(path.removeprefix(PREFIX), options.env)


def _spaces(path: Path) -> tuple[Space, Space]:
    """Return the observation and action spaces in a dataset's metadata.

    Raises:
        DataError: there are none, and Minari would run the code of the environment named instead;
            or the dataset's format is not HDF5.
    """
    metadata = parse_json(
        read_regular(path, max_bytes=_MAX_METADATA_BYTES, follow=True), is_strict=False
    )
    if (
        not isinstance(metadata, dict)
        or not {"observation_space", "action_space"} <= metadata.keys()
    ):
        raise DataError(
            "its metadata have no spaces, and aiorl does not run the environment that a dataset"
            " names"
        )
    if metadata.get("data_format", "hdf5") != "hdf5":
        raise DataError(
            f"its data are {metadata['data_format']!r:.50}; only Minari's format 'hdf5' can be read"
        )
    observation_space = parse_json(str(metadata["observation_space"]).encode(), is_strict=False)
    action_space = parse_json(str(metadata["action_space"]).encode(), is_strict=False)
    return (
        space_from_dict(_described(observation_space)),
        space_from_dict(_described(action_space)),
    )


def _described(space: Any) -> dict[str, Any]:
    """Convert Minari's description of a space to that of `aiorl.data.spaces`."""
    parts = space.get("subspaces")
    if isinstance(parts, dict):
        return {
            "kind": space["type"],
            "spaces": [[name, _described(part)] for name, part in parts.items()],
        }
    if isinstance(parts, list):
        return {"kind": space["type"], "spaces": [_described(part) for part in parts]}
    return {**space, "kind": space["type"]}


class _Group:
    """Group of an HDF5 file, which reads only data within limits and in this file itself.

    Attributes:
        room: memory left for the episode.
    """

    def __init__(self, file: Any, name: str) -> None:
        """Use a group of an h5py File."""
        self._file = file
        self._name = name
        self.room = Room()

    def numbers(self, name: str) -> Array:
        """Return one of its datasets."""
        return self._numbers(self._entry(name))

    def values(self, name: str, space: Space) -> Any:
        """Return values of a space, one for each row: arrays, in dicts and tuples like those of the
        space.
        """
        if isinstance(space, spaces.Dict):
            return {key: self.values(f"{name}/{key}", part) for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            names = (f"{name}/_index_{number}" for number in range(len(space.spaces)))
            return tuple(map(self.values, names, space.spaces))
        dataset = self._entry(name)
        shape = space.shape or ()
        is_picture = space.dtype == np.uint8 and len(shape) in (2, 3)
        if is_picture and getattr(dataset, "shape", ())[1:] != shape:
            return self._pictures(dataset, shape)
        return self._numbers(dataset)

    def _entry(self, name: str) -> Any:
        import h5py

        entry = self._file
        for part in f"{self._name}/{name}".split("/"):
            is_here = isinstance(entry, h5py.Group) and isinstance(
                entry.get(part, getlink=True), h5py.HardLink
            )
            if not is_here:
                raise DataError(f"{one_line(name, 80)!r} is missing, or a link to another place")
            entry = entry[part]
        return entry

    def _numbers(self, dataset: Any) -> Array:
        self._check(dataset)
        if dataset.dtype.kind not in NUMBER_KINDS:
            raise DataError(f"values of {one_line(str(dataset.dtype), 80)}, which are not numbers")
        self.room.take(dataset.nbytes)
        array: Array = dataset[()]
        return array

    def _pictures(self, dataset: Any, shape: tuple[int, ...]) -> Array:
        """Return pictures [N, *shape] from JPEG files, each a row of bytes."""
        from PIL import Image

        self._check(dataset)
        count = len(dataset)
        height, width = shape[:2]
        bands = shape[2] if len(shape) == 3 else 1
        self.room.take(count * math.prod(shape))
        self.room.take(self._bytes_of_rows(dataset))
        pictures = np.empty((count, *shape), np.uint8)
        for row in range(count):
            content = np.asarray(dataset[row])
            if content.dtype != np.uint8:
                raise DataError(
                    f"pictures of {one_line(str(content.dtype), 80)}, which are not bytes"
                )
            with Image.open(io.BytesIO(content.tobytes()), formats=["JPEG"]) as picture:
                if picture.size != (width, height) or len(picture.getbands()) != bands:
                    raise DataError(f"pictures that are not of shape {shape}")
                pictures[row] = np.asarray(picture).reshape(shape)
        return pictures

    def _bytes_of_rows(self, dataset: Any) -> int:
        """Return the bytes that variable-length rows claim; HDF5 would allocate them before it
        reads them.
        """
        import h5py

        if h5py.check_vlen_dtype(dataset.dtype) is None:
            return int(dataset.nbytes)
        if dataset.chunks is None or dataset.id.get_create_plist().get_nfilters():
            raise DataError("variable-length rows that are not in plain chunks")
        chunks = []
        for number in range(dataset.id.get_num_chunks()):
            chunk = dataset.id.get_chunk_info(number)
            _, content = dataset.id.read_direct_chunk(chunk.chunk_offset)
            chunks.append(content)
        rows = b"".join(chunks)
        num_rows = len(chunks) * math.prod(dataset.chunks)
        if len(rows) != num_rows * _ROW_OF_ANY_LENGTH.itemsize:
            raise DataError("variable-length rows in an unknown layout")
        lengths = np.frombuffer(rows, _ROW_OF_ANY_LENGTH)["length"]
        return int(lengths.sum(dtype=np.int64))

    def _check(self, dataset: Any) -> None:
        import h5py

        if not isinstance(dataset, h5py.Dataset) or not dataset.shape:
            raise DataError("a group or a single value instead of rows")
        if dataset.external or dataset.is_virtual:
            raise DataError("values that are in another file, which is not read")
        if math.prod(dataset.chunks or ()) * dataset.dtype.itemsize > self.room.left:
            raise DataError("a chunk with more bytes than a batch can have")


class _Episodes:
    """Function from an episode of Minari to a batch."""

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        """Set the dataset's spaces."""
        self._observation_space = observation_space
        self._action_space = action_space
        is_box = isinstance(observation_space, spaces.Box)
        self._preprocessor = None if is_box else preprocessor_for(observation_space)
        self._actions = ActionLayout(action_space)

    def __call__(self, number: int, episode: _Group) -> SampleBatch:
        rewards = np.asarray(episode.numbers("rewards"), np.float32)
        count = len(rewards)
        observations = self._observations(episode, count + 1)
        terminateds = np.asarray(episode.numbers("terminations"), bool)
        truncateds = np.asarray(episode.numbers("truncations"), bool)
        actions = episode.values("actions", self._action_space)
        if self._actions.is_nested:
            actions = self._actions.to_column(actions)
        return to_batch(
            {
                c.OBS: observations[:-1],
                c.NEW_OBS: observations[1:],
                c.ACTIONS: np.asarray(actions),
                c.REWARDS: rewards,
                c.TERMINATEDS: terminateds,
                c.TRUNCATEDS: truncateds,
                c.DONES: terminateds | truncateds,
                c.EPS_ID: np.full(count, number, np.int64),
                c.T: np.arange(count, dtype=np.int32),
            }
        )

    def _observations(self, episode: _Group, count: int) -> Array:
        values = episode.values("observations", self._observation_space)
        preprocessor = self._preprocessor
        if preprocessor is None:
            observations = np.asarray(values)
        else:
            row_bytes = math.prod(preprocessor.shape) * preprocessor.dtype.itemsize
            episode.room.take(count * row_bytes)
            rows = [_row(values, index) for index in range(count)]
            observations = preprocessor.transform_rows(rows)
        if len(observations) != count:
            raise DataError(
                f"{len(observations)} observations for {count - 1} steps; there must be one more"
            )
        return observations


def _row(values: Any, index: int) -> Any:
    """Return one value of a space from the arrays of all values."""
    if isinstance(values, dict):
        return {name: _row(part, index) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(_row(part, index) for part in values)
    return values[index]


class _MinariFile(BatchFile):
    """Dataset of Minari; episodes are written when they end, and open ones as truncated when the
    file is closed. An episode that lacks a step becomes two.
    """

    def __init__(self, dataset_id: str, env: str | None) -> None:
        """Create the dataset."""
        with needed_by("Minari's datasets", "the minari package", EXTRA, key="input"):
            import minari
            from minari.storage.datasets_root_dir import get_dataset_path
        self._minari = minari
        self._id = dataset_id
        self._env = env
        if get_dataset_path(dataset_id).exists():
            raise FileExistsError(
                f"Minari has a dataset {dataset_id!r} already; `minari delete {dataset_id}`"
            )
        # by eps_id and agent_index
        self._open: dict[tuple[int, int], list[SampleBatch]] = {}
        self._ended: list[SampleBatch] = []
        self._num_bytes = 0
        self._action_space: Space | None = None
        self._dataset: Any = None

    def write(self, batch: Batch) -> int:
        """See `BatchFile.write`."""
        if not isinstance(batch, SampleBatch):
            raise DataError(
                "a Minari dataset holds the steps of one agent, but this is a batch of several"
                " policies"
            )
        missing = [
            name
            for name in (c.OBS, c.NEW_OBS, c.ACTIONS, c.REWARDS, c.EPS_ID, c.DONES)
            if name not in batch
        ]
        if missing:
            raise DataError(
                f"a Minari dataset needs the columns {', '.join(missing)}, which are missing"
            )
        for part in trajectories(batch):
            agents = part.get(c.AGENT_INDEX, (0,))
            key = (int(part[c.EPS_ID][0]), int(agents[0]))
            self._open.setdefault(key, []).append(part)
            self._num_bytes += part.nbytes
            if part[c.DONES][-1]:
                self._end(key)
        if self._num_bytes > _FLUSH_BYTES:
            self._flush()
        return batch.nbytes

    def close(self) -> None:
        """See `BatchFile.close`."""
        for key in list(self._open):
            self._end(key)
        self._flush()

    def abandon(self) -> None:
        """See `BatchFile.abandon`."""
        self._open = {}
        self._ended = []
        if self._dataset is not None:
            with contextlib.suppress(OSError, ValueError):
                self._minari.delete_dataset(self._id)
            self._dataset = None

    def _end(self, key: tuple[int, int]) -> None:
        """End an episode; a gap in ``t`` divides it."""
        self._ended += trajectories(SampleBatch.concat(self._open.pop(key)))

    def _flush(self) -> None:
        if not self._ended:
            return
        episodes = self._ended
        self._ended = []
        self._num_bytes = 0
        buffers = [self._buffer(episode) for episode in episodes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the author and other fields that may be empty
            try:
                actions = np.concatenate([episode[c.ACTIONS] for episode in episodes])
                if self._action_space is None:
                    self._action_space = _action_space(actions, self._env)
                _check_actions(actions, self._action_space)
                if self._dataset is not None:
                    self._dataset.update_dataset_from_buffer(buffers)
                    return
                self._dataset = self._minari.create_dataset_from_buffers(
                    self._id,
                    buffers,
                    env=self._env,
                    observation_space=_box(episodes[0][c.OBS]),
                    action_space=self._action_space,
                    jpeg_encoding=False,  # it would lose pixels
                )
            except (ValueError, TypeError, KeyError, ImportError) as error:
                raise DataError(
                    f"Minari can't write {self._id!r}: {one_line(str(error), 300)}"
                ) from error

    def _buffer(self, episode: SampleBatch) -> Any:
        from minari.data_collector import EpisodeBuffer

        following = episode[c.NEW_OBS][:-1]
        obs = episode[c.OBS][1:]
        is_same = np.array_equal(following, obs) or np.allclose(
            following, obs, rtol=1e-4, atol=1e-5
        )
        if not is_same:
            raise DataError(
                f"in eps_id {episode[c.EPS_ID][0]}, obs of a row is not new_obs of the row before"
                " it, but a Minari dataset has one observation between two steps. `aiorl data"
                " validate` names such rows; correct them, or give each piece its own eps_id"
            )
        terminateds = episode.get(c.TERMINATEDS, episode[c.DONES])
        truncateds = np.array(episode.get(c.TRUNCATEDS, np.zeros(episode.count, bool)))
        truncateds[-1] = truncateds[-1] or not terminateds[-1]
        return EpisodeBuffer(
            observations=np.concatenate([episode[c.OBS], episode[c.NEW_OBS][-1:]]),
            actions=episode[c.ACTIONS],
            rewards=episode[c.REWARDS],
            terminations=terminateds,
            truncations=truncateds,
            infos={},
        )


def _action_space(actions: Array, env: str | None) -> Space:
    """Return the action space of an environment if it has the form of actions [B, ...], else one
    with these actions.
    """
    space = None if env is None else action_space_of(env)
    if space is not None and space.shape == actions.shape[1:]:
        return space
    if actions.ndim == 1 and actions.dtype.kind in "iu":
        first = min(0, int(actions.min()))
        return spaces.Discrete(int(actions.max()) + 1 - first, start=first)
    return _box(actions)


def _check_actions(actions: Array, space: Space) -> None:
    """Refuse actions [B, ...] that a Discrete space doesn't have.

    Raises:
        DataError: there are some.
    """
    if isinstance(space, spaces.Discrete):
        ((_, is_wrong),) = ActionLayout(space).misfits(actions)
        if is_wrong.any():
            raise DataError(
                f"action {actions[is_wrong][0]} is not in {space}, which is the action space of"
                f" --env, or of the first {_FLUSH_BYTES >> 20} MiB without it. Give --env with the"
                " environment of the rows"
            )


def _box(rows: Array) -> spaces.Box:
    if rows.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, rows.shape[1:], rows.dtype.type)
    limits = np.iinfo(rows.dtype if rows.dtype.kind in "iu" else np.uint8)
    return spaces.Box(limits.min, limits.max, rows.shape[1:], rows.dtype.type)
