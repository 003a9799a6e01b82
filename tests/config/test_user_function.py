"""Functions of the user's are checked before they are needed, and named where they fail."""

from __future__ import annotations

import pytest

from aiorl.config.code import check_takes, named_failures
from aiorl.errors import ConfigError, EnvError


def test_a_function_that_takes_the_arguments_passes() -> None:
    check_takes(lambda agent_id: "a", "f", "key", "an agent")
    check_takes(lambda *, episode, **more: None, "f", "key", episode=None, worker=None)
    check_takes(max, "f", "key", 1)  # does not tell its signature


@pytest.mark.parametrize("function", [lambda: "a", lambda a, b: "a", lambda *, agent: "a"])
def test_a_function_that_does_not_is_refused_with_its_name_and_signature(function) -> None:
    with pytest.raises(ConfigError, match=r"policy_mapping_fn 'm:f' can't be called .* signature is \(") as caught:
        check_takes(function, "policy_mapping_fn 'm:f'", "policy_mapping_fn", "an agent")
    assert caught.value.key == "policy_mapping_fn"


def test_what_a_function_raises_names_it_and_errors_of_aiorl_stay() -> None:
    def speed(info: dict[str, int]) -> int:
        if not info:
            raise EnvError("env", "broken")
        return info["speed"]

    call = named_failures(speed, "callbacks 'm:Own': on_episode_end", "callbacks")
    assert call({"speed": 3}) == 3
    with pytest.raises(ConfigError, match=r"callbacks 'm:Own': on_episode_end failed: KeyError\('speed'\)"):
        call({"pace": 3})
    with pytest.raises(EnvError):
        call({})
