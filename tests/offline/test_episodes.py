"""Whole episodes out of parts, as workers with several environments write them."""

from __future__ import annotations

import numpy as np
import pytest

from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError
from aiorl.offline.readers import EpisodeAssembler


def part(eps_id, start, end, *, done=False):
    steps = np.arange(start, end)
    return SampleBatch(
        obs=100.0 * eps_id + steps, t=steps, eps_id=np.full(len(steps), eps_id), dones=(steps == end - 1) & done
    )


def joined(assembler, *batches):
    return [episode["obs"].tolist() for batch in batches for episode in assembler.add(batch)]


def test_parts_of_interleaved_episodes_become_whole_ones_as_they_end():
    assembler = EpisodeAssembler()
    first = SampleBatch.concat([part(1, 0, 3), part(2, 0, 2)])
    second = SampleBatch.concat([part(1, 3, 5, done=True), part(2, 2, 4)])
    third = SampleBatch.concat([part(3, 0, 2, done=True), part(2, 4, 5, done=True), part(3, 0, 1, done=True)])
    assert joined(assembler, first) == []
    assert joined(assembler, second) == [[100, 101, 102, 103, 104]]
    assert joined(assembler, third) == [[300, 301], [200, 201, 202, 203, 204], [300]]
    assembler.finish()
    assert assembler.num_left_out == 0


def test_episodes_without_beginning_or_end_are_left_out_and_counted():
    assembler = EpisodeAssembler()
    assert joined(assembler, part(1, 2, 5, done=True)) == [], "its beginning never came"
    assert joined(assembler, part(2, 0, 2), part(2, 3, 6, done=True)) == [], "neither did what was in between"
    assert joined(assembler, part(4, 0, 2), part(4, 0, 3, done=True)) == [[400, 401, 402]], "another worker's"
    assert joined(assembler, part(5, 0, 4)) == []
    assembler.finish()
    assert assembler.num_left_out == 3 + 5 + 2 + 4


def test_one_id_for_several_episodes_is_cut_where_they_end():
    batch = SampleBatch(obs=np.arange(5), eps_id=np.zeros(5, int), terminateds=np.array([0, 1, 0, 0, 1], bool))
    assert joined(EpisodeAssembler(), batch) == [[0, 1], [2, 3, 4]]
    del batch["eps_id"]
    assert joined(EpisodeAssembler(), batch) == [[0, 1], [2, 3, 4]]


def test_without_flags_of_an_end_each_part_is_whole_and_without_rows_there_is_none():
    batch = SampleBatch(obs=np.arange(3), eps_id=np.array([1, 1, 2]))
    assert joined(EpisodeAssembler(), batch) == [[0, 1], [2]]
    assert joined(EpisodeAssembler(), SampleBatch()) == []


def test_a_multi_agent_batch_is_refused():
    with pytest.raises(BatchError, match="MultiAgentBatch"):
        list(EpisodeAssembler().add(MultiAgentBatch({"a": part(1, 0, 2)}, 2)))
