"""What cannot be reached through a sampler: rows that are no trajectory, and an empty builder."""

from __future__ import annotations

import numpy as np
import pytest

from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import PolicyError
from aiorl.sampling.builder import BatchBuilder, check_trajectory
from aiorl.testing.scripted_env import RecordingPolicy, ScriptedEnv, scenes


def rows(dones, ids):
    return SampleBatch({"dones": np.array(dones, bool), "eps_id": np.array(ids)})


def test_one_trajectory_passes():
    """R106."""
    check_trajectory(rows([False, False, True], [4, 4, 4]))
    check_trajectory(rows([False], [4]))


def test_a_done_inside_or_two_episodes_are_refused():
    """R106."""
    with pytest.raises(ValueError, match="row 1 of 3 is done"):
        check_trajectory(rows([False, True, False], [4, 4, 4]))
    with pytest.raises(ValueError, match=r"episodes \[4, 5\]"):
        check_trajectory(rows([False, False], [4, 5]))


def test_a_builder_starts_empty_and_can_be_emptied():
    builder = BatchBuilder(None)
    assert (builder.count, builder.total(), builder.has_pending_agent_data()) == (0, 0, False)
    builder.count = 5
    builder.discard()
    assert builder.count == 0


def test_a_policy_that_gives_no_batch_back_is_named(make_sampler):
    class Forgetful(RecordingPolicy):
        def postprocess_trajectory(self, *args, **kwargs):
            return None

    with pytest.raises(PolicyError, match=r"'default_policy' \(Forgetful\) returned NoneType, expected a SampleBatch"):
        make_sampler(ScriptedEnv({0: [scenes(3)]}), Forgetful()).get_data()
