from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorl.config.layers import Layer, Origins, file_layer, located, merged
from aiorl.errors import ConfigError

values = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)
layers = st.lists(
    st.builds(Layer, st.dictionaries(st.sampled_from("abc"), values, max_size=3), st.sampled_from(["one", "two"])),
    max_size=4,
)


def test_a_later_layer_replaces_values_and_merges_into_mappings() -> None:
    stack = [Layer({"a": {"x": 1, "y": 2}, "b": 3}, "one"), Layer({"a": {"y": 5}, "b": {"z": 6}}, "two")]
    assert merged(stack) == {"a": {"x": 1, "y": 5}, "b": {"z": 6}}
    origins = Origins.of(stack)
    assert [origins.origin_of(key) for key in ("a.x", "a.y", "a", "b.z", "c")] == [
        "one", "two", "one, two", "two", "default"
    ]  # fmt: skip
    assert origins.origin_of("a", has_default=True) == "default, one, two"


def paths(tree: object, prefix: str = "") -> set[str]:
    if not isinstance(tree, dict):
        return {prefix}
    return {path for name, inner in tree.items() for path in paths(inner, f"{prefix}.{name}" if prefix else name)}


@given(layers)
def test_each_value_there_is_has_an_origin_and_nothing_else_has(stack: list[Layer]) -> None:
    assert paths(Origins.of(stack).tree) == paths(merged(stack))


def test_a_file_tells_the_line_of_each_key_as_origin_and_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("lr: 1\nmodel:\n  dim: 3\n", encoding="utf-8")
    stack = [file_layer(file), Layer({"lr": 2})]
    assert Origins.of(stack).origin_of("model.dim") == f"{file}, line 3"
    for key, sentence in (("model.dim", f"{file}, line 3: It is bad."), ("lr", "It is bad.")):
        with pytest.raises(ConfigError) as caught, located(stack):
            raise ConfigError("It is bad.", key=key)
        assert str(caught.value) == sentence
    with pytest.raises(ConfigError, match="No such file"):
        file_layer(tmp_path / "none.yaml")


def test_origins_say_nothing_of_values_so_any_two_are_equal() -> None:
    assert Origins({"a": "one"}) == Origins()
