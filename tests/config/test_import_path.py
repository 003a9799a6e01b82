from __future__ import annotations

import gc
import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from weakref import WeakValueDictionary

import pytest
from gymnasium import spaces

from aiorl.config.code import (
    import_module,
    import_object,
    is_import_path,
    main_module_name,
    named,
    plain_code,
    refuse_in_import,
)
from aiorl.errors import ConfigError
from aiorl.testing.envs import CountingEnv


def test_a_path_gives_what_it_names():
    assert import_object("math:sqrt", key="k") is math.sqrt
    assert import_object("collections:OrderedDict.fromkeys", key="k")([1]) == {1: None}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("math", "expected 'package.module:Name'"),
        (":sqrt", "expected 'package.module:Name'"),
        ("no_such_module_at_all:x", "importing 'no_such_module_at_all' failed"),
        ("math:sqr", "Did you mean 'sqrt'"),
    ],
)
def test_any_other_path_is_refused_with_the_setting_and_the_reason(path, says):
    with pytest.raises(ConfigError, match=says) as caught:
        import_object(path, key="model.custom_model")
    assert caught.value.key == "model.custom_model"


class Local:
    def method(self): ...


def test_what_other_processes_can_import_is_named_by_its_path():
    assert named(CountingEnv) == "aiorl.testing.envs:CountingEnv"
    assert named(CountingEnv.step) == "aiorl.testing.envs:CountingEnv.step"
    assert named(Local) == f"{__name__}:Local"


def test_what_only_this_process_knows_has_a_name_as_long_as_something_holds_it(monkeypatch):
    monkeypatch.setattr("aiorl.config.code._local", WeakValueDictionary())
    own = [lambda: 1, lambda: 2, partial(int, 3), Local(), Local().method]
    names = [named(thing) for thing in own]
    assert names == [
        "this-program:lambda", "this-program:lambda#2", "this-program:partial", "this-program:Local",
        "this-program:method",
    ]  # fmt: skip
    assert all(map(is_import_path, names))
    for name, thing in zip(names, own, strict=True):
        assert import_object(name, key="k") is thing
    del own, thing
    gc.collect()
    with pytest.raises(ConfigError) as caught:
        import_object(names[0], key="callbacks")
    assert (caught.value.key, caught.value.value) == ("callbacks", names[0])


def test_a_class_that_hides_behind_anothers_name_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr("aiorl.testing.envs.CountingEnv", None)
    assert named(CountingEnv) == "this-program:CountingEnv"


@pytest.mark.parametrize("plain", [None, "a:b", 3, 1.5, True, {"a": 1}, ["a"], ("a",)])
def test_plain_data_stay_as_they_are(plain):
    assert named(plain) is plain


def test_code_and_spaces_within_settings_become_plain_data():
    space = spaces.Discrete(3)
    given = {"a": (None, space, {"custom_model": CountingEnv})}
    described = plain_code(space)
    assert described["n"] == 3
    assert plain_code(given) == {"a": [None, described, {"custom_model": "aiorl.testing.envs:CountingEnv"}]}


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, spec: object = None) -> ModuleType:
    """A script with a class in it, as the program that is run."""
    path = tmp_path / name
    path.write_text("class Own: ...\n")
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = str(path), spec
    exec(compile(path.read_text(), path, "exec"), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.syspath_prepend(str(tmp_path))
    return main


def test_the_script_that_is_run_is_the_module_of_its_name_and_not_run_again(tmp_path, monkeypatch):
    main = script(tmp_path, monkeypatch, "my_training.py")
    assert named(main.Own) == named("__main__:Own") == "my_training:Own"
    assert import_object("my_training:Own", key="k") is main.Own
    assert import_module("my_training") is main
    assert "my_training" not in sys.modules


@pytest.mark.parametrize("name", ["my-training.py", "json.py"])
def test_a_script_that_its_name_does_not_import_is_known_here_alone(tmp_path, monkeypatch, name):
    main = script(tmp_path, monkeypatch, name)
    assert main_module_name() is None
    assert named(main.Own).startswith("this-program:Own")


def test_a_script_that_trains_when_it_is_imported_is_refused_and_told_the_guard(tmp_path, monkeypatch):
    refuse_in_import("trains")
    (tmp_path / "unguarded.py").write_text(
        "from aiorl.config.code import refuse_in_import\nrefuse_in_import('trains')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        import_object("unguarded:Own", key="env")
    assert "__name__" in caught.value.hint
