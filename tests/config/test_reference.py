"""Generated pages: keys, presets, and names of other libraries, with a check of each line."""

from __future__ import annotations

import pydoc
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pages import DOCS, config_page, pages

import aiorl
from aiorl.config.key import all_keys, default_text, key, meanings, render_keys
from aiorl.config.rllib_file import attribute_hint, from_rllib
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import ALGORITHMS, config_class
from aiorl.run.report.results import Result
from aiorl.run.trainer import WorkerSet

PAGES = ["migration_rllib.md", "migration_sb3.md"]
KINDS = [config_class(name) for name in ALGORITHMS]
KEYS = {kind: {*kind.model_fields, *all_keys(kind)} for kind in KINDS}


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(name: str, kind: str) -> Iterator[list[str]]:
    """Yield the cells of each row in the tables of a kind."""
    for table in re.findall(rf"<!-- {kind} \w+ -->\n((?:\|.*\n)+)", page(name)):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


class OtherConfig(CommonConfig):
    """Config of an algorithm."""

    epochs: int = key(3, "Epochs over one batch.", group="Other", unit="epochs")


def test_the_pages_in_docs_match_the_code() -> None:
    """Run `python tests/support/pages.py` after a change."""
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, path.name
    text = config_page()
    for name in all_keys(CommonConfig):
        assert text.count(f"| `{name}` |") == 1, name
    assert "| `model.use_lstm` | `false` | true or false | L |" in text
    assert "| `transport.heartbeat_timeout_s` | `10.0` | a number; s | B |" in text


def test_every_key_of_every_algorithm_has_a_meaning() -> None:
    for kind in KINDS:
        assert all(meanings(kind).values()), kind


def test_the_text_form_shows_an_algorithms_own_keys_and_headings_once() -> None:
    text = render_keys(OtherConfig)
    assert "OTHER\n  epochs: 3\n      Epochs over one batch. (a whole number; epochs)\n" in text
    headings = [line for line in text.splitlines() if line.isupper() and not line.startswith(" ")]
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("name", PAGES)
def test_a_foreign_key_is_refused_with_the_hint_in_its_line(name: str) -> None:
    for row in rows(name, "keys"):
        old = row[0].strip("`")
        names = re.findall(r"`([^`]+)`", row[1])
        assert all(any(word in keys for keys in KEYS.values()) for word in names), old
        if old.partition(".")[0] in ("stop", "replay_buffer_config", "multiagent") and "." in old:
            continue  # tested below and with experiment files
        group, _, last = old.rpartition(".")
        for kind in KINDS:
            if old in KEYS[kind]:  # listed for its different meaning
                assert old in names or not names or names[0] not in KEYS[kind], old
                continue
            with pytest.raises(ConfigError) as caught:
                kind.from_mapping({group: {last: 1}} if group else {old: 1})
            assert "'?" not in str(caught.value)
            ours = next((word for word in names if word in KEYS[kind]), None)
            assert (ours or "") in caught.value.hint or old == "model.max_seq_len"
            assert caught.value.hint, old


def test_keys_of_groups_are_converted_or_explained() -> None:
    for row in rows("migration_rllib.md", "keys"):
        old, names = row[0].strip("`"), re.findall(r"`([^`]+)`", row[1])
        if "." in old:
            ours, why = from_rllib(old)
            assert ours in names if ours else why, old


@pytest.mark.parametrize("name", PAGES)
def test_a_foreign_name_in_python_is_refused_with_the_hint_in_its_line(name: str) -> None:
    objects: dict[str, Any] = {
        "aiorl": aiorl,
        "config": aiorl.PPOConfig(),
        "trainer": object.__new__(aiorl.PPOTrainer),
        "workers": object.__new__(WorkerSet),
    }
    for row in rows(name, "python"):
        of, _, attribute = row[0].strip("`").partition(".")
        if of == "result":  # its items are keys
            with pytest.raises(KeyError) as missing:
                Result()[attribute]
            assert missing.value.args[0].endswith(row[1])
            continue
        assert not hasattr(objects[of], attribute)
        with pytest.raises(AttributeError) as caught:
            getattr(objects[of], attribute)
        assert row[1] == attribute_hint(of, attribute)
        assert str(caught.value).endswith(row[1])


def test_importing_a_name_of_another_library_shows_the_hint() -> None:
    with pytest.raises(ImportError, match=r"aiorl\.PPOConfig\(\)\.to_dict\(\)"):
        from aiorl import COMMON_CONFIG  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="nonsense"):
        from aiorl import nonsense  # type: ignore[attr-defined]  # noqa: F401


def test_a_config_takes_keywords_only_and_says_so() -> None:
    with pytest.raises(TypeError, match=r"PPOConfig\(env='CartPole-v1'\)"):
        aiorl.PPOConfig("CartPole-v1")


@pytest.mark.parametrize("name", PAGES)
def test_the_first_code_of_a_page_runs_and_the_rest_is_python(name: str) -> None:
    first, *examples = re.findall(r"^```python\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL)
    exec(compile(first, name, "exec"), {})
    for code in examples:
        compile(code, name, "exec")


def test_the_page_on_rllib_has_the_real_defaults() -> None:
    fields = all_keys(aiorl.PPOConfig)
    table = page("migration_rllib.md").partition("| Key | RLlib | aiorl |")[2].partition("\n\n")[0]
    lines = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    assert len(lines) > 5
    for name, _, value in lines:
        assert value.strip().startswith(default_text(fields[name.strip(" `")])), name


def test_help_of_a_config_class_shows_each_key_with_its_default_and_meaning() -> None:
    help_text = pydoc.render_doc(aiorl.PPOConfig, renderer=pydoc.plaintext)
    for name, field in all_keys(aiorl.PPOConfig).items():
        assert f"{name}: {default_text(field)}" in help_text
    assert meanings(aiorl.PPOConfig)["gamma"] in help_text
    assert "FieldInfo" not in help_text.splitlines()[3]  # the signature
