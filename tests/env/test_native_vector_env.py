from __future__ import annotations

import functools
import os
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, strategies as st

from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env import native_vector_env
from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN
from aiorl.env.env_maker import to_base_env
from aiorl.env.native_vector_env import (
    LockstepBaseEnv,
    NativeVectorEnv,
    split_infos,
    training_disabled,
)
from aiorl.env.vector_env import Copies, SerialEnv, VectorBaseEnv
from aiorl.errors import BadObservationError, BadRewardError, EnvError, UnsupportedEnvError
from aiorl.testing.envs import CountingEnv, CountingVectorEnv, FaultyEnv

MODES = [mode.value for mode in AutoresetMode]


def native(mode, lengths=(2, 3), end="terminate") -> NativeVectorEnv:
    return NativeVectorEnv(CountingVectorEnv(2, lengths, end, mode), env_id="counting")


NO_ACTION = np.zeros(2, np.int64)


def test_a_reward_or_flag_in_a_reset_row_is_dropped():
    class Careless(CountingVectorEnv):
        def step(self, actions):
            obs, _, terminateds, truncateds, infos = super().step(actions)
            return obs, np.full(2, 9.0), terminateds | (obs[:, 1] == 0), truncateds, infos

    env = NativeVectorEnv(Careless(), env_id="careless")
    env.reset()
    for _ in range(3):
        env.step(NO_ACTION)
    step = env.step(NO_ACTION)
    assert step.valid.tolist() == [False, True]
    assert step.rewards.tolist() == [0.0, 9.0]
    assert step.terminateds.tolist() == [False, False]


def test_an_unknown_autoreset_mode_is_refused():
    inner = CountingVectorEnv()
    inner.metadata = {}
    with pytest.raises(UnsupportedEnvError, match="autoreset_mode"):
        NativeVectorEnv(inner, env_id="old")


