"""Episodes and trajectories by themselves; how they live in a sampler is told in test_iteration."""

from __future__ import annotations

import numpy as np
import pytest

import aiorl
from aiorl.acting.actor import Actor
from aiorl.acting.filters import NoFilter
from aiorl.acting.policy_map import PolicyMap
from aiorl.acting.preprocessors import preprocessor_for
from aiorl.data.sample_batch import SampleBatch
from aiorl.sampling.builder import BatchBuilder, OriginalBatches, check_trajectory
from aiorl.sampling.episode import MultiAgentEpisode
from aiorl.sampling.seats import Lane
from aiorl.testing.scripted_env import RecordingPolicy


@pytest.fixture
def episode():
    policies = {name: RecordingPolicy(recurrent=True) for name in ("even", "odd")}
    lanes = {
        name: Lane(Actor(name, policy, preprocessor_for(policy.observation_space), NoFilter()))
        for name, policy in policies.items()
    }
    binding = PolicyMap(policies, lambda agent: "even" if agent % 2 == 0 else "odd").binding()
    return MultiAgentEpisode(7, 99, lanes, binding, BatchBuilder(None), [].append)


def test_before_any_observation_there_are_zeros_initial_states_and_nothing(episode):
    """R100, R114."""
    assert episode.policy_for(3) == "odd"
    assert episode.last_action_for(3) == episode.prev_action_for(3) == 0
    assert episode.prev_reward_for(3) == 0.0
    assert episode.rnn_state_for(3)[0].tolist() == [-1.0]
    assert episode.last_pi_info_for(3) == {}
    assert episode.last_observation_for(3) is episode.last_raw_obs_for(3) is episode.last_info_for(3) is None
    assert episode.get_agents() == []


def test_rewards_of_agents_not_yet_seen_count_in_totals(episode):
    """R92."""
    episode.add_rewards({2: 1.5, 3: 2, 5: None})
    episode.seat_for(3)
    episode.add_rewards({3: np.float32(4.0)})
    assert episode.total_reward == 7.5
    assert episode.agent_rewards == {(2, "even"): 1.5, (3, "odd"): 6.0}
    assert episode.seats[3].reward == 4.0


def test_agents_are_numbered_as_they_appear(episode):
    """R130."""
    assert [episode.seat_for(agent).index for agent in (5, 2, 5, 0)] == [0, 1, 0, 2]


def test_a_soft_reset_restarts_totals_and_keeps_bindings_and_user_data(episode):
    """R84."""
    episode.user_data["mine"] = 1
    episode.custom_metrics["m"] = old = 2.0
    reported = episode.custom_metrics
    episode.add_rewards({2: 5.0})
    episode.length = 10
    episode.soft_reset(100)
    assert (episode.episode_id, episode.length, episode.total_reward) == (100, 0, 0.0)
    assert episode.agent_rewards == episode.custom_metrics == episode.hist_data == {}
    assert reported == {"m": old}
    assert episode.user_data == {"mine": 1}
    assert "7" in repr(episode)


def test_original_batches_are_made_on_demand_and_not_later(episode):
    """R109."""
    segments = {}
    for number, agent in enumerate((2, 3, 4)):
        seat = episode.seat_for(agent)
        obs = np.zeros(3, np.float32)
        for reward, is_row in ((0.0, False), (float(number), True)):
            if is_row:
                episode.batch_builder.expect_rows(seat)
            seat.lane.arriving.append((seat, obs, reward, 0))
            seat.lane.take_in()
        segments[agent] = (seat, seat.cut())
    originals = OriginalBatches(segments)
    others = originals.without(3)
    assert list(originals) == [2, 3, 4]
    assert list(others) == [2, 4]
    assert (len(originals), len(others)) == (3, 2)
    assert others[4][1]["rewards"].tolist() == [2.0]
    assert others[4] is originals[4]
    with pytest.raises(KeyError):
        others[3]
    originals.close()
    assert originals[4][1].count == 1
    with pytest.raises(RuntimeError, match="during postprocessing only"):
        originals[2]


def test_the_agent_need_not_be_named_where_there_is_only_one():
    policy = RecordingPolicy(recurrent=True)
    lane = Lane(Actor("only", policy, preprocessor_for(policy.observation_space), NoFilter()))
    binding = PolicyMap({"only": policy}, lambda agent: "only").binding()
    episode = MultiAgentEpisode(7, 99, {"only": lane}, binding, BatchBuilder(None), [].append)
    seat = episode.seat_for(aiorl.DEFAULT_AGENT_ID)
    seat.raw_obs, seat.info = "seen", {"x": 1}
    assert episode.policy_for() == "only"
    assert (episode.last_raw_obs_for(), episode.last_info_for(), episode.prev_reward_for()) == ("seen", {"x": 1}, 0.0)
    for name in ("last_observation_for", "last_action_for", "prev_action_for", "rnn_state_for", "last_pi_info_for"):
        np.testing.assert_equal(getattr(episode, name)(), getattr(episode, name)(aiorl.DEFAULT_AGENT_ID))


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
