"""Stored rows with their next observations, and with the numbers of their pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from plain_graph import make_graph

from aiorl.acting.graph_policy import learned_policy_class
from aiorl.acting.postprocess import n_step_new_obs
from aiorl.data import columns as c
from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch
from aiorl.errors import DataError
from aiorl.offline.io import InputReader
from aiorl.offline.readers import FileReader, PreparedReader, ReaderOptions
from aiorl.offline.writers import FileWriter

LENGTHS = (4, 3, 5)
"""Rows of three episodes: one terminates, one is truncated, one is cut. Observations count up,
rewards are 1."""


def stored(*without: str) -> SampleBatch:
    columns: dict[str, list[Any]] = {}
    for number, length in enumerate(LENGTHS):
        steps, obs = (
            np.arange(length),
            np.repeat(100.0 * number + np.arange(length)[:, None], 2, axis=1),
        )
        is_last = steps == length - 1
        rows_by_name = {
            c.OBS: obs.astype(np.float32),
            c.NEW_OBS: obs.astype(np.float32) + 1,
            c.EPS_ID: np.full(length, number),
            c.T: steps,
            c.TERMINATEDS: is_last & (number == 0),
            c.TRUNCATEDS: is_last & (number == 1),
            c.ACTIONS: np.zeros(length, np.int64),
            c.REWARDS: np.ones(length, np.float32),
        }
        for name, array in rows_by_name.items():
            columns.setdefault(name, []).append(array)
    return SampleBatch(
        {name: np.concatenate(parts) for name, parts in columns.items() if name not in without}
    )


class Given(InputReader):
    """Reader that returns the same batch without end."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def next(self) -> Batch:
        return copy.deepcopy(self._batch)


def postprocessing(n: int) -> Callable[[str, SampleBatch], SampleBatch]:
    graph, spec, weights = make_graph(
        (2,), spaces.Discrete(3), recurrent=False, uses_previous_step=False
    )
    settings = {"postprocess": "n_step", "postprocess_params": {"gamma": 0.5, "n": n}}
    policy = learned_policy_class(graph, spec.to_dict())(
        spaces.Box(-999, 999, (2,)), spaces.Discrete(3), settings
    )
    policy.set_weights(weights)
    return lambda policy_id, part: policy.postprocess_trajectory(part)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("without", [(), (c.NEW_OBS,), (c.NEW_OBS, c.EPS_ID), (c.EPS_ID,)])
def test_the_next_observation_is_right_at_each_end_of_an_episode(
    n: int, without: tuple[str, ...]
) -> None:
    """If it is not stored, it comes from the next row; the last row of an open episode is left
    out.
    """
    batch = PreparedReader([Given(stored(*without))], postprocess=postprocessing(n)).next()
    assert isinstance(batch, SampleBatch)
    following = n_step_new_obs({name: column[:, None] for name, column in batch.items()})[:, 0, 0]
    results = {
        int(obs): (float(new_obs), float(returned), float(discount))
        for obs, new_obs, returned, discount in zip(
            batch[c.OBS][:, 0], following, batch[c.N_STEP_RETURNS], batch[c.DISCOUNTS], strict=True
        )
    }
    rows = {
        100 * number + at: (number, at)
        for number, length in enumerate(LENGTHS)
        for at in range(length)
    }
    if c.NEW_OBS in without:
        del rows[102], rows[204]
    assert results.keys() == rows.keys()
    for obs, (number, at) in rows.items():
        num_known = LENGTHS[number] - (c.NEW_OBS in without and number > 0)
        steps = min(n, num_known - at)
        new_obs, returned, discount = results[obs]
        assert returned == sum(0.5**i for i in range(steps))
        if number == 0 and at + steps == num_known:
            assert discount == 0.0, "a terminal state has no successor"
        else:
            assert (discount, new_obs) == (0.5**steps, obs + steps)


def test_rows_of_several_policies_are_postprocessed_by_their_own_policy() -> None:
    """R189."""

    def postprocess(policy_id: str, part: SampleBatch) -> SampleBatch:
        part["by"] = np.full(part.count, policy_id)
        return part

    several = MultiAgentBatch(
        {"a": stored(), "b": stored(c.NEW_OBS).slice(0, 4), "c": stored(c.NEW_OBS).slice(4, 5)}, 12
    )
    rows_by_name = PreparedReader([Given(several)], postprocess=postprocess).next()
    assert isinstance(rows_by_name, MultiAgentBatch)
    assert rows_by_name.count == 12
    assert {
        name: (rows.count, {*rows["by"]}) for name, rows in rows_by_name.policy_batches.items()
    } == {
        "a": (12, {"a"}),
        "b": (4, {"b"}),  # c has one row, whose next observation is unknown
    }


def test_rows_after_a_gap_do_not_follow_the_rows_before_it() -> None:
    keep = np.array([0, 1, 3, 4])
    episode = stored(c.NEW_OBS).slice(7, 12).take(keep)
    batch = PreparedReader([Given(episode)], postprocess=postprocessing(1)).next()
    assert isinstance(batch, SampleBatch)
    assert batch[c.OBS][:, 0].tolist() == [200.0, 203.0]
    assert batch[c.NEW_OBS][:, 0].tolist() == [201.0, 204.0]


def test_reading_ends_if_no_rows_are_left_of_many_batches() -> None:
    reader = PreparedReader([Given(stored(c.NEW_OBS).slice(4, 5))], postprocess=postprocessing(1))
    with pytest.raises(DataError, match="new_obs"):
        reader.next()


def pieces_of(path: Path, **options: Any) -> list[tuple[int, list[float]]]:
    reader = PreparedReader(
        [FileReader(str(path), ReaderOptions(batch_rows=3, **options))],
        postprocess=lambda policy_id, part: part,
    )
    results = []
    for _ in range(2 * 9):
        batch = reader.next()
        assert isinstance(batch, SampleBatch)
        (number,) = set(batch[c.PIECE].tolist())
        results.append((number, batch[c.OBS][:, 0].tolist()))
    return results


def test_a_piece_has_the_same_number_in_each_pass_and_for_each_reader(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        writer = FileWriter(str(tmp_path / name))
        writer.write(stored())
        writer.close()
    source = [str(path) for path in sorted(tmp_path.iterdir())]
    first, second = (dict() for _ in range(2))
    for seed, results in ((1, first), (2, second)):
        for path in source:
            for number, rows in pieces_of(Path(path), seed=seed):
                assert results.setdefault(number, rows) == rows
    assert first == second
    assert len(first) == 9, "three episodes of each of three files"
    assert all(0 < number < 2**63 for number in first)
