"""Inputs found by fuzzing, and inputs that reach all code, run again as tests: none of them may be
a finding.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
from fuzz_targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_the_corpus_is_a_finding(name, caplog):
    caplog.set_level(logging.CRITICAL)
    target = TARGETS[name]
    for seed in target.seeds():
        target.run(seed)
    paths = sorted((CORPUS / name).iterdir())
    assert paths
    for path in paths:
        try:
            target.run(path.read_bytes())
        except Exception as error:
            raise AssertionError(
                f"{path.relative_to(CORPUS)} is a finding: {error!r:.300}"
            ) from error


@pytest.mark.parametrize("name", TARGETS)
def test_traced_modules_exist(name):
    """A renamed module would no longer be traced, without any notice."""
    assert [module for module in TARGETS[name].traced if find_spec(module) is None] == []


def test_the_corpus_is_of_the_targets_and_small():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert sum(target.share for target in TARGETS.values()) == pytest.approx(1)
