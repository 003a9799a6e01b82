"""Minari's datasets, read and written by their name: ``minari:cartpole/mine-v0``.

They lie in Minari's own directory (``MINARI_DATASETS_PATH``, else ``~/.minari/datasets``); nothing is downloaded:
``minari download NAME`` does that. An episode is a batch. Observations of a Box are taken as they are, those of other
spaces as a preprocessor gives them to a policy; nested actions in column form.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Generator
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.concat import Batch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import AiorlError, DataError
from aiorl.extras import needed_by
from aiorl.observation.preprocessors import preprocessor_for
from aiorl.offline.files import EXTRA
from aiorl.offline.formats import WHOLE, BatchFile, Format, Share, Stored, WriteOptions
from aiorl.offline.stored_columns import to_batch
from aiorl.text import one_line

__all__ = ["PREFIX", "MinariDataset"]

Array = NDArray[Any]

PREFIX = "minari:"
_FLUSH_BYTES = 1 << 26


class MinariDataset(Format):
    """Minari's datasets."""

    name = "minari"
    suffixes = ()
    about = "a dataset of Minari's, named minari:NAME"

    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """See Format; a batch is an episode."""
        with needed_by("Minari's datasets", "the minari package", EXTRA, key="input"):
            import minari
        dataset_id = path.removeprefix(PREFIX)
        try:
            _check_spaces(dataset_id)
            dataset = minari.load_dataset(dataset_id)
            rows_of = _Episodes(dataset.observation_space, dataset.action_space)
            numbers = [int(number) for number in dataset.episode_indices]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"Minari has no dataset {dataset_id!r} here; `minari download {dataset_id}`"
            ) from error
        except DataError as error:
            raise DataError(error.reason, path=path) from error
        except (ValueError, KeyError, TypeError, OSError, AssertionError) as error:
            raise DataError(f"no Minari dataset ({one_line(str(error), 200)})", path=path) from error
        for at, number in enumerate(numbers):
            if share.has(at):
                place = f"episode {number}"
                try:
                    (episode,) = dataset.iterate_episodes([number])
                    yield Stored(place, rows_of(episode))
                except DataError as error:
                    yield DataError(error.reason, path=path, place=place)
                except (AiorlError, ValueError, KeyError, TypeError, OSError) as error:
                    yield DataError(one_line(str(error), 200), path=path, place=place)

    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """See Format."""
        return _MinariFile(path.removeprefix(PREFIX), options.env)


def _check_spaces(dataset_id: str) -> None:
    """Raise DataError if a dataset doesn't say its spaces: Minari would run the code of the environment it names."""
    from minari.storage.datasets_root_dir import get_dataset_path

    metadata = json.loads((get_dataset_path(dataset_id) / "data" / "metadata.json").read_text("utf-8"))
    if not isinstance(metadata, dict) or not {"observation_space", "action_space"} <= metadata.keys():
        raise DataError("its metadata have no spaces, and the code of an environment that a dataset names is not run")


class _Episodes:
    """From an episode of Minari's to a batch."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Take the dataset's spaces."""
        self._observation_space = observation_space
        is_box = isinstance(observation_space, spaces.Box)
        self._preprocessor = None if is_box else preprocessor_for(observation_space)
        self._actions = ActionLayout(action_space)

    def __call__(self, episode: Any) -> SampleBatch:
        rewards = np.asarray(episode.rewards, np.float32)
        observations = self._observations(episode.observations, len(rewards) + 1)
        terminateds = np.asarray(episode.terminations, bool)
        truncateds = np.asarray(episode.truncations, bool)
        actions = episode.actions
        return to_batch(
            {
                c.OBS: observations[:-1],
                c.NEW_OBS: observations[1:],
                c.ACTIONS: np.asarray(self._actions.to_column(actions) if self._actions.is_nested else actions),
                c.REWARDS: rewards,
                c.TERMINATEDS: terminateds,
                c.TRUNCATEDS: truncateds,
                c.DONES: terminateds | truncateds,
                c.EPS_ID: np.full(len(rewards), int(episode.id), np.int64),
                c.T: np.arange(len(rewards), dtype=np.int32),
            }
        )

    def _observations(self, found: Any, count: int) -> Array:
        if self._preprocessor is None:
            observations = np.asarray(found)
        else:
            observations = self._preprocessor.transform_rows([_row(found, at) for at in range(count)])
        if len(observations) != count:
            raise DataError(f"{len(observations)} observations of {count - 1} steps; there must be one more")
        return observations


