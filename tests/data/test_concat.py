from __future__ import annotations

import numpy as np
import pytest

from aiorl.data.arrays import concat_batches
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch


def rows(*numbers):
    return SampleBatch(rewards=np.array(numbers, np.float32))


def test_a_single_batch_is_returned_as_it_is():
    batch = rows(1, 2)
    assert concat_batches([batch]) is batch


def test_plain_batches_are_joined_in_order():
    assert concat_batches([rows(1, 2), rows(3)])["rewards"].tolist() == [1, 2, 3]


def test_counts_of_multi_agent_batches_add_up_and_rows_keep_their_order_per_policy():
    """R132."""
    joined = concat_batches(
        [MultiAgentBatch({"a": rows(1), "b": rows(2)}, 4), MultiAgentBatch({"a": rows(3)}, 2)],
    )
    assert joined.count == 6
    assert joined.policy_batches["a"]["rewards"].tolist() == [1, 3]
    assert joined.policy_batches["b"]["rewards"].tolist() == [2]


def test_plain_batches_among_multi_agent_ones_are_the_default_policys():
    """R132, R67."""
    joined = concat_batches([rows(1, 2), MultiAgentBatch({"default_policy": rows(3), "b": rows(4)}, 1)])
    assert joined.count == 3
    assert joined.policy_batches["default_policy"]["rewards"].tolist() == [1, 2, 3]
    assert joined.policy_batches["b"]["rewards"].tolist() == [4]


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="no batches"):
        concat_batches([])
