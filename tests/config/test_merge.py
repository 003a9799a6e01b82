from __future__ import annotations

from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.config.merge import deep_update, to_plain

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
