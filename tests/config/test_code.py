"""Code that settings name: texts for objects, objects for texts, warnings about code that other
users name.
"""

from __future__ import annotations

import datetime
import enum
import gc
import inspect
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import pytest
import yaml
from gymnasium import spaces

import aiorl
from aiorl.actors.values import pack
from aiorl.config.code import (
    check_takes,
    code_named_in,
    foreign_code,
    import_module,
    import_object,
    is_import_path,
    main_module_name,
    named,
    named_failures,
    plain_code,
    refuse_in_import,
)
from aiorl.config.layers import dump_yaml, load_config, save_config
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import WorkerPart
from aiorl.data.spaces import space_from_dict
from aiorl.errors import ConfigError, EnvError, UnsendableError
from aiorl.learning.algorithms.registry import config_class
from aiorl.testing.envs import CountingEnv


def test_a_path_returns_the_object_that_it_names():
    assert import_object("math:sqrt", key="k") is math.sqrt
    assert import_object("collections:OrderedDict.fromkeys", key="k")([1]) == {1: None}


@pytest.mark.parametrize("path", ["math", ":sqrt", "no_such_module_at_all:x", "math:sqr"])
def test_any_other_path_is_refused_with_the_setting_and_the_nearest_name(path):
    with pytest.raises(ConfigError) as caught:
        import_object(path, key="model.custom_model")
    assert (caught.value.key, caught.value.value) == ("model.custom_model", path)
    assert ("'sqrt'" in caught.value.hint) == (path == "math:sqr")


class Local:
    def method(self): ...


def test_importable_objects_are_named_by_their_paths(monkeypatch):
    assert named(CountingEnv) == "aiorl.testing.envs:CountingEnv"
    assert named(CountingEnv.step) == "aiorl.testing.envs:CountingEnv.step"
    assert named(Local) == f"{__name__}:Local"
    monkeypatch.setattr("aiorl.testing.envs.CountingEnv", None)  # another object has its name
    assert named(CountingEnv) == "this-program:CountingEnv"


def test_a_local_object_has_a_name_as_long_as_it_is_referenced(monkeypatch):
    monkeypatch.setattr("aiorl.config.code._local", WeakValueDictionary())
    things = [lambda: 1, lambda: 2, partial(int, 3), Local(), Local().method]
    names = [named(thing) for thing in things]
    assert names == [
        "this-program:lambda",
        "this-program:lambda#2",
        "this-program:partial",
        "this-program:Local",
        "this-program:method",
    ]
    assert all(map(is_import_path, names))
    for name, thing in zip(names, things, strict=True):
        assert import_object(name, key="k") is thing
    del things, thing
    gc.collect()
    with pytest.raises(ConfigError) as caught:
        import_object(names[0], key="callbacks")
    assert (caught.value.key, caught.value.value) == ("callbacks", names[0])


def test_plain_data_do_not_change_and_code_and_spaces_in_them_become_plain():
    for plain in (None, "a:b", 3, 1.5, True, {"a": 1}, ["a"], ("a",)):
        assert named(plain) is plain
    space = spaces.Discrete(3)
    described = plain_code(space)
    assert described["n"] == 3
    policies = {"a": (None, space, {"custom_model": CountingEnv})}
    assert plain_code(policies) == {
        "a": [None, described, {"custom_model": "aiorl.testing.envs:CountingEnv"}]
    }


PARTS = (
    spaces.Box(0.0, 1.0, (2, 3), np.float32),
    spaces.Discrete(3, start=1),
    spaces.MultiBinary(4),
    spaces.MultiDiscrete([2, 3]),
)
KINDS_OF_SPACES = [
    *PARTS,
    spaces.Tuple(PARTS),
    spaces.Dict(dict(zip("abcd", PARTS, strict=True))),
    spaces.Dict({"in": spaces.Tuple((spaces.Dict({"a": PARTS[0]}), PARTS[1])), "out": PARTS[2]}),
    spaces.Tuple((spaces.Dict({"a": spaces.Tuple(PARTS)}), PARTS[3])),
]


@pytest.mark.parametrize("space", KINDS_OF_SPACES, ids=str)
def test_a_policy_takes_each_kind_of_space_in_each_form_of_its_entry(space):
    box = PARTS[0]
    forms = [
        (None, space, box, {}),
        [None, space, box, None],
        {"observation_space": space, "action_space": box},
    ]
    for form in forms:
        for below in ({}, {"policies": {"a": {"observation_space": spaces.Dict({"z": PARTS[1]})}}}):
            settings = config(multiagent=below).updated({"multiagent": {"policies": {"a": form}}})
            entry = settings.multiagent.policies["a"]
            space_values = entry["observation_space"] if isinstance(entry, dict) else entry[1]
            assert space_from_dict(space_values) == space
            assert config_class("ppo").from_mapping(settings.to_dict()) == settings


