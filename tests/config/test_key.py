from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from aiorl.config.key import changed, expected, group_of, key, sub_model, unit_of, where_of
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError


class Inner(BaseModel):
    """A sub-config."""


class Outer(BaseModel):
    """A config."""

    inner: Inner = key(Inner(), "Keys inside.", group="A")
    wait_s: float = key(1.0, "Pause.", group="B", where="workers", unit="s", ge=0)


def test_a_key_remembers_what_the_reference_says_of_it() -> None:
    field = Outer.model_fields["wait_s"]
    assert (group_of(field), where_of(field), unit_of(field)) == ("B", "workers", "s")
    assert field.description == "Pause."
    assert sub_model(field) is None
    assert sub_model(Outer.model_fields["inner"]) is Inner


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "a whole number"),
        (float | None, "a number or null"),
        (bool | Literal["bulk"], "true or false or bulk"),
        (Literal["a", "b"], "a or b"),
        (list[str], "a list of names"),
        (tuple[int, ...], "a list of whole numbers"),
        (list[Literal["a", "b", "c"]], "a list of a, b or c"),
        (list[Literal["a"]] | None, "a list of a or null"),
        (tuple[tuple[int, int], ...] | None, "a list of lists or null"),
        (dict[str, Any], "a mapping"),
        (Inner, "a mapping"),
        (object, "a value"),
    ],
)
def test_types_are_said_in_plain_words(annotation: object, words: str) -> None:
    assert expected(annotation) == words


def test_a_changed_default_keeps_the_rest_of_the_declaration() -> None:
    class Slower(CommonConfig):
        lr: float = changed(CommonConfig, "lr", 1e-6)
        num_workers: int = changed(CommonConfig, "num_workers", 0)

    assert (Slower().lr, CommonConfig().lr) == (1e-6, 1e-4)
    for name in ("lr", "num_workers"):
        ours, theirs = Slower.model_fields[name], CommonConfig.model_fields[name]
        assert (ours.description, group_of(ours), unit_of(ours)) == (
            theirs.description, group_of(theirs), unit_of(theirs),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="num_workers must be greater than or equal to 0"):
        Slower.from_mapping({"num_workers": -1})
