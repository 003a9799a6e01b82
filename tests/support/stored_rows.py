"""Batches of experience to write and read."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch
from aiorl.errors import DataError
from aiorl.offline.formats import WHOLE, Share, Stored, WriteOptions
from aiorl.offline.readers import FileReader, ReaderOptions
from aiorl.offline.registry import format_named, format_of


def cartpole_rows(
    num_episodes: int = 3, length: int = 5, *, first: int = 0, seed: int = 0
) -> SampleBatch:
    """Return episodes in CartPole's form, with every kind of column that a sampler writes."""
    rng = np.random.default_rng([seed, first])
    count = num_episodes * length
    obs = rng.normal(size=(count, 4)).astype(np.float32)
    ends = np.arange(1, count + 1) % length == 0
    new_obs = np.concatenate([obs[1:], obs[:1]])
    new_obs[ends] = 9.0
    return SampleBatch(
        obs=obs,
        new_obs=new_obs,
        actions=rng.integers(0, 2, count),
        rewards=np.ones(count, np.float32),
        action_logp=np.log(rng.uniform(0.2, 0.9, count)).astype(np.float32),
        terminateds=ends,
        truncateds=np.zeros(count, bool),
        dones=ends,
        eps_id=np.repeat(np.arange(first, first + num_episodes), length),
        t=np.tile(np.arange(length, dtype=np.int32), num_episodes),
    )


def write(path: Any, *batches: Batch, format_name: str | None = None, **options: Any) -> Any:
    """Write batches to a new file, and return its path."""
    found = format_named(format_name) if format_name else format_of(str(path))
    with found.create(str(path), WriteOptions(**options)) as file:
        for batch in batches:
            file.write(batch)
    return path


def read(path: Any, share: Share = WHOLE) -> tuple[list[Batch], list[DataError]]:
    """Return the batches of a file, and the errors of unreadable places."""
    found = list(format_of(str(path)).read(str(path), share))
    return [x.batch for x in found if isinstance(x, Stored)], [
        x for x in found if isinstance(x, DataError)
    ]


def read_once(source: Any) -> list[Batch]:
    """Return the batches of one pass over files in order."""
    return list(FileReader(str(source), ReaderOptions(epochs=1, shuffle_files=False)))


def assert_equal_batches(found: Any, expected: Any) -> None:
    """Check that columns have the same names, values and dtypes, and that steps are equal."""
    assert type(found) is type(expected)
    if isinstance(expected, MultiAgentBatch):
        assert found.count == expected.count
        assert found.policy_batches.keys() == expected.policy_batches.keys()
        for policy_id, rows in expected.policy_batches.items():
            assert_equal_batches(found.policy_batches[policy_id], rows)
        return
    assert set(found) == set(expected)
    assert found.env_steps == expected.env_steps
    for name, column in expected.items():
        assert found[name].dtype == column.dtype, name
        np.testing.assert_array_equal(found[name], column, err_msg=name)
