"""Fixtures shared by tests of runs and trainers."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, Played

import aiorl

_kept: dict[str, Any] = {}


# module scope rather than session scope: tests elsewhere make a network's export fail, and this
# must not be cached
@pytest.fixture(scope="module", autouse=True)
def exported_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reuse acting graphs: networks of one kind have the same graph, regardless of weights."""
    if "tensorflow" not in sys.modules and request.path.parent.name != "trainer":
        yield
        return
    from aiorl.learning.models import export

    describe = export.describe_policy

    def describe_once(model: Any, settings: Mapping[str, Any] | None) -> Any:
        if settings is None or settings["custom_model"] is not None:
            return describe(model, settings)
        facts = [dict(settings), export.make_acting_spec(model).to_dict(), repr(model.layout)]
        key = json.dumps(facts, sort_keys=True, default=repr)
        if key not in _kept:
            _kept[key] = describe(model, settings)
        return copy.deepcopy(_kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "describe_policy", describe_once)
        yield


@pytest.fixture
def played() -> type[Played]:
    """Register an environment in this process only."""
    Played.threads, Played.steps, Played.at_step = set(), 0, {}
    return Played


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that makes small PPO trainers, each with its own run directory; all are
    stopped at the end.
    """
    made: list[Any] = []
    numbers = itertools.count()

    def trainer(env: Any = "CartPole-v1", /, **settings: Any) -> Any:
        run_dir = str(tmp_path / f"run-{next(numbers)}")
        made.append(aiorl.PPOTrainer({**SMALL, "run_dir": run_dir, **settings}, env=env))
        return made[-1]

    yield trainer
    for each in made:
        each.stop()
