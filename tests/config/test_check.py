from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from aiorl.config.check import plain_error
from aiorl.config.key import key


class Inner(BaseModel):
    """A sub-config."""

    sizes: list[int] | None = key(None, "Sizes.", group="A")


class Outer(BaseModel):
    """A config."""

    inner: Inner = key(Inner(), "Keys inside.", group="A")


@pytest.mark.parametrize("wrong", [{"inner": {"sizes": ["x"]}}, {"inner": {"sizes": "x"}}])
def test_a_fault_deep_in_a_union_is_told_at_the_key_the_user_set(wrong: dict) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(wrong)
    error = plain_error(Outer, caught.value)
    assert error.key == "inner.sizes"
    assert str(error) == f"inner.sizes must be a list of whole numbers or null, not {error.value!r}."


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {"sizes": "x" * 1000}})
    assert len(str(plain_error(Outer, caught.value))) < 200
