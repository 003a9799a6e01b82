from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest

from aiorl.env.base_env import BaseEnv
from aiorl.env.env_maker import EnvMaker, to_base_env
from aiorl.env.external_env import ExternalBaseEnv, ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.gym_like import RealGames
from aiorl.env.kinds import check_can_be_remote
from aiorl.env.multi_agent_env import MultiAgentBaseEnv
from aiorl.env.native_vector_env import LockstepBaseEnv, NativeVectorEnv
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.vector_env import VectorBaseEnv, VectorEnv
from aiorl.env.wrapping import STATS_FILE, EnvPlan, Wrapping
from aiorl.errors import ConfigError, EnvError, UnsupportedEnvError
from aiorl.testing.envs import CountingEnv, CountingVectorEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv
from benchmarks.sampler import make_lockstep_env

COUNTING = "aiorl.testing.envs:CountingEnv"


def choice(name, num_envs=4, horizon=None, **config) -> str:
    return EnvMaker(
        EnvPlan(env=name, env_config=config, num_envs=num_envs, vectorize="auto", horizon=horizon)
    ).form


def test_auto_uses_a_native_form_for_several_copies():
    assert choice("CartPole-v1") == "native"
    assert choice("CartPole-v1", horizon=100) == "native"
    assert choice("CartPole-v1", sutton_barto_reward=True) == "native"
    assert choice("CartPole-v1", num_envs=1) == "serial"
    assert choice("Pendulum-v1") == "serial"
    assert choice("aiorl.testing.envs:RecallEnv") == "serial"
    assert choice("CartPole-v1", some_setting=1) == "serial"


def test_auto_skips_a_native_form_whose_packages_are_missing(monkeypatch):
    spec = copy.deepcopy(gymnasium.spec("CartPole-v1"))
    spec.vector_entry_point = "not_installed_anywhere.envs:VectorEnv"
    monkeypatch.setitem(gymnasium.registry, "Jaxy-v0", spec)
    assert choice("Jaxy-v0") == "serial"
    with pytest.raises(ConfigError, match="not_installed_anywhere"):
        make_lockstep_env("Jaxy-v0", {}, 4, "native")


def test_native_without_a_native_form_is_refused_with_an_alternative():
    with pytest.raises(ConfigError, match="vectorize: serial") as caught:
        make_lockstep_env("Pendulum-v1", {}, 4, "native")
    assert caught.value.key == "vectorize"


def test_native_honours_the_horizon():
    env = make_lockstep_env("CartPole-v1", {}, 2, "native", horizon=3)
    env.reset([0])
    steps = [env.step(np.array([0, 1])) for _ in range(3)]
    assert env.max_episode_steps == 3
    assert [s.truncateds.tolist() for s in steps] == [[False] * 2, [False] * 2, [True] * 2]
    with pytest.raises(ConfigError, match="501"):
        make_lockstep_env("CartPole-v1", {}, 2, "native", horizon=501)
    env.close()


def test_copies_get_their_place_in_the_context():
    """R20."""
    contexts = []

    def create(context):
        contexts.append((dict(context), context.worker_index, context.vector_index, context.remote))
        return CountingEnv()

    make_lockstep_env(create, {"a": 1}, 2, "auto", worker_index=5).close()
    assert contexts == [({"a": 1}, 5, 0, False), ({"a": 1}, 5, 1, False)]


def test_an_environment_that_no_other_process_can_import_cannot_be_remote():
    with pytest.raises(ConfigError) as caught:
        make_lockstep_env(lambda context: CountingEnv(), {}, 1, "remote")
    assert caught.value.key == "env"


class MyBaseEnv(BaseEnv):
    def poll(self):
        raise NotImplementedError

    def send_actions(self, action_dict):
        raise NotImplementedError


class TwoCounters(VectorEnv):
    num_envs = 2

    def vector_reset(self):
        return [0, 0]

    def reset_at(self, index):
        return 0

    def vector_step(self, actions):
        return [1, 1], [0.0, 0.0], [False, False], [{}, {}]


def test_r161_every_kind_of_environment_becomes_a_base_env():
    base = MyBaseEnv()
    assert to_base_env(base, num_envs=3) is base
    kinds = {
        VectorBaseEnv: [CountingEnv(), TwoCounters()],
        MultiAgentBaseEnv: [CountingMultiAgentEnv()],
        LockstepBaseEnv: [CountingVectorEnv()],
        ExternalBaseEnv: [ExternalEnv(None, None), ExternalMultiAgentEnv(None, None)],
    }
    for kind, envs in kinds.items():
        for env in envs:
            base = to_base_env(env)
            assert isinstance(base, kind)
            assert to_base_env(base) is base
            base.stop()


