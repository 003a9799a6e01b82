from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest

from aiorl.env.adapt import choose_vectorize, make_lockstep_env
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.registry import resolve_env
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.vector_env import SerialEnv
from aiorl.errors import ConfigError, EnvError, UnknownEnvError
from aiorl.testing.envs import CountingEnv


def choice(name, num_envs=4, horizon=None, **config) -> str:
    return choose_vectorize(resolve_env(name), config, num_envs, horizon)


def test_auto_takes_the_native_form_where_there_is_one_and_it_pays():
    assert choice("CartPole-v1") == "native"
    assert choice("CartPole-v1", horizon=100) == "native"
    assert choice("CartPole-v1", sutton_barto_reward=True) == "native"
    assert choice("CartPole-v1", num_envs=1) == "serial"
    assert choice("Pendulum-v1") == "serial"
    assert choice("aiorl.testing.envs:RecallEnv") == "serial"
    assert choice("CartPole-v1", some_setting=1) == "serial"


def test_auto_passes_over_a_native_form_whose_packages_are_missing(monkeypatch):
    spec = copy.deepcopy(gymnasium.spec("CartPole-v1"))
    spec.vector_entry_point = "not_installed_anywhere.envs:VectorEnv"
    monkeypatch.setitem(gymnasium.registry, "Jaxy-v0", spec)
    assert choice("Jaxy-v0") == "serial"
    with pytest.raises(ConfigError, match="not_installed_anywhere"):
        make_lockstep_env("Jaxy-v0", {}, 4, "native")


def test_each_choice_makes_its_kind():
    for vectorize, kind in {"auto": NativeVectorEnv, "native": NativeVectorEnv, "serial": SerialEnv}.items():
        env = make_lockstep_env("CartPole-v1", {}, 3, vectorize)
        assert isinstance(env, kind)
        assert (env.num_envs, env.max_episode_steps, env.env_id) == (3, 500, "CartPole-v1")
        env.close()


def test_native_without_a_native_form_says_what_to_use_instead():
    with pytest.raises(ConfigError, match=r"no vectorised form of its own.*vectorize: serial") as caught:
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
    contexts = []

    def create(context):
        contexts.append((dict(context), context.worker_index, context.vector_index, context.remote))
        return CountingEnv()

    make_lockstep_env(create, {"a": 1}, 2, "auto", worker_index=5).close()
    assert contexts == [({"a": 1}, 5, 0, False), ({"a": 1}, 5, 1, False)]


def test_an_unknown_choice_name_or_number_is_refused():
    with pytest.raises(ConfigError, match="vectorise"):
        make_lockstep_env("CartPole-v1", {}, 1, "vectorise")
    with pytest.raises(UnknownEnvError):
        make_lockstep_env("CartPole-v9000", {}, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        make_lockstep_env("CartPole-v1", {}, 0)


def test_a_constructor_that_raises_is_an_env_error_with_its_traceback():
    with pytest.raises(EnvError, match="constructor raised RuntimeError: this environment cannot be made") as caught:
        make_lockstep_env("aiorl.testing.envs:FaultyEnv", {"fault": "constructor"}, 1)
    assert "in __init__" in caught.value.traceback_text


def test_an_environment_given_as_an_object_cannot_be_remote():
    with pytest.raises(ConfigError, match=r"package.module:Name"):
        make_lockstep_env(CountingEnv, {}, 1, "remote")


def test_remote_is_made_by_name():
    env = make_lockstep_env("aiorl.testing.envs:CountingEnv", {"length": 4}, 1, "remote", horizon=2)
    assert isinstance(env, RemoteEnv)
    assert env.max_episode_steps == 2
    env.close()
