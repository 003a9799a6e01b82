"""Where a run listens, whom it admits, and what it opens and writes is said by its user alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from aiorl.config import layers
from aiorl.config.files import read_with_owners, strangers
from aiorl.config.key import all_keys, decides_place, fact_of
from aiorl.config.layers import load_config
from aiorl.config.schema import CommonConfig
from aiorl.config.yaml_text import parse_yaml
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.registry import config_class

STRANGER = 12345
PLACE = {
    "run_dir",
    "resume",
    "init_from",
    "bind",
    "advertise",
    "keys",
    "insecure",
    "web",
    "client_port",
    "allow_origin",
    "output",
    "monitor",
    "loggers",
    "compilation_cache",
    "extra_python_environs_for_driver",
    "extra_python_environs_for_worker",
}
THEIRS = {
    "bind": "tcp://0.0.0.0:5557",
    "insecure": True,
    "advertise": "theirs",
    "keys": "/theirs",
    "web": "0.0.0.0:80",
    "client_port": 81,
    "allow_origin": ["https://theirs.example"],
    "output": "/theirs",
    "output_max_file_size": 7,
    "monitor": True,
    "loggers": ["wandb"],
    "init_from": "/theirs",
    "compilation_cache": "/theirs",
    "evaluation_config": {"output": "/theirs", "horizon": 7},
    "extra_python_environs_for_driver": {"LD_PRELOAD": "/theirs.so"},
    "extra_python_environs_for_worker": {"PYTHONPATH": "/theirs"},
    "env": "CartPole-v1",
    "gamma": 0.5,
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_each_key_of_runs_and_hosts_decides_whether_it_is_the_users_alone(algo: str) -> None:
    keys = all_keys(config_class(algo))
    places = {name for name, field in keys.items() if decides_place(field)}
    assert places == PLACE, "a new key of this kind also belongs into docs/security.md"
    groups = ("Run", "Workers and hosts", "Transport", "Resources", "Reports", "Offline data")
    undecided = [name for name, field in keys.items() if decides_place(field) is None]
    assert [name for name in undecided if fact_of(keys[name], "group") in groups] == []


def run_of(place: Path, owner: int) -> Path:
    (place / "config.yaml").write_text(yaml.safe_dump(THEIRS))
    os.chown(place / "config.yaml", owner, -1)
    return place


@needs_root
@pytest.mark.parametrize("whose", ["file", "directory"])
def test_a_resumed_run_of_another_user_does_not_say_where_it_listens_and_writes(
    tmp_path: Path, whose: str
) -> None:
    run_of(tmp_path, STRANGER if whose == "file" else 0)
    if whose == "directory":
        os.chown(tmp_path, STRANGER, -1)
    warnings: list[str] = []
    config = load_config(
        config_class, overrides={"resume": str(tmp_path), "web": 8265}, warn=warnings.append
    )
    defaults = CommonConfig()
    for name in PLACE - {"run_dir", "resume", "web"}:
        assert getattr(config, name) == getattr(defaults, name), name
    assert (config.web, config.run_dir, config.gamma) == (8265, str(tmp_path), 0.5)
    assert config.evaluation_config == {"horizon": 7}
    assert config.output_max_file_size == defaults.output_max_file_size
    text = warnings[-1]
    assert str(STRANGER) in text
    left_out = THEIRS.keys() & PLACE
    assert all(f"\n  {name}: {THEIRS[name]!r}" in text for name in left_out)
    assert "evaluation_config.output" in text


@needs_root
def test_a_run_of_root_continues_as_it_was_and_its_code_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, 0)
    content = {**THEIRS, "env": "m:E"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    warnings: list[str] = []
    config = load_config(config_class, overrides={"resume": str(tmp_path)}, warn=warnings.append)
    for name in ("bind", "output", "monitor", "keys", "web", "client_port"):
        assert getattr(config, name) == THEIRS[name], name
    assert len(warnings) == 1
    assert "  env: 'm:E'" in warnings[0].splitlines()


def swap_when_parsed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this user's directory in the place of another user's as soon as the content of a file was
    read.
    """

    def parse(path: Path, content: bytes) -> tuple[dict[str, object], dict[str, int]]:
        if path.parent == place and not place.is_symlink():
            place.rename(place.with_name("former"))
            place.symlink_to(place.with_name("mine"))
        return parse_yaml(path, content)

    monkeypatch.setattr(layers, "parse_yaml", parse)


@needs_root
@pytest.mark.parametrize("way", ["resume", "file", "from_file"])
def test_a_file_that_is_replaced_after_it_was_read_still_belongs_to_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name in ("theirs", "mine"):
        (tmp_path / name).mkdir()
    place = run_of(tmp_path / "theirs", STRANGER)
    run_of(tmp_path / "mine", 0)
    swap_when_parsed(place, monkeypatch)
    warnings: list[str] = []
    if way == "resume":
        config = load_config(config_class, overrides={"resume": str(place)}, warn=warnings.append)
    elif way == "file":
        config = load_config(config_class, file=place / "config.yaml", warn=warnings.append)
    else:
        config = config_class("ppo").from_file(place / "config.yaml")
    assert place.is_symlink()
    assert (config.bind, config.output) == (CommonConfig().bind, None)


def test_ones_own_run_continues_as_it_was(tmp_path: Path) -> None:
    run_of(tmp_path, os.getuid())
    warnings: list[str] = []
    config = load_config(config_class, overrides={"resume": str(tmp_path)}, warn=warnings.append)
    assert warnings == []
    assert (config.bind, config.output, config.monitor) == (THEIRS["bind"], THEIRS["output"], True)


@needs_root
@pytest.mark.parametrize(("owner", "listens"), [(STRANGER, False), (0, True)])
def test_a_config_file_says_it_only_if_it_is_the_users_or_the_administrators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, listens: bool
) -> None:
    file = run_of(tmp_path, owner) / "config.yaml"
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    warnings: list[str] = []
    config = load_config(
        config_class, file=file, overrides={"output": "mine"}, warn=warnings.append
    )
    assert (config.bind == THEIRS["bind"]) == listens
    assert (config.gamma, config.output) == (0.5, "mine")
    from_file = config_class("ppo").from_file(file)
    assert (from_file.bind == THEIRS["bind"]) == listens


@needs_root
def test_owners_are_those_of_the_targets_of_links(tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir()
    os.chown(place, STRANGER, -1)
    run_of(place, STRANGER + 1)
    link = tmp_path / "link"
    link.symlink_to(place)
    _, owners = read_with_owners(link / "config.yaml", max_bytes=1 << 20)
    assert strangers(owners) == {STRANGER: link, STRANGER + 1: link / "config.yaml"}
    (tmp_path / "link.yaml").symlink_to(place / "config.yaml")
    assert config_class("ppo").from_file(tmp_path / "link.yaml").output is None
