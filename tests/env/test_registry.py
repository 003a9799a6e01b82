from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from aiorl.env import registry
from aiorl.env.gym_like import episode_limit
from aiorl.env.registry import EnvContext, name_elsewhere, register_env, resolve_env
from aiorl.env.vector_env import SerialEnv
from aiorl.errors import ConfigError, EnvError, UnknownEnvError
from aiorl.testing.envs import CountingEnv, RecallEnv

COUNTING = "aiorl.testing.envs:CountingEnv"


@pytest.fixture(autouse=True)
def _clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "registered_creators", {})


def test_a_gymnasium_id_makes_the_environment_with_its_config():
    env = resolve_env("CartPole-v1")(EnvContext({"sutton_barto_reward": True}))
    assert episode_limit(env) == 500
    env.reset(seed=0)
    assert env.step(0)[1] == 0.0, "each step but the last has a reward of 1 without the setting"
    env.close()


def test_an_import_path_makes_a_class_with_the_config_as_keywords():
    env = resolve_env("aiorl.testing.envs:RecallEnv")(EnvContext({"delay": 5, "symbols": 3}))
    assert isinstance(env, RecallEnv)
    assert env.best_memoryless_return == 1 / 3


def test_a_class_whose_first_parameter_is_called_config_and_a_function_get_the_context():
    class Rllib(CountingEnv):
        def __init__(self, config):
            super().__init__()
            self.context = config

    context = EnvContext({"a": 1}, worker_index=3, vector_index=2)
    assert resolve_env(Rllib)(context).context is context
    assert resolve_env(lambda context: context)(context) is context
    env = resolve_env(CountingEnv)(EnvContext({"length": 9}))
    env.reset()
    assert [env.step(0)[2] for _ in range(9)] == [False] * 8 + [True]


def test_registered_names_come_first_and_can_be_replaced():
    register_env("CartPole-v1", lambda context: "mine")
    assert resolve_env("CartPole-v1")(EnvContext()) == "mine"
    register_env("CartPole-v1", lambda context: "newer")
    assert resolve_env("CartPole-v1")(EnvContext()) == "newer"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("CartPole-v77", "CartPole"),
        ("no_such_module:Env", "no_such_module"),
        ("aiorl.no_such:Env", "aiorl.no_such"),
        ("aiorl.testing.envs:RecalEnv", "RecallEnv"),
        ("./my_envs.py", "'package.module:Name'"),
        ("HalfCheetah-v2", "HalfCheetah-v5"),
        ("", "register_env"),
        ("../envs:Maze", "'package.module:Name'"),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(name, hint):
    with pytest.raises(UnknownEnvError) as caught:
        resolve_env(name)
    assert hint in str(caught.value)


def test_a_module_that_fails_to_import_is_not_called_unknown(tmp_path, monkeypatch):
    (tmp_path / "broken_env_module.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "raising_env_module.py").write_text("raise OSError('no display')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="not_installed_anywhere") as caught:
        resolve_env("broken_env_module:Env")
    assert not isinstance(caught.value, UnknownEnvError)
    with pytest.raises(ConfigError, match="no display"):
        resolve_env("raising_env_module:Env")


def test_an_environment_without_its_packages_names_the_extra_of_aiorl(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(ConfigError) as caught:
        resolve_env("LunarLander-v3")(EnvContext())
    assert (caught.value.key, caught.value.value) == ("env", "LunarLander-v3")
    assert "Box2D" in str(caught.value)
    assert "[box2d]" in str(caught.value)
    assert "gymnasium[" not in str(caught.value)


def test_an_environment_of_clients_without_its_packages_names_the_extra_of_aiorl(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("websockets")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "aiorl.serving.external", raising=False)
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ConfigError, match=r"\[serve\]") as caught:
        resolve_env("external")
    assert caught.value.key == "env"


def test_other_values_than_a_name_class_or_function_are_refused():
    for value in (3, None, ["CartPole-v1"]):
        with pytest.raises(UnknownEnvError):
            resolve_env(value)
    for name, creator in (("", print), (3, print), ("x", "not callable")):
        with pytest.raises(ConfigError):
            register_env(name, creator)


