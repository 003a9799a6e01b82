"""Packaging: extras, links, and the versions that are tested together."""

from __future__ import annotations

import importlib.util
import itertools
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def extras_of(name: str) -> set[str]:
    """Return an extra and the extras that it includes."""
    extras = {name}
    for requirement in EXTRAS[name]:
        if match := re.match(r"aiorl\[([\w,-]+)\]", requirement):
            extras |= {inner for extra in match[1].split(",") for inner in extras_of(extra)}
    return extras


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_has_every_extra_of_users_and_development_has_all() -> None:
    assert EXTRAS.keys() - extras_of("all") == {"dev", "docs", "fuzz", "learner-gpu", "test"}
    assert extras_of("dev") >= extras_of("all")


def test_a_video_of_cartpole_needs_one_extra() -> None:
    assert "classic-control" in extras_of("video")


def test_extras_that_messages_and_pages_name_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*")]
    texts = [
        path.read_text("utf-8")
        for path in [*pages, *(ROOT / "aiorl").rglob("*.py")]
        if path.is_file()
    ]
    extras = {
        extra
        for text in texts
        for group in re.findall(
            r"""(?:install_command\(["'](\w+)|(?:'\.|aiorl|/src)\[([\w,-]+)\])""", text
        )
        for extra in "".join(group).split(",")
    }
    assert len(extras) > 5
    assert extras <= EXTRAS.keys()


def test_the_first_run_installs_what_training_needs_and_no_more() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^train: \$\(LEARNER\) ", makefile, re.MULTILINE)
    (rule,) = re.findall(r"^\$\(LEARNER\):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert re.findall(r"\.\[(\w+)\]", rule) == ["learner"]


def test_the_versions_tested_together_are_in_the_package_and_within_the_bounds() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "aiorl/constraints.txt").read_text("utf-8").splitlines()
        if line
    )
    requirements = [*PROJECT["dependencies"], *itertools.chain.from_iterable(EXTRAS.values())]
    bounded = [re.match(r"([\w-]+)>=[\d.]+,<(\d+)$", requirement) for requirement in requirements]
    bounds = {
        bound[1]: int(pinned[bound[1]].partition(".")[0]) < int(bound[2])
        for bound in bounded
        if bound
    }
    assert bounds.keys() >= {"numpy", "gymnasium", "keras", "protobuf"}
    assert all(bounds.values()), bounds


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@example.org:owner/aiorl.git", "https://example.org/owner/aiorl"),
        ("https://me:secret@example.org/owner/aiorl.git", "https://example.org/owner/aiorl"),
        ("ssh://git@example.org/owner/aiorl", "https://example.org/owner/aiorl"),
        ("/srv/git/aiorl", ""),
        ("", ""),
    ],
)
def test_urls_are_those_of_the_clones_origin_without_credentials(
    hook: ModuleType, remote: str, address: str
) -> None:
    assert hook.address_of(remote) == address


def test_the_readme_of_a_package_has_only_absolute_links(hook: ModuleType) -> None:
    text = hook.with_absolute_links(
        (ROOT / "README.md").read_text("utf-8"), "https://example.org/aiorl"
    )
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "https://example.org/aiorl/raw/HEAD/docs/learning_curve.png" in links
    assert "https://example.org/aiorl/blob/HEAD/docs/hosts.md" in links
    pictures = re.findall(r'<img src="([^"]+)"', text)
    assert "https://example.org/aiorl/raw/HEAD/docs/watch.png" in pictures
    assert all(picture.startswith("https://") for picture in pictures)