def test_a_same_step_environment_without_final_observations_is_refused():
    class Forgetful(CountingVectorEnv):
        def step(self, actions):
            return (*super().step(actions)[:4], {})

    env = NativeVectorEnv(Forgetful(mode="SameStep"), env_id="forgetful")
    env.reset()
    env.step(NO_ACTION)
    env.step(NO_ACTION)
    with pytest.raises(EnvError, match="final_obs") as caught:
        env.step(NO_ACTION)
    assert (caught.value.vector_index, caught.value.step) == (0, 3)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("nan_obs", BadObservationError), ("nan_reward", BadRewardError), ("step", EnvError)],
)
def test_faults_name_the_copy_and_its_step(fault, error):
    inner = SyncVectorEnv(
        [lambda: CountingEnv(2), lambda: FaultyEnv(fault, 3)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    env = NativeVectorEnv(inner, env_id="faulty")
    env.reset()
    env.step(NO_ACTION)
    env.step(NO_ACTION)
    with pytest.raises(error) as caught:
        env.step(NO_ACTION)
    assert caught.value.step == 3
    if fault != "step":
        assert caught.value.vector_index == 1


def test_a_final_observation_that_is_not_finite_is_refused():
    class BadEnd(CountingEnv):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return (obs * np.nan if terminated else obs), reward, terminated, truncated, info

    copies = [lambda: CountingEnv(9), lambda: BadEnd(2)]
    for env in (
        NativeVectorEnv(
            SyncVectorEnv(copies, autoreset_mode=AutoresetMode.SAME_STEP), env_id="bad"
        ),
        SerialEnv([make() for make in copies], env_id="bad"),
    ):
        env.reset()
        env.step(NO_ACTION)
        with pytest.raises(BadObservationError) as caught:
            env.step(NO_ACTION)
        assert (caught.value.vector_index, caught.value.step) == (1, 2)


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_arrays_of_the_wrong_shape_are_refused(part):
    class Short(CountingVectorEnv):
        def step(self, actions):
            parts = list(super().step(actions))
            parts[part] = parts[part][:1]
            return tuple(parts)

    env = NativeVectorEnv(Short(), env_id="short")
    env.reset()
    with pytest.raises(EnvError, match=r"\(1,"):
        env.step(NO_ACTION)


def polled(mode, lengths=(2, 3), end="terminate") -> LockstepBaseEnv:
    return LockstepBaseEnv(
        NativeVectorEnv(CountingVectorEnv(2, lengths, end, mode), env_id="counting")
    )


def trajectories(base, steps) -> dict:
    """Return the episodes of each copy, as a sampler sees them: lists of (obs, reward, terminated,
    truncated).
    """
    episodes = {0: [], 1: []}
    poll = base.poll()
    for _ in range(steps):
        actions = {}
        for index, obs in poll.obs.items():
            reward = poll.rewards[index][AGENT]
            row = (
                obs[AGENT].tolist(),
                reward,
                poll.terminateds[index][ALL_AGENTS],
                poll.truncateds[index][AGENT],
            )
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
def test_r161_every_autoreset_mode_shows_the_same_episodes_as_plain_copies(mode, end):
    plain = VectorBaseEnv(Copies([CountingEnv(2, end, 0), CountingEnv(3, end, 1)]))
    expected = trajectories(plain, 30)
    got = trajectories(polled(mode, end=end), 30)
    for index in (0, 1):
        # A mode that needs a step for a reset completes fewer episodes.
        whole = len(got[index]) - 1
        assert whole >= 5
        assert got[index][:whole] == expected[index][:whole]


class Counting(CountingEnv):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {"begun": self._episode}

    def step(self, action):
        result = super().step(action)
        return (*result[:4], {"n": [self._episode, self._step]} if self._step != 2 else {})


@pytest.mark.parametrize("mode", MODES)
def test_infos_of_every_copy_come_with_its_observations_including_final_ones(mode):
    """4.6: the infos of the step; no infos at the start of an episode."""
    copies = [functools.partial(Counting, 2, index=0), functools.partial(Counting, 3, index=1)]
    base = to_base_env(SyncVectorEnv(copies, autoreset_mode=mode))
    poll = base.poll()
    num_infos = 0
    for _ in range(20):
        for index, by_agent in poll.obs.items():
            episode, step, _ = by_agent[AGENT].astype(int).tolist()
            info = {} if step in (0, 2) else {"n": [episode, step]}
            assert poll.infos[index] == {AGENT: info}
            num_infos += bool(info)
        acting = [index for index in poll.obs if not poll.dones[index][ALL_AGENTS]]
        acting += [
            i for i in poll.obs if i not in acting and base.try_reset(i) != ASYNC_RESET_RETURN
        ]
        base.send_actions({index: {AGENT: 0} for index in acting})
        poll = base.poll()
    assert num_infos > 15


# Gymnasium expects all values of a key to have one type: that of the first copy that has it.
KINDS = {
    "i": st.integers(-5, 5),
    "f": st.floats(-1, 1),
    "b": st.booleans(),
    "o": st.one_of(st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=3)),
    "_u": st.text(max_size=2),
    "d": st.dictionaries(st.sampled_from("pqr"), st.integers(-5, 5), max_size=3),
}
own_infos = st.fixed_dictionaries({}, optional=KINDS)


class VectorInfos(gymnasium.vector.VectorEnv):
    """Combine infos as Gymnasium does."""

    def __init__(self, rows):
        self.num_envs = len(rows)
        self.infos = {}
        for index, info in enumerate(rows):
            self.infos = self._add_info(self.infos, info, index)


@given(st.lists(own_infos, min_size=1, max_size=4))
def test_split_infos_undoes_gymnasiums_combining(rows):
    assert split_infos(VectorInfos(rows).infos, len(rows)) == rows


def test_entries_without_a_mask_have_one_value_per_copy_or_one_for_all():
    infos = {
        "r": np.array([1.5, 2.5]),
        "pair": ("a", "b"),
        "m": np.ones((2, 3)),
        "x": 7,
        "three": [1, 2, 3],
        4: "n",
    }
    first, second = split_infos(infos, 2)
    assert (first["r"], first["pair"], first["x"], first["three"], first[4]) == (
        1.5,
        "a",
        7,
        [1, 2, 3],
        "n",
    )
    assert (second["r"], second["pair"], second["x"], second["three"], second[4]) == (
        2.5,
        "b",
        7,
        [1, 2, 3],
        "n",
    )
    infos["m"][:] = 0.0
    assert first["m"].tolist() == [1.0, 1.0, 1.0], "the environment may overwrite its arrays"
    episode = {"episode": {"l": np.array([3, 4])}, "_episode": np.array([False, True])}
    assert split_infos(episode, 2) == [{}, {"episode": {"l": 4}}]


class Telling(CountingEnv):
    """Environment with many infos in each step, and different ones in each reset."""

    def __init__(self, length, index, off=()):
        super().__init__(length, index=index)
        self.off = off

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {"training_enabled": False, "reset": self._episode}

    def step(self, action):
        step = (self._episode, self._step + 1)
        info = {"step": step[1], "name": f"{self._index}/{step}", "deep": {"twice": 2 * step[1]}}
        if step[1] % 2:
            info["odd"] = np.array([step[1], self._index])
        if (self._index, *step) in self.off:
            info["training_enabled"] = False
        return (*super().step(action)[:4], info)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("place", [(0, 1, 1), (0, 1, 2), (1, 2, 2), (1, 2, 3)])
def test_the_copy_whose_step_must_not_be_trained_on_is_found_and_a_reset_does_not_count(
    mode, place
):
    """R102: in the middle and at the end of an episode."""
    copies = [lambda: Telling(2, 0, [place]), lambda: Telling(3, 1, [place])]
    env = NativeVectorEnv(SyncVectorEnv(copies, autoreset_mode=mode), env_id="telling")
    obs = env.reset().copy()
    faults = []
    for _ in range(16):
        step = env.step(np.zeros(2, np.int64))
        for index in training_disabled(step, 2):
            episode, at, _ = obs[index].astype(int).tolist()
            faults.append((index, episode, at + 1))
        obs = step.obs.copy()
    assert faults == [place]


MAIN = os.getpid()


class Fragile(CountingEnv):
    """Environment that ends its process, or stops to answer, at an action or when it is closed."""

    def __init__(self, at_close=""):
        super().__init__(5)
        self.at_close = at_close

    def step(self, action):
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def close(self):
        if os.getpid() == MAIN:  # Gymnasium makes one of them to see its spaces
            return
        if self.at_close == "stuck":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pause()
        elif self.at_close:
            os._exit(3)


def processes(*at_close):
    """Return three copies in processes, as a RolloutWorker's environment and as Gymnasium has
    it.
    """
    copies = [functools.partial(Fragile, how) for how in (*at_close, "", "", "")[:3]]
    inner = gymnasium.vector.AsyncVectorEnv(copies, autoreset_mode=AutoresetMode.NEXT_STEP)
    env = to_base_env(inner)
    env.poll()
    return env, inner


def acts(*actions):
    return {index: {AGENT: action} for index, action in enumerate(actions)}


def assert_all_ended(inner):
    assert not any(process.is_alive() for process in inner.processes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_process_that_dies_in_a_step_is_named_and_the_others_are_stopped(index):
    env, inner = processes()
    with pytest.raises(EnvError) as caught:
        env.send_actions(acts(*(int(other == index) for other in range(3))))
    assert (caught.value.vector_index, caught.value.step) == (index, 1)
    assert "-9" in caught.value.message
    env.stop()
    assert_all_ended(inner)
    env.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["", "before", "exit", "stuck"])
def test_processes_are_stopped_however_they_end(how, monkeypatch):
    monkeypatch.setattr(native_vector_env, "_CLOSE_WAIT_S", 0.2)
    env, inner = processes(how if how in ("exit", "stuck") else "")
    env.send_actions(acts(0, 0, 0))
    env.poll()
    if how == "before":
        inner.processes[1].kill()
        inner.processes[1].join()
    env.stop()
    assert_all_ended(inner)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_error_in_a_process_is_reported_in_its_own_words():
    copies = [lambda: CountingEnv(5), lambda: FaultyEnv("step", 1)]
    inner = gymnasium.vector.AsyncVectorEnv(copies, autoreset_mode=AutoresetMode.NEXT_STEP)
    env = to_base_env(inner)
    env.poll()
    with pytest.raises(EnvError, match="failed on purpose") as caught:
        env.send_actions(acts(0, 0))
    assert not isinstance(caught.value.__cause__, EOFError)
    env.stop()
    assert_all_ended(inner)
