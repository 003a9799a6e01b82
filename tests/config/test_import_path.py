from __future__ import annotations

import math

import pytest

from aiorl.config.import_path import import_object
from aiorl.errors import ConfigError


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
