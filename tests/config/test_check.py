from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from aiorl.config.check import plain_error
from aiorl.config.key import all_keys, key, reason_unsupported
from aiorl.config.reference import render_markdown, render_text
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError


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


OTHER_VALUES = {
    "evaluation_interval": 5,
    "evaluation_num_episodes": 5,
    "evaluation_config": {"explore": False},
    "num_gpus_per_worker": 0.5,
    "input": {"sampler": 0.5, "/data": 0.5},
    "input_evaluation": ["simulation"],
    "postprocess_inputs": True,
    "shuffle_buffer_size": 10,
    "output": "logdir",
    "output_compress_columns": [],
    "output_max_file_size": 1000,
}
UNSUPPORTED = {name: reason_unsupported(field) for name, field in all_keys(CommonConfig) if reason_unsupported(field)}


@pytest.mark.parametrize("dotted", sorted(UNSUPPORTED))
def test_a_key_that_nothing_obeys_yet_is_refused_rather_than_ignored(dotted: str) -> None:
    group, _, name = dotted.rpartition(".")
    value = OTHER_VALUES[dotted]
    with pytest.raises(ConfigError) as caught:
        CommonConfig.from_mapping({group: {name: value}} if group else {name: value})
    assert caught.value.key == dotted
    assert f"{dotted} can only be" in str(caught.value)
    assert UNSUPPORTED[dotted] in str(caught.value)


def test_the_defaults_themselves_are_taken_when_said() -> None:
    CommonConfig.from_mapping(CommonConfig().to_dict())


def test_the_reference_and_the_help_say_what_is_not_supported_and_why() -> None:
    for text in (render_markdown(), render_text(CommonConfig)):
        for reason in UNSUPPORTED.values():
            assert f"*Only the default for now: {reason}.*" in text