def test_a_registered_name_is_found_by_other_processes_through_the_module_that_registers_it(
    tmp_path, monkeypatch
):
    code = (
        "from aiorl.env.registry import register_env\nregister_env('my-maze', lambda context:"
        " ('maze', context))\n"
    )
    (tmp_path / "maze_of_registry_test.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvError, match=r"'module:name'.*register_env"):
        resolve_env("my-maze")
    creator = resolve_env("maze_of_registry_test:my-maze")
    assert creator(EnvContext({"a": 1})) == ("maze", {"a": 1})
    assert creator.env_id == "maze_of_registry_test:my-maze"
    with pytest.raises(UnknownEnvError, match="'my-maze'"):
        resolve_env("maze_of_registry_test:my-mase")


def test_games_with_unusual_ids_are_found_and_preprocessed_like_the_others():
    pytest.importorskip("ale_py")
    code = (
        "from aiorl.env.registry import *; from aiorl.env.wrapping import Wrapping\ncreator ="
        " resolve_env('Pong-v4'); assert is_atari_id('Pong-v4') and not"
        " is_atari_id('CartPole-v1')\nassert Wrapping(deepmind=True).env_config(creator, {}) =="
        " {'frameskip': 1}\ncreator(EnvContext({'frameskip': 1})).close()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_old_gym_time_limit_truncates():
    pytest.importorskip("gym")
    env = SerialEnv([resolve_env("gym:MountainCar-v0")(EnvContext())], env_id="old")
    with pytest.raises(UnknownEnvError, match="CartPole-v1"):
        resolve_env("gym:CartPol-v1")
    env.reset([0])
    flags = [
        (bool(s.terminateds[0]), bool(s.truncateds[0]))
        for s in (env.step(np.array([1])) for _ in range(200))
    ]
    assert flags == [(False, False)] * 199 + [(False, True)]
    env.close()


class Corridor(gymnasium.Env):
    """Environment with two settings."""

    def __init__(self, length=5, slippery=False):
        self.length = length


@pytest.mark.parametrize("name", [f"{__name__}:Corridor", "CorridorOfTest-v0"])
def test_a_misspelt_setting_is_named_with_those_that_the_constructor_takes(name, monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Corridor=Corridor))
    if "-v0" in name and name not in gymnasium.registry:
        gymnasium.register(name, Corridor)
    creator = resolve_env(name)
    with pytest.raises(ConfigError, match=r"lenght.*length, slippery.*'length'") as caught:
        creator(EnvContext({"lenght": 6}))
    assert caught.value.key == "env_config.lenght"
    assert creator(EnvContext({"length": 6})).unwrapped.length == 6


def test_a_class_that_cannot_be_filmed_is_told_what_it_lacks():
    with pytest.raises(ConfigError, match=r"method render") as caught:
        resolve_env(Corridor)(EnvContext({"render_mode": "rgb_array"}))
    assert caught.value.key == "env_config.render_mode"


def test_a_type_error_in_the_constructors_own_code_is_not_reported_as_a_wrong_setting():
    class Broken(gymnasium.Env):
        def __init__(self, length=5):
            raise TypeError("inside")

    with pytest.raises(EnvError, match="inside"):
        resolve_env(Broken)(EnvContext({"length": 3}))


def test_r55_each_context_has_its_own_dicts_and_lists_and_shares_other_objects():
    shared = object()
    config = {"a": {"b": [{"c": 1}]}, "d": shared}
    context = EnvContext(config)
    other = context.copy_with_overrides(vector_index=1)
    other["a"]["b"][0]["c"] = 2
    other["a"]["b"].append(3)
    assert config == context == {"a": {"b": [{"c": 1}]}, "d": shared}
    assert other["d"] is shared


def test_the_name_for_another_process_is_an_id_or_an_import_path():
    assert name_elsewhere("CartPole-v1") == "CartPole-v1"
    assert name_elsewhere(CountingEnv) == COUNTING
    assert name_elsewhere(resolve_env(COUNTING)) == COUNTING
    register_env("counting", CountingEnv)
    assert name_elsewhere("counting") == COUNTING
    assert name_elsewhere(resolve_env("counting")) == COUNTING


def test_an_environment_that_no_other_process_can_make_has_no_name_there():
    register_env("inner", lambda context: None)
    local = lambda context: None  # noqa: E731
    for env in (local, partial(CountingEnv, 3), "inner"):
        with pytest.raises(ConfigError) as caught:
            name_elsewhere(env)
        assert caught.value.key == "env"


def test_an_id_registered_by_this_program_is_found_through_the_environments_module(monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", {**gymnasium.registry})
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    gymnasium.register("Counting-v0", entry_point=COUNTING)
    gymnasium.register("Counting-v1", entry_point=CountingEnv)
    assert name_elsewhere("Counting-v0") == "aiorl.testing.envs:Counting-v0"
    assert name_elsewhere("Counting-v1") == "aiorl.testing.envs:Counting-v1"


@pytest.mark.parametrize(
    ("gym_id", "entry_point", "known_by"),
    [
        ("Third-v0", "third_party.envs:Maze", "third_party.envs:Third-v0"),
        ("Own-v0", "third_party.envs:Maze", "my_script:Own-v0"),
        ("Own-v1", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", "my_script:Own-v1"),
    ],
)
def test_other_processes_import_the_module_that_registers_an_id(
    gym_id, entry_point, known_by, monkeypatch, tmp_path
):
    (tmp_path / "third_party").mkdir()
    package = "import gymnasium\ngymnasium.register('Third-v0', 'third_party.envs:Maze')\n"
    (tmp_path / "third_party" / "__init__.py").write_text(package)
    (tmp_path / "third_party" / "envs.py").write_text("class Maze: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("aiorl.env.registry.main_module_name", lambda: "my_script")
    monkeypatch.setitem(gymnasium.registry, gym_id, EnvSpec(gym_id, entry_point))
    assert name_elsewhere(gym_id) == known_by


@pytest.mark.parametrize("env", [lambda: "made", "math:factory"])
def test_a_function_without_parameters_makes_environments(env, monkeypatch):
    monkeypatch.setattr("math.factory", lambda: "made", raising=False)
    assert resolve_env(env)(EnvContext()) == "made"
    with pytest.raises(ConfigError, match="'size'"):
        resolve_env(env)(EnvContext({"size": 3}))
