from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.preprocessors import preprocessor_for
from aiorl.env.checks import (
    NestedCheck,
    ObservationCheck,
    as_reward,
    check_rewards,
    raise_env_fault,
)
from aiorl.errors import BadObservationError, BadRewardError, BatchError, EnvError, described


def test_the_first_row_at_fault_is_named_with_its_own_index_and_step():
    check = ObservationCheck("maze", spaces.Box(-1, 1, (2,), np.float32))
    obs = np.zeros((4, 2), np.float32)
    check.check_values(obs, lambda row: 0)
    obs[2, 1] = -np.inf
    with pytest.raises(BadObservationError, match="-inf") as caught:
        check.check_values(obs, lambda row: 10 + row)
    assert (caught.value.vector_index, caught.value.step) == (2, 12)
    with pytest.raises(BadObservationError) as caught:
        check.check_values(obs, lambda row: 1, lambda row: 5 + row)
    assert caught.value.vector_index == 7


def test_huge_but_finite_numbers_pass_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check = ObservationCheck("big", spaces.Box(-np.inf, np.inf, (2,), np.float32))
        check.check_values(np.full((8, 2), 3e38, np.float32), lambda row: 0)
        check_rewards("big", np.full(8, 1e308), lambda row: 0)


def test_an_observation_outside_its_box_is_reported_once(caplog):
    box = spaces.Box(-1, 1, (2,), np.float32)
    check = ObservationCheck("maze", box)
    for _ in range(20):
        check.check_values(np.full((2, 2), 1.000001, np.float32), int)  # rounding
    assert not caplog.messages
    for _ in range(40):
        check.check_values(np.float32([[0, 0], [0, 7]]), lambda row: 3)
    assert len(caplog.messages) == 1
    assert caplog.records[0].args[:3] == ("maze", 1, 3)
    ObservationCheck("free", spaces.Box(-np.inf, np.inf, (2,), np.float32)).check_values(
        np.full((1, 2), 9.0), int
    )
    assert len(caplog.messages) == 1


NEST = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 2), np.uint8),
        "pair": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (1,))]),
    }
)


def nested(obs):
    return NestedCheck("nested", NEST).coerce(obs, 2, 7)


def test_nested_observations_get_arrays_as_leaves():
    obs = nested({"image": [[1, 2], [3, 4]], "pair": [2, np.array([0.5])], "extra": 1})
    assert list(obs) == ["image", "pair"]
    assert obs["image"].tolist() == [[1, 2], [3, 4]]
    assert isinstance(obs["pair"], tuple)
    assert int(obs["pair"][0]) == 2


@pytest.mark.parametrize(
    "obs",
    [
        {"image": np.zeros((2, 2), np.uint8)},
        3,
        {"image": np.zeros((2, 2), np.uint8), "pair": (1,)},
        {"image": np.zeros((2, 3), np.uint8), "pair": (1, [0.0])},
        {"image": np.zeros((2, 2), np.uint8), "pair": (3, [0.0])},
        {"image": np.zeros((2, 2), np.uint8), "pair": (1, [np.nan])},
    ],
)
def test_a_nested_observation_at_fault_is_named_with_copy_and_step(obs):
    with pytest.raises(BadObservationError) as caught:
        nested(obs)
    assert (caught.value.env_id, caught.value.vector_index, caught.value.step) == ("nested", 2, 7)


def test_spaces_without_arrays_are_not_checked():
    assert NestedCheck("text", spaces.Text(5)).coerce("abc", 0, 0) == "abc"


@pytest.mark.parametrize(
    ("obs", "value"),
    [
        (None, "None"),
        ("0.5", "'0.5'"),
        (b"abc", "b'abc'"),
        (["a", "b", "c"], "'a'"),
        ([None, 1.0, 2.0], "None"),
        ({"x": 1.0}, "'x'"),
        ({1.0, 2.0, 3.0}, "1.0"),
        (len, "len"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_observation_that_is_no_number_is_named_with_its_type(obs, value, is_nested):
    box = spaces.Box(-1.0, 1.0, (3,))
    space = spaces.Dict({"inner": spaces.Tuple([box])}) if is_nested else box
    nested = {"inner": (obs,)} if is_nested else obs
    with pytest.raises(BadObservationError) as caught:
        NestedCheck("Lake", space).coerce(nested, 2, 5)
    assert (caught.value.env_id, caught.value.vector_index, caught.value.step) == ("Lake", 2, 5)
    assert value in str(caught.value)
    assert type(obs).__name__ in str(caught.value)
    preprocessor = preprocessor_for(space)
    with pytest.raises(BatchError, match=re.escape(value)):
        preprocessor.transform_rows([nested])


def test_keys_that_a_dict_space_does_not_have_are_named_once(caplog):
    space = spaces.Dict(
        [("z", spaces.Box(-1.0, 1.0, (1,))), ("a", spaces.Dict({"n": spaces.Discrete(3)}))]
    )
    check = NestedCheck("Lake", space)
    for step in range(3):
        obs = {"z": np.zeros(1, np.float32), "time": 3, "a": {"n": 1, "action_mask": [1, 1, 0]}}
        coerced = check.coerce(obs, 0, step)
        assert list(coerced) == ["z", "a"]
        assert list(coerced["a"]) == ["n"]
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == 2
    assert sum("'time'" in text for text in texts) == 1
    assert sum("'action_mask'" in text for text in texts) == 1
    assert all("Lake" in text for text in texts)
    caplog.clear()
    NestedCheck("Lake", space).coerce({"a": {"n": 1}, "z": np.zeros(1, np.float32)}, 0, 0)
    assert not caplog.records


def _refuses(values):
    assert len(values) == 3


def test_an_exception_without_text_is_reported_with_the_failing_line():
    try:
        _refuses([1, 2])
    except AssertionError as error:
        caught = AssertionError().with_traceback(error.__traceback__)
    with pytest.raises(EnvError) as reported:
        raise_env_fault("env", "step", caught, index=1, step=7)
    message = reported.value.message
    assert "AssertionError" in message
    assert "assert len(values) == 3" in message
    assert __file__ in message
    assert "_refuses" in message


class Wordless(Exception):
    """Its text fails."""

    def __str__(self) -> str:
        return self.words


def test_an_exception_whose_text_fails_is_reported_with_the_failing_line():
    with pytest.raises(Wordless) as caught:
        raise Wordless
    text = described(caught.value)
    assert text.startswith("Wordless at ")
    assert text.endswith("raise Wordless")


def test_an_exception_with_text_is_reported_with_its_text():
    with pytest.raises(EnvError) as reported:
        raise_env_fault("env", "step", KeyError("speed"), index=1, step=7)
    assert reported.value.message == "step raised KeyError: 'speed'"
    assert described(ValueError()) == "ValueError"


@pytest.mark.parametrize("reward", [np.array([1.0, 2.0]), [1, 2], (0.5, 0.5, 0.5)])
def test_a_vector_of_rewards_is_refused_with_the_wrapper_that_weighs_it(reward):
    with pytest.raises(BadRewardError, match="LinearReward"):
        as_reward(reward, "env", 0, 1)


@pytest.mark.parametrize("reward", ["1.0", None, {}, np.nan])
def test_other_wrong_rewards_are_refused_without_that_wrapper(reward):
    with pytest.raises(BadRewardError) as caught:
        as_reward(reward, "env", 0, 1)
    assert "LinearReward" not in str(caught.value)
