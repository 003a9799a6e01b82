from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake_policy import FakePolicy, linear_value
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sampler_settings import sampler_settings

from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.base_env import LockstepEnv, TrainingDisabled
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.vector_env import SerialEnv
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.process.children import WORKERS_TOGETHER
from aiorl.process.machine import usable_cores
from aiorl.sampling.fragments import FRAGMENT_COLUMNS
from aiorl.sampling.lockstep import Lockstep
from aiorl.testing.envs import CountingEnv, CountingVectorEnv, counting_obs
from benchmarks.sampler import make_lockstep_env

ALL = sorted(FRAGMENT_COLUMNS)
MODES = ("serial", "NextStep", "SameStep", "Disabled")


def make_env(mode: str, lengths=(3, 5), end="terminate", num_envs=2) -> LockstepEnv:
    if mode == "serial":
        copies = [CountingEnv(lengths[i % len(lengths)], end, index=i) for i in range(num_envs)]
        return SerialEnv(copies, env_id="counting")
    return NativeVectorEnv(CountingVectorEnv(num_envs, lengths, end, mode), env_id="counting")


def make_sampler(
    env: LockstepEnv,
    length=7,
    *,
    gamma=0.9,
    lam=0.8,
    recurrent=False,
    policy=None,
    columns=ALL,
    postprocess="gae",
    state_every=0,
    filter=None,
    **settings,
) -> Lockstep:
    plan = SamplePlan(postprocess, {"gamma": gamma, "lam": lam}, tuple(columns), state_every)
    policy = policy or FakePolicy(env.action_space, recurrent=recurrent)
    return Lockstep(
        env, policy, plan, sampler_settings(length, **{"seed": 0, **settings}), filter=filter
    )


def slow_gae(rewards, values, after, gamma, lam):
    """Sum over the rest of one piece of an episode, by the definition; `after` follows its last
    row.
    """
    following = [*values[1:], after]
    deltas = [r + gamma * v1 - v for r, v, v1 in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas)))
        for i in range(len(deltas))
    ]


def by_episode(batch: SampleBatch) -> list[SampleBatch]:
    """Return runs of rows of one episode and copy, identified by their observations."""
    cuts = [
        row
        for row in range(1, batch.count)
        if (batch["obs"][row] != batch["obs"][row - 1])[[0, 2]].any()
    ]
    return [batch.slice(start, end) for start, end in itertools.pairwise([0, *cuts, batch.count])]