def test_a_class_of_spaces_is_a_class():
    assert plain_code({"space": spaces.Dict}) == {"space": "gymnasium.spaces.dict:Dict"}


# Objects in the arguments of environments and wrappers
# ------------------------------------------------------------


class Slotted:
    """Has no weak references."""

    __slots__ = ("place",)


class Level(enum.IntEnum):
    EASY = 1


class Mode(str, enum.Enum):  # noqa: UP042 - its str() is another text
    FAST = "fast"


class Filter(enum.StrEnum):
    NONE = "NoFilter"


class Color(enum.Enum):
    RED = 1


class Size(NamedTuple):
    width: int
    rest: object


class Text(str):
    def __str__(self) -> str:
        return "another"


class Count(int): ...


class Share(float): ...


class Items(list): ...  # type: ignore[type-arg]


OBJECTS = {
    "instance": Local(),
    "slotted": Slotted(),
    "array": np.zeros(3),
    "function": lambda reward: reward,
    "a class": Local,
    "type of numbers": np.int32,
    "dtype": np.dtype("int8"),
    "enumeration": Color.RED,
    "path": Path("data.csv"),
    "date": datetime.date(2020, 1, 1),
    "set": {1, 2},
    "space": spaces.Dict({"b": PARTS[1], "a": PARTS[0]}),
    "mapping of tuples": {(0, 1): "a"},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_used_as_they_are_in_one_process_and_refused_by_key_if_others_need_them(name):
    thing = OBJECTS[name]
    wrapper = {"class": "m:W", "kwargs": {"deep": [{"it": thing}]}}
    settings = {
        "env_config": {"data": {"it": thing}},
        "wrappers": [wrapper],
        "evaluation_config": {"env_config": {"it": thing}, "wrappers": [wrapper]},
    }
    first = config(num_workers=0, **settings)
    for made_config in (
        first,
        first.updated({"lr": 0.5}),
        config_class("ppo").from_mapping(first.to_dict()),
    ):
        assert made_config.env_config["data"]["it"] is thing
        assert made_config.wrappers[0]["kwargs"]["deep"][0]["it"] is thing
        assert made_config.evaluation_config["env_config"]["it"] is thing
        assert made_config.evaluation_config["wrappers"][0]["kwargs"]["deep"][0]["it"] is thing
    plain = yaml.safe_load(dump_yaml(first))
    assert plain["env_config"]["data"]["it"].startswith("this-program:")
    keys = {
        "env_config": "env_config.data.it",
        "wrappers": "wrappers[0].kwargs.deep[0].it",
        "evaluation_config": "evaluation_config.env_config.it",
    }
    for group, key in keys.items():
        for processes in ({"num_workers": 1}, {"num_workers": 0, "evaluation_num_workers": 1}):
            with pytest.raises(ConfigError) as caught:
                config(**{group: settings[group]}, evaluation_interval=1, **processes)
            assert caught.value.key == key
        if group != "evaluation_config":
            with pytest.raises(ConfigError) as caught:
                config(**{group: settings[group]}, num_workers=0, vectorize="remote")
            assert caught.value.key == key


def test_plain_arguments_stay_plain_and_numbers_of_numpy_become_numbers():
    plain = {"a": [1, {"b": None}], "c": 1.5, "d": True, "e": "module:name", "f": {0: "x"}}
    numbers = {"one": np.int64(1), "half": np.float32(0.5), "yes": np.True_, "zero": np.array(0)}
    made_config = config(num_workers=2, env_config={**plain, **numbers})
    assert made_config.to_dict()["env_config"] == {
        **plain,
        "one": 1,
        "half": 0.5,
        "yes": True,
        "zero": 0,
    }
    assert type(made_config.to_dict()["env_config"]["one"]) is int
    assert config(num_workers=0, env_config={"shape": (1, 2)}).updated({"lr": 0.5}).env_config == {
        "shape": (1, 2)
    }


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Size(1, Size(2, Level.EASY)), [1, [2, 1]]),
        (Level.EASY, 1),
        (Mode.FAST, "fast"),
        (np.str_("x"), "x"),
        (Text("x"), "x"),
        (Count(3), 3),
        (Share(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bytes_(b"x"), b"x"),
        (bytearray(b"x"), b"x"),
        (Items([Mode.FAST]), ["fast"]),
        ({Mode.FAST: 1, Level.EASY: 2}, {"fast": 1, 1: 2}),
        ({np.str_("x"): (Level.EASY,)}, {"x": [1]}),
    ],
    ids=repr,
)
def test_kinds_of_texts_numbers_and_tuples_are_plain_data_for_other_processes(
    value: object, plain: object
) -> None:
    wrapper = {"class": "m:W", "kwargs": {"it": value}}
    settings = {
        "env_config": {"it": value},
        "wrappers": [wrapper],
        "evaluation_config": {"env_config": {"it": value}},
    }
    for processes in ({"num_workers": 1}, {"evaluation_num_workers": 1}, {"vectorize": "remote"}):
        made_config = config(
            **{"num_workers": 0, "evaluation_interval": 1, **settings, **processes}
        )
        values = WorkerPart.of(made_config).to_dict()
        groups = (
            values["env_config"],
            values["wrappers"][0]["kwargs"],
            made_config.to_dict()["evaluation_config"]["env_config"],
        )
        for group in groups:
            assert group["it"] == plain
            assert exact_types(group["it"]) == exact_types(plain)
        again = yaml.safe_load(dump_yaml(made_config))["env_config"]["it"]
        assert (again, exact_types(again)) == (plain, exact_types(plain))


