from __future__ import annotations

import functools

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN
from aiorl.env.env_maker import to_base_env
from aiorl.env.native_vector_env import LockstepBaseEnv, NativeVectorEnv
from aiorl.env.vector_env import Copies, VectorBaseEnv
from aiorl.errors import EnvContractError
from aiorl.testing.envs import CountingEnv, CountingVectorEnv

MODES = ["NextStep", "SameStep", "Disabled"]


def native(mode, lengths=(2, 3), end="terminate") -> LockstepBaseEnv:
    return LockstepBaseEnv(NativeVectorEnv(CountingVectorEnv(2, lengths, end, mode), env_id="counting"))


def trajectories(base, steps) -> dict:
    """What a sampler would see: for each copy its episodes, as lists of (obs, reward, terminated, truncated)."""
    episodes = {0: [], 1: []}
    poll = base.poll()
    for _ in range(steps):
        actions = {}
        for index, obs in poll.obs.items():
            reward = poll.rewards[index][AGENT]
            row = (obs[AGENT].tolist(), reward, poll.terminateds[index][ALL_AGENTS], poll.truncateds[index][AGENT])
            if reward is None:
                episodes[index].append([])
            episodes[index][-1].append(row)
            actions[index] = {AGENT: 0}
            if poll.dones[index][ALL_AGENTS]:
                fresh = base.try_reset(index)
                if fresh == ASYNC_RESET_RETURN:
                    del actions[index]
                else:
                    episodes[index].append([(fresh[AGENT].tolist(), None, False, False)])
        base.send_actions(actions)
        poll = base.poll()
    return episodes


@pytest.mark.parametrize("end", ["terminate", "truncate"])
@pytest.mark.parametrize("mode", MODES)
def test_r161_every_autoreset_mode_shows_the_episodes_that_plain_copies_show(mode, end):
    plain = VectorBaseEnv(Copies([CountingEnv(2, end, 0), CountingEnv(3, end, 1)]))
    expected = trajectories(plain, 30)
    got = trajectories(native(mode, end=end), 30)
    for index in (0, 1):
        # A mode that resets in a step of its own gets through fewer episodes.
        whole = len(got[index]) - 1
        assert whole >= 5
        assert got[index][:whole] == expected[index][:whole]


def test_next_step_environments_reset_by_a_later_poll_and_their_row_has_no_reward():
    base = native("NextStep", (1, 9))
    base.poll()
    base.send_actions({0: {AGENT: 0}, 1: {AGENT: 0}})
    base.poll()
    assert base.try_reset(0) == ASYNC_RESET_RETURN
    assert base.try_reset(1) is None
    base.send_actions({1: {AGENT: 0}})
    poll = base.poll()
    assert poll.rewards == {0: {AGENT: None}, 1: {AGENT: 2.0}}
    assert poll.obs[0][AGENT].tolist() == [1, 0, 0]


def test_same_step_environments_are_reset_only_at_an_end():
    base = native("SameStep", (1, 9))
    base.poll()
    assert base.try_reset(0) is None
    base.send_actions({0: {AGENT: 0}, 1: {AGENT: 0}})
    poll = base.poll()
    assert poll.obs[0][AGENT].tolist() == [0, 1, 0]
    assert base.try_reset(0)[AGENT].tolist() == [1, 0, 0]
    assert base.try_reset(0) is None


class Telling(CountingEnv):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {"begun": self._episode}

    def step(self, action):
        result = super().step(action)
        return (*result[:4], {"n": [self._episode, self._step]} if self._step != 2 else {})


@pytest.mark.parametrize("mode", MODES)
def test_infos_of_every_copy_come_with_its_observations_final_ones_included(mode):
    """4.6: what the step said, and nothing where an episode opens."""
    copies = [functools.partial(Telling, 2, index=0), functools.partial(Telling, 3, index=1)]
    base = to_base_env(SyncVectorEnv(copies, autoreset_mode=mode))
    poll = base.poll()
    seen = 0
    for _ in range(20):
        for index, by_agent in poll.obs.items():
            episode, step, _ = by_agent[AGENT].astype(int).tolist()
            said = {} if step in (0, 2) else {"n": [episode, step]}
            assert poll.infos[index] == {AGENT: said}
            seen += bool(said)
        acting = [index for index in poll.obs if not poll.dones[index][ALL_AGENTS]]
        acting += [i for i in poll.obs if i not in acting and base.try_reset(i) != ASYNC_RESET_RETURN]
        base.send_actions({index: {AGENT: 0} for index in acting})
        poll = base.poll()
    assert seen > 15


def test_polling_twice_is_an_error():
    base = native("SameStep")
    base.poll()
    with pytest.raises(EnvContractError, match="polled twice"):
        base.poll()


def test_a_real_vector_environment_is_seeded_unwrapped_and_closed():
    import gymnasium

    made = [gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point") for _ in range(2)]
    bases = [to_base_env(env, seed=5) for env in made]
    one, other = (base.poll().obs for base in bases)
    np.testing.assert_array_equal(one[0][AGENT], other[0][AGENT])
    assert isinstance(bases[0], LockstepBaseEnv)
    assert list(bases[0].get_unwrapped()) == [made[0].unwrapped]
    for base in bases:
        base.stop()