def value(episode, step, index) -> float:
    return float(linear_value(counting_obs(episode, step, index)[None])[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["terminate", "truncate"])
@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_rows_values_and_final_observations_are_right_for_every_way_to_reset(mode, end, lam):
    """R98, golden: true final observations; GAE at terminations, truncations and the cut equals
    sums by hand.
    """
    env = make_env(mode, end=end)
    sampler = make_sampler(env, length=8, lam=lam)
    seen: list[tuple[int, int, int]] = []
    for _ in range(4):
        fragment = sampler.sample()
        valid = fragment.columns.get(c.VALID, np.ones((8, 2), bool))
        batch = fragment.to_sample_batch()
        assert batch.count == fragment.env_steps == valid.sum()
        for obs, new_obs, reward in zip(
            batch["obs"], batch["new_obs"], batch["rewards"], strict=True
        ):
            episode, step, index = (int(number) for number in obs)
            assert new_obs.tolist() == [episode, step + 1, index]
            assert reward == step + 1
            seen.append((index, episode, step))
        for part in by_episode(batch):
            episode, step, index = (int(number) for number in part["obs"][0])
            length = (3, 5)[index]
            closed = step + part.count == length
            assert part["dones"].tolist() == [False] * (part.count - 1) + [closed]
            assert (part["terminateds"] if end == "terminate" else part["truncateds"])[-1] == closed
            values = [value(episode, step + i, index) for i in range(part.count)]
            after = (
                0.0 if closed and end == "terminate" else value(episode, step + part.count, index)
            )
            expected = slow_gae(part["rewards"].tolist(), values, after, 0.9, lam)
            np.testing.assert_allclose(part["vf_preds"], values, rtol=1e-6)
            np.testing.assert_allclose(part["advantages"], expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(
                part["value_targets"], np.add(expected, values), rtol=1e-5, atol=1e-5
            )
            bootstrap = [0.0] * part.count
            if closed and end == "truncate":
                bootstrap[-1] = after
            np.testing.assert_allclose(part["bootstrap_values"], bootstrap, rtol=1e-6)
    for index in (0, 1):
        mine = [(episode, step) for i, episode, step in seen if i == index]
        assert mine == [(n // (3, 5)[index], n % (3, 5)[index]) for n in range(len(mine))], (
            "rows lost or doubled"
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 3, 10])
def test_recurrent_state_restarts_with_each_episode_and_continues_across_fragments(mode, length):
    """R114, R116: the fake state counts steps, so values show it."""
    env = make_env(mode, end="truncate")
    sampler = make_sampler(env, length=length, recurrent=True)
    for _ in range(30 // length):
        fragment = sampler.sample()
        step = fragment.columns[c.OBS][..., 1]
        expected = linear_value(fragment.columns[c.OBS].reshape(-1, 3)).reshape(step.shape) + step
        np.testing.assert_array_equal(fragment.columns[c.VF_PREDS], expected)
        np.testing.assert_array_equal(fragment.extras[c.state_in(0)][:, 0], step[0])
        for t, n in np.argwhere(fragment.columns[c.TRUNCATEDS]):
            episode, at, index = fragment.columns[c.OBS][t, n]
            known = value(episode, at + 1, index) + at + 1
            assert fragment.columns[c.BOOTSTRAP_VALUES][t, n] == np.float32(known)


@pytest.mark.parametrize("mode", MODES)
def test_recurrent_states_are_sent_at_a_fixed_interval_even_after_an_interrupted_step(mode):
    """The fake state counts the steps of its episode; in a row that is only a reset, it can be
    anything.
    """
    fails_at = [18]

    def on_step():
        fails_at[0] -= 1
        if fails_at[0] == 0:
            raise OSError("on purpose")

    sampler = make_sampler(make_env(mode), length=7, recurrent=True, state_every=3)
    for number in range(4):
        if number == 2:
            with pytest.raises(OSError, match="on purpose"):
                sampler.sample(on_step)
        fragment = sampler.sample(on_step)
        states, step = fragment.extras[c.state_in(0)], fragment.columns[c.OBS][::3, :, 1]
        assert states.shape == (2, 3, 1)
        valid = fragment.columns.get(c.VALID, np.ones((7, 2), bool))[::3]
        np.testing.assert_array_equal(states[..., 0].T[valid], step[valid])


@pytest.mark.parametrize("mode", MODES)
def test_values_of_cut_and_final_observations_come_from_one_call_per_fragment(mode):
    policy = FakePolicy(spaces.Discrete(2))
    make_sampler(make_env(mode, end="truncate"), length=15, policy=policy).sample()
    ends = 5 + 3 if mode != "NextStep" else 0
    assert policy.value_calls == [2 + ends]
    assert policy.seen == [2] * 15


@pytest.mark.parametrize("mode", MODES)
def test_complete_episodes_mode_returns_only_whole_episodes_and_loses_none(mode):
    """R60, R105."""
    sampler = make_sampler(
        make_env(mode, lengths=(3, 11), end="truncate"), length=4, batch_mode="complete_episodes"
    )
    counts = [0, 0]
    for _ in range(12):
        fragment = sampler.sample()
        assert c.VALID not in fragment.columns
        assert fragment.num_envs == 1
        assert fragment.length >= 8
        batch = fragment.to_sample_batch()
        for part in by_episode(batch):
            episode, step, index = (int(number) for number in part["obs"][0])
            length = (3, 11)[index]
            assert (step, part.count) == (0, length)
            assert episode == counts[index], "in order, none missing"
            counts[index] += 1
            steps = np.arange(length)
            np.testing.assert_array_equal(part["obs"][:, 1], steps)
            np.testing.assert_array_equal(part["new_obs"][:, 1], steps + 1)
            assert part["truncateds"].tolist() == [False] * (length - 1) + [True]
            values = [value(episode, s, index) for s in steps]
            expected = slow_gae(
                part["rewards"].tolist(), values, value(episode, length, index), 0.9, 0.8
            )
            np.testing.assert_allclose(part["advantages"], expected, rtol=1e-5, atol=1e-5)
    assert counts[0] > 10
    assert counts[1] > 2
    num_waiting = sum(len(part[c.DONES]) for part in sampler._builder._collector._parts)
    assert num_waiting <= 11 + 4, "rows are forgotten once taken"


def test_the_last_observation_of_whole_episodes_is_sent_if_only_that_is_needed():
    """As for an algorithm with V-trace: no column of next observations, except the one after the
    last row.
    """
    wanted = [c.OBS, c.ACTIONS, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.LAST_OBS]
    env = make_env("serial", lengths=(3, 11), end="truncate")
    sampler = make_sampler(
        env, length=4, batch_mode="complete_episodes", columns=wanted, postprocess="none"
    )
    for _ in range(3):
        fragment = sampler.sample()
        assert set(fragment.extras) == {c.LAST_OBS}
        episode, step, index = fragment.columns[c.OBS][-1, 0].tolist()
        assert fragment.extras[c.LAST_OBS].tolist() == [[episode, step + 1, index]]


@pytest.mark.parametrize("vectorize", ["serial", "native"])
def test_same_seeds_give_the_same_rows_and_other_seeds_give_others(vectorize):
    def rows(seed, length, *, prepares=False):
        env = make_lockstep_env("CartPole-v1", {}, 3, vectorize)
        sampler = make_sampler(env, length=length, seed=seed)
        fragments = [
            sampler.sample() for _ in range(60 // length) if not prepares or sampler.prepare()
        ]
        env.close()
        return {
            n: np.concatenate([f.columns[n] for f in fragments])
            for n in (c.OBS, c.ACTIONS, c.ACTION_LOGP)
        }

    first, again, other_cut, other = (
        rows(1, 30),
        rows(1, 30, prepares=True),
        rows(1, 12),
        rows(2, 30),
    )
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        np.testing.assert_array_equal(
            first[name], other_cut[name], err_msg="the cut changed the rows"
        )
    assert not np.array_equal(first[c.OBS], other[c.OBS])


def test_an_exception_from_the_hook_leaves_the_sampler_between_two_steps():
    class Stop(Exception):
        pass

    calls = []

    def hook():
        calls.append(len(calls))
        if len(calls) in (5, 7):
            raise Stop

    sampler = make_sampler(make_env("serial"), length=7, recurrent=True)
    with pytest.raises(Stop):
        sampler.sample(hook)
    with pytest.raises(Stop):
        sampler.sample(hook)
    interrupted = sampler.sample(hook)
    undisturbed = make_sampler(make_env("serial"), length=7, recurrent=True).sample()
    assert set(interrupted.columns) == set(undisturbed.columns)
    for name, column in undisturbed.columns.items():
        np.testing.assert_array_equal(interrupted.columns[name], column, err_msg=name)
    assert len(calls) == 7 + 2


def test_only_the_requested_columns_are_sent():
    wanted = {
        c.OBS,
        c.LAST_OBS,
        c.ACTIONS,
        c.REWARDS,
        c.TERMINATEDS,
        c.TRUNCATEDS,
        c.ACTION_LOGP,
        c.BOOTSTRAP_VALUES,
    }
    sampler = make_sampler(make_env("SameStep", end="truncate"), columns=wanted, postprocess="none")
    fragment = sampler.sample()
    assert set(fragment.columns) | set(fragment.extras) == wanted
    assert fragment.columns[c.BOOTSTRAP_VALUES][2, 0] == np.float32(value(0, 3, 0))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_step_that_must_not_be_trained_on_also_ends_lockstep_of_vector_environments(mode):
    """R102: the step is never silently sent and trained on."""

    class Untrained(CountingEnv):
        def step(self, action):
            return (*super().step(action)[:4], {"training_enabled": self._step != 3})

    env = NativeVectorEnv(SyncVectorEnv([Untrained] * 2, autoreset_mode=mode), env_id="untrained")
    with pytest.raises(TrainingDisabled, match="'untrained'"):
        make_sampler(env).sample()


class Beginning(SerialEnv):
    """Environment that steps as usual, but says that some copies can begin first, and records the
    calls.
    """

    def __init__(self, envs) -> None:
        super().__init__(envs, env_id="counting")
        self.can_begin = True
        self.tape: list[tuple[str, list[int]]] = []
        self.begun: list[int] = []

    def begin(self, copies, actions):
        self.tape.append(("begin", list(range(self.num_envs))[copies]))
        self.begun += actions.tolist()

    def step(self, actions):
        self.tape.append(("step", actions.tolist()))
        assert self.begun in ([], actions.tolist())
        self.begun = []
        return super().step(actions)


@pytest.mark.parametrize("recurrent", [False, True])
def test_if_copies_can_begin_half_of_them_step_while_the_policy_acts_for_the_others(recurrent):
    copies = [CountingEnv(2 + index, index=index) for index in range(5)]
    env = Beginning(copies)
    sampler = make_sampler(env, recurrent=recurrent)
    plain = make_sampler(
        SerialEnv([CountingEnv(2 + index, index=index) for index in range(5)]), recurrent=recurrent
    )
    for _ in range(3):
        mine, other = sampler.sample().to_sample_batch(), plain.sample().to_sample_batch()
        assert set(mine) == set(other)
        for name in mine:
            np.testing.assert_array_equal(mine[name], other[name], err_msg=name)
    assert [what for what, _ in env.tape[:6]] == ["begin", "begin", "step"] * 2
    assert [copies for _, copies in env.tape[:2]] == [[0, 1], [2, 3, 4]]


def test_copies_do_not_begin_by_halves_if_the_workers_of_this_host_use_all_cores(monkeypatch):
    monkeypatch.setenv(WORKERS_TOGETHER, str(usable_cores()))
    env = Beginning([CountingEnv(2 + index, index=index) for index in range(5)])
    make_sampler(env).sample()
    assert {what for what, _ in env.tape} == {"step"}


@pytest.mark.rest_slow
@pytest.mark.parametrize("extras", [(), (c.LAST_OBS,)])
def test_the_floats_of_a_long_fragment_are_sent_from_where_they_were_recorded(extras):
    """One frame holds all of them, without a copy; later fragments have their own memory."""
    floats = {
        c.OBS,
        c.REWARDS,
        c.ACTION_LOGP,
        c.ACTION_DIST_INPUTS,
        c.VF_PREDS,
        c.ADVANTAGES,
        c.VALUE_TARGETS,
    }
    names = [*floats, c.ACTIONS, c.TERMINATEDS, c.TRUNCATEDS, *extras]
    sampler = make_sampler(make_env("serial", num_envs=4), length=2500, columns=names)
    fragment = sampler.sample()
    arrays = {**fragment.columns, **fragment.extras}
    rng = np.random.default_rng(0)
    for name in {*floats, *extras}:  # numbers that compression would shrink are sent shrunk
        arrays[name][...] = rng.normal(size=arrays[name].shape)
    message = m.Samples(1, 1, 1, 1, 0, 0, 4, 2500, {"default_policy": arrays}, {}, {}, {})
    frames = encode(message)
    frame = np.frombuffer(max(frames, key=len), np.uint8)
    assert len(frame) == sum(
        array.nbytes for name, array in arrays.items() if name in {*floats, *extras}
    )
    assert all(np.shares_memory(arrays[name], frame) for name in {*floats, *extras})
    received = decode(frames).batches["default_policy"]
    assert received.keys() == arrays.keys()
    assert all(np.array_equal(received[name], arrays[name]) for name in arrays)
    sampler.sample()
    assert all(np.array_equal(received[name], arrays[name]) for name in arrays)
    assert not np.shares_memory(sampler.sample().columns[c.OBS], fragment.columns[c.OBS].base)
