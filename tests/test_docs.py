"""Checks of the documentation: links, make targets, commands, file names, protocol fields, config
keys.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import aiorl
import aiorl.algorithms
from aiorl.config.layers import load_config
from aiorl.keys import parse_key_args
from aiorl.learner import parse_learner_args
from aiorl.learning.algorithms.registry import config_class
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.messages import Hello
from aiorl.net.wire.schema import MESSAGE_TYPES
from aiorl.worker import parse_worker_args

ROOT = Path(__file__).parents[1]
GENERATED = {"docs/config.md", "docs/presets.md", "docs/requirements.md", "docs/results.md"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [name for page in PAGES if (name := str(page.relative_to(ROOT))) != "docs/requirements.md"]
ALGORITHM_PAGES = [name for name in NAMES if name.startswith("docs/algorithms/")]
LANGUAGES = {
    "sh",
    "python",
    "python file",
    "yaml",
    "json",
    "text",
    "javascript",
    "cpp",
    "csharp",
    "gdscript",
    "nginx",
}
"""Languages of blocks: commands are parsed here, Python runs in tests/examples/test_pages.py, the
others are shown."""

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_MAKE = re.compile(r"^(?:make) ([a-z-]+)")
_MODULE = re.compile(r"^(?:\S*/)?python3? -m (aiorl\S*|benchmarks\S*)")
_PROGRAM = re.compile(r"^aiorl ([a-z]+)")
_COMMAND = re.compile(f"{_MODULE.pattern}|{_PROGRAM.pattern}")
_FILE = re.compile(r"[\w./-]+\.(?:py|md|sh|sbatch|svg|png)")
_PLACEHOLDERS = {
    "HOST:PORT": "learner-host:5557",
    "ADDRESS": "tcp://learner-host:5557",
    "NAME": "ppo",
    " N ": " 2 ",
    "$seed": "1",
}
_REDIRECTION = re.compile(r"\s+(?:\d?>>?|\|).*$")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands_of(name: str) -> Iterator[str]:
    """Yield all shell commands of a page: the lines of its sh blocks, and the code in backticks."""
    text = text_of(name)
    for language, block in _FENCE.findall(text):
        if language == "sh":
            yield from (
                line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()
            )
    for code in _INLINE.findall(_FENCE.sub("", text)):
        yield " ".join(code.split())


def words_of(command: str) -> list[str]:
    match = _PROGRAM.match(command)
    if match:
        module = "learner" if match[1] == "train" else match[1]
        command = f"python -m aiorl.{module}{command[match.end() :]}"
    for placeholder, value in _PLACEHOLDERS.items():
        command = f"{command} ".replace(placeholder, value).strip()
    return shlex.split(_REDIRECTION.sub("", command), comments=True)


def module_commands() -> list[tuple[str, str]]:
    return [
        (name, command)
        for name in NAMES
        for command in commands_of(name)
        if _COMMAND.match(command)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_relative_link_has_a_target(name: str) -> None:
    for target in _LINK.findall(_FENCE.sub("", text_of(name))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
            }


@pytest.mark.parametrize("name", NAMES)
def test_every_make_target_named_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    for command in commands_of(name):
        match = _MAKE.match(command)
        if match:
            assert match[1] in targets, f"{name}: {command}"


def test_make_help_lists_the_first_commands_of_the_readme() -> None:
    first = next(
        block for language, block in _FENCE.findall(text_of("README.md")) if language == "sh"
    )
    assert [line.split()[1] for line in first.splitlines()] == ["train", "test", "help"]


@pytest.mark.parametrize(("name", "command"), module_commands())
def test_every_aiorl_command_line_is_valid(name: str, command: str) -> None:
    words = words_of(command)
    module, arguments = words[2], words[3:]
    if module == "aiorl.learner":
        check_learner(arguments)
    elif module == "aiorl.worker":
        if arguments:
            assert parse_worker_args(arguments).connect[0].startswith(("tcp://", "run:"))
    elif module == "aiorl.keys":
        if arguments:
            assert parse_key_args(arguments)[0]
    else:
        assert importlib.util.find_spec(module) is not None


def check_learner(arguments: list[str]) -> None:
    """Check that the options are known and their values valid, without looking for users' files."""
    args = parse_learner_args(arguments)
    overrides = {key: value for key, value in args.overrides.items() if key != "resume"}
    if (
        args.config_file is not None
        or args.help_config
        or args.help_presets
        or "resume" in args.overrides
        or not arguments
    ):
        overrides.setdefault("env", "CartPole-v1")
    assert load_config(config_class, overrides=overrides).env