@pytest.mark.parametrize(
    ("make", "kind"), [(CountingEnv, VectorBaseEnv), (CountingMultiAgentEnv, MultiAgentBaseEnv)]
)
def test_r20_r162_other_copies_are_made_with_their_index_and_the_first_is_the_given_one(make, kind):
    copies = []

    def make_env(index):
        copies.append((index, make()))
        return copies[-1][1]

    first = make()
    base = to_base_env(first, make_env, 3)
    assert isinstance(base, kind)
    assert [index for index, _ in copies] == [1, 2]
    assert list(base.get_unwrapped()) == [first, *(env for _, env in copies)]
    assert len(base.poll().obs) == 3


def test_r29_the_seed_reaches_every_copy():
    envs = [CountingEnv(), CountingEnv()]
    to_base_env(envs[0], lambda index: envs[index], 2, seed=9).poll()
    assert [env.seeds for env in envs] == [[9], [1_000_009]]


@pytest.mark.parametrize("env", [object(), 3, None, "CartPole-v1"])
def test_r21_an_object_that_is_not_an_environment_is_a_value_error(env):
    with pytest.raises(UnsupportedEnvError, match="reset, step, observation_space, action_space"):
        to_base_env(env)


def test_impossible_numbers_of_environments_are_refused():
    with pytest.raises(ConfigError) as caught:
        to_base_env(CountingEnv(), num_envs=2)
    assert caught.value.key == "num_envs_per_worker"


def test_r161_remote_copies_are_made_in_children_and_the_local_one_is_closed():
    class Closing(CountingEnv):
        closed = False

        def close(self):
            self.closed = True

    local = Closing()
    plan = EnvPlan(env=COUNTING, num_envs=2, vectorize="remote", remote_wait_ms=10_000)
    base = EnvMaker(plan).to_base_env(local)
    assert isinstance(base, RemoteEnv)
    assert local.closed
    assert sorted(base.poll().obs) == [0, 1]
    base.stop()


def test_r26_each_lockstep_copy_is_wrapped(tmp_path):
    wrapping = Wrapping(monitor_path=str(tmp_path))
    assert isinstance(make_lockstep_env("CartPole-v1", {}, 2), NativeVectorEnv)
    with pytest.raises(ConfigError) as caught:
        make_lockstep_env("CartPole-v1", {}, 2, "native", wrapping=wrapping)
    assert caught.value.key == "vectorize"
    env = make_lockstep_env(COUNTING, {"length": 1}, 2, worker_index=1, wrapping=wrapping)
    env.reset()
    env.step(np.zeros(2, np.int64))
    env.close()
    for index in range(2):
        assert len((tmp_path / f"worker-1-env-{index}" / STATS_FILE).read_text().splitlines()) == 1


@pytest.mark.parametrize("kind", [MyBaseEnv, TwoCounters, lambda: ExternalEnv(None, None)])
def test_r27_r28_environments_seeded_as_one_object_need_a_method_that_takes_a_seed(kind):
    env = kind()
    with pytest.raises(ConfigError) as caught:
        to_base_env(env, seed=5)
    assert caught.value.key == "seed"
    seeds = []
    env.seed = seeds.append
    to_base_env(env, seed=5)
    env = kind()
    env.reset = lambda seed: seeds.append(seed)
    to_base_env(env, seed=6)
    assert seeds == [5, 6]


@pytest.mark.parametrize("vectorize", ["serial", "remote"])
def test_a_constructors_fault_is_not_reported_as_a_resets(vectorize):
    with pytest.raises(EnvError, match="RuntimeError") as caught:
        make_lockstep_env("aiorl.testing.envs:FaultyEnv", {"fault": "constructor"}, 1, vectorize)
    assert caught.value.step == -1
    assert "in __init__" in caught.value.traceback_text


@pytest.mark.parametrize(
    "make",
    [MyBaseEnv, TwoCounters, CountingVectorEnv, lambda: ExternalEnv(None, None)],
    ids=["base", "vector", "gymnasium_vector", "external"],
)
def test_r161_kinds_that_hold_their_own_environments_cannot_be_remote(make):
    with pytest.raises(ConfigError, match="'mine'") as caught:
        check_can_be_remote(make(), "mine")
    assert caught.value.key == "remote_worker_envs"


@pytest.mark.parametrize("wrap", [lambda env: env, RealGames])
def test_r162_one_object_does_not_count_as_several_environments(wrap):
    env = CountingEnv()
    with pytest.raises(ConfigError, match="'mine'"):
        to_base_env(wrap(env), lambda index: wrap(env), 3, env_id="mine")
    with pytest.raises(ConfigError) as caught:
        make_lockstep_env(lambda context: wrap(env), {}, 3, "serial")
    assert caught.value.value == 3
    pair = CountingMultiAgentEnv()
    with pytest.raises(ConfigError) as caught:
        to_base_env(pair, lambda index: pair, 2)
    assert caught.value.value == 2


def test_a_raw_pettingzoo_environment_is_refused_with_the_right_name():
    class Raw:
        possible_agents = ("a", "b")
        reset = step = action_space = None

        def observation_space(self, agent):
            raise AssertionError("asked for one agent only")

    with pytest.raises(UnsupportedEnvError, match=r"Raw.*'pettingzoo:classic\.rps_v2'"):
        to_base_env(Raw())