def exact_types(value: Any) -> Any:
    """Return the types in a value, of keys, too."""
    if isinstance(value, dict):
        return [type(value), [(type(name), exact_types(inner)) for name, inner in value.items()]]
    return [type(value), list(map(exact_types, value)) if isinstance(value, list) else None]


@pytest.mark.parametrize("member", [Level.EASY, Mode.FAST])
def test_the_same_process_gets_the_members_of_enumerations_themselves(member: enum.Enum) -> None:
    made_config = config(num_workers=0, env_config={"it": member})
    assert WorkerPart.of(made_config).env_config["it"] is member
    assert made_config.updated({"lr": 0.5}).env_config["it"] is member


def test_a_member_in_another_key_of_evaluations_is_its_text() -> None:
    made_config = config(num_workers=0, evaluation_config={"observation_filter": Filter.NONE})
    assert made_config.to_dict()["evaluation_config"] == {"observation_filter": "NoFilter"}
    assert type(made_config.to_dict()["evaluation_config"]["observation_filter"]) is str


def test_a_run_that_was_given_objects_is_resumed_with_new_ones_and_names_missing_ones(
    tmp_path, monkeypatch
):
    first = config(
        num_workers=0, env_config={"table": np.zeros(3), "size": 2}, run_dir=str(tmp_path)
    )
    save_config(first, tmp_path)
    monkeypatch.setattr("aiorl.config.code._local", WeakValueDictionary())  # as in another program
    with pytest.raises(ConfigError) as caught:
        load_config(config_class, overrides={"resume": str(tmp_path)})
    assert caught.value.key == "env_config.table"
    table = np.ones(3)
    again = load_config(
        config_class, overrides={"resume": str(tmp_path), "env_config": {"table": table}}
    )
    assert again.env_config["table"] is table
    assert again.env_config["size"] == 2


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Return a script with a class as the main program."""
    path = tmp_path / name
    path.write_text("class Own: ...\n")
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = str(path), None
    exec(compile(path.read_text(), path, "exec"), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.syspath_prepend(str(tmp_path))
    return main


def test_the_main_script_is_the_module_of_its_name_and_not_run_again(tmp_path, monkeypatch):
    main = script(tmp_path, monkeypatch, "my_training.py")
    assert named(main.Own) == named("__main__:Own") == "my_training:Own"
    assert import_object("my_training:Own", key="k") is main.Own
    assert import_module("my_training") is main
    assert "my_training" not in sys.modules


@pytest.mark.parametrize("name", ["my-training.py", "json.py"])
def test_a_script_that_cannot_be_imported_by_name_is_local(tmp_path, monkeypatch, name):
    main = script(tmp_path, monkeypatch, name)
    assert main_module_name() is None
    assert named(main.Own).startswith("this-program:Own")


@pytest.mark.parametrize(
    ("name", "place"), [("my_code.py", "that you run"), ("my-code.py", "my_script.py")]
)
def test_refused_code_of_a_script_is_sent_to_a_place_that_helps(tmp_path, monkeypatch, name, place):
    script(tmp_path, monkeypatch, name)
    hidden = type("Hidden", (), {"__module__": "__main__"})
    with pytest.raises(ConfigError) as caught:
        aiorl.remote(hidden).remote()
    assert place in caught.value.hint
    with pytest.raises(UnsendableError, match=place):
        pack(hidden)


def test_a_script_that_trains_when_imported_is_refused_with_a_hint_at_the_guard(
    tmp_path, monkeypatch
):
    refuse_in_import("trains")
    code = "from aiorl.config.code import refuse_in_import\nrefuse_in_import('trains')\n"
    (tmp_path / "unguarded.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        import_object("unguarded:Own", key="env")
    assert "__name__" in caught.value.hint


# Code of other users
# --------------------------------------------------------------------------------------------------


def config(**values: object) -> CommonConfig:
    return config_class("ppo").from_mapping({"env": "CartPole-v1", **values})


def test_import_paths_are_found_at_any_depth() -> None:
    deep = {"model": {"custom_model": "deep:down"}}
    values = {
        "env": "their_module:Env",
        "callbacks": {"on_train_result": "their_hooks:f"},
        "multiagent": {
            "policies": {"a": ["their_policy:Mine", None, None, deep]},
            "policy_mapping_fn": "their_map:f",
        },
        "env_config": {"inner": [{"reward": "their_reward:f"}]},
    }
    assert code_named_in(config(**values).to_dict()) == {
        "env": "their_module:Env",
        "callbacks.on_train_result": "their_hooks:f",
        "multiagent.policies.a[0]": "their_policy:Mine",
        "multiagent.policies.a[3].model.custom_model": "deep:down",
        "multiagent.policy_mapping_fn": "their_map:f",
        "env_config.inner[0].reward": "their_reward:f",
    }
    assert code_named_in(config().to_dict()) == {}


def test_configs_of_other_users_are_reported_with_their_owner_and_in_printable_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.yaml").write_text("env: m:E\n")
    save_config(config(env="m:E"), tmp_path)
    warnings: list[str] = []
    load_config(config_class, overrides={"resume": str(tmp_path)}, warn=warnings.append)
    assert warnings == []  # the user's own
    monkeypatch.setattr(os, "getuid", lambda: 123_456)
    values = {"env": "m:E", "callbacks": "x:\x1b[31m", "env_config": {"\x1b]0;": "a:b"}}
    text = foreign_code({0: tmp_path}, values)
    assert "  env: 'm:E'" in text.splitlines()
    assert text.replace("\n", "").isprintable()
    load_config(config_class, file=tmp_path / "theirs.yaml", warn=warnings.append)
    assert str(tmp_path / "theirs.yaml") in warnings[0]
    assert "  env: 'm:E'" in warnings[0]


MAIN = """
import os, sys
os.getuid = lambda: 123456
from aiorl.learner import main
sys.exit(main(["--resume", sys.argv[1]]))
"""


def test_the_warning_comes_before_the_first_import(tmp_path: Path) -> None:
    (tmp_path / "their_module.py").write_text(
        "import sys; sys.stderr.write('imported\\n'); raise ValueError('stop')"
    )
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"env": "CartPole-v1", "algo": "their_module:Theirs"})
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(
        [sys.executable, "-c", MAIN, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    lines = result.stderr.splitlines()
    assert result.returncode == 2, result.stderr
    assert lines.index("  algo: 'their_module:Theirs'") < lines.index("imported")


# Calls of the user's functions
# --------------------------------------------------------------------------------------------------


def test_a_function_that_accepts_the_arguments_passes() -> None:
    check_takes(lambda agent_id: "a", "f", "key", "an agent")
    check_takes(lambda *, episode, **kwargs: None, "f", "key", episode=None, worker=None)
    check_takes(max, "f", "key", 1)  # has no signature


@pytest.mark.parametrize("function", [lambda: "a", lambda a, b: "a", lambda *, agent: "a"])
def test_a_function_that_does_not_accept_them_is_refused_with_its_name_and_signature(
    function,
) -> None:
    with pytest.raises(ConfigError, match="'m:f'") as caught:
        check_takes(function, "policy_mapping_fn 'm:f'", "policy_mapping_fn", "an agent")
    assert caught.value.key == "policy_mapping_fn"
    assert str(inspect.signature(function)) in caught.value.hint


def test_errors_of_a_function_name_it_and_errors_of_aiorl_are_not_changed() -> None:
    def speed(info: dict[str, int]) -> int:
        if not info:
            raise EnvError("env", "broken")
        return info["speed"]

    call = named_failures(speed, "callbacks 'm:Own': on_episode_end", "callbacks")
    assert call({"speed": 3}) == 3
    with pytest.raises(ConfigError, match=r"'m:Own': on_episode_end.*KeyError\('speed'\)"):
        call({"pace": 3})
    with pytest.raises(EnvError):
        call({})