@pytest.mark.parametrize(
    "name",
    [
        "docs/architecture.md",
        "docs/protocol.md",
        "docs/security.md",
        "CONTRIBUTING.md",
        *ALGORITHM_PAGES,
    ],
)
def test_every_file_named_exists(name: str) -> None:
    for code in _INLINE.findall(_FENCE.sub("", text_of(name))):
        if "/" in code and _FILE.fullmatch(code):
            assert (ROOT / code).is_file(), f"{name}: {code}"
        elif code.endswith("/") and code.startswith(("aiorl", "tests", "examples", "docs")):
            assert (ROOT / code).is_dir(), f"{name}: {code}"


def test_every_key_named_in_the_documentation_exists() -> None:
    keys: set[str] = set()
    for algo in ("ppo", "impala"):
        fields = config_class(algo).model_fields
        keys |= fields.keys()
        for group in ("model", "transport", "multiagent"):
            annotation = fields[group].annotation
            keys |= {f"{group}.{key}" for key in annotation.model_fields}
    for name in NAMES:
        # they name keys of other libraries, or former keys
        if "migration" in name or name == "CHANGELOG.md":
            continue
        for code in _INLINE.findall(_FENCE.sub("", text_of(name))):
            if re.fullmatch(r"(?:model|transport|multiagent)\.[a-z_]+", code):
                assert code in keys, f"{name}: {code}"


def test_the_protocol_page_has_every_message_with_every_field() -> None:
    rows = {
        match[1]: line
        for line in text_of("docs/protocol.md").splitlines()
        if (match := re.match(r"\| `([a-z_]+)` \| `", line))
    }
    assert rows.keys() == MESSAGE_TYPES.keys()
    for kind in MESSAGE_TYPES.values():
        for field in kind.scalars.keys() | kind.arrays.keys():
            assert f"`{field}`" in rows[kind.name], f"{kind.name}.{field}"


def test_the_hello_on_its_page_decodes() -> None:
    dump = next(
        block
        for language, block in _FENCE.findall(text_of("docs/wire_format.md"))
        if language == "text"
    )
    assert decode([bytes.fromhex(dump)]) == Hello(4, "", "w1", "i1", 0, "host1", 42, "")


def test_every_attack_on_its_page_names_tests_that_exist() -> None:
    rows = [
        line
        for line in text_of("docs/maintainers/attacks.md").splitlines()
        if re.match(r"\| (?!Attack \|)", line)
    ]
    assert len(rows) > 30
    for row in rows:
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row.split(" | ")[-1])
        assert tests, f"no test: {row}"
        for module, test in tests:
            assert f"def {test}(" in text_of(f"tests/{module}"), f"{module}::{test}"


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.startswith("docs/") and name not in GENERATED]
)
def test_pages_are_short(name: str) -> None:
    """Tables generated from the code don't count."""
    text = re.sub(r"(<!-- (?:keys|python) \w+ -->\n)(?:\|.*\n)*", "", text_of(name))
    assert len(text.splitlines()) <= 250


def test_no_group_of_the_navigation_is_too_long_to_look_through() -> None:
    groups = [("all", yaml.safe_load(text_of("mkdocs.yml"))["nav"])]
    for title, entries in groups:
        assert len(entries) <= 9, title
        named = [item for entry in entries if isinstance(entry, dict) for item in entry.items()]
        groups += [item for item in named if isinstance(item[1], list)]


@pytest.mark.parametrize("name", NAMES)
def test_every_block_names_its_language(name: str) -> None:
    for language in re.findall(r"^ *```(\w+(?: file)?)?", text_of(name), re.MULTILINE)[::2]:
        assert language in LANGUAGES, f"{name}: {language!r}"


def test_the_reference_has_all_public_names() -> None:
    """Each name of `aiorl` and `aiorl.algorithms` is on a page of docs/api/."""
    text = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    for module in (aiorl, aiorl.algorithms):
        lists = re.findall(rf"<!-- api {re.escape(module.__name__)}: (.*) -->", text)
        listed = {name for names in lists for name in names.split()} | set(
            re.findall(r"\| `(\w+)`", text)
        )
        assert {*module.__all__} - listed - {"__version__", "columns"} == set()


def test_the_changelog_has_the_current_version() -> None:
    from aiorl import __version__

    assert f"## [{__version__}]" in text_of("CHANGELOG.md")
    kinds = re.findall(r"^### (\w+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    versions = re.findall(r"^## \[([\d.]+|Unreleased)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert len(set(versions)) == len(versions)
