from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.config.merge import deep_update, put_on_top, to_plain, without_defaults_of

trees = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


def paths(tree: object, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Leaves of a tree by their path: the slow, plain reference."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    return {path: leaf for name, inner in tree.items() for path, leaf in paths(inner, (*prefix, name)).items()}


@settings(deadline=None)
@given(mappings, mappings)
def test_a_deep_update_merges_dicts_and_replaces_all_else(base: dict, changes: dict) -> None:
    kept_base, kept_changes = deepcopy(base), deepcopy(changes)
    merged = deep_update(base, changes)
    found = paths(merged)
    for path, leaf in paths(changes).items():
        if leaf != {}:
            assert found[path] == leaf
    for path, leaf in paths(base).items():
        overruled = any(path[: len(other)] == other or other[: len(path)] == path for other in paths(changes))
        if not overruled:
            assert found[path] == leaf
    assert (base, changes) == (kept_base, kept_changes)


def test_an_empty_dict_onto_a_dict_changes_nothing_and_a_scalar_replaces_it() -> None:
    assert deep_update({"a": {"b": 1}}, {"a": {}}) == {"a": {"b": 1}}
    assert deep_update({"a": {"b": 1}}, {"a": None}) == {"a": None}
    assert deep_update({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_what_was_merged_shares_nothing_with_its_sources() -> None:
    base, changes = {"a": [1]}, {"b": [2]}
    merged = deep_update(base, changes)
    merged["a"].append(3)
    merged["b"].append(3)
    assert (base, changes) == ({"a": [1]}, {"b": [2]})


def test_tuples_become_lists_at_any_depth() -> None:
    assert to_plain({"a": ((1, 2), {"b": (3,)})}) == {"a": [[1, 2], {"b": [3]}]}


def config_with(entry: Any) -> dict[str, Any]:
    return {"lr": 1, "multiagent": {"policies": {"a": entry, "b": None}, "policy_mapping_fn": "m:f"}}


def test_a_key_that_is_put_on_top_goes_before_the_defaults_of_policies_and_not_before_their_own() -> None:
    entry = {"class": "sac", "config": {"gamma": 2}, "defaults": {"lr": 3, "gamma": 4, "model": {"x": 5, "y": 6}}}
    base = config_with(entry)
    kept = deepcopy(base)
    merged = put_on_top(base, {"lr": 7, "gamma": 8, "model": {"y": 9}})
    assert merged["multiagent"]["policies"] == {"a": {**entry, "defaults": {"model": {"x": 5}}}, "b": None}
    assert (merged["lr"], merged["gamma"], merged["model"]) == (7, 8, {"y": 9})
    assert base == kept


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({"class": "dqn"}, {"class": "dqn", "defaults": None}),
        ({"class": "SAC"}, {"class": "SAC", "defaults": {"lr": 3}}),
        ({"config": {"lr": 4}}, {"class": "sac", "defaults": {"lr": 3}, "config": {"lr": 4}}),
        ({"defaults": {"lr": 5}}, {"class": "sac", "defaults": {"lr": 5}}),
        (None, None),
        ("dqn", "dqn"),
    ],
)
def test_defaults_of_a_policy_go_with_its_class(new: Any, expected: Any) -> None:
    base = config_with({"class": "sac", "defaults": {"lr": 3}})
    merged = put_on_top(base, {"multiagent": {"policies": {"a": new}}})
    assert merged["multiagent"]["policies"]["a"] == expected


@pytest.mark.parametrize("group", [None, 3, {}, {"policies": None}, {"policies": [1]}, {"policies": {"a": "sac"}}])
def test_what_holds_no_defaults_is_left_alone(group: Any) -> None:
    config = {"multiagent": group, "lr": 1}
    assert without_defaults_of(config, {"lr": 2, "multiagent": group}) == config