def _row(found: Any, at: int) -> Any:
    if isinstance(found, dict):
        return {name: _row(part, at) for name, part in found.items()}
    return tuple(_row(part, at) for part in found) if isinstance(found, tuple) else found[at]


class _MinariFile(BatchFile):
    """A dataset of Minari's; an episode is written when it has ended, those that go on at the end as truncated."""

    def __init__(self, dataset_id: str, env: str | None) -> None:
        """Begin a new dataset."""
        with needed_by("Minari's datasets", "the minari package", EXTRA, key="input"):
            import minari
            from minari.storage.datasets_root_dir import get_dataset_path
        self._minari = minari
        self._id, self._env = dataset_id, env
        if get_dataset_path(dataset_id).exists():
            raise FileExistsError(f"Minari has a dataset {dataset_id!r} already; `minari delete {dataset_id}`")
        self._open: dict[int, list[SampleBatch]] = {}
        self._ended: list[SampleBatch] = []
        self._num_bytes = 0
        self._dataset: Any = None

    def write(self, batch: Batch) -> int:
        """See BatchFile."""
        if not isinstance(batch, SampleBatch):
            raise DataError("a Minari dataset holds the steps of one agent, and this is a batch of several policies")
        missing = [name for name in (c.OBS, c.NEW_OBS, c.ACTIONS, c.REWARDS, c.EPS_ID, c.DONES) if name not in batch]
        if missing:
            raise DataError(f"a Minari dataset needs the columns {', '.join(missing)}, which are not there")
        for part in batch.split_by_episode():
            episode = int(part[c.EPS_ID][0])
            pieces = self._open.setdefault(episode, [])
            pieces.append(part.slice(0, part.count))
            self._num_bytes += part.nbytes
            if part[c.DONES][-1]:
                self._ended.append(SampleBatch.concat(self._open.pop(episode)))
        if self._num_bytes > _FLUSH_BYTES:
            self._flush()
        return batch.nbytes

    def close(self) -> None:
        """See BatchFile."""
        self._ended += [SampleBatch.concat(pieces) for pieces in self._open.values()]
        self._open = {}
        self._flush()

    def abandon(self) -> None:
        """See BatchFile."""
        self._open, self._ended = {}, []
        if self._dataset is not None:
            with contextlib.suppress(OSError, ValueError):
                self._minari.delete_dataset(self._id)
            self._dataset = None

    def _flush(self) -> None:
        if not self._ended:
            return
        episodes, self._ended, self._num_bytes = self._ended, [], 0
        buffers = [self._buffer(episode) for episode in episodes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the author and others that needn't be named
            try:
                if self._dataset is not None:
                    self._dataset.update_dataset_from_buffer(buffers)
                    return
                self._dataset = self._minari.create_dataset_from_buffers(
                    self._id,
                    buffers,
                    env=self._env,
                    observation_space=_observed_space(episodes),
                    action_space=_action_space(episodes),
                    jpeg_encoding=False,  # it would lose pixels
                )
            except (ValueError, TypeError, KeyError, ImportError) as error:
                raise DataError(f"Minari can't write {self._id!r}: {one_line(str(error), 300)}") from error

    def _buffer(self, episode: SampleBatch) -> Any:
        from minari.data_collector import EpisodeBuffer

        terminateds = episode[c.TERMINATEDS] if c.TERMINATEDS in episode else episode[c.DONES]
        truncateds = np.array(episode[c.TRUNCATEDS] if c.TRUNCATEDS in episode else np.zeros(episode.count, bool))
        truncateds[-1] = truncateds[-1] or not terminateds[-1]
        return EpisodeBuffer(
            observations=np.concatenate([episode[c.OBS], episode[c.NEW_OBS][-1:]]),
            actions=episode[c.ACTIONS],
            rewards=episode[c.REWARDS],
            terminations=terminateds,
            truncations=truncateds,
            infos={},
        )


def _observed_space(episodes: list[SampleBatch]) -> spaces.Space[Any]:
    obs = episodes[0][c.OBS]
    return _box(obs)


def _action_space(episodes: list[SampleBatch]) -> spaces.Space[Any]:
    actions = episodes[0][c.ACTIONS]
    if actions.ndim == 1 and actions.dtype.kind in "iu":
        return spaces.Discrete(int(max(episode[c.ACTIONS].max() for episode in episodes)) + 1)
    return _box(actions)


def _box(rows: Array) -> spaces.Box:
    if rows.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, rows.shape[1:], rows.dtype.type)
    limits = np.iinfo(rows.dtype if rows.dtype.kind in "iu" else np.uint8)
    return spaces.Box(limits.min, limits.max, rows.shape[1:], rows.dtype.type)
