"""What the trainers of these tests share."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

_kept: dict[str, Any] = {}


# of a module, not the session: tests elsewhere make a network's export fail, and that must not be kept
@pytest.fixture(scope="module", autouse=True)
def exported_once() -> Iterator[None]:
    """Networks of one kind have one acting graph, weights or not: a trainer takes that of another before it."""
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
