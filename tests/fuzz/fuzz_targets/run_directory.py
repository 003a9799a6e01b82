"""Another user's run directory: config and facts are read, or refused with a ConfigError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.code import is_import_path
from aiorl.config.layers import dump_yaml, load_config
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import config_class
from fuzz_targets.folder import Rewritten, make_folder
from fuzz_targets.source import Source

FOLDER = make_folder()
FACTS_FILE, CONFIG_FILE = Rewritten(FOLDER / "run.json"), Rewritten(FOLDER / "config.yaml")
FACTS = b'{"run_id": "run", "address": "tcp://127.0.0.1:5555"}\n'
KEYS = [*sorted(CommonConfig.model_fields), "algo", "env", "no_such_key"]
WORDS = [
    b"env: CartPole-v1\n",
    b"algo: ppo\n",
    b"&a",
    b"*a",
    b"<<: ",
    b"!!python/name:os.system",
    b"- ",
    b"? ",
    b"|\n",
]


def seeds() -> Iterable[bytes]:
    small = b"env: CartPole-v1\nalgo: impala\nnum_workers: 2\nmodel: {fcnet_hiddens: [64, 64]}\n"
    yield _together(FACTS, small)
    yield _together(FACTS, b"x: &a [1, 2]\nenv: *a\nmodel:\n  <<: {a: 1}\n? [a]\n: b\n")
    yield _together(b'{"run_id": 1, "address": [NaN]}', small)
    yield _together(
        FACTS, dump_yaml(config_class("ppo").from_mapping({"env": "CartPole-v1"})).encode()[:900]
    )
    for number in range(0, len(KEYS), 2):
        yield bytes([1, number, 2, 3, number + 1, 7, 1, 2, 3])


def _together(facts: bytes, config: bytes) -> bytes:
    return b"\0" + len(facts).to_bytes(1, "little") + facts + config


def run(data: bytes) -> None:
    source = Source(data)
    if source.below(2):
        facts, config = FACTS, _edited(source)
    else:
        facts, config = source.take(source.byte()), source.rest()
    FACTS_FILE.write(facts)
    CONFIG_FILE.write(config)
    try:
        loaded = load_config(_config_class, overrides={"resume": str(FOLDER)})
        directory = RunDirectory.open(loaded)
    except ConfigError:
        return
    with contextlib.closing(directory) if hasattr(directory, "close") else contextlib.nullcontext():
        assert isinstance(directory.run_id, str)
        assert directory.path == FOLDER


def _config_class(name: str) -> type[CommonConfig]:
    """Accept only aiorl's own algorithms, because a user's own would be imported by name."""
    if is_import_path(name):
        raise ConfigError("not imported", key="algo", value=name)
    return config_class(name)


def _edited(source: Source) -> bytes:
    """Return a valid config after a few changes, in the part of YAML that is JSON."""
    values: dict[str, Any] = {"env": "CartPole-v1", "algo": source.choice(["ppo", "impala"])}
    while not source.is_empty:
        values[source.choice(KEYS)] = source.plain()
    try:
        return json.dumps(values, default=bytes.hex).encode()
    except RecursionError:
        return b""
