from __future__ import annotations

import numpy as np
import pytest

from aiorl.data.arrays import concat_batches
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch


def rows(*values: float) -> SampleBatch:
    return SampleBatch(obs=np.array(values))


def test_r131_count_is_env_steps_and_total_is_agent_steps() -> None:
    batch = MultiAgentBatch({"a": rows(1, 2, 3), "b": rows(4, 5)}, count=2)
    assert (batch.count, batch.total()) == (2, 5)


def test_r132_concat_adds_counts_and_keeps_row_order_per_policy() -> None:
    joined = MultiAgentBatch.concat(
        [MultiAgentBatch({"a": rows(1, 2)}, 1), MultiAgentBatch({"b": rows(7), "a": rows(3)}, 2)]
    )
    assert joined.count == 3
    np.testing.assert_array_equal(joined.policy_batches["a"]["obs"], [1, 2, 3])
    np.testing.assert_array_equal(joined.policy_batches["b"]["obs"], [7])


def test_r2_only_the_default_policy_gives_a_plain_batch() -> None:
    plain = rows(1)
    assert MultiAgentBatch.wrap_as_needed({DEFAULT_POLICY_ID: plain}, 1) is plain
    assert isinstance(MultiAgentBatch.wrap_as_needed({"a": plain}, 1), MultiAgentBatch)
    assert DEFAULT_POLICY_ID == "default_policy"


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"count is -1"):
        MultiAgentBatch({}, -1)


def test_r65_compression_reaches_every_policys_observations() -> None:
    obs = np.zeros((4, 100), np.uint8)
    batch = MultiAgentBatch({name: SampleBatch(obs=obs, actions=np.arange(4)) for name in "ab"}, 4)
    batch.compress("bulk")
    assert all(rows.packed == {"obs"} for rows in batch.policy_batches.values())
    np.testing.assert_array_equal(batch.policy_batches["a"]["obs"], obs)
    batch.decompress()
    assert not any(rows.packed for rows in batch.policy_batches.values())


def test_r131_a_plain_batch_of_several_agents_knows_its_env_steps() -> None:
    first = MultiAgentBatch.wrap_as_needed({DEFAULT_POLICY_ID: rows(1, 2, 3, 4)}, 2)
    empty = MultiAgentBatch.wrap_as_needed({}, 3)  # steps that left no row
    assert isinstance(first, SampleBatch)
    assert isinstance(empty, SampleBatch)
    joined = concat_batches([first, empty, first.copy()])
    assert (joined.count, joined.env_steps) == (8, 7)
    assert concat_batches([empty, empty]).env_steps == 6
    assert concat_batches([first, MultiAgentBatch({"a": rows(1)}, 1)]).count == 3
    assert first.slice(0, 3).env_steps == 3
